"""The directory's protocol and its promise.

The promise: after any mix of loss, duplication, reordering and restart of anything, and then quiet, `match` equals
each live worker's true longest resident prefix. A forgotten or expired worker is never matched. The directory is a
soft copy: engines know the truth, and a wrong or missing answer costs time, never correctness.

Writers are publishers, one for each worker. Four answers keep them honest: `TAKEN` (the id has a live owner),
`UNKNOWN` (no live lease: register anew), `STALE` (another epoch is current), `GAP` (a batch is missing before this
one). `GAP` is mended by a snapshot, `UNKNOWN` and `STALE` by registering and a snapshot: who is `STALE` does not know
the current epoch, and learns by registering whether it is still the owner of its id.

Every method raises `DirectoryUnavailable` when the store does not answer within its deadline, and changes nothing
that it cannot confirm: the caller may repeat any call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from shared.errors import ConfigError
from shared.telemetry import Readings
from shared.types import BlockKey, CacheScheme, Epoch, EventBatch, Instance, RouterId, Tier, WorkerId, WorkerInfo

MAX_ROUTERS = 1024
"""Most routers that are counted: bounds what a call of one of them costs. Of more, those that run out first are not."""
MAX_KEYS_PER_CALL = 4096
"""Most keys in one `apply` or `stage`: bounds how long one atomic call holds the store."""

MAX_WORKERS = 4096
"""Most workers of one namespace that anybody looks at: a list in the store may be anybody's."""


def check_scheme(info: WorkerInfo, scheme: CacheScheme) -> None:
    """Refuse a worker whose keys mean something else than this directory's. Raises `ConfigError`."""
    if info.scheme != scheme:
        raise ConfigError(f"worker {info.worker} announces {info.scheme}, but this directory is for {scheme}")


def check_batch(batch: EventBatch) -> None:
    """Refuse a batch that no implementation takes. Raises `ValueError`.

    Resident sets hold one kind of block. A batch of another rank, tier or group would add and remove those blocks in
    the name of the first kind, so that dropping a CPU copy would hide the GPU's.
    """
    check_num_keys(len(batch.stored) + len(batch.removed))
    holder = batch.holder
    if (holder.rank, holder.tier, holder.group) != (0, Tier.GPU, 0):
        raise ValueError(f"rank {holder.rank}, tier {holder.tier}, group {holder.group}: only 0, gpu, 0 are kept")


def check_num_keys(num_keys: int) -> None:
    """Refuse more keys than one call takes. Raises `ValueError`."""
    if num_keys > MAX_KEYS_PER_CALL:
        raise ValueError(f"{num_keys} keys in one call; the limit is {MAX_KEYS_PER_CALL}")


class Reply(StrEnum):
    """A store's answer to a publisher."""

    OK = "OK"
    TAKEN = "TAKEN"
    UNKNOWN = "UNKNOWN"
    STALE = "STALE"
    GAP = "GAP"


@dataclass(slots=True)
class WorkerRecord:
    """One live worker as the store knows it. Nobody modifies one; freezing would triple the time of making it."""

    info: WorkerInfo
    epoch: Epoch
    seq: int
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class RouterPlace:
    """Where one router stands among the live ones, by id. The same for all of them, until one comes or goes."""

    rank: int = 0
    num_routers: int = 1


@dataclass(frozen=True, slots=True)
class Match:
    """How far one worker's resident set covers a chain of keys."""

    instance: Instance
    """Whose blocks these are; a router ignores a match for another life of the worker than it is connected to."""
    num_blocks: int


class Directory(Protocol):
    """Chained block key -> the workers that hold that block now, for one namespace."""

    @property
    def is_resting(self) -> bool:
        """Whether `match` fails at once since the store has missed. The directory's own log tells of both ends."""
        ...

    async def register(self, info: WorkerInfo, epoch: Epoch, lease_s: float) -> Reply:
        """Take the id for `lease_s` with an empty resident set under `epoch`, `seq` 0. Modifies.

        `TAKEN` while a live lease of another `info.instance` holds the id. The same instance may register again, which
        drops what it had published.
        """
        ...

    async def heartbeat(self, worker: WorkerId, epoch: Epoch, seq: int, lease_s: float) -> Reply:
        """Extend the lease. Modifies the lease only.

        `GAP` when the store's last batch is not `seq`, so that a lost last batch is noticed in a quiet system; the
        lease is extended all the same. `STALE` and `UNKNOWN` extend nothing.
        """
        ...

    async def apply(self, batch: EventBatch) -> Reply:
        """Apply one batch, atomically. Modifies on `OK` only.

        A repeat of the last batches is a no-op and `OK`. At most `MAX_KEYS_PER_CALL` keys; more raise `ValueError`.
        """
        ...

    async def stage(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, keys: Sequence[BlockKey]) -> Reply:
        """Add a chunk to the invisible snapshot that will become current under the epoch `snapshot`. Modifies.

        `match` does not see staged keys. A worker has one snapshot in the making: a chunk of another one drops what was
        staged. A staged snapshot that is not committed vanishes with the lease.
        """
        ...

    async def commit(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, num_keys: int) -> Reply:
        """Make the staged snapshot the resident set under its own epoch, `seq` 0, at once. Modifies.

        `num_keys` is the number of distinct keys staged; `GAP` when the store holds another number, in which case the
        staged keys are dropped. A repeat of a commit that took effect is `OK`.
        """
        ...

    async def set_draining(self, worker: WorkerId, epoch: Epoch, is_draining: bool) -> Reply:
        """Mark a worker as one that takes no new requests. Modifies the record only."""
        ...

    async def forget(self, worker: WorkerId, instance: Instance) -> Reply:
        """Drop the lease and all entries of this life of the worker. Modifies; `UNKNOWN` if it is not there."""
        ...

    async def announce_router(self, router: RouterId, lease_s: float) -> RouterPlace:
        """Count a router among the live ones for `lease_s`, and tell its place. Modifies the list of routers only."""
        ...

    async def match(self, keys: Sequence[BlockKey], workers: Iterable[WorkerId]) -> Mapping[WorkerId, Match]:
        """The longest resident prefix of `keys` on each of `workers`. Does not modify.

        Workers without a live lease or without the first block are absent from the answer.
        """
        ...

    async def workers(self) -> list[WorkerRecord]:
        """All workers with a live lease, by id. May reap ids whose lease is gone."""
        ...

    async def resident(self, worker: WorkerId) -> set[BlockKey]:
        """Every key held by one worker; empty if it is not there. For tools and tests: linear in the set."""
        ...

    def expose(self, readings: Readings) -> None:
        """Have what is counted here told as metrics. Modifies `readings`."""
        ...

    async def close(self) -> None:
        """Release connections. The store keeps what it has."""
        ...
