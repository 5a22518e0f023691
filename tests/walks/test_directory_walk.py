"""Random walks of a small fleet over a bad network: after quiet, the directory tells the truth about every worker.

What is walked is a list of operations made from a seed, so that a failing walk can be cut down to what it needs. Each
list is walked by the directory itself and by a mirror that follows it. `KVROUTE_TEST_WALK_SEEDS` sets how many lists
are walked; the default keeps to some ten thousand operations.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import pytest

from shared.directory.base import Directory
from shared.directory.mirrored import MirroredDirectory
from shared.directory.redis import RedisDirectory
from shared.errors import WorkerIdTaken
from shared.types import BlockKey, WorkerId
from shared.vtime import run_virtual
from tests.support.flaky_directory import FlakyDirectory
from tests.support.memory_store import MemoryFeed, MemoryStore, SavedStore
from tests.support.servers import redis_cluster, redis_server
from tests.support.shrink import shortest_failing
from tests.support.stores import SCHEME, STORES, Bench, Store, embedded_store, key, redis_bench, worker_info
from worker.engines.base import BlockChange
from worker.publisher import Publisher

__all__ = ["embedded_store", "redis_cluster", "redis_server"]

NUM_SEEDS = int(os.environ.get("KVROUTE_TEST_WALK_SEEDS", "10"))
NUM_OPERATIONS = 1000
WORKERS = [WorkerId(f"w{number}") for number in range(3)]
NUM_KEYS = 60
NUM_CHAINS = 30
MAX_PENDING_KEYS = 25  # small, so that backlogs overflow
NUM_BETWEEN_QUIETS = 50


class Kind(StrEnum):
    STORE = "store"
    REMOVE = "remove"
    CLEAR = "clear"
    WAIT = "wait"
    WAIT_LONG = "wait for two leases"
    WEATHER = "weather"
    FLUSH = "the store comes back empty"
    SAVE = "the store is saved"
    ROLL_BACK = "the store comes back as it was saved"
    CRASH = "crash"
    LEAVE = "leave"
    RIVAL = "another process takes the id"
    TRIM = "trim the stream"
    QUIET = "quiet"


WEIGHT_OF_KIND = {
    Kind.STORE: 30,
    Kind.REMOVE: 20,
    Kind.WAIT: 25,
    Kind.CLEAR: 1,
    Kind.WEATHER: 1,
    Kind.FLUSH: 1,
    Kind.CRASH: 1,
    Kind.LEAVE: 1,
    Kind.WAIT_LONG: 1,
    Kind.RIVAL: 2,
    Kind.SAVE: 2,
    Kind.ROLL_BACK: 2,
    Kind.TRIM: 3,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One step. What a kind has no use for is ignored."""

    kind: Kind
    worker: WorkerId
    numbers: range
    share: float

    def __str__(self) -> str:
        if self.kind in (Kind.STORE, Kind.REMOVE, Kind.CLEAR):
            return f"{self.worker}: {self.kind} {self.numbers.start} to {self.numbers.stop - 1}"
        return f"{self.worker}: {self.kind} ({self.share:.3f})"


def make_operations(seed: int, num_operations: int) -> list[Operation]:
    rng = random.Random(seed)
    kinds, weights = list(WEIGHT_OF_KIND), list(WEIGHT_OF_KIND.values())
    operations = []
    for number in range(1, num_operations + 1):
        kind = Kind.QUIET if number % NUM_BETWEEN_QUIETS == 0 else rng.choices(kinds, weights)[0]
        start = rng.randrange(NUM_KEYS)
        numbers = range(start, min(NUM_KEYS, start + rng.randrange(1, 12)))
        operations.append(Operation(kind, rng.choice(WORKERS), numbers, rng.random()))
    return operations


@dataclass(slots=True, eq=False)
class Life:
    """One life of a worker: its publisher, and the truth about it."""

    publisher: Publisher
    resident: set[BlockKey]


