"""A store in one process's memory that mirrors can follow: the memory directory with streams, for virtual time."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.directory.base import Reply
from shared.directory.feed import MAX_KEYS_PER_PIECE, Entry, EntryId, Lease, Position, Standing
from shared.directory.memory import MemoryDirectory
from shared.types import BlockKey, CacheScheme, Epoch, EventBatch, Holder, Instance, WorkerId, WorkerInfo

_SLACK_S = 1e-9
"""What is due this soon is due now: sums of times are not exact."""


@dataclass(slots=True)
class StreamEntry:
    """One entry as the store keeps it. Nobody modifies one."""

    number: int
    batch: EventBatch
    written_at_s: float


class StreamedDirectory(MemoryDirectory):
    """`MemoryDirectory` that keeps, for each worker, the stream of applied batches that a real store has.

    A stream lives as long as the lease that it belongs to, and keeps its last entries only. Numbers of entries grow
    over all workers.
    """

    def __init__(self, scheme: CacheScheme, clock: Callable[[], float], *, max_stream_entries: int = 1024) -> None:
        super().__init__(scheme, clock)
        self._max_stream_entries = max_stream_entries
        self._num_entries = 0
        self.worker_to_stream: dict[WorkerId, deque[StreamEntry]] = {}
        self._worker_to_waiters: dict[WorkerId, list[tuple[float, asyncio.Future[None]]]] = {}
        """Who waits, and how long after an entry was added it is to be told."""

    async def register(self, info: WorkerInfo, epoch: Epoch, lease_s: float) -> Reply:
        self.lease(info.worker)  # what has expired takes its stream along
        reply = await super().register(info, epoch, lease_s)
        if reply is Reply.OK:
            self._applied(EventBatch(Holder(info.worker, epoch), 0, (), ()))
        return reply

    async def commit(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, num_keys: int) -> Reply:
        entry = self._live(worker)
        epoch_before = entry.epoch if entry is not None else None
        reply = await super().commit(worker, epoch, snapshot, num_keys)
        if entry is not None and entry.epoch != epoch_before:
            self._applied(EventBatch(Holder(worker, entry.epoch), 0, (), ()))
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
        """Workers whose lease nobody has found expired so far."""
        return list(self._entry_of)

    async def written(self, workers: Iterable[WorkerId], until_s: float, *, lag_s: float = 0.0) -> None:
        """Wait until `lag_s` after something is added to one of these streams, but no longer than until then.

        That may be never.
        """
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        waiting = lag_s, waiter
        lists = [self._worker_to_waiters.setdefault(worker, []) for worker in workers]
        for waiters in lists:
            waiters.append(waiting)
        timer = loop.call_at(until_s, _wake, waiter) if until_s < math.inf else None
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            for waiters in lists:
                waiters.remove(waiting)

    def _applied(self, batch: EventBatch) -> None:
        self._num_entries += 1
        worker = batch.holder.worker
        stream = self.worker_to_stream.get(worker)
        if stream is None:
            stream = self.worker_to_stream[worker] = deque(maxlen=self._max_stream_entries)
        stream.append(StreamEntry(self._num_entries, batch, self._clock()))
        for lag_s, waiter in self._worker_to_waiters.get(worker, ()):
            if lag_s:
                asyncio.get_running_loop().call_later(lag_s, _wake, waiter)
            else:
                _wake(waiter)


class StreamedFeed:
    """`Feed` over a `StreamedDirectory`: it never fails, and what is written can be read `lag_s` later.

    Every worker is a place of its own, so that a reader wakes up for news alone.
    """

    def __init__(self, store: StreamedDirectory, *, lag_s: float = 0.0) -> None:
        self._store = store
        self._lag_s = lag_s

    async def look(self, workers: Iterable[WorkerId]) -> dict[WorkerId, Standing]:
        asked = sorted({*workers, *self._store.listed()})
        return {worker: Standing(self._store.lease(worker), is_canary_kept=True) for worker in asked}

    def place(self, worker: WorkerId) -> str:
        return worker

    async def position(self, worker: WorkerId) -> Position | None:
        lease = self._store.lease(worker)
        if lease is None:
            return None
        stream = self._store.worker_to_stream.get(worker)
        return Position(lease, EntryId(str(stream[-1].number if stream else 0)))

    async def scan(self, worker: WorkerId) -> AsyncGenerator[Sequence[BlockKey], None]:
        resident = sorted(await self._store.resident(worker))
        for start in range(0, len(resident), MAX_KEYS_PER_PIECE):
            yield resident[start : start + MAX_KEYS_PER_PIECE]

    async def read(
        self, worker_to_entry: Mapping[WorkerId, EntryId], wait_s: float
    ) -> Mapping[WorkerId, Sequence[Entry]]:
        clock = asyncio.get_running_loop().time
        until_s = clock() + wait_s
        while True:
            now_s = clock()
            news: dict[WorkerId, Sequence[Entry]] = {}
            next_due_s = until_s
            for worker, last in worker_to_entry.items():
                ready, due_s = self._read_one(worker, int(last), now_s)
                if ready:
                    news[worker] = ready
                elif due_s is not None:
                    next_due_s = min(next_due_s, due_s)
            if news or now_s + _SLACK_S >= until_s:
                return news
            if next_due_s < until_s:
                await asyncio.sleep(next_due_s - now_s)
            else:
                await self._store.written(worker_to_entry, until_s, lag_s=self._lag_s)

    def _read_one(self, worker: WorkerId, last: int, now_s: float) -> tuple[list[Entry], float | None]:
        """What one stream has after an entry: what can be read by now, or else when the first of it can."""
        stream = self._store.worker_to_stream.get(worker)
        if not stream or stream[-1].number <= last:
            return [], None
        newest_s = now_s - self._lag_s + _SLACK_S
        ready: list[Entry] = []
        for entry in reversed(stream):
            if entry.number <= last:
                break
            oldest_s = entry.written_at_s
            if oldest_s <= newest_s:
                ready.append(Entry(EntryId(str(entry.number)), entry.batch))
        ready.reverse()
        return ready, None if ready else oldest_s + self._lag_s

    async def close(self) -> None:
        """Nothing to take away."""


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
