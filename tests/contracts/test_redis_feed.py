"""What only a store outside can do wrong to a mirror: hostile values, lost canaries, streams that grow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shared.directory import connect_directory
from shared.directory.base import MAX_KEYS_PER_CALL, Match, Reply
from shared.directory.mirrored import MirroredDirectory
from shared.directory.redis import RedisDirectory
from shared.directory.redis_feed import RedisFeed
from shared.types import WorkerId
from tests.support.servers import redis_cluster, redis_server, secured_server
from tests.support.stores import (
    LONG_LEASE_S,
    PATIENT_S,
    SCHEME,
    STORES,
    Bench,
    Store,
    batch,
    embedded_store,
    epoch,
    instance,
    key,
    keys,
    redis_bench,
    wait_until,
    worker_info,
)

__all__ = ["embedded_store", "redis_cluster", "redis_server", "secured_server"]
pytestmark = pytest.mark.redis

E1, E2 = epoch(1), epoch(2)
W1, W2 = WorkerId("w1"), WorkerId("w2")
TAG = "kvr:{org%2Fmodel:64:v1:w1}"
CANARY = f"{TAG}:canary:reader"
STREAM_FIELDS = {"epoch": E1, "seq": "2", "holder": "0:gpu:0", "stored": bytes(16), "removed": b""}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(STORES[request.param])


@pytest.fixture
async def bench(store: Store) -> AsyncIterator[Bench]:
    """With `w1` and `w2`, which hold three blocks each."""
    async with redis_bench(store) as found:
        for name in ("w1", "w2"):
            assert await found.directory.register(worker_info(name), E1, LONG_LEASE_S) == Reply.OK
            assert await found.directory.apply(batch(name, E1, 1, range(3))) == Reply.OK
        yield found


@pytest.fixture
async def client(bench: Bench) -> Any:
    assert bench.client is not None
    return bench.client


class Reader:
    """A mirror of the module's server."""

    def __init__(self, store: Store) -> None:
        self.inner = RedisDirectory(store.url, SCHEME, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S)
        self.feed: RedisFeed = self.inner.feed("reader", deadline_s=PATIENT_S)
        self.directory = MirroredDirectory(self.inner, self.feed, refresh_s=0.05, wait_s=0.02)
        self.directory.start()

    async def caught_up(self) -> None:
        async with asyncio.timeout(20.0):
            await self.directory.caught_up()


@asynccontextmanager
async def reading(store: Store) -> AsyncIterator[Reader]:
    reader = Reader(store)
    try:
        yield reader
    finally:
        await reader.directory.close()


async def test_routers_get_a_mirror_and_tools_do_not(store: Store) -> None:
    mirrored = await connect_directory(store.url, SCHEME, publish_deadline_s=PATIENT_S, reader="router-1")
    plain = await connect_directory(store.url, SCHEME, publish_deadline_s=PATIENT_S)
    assert (type(mirrored), type(plain)) == (MirroredDirectory, RedisDirectory)
    await mirrored.close()
    await plain.close()


@pytest.mark.parametrize(
    "field",
    [
        {"epoch": b"\xff"},
        {"seq": b"two"},
        {"seq": b"9" * 5000},
        {"seq": "-1"},
        {"holder": "1:gpu:0"},
        {"holder": "0:cpu:0"},
        {"stored": bytes(17)},
        {"removed": bytes(15)},
        {"stored": bytes(16 * (MAX_KEYS_PER_CALL + 1))},
        {"stored": None},
    ],
    ids=lambda field: str(field)[:40],
)
async def test_malformed_entry_is_counted_and_its_worker_loaded_again_and_no_other(
    store: Store, bench: Bench, client: Any, field: dict[str, Any]
) -> None:
    async with reading(store) as reader:
        await reader.caught_up()
        fields = {name: value for name, value in {**STREAM_FIELDS, **field}.items() if value is not None}
        await client.xadd(f"{TAG}:events", fields)
        await wait_until(lambda: reader.directory.num_loads == 3)
        assert reader.inner.num_malformed == 1
        await reader.caught_up()
        assert await reader.directory.match(keys(range(3)), [W1, W2]) == {
            W1: Match(instance(1), 3),
            W2: Match(instance(1), 3),
        }
        # And it follows on from there.
        await bench.directory.apply(batch("w1", E1, 2, [3]))
        await reader.caught_up()
        assert await reader.directory.match(keys(range(4)), [W1]) == {W1: Match(instance(1), 4)}
        assert reader.directory.num_loads == 3


async def test_stream_of_a_wrong_type_hides_its_worker_alone_and_heals(store: Store, bench: Bench, client: Any) -> None:
    async with reading(store) as reader:
        await reader.caught_up()
        await client.set(f"{TAG}:events", b"nonsense")
        await wait_until(lambda: reader.directory.shown == {W2})
        await bench.directory.apply(batch("w2", E1, 2, [3]))
        expected = {W1: Match(instance(1), 3), W2: Match(instance(1), 4)}
        async with asyncio.timeout(20.0):
            while await reader.directory.match(keys(range(4)), [W1, W2]) != expected:
                await asyncio.sleep(0.005)
        assert reader.inner.num_malformed >= 1
        await bench.directory.register(worker_info("w1"), E2, LONG_LEASE_S)
        await bench.directory.apply(batch("w1", E2, 1, range(2)))
        await reader.caught_up()
        assert await reader.directory.match(keys(range(4)), [W1]) == {W1: Match(instance(1), 2)}


