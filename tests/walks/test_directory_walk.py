"""Random walks of a small fleet over a bad network: after quiet, the directory tells the truth about every worker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import groupby

import pytest

from shared.directory.base import Directory
from shared.directory.memory import MemoryDirectory
from shared.errors import WorkerIdTaken
from shared.types import BlockKey, WorkerId
from tests.support.flaky_directory import FlakyDirectory
from tests.support.servers import redis_cluster
from tests.support.stores import LONG_LEASE_S, SCHEME, embedded_store, key, redis_bench, worker_info
from tests.support.vtime import run_virtual
from worker.engines.base import BlockChange
from worker.publisher import Publisher

__all__ = ["embedded_store", "redis_cluster"]

NUM_WORKERS = 3
NUM_KEYS = 60
NUM_CHAINS = 40
MAX_PENDING_KEYS = 25  # small, so that backlogs overflow
NUM_STEPS_BETWEEN_QUIETS = 50
LONGEST_MENDING_S = 500.0

Act = Callable[[], Awaitable[None]]


class Walk:
    """A fleet, the truth about it as sets of keys, and the operations done so far."""

    def __init__(
        self,
        seed: int,
        flaky: FlakyDirectory,
        restart_store: Act,
        end_leases: Act,
        *,
        heartbeat_s: float,
        lease_s: float,
    ) -> None:
        self.rng = random.Random(seed)
        self.flaky = flaky
        self.restart_store = restart_store
        self.end_leases = end_leases
        self.heartbeat_s = heartbeat_s
        self.lease_s = lease_s
        self.operations: list[str] = []
        self.num_lives = 0
        self.truth: dict[WorkerId, set[BlockKey]] = {}
        self.publishers: dict[WorkerId, Publisher] = {}

    async def run(self, num_steps: int) -> None:
        for number in range(NUM_WORKERS):
            await self.start(WorkerId(f"w{number}"))
        actions = [self.store] * 30 + [self.remove] * 20 + [self.wait] * 25
        actions += [self.clear, self.change_weather, self.restart, self.crash, self.leave, self.wait_long]
        for step in range(1, num_steps + 1):
            await self.rng.choice(actions)()
            if step % NUM_STEPS_BETWEEN_QUIETS == 0:
                await self.check_after_quiet()
        for publisher in self.publishers.values():
            await publisher.stop()
        assert await self.flaky.inner.workers() == []

    # Operations.

    async def store(self) -> None:
        worker, chosen = self.pick()
        self.log(f"store {worker} {chosen}")
        self.truth[worker].update(map(key, chosen))
        self.publishers[worker].on_blocks(BlockChange(stored=tuple(map(key, chosen))))

    async def remove(self) -> None:
        worker, chosen = self.pick()
        self.log(f"remove {worker} {chosen}")
        self.truth[worker].difference_update(map(key, chosen))
        self.publishers[worker].on_blocks(BlockChange(removed=tuple(map(key, chosen))))

    async def clear(self) -> None:
        worker, chosen = self.pick()
        self.log(f"clear {worker} {chosen}")
        self.truth[worker] = set(map(key, chosen))
        self.publishers[worker].on_blocks(BlockChange(is_reset=True, stored=tuple(map(key, chosen))))

    async def wait(self) -> None:
        duration_s = self.rng.uniform(0, 0.1 * self.heartbeat_s)
        self.log(f"wait {duration_s:.4f}")
        await asyncio.sleep(duration_s)

    async def wait_long(self) -> None:
        self.log("let leases end")
        await self.end_leases()
        await self.end_leases()

    async def change_weather(self) -> None:
        self.flaky.is_down = self.rng.random() < 0.3
        self.flaky.fault_rate = self.rng.choice([0.0, 0.1, 0.5])
        self.log(f"weather down={self.flaky.is_down} faults={self.flaky.fault_rate}")

    async def restart(self) -> None:
        self.log("restart the store, empty")
        await self.restart_store()

    async def crash(self) -> None:
        worker, _ = self.pick()
        self.log(f"crash {worker}")
        task = self.publishers[worker]._task
        assert task is not None
        task.cancel()
        await self.start(worker)

    async def leave(self) -> None:
        worker, _ = self.pick()
        self.log(f"leave {worker}")
        await self.publishers[worker].stop()
        await self.start(worker)

    async def start(self, worker: WorkerId) -> None:
        """Start a new life with an empty cache, as soon as the id is free."""
        self.num_lives += 1
        self.truth[worker] = set()
        publisher = Publisher(
            self.flaky,
            worker_info(worker, life=self.num_lives),
            rng=random.Random(self.num_lives),
            lease_s=self.lease_s,
            heartbeat_s=self.heartbeat_s,
            tick_s=0.01 * self.heartbeat_s,
            max_pending_keys=MAX_PENDING_KEYS,
        )
        while True:
            try:
                await publisher.start()
            except WorkerIdTaken:
                await self.end_leases()
            else:
                break
        self.publishers[worker] = publisher

    # Checks.

    async def check_after_quiet(self) -> None:
        self.log("quiet")
        self.flaky.is_down = False
        self.flaky.fault_rate = 0.0
        await self.flaky.settle()
        async with asyncio.timeout(LONGEST_MENDING_S):
            # What was evicted by a late registration of an earlier life comes back as a new life, as a supervisor does.
            while not await self.is_true():
                await asyncio.sleep(self.heartbeat_s)
                for worker, publisher in list(self.publishers.items()):
                    if publisher.is_evicted:
                        await publisher.stop()
                        await self.start(worker)
        await asyncio.sleep(3 * self.heartbeat_s)
        assert await self.is_true(), "what was true after quiet did not stay true"

    async def is_true(self) -> bool:
        """Whether `match` on many chains, for all workers at once, equals the truth."""
        if not all(publisher.is_quiet for publisher in self.publishers.values()):
            return False
        for _ in range(NUM_CHAINS):
            chain = [key(number) for number in self.rng.sample(range(NUM_KEYS), 20)]
            # Random chains break off early: lead with keys that some worker has.
            chain = sorted(self.truth[self.rng.choice(list(self.truth))])[: self.rng.randrange(10)] + chain
            expected = {worker: depth for worker in self.truth if (depth := self.true_depth(worker, chain))}
            found = await self.flaky.match(chain, list(self.truth))
            if {worker: match.num_blocks for worker, match in found.items()} != expected:
                return False
            if any(self.publishers[worker]._info.instance != match.instance for worker, match in found.items()):
                return False
        return True

    def true_depth(self, worker: WorkerId, chain: list[BlockKey]) -> int:
        return next((depth for depth, link in enumerate(chain) if link not in self.truth[worker]), len(chain))

    def pick(self) -> tuple[WorkerId, list[int]]:
        worker = self.rng.choice(sorted(self.truth))
        start = self.rng.randrange(NUM_KEYS)
        return worker, list(range(start, min(NUM_KEYS, start + self.rng.randrange(1, 12))))

    def log(self, operation: str) -> None:
        self.operations.append(operation)


async def run(walk: Walk, seed: int, num_steps: int) -> None:
    try:
        await walk.run(num_steps)
    except BaseException as error:
        steps = "\n".join(walk.operations)
        pytest.fail(f"seed {seed} failed with {error!r} after these operations:\n{steps}")
    finally:
        await walk.flaky.close()


def fresh_directory() -> Directory:
    return MemoryDirectory(SCHEME, asyncio.get_running_loop().time)


@pytest.mark.parametrize("seed", range(5))
def test_memory_directory_tells_the_truth_after_quiet(seed: int) -> None:
    async def scenario() -> None:
        flaky = FlakyDirectory(fresh_directory(), rng=random.Random(seed + 1000), longest_delay_s=2.0)

        lease_s = 5.0

        async def restart_store() -> None:
            flaky.inner = fresh_directory()

        async def end_leases() -> None:
            await asyncio.sleep(lease_s)

        walk = Walk(seed, flaky, restart_store, end_leases, heartbeat_s=1.0, lease_s=lease_s)
        await run(walk, seed, 400)

    run_virtual(scenario())


@pytest.mark.redis
@pytest.mark.parametrize("store", ["embedded_store", "redis_cluster"])
async def test_real_store_tells_the_truth_after_quiet(request: pytest.FixtureRequest, store: str) -> None:
    async with redis_bench(request.getfixturevalue(store)) as bench:
        flaky = FlakyDirectory(bench.directory, rng=random.Random(1000), longest_delay_s=0.1)
        client = bench.client
        assert client is not None

        async def restart_store() -> None:
            await client.flushall()
            await client.script_flush()

        async def end_leases() -> None:
            # By the store's own clock, but only here: a lease short enough to wait for would end in any stall as well.
            names = [name for name in await bench.stored_keys() if not name.endswith(":workers")]
            for _, of_worker in groupby(names, key=lambda name: name.rpartition(":")[0]):
                async with client.pipeline(transaction=True) as pipeline:
                    for name in of_worker:
                        pipeline.pexpire(name, 1)
                    await pipeline.execute()
            await asyncio.sleep(0.01)

        walk = Walk(0, flaky, restart_store, end_leases, heartbeat_s=0.05, lease_s=LONG_LEASE_S)
        await run(walk, 0, 200)