class World:
    """What a walk is over, and how its store fails: replaced by each kind of directory."""

    is_in_virtual_time = False

    def __init__(
        self, flaky: FlakyDirectory, readers: Sequence[Directory], *, heartbeat_s: float, lease_s: float
    ) -> None:
        self.flaky = flaky
        self.readers = readers
        self.heartbeat_s = heartbeat_s
        self.lease_s = lease_s

    async def flush(self) -> None:
        raise NotImplementedError

    def save(self) -> None:
        """A world that cannot come back as it was does nothing, here and in `roll_back`."""

    def roll_back(self) -> None:
        pass

    async def trim(self, worker: WorkerId, num_kept: int) -> None:
        raise NotImplementedError

    def set_weather(self, share: float | None) -> None:
        """Any of several kinds of weather, or a fine day."""
        self.flaky.is_down = share is not None and share < 0.3
        self.flaky.fault_rate = 0.0 if share is None else (0.0, 0.1, 0.5)[int(share * 1000) % 3]


class Walk:
    """A fleet, and the truth about it as sets of keys."""

    def __init__(self, seed: int, world: World) -> None:
        self.rng = random.Random(seed + 1)
        self.world = world
        self.num_lives = 0
        self.worker_to_lives: dict[WorkerId, list[Life]] = {}
        """Several lives of one worker contend for its id until the store has decided."""

    async def run(self, operations: Sequence[Operation]) -> None:
        try:
            for worker in WORKERS:
                await self.start(worker)
            for operation in operations:
                await self.do(operation)
            await self.check_after_quiet()
        finally:
            for lives in self.worker_to_lives.values():
                for life in lives:
                    await life.publisher.stop()
        assert await self.world.readers[0].workers() == []

    async def do(self, operation: Operation) -> None:
        world, worker, chosen = self.world, operation.worker, tuple(map(key, operation.numbers))
        match operation.kind:
            case Kind.STORE:
                for life in self.worker_to_lives.get(worker, ()):
                    life.resident.update(chosen)
                    life.publisher.on_blocks(BlockChange(stored=chosen))
            case Kind.REMOVE:
                for life in self.worker_to_lives.get(worker, ()):
                    life.resident.difference_update(chosen)
                    life.publisher.on_blocks(BlockChange(removed=chosen))
            case Kind.CLEAR:
                for life in self.worker_to_lives.get(worker, ()):
                    life.resident = set(chosen)
                    life.publisher.on_blocks(BlockChange(is_reset=True, stored=chosen))
            case Kind.WAIT:
                await asyncio.sleep(operation.share * 0.1 * world.heartbeat_s)
            case Kind.WAIT_LONG:
                await asyncio.sleep(2 * world.lease_s)
            case Kind.WEATHER:
                world.set_weather(operation.share)
            case Kind.FLUSH:
                await world.flush()
            case Kind.SAVE:
                world.save()
            case Kind.ROLL_BACK:
                world.roll_back()
            case Kind.TRIM:
                await world.trim(worker, int(operation.share * 4))
            case Kind.CRASH | Kind.LEAVE:
                for life in self.worker_to_lives.pop(worker, []):
                    task = life.publisher._task
                    if operation.kind is Kind.CRASH and task is not None:
                        task.cancel()
                    else:
                        await life.publisher.stop()
                if operation.share < 0.5:
                    await self.start(worker)
            case Kind.RIVAL:
                await self.contend(worker)
            case Kind.QUIET:
                if operation.share < 0.5:
                    # What a mirror has not read by now it will never read.
                    await asyncio.gather(*(world.trim(worker, 0) for worker in WORKERS))
                await self.check_after_quiet()

    async def start(self, worker: WorkerId) -> None:
        """Start a new life with an empty cache, as soon as the id is free."""
        while not await self.contend(worker):
            await asyncio.sleep(self.world.lease_s)

    async def contend(self, worker: WorkerId) -> bool:
        """Start a new life, if nobody holds the id, or if the store cannot tell."""
        self.num_lives += 1
        publisher = Publisher(
            self.world.flaky,
            worker_info(worker, life=self.num_lives),
            rng=random.Random(self.num_lives),
            lease_s=self.world.lease_s,
            heartbeat_s=self.world.heartbeat_s,
            tick_s=0.01 * self.world.heartbeat_s,
            max_pending_keys=MAX_PENDING_KEYS,
        )
        try:
            await publisher.start()
        except WorkerIdTaken:
            return False
        self.worker_to_lives.setdefault(worker, []).append(Life(publisher, set()))
        return True

    # Checks.

    async def check_after_quiet(self) -> None:
        world = self.world
        world.set_weather(None)
        await world.flaky.settle()
        # A mirror keeps what a store at fault may have lost for as long as a lease.
        await asyncio.sleep(2 * world.lease_s)
        async with asyncio.timeout(max(60.0, 100 * world.lease_s)):
            while not await self.is_true():
                await asyncio.sleep(world.heartbeat_s)
                await self.end_evicted()
        if not world.is_in_virtual_time:
            return  # a machine that stalls for a lease makes new lives of all workers at any time
        await asyncio.sleep(3 * world.heartbeat_s)
        assert await self.is_true(), "what was true after quiet did not stay true"

    async def end_evicted(self) -> None:
        """What was evicted comes back as a new life if no other one is left, as a supervisor does it."""
        for worker, lives in list(self.worker_to_lives.items()):
            for life in [life for life in lives if life.publisher.is_evicted]:
                lives.remove(life)
                await life.publisher.stop()
            if not lives:
                await self.start(worker)

    async def is_true(self) -> bool:
        """Whether `match` of every reader, on many chains and for all workers at once, equals the truth."""
        if any(len(lives) != 1 or not lives[0].publisher.is_quiet for lives in self.worker_to_lives.values()):
            return False
        worker_to_life = {worker: lives[0] for worker, lives in self.worker_to_lives.items()}
        if {record.info.worker for record in await self.world.readers[0].workers()} != worker_to_life.keys():
            return False  # the lease of one that crashed still stands
        for reader in self.world.readers:
            if isinstance(reader, MirroredDirectory) and {
                worker: reader.mirrored(worker) for worker in reader.shown
            } != {worker: life.resident for worker, life in worker_to_life.items()}:
                return False
            for _ in range(NUM_CHAINS):
                chain = [key(number) for number in self.rng.sample(range(NUM_KEYS), 20)]
                # Random chains break off early: lead with keys that some worker has.
                if worker_to_life:
                    leader = worker_to_life[self.rng.choice(sorted(worker_to_life))]
                    chain = sorted(leader.resident)[: self.rng.randrange(10)] + chain
                # Those that are gone are asked for as well.
                found = await reader.match(chain, WORKERS)
                if found.keys() != {worker for worker, life in worker_to_life.items() if chain[0] in life.resident}:
                    return False
                for worker, match in found.items():
                    life = worker_to_life[worker]
                    if match.num_blocks != true_depth(life, chain):
                        return False
                    if match.instance != life.publisher._info.instance:
                        return False
        return True


