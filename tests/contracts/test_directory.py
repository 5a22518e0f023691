"""What every directory promises: one suite over the memory directory, every kind of store, and mirrors of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.directory.base import MAX_KEYS_PER_CALL, MAX_ROUTERS, Match, Reply, RouterPlace, WorkerRecord
from shared.errors import ConfigError
from shared.types import CacheScheme, EventBatch, Holder, RouterId, Tier, WorkerId
from tests.support.servers import redis_cluster, redis_server, secured_server
from tests.support.stores import (
    LONG_LEASE_S,
    PATIENT_S,
    SCHEME,
    STORES,
    Bench,
    batch,
    embedded_store,
    epoch,
    instance,
    key,
    keys,
    memory_bench,
    mirrored_bench,
    redis_bench,
    worker_info,
)

__all__ = ["embedded_store", "redis_cluster", "redis_server", "secured_server"]

E1, E2, E3 = epoch(1), epoch(2), epoch(3)
W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")


MIRRORED = {f"mirrored {kind}": kind for kind in ("valkey", "redis cluster")}


@pytest.fixture(params=["memory", *(pytest.param(kind, marks=pytest.mark.redis) for kind in (*STORES, *MIRRORED))])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    kind = MIRRORED.get(request.param, request.param)
    if kind == "memory":
        opened = memory_bench()
    else:
        open_bench = mirrored_bench if request.param in MIRRORED else redis_bench
        opened = open_bench(request.getfixturevalue(STORES[kind]))
    async with opened as found:
        yield found


async def hold(bench: Bench, name: str, numbers: range, *, life: int = 1) -> None:
    """A worker that registered and stored these keys with its first batch."""
    assert await bench.directory.register(worker_info(name, life=life), E1, LONG_LEASE_S) == Reply.OK
    assert await bench.directory.apply(batch(name, E1, 1, numbers)) == Reply.OK


async def depths(bench: Bench, numbers: range, *names: str) -> dict[str, int]:
    found = await bench.directory.match(keys(numbers), [WorkerId(name) for name in names])
    return {worker: match.num_blocks for worker, match in found.items()}


# Matching.


async def test_match_tells_the_longest_leading_run_and_whose_it_is(bench: Bench) -> None:
    await hold(bench, "w1", range(5), life=7)
    assert await bench.directory.match(keys(range(8)), [W1]) == {W1: Match(instance(7), 5)}


async def test_longest_holder_is_told_whatever_the_order_of_listing(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    await hold(bench, "w3", range(9))
    await hold(bench, "w2", range(9))
    await bench.let_expire("w3", E1, 1)
    assert await depths(bench, range(10), "w1", "w3", "w2") == {"w1": 3, "w2": 9}


async def test_match_stops_at_the_first_hole(bench: Bench) -> None:
    await hold(bench, "w1", range(10))
    await bench.directory.apply(batch("w1", E1, 2, removed=[4]))
    assert await depths(bench, range(10), "w1") == {"w1": 4}


async def test_worker_without_the_first_block_is_absent(bench: Bench) -> None:
    await hold(bench, "w1", range(1, 10))
    assert await depths(bench, range(10), "w1", "nobody") == {}


async def test_match_of_nothing_is_nothing(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    assert await depths(bench, range(0), "w1") == {}
    assert await depths(bench, range(3)) == {}


@pytest.mark.parametrize("num_held", [1, 15, 16, 17, 80, 4095, 4096, 4097, 9000])
async def test_match_counts_right_around_the_edges_of_its_chunks(bench: Bench, num_held: int) -> None:
    await bench.directory.register(worker_info("w1"), E1, LONG_LEASE_S)
    for seq, start in enumerate(range(0, num_held, MAX_KEYS_PER_CALL), start=1):
        chunk = range(start, min(start + MAX_KEYS_PER_CALL, num_held))
        assert await bench.directory.apply(batch("w1", E1, seq, chunk)) == Reply.OK
    await hold(bench, "w2", range(2))
    expected = {"w1": min(num_held, 9000), "w2": 2}
    assert await depths(bench, range(9000), "w1", "w2") == expected
    assert await depths(bench, range(num_held), "w1") == {"w1": num_held}


async def test_all_cleared_drops_one_worker_s_blocks_and_leaves_it_alive(bench: Bench) -> None:
    await hold(bench, "w1", range(10))
    await hold(bench, "w2", range(10))
    assert await bench.directory.commit(W1, E1, E2, 0) == Reply.OK
    assert await depths(bench, range(10), "w1", "w2") == {"w2": 10}
    assert [record.info.worker for record in await bench.directory.workers()] == [W1, W2]
    assert await bench.directory.apply(batch("w1", E2, 1, range(2))) == Reply.OK
    assert await depths(bench, range(10), "w1", "w2") == {"w1": 2, "w2": 10}


async def test_blocks_of_another_tier_are_refused_and_hide_nothing(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    for holder in (Holder(W1, E1, tier=Tier.CPU), Holder(W1, E1, rank=1), Holder(W1, E1, group=1)):
        with pytest.raises(ValueError, match="only 0, gpu, 0"):
            await bench.directory.apply(EventBatch(holder, 2, (), keys(range(3))))
    assert await depths(bench, range(3), "w1") == {"w1": 3}


# Batches.


async def test_removal_of_unknown_and_removed_blocks_changes_nothing_else(bench: Bench) -> None:
    a, b, c, d = range(4)
    await bench.directory.register(worker_info("w1"), E1, LONG_LEASE_S)
    await bench.directory.apply(batch("w1", E1, 1, [a, b, d]))
    await hold(bench, "w2", range(1))
    replies = await asyncio.gather(
        bench.directory.apply(batch("w1", E1, 2, removed=[a, c, d])),
        bench.directory.register(worker_info("w3"), E1, LONG_LEASE_S),
    )
    assert list(replies) == [Reply.OK, Reply.OK]
    assert await bench.directory.apply(batch("w1", E1, 3, removed=[a, c, d])) == Reply.OK
    assert [await bench.directory.resident(worker) for worker in (W1, W2, W3)] == [{key(b)}, {key(a)}, set()]


async def test_repeat_of_a_batch_is_ok_and_changes_nothing(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    await bench.directory.apply(batch("w1", E1, 2, removed=[2]))
    assert await bench.directory.apply(batch("w1", E1, 1, range(3))) == Reply.OK
    assert await bench.directory.apply(batch("w1", E1, 2, removed=[2])) == Reply.OK
    assert await bench.directory.resident(W1) == set(keys(range(2)))
    assert [record.seq for record in await bench.directory.workers()] == [2]


async def test_hole_between_batches_is_a_gap_and_changes_nothing(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    assert await bench.directory.apply(batch("w1", E1, 3, range(3, 6))) == Reply.GAP
    assert await bench.directory.resident(W1) == set(keys(range(3)))


async def test_batch_of_another_epoch_is_stale_and_changes_nothing(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    assert await bench.directory.apply(batch("w1", E2, 2, range(3, 6))) == Reply.STALE
    assert await bench.directory.resident(W1) == set(keys(range(3)))


async def test_batch_of_a_stranger_is_unknown_and_leaves_nothing(bench: Bench) -> None:
    assert await bench.directory.apply(batch("w1", E1, 1, range(3))) == Reply.UNKNOWN
    assert await bench.directory.resident(W1) == set()
    assert await bench.stored_keys() == []


async def test_empty_batch_counts(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    assert await bench.directory.apply(batch("w1", E1, 2)) == Reply.OK
    assert [record.seq for record in await bench.directory.workers()] == [2]


async def test_largest_batch_is_taken_and_one_key_more_is_refused(bench: Bench) -> None:
    await bench.directory.register(worker_info("w1"), E1, LONG_LEASE_S)
    half = MAX_KEYS_PER_CALL // 2
    assert await bench.directory.apply(batch("w1", E1, 1, range(MAX_KEYS_PER_CALL))) == Reply.OK
    assert await bench.directory.apply(batch("w1", E1, 2, range(5000, 5000 + half), range(half))) == Reply.OK
    assert await bench.directory.resident(W1) == set(keys(range(half, MAX_KEYS_PER_CALL))) | set(
        keys(range(5000, 5000 + half))
    )
    with pytest.raises(ValueError, match="limit is 4096"):
        await bench.directory.apply(batch("w1", E1, 3, range(MAX_KEYS_PER_CALL), [MAX_KEYS_PER_CALL]))
    with pytest.raises(ValueError, match="limit is 4096"):
        await bench.directory.stage(W1, E1, E2, keys(range(MAX_KEYS_PER_CALL + 1)))


# Leases.


async def test_live_id_is_taken_for_another_life_and_keeps_its_blocks(bench: Bench) -> None:
    await hold(bench, "w1", range(3), life=1)
    assert await bench.directory.register(worker_info("w1", life=2), E2, LONG_LEASE_S) == Reply.TAKEN
    assert await bench.directory.match(keys(range(3)), [W1]) == {W1: Match(instance(1), 3)}


async def test_same_life_registers_again_and_starts_empty(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    await bench.directory.stage(W1, E1, E3, keys(range(3)))
    await bench.directory.set_draining(W1, E1, True)
    assert await bench.directory.register(worker_info("w1"), E2, LONG_LEASE_S) == Reply.OK
    assert await bench.directory.workers() == [WorkerRecord(worker_info("w1"), E2, 0)]
    assert await bench.directory.resident(W1) == set()
    assert await bench.directory.apply(batch("w1", E1, 2, range(3))) == Reply.STALE
    assert await bench.directory.commit(W1, E2, E3, 3) == Reply.GAP


async def test_expired_worker_is_gone_with_all_it_had(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    await bench.directory.stage(W1, E1, E2, keys(range(3)))
    await bench.let_expire("w1", E1, 1)
    assert await depths(bench, range(3), "w1") == {}
    assert await bench.directory.resident(W1) == set()
    assert await bench.directory.workers() == []
    assert await bench.directory.apply(batch("w1", E1, 2, range(3))) == Reply.UNKNOWN
    assert await bench.directory.heartbeat(W1, E1, 1, LONG_LEASE_S) == Reply.UNKNOWN
    assert await bench.directory.stage(W1, E1, E2, keys(range(3))) == Reply.UNKNOWN
    assert await bench.directory.commit(W1, E1, E2, 3) == Reply.UNKNOWN
    assert await bench.directory.set_draining(W1, E1, True) == Reply.UNKNOWN
    assert await bench.directory.forget(W1, instance(1)) == Reply.UNKNOWN
    assert await bench.stored_keys() == []


async def test_id_of_an_expired_worker_is_free_and_starts_empty(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    await bench.let_expire("w1", E1, 1)
    assert await bench.directory.register(worker_info("w1", life=2), E2, LONG_LEASE_S) == Reply.OK
    assert await depths(bench, range(3), "w1") == {}
    assert [record.info.instance for record in await bench.directory.workers()] == [instance(2)]


@pytest.mark.parametrize("last_act", ["empty the set", "refill the set", "snapshot", "empty snapshot", "stage"])
async def test_nothing_outlives_the_lease_whatever_was_done_last(bench: Bench, last_act: str) -> None:
    directory = bench.directory
    await hold(bench, "w1", range(3))
    current, seq = E1, 2
    await directory.apply(batch("w1", E1, 2, removed=range(3)))
    if last_act == "refill the set":
        await directory.apply(batch("w1", E1, 3, range(5)))
        seq = 3
    elif last_act == "snapshot":
        await directory.stage(W1, E1, E2, keys(range(5)))
        await directory.commit(W1, E1, E2, 5)
        current, seq = E2, 0
    elif last_act == "empty snapshot":
        await directory.commit(W1, E1, E2, 0)
        current, seq = E2, 0
    elif last_act == "stage":
        await directory.stage(W1, E1, E2, keys(range(5)))
    if bench.client is not None:
        # Each key of the worker carries the lease's expiry at any time, not only after a heartbeat.
        stored = [name for name in await bench.stored_keys() if "{" in name and ":w1}" in name]
        expiries = {await bench.client.pexpiretime(name) for name in stored}
        assert len(expiries) == 1
        assert expiries.pop() > 0
    await bench.let_expire("w1", current, seq)
    assert await bench.directory.workers() == []  # takes the dead id off the list
    assert await bench.stored_keys() == []


async def test_list_of_workers_vanishes_by_itself_after_the_last_lease(bench: Bench) -> None:
    await bench.directory.register(worker_info("w1"), E1, 0.001)
    await bench.directory.register(worker_info("w2"), E1, 0.002)
    async with asyncio.timeout(PATIENT_S):
        while await bench.stored_keys():
            await asyncio.sleep(0.002)


async def test_reaping_a_worker_that_has_just_come_back_leaves_it_listed(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    await bench.let_expire("w1", E1, 1)
    for number in range(2, 30):
        listed, reply = await asyncio.gather(
            bench.directory.workers(),
            bench.directory.register(worker_info("w1", life=number), epoch(number), LONG_LEASE_S),
        )
        assert reply == Reply.OK
        assert [record.info.worker for record in await bench.directory.workers()] == [W1]
        assert await bench.directory.forget(W1, instance(number)) == Reply.OK
        assert len(listed) <= 1


async def test_heartbeat_keeps_a_worker_and_all_it_has_beyond_the_first_lease(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    await bench.directory.stage(W1, E1, E2, keys(range(4)))
    assert await bench.directory.heartbeat(W1, E1, 1, 2 * LONG_LEASE_S) == Reply.OK
    if bench.clock is not None:
        bench.clock.now_s += 1.5 * LONG_LEASE_S
    if bench.client is not None:
        assert len({await bench.client.pexpiretime(name) for name in await bench.stored_keys() if ":w1}" in name}) == 1
        assert min([await bench.client.ttl(name) for name in await bench.stored_keys()]) > 1.5 * LONG_LEASE_S
    assert await depths(bench, range(3), "w1") == {"w1": 3}
    assert await bench.directory.commit(W1, E1, E2, 4) == Reply.OK


async def test_heartbeat_tells_of_a_lost_last_batch_and_extends_the_lease_all_the_same(bench: Bench) -> None:
    await bench.directory.register(worker_info("w1"), E1, 30.0)
    assert await bench.directory.heartbeat(W1, E1, 1, LONG_LEASE_S) == Reply.GAP
    if bench.clock is not None:
        bench.clock.now_s += 60.0
    if bench.client is not None:
        assert min([await bench.client.ttl(name) for name in await bench.stored_keys()]) > 60.0
    assert [record.info.worker for record in await bench.directory.workers()] == [W1]


async def test_heartbeat_of_another_epoch_is_stale(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    assert await bench.directory.heartbeat(W1, E2, 1, LONG_LEASE_S) == Reply.STALE


# Snapshots.


async def test_staged_keys_are_invisible_until_the_commit_swaps_everything(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    await bench.directory.stage(W1, E1, E2, keys(range(3, 6)))
    await bench.directory.stage(W1, E1, E2, keys(range(6, 8)))
    assert await bench.directory.resident(W1) == set(keys(range(3)))
    assert await depths(bench, range(3, 8), "w1") == {}
    assert await bench.directory.commit(W1, E1, E2, 5) == Reply.OK
    assert await bench.directory.resident(W1) == set(keys(range(3, 8)))
    assert await bench.directory.workers() == [WorkerRecord(worker_info("w1"), E2, 0)]
    assert await bench.directory.apply(batch("w1", E1, 2, [9])) == Reply.STALE
    assert await bench.directory.apply(batch("w1", E2, 1, [9])) == Reply.OK


async def test_no_reader_sees_half_a_snapshot(bench: Bench) -> None:
    await hold(bench, "w1", range(500))
    seen: set[int] = set()

    async def read() -> None:
        for _ in range(60):
            seen.add((await depths(bench, range(500), "w1")).get("w1", 0))
            await asyncio.sleep(0)

    async def swap() -> None:
        for number in range(2, 12):
            size = 500 if number % 2 else 250
            for start in range(0, size, 50):
                await bench.directory.stage(W1, epoch(number - 1), epoch(number), keys(range(start, start + 50)))
            assert await bench.directory.commit(W1, epoch(number - 1), epoch(number), size) == Reply.OK

    await asyncio.gather(read(), swap())
    assert seen <= {250, 500}


async def test_repeated_stage_and_commit_change_nothing(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    for _ in range(2):
        assert await bench.directory.stage(W1, E1, E2, keys(range(5))) == Reply.OK
    assert await bench.directory.commit(W1, E1, E2, 5) == Reply.OK
    assert await bench.directory.apply(batch("w1", E2, 1, [7])) == Reply.OK
    assert await bench.directory.commit(W1, E1, E2, 5) == Reply.OK
    assert await bench.directory.stage(W1, E1, E2, keys(range(9))) == Reply.STALE
    assert await bench.directory.resident(W1) == {*keys(range(5)), key(7)}


async def test_commit_of_another_number_of_keys_is_a_gap_and_drops_what_was_staged(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    await bench.directory.stage(W1, E1, E2, keys(range(5)))
    assert await bench.directory.commit(W1, E1, E2, 6) == Reply.GAP
    assert await bench.directory.resident(W1) == set(keys(range(3)))
    assert await bench.directory.commit(W1, E1, E2, 5) == Reply.GAP
    assert not [name for name in await bench.stored_keys() if name.endswith(":staged")]


async def test_new_snapshot_drops_what_another_one_staged(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    await bench.directory.stage(W1, E1, E2, keys(range(5)))
    await bench.directory.stage(W1, E1, E3, keys(range(7, 9)))
    assert await bench.directory.commit(W1, E1, E3, 2) == Reply.OK
    assert await bench.directory.resident(W1) == set(keys(range(7, 9)))


async def test_empty_snapshot_ignores_what_another_one_staged(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    await bench.directory.stage(W1, E1, E2, keys(range(5)))
    assert await bench.directory.commit(W1, E1, E3, 0) == Reply.OK
    assert await bench.directory.resident(W1) == set()
    assert not [name for name in await bench.stored_keys() if name.endswith((":staged", ":blocks"))]


async def test_snapshot_of_another_epoch_is_stale(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    assert await bench.directory.stage(W1, E2, E3, keys(range(5))) == Reply.STALE
    assert await bench.directory.commit(W1, E2, E3, 0) == Reply.STALE
    assert await bench.directory.resident(W1) == set(keys(range(3)))


# Records.


async def test_workers_are_listed_by_id_with_all_they_announced(bench: Bench) -> None:
    await hold(bench, "w2", range(3))
    await bench.directory.register(worker_info("w1"), E3, LONG_LEASE_S)
    assert await bench.directory.workers() == [
        WorkerRecord(worker_info("w1"), E3, 0),
        WorkerRecord(worker_info("w2"), E1, 1),
    ]


async def test_draining_shows_in_the_record_and_survives_a_snapshot(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    assert await bench.directory.set_draining(W1, E1, True) == Reply.OK
    await bench.directory.commit(W1, E1, E2, 0)
    assert await bench.directory.workers() == [WorkerRecord(worker_info("w1"), E2, 0, is_draining=True)]
    assert await bench.directory.set_draining(W1, E1, False) == Reply.STALE
    assert await bench.directory.set_draining(W1, E2, False) == Reply.OK
    assert await bench.directory.workers() == [WorkerRecord(worker_info("w1"), E2, 0)]


async def test_forgotten_worker_leaves_nothing_and_others_stay(bench: Bench) -> None:
    await hold(bench, "w1", range(3))
    await hold(bench, "w2", range(3))
    await bench.directory.stage(W1, E1, E2, keys(range(3)))
    assert await bench.directory.forget(W1, instance(1)) == Reply.OK
    assert await depths(bench, range(3), "w1", "w2") == {"w2": 3}
    assert [record.info.worker for record in await bench.directory.workers()] == [W2]
    assert not [name for name in await bench.stored_keys() if ":w1}" in name]
    assert await bench.directory.forget(W2, instance(1)) == Reply.OK
    assert await bench.stored_keys() == []


async def test_forget_of_another_life_changes_nothing(bench: Bench) -> None:
    await hold(bench, "w1", range(3), life=1)
    assert await bench.directory.forget(W1, instance(2)) == Reply.UNKNOWN
    assert await depths(bench, range(3), "w1") == {"w1": 3}
    assert [record.info.worker for record in await bench.directory.workers()] == [W1]


@pytest.mark.parametrize(
    "other",
    [CacheScheme("org/other", 64), CacheScheme("org/model", 16), CacheScheme("org/model", 64, key_version=2)],
    ids=["model", "block size", "key version"],
)
async def test_namespaces_do_not_see_each_other(bench: Bench, other: CacheScheme) -> None:
    elsewhere = bench.connect(other)
    await hold(bench, "w1", range(3))
    assert await elsewhere.workers() == []
    assert await elsewhere.match(keys(range(3)), [W1]) == {}
    assert await elsewhere.register(worker_info("w1", life=2, scheme=other), E2, LONG_LEASE_S) == Reply.OK
    assert await elsewhere.forget(W1, instance(2)) == Reply.OK
    assert await depths(bench, range(3), "w1") == {"w1": 3}


async def test_worker_of_another_scheme_is_refused_by_name(bench: Bench) -> None:
    stranger = worker_info("w1", scheme=CacheScheme("org/model", 16))
    with pytest.raises(ConfigError, match=r"worker w1 announces .*block_size_tokens=16"):
        await bench.directory.register(stranger, E1, LONG_LEASE_S)
    assert SCHEME.block_size_tokens != 16
    assert await bench.directory.workers() == []


async def test_ids_with_any_characters_are_kept_apart(bench: Bench) -> None:
    names = ["a:b", "a", "b}", "{b", "a}:meta", "ä/%3A", "a%3Ab"]
    for number, name in enumerate(names):
        await hold(bench, name, range(number + 1))
    expected = {name: number + 1 for number, name in enumerate(names)}
    assert await depths(bench, range(20), *names) == expected
    assert [record.info.worker for record in await bench.directory.workers()] == sorted(names)


# Routers.


async def test_live_routers_are_ranked_by_id_whatever_the_order_of_their_coming(bench: Bench) -> None:
    directory = bench.directory
    for name in ("b", "c", "a"):
        await directory.announce_router(RouterId(name), LONG_LEASE_S)
    places = [await directory.announce_router(RouterId(name), LONG_LEASE_S) for name in ("a", "b", "c")]
    assert places == [RouterPlace(rank, 3) for rank in range(3)]


async def test_router_that_falls_silent_is_counted_no_more(bench: Bench) -> None:
    directory = bench.directory
    await directory.announce_router(RouterId("a"), 0.001)
    if bench.clock is not None:
        bench.clock.now_s += 1.0
    async with asyncio.timeout(PATIENT_S):
        while await directory.announce_router(RouterId("b"), LONG_LEASE_S) != RouterPlace(0, 1):
            await asyncio.sleep(0.002)


async def test_list_of_routers_vanishes_by_itself_after_the_last_lease(bench: Bench) -> None:
    await bench.directory.announce_router(RouterId("a"), 0.002)
    await bench.directory.announce_router(RouterId("b"), 0.001)
    async with asyncio.timeout(PATIENT_S):
        while await bench.stored_keys():
            await asyncio.sleep(0.002)


async def test_no_more_routers_are_counted_than_a_call_can_bear(bench: Bench) -> None:
    places = [
        await bench.directory.announce_router(RouterId(f"r{number:04}"), LONG_LEASE_S + number)
        for number in range(MAX_ROUTERS + 2)
    ]
    assert places[-1].num_routers == MAX_ROUTERS


async def test_routers_of_another_scheme_are_not_counted(bench: Bench) -> None:
    elsewhere = bench.connect(CacheScheme("org/other", 64))
    await elsewhere.announce_router(RouterId("a"), LONG_LEASE_S)
    assert await bench.directory.announce_router(RouterId("b"), LONG_LEASE_S) == RouterPlace(0, 1)
