"""A router's deciding parts over workers that only tell statuses, for benchmarks."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from router.fleet import Fleet
from router.hints import Hints
from router.policies.base import Policy
from router.policies.cost import CostPolicy
from router.queue import HoldQueue
from shared.directory.base import Directory, Match, WorkerRecord
from shared.directory.mirror import Mirror
from shared.transport.base import OnChange, WorkerClient
from shared.types import BlockKey, CacheScheme, Epoch, Instance, WorkerId, WorkerInfo, WorkerStatus

SCHEME = CacheScheme("bench", 64)
INSTANCE = Instance("0" * 32)
PROMPT_TOKENS = 8192
CHAIN_BLOCKS = PROMPT_TOKENS // SCHEME.block_size_tokens
_PARITY_KEY = b"parity"
_MAX_NUM_SEQS = 256
_NUM_BLOCKS = 100_000


class BenchDirectory:
    """A mirror that is full and stands still, matched as `MirroredDirectory` does."""

    is_resting = False

    def __init__(self, workers: Sequence[WorkerId]) -> None:
        self.mirror = Mirror()
        self.names = workers

    async def match(self, keys: Sequence[BlockKey], workers: Iterable[WorkerId]) -> Mapping[WorkerId, Match]:
        shown = self.mirror.shown
        asked = workers if isinstance(workers, Collection) else list(workers)
        missing = [worker for worker in asked if worker not in shown]
        assert not missing, "the mirror has all workers"
        return self.mirror.match(keys, asked)

    async def workers(self) -> list[WorkerRecord]:
        infos = (
            WorkerInfo(
                worker,
                INSTANCE,
                "unix:/none",
                SCHEME,
                _PARITY_KEY,
                num_blocks=_NUM_BLOCKS,
                max_num_seqs=_MAX_NUM_SEQS,
                max_model_len_tokens=4 * PROMPT_TOKENS,
                engine="none",
                eviction="lru",
            )
            for worker in self.names
        )
        return [WorkerRecord(info, Epoch(INSTANCE), 0) for info in infos]


class BenchClient:
    """A worker as far as a fleet can see it."""

    instance = INSTANCE
    is_connected = True
    is_lost = False
    num_silences = 0
    round_trip_s = 0.001

    def __init__(self, worker: WorkerId, clock: Callable[[], float], on_change: OnChange) -> None:
        self.worker = worker
        self.status: WorkerStatus | None = None
        self.acknowledged_submit = self.last_submit = 0
        self.on_change = on_change
        self._clock = clock
        self._status_at_s = 0.0

    @property
    def status_age_s(self) -> float:
        return self._clock() - self._status_at_s

    def tell(self, status: WorkerStatus) -> None:
        """A frame with a status."""
        self.status = status
        self._status_at_s = self._clock()
        self.acknowledged_submit = self.last_submit
        self.on_change()

    async def connect(self) -> None:
        pass

    async def close(self) -> None:
        pass


STATUS = WorkerStatus(
    num_running=0,
    num_waiting=0,
    queued_prefill_tokens=0,
    kv_used_blocks=0,
    kv_total_blocks=_NUM_BLOCKS,
    prefill_s_per_token=1e-4,
    step_s=0.01,
    decode_s_per_seq=1e-4,
    step_budget_tokens=512,
)


@dataclass(slots=True)
class Rig:
    """One router's deciding parts, wired as in a router."""

    directory: BenchDirectory
    fleet: Fleet
    hints: Hints
    queue: HoldQueue
    clients: list[BenchClient]
    now_s: list[float]
    """Its clock, for whoever runs it to turn."""


@asynccontextmanager
async def bench_rig(
    num_workers: int,
    seed: int,
    policy: Policy | None = None,
    *,
    max_held: int = 1_000_000,
    tenant_to_weight: Mapping[str, float] | None = None,
) -> AsyncIterator[Rig]:
    now_s = [0.0]

    def clock() -> float:
        return now_s[0]

    clients: list[BenchClient] = []

    def connect(record: WorkerRecord, on_change: OnChange) -> WorkerClient:
        clients.append(BenchClient(record.info.worker, clock, on_change))
        return cast(WorkerClient, clients[-1])

    directory = BenchDirectory([WorkerId(f"w{number:03}") for number in range(num_workers)])
    hints = Hints(clock)
    fleet = Fleet(
        cast(Directory, directory),
        connect,
        parity_key=_PARITY_KEY,
        clock=clock,
        on_change=lambda: queue.poke(),
        on_leave=hints.forget,
    )
    queue = HoldQueue(
        policy or CostPolicy(),
        fleet,
        hints,
        lambda keys: directory.match(keys, fleet.worker_to_instance),
        block_size_tokens=SCHEME.block_size_tokens,
        max_held=max_held,
        timeout_s=1e6,
        min_prefix_tokens=0,
        rng=random.Random(seed),
        clock=clock,
        tenant_to_weight=tenant_to_weight,
    )
    await fleet.refresh()
    queue.start()
    try:
        yield Rig(directory, fleet, hints, queue, clients, now_s)
    finally:
        await queue.close()
        await fleet.close()
