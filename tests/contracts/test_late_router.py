"""A router that starts late is right from its first match on, over every kind of store, however far its mirror is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shared.directory.base import Directory, Match, Reply
from shared.directory.feed import Feed, Position
from shared.directory.mirrored import MirroredDirectory
from shared.directory.redis import RedisDirectory
from shared.types import BlockKey, WorkerId
from tests.support.memory_store import MemoryFeed, MemoryStore
from tests.support.servers import redis_cluster, redis_server, secured_server
from tests.support.stores import (
    LONG_LEASE_S,
    PATIENT_S,
    SCHEME,
    STORES,
    batch,
    client_of,
    embedded_store,
    epoch,
    instance,
    keys,
    wait_until,
    worker_info,
)

__all__ = ["embedded_store", "redis_cluster", "redis_server", "secured_server"]

E1 = epoch(1)
W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")
CHAIN = keys(range(40))


class HeldFeed:
    """A feed whose loads end when a test says so, worker by worker: what takes seconds where there is much to load."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.worker_to_may_load = {worker: asyncio.Event() for worker in (W1, W2, W3)}
        self.num_loading = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    async def position(self, worker: WorkerId) -> Position | None:
        self.num_loading += 1
        await self.worker_to_may_load[worker].wait()
        return await self._feed.position(worker)

    async def scan(self, worker: WorkerId) -> AsyncGenerator[Sequence[BlockKey], None]:
        async for piece in self._feed.scan(worker):
            yield piece


class LateRouter:
    """A store on which workers have long published, and a reader that has just come."""

    def __init__(self, store: Directory, inner: Directory, feed: Feed) -> None:
        self.store = store
        self.feed = HeldFeed(feed)
        self.directory = MirroredDirectory(inner, self.feed, refresh_s=0.05, wait_s=0.02)

    async def depths(self) -> dict[WorkerId, int]:
        found = await self.directory.match(CHAIN, [W1, W2, W3])
        assert all(match.instance == instance(1) for match in found.values())
        return {worker: match.num_blocks for worker, match in found.items()}

    async def until_shown(self, *workers: WorkerId) -> None:
        for worker in workers:
            self.feed.worker_to_may_load[worker].set()
        await wait_until(lambda: self.directory.shown >= set(workers))


@pytest.fixture(params=["memory", *(pytest.param(kind, marks=pytest.mark.redis) for kind in STORES)])
async def late(request: pytest.FixtureRequest) -> AsyncIterator[LateRouter]:
    opening = late_in_memory() if request.param == "memory" else late_on(request.getfixturevalue(STORES[request.param]))
    async with opening as router:
        for worker, num_blocks in ((W1, 10), (W2, 25)):
            assert await router.store.register(worker_info(worker), E1, LONG_LEASE_S) == Reply.OK
            assert await router.store.apply(batch(worker, E1, 1, range(num_blocks))) == Reply.OK
        yield router
        await router.directory.close()


@asynccontextmanager
async def late_in_memory() -> AsyncIterator[LateRouter]:
    store = MemoryStore(SCHEME, asyncio.get_running_loop().time)
    yield LateRouter(store, store, MemoryFeed(store, rng=random.Random(0)))


@asynccontextmanager
async def late_on(store: Any) -> AsyncIterator[LateRouter]:
    client = client_of(store)
    await client.flushall()
    await client.aclose()
    writer, inner = (
        RedisDirectory(store.url, SCHEME, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S) for _ in range(2)
    )
    yield LateRouter(writer, inner, inner.feed("late", deadline_s=PATIENT_S))
    await writer.close()


async def test_first_match_is_right_before_anything_is_known(late: LateRouter) -> None:
    assert await late.depths() == {W1: 10, W2: 25}
    assert (late.directory.num_loads, set(late.directory.shown)) == (0, set())


async def test_matches_are_right_while_the_mirror_loads(late: LateRouter) -> None:
    late.directory.start()
    await wait_until(lambda: late.feed.num_loading == 2)
    assert await late.depths() == {W1: 10, W2: 25}
    # What comes and goes meanwhile is seen at once, too.
    assert await late.store.apply(batch(W1, E1, 2, range(10, 30))) == Reply.OK
    assert await late.store.apply(batch(W2, E1, 2, (), [5])) == Reply.OK
    assert await late.depths() == {W1: 30, W2: 5}
    assert late.directory.num_loads == 0


async def test_matches_are_right_where_a_part_of_the_workers_is_loaded(late: LateRouter) -> None:
    late.directory.start()
    await late.until_shown(W1)
    assert set(late.directory.shown) == {W1}
    assert await late.depths() == {W1: 10, W2: 25}
    await late.until_shown(W2)
    assert await late.depths() == {W1: 10, W2: 25}
    assert late.directory.num_loads == 2


async def test_worker_that_joins_after_the_router_is_matched_before_it_is_loaded(late: LateRouter) -> None:
    late.directory.start()
    await late.until_shown(W1, W2)
    assert await late.store.register(worker_info(W3), E1, LONG_LEASE_S) == Reply.OK
    assert await late.store.apply(batch(W3, E1, 1, range(40))) == Reply.OK
    assert await late.depths() == {W1: 10, W2: 25, W3: 40}
    await late.until_shown(W3)
    assert await late.depths() == {W1: 10, W2: 25, W3: 40}
    assert late.directory.num_loads == 3


async def test_what_was_seen_through_the_store_is_what_the_mirror_then_tells(late: LateRouter) -> None:
    late.directory.start()
    await wait_until(lambda: late.feed.num_loading == 2)
    assert await late.store.apply(batch(W1, E1, 2, range(10, 30), [3])) == Reply.OK
    through_the_store = await late.directory.match(CHAIN, [W1, W2])
    await late.until_shown(W1, W2)
    async with asyncio.timeout(PATIENT_S):
        await late.directory.caught_up()
    assert await late.directory.match(CHAIN, [W1, W2]) == through_the_store
    assert through_the_store == {W1: Match(instance(1), 3), W2: Match(instance(1), 25)}
