"""Directories for tests: builders of what workers say, and one bench for each implementation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.directory.base import Directory, Match, Reply
from shared.directory.embedded import EmbeddedStore, find_server
from shared.directory.memory import MemoryDirectory
from shared.directory.mirrored import MirroredDirectory
from shared.directory.pin_board import FOLLOWED_S, MemoryPinBoard, PinBoard, PinSpec, Revision
from shared.directory.redis import RedisDirectory
from shared.directory.redis_pin_board import RedisPinBoard
from shared.errors import ConfigError
from shared.hashing import pack_tokens
from shared.types import BlockKey, CacheScheme, Epoch, EventBatch, Holder, Instance, WorkerId, WorkerInfo

SCHEME = CacheScheme("org/model", 64)
LONG_LEASE_S = 600.0
PATIENT_S = 60.0
"""Deadline of calls whose speed is not what a test is about."""


def worker_id(name: str) -> WorkerId:
    return WorkerId(name)


def key(number: int) -> BlockKey:
    """A block key that is easy to tell from others."""
    return BlockKey(number.to_bytes(16, "big"))


def keys(numbers: Iterable[int]) -> tuple[BlockKey, ...]:
    return tuple(key(number) for number in numbers)


def epoch(number: int) -> Epoch:
    return Epoch(f"{number:032x}")


def instance(number: int) -> Instance:
    return Instance(f"{number:032x}")


def worker_info(name: str = "w1", *, life: int = 1, scheme: CacheScheme = SCHEME) -> WorkerInfo:
    return WorkerInfo(
        worker=WorkerId(name),
        instance=instance(life),
        address=f"unix:/run/{name}-{life}.sock",
        scheme=scheme,
        parity_key=b"parity",
        num_blocks=1000,
        max_num_seqs=8,
        max_model_len_tokens=4096,
        engine="none 1.0",
        eviction="lru",
    )


def batch(name: str, in_epoch: Epoch, seq: int, stored: Iterable[int] = (), removed: Iterable[int] = ()) -> EventBatch:
    return EventBatch(Holder(WorkerId(name), in_epoch), seq, keys(stored), keys(removed))


async def wait_until(condition: Callable[[], bool], deadline_s: float = PATIENT_S) -> None:
    """Return once `condition` holds; fail after the deadline of the loop's clock."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Clock:
    """A clock that tests set."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Bench:
    """One directory, and the few things about its store that the protocol does not tell."""

    directory: Directory
    connect: Callable[[CacheScheme], Directory]
    """Another directory on the same store, for another scheme."""
    clock: Clock | None
    client: Redis | None

    async def let_expire(self, name: str, in_epoch: Epoch, seq: int) -> None:
        """Let one worker's lease run out, and no other's."""
        assert await self.directory.heartbeat(WorkerId(name), in_epoch, seq, 0.001) == Reply.OK
        if self.clock is not None:
            self.clock.now_s += 1.0
        if self.client is not None:
            async with asyncio.timeout(PATIENT_S):
                while any(f":{name}}}:" in stored for stored in await self.stored_keys()):
                    await asyncio.sleep(0.002)

    async def stored_keys(self) -> list[str]:
        """Names of all keys in the store but readers' canaries; the memory directory has none."""
        if self.client is None:
            return []
        names = [raw.decode() async for raw in self.client.scan_iter()]
        return sorted(name for name in names if ":canary:" not in name)


class LevelDirectory(MirroredDirectory):
    """Matches once its mirror stands where the store does, so that a test sees what it has just written."""

    async def match(self, keys: Sequence[BlockKey], workers: Iterable[WorkerId]) -> Mapping[WorkerId, Match]:
        async with asyncio.timeout(20.0):
            await self.caught_up()
        return await super().match(keys, workers)


@asynccontextmanager
async def memory_bench() -> AsyncIterator[Bench]:
    clock = Clock()
    yield Bench(MemoryDirectory(SCHEME, clock), lambda scheme: MemoryDirectory(scheme, clock), clock, None)


@asynccontextmanager
async def redis_bench(store: EmbeddedStore) -> AsyncIterator[Bench]:
    """A directory on the server, which is emptied first."""
    async with _store_bench(store, lambda directory: directory) as bench:
        yield bench


@asynccontextmanager
async def mirrored_bench(store: EmbeddedStore) -> AsyncIterator[Bench]:
    """The same, matched from mirrors."""
    async with _store_bench(store, mirrored) as bench:
        yield bench


def mirrored(directory: RedisDirectory) -> MirroredDirectory:
    """A mirror over `directory` that follows closely."""
    opened = LevelDirectory(
        directory,
        directory.feed(f"reader-{id(directory)}", deadline_s=PATIENT_S),
        directory.breaker,
        refresh_s=0.05,
        wait_s=0.01,
    )
    opened.start()
    return opened


@asynccontextmanager
async def _store_bench(store: EmbeddedStore, wrap: Callable[[RedisDirectory], Directory]) -> AsyncIterator[Bench]:
    opened: list[Directory] = []

    def connect(scheme: CacheScheme) -> Directory:
        directory = RedisDirectory(store.url, scheme, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S)
        opened.append(wrap(directory))
        return opened[-1]

    client = Redis.from_url(store.url)
    await client.flushall()
    try:
        yield Bench(connect(SCHEME), connect, None, client)
    finally:
        await client.aclose()
        for directory in opened:
            await directory.close()


@pytest.fixture(scope="module")
def embedded_store() -> Iterator[EmbeddedStore]:
    """A private server for one module's tests; skips where there is none to start."""
    try:
        find_server()
    except ConfigError as error:
        pytest.skip(str(error))
    with EmbeddedStore() as store:
        yield store


@dataclass
class BoardBench:
    """One pin board, and the few things about its store that the protocol does not tell."""

    board: PinBoard
    clock: Clock | None
    client: Redis | None

    async def abandon(self, name: str) -> None:
        """Let the time run out for which a pin outlives its workers."""
        if self.clock is not None:
            self.clock.now_s += FOLLOWED_S
        if self.client is not None:
            assert await self.client.zadd(f"kvr:{{{SCHEME.namespace}}}:pins:kept", {name: 1}, xx=True, ch=True) == 1

    async def let_pass(self, duration_s: float) -> None:
        """Let the store's time pass."""
        if self.clock is not None:
            self.clock.now_s += duration_s
        else:
            await asyncio.sleep(duration_s)

    async def lose_everything(self) -> None:
        """Let the store come back empty."""
        if self.client is not None:
            await self.client.flushall()
        else:
            assert isinstance(self.board, MemoryPinBoard)
            await self.board.clear()
            self.board._reports.clear()


@asynccontextmanager
async def memory_board() -> AsyncIterator[BoardBench]:
    clock = Clock()
    yield BoardBench(MemoryPinBoard(clock), clock, None)


@asynccontextmanager
async def redis_board(store: EmbeddedStore) -> AsyncIterator[BoardBench]:
    """A board on the server, which is emptied first."""
    client = Redis.from_url(store.url)
    await client.flushall()
    board = RedisPinBoard(store.url, SCHEME, deadline_s=PATIENT_S)
    try:
        yield BoardBench(board, None, client)
    finally:
        await client.aclose()
        await board.close()


def pin_spec(name: str = "system", *, life: int = 1, num_tokens: int = 200, **more: Any) -> PinSpec:
    """A wanted pin; `life` tells its revisions apart, and the prompt follows from the name."""
    token_ids = [ord(name[index % len(name)]) for index in range(num_tokens)]
    return PinSpec(name, pack_tokens(token_ids), Revision(f"{life:032x}"), **more)
