"""The publisher against the memory directory behind a bad network, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from shared.directory.base import MAX_KEYS_PER_CALL, Directory, Reply
from shared.directory.memory import MemoryDirectory
from shared.errors import DirectoryUnavailable, WorkerIdTaken
from shared.types import WorkerId
from shared.vtime import run_virtual
from tests.support.flaky_directory import Fault, FlakyDirectory
from tests.support.memory_store import MemoryStore
from tests.support.stores import SCHEME, epoch, keys, worker_info
from worker.engines.base import BlockChange
from worker.publisher import Publisher

W1 = WorkerId("w1")
LEASE_S = 5.0
HEARTBEAT_S = 1.0
TICK_S = 0.01
MENDING_S = 10.0
"""Longer than every backoff and lease: after so much quiet, all is mended."""


def fresh_directory() -> MemoryDirectory:
    return MemoryDirectory(SCHEME, asyncio.get_running_loop().time)


def make_publisher(
    directory: Directory,
    *,
    life: int = 1,
    max_pending_keys: int = 1 << 16,
    on_evicted: Callable[[str], None] | None = None,
) -> Publisher:
    return Publisher(
        directory,
        worker_info("w1", life=life),
        rng=random.Random(7),
        lease_s=LEASE_S,
        heartbeat_s=HEARTBEAT_S,
        tick_s=TICK_S,
        max_pending_keys=max_pending_keys,
        on_evicted=on_evicted,
    )


@asynccontextmanager
async def publishing(
    *, max_pending_keys: int = 1 << 16, on_evicted: Callable[[str], None] | None = None
) -> AsyncIterator[tuple[Publisher, FlakyDirectory]]:
    """A started publisher; fails if it is left unmended or leaves a task behind."""
    flaky = FlakyDirectory(fresh_directory())
    publisher = make_publisher(flaky, max_pending_keys=max_pending_keys, on_evicted=on_evicted)
    await publisher.start()
    yield publisher, flaky
    await asyncio.sleep(MENDING_S)
    if not publisher.is_evicted:
        assert publisher.is_quiet
        assert await flaky.inner.resident(W1) == publisher.resident
    await publisher.stop()
    await flaky.settle()
    assert len(asyncio.all_tasks()) == 1


def stored(numbers: Iterable[int]) -> BlockChange:
    return BlockChange(stored=keys(numbers))


def removed(numbers: Iterable[int]) -> BlockChange:
    return BlockChange(removed=keys(numbers))


def counts(flaky: FlakyDirectory, *operations: str) -> list[int]:
    return [flaky.calls.count(operation) for operation in operations]


# Quiet weather.


def test_changes_are_published_within_a_tick() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored(range(5)))
            publisher.on_blocks(removed([4]))
            await asyncio.sleep(2 * TICK_S)
            assert await flaky.inner.resident(W1) == set(keys(range(4)))
            assert (publisher.num_batches, publisher.seq, publisher.num_block_events) == (1, 1, 6)

    run_virtual(scenario())


def test_changes_within_a_tick_are_one_batch_with_the_last_state_of_each_key() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            for _ in range(100):
                publisher.on_blocks(stored(range(3)))
                publisher.on_blocks(removed(range(1, 3)))
            publisher.on_blocks(stored([2]))
            await asyncio.sleep(2 * TICK_S)
            assert await flaky.inner.resident(W1) == set(keys([0, 2]))
            assert counts(flaky, "apply") == [1]

    run_virtual(scenario())


def test_steady_changes_are_sent_once_a_tick() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            for number in range(1000):
                publisher.on_blocks(stored([number]))
                await asyncio.sleep(TICK_S / 10)
            assert 80 <= counts(flaky, "apply")[0] <= 101

    run_virtual(scenario())


def test_large_changes_are_split_into_calls_of_bounded_size() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored(range(2 * MAX_KEYS_PER_CALL + 1)))
            await asyncio.sleep(2 * TICK_S)
            assert len(await flaky.inner.resident(W1)) == 2 * MAX_KEYS_PER_CALL + 1
            assert counts(flaky, "apply", "stage") == [3, 0]

    run_virtual(scenario())


def test_changes_before_the_start_are_published_after_it() -> None:
    async def scenario() -> None:
        directory = fresh_directory()
        publisher = make_publisher(directory)
        publisher.on_blocks(stored(range(3)))
        await publisher.start()
        await asyncio.sleep(2 * TICK_S)
        assert await directory.resident(W1) == set(keys(range(3)))
        await publisher.stop()

    run_virtual(scenario())


def test_repeated_news_about_a_block_costs_no_call() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored([1]))
            await asyncio.sleep(2 * TICK_S)
            publisher.on_blocks(stored([1]))
            publisher.on_blocks(removed([9]))
            await asyncio.sleep(2 * TICK_S)
            assert counts(flaky, "apply") == [1]

    run_virtual(scenario())


def test_reset_is_an_empty_snapshot_and_later_changes_follow_it() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored(range(10_000)))
            await asyncio.sleep(2 * TICK_S)
            publisher.on_blocks(BlockChange(is_reset=True, stored=keys([3])))
            publisher.on_blocks(stored([4]))
            await asyncio.sleep(2 * TICK_S)
            publisher.on_blocks(stored([5]))
            await asyncio.sleep(2 * TICK_S)
            assert await flaky.inner.resident(W1) == set(keys([3, 4, 5]))
            assert (publisher.num_snapshots, counts(flaky, "stage", "commit")) == ({"reset": 1}, [1, 1])

    run_virtual(scenario())


def test_heartbeats_keep_the_lease_of_a_worker_without_news() -> None:
    async def scenario() -> None:
        async with publishing() as (_, flaky):
            await asyncio.sleep(100 * LEASE_S)
            assert [record.info.worker for record in await flaky.workers()] == [W1]
            assert 450 <= counts(flaky, "heartbeat")[0] <= 501

    run_virtual(scenario())


def test_heartbeats_go_on_under_a_stream_of_changes_and_long_snapshots() -> None:
    async def scenario() -> None:
        async with publishing(max_pending_keys=10) as (publisher, flaky):
            publisher.on_blocks(stored(range(50 * MAX_KEYS_PER_CALL)))
            flaky.fail_next("stage", *[Fault.DELAY] * 50)
            await asyncio.sleep(60.0)
            assert publisher.num_snapshots == {"overflow": 1}
            assert counts(flaky, "register") == [1]

    run_virtual(scenario())


def test_registration_of_a_worker_without_news_is_all_that_it_says_before_its_first_heartbeat_is_due() -> None:
    async def scenario() -> None:
        async with publishing() as (_, flaky):
            await asyncio.sleep(0.9 * HEARTBEAT_S)
            assert flaky.calls == ["register"]

    run_virtual(scenario())


def test_stop_forgets_the_worker_at_once_and_may_be_repeated() -> None:
    async def scenario() -> None:
        directory = fresh_directory()
        publisher = make_publisher(directory)
        await publisher.start()
        await publisher.stop()
        await publisher.stop()
        assert await directory.workers() == []

    run_virtual(scenario())


def test_draining_is_told_and_told_again_to_a_store_that_forgot() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.set_draining(True)
            await asyncio.sleep(2 * TICK_S)
            assert [record.is_draining for record in await flaky.workers()] == [True]
            flaky.inner = fresh_directory()
            await asyncio.sleep(MENDING_S)
            assert [record.is_draining for record in await flaky.workers()] == [True]
            publisher.set_draining(False)
            await asyncio.sleep(2 * TICK_S)
            assert [record.is_draining for record in await flaky.workers()] == [False]

    run_virtual(scenario())


def test_draining_is_told_again_before_anything_else_once_a_worker_has_registered_anew() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored([1]))
            publisher.set_draining(True)
            await asyncio.sleep(2 * TICK_S)
            flaky.inner = fresh_directory()
            flaky.calls.clear()
            await asyncio.sleep(MENDING_S)
            assert flaky.calls[:5] == ["heartbeat", "register", "set_draining", "stage", "commit"]

    run_virtual(scenario())


def test_heartbeat_that_comes_between_a_new_registration_and_its_snapshot_fits_the_registration() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored([1]))
            publisher.set_draining(True)
            await asyncio.sleep(2 * TICK_S)
            flaky.inner = fresh_directory()
            set_draining = flaky.set_draining

            async def slow_set_draining(*arguments: Any) -> Reply:
                await asyncio.sleep(1.5 * HEARTBEAT_S)
                return await set_draining(*arguments)

            flaky.set_draining = slow_set_draining  # type: ignore[method-assign]
            await asyncio.sleep(MENDING_S)
            assert publisher.num_snapshots == {"unknown": 1}
            flaky.set_draining = set_draining  # type: ignore[method-assign]

    run_virtual(scenario())


@pytest.mark.parametrize("fault", [Fault.LATE, Fault.REPEAT])
def test_late_word_about_draining_does_not_stand(fault: Fault) -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            flaky.fail_next("set_draining", fault)
            publisher.set_draining(True)
            await asyncio.sleep(0.3)
            publisher.set_draining(False)
            await asyncio.sleep(MENDING_S)
            assert [record.is_draining for record in await flaky.workers()] == [False]

    run_virtual(scenario())


# Faults.


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.LOSE_REPLY, Fault.LATE, Fault.REPEAT, Fault.DELAY])
@pytest.mark.parametrize("operation", ["register", "heartbeat", "apply", "stage", "commit", "set_draining"])
def test_one_fault_in_any_call_is_mended(operation: str, fault: Fault) -> None:
    async def scenario() -> None:
        flaky = FlakyDirectory(fresh_directory())
        flaky.fail_next(operation, fault)
        publisher = make_publisher(flaky)
        publisher.on_blocks(stored(range(10)))
        await publisher.start()
        publisher.set_draining(True)
        await asyncio.sleep(0.5)
        publisher.on_blocks(removed(range(3)))
        await asyncio.sleep(0.5)
        publisher.on_blocks(BlockChange(is_reset=True, stored=keys(range(2, 7))))
        await asyncio.sleep(0.5)
        publisher.on_blocks(BlockChange(stored=keys([7]), removed=keys([2])))
        await asyncio.sleep(MENDING_S)
        assert await flaky.inner.resident(W1) == set(keys(range(3, 8)))
        assert [(record.epoch, record.seq, record.is_draining) for record in await flaky.workers()] == [
            (publisher.epoch, publisher.seq, True)
        ]
        await publisher.stop()
        await flaky.settle()

    run_virtual(scenario())


def test_lost_reply_is_repeated_with_the_same_content() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            flaky.fail_next("apply", Fault.LOSE_REPLY)
            publisher.on_blocks(stored([1]))
            await asyncio.sleep(1.5 * TICK_S)
            publisher.on_blocks(removed([1]))
            await asyncio.sleep(0.5)
            assert await flaky.inner.resident(W1) == set()
            assert (publisher.seq, counts(flaky, "apply", "stage", "commit")) == (2, [3, 0, 0])

    run_virtual(scenario())


@pytest.mark.parametrize("operation", ["apply", "commit"])
def test_heartbeat_that_meets_what_took_effect_without_a_reply_leaves_it_to_the_repeat(operation: str) -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            # Repeats get lost for longer than heartbeats are apart: the store is ahead of what the publisher knows.
            flaky.fail_next(operation, Fault.LOSE_REPLY, *[Fault.DROP] * 6)
            publisher.on_blocks(BlockChange(is_reset=operation == "commit", stored=keys([1])))
            await asyncio.sleep(2 * TICK_S)
            assert await flaky.inner.resident(W1) == set(keys([1]))
            await asyncio.sleep(MENDING_S)
            assert counts(flaky, "register", operation) == [1, 8]
            assert publisher.num_snapshots == ({"reset": 1} if operation == "commit" else {})

    run_virtual(scenario())


def test_batch_without_a_reply_is_given_up_for_a_snapshot() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            flaky.fail_next("apply", Fault.DROP)
            publisher.on_blocks(stored([1]))
            await asyncio.sleep(1.5 * TICK_S)
            publisher.on_blocks(BlockChange(is_reset=True, stored=keys([2])))
            await asyncio.sleep(MENDING_S)
            assert (publisher.num_snapshots, counts(flaky, "register", "apply")) == ({"reset": 1}, [1, 1])

    run_virtual(scenario())


def test_gap_makes_the_publisher_send_a_snapshot_under_a_new_epoch() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored([1]))
            await asyncio.sleep(2 * TICK_S)
            first_epoch = publisher.epoch
            # The store falls back to an empty set of the same epoch, as a failover to a lagging replica does.
            await flaky.inner.register(worker_info("w1"), first_epoch, LEASE_S)
            publisher.on_blocks(stored([2]))
            await asyncio.sleep(0.5)
            assert await flaky.inner.resident(W1) == set(keys([1, 2]))
            assert publisher.num_snapshots == {"gap": 1}
            assert publisher.epoch != first_epoch

    run_virtual(scenario())


def test_lost_last_batch_is_noticed_in_a_quiet_system() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored([1]))
            await asyncio.sleep(2 * TICK_S)
            await flaky.inner.register(worker_info("w1"), publisher.epoch, LEASE_S)
            await asyncio.sleep(2 * HEARTBEAT_S)
            assert await flaky.inner.resident(W1) == set(keys([1]))

    run_virtual(scenario())


def test_stale_epoch_is_mended_by_registering_anew() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored([1]))
            await asyncio.sleep(2 * TICK_S)
            await flaky.inner.register(worker_info("w1"), epoch(99), LEASE_S)
            publisher.on_blocks(stored([2]))
            await asyncio.sleep(0.5)
            assert await flaky.inner.resident(W1) == set(keys([1, 2]))
            assert (publisher.num_snapshots, counts(flaky, "register")) == ({"stale": 1}, [2])

    run_virtual(scenario())


def test_store_that_comes_back_empty_is_filled_again() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored(range(3)))
            await asyncio.sleep(2 * TICK_S)
            flaky.inner = fresh_directory()
            await asyncio.sleep(2 * HEARTBEAT_S)
            assert await flaky.inner.resident(W1) == set(keys(range(3)))
            assert publisher.num_snapshots == {"unknown": 1}

    run_virtual(scenario())


def test_workers_come_back_to_an_empty_store_at_different_times() -> None:
    async def scenario() -> None:
        flaky = FlakyDirectory(fresh_directory())
        loop = asyncio.get_running_loop()
        fleet = [
            Publisher(flaky, worker_info(f"w{number}"), rng=random.Random(number), heartbeat_s=HEARTBEAT_S)
            for number in range(50)
        ]
        for publisher in fleet:
            await publisher.start()
        flaky.inner = fresh_directory()
        for publisher in fleet:
            publisher.on_blocks(stored([1]))
        returned_at_s: dict[WorkerId, float] = {}
        while len(returned_at_s) < len(fleet):
            await asyncio.sleep(0.01)
            for record in await flaky.workers():
                returned_at_s.setdefault(record.info.worker, loop.time())
        assert max(returned_at_s.values()) - min(returned_at_s.values()) > 0.3
        for publisher in fleet:
            await publisher.stop()

    run_virtual(scenario())


def test_outage_costs_two_log_lines_and_no_change(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            flaky.is_down = True
            for number in range(1000):
                publisher.on_blocks(stored([number]))
                await asyncio.sleep(0.06)
            num_calls = len(flaky.calls)
            flaky.is_down = False
            await asyncio.sleep(2 * HEARTBEAT_S)
            assert await flaky.inner.resident(W1) == set(keys(range(1000)))
            assert num_calls < 150

    with caplog.at_level(logging.INFO):
        run_virtual(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "worker w1 cannot publish, its changes are kept: apply: down",
        "worker w1 publishes again after 61.0 s",
    ]


@pytest.mark.parametrize("refused", ["apply", "stage", "commit"])
def test_store_that_takes_nothing_but_heartbeats_keeps_the_lease(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that is full."""

    async def refuse(*_: object) -> Reply:
        raise DirectoryUnavailable(f"{refused}: full")

    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored([1]))
            await asyncio.sleep(2 * TICK_S)
            before = publisher.epoch
            with monkeypatch.context() as patched:
                patched.setattr(flaky, refused, refuse)
                publisher.on_blocks(BlockChange(is_reset=refused != "apply", stored=keys([2])))
                await asyncio.sleep(5 * LEASE_S)
                assert [record.epoch for record in await flaky.workers()] == [before]
                assert await flaky.inner.resident(W1) == set(keys([1]))
            await asyncio.sleep(2 * HEARTBEAT_S)
            assert await flaky.inner.resident(W1) == publisher.resident
            assert (publisher.is_quiet, counts(flaky, "register")) == (True, [1])

    run_virtual(scenario())


