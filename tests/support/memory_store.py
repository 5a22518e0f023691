"""A store in memory that can be flushed and brought back, and is read piece by piece and late, by a feed that fails."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from shared.directory.feed import Entry, EntryId, Position, Standing
from shared.directory.streamed import StreamedDirectory, StreamEntry
from shared.errors import DirectoryUnavailable
from shared.types import BlockKey, CacheScheme, WorkerId

_KEYS_PER_PIECE = 5
_ENTRIES_PER_READ = 3


SavedStore = tuple[dict[WorkerId, Any], dict[WorkerId, deque[StreamEntry]], set[WorkerId]]


class MemoryStore(StreamedDirectory):
    """`StreamedDirectory` that keeps the canaries that a real store has, and can lose and get back what it holds."""

    is_resting = False  # for tests to set

    def __init__(self, scheme: CacheScheme, clock: Callable[[], float], *, max_stream_entries: int = 40) -> None:
        super().__init__(scheme, clock, max_stream_entries=max_stream_entries)
        self.canaries: set[WorkerId] = set()
        """Workers beside whose lease the one reader has left its canary."""

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
        stream = self.worker_to_stream.get(worker, deque())
        while len(stream) > num_kept:
            stream.popleft()


class MemoryFeed:
    """`Feed` over a `MemoryStore`: each call takes a while, some fail, and a scan meets a set that changes."""

    def __init__(self, store: MemoryStore, *, rng: random.Random, longest_delay_s: float = 0.0) -> None:
        self._store = store
        self._rng = rng
        self._longest_delay_s = longest_delay_s
        self._watched: set[WorkerId] = set()
        self.hidden: set[WorkerId] = set()
        """Workers whose part of the store does not answer."""
        self.is_down = False
        self.fault_rate = 0.0
        self.num_scans = 0

    async def look(self, workers: Iterable[WorkerId]) -> dict[WorkerId, Standing]:
        await self._travel()
        found = {}
        for worker in sorted({*workers, *self._store.listed()} - self.hidden):
            is_kept = worker in self._store.canaries or worker not in self._watched
            found[worker] = Standing(self._store.lease(worker), is_kept)
        self._store.canaries |= found.keys()
        self._watched |= found.keys()
        await self._travel()
        return found

    def place(self, worker: WorkerId) -> str:
        return worker[-1]

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
            news: dict[WorkerId, Sequence[Entry]] = {}
            for worker, last in worker_to_entry.items():
                later = [entry for entry in self._store.worker_to_stream.get(worker, ()) if entry.number > int(last)]
                if later:
                    news[worker] = [
                        Entry(EntryId(str(entry.number)), entry.batch) for entry in later[:_ENTRIES_PER_READ]
                    ]
            if news or deadline_s <= asyncio.get_running_loop().time():
                await self._travel()
                return news
            await self._store.written(worker_to_entry, deadline_s)

    async def close(self) -> None:
        self._store.canaries.clear()

    async def _travel(self) -> None:
        """The way of a call or an answer."""
        await asyncio.sleep(self._rng.uniform(0.0, self._longest_delay_s))
        if self.is_down or self._rng.random() < self.fault_rate:
            raise DirectoryUnavailable("the feed is down")