def true_depth(life: Life, chain: Sequence[BlockKey]) -> int:
    return next((depth for depth, link in enumerate(chain) if link not in life.resident), len(chain))


class MemoryWorld(World):
    """In virtual time, with a mirror whose every call is late or fails."""

    is_in_virtual_time = True

    def __init__(self, seed: int) -> None:
        self.store = MemoryStore(SCHEME, asyncio.get_running_loop().time)
        self.saved: SavedStore | None = None
        self.feed = MemoryFeed(self.store, rng=random.Random(seed + 3000), longest_delay_s=0.1)
        self.mirrored = MirroredDirectory(self.store, self.feed, refresh_s=1.0)
        self.mirrored.start()
        flaky = FlakyDirectory(self.store, rng=random.Random(seed + 1000), longest_delay_s=2.0)
        super().__init__(flaky, (self.store, self.mirrored), heartbeat_s=1.0, lease_s=5.0)

    async def flush(self) -> None:
        self.store.flush()

    def save(self) -> None:
        self.saved = self.store.saved()

    def roll_back(self) -> None:
        if self.saved is not None:
            self.store.restore(self.saved)

    async def trim(self, worker: WorkerId, num_kept: int) -> None:
        self.store.trim(worker, num_kept)

    def set_weather(self, share: float | None) -> None:
        super().set_weather(share)
        # Sometimes it is this reader alone that cannot reach the store.
        self.feed.is_down = self.flaky.is_down or (share is not None and 0.3 <= share < 0.5)
        self.feed.fault_rate = self.flaky.fault_rate