def test_short_outage_is_caught_up_with_batches_and_no_snapshot() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            flaky.is_down = True
            publisher.on_blocks(stored(range(10)))
            await asyncio.sleep(1.0)
            publisher.on_blocks(removed(range(5)))
            flaky.is_down = False
            await asyncio.sleep(2.0)
            assert await flaky.inner.resident(W1) == set(keys(range(5, 10)))
            assert counts(flaky, "register", "commit") == [1, 0]

    run_virtual(scenario())


def test_backlog_over_its_bound_is_dropped_for_a_snapshot() -> None:
    async def scenario() -> None:
        async with publishing(max_pending_keys=100) as (publisher, flaky):
            flaky.is_down = True
            for number in range(0, 1000, 10):
                publisher.on_blocks(stored(range(number, number + 10)))
                assert len(publisher._pending) <= 100
            await asyncio.sleep(1.0)
            publisher.on_blocks(removed(range(500)))
            flaky.is_down = False
            await asyncio.sleep(2.0)
            assert await flaky.inner.resident(W1) == set(keys(range(500, 1000)))
            assert publisher.num_snapshots == {"overflow": 1}

    run_virtual(scenario())


def test_changes_during_a_snapshot_queue_behind_it() -> None:
    async def scenario() -> None:
        async with publishing(max_pending_keys=10) as (publisher, flaky):
            flaky.fail_next("stage", Fault.DELAY, Fault.DELAY, Fault.DELAY)
            publisher.on_blocks(stored(range(3 * MAX_KEYS_PER_CALL)))
            await asyncio.sleep(2 * TICK_S)
            publisher.on_blocks(BlockChange(stored=keys([20_000]), removed=keys([0])))
            await asyncio.sleep(MENDING_S)
            assert await flaky.inner.resident(W1) == {*keys(range(1, 3 * MAX_KEYS_PER_CALL)), *keys([20_000])}
            assert (publisher.num_snapshots, publisher.seq) == ({"overflow": 1}, 1)

    run_virtual(scenario())


