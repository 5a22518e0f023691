"""The directory in one process's memory: the reference meaning of the protocol, for tests and virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.directory.base import (
    MAX_ROUTERS,
    Match,
    Reply,
    RouterPlace,
    WorkerRecord,
    check_batch,
    check_num_keys,
    check_scheme,
)
from shared.telemetry import Readings
from shared.types import BlockKey, CacheScheme, Epoch, EventBatch, Instance, RouterId, WorkerId, WorkerInfo


@dataclass(slots=True)
class _Entry:
    """One worker's lease and everything that lives by it."""

    info: WorkerInfo
    epoch: Epoch
    expires_at_s: float
    seq: int = 0
    is_draining: bool = False
    resident: set[BlockKey] = field(default_factory=set)
    snapshot: Epoch | None = None
    staged: set[BlockKey] = field(default_factory=set)


class MemoryDirectory:
    """Keeps everything in one dictionary by worker; an entry is dropped by whoever looks at it after its lease.

    Atomic because no method awaits anything. `clock` gives seconds and stands for the store's time.
    """

    def __init__(self, scheme: CacheScheme, clock: Callable[[], float]) -> None:
        self._scheme = scheme
        self._clock = clock
        self._entry_of: dict[WorkerId, _Entry] = {}
        self._router_to_end_s: dict[RouterId, float] = {}

    @property
    def is_resting(self) -> bool:
        return False

    async def register(self, info: WorkerInfo, epoch: Epoch, lease_s: float) -> Reply:
        check_scheme(info, self._scheme)
        entry = self._live(info.worker)
        if entry is not None and entry.info.instance != info.instance:
            return Reply.TAKEN
        self._entry_of[info.worker] = _Entry(info, epoch, self._clock() + lease_s)
        return Reply.OK

    async def heartbeat(self, worker: WorkerId, epoch: Epoch, seq: int, lease_s: float) -> Reply:
        entry = self._live(worker)
        if entry is None:
            return Reply.UNKNOWN
        if entry.epoch != epoch:
            return Reply.STALE
        entry.expires_at_s = self._clock() + lease_s
        return Reply.OK if entry.seq == seq else Reply.GAP

    async def apply(self, batch: EventBatch) -> Reply:
        check_batch(batch)
        entry = self._live(batch.holder.worker)
        if entry is None:
            return Reply.UNKNOWN
        if entry.epoch != batch.holder.epoch:
            return Reply.STALE
        if batch.seq <= entry.seq:
            return Reply.OK
        if batch.seq != entry.seq + 1:
            return Reply.GAP
        entry.seq = batch.seq
        entry.resident.update(batch.stored)
        entry.resident.difference_update(batch.removed)
        self._applied(batch)
        return Reply.OK

    async def stage(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, keys: Sequence[BlockKey]) -> Reply:
        check_num_keys(len(keys))
        entry = self._live(worker)
        if entry is None:
            return Reply.UNKNOWN
        if entry.epoch != epoch:
            return Reply.STALE
        if entry.snapshot != snapshot:
            entry.snapshot, entry.staged = snapshot, set()
        entry.staged.update(keys)
        return Reply.OK

    async def commit(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, num_keys: int) -> Reply:
        entry = self._live(worker)
        if entry is None:
            return Reply.UNKNOWN
        if entry.epoch == snapshot:
            return Reply.OK
        if entry.epoch != epoch:
            return Reply.STALE
        staged = entry.staged if entry.snapshot == snapshot else set()
        entry.snapshot, entry.staged = None, set()
        if len(staged) != num_keys:
            return Reply.GAP
        entry.epoch, entry.seq, entry.resident = snapshot, 0, staged
        return Reply.OK

    async def set_draining(self, worker: WorkerId, epoch: Epoch, is_draining: bool) -> Reply:
        entry = self._live(worker)
        if entry is None:
            return Reply.UNKNOWN
        if entry.epoch != epoch:
            return Reply.STALE
        entry.is_draining = is_draining
        return Reply.OK

    async def forget(self, worker: WorkerId, instance: Instance) -> Reply:
        entry = self._live(worker)
        if entry is None or entry.info.instance != instance:
            return Reply.UNKNOWN
        del self._entry_of[worker]
        return Reply.OK

    async def announce_router(self, router: RouterId, lease_s: float) -> RouterPlace:
        now_s = self._clock()
        self._router_to_end_s[router] = now_s + lease_s
        live = sorted(self._router_to_end_s.items(), key=lambda item: item[1])[-MAX_ROUTERS:]
        self._router_to_end_s = {one: end_s for one, end_s in live if end_s > now_s}
        return RouterPlace(sum(one < router for one in self._router_to_end_s), len(self._router_to_end_s))

    async def match(self, keys: Sequence[BlockKey], workers: Iterable[WorkerId]) -> Mapping[WorkerId, Match]:
        found = {}
        for worker in workers:
            entry = self._live(worker)
            if entry is None:
                continue
            num_blocks = next((depth for depth, key in enumerate(keys) if key not in entry.resident), len(keys))
            if num_blocks:
                found[worker] = Match(entry.info.instance, num_blocks)
        return found

    async def workers(self) -> list[WorkerRecord]:
        live = [entry for worker in sorted(self._entry_of) if (entry := self._live(worker)) is not None]
        return [WorkerRecord(entry.info, entry.epoch, entry.seq, entry.is_draining) for entry in live]

    async def resident(self, worker: WorkerId) -> set[BlockKey]:
        entry = self._live(worker)
        return set() if entry is None else set(entry.resident)

    def expose(self, readings: Readings) -> None:
        """Nothing is counted here."""

    async def close(self) -> None:
        """Nothing to release; what the directory holds stays."""

    def _applied(self, batch: EventBatch) -> None:
        """A batch has taken effect: for whoever keeps streams."""

    def _live(self, worker: WorkerId) -> _Entry | None:
        """The worker's entry; an expired one is dropped."""
        entry = self._entry_of.get(worker)
        if entry is not None and entry.expires_at_s <= self._clock():
            del self._entry_of[worker]
            return None
        return entry