async def test_set_of_a_wrong_type_and_members_that_are_no_keys_are_counted_and_hold_nothing(
    store: Store, bench: Bench, client: Any
) -> None:
    await client.set(f"{TAG}:blocks", b"nonsense")
    await client.sadd(f"{TAG[:-2]}2}}:blocks", b"short", bytes(17), b"")
    async with reading(store) as reader:
        await reader.caught_up()
        assert await reader.directory.match(keys(range(3)), [W1, W2]) == {W2: Match(instance(1), 3)}
        assert reader.directory.num_entries == 3
        assert reader.inner.num_malformed == 4


@pytest.mark.parametrize("field", [{"epoch": b"\xff"}, {"seq": b"many"}, {"seq": b"1" * 30}, {"instance": b"\xff"}])
async def test_malformed_lease_is_counted_and_its_worker_not_mirrored(
    store: Store, bench: Bench, client: Any, field: dict[str, bytes]
) -> None:
    await client.hset(f"{TAG}:meta", mapping=field)
    await client.sadd("kvr:{org%2Fmodel:64:v1}:workers", b"\xff")
    async with reading(store) as reader:
        await reader.caught_up()
        assert reader.directory.shown == {W2}
        assert reader.inner.num_malformed >= 1


async def test_large_set_is_loaded_whole_and_in_pieces(store: Store, bench: Bench) -> None:
    for seq, start in enumerate(range(3, 20_000, MAX_KEYS_PER_CALL), start=2):
        chunk = range(start, min(start + MAX_KEYS_PER_CALL, 20_000))
        assert await bench.directory.apply(batch("w1", E1, seq, chunk)) == Reply.OK
    async with reading(store) as reader:
        longest = max([len(piece) async for piece in reader.feed.scan(W1)])
        assert longest < 2 * MAX_KEYS_PER_CALL
        await reader.caught_up()
        assert await reader.directory.match(keys(range(20_001)), [W1]) == {W1: Match(instance(1), 20_000)}


async def test_canaries_live_with_their_reader_and_the_loss_of_one_is_told_once_and_for_its_worker(
    bench: Bench, client: Any
) -> None:
    directory = bench.directory
    assert isinstance(directory, RedisDirectory)
    feed = directory.feed("reader", deadline_s=PATIENT_S)

    async def kept() -> dict[WorkerId, bool]:
        return {worker: standing.is_canary_kept for worker, standing in (await feed.look([W1])).items()}

    assert [await kept(), await kept()] == [{W1: True, W2: True}] * 2
    assert 0 < await client.ttl(CANARY) <= 60
    await client.delete(CANARY)
    assert [await kept(), await kept()] == [{W1: False, W2: True}, {W1: True, W2: True}]
    assert await client.exists(CANARY)
    await feed.close()
    assert [raw async for raw in client.scan_iter(match="*:canary:*")] == []


async def test_list_that_cannot_be_read_hides_newcomers_only(bench: Bench, client: Any) -> None:
    directory = bench.directory
    assert isinstance(directory, RedisDirectory)
    await client.set("kvr:{org%2Fmodel:64:v1}:workers", b"nonsense")
    feed = directory.feed("reader", deadline_s=PATIENT_S)
    found = await feed.look([W1])
    assert {worker: standing.lease is not None for worker, standing in found.items()} == {W1: True}
    assert directory.num_malformed == 1


async def test_flushed_store_does_not_make_a_router_blind(store: Store, bench: Bench, client: Any) -> None:
    async with reading(store) as reader:
        await reader.caught_up()
        await client.flushall()
        known = reader.directory._worker_to_known
        await wait_until(lambda: all(worker.excused_until_s > 0 for worker in known.values()))
        assert await reader.directory.match(keys(range(3)), [W1, W2]) == {
            W1: Match(instance(1), 3),
            W2: Match(instance(1), 3),
        }
        await bench.directory.register(worker_info("w1", life=2), E2, LONG_LEASE_S)
        await wait_until(lambda: reader.directory.num_loads == 3)
        await wait_until(lambda: W1 in reader.directory.shown)
        assert await reader.directory.match(keys(range(3)), [W1, W2]) == {W2: Match(instance(1), 3)}


async def test_heartbeat_drops_events_that_are_old(bench: Bench, client: Any) -> None:
    await client.delete(f"{TAG}:events")
    seconds = int(time.time())
    for age_s in (3600, 60, 11, 1):
        await client.xadd(f"{TAG}:events", STREAM_FIELDS, id=f"{(seconds - age_s) * 1000}-0")
    assert await bench.directory.heartbeat(W1, E1, 1, LONG_LEASE_S) == Reply.OK
    assert await client.xlen(f"{TAG}:events") == 1


async def test_heartbeat_extends_the_lease_whatever_the_stream_is(bench: Bench, client: Any) -> None:
    await client.set(f"{TAG}:events", b"nonsense")
    assert await bench.directory.heartbeat(W1, E1, 1, 2 * LONG_LEASE_S) == Reply.OK
    assert await client.ttl(f"{TAG}:meta") > LONG_LEASE_S


async def test_stream_that_was_emptied_is_followed_from_its_next_entry(store: Store, bench: Bench, client: Any) -> None:
    await client.xtrim(f"{TAG}:events", maxlen=0, approximate=False)
    async with reading(store) as reader:
        await reader.caught_up()
        await bench.directory.apply(batch("w1", E1, 2, [3]))
        await reader.caught_up()
        assert await reader.directory.match([key(number) for number in range(5)], [W1]) == {W1: Match(instance(1), 4)}
        assert reader.directory.num_loads == 2