def test_store_down_at_the_start_is_registered_with_later() -> None:
    async def scenario() -> None:
        flaky = FlakyDirectory(fresh_directory())
        flaky.is_down = True
        publisher = make_publisher(flaky)
        await publisher.start()
        publisher.on_blocks(stored([1]))
        await asyncio.sleep(30.0)
        flaky.is_down = False
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert await flaky.inner.resident(W1) == set(keys([1]))
        await publisher.stop()

    run_virtual(scenario())


@pytest.mark.parametrize("operation", ["register", "heartbeat", "apply", "stage", "commit", "set_draining"])
def test_unexpected_fault_is_told_once_and_started_over_at_growing_distances(
    operation: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        evictions: list[str] = []
        called_at_s: list[float] = []

        async def fail(*_: object) -> Reply:
            called_at_s.append(asyncio.get_running_loop().time())
            raise RuntimeError("a fault of our own")

        async with publishing(on_evicted=evictions.append) as (publisher, flaky):
            publisher.set_draining(True)
            await asyncio.sleep(HEARTBEAT_S)
            with monkeypatch.context() as patched:
                patched.setattr(flaky, operation, fail)
                await flaky.inner.forget(W1, worker_info("w1").instance)  # so that each operation has its turn
                for number in range(400):
                    publisher.on_blocks(stored([number]))
                    await asyncio.sleep(HEARTBEAT_S / 20)
            publisher.on_blocks(removed([0]))
            await asyncio.sleep(MENDING_S)
            assert await flaky.inner.resident(W1) == set(keys(range(1, 400)))
        assert not evictions
        assert 5 < len(called_at_s) < 60
        assert min(after - before for before, after in pairwise(called_at_s[-5:])) >= HEARTBEAT_S / 2

    run_virtual(scenario())
    # That the store has forgotten the worker is another matter, with an end of its own.
    told = [record for record in caplog.records if re.search("starts publishing over|faults", record.getMessage())]
    assert [record.levelno for record in told] == [logging.ERROR, logging.WARNING]


@pytest.mark.parametrize("loss", ["batch", "worker"])
def test_what_the_store_has_lost_is_told_once_and_mended(loss: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store = MemoryStore(SCHEME, asyncio.get_running_loop().time)
        publisher = make_publisher(store)
        await publisher.start()
        saved = store.saved()
        publisher.on_blocks(stored([1]))
        await asyncio.sleep(2 * TICK_S)
        store.restore(saved) if loss == "batch" else store.flush()
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert await store.resident(W1) == set(keys([1]))
        await publisher.stop()

    run_virtual(scenario())
    answer = {"batch": "GAP", "worker": "UNKNOWN"}[loss]
    first, second = [record.getMessage() for record in caplog.records]
    assert first == f"worker w1 cannot publish, its changes are kept: the store answers {answer} and gets a snapshot"
    assert re.fullmatch(r"worker w1 publishes again after \d\.\d s", second)


def test_stop_with_the_store_down_is_no_error() -> None:
    async def scenario() -> None:
        flaky = FlakyDirectory(fresh_directory())
        publisher = make_publisher(flaky)
        await publisher.start()
        flaky.is_down = True
        await publisher.stop()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())


# The id.


def test_second_holder_of_an_id_is_refused_with_both_names() -> None:
    async def scenario() -> None:
        directory = fresh_directory()
        first, second = make_publisher(directory, life=1), make_publisher(directory, life=2)
        await first.start()
        with pytest.raises(WorkerIdTaken, match=r"held by unix:/run/w1-1\.sock .*; refused unix:/run/w1-2\.sock"):
            await second.start()
        await second.stop()
        assert [record.info.instance for record in await directory.workers()] == [worker_info(life=1).instance]
        await first.stop()

    run_virtual(scenario())


@pytest.mark.parametrize("has_news", [False, True])
def test_worker_whose_id_was_taken_during_an_outage_gives_up_loudly(
    has_news: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reasons: list[str] = []

    async def scenario() -> None:
        async with publishing(on_evicted=reasons.append) as (publisher, flaky):
            publisher.on_blocks(stored([1]))
            await asyncio.sleep(2 * TICK_S)
            flaky.is_down = True
            await asyncio.sleep(2 * LEASE_S)
            assert await flaky.inner.register(worker_info("w1", life=2), epoch(5), 1000.0) == Reply.OK
            flaky.is_down = False
            if has_news:
                publisher.on_blocks(stored([2]))
            await asyncio.sleep(MENDING_S)
            assert publisher.is_evicted
            num_calls = len(flaky.calls)
            publisher.on_blocks(stored([3]))
            await asyncio.sleep(MENDING_S)
            assert len(flaky.calls) == num_calls
            await publisher.stop()
            assert [record.info.instance for record in await flaky.workers()] == [worker_info(life=2).instance]
            assert await flaky.inner.resident(W1) == set()

    run_virtual(scenario())
    assert len(reasons) == 1
    assert "worker id w1 is held by unix:/run/w1-2.sock" in reasons[0]
    assert [record.levelname for record in caplog.records if record.levelno >= logging.ERROR] == ["ERROR"]


def test_equally_seeded_lives_of_a_worker_never_share_an_epoch() -> None:
    async def scenario() -> None:
        directory = fresh_directory()
        seen = set()
        for life in (1, 2):
            publisher = make_publisher(directory, life=life)
            await publisher.start()
            seen.add(publisher.epoch)
            await publisher.stop()
        assert len(seen) == 2

    run_virtual(scenario())


# Replaced.


def test_the_engines_own_account_replaces_what_was_told_and_what_was_to_be_told() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored(range(10)))
            await asyncio.sleep(2 * TICK_S)
            publisher.on_blocks(stored([50]))
            epoch_before = publisher.epoch
            publisher.replace(set(keys([1, 2, 70])), "audit")
            publisher.on_blocks(stored([80]))
            await asyncio.sleep(4 * TICK_S)
            assert await flaky.inner.resident(W1) == set(keys([1, 2, 70, 80]))
            assert (publisher.epoch != epoch_before, publisher.is_quiet) == (True, True)
            assert publisher.num_snapshots == {"audit": 1}

    run_virtual(scenario())


def test_an_account_that_comes_while_a_snapshot_is_staged_is_published_after_it() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            flaky.fail_next("commit", Fault.DELAY)
            publisher.replace(set(keys([1])), "audit")
            await asyncio.sleep(2 * TICK_S)
            publisher.replace(set(keys([2])), "repair")
            await asyncio.sleep(MENDING_S)
            assert await flaky.inner.resident(W1) == set(keys([2]))
            assert publisher.num_snapshots == {"audit": 1, "repair": 1}

    run_virtual(scenario())


def test_changes_that_the_store_is_not_known_to_have_are_counted() -> None:
    async def scenario() -> None:
        async with publishing() as (publisher, flaky):
            publisher.on_blocks(stored(range(10)))
            assert publisher.num_pending == 10
            flaky.is_down = True
            await asyncio.sleep(2 * TICK_S)
            publisher.on_blocks(stored([50]))
            assert publisher.num_pending == 11
            flaky.is_down = False
            await asyncio.sleep(MENDING_S)
            assert publisher.num_pending == 0

    run_virtual(scenario())