async def walk_in_memory(seed: int, operations: Sequence[Operation]) -> None:
    world = MemoryWorld(seed)
    try:
        await Walk(seed, world).run(operations)
    finally:
        await world.flaky.close()
        await world.mirrored.close()


class RedisWorld(World):
    """A real store, in real time. Leases are long for the heartbeats: a machine may stall."""

    def __init__(self, seed: int, bench: Bench, store: Store) -> None:
        self.bench = bench
        reader = RedisDirectory(store.url, SCHEME, match_deadline_s=5.0, publish_deadline_s=5.0)
        self.mirrored = MirroredDirectory(reader, reader.feed("walk", deadline_s=5.0), refresh_s=0.05, wait_s=0.05)
        self.mirrored.start()
        flaky = FlakyDirectory(bench.directory, rng=random.Random(seed + 1000), longest_delay_s=0.1)
        super().__init__(flaky, (bench.directory, self.mirrored), heartbeat_s=0.05, lease_s=1.0)

    async def flush(self) -> None:
        assert self.bench.client is not None
        await self.bench.client.flushall()
        await self.bench.client.script_flush()

    async def trim(self, worker: WorkerId, num_kept: int) -> None:
        assert self.bench.client is not None
        assert isinstance(self.bench.directory, RedisDirectory)
        (events,) = self.bench.directory._keys(worker, "events")
        await self.bench.client.xtrim(events, maxlen=num_kept, approximate=False)


async def walk_on_store(store: Store, seed: int, operations: Sequence[Operation]) -> None:
    async with redis_bench(store) as bench:
        world = RedisWorld(seed, bench, store)
        try:
            await Walk(seed, world).run(operations)
        finally:
            await world.flaky.close()
            await world.mirrored.close()


def check(
    seed: int, operations: Sequence[Operation], walk: Callable[[Sequence[Operation]], None], *, max_tries: int
) -> None:
    """Walk; on a failure tell the seed and the fewest operations that fail as well."""
    try:
        walk(operations)
    except Exception as error:
        failure = repr(error)
    else:
        return

    def fails(part: Sequence[Operation]) -> bool:
        try:
            walk(part)
        except Exception:
            return True
        return False

    shortest = shortest_failing(operations, fails, max_tries=max_tries)
    steps = "\n".join(f"  {operation}" for operation in shortest)
    pytest.fail(f"seed {seed} failed with {failure}; of {len(operations)} operations these are enough:\n{steps}")


@pytest.fixture(autouse=True)
def _quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    # Every lost call is told, and walks lose thousands.
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_memory_and_its_mirror_tell_the_truth_after_quiet(seed: int) -> None:
    def walk(operations: Sequence[Operation]) -> None:
        run_virtual(walk_in_memory(seed, operations))

    check(seed, make_operations(seed, NUM_OPERATIONS), walk, max_tries=300)


@pytest.mark.redis
@pytest.mark.parametrize("seed", range(max(1, NUM_SEEDS // 10)))
@pytest.mark.parametrize("kind", ["valkey", "redis", "redis cluster"])
def test_real_store_and_its_mirror_tell_the_truth_after_quiet(
    request: pytest.FixtureRequest, kind: str, seed: int
) -> None:
    store = request.getfixturevalue(STORES[kind])

    def walk(operations: Sequence[Operation]) -> None:
        asyncio.run(walk_on_store(store, seed, operations))

    check(seed, make_operations(seed, 200), walk, max_tries=30)


def test_failing_walk_tells_its_seed_and_its_shortest_list() -> None:
    operations = make_operations(0, 200)
    culprit = next(operation for operation in operations if operation.kind is Kind.TRIM)

    def walk(part: Sequence[Operation]) -> None:
        assert culprit not in part

    with pytest.raises(pytest.fail.Exception) as caught:
        check(0, operations, walk, max_tries=100)
    assert str(caught.value).splitlines()[1:] == [f"  {culprit}"]
    assert str(caught.value).startswith("seed 0 failed with AssertionError")
