"""A store in memory that mirrors can follow: the memory directory with event streams, read piece by piece and late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from shared.directory.base import Reply
from shared.directory.feed import Entry, EntryId, Lease, Position
from shared.directory.memory import MemoryDirectory
from shared.errors import DirectoryUnavailable
from shared.types import BlockKey, CacheScheme, Epoch, EventBatch, Holder, Instance, WorkerId, WorkerInfo

_KEYS_PER_PIECE = 5
_ENTRIES_PER_READ = 3


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One entry as the store keeps it."""

    number: int
    batch: EventBatch


SavedStore = tuple[dict[WorkerId, Any], dict[WorkerId, list[StreamEntry]], set[str]]


class MemoryStore(MemoryDirectory):
    """`MemoryDirectory` that keeps the streams, canaries and places that a real store has beside the sets."""

    def __init__(self, scheme: CacheScheme, clock: Callable[[], float], *, max_stream_entries: int = 40) -> None:
        super().__init__(scheme, clock)
        self._max_stream_entries = max_stream_entries
        self._num_entries = 0
        self.worker_to_stream: dict[WorkerId, list[StreamEntry]] = {}
        self.canaries: set[str] = set()
        self.written = asyncio.Event()

    def flush(self) -> None:
        """Come back empty."""
        self._entry_of.clear()
        self.worker_to_stream.clear()
        self.canaries.clear()

    def saved(self) -> SavedStore:
        """All that the store holds, apart from it."""
        return deepcopy(self._entry_of), deepcopy(self.worker_to_stream), set(self.canaries)

    def restore(self, saved: SavedStore) -> None:
        """Come back with what was saved, less what has expired since. Numbers of entries go on, as time does."""
        self._entry_of, self.worker_to_stream, self.canaries = deepcopy(saved)
        for worker in self.listed():
            self.lease(worker)

    def trim(self, worker: WorkerId, num_kept: int) -> None:
        """Keep the last entries of one stream only."""
        stream = self.worker_to_stream.get(worker, [])
        del stream[: max(0, len(stream) - num_kept)]

    async def register(self, info: WorkerInfo, epoch: Epoch, lease_s: float) -> Reply:
        self.lease(info.worker)  # what has expired takes its stream along
        reply = await super().register(info, epoch, lease_s)
        if reply is Reply.OK:
            self._append(EventBatch(Holder(info.worker, epoch), 0, (), ()))
        return reply

    async def apply(self, batch: EventBatch) -> Reply:
        entry = self._live(batch.holder.worker)
        seq_before = entry.seq if entry is not None else 0
        reply = await super().apply(batch)
        if entry is not None and entry.seq > seq_before:
            self._append(batch)
        return reply

    async def commit(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, num_keys: int) -> Reply:
        entry = self._live(worker)
        epoch_before = entry.epoch if entry is not None else None
        reply = await super().commit(worker, epoch, snapshot, num_keys)
        if entry is not None and entry.epoch != epoch_before:
            self._append(EventBatch(Holder(worker, entry.epoch), 0, (), ()))
        return reply

    async def forget(self, worker: WorkerId, instance: Instance) -> Reply:
        reply = await super().forget(worker, instance)
        if reply is Reply.OK:
            self.worker_to_stream.pop(worker, None)
        return reply

    def lease(self, worker: WorkerId) -> Lease | None:
        """The live lease of a worker; a stream goes with it."""
        entry = self._live(worker)
        if entry is None:
            self.worker_to_stream.pop(worker, None)
            return None
        return Lease(entry.info.instance, entry.epoch, entry.seq, entry.expires_at_s - self._clock())

    def listed(self) -> list[WorkerId]:
        return list(self._entry_of)

    def _append(self, batch: EventBatch) -> None:
        self._num_entries += 1
        worker = batch.holder.worker
        self.worker_to_stream.setdefault(worker, []).append(StreamEntry(self._num_entries, batch))
        self.trim(worker, self._max_stream_entries)
        self.written.set()
        self.written = asyncio.Event()


class MemoryFeed:
    """`Feed` over a `MemoryStore`: each call takes a while, some fail, and a scan meets a set that changes."""

    def __init__(self, store: MemoryStore, *, rng: random.Random, longest_delay_s: float = 0.0) -> None:
        self._store = store
        self._rng = rng
        self._longest_delay_s = longest_delay_s
        self._has_beaten = False
        self.is_down = False
        self.fault_rate = 0.0
        self.num_scans = 0

    async def beat(self) -> bool:
        await self._travel()
        is_kept = not self._has_beaten or "reader" in self._store.canaries
        self._store.canaries.add("reader")
        self._has_beaten = True
        return is_kept

    async def leases(self, workers: Iterable[WorkerId]) -> dict[WorkerId, Lease]:
        await self._travel()
        asked = {*workers, *self._store.listed()}
        found = {worker: lease for worker in sorted(asked) if (lease := self._store.lease(worker)) is not None}
        await self._travel()
        return found

    async def position(self, worker: WorkerId) -> Position | None:
        await self._travel()
        lease = self._store.lease(worker)
        stream = self._store.worker_to_stream.get(worker)
        found = None if lease is None else Position(lease, EntryId(str(stream[-1].number if stream else 0)))
        await self._travel()
        return found

    async def scan(self, worker: WorkerId) -> AsyncGenerator[Sequence[BlockKey], None]:
        self.num_scans += 1
        await self._travel()
        left = sorted(await self._store.resident(worker))
        self._rng.shuffle(left)
        while left:
            resident = await self._store.resident(worker)
            piece, left = left[:_KEYS_PER_PIECE], left[_KEYS_PER_PIECE:]
            newcomers = [key for key in sorted(resident) if key not in left and self._rng.random() < 0.1]
            found = [key for key in piece if key in resident] + newcomers
            await self._travel()
            yield found

    async def read(
        self, worker_to_entry: Mapping[WorkerId, EntryId], wait_s: float
    ) -> Mapping[WorkerId, Sequence[Entry]]:
        await self._travel()
        deadline_s = asyncio.get_running_loop().time() + wait_s
        while True:
            written = self._store.written
            news: dict[WorkerId, Sequence[Entry]] = {}
            for worker, last in worker_to_entry.items():
                later = [entry for entry in self._store.worker_to_stream.get(worker, ()) if entry.number > int(last)]
                if later:
                    news[worker] = [
                        Entry(EntryId(str(entry.number)), entry.batch) for entry in later[:_ENTRIES_PER_READ]
                    ]
            patience_s = deadline_s - asyncio.get_running_loop().time()
            if news or patience_s <= 0.0:
                await self._travel()
                return news
            try:
                async with asyncio.timeout(patience_s):
                    await written.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        self._store.canaries.discard("reader")

    async def _travel(self) -> None:
        """The way of a call or an answer."""
        await asyncio.sleep(self._rng.uniform(0.0, self._longest_delay_s))
        if self.is_down or self._rng.random() < self.fault_rate:
            raise DirectoryUnavailable("the feed is down")
