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
class Position:
    """A worker's lease and the end of its stream, at one moment."""

    lease: Lease
    last_entry: EntryId


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream. Sequence number 0 tells that everything before it is void."""

    entry: EntryId
    batch: EventBatch | None
    """`None` for an entry that is malformed."""


class Feed(Protocol):
    """The reading side of a store. Every method raises `DirectoryUnavailable` where it does not answer in time."""

    async def beat(self) -> bool:
        """Extend the lease of this reader's own canary. Modifies it only.

        False where the store has lost the canary since the last beat: it may have lost anything.
        """
        ...

    async def leases(self, workers: Iterable[WorkerId]) -> dict[WorkerId, Lease]:
        """The live leases of all workers that the store lists, and of `workers`."""
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

        Waits up to `wait_s` where there is nothing new at all. A stream that cannot be read gives one malformed entry.
        """
        ...

    async def close(self) -> None:
        """Take the canary away, if the store answers."""
        ...
