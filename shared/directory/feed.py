"""What a mirror reads of a store, apart from how: leases, resident sets in pieces, and streams of applied batches."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from shared.types import BlockKey, Epoch, EventBatch, Instance, WorkerId

EntryId = NewType("EntryId", str)
"""A place in one worker's event stream."""

MAX_KEYS_PER_PIECE = 1000
"""About how many keys of a resident set are asked for at once: bounds how long one piece holds store and router."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A live lease, and the last batch that the store has applied under it."""

    instance: Instance
    epoch: Epoch
    seq: int
    ttl_s: float
    """Until the lease runs out if it is not extended, by the store's time."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a look at one worker found."""

    lease: Lease | None
    is_canary_kept: bool
    """False where the store has lost what this reader left beside the lease with its last look, or takes nothing now:
    then it may have lost the lease, too."""


@dataclass(frozen=True, slots=True)
class Position:
    """A worker's lease and the end of its stream, at one moment."""

    lease: Lease
    last_entry: EntryId


@dataclass(slots=True)
class Entry:
    """One entry of a stream. Sequence number 0 tells that everything before it is void. Nobody modifies one."""

    entry: EntryId
    batch: EventBatch | None
    """`None` for an entry that is malformed."""


class Feed(Protocol):
    """The reading side of a store. All that asks raises `DirectoryUnavailable` where no answer comes in time."""

    async def look(self, workers: Iterable[WorkerId]) -> dict[WorkerId, Standing]:
        """How `workers` stand, and all others that the store lists. Modifies this reader's own canaries only.

        Absent are workers whose part of the store does not answer.
        """
        ...

    def place(self, worker: WorkerId) -> str:
        """What a worker's stream can be read together with: streams of other places take reads of their own.

        Stays the same once the worker's position is known.
        """
        ...

    async def position(self, worker: WorkerId) -> Position | None:
        """Where a worker stands; `None` without a lease, or with values that are malformed."""
        ...

    def scan(self, worker: WorkerId) -> AsyncGenerator[Sequence[BlockKey], None]:
        """A worker's resident set in pieces.

        A key that stays resident from beginning to end comes at least once; one that comes or goes meanwhile may or may
        not.
        """
        ...

    async def read(
        self, worker_to_entry: Mapping[WorkerId, EntryId], wait_s: float
    ) -> Mapping[WorkerId, Sequence[Entry]]:
        """A bounded number of entries after the given ones, in order; workers without news are absent.

        All of one place.

        Waits up to `wait_s` where there is nothing new at all. A stream that cannot be read gives one malformed entry.
        """
        ...

    async def close(self) -> None:
        """Take the canaries away, if the store answers."""
        ...
