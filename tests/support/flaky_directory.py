"""A directory behind a bad network: loses calls and answers, delays and repeats calls, and lets late ones overtake."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from shared.directory.base import Directory, Match, Reply, RouterPlace, WorkerRecord
from shared.errors import DirectoryUnavailable
from shared.types import BlockKey, Epoch, EventBatch, Instance, RouterId, WorkerId, WorkerInfo

Work = Callable[[Directory], Awaitable[Any]]


class Fault(StrEnum):
    """What goes wrong with one call."""

    NONE = "none"
    DROP = "drop"
    """The call never arrives."""
    LOSE_REPLY = "lose reply"
    """The call takes effect, the caller hears nothing."""
    LATE = "late"
    """The caller hears nothing and goes on; the call takes effect some time after, behind later ones."""
    REPEAT = "repeat"
    """The call takes effect, is answered, and takes effect once more some time after."""
    DELAY = "delay"
    """The call takes effect and is answered, some time after."""


class FlakyDirectory:
    """Wraps a directory; faults are scripted for the next calls of an operation, or drawn at `fault_rate`.

    Readers (`match`, `workers`, `resident`) are never faulted but by `is_down`, so that tests see the truth.
    """

    def __init__(
        self,
        inner: Directory,
        *,
        rng: random.Random | None = None,
        fault_rate: float = 0.0,
        longest_delay_s: float = 1.0,
    ) -> None:
        self.inner = inner
        self.is_down = False
        self.fault_rate = fault_rate
        self.calls: list[str] = []
        self._rng = rng or random.Random(0)
        self._longest_delay_s = longest_delay_s
        self._scripted: dict[str, deque[Fault]] = defaultdict(deque)
        self._late: set[asyncio.Task[None]] = set()

    @property
    def is_resting(self) -> bool:
        return self.inner.is_resting

    def fail_next(self, operation: str, *faults: Fault) -> None:
        """Script what happens to the next calls of one operation."""
        self._scripted[operation].extend(faults)

    async def settle(self) -> None:
        """Return once no late call is under way."""
        while self._late:
            await asyncio.gather(*self._late)

    async def register(self, info: WorkerInfo, epoch: Epoch, lease_s: float) -> Reply:
        return await self._call("register", lambda inner: inner.register(info, epoch, lease_s))

    async def heartbeat(self, worker: WorkerId, epoch: Epoch, seq: int, lease_s: float) -> Reply:
        return await self._call("heartbeat", lambda inner: inner.heartbeat(worker, epoch, seq, lease_s))

    async def apply(self, batch: EventBatch) -> Reply:
        return await self._call("apply", lambda inner: inner.apply(batch))

    async def stage(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, keys: Sequence[BlockKey]) -> Reply:
        return await self._call("stage", lambda inner: inner.stage(worker, epoch, snapshot, keys))

    async def commit(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, num_keys: int) -> Reply:
        return await self._call("commit", lambda inner: inner.commit(worker, epoch, snapshot, num_keys))

    async def set_draining(self, worker: WorkerId, epoch: Epoch, is_draining: bool) -> Reply:
        return await self._call("set_draining", lambda inner: inner.set_draining(worker, epoch, is_draining))

    async def forget(self, worker: WorkerId, instance: Instance) -> Reply:
        return await self._call("forget", lambda inner: inner.forget(worker, instance))

    async def match(self, keys: Sequence[BlockKey], workers: Iterable[WorkerId]) -> Mapping[WorkerId, Match]:
        self._refuse_when_down("match")
        return await self.inner.match(keys, workers)

    async def workers(self) -> list[WorkerRecord]:
        self._refuse_when_down("workers")
        return await self.inner.workers()

    async def announce_router(self, router: RouterId, lease_s: float) -> RouterPlace:
        self._refuse_when_down("announce_router")
        return await self.inner.announce_router(router, lease_s)

    async def resident(self, worker: WorkerId) -> set[BlockKey]:
        self._refuse_when_down("resident")
        return await self.inner.resident(worker)

    async def close(self) -> None:
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    async def _call(self, operation: str, work: Work) -> Reply:
        self.calls.append(operation)
        await asyncio.sleep(0)  # a call is never as atomic as a function
        self._refuse_when_down(operation)
        fault = self._next_fault(operation)
        if fault is Fault.DROP:
            raise DirectoryUnavailable(f"{operation}: dropped")
        if fault is Fault.LATE:
            self._do_later(work)
            raise DirectoryUnavailable(f"{operation}: late")
        if fault is Fault.DELAY:
            await asyncio.sleep(self._rng.uniform(0, self._longest_delay_s))
        reply: Reply = await work(self.inner)
        if fault is Fault.REPEAT:
            self._do_later(work)
        if fault is Fault.LOSE_REPLY:
            raise DirectoryUnavailable(f"{operation}: reply lost")
        return reply

    def _refuse_when_down(self, operation: str) -> None:
        if self.is_down:
            raise DirectoryUnavailable(f"{operation}: down")

    def _next_fault(self, operation: str) -> Fault:
        if self._scripted[operation]:
            return self._scripted[operation].popleft()
        if self._rng.random() < self.fault_rate:
            return self._rng.choice(list(Fault))
        return Fault.NONE

    def _do_later(self, work: Work) -> None:
        async def do() -> None:
            await asyncio.sleep(self._rng.uniform(0, self._longest_delay_s))
            await work(self.inner)

        task = asyncio.get_running_loop().create_task(do())
        self._late.add(task)
        task.add_done_callback(self._late.discard)
