"""Loads of a mirror that come to nothing: how often they are tried again, and what is told of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import pytest

from shared.directory import follower
from shared.directory.base import Reply
from shared.directory.feed import Entry, EntryId
from shared.errors import DirectoryUnavailable
from shared.types import BlockKey, WorkerId
from shared.vtime import run_virtual
from tests.support.stores import LONG_LEASE_S, batch, epoch, keys, wait_until, worker_info
from tests.unit.test_mirrored import E1, E2, W1, W2, Reader, Store, reading

LOAD_S = 4.0


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class SlowScans:
    """Makes scans of `w1` take long, and has something happen in the middle of each."""

    def __init__(self, reader: Reader, happen: Callable[[], None]) -> None:
        self.begun_at_s: list[float] = []
        self._happen = happen
        self._scan = reader.feed.scan
        reader.feed.scan = self.scan  # type: ignore[method-assign]

    async def scan(self, worker: WorkerId) -> AsyncGenerator[Sequence[BlockKey], None]:
        if worker == W1:
            self.begun_at_s.append(asyncio.get_running_loop().time())
            await asyncio.sleep(LOAD_S)
            self._happen()
        async for piece in self._scan(worker):
            yield piece


async def overtaken(store: Store, reader: Reader) -> SlowScans:
    """A store of which `w1` changes faster than it can be loaded."""
    await store.hold("w1", range(5))
    await store.hold("w2", range(5))
    seqs = itertools.count(2)
    now: list[asyncio.Task[Reply]] = []

    def publish_and_lose() -> None:
        async def publish() -> Reply:
            reply = await store.apply(batch("w1", E1, next(seqs)))
            store.trim(W1, 0)
            return reply

        now.append(asyncio.create_task(publish()))

    scans = SlowScans(reader, publish_and_lose)
    reader.directory.start()
    return scans


def test_loads_that_their_stream_overtakes_follow_at_growing_distances_and_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        store = Store()
        reader = Reader(store)
        scans = await overtaken(store, reader)
        await asyncio.sleep(500.0)
        pauses_s = [later - earlier - LOAD_S for earlier, later in itertools.pairwise(scans.begun_at_s)]
        # Each is half to all of the time of a load, doubled each time, up to a minute; a look comes in between.
        longest_s = [min(60.0, LOAD_S * 2**number) for number in range(len(pauses_s))]
        for pause_s, bound_s in zip(pauses_s, longest_s, strict=True):
            assert 0.5 * bound_s <= pause_s <= bound_s + 2.0
        assert 10 <= len(scans.begun_at_s) <= 20
        assert reader.directory.num_wasted_loads >= 9
        # The other worker is none the worse, and this one is matched through the store.
        assert reader.directory.shown == {W2}
        assert await reader.depths(range(5), W1, W2) == {W1: 5, W2: 5}
        await reader.directory.close()

    run_virtual(scenario())
    (told,) = warnings(caplog)
    assert told.startswith("worker w1 is not mirrored after 3 attempts, the last of 4.0 s, and is matched through the")
    assert "this process needs more processor time, or a faster way to the store" in told


def test_worker_that_can_be_loaded_again_is_told_of_once_it_stays(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store = Store()
        reader = Reader(store)
        scans = await overtaken(store, reader)
        await asyncio.sleep(60.0)
        assert len(warnings(caplog)) == 1
        scans._happen = lambda: None
        await reader.directory.caught_up()
        assert await reader.depths_in_memory(range(5), W1, W2) == {W1: 5, W2: 5}
        await asyncio.sleep(15.0)
        # What comes after is loaded at once.
        num_loads = len(scans.begun_at_s)
        assert await store.register(worker_info("w1"), E2, LONG_LEASE_S) == Reply.OK
        await asyncio.sleep(1.5)
        assert len(scans.begun_at_s) == num_loads + 1
        await reader.directory.close()

    run_virtual(scenario())
    assert warnings(caplog)[1:] == ["worker w1 is mirrored again"]


def test_sets_that_cannot_be_read_are_told_once_for_each_worker(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        await store.hold("w2", range(5))
        reader = Reader(store)

        async def no_scan(worker: WorkerId) -> AsyncGenerator[Sequence[BlockKey], None]:
            await asyncio.sleep(1.0)
            raise DirectoryUnavailable(f"scan of {worker}: no answer within 1 s")
            yield ()

        reader.feed.scan = no_scan  # type: ignore[method-assign]
        reader.directory.start()
        await asyncio.sleep(600.0)
        assert reader.directory.num_loads == 0
        assert reader.directory.num_wasted_loads < 50
        await reader.directory.close()

    run_virtual(scenario())
    assert [told.split(",")[0] for told in sorted(warnings(caplog))] == [
        "worker w1 is not mirrored after 3 attempts",
        "worker w2 is not mirrored after 3 attempts",
    ]
    assert all(told.endswith("no answer within 1 s") for told in warnings(caplog))


def test_stream_that_cannot_be_read_is_told_of_once_and_until_it_can(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        async with reading(store) as reader:
            read = reader.feed.read

            async def no_read(worker_to_entry: Mapping[WorkerId, EntryId], wait_s: float) -> object:
                raise DirectoryUnavailable("read: an entry of gigabytes")

            reader.feed.read = no_read  # type: ignore[method-assign,assignment]
            for seq in range(2, 200):
                await store.apply(batch("w1", E1, seq, [seq + 3]))
                await asyncio.sleep(1.0)
            assert reader.directory.shown == set()
            assert len(warnings(caplog)) == 1
            reader.feed.read = read  # type: ignore[method-assign]
            await reader.directory.caught_up()
            await asyncio.sleep(15.0)

    run_virtual(scenario())
    assert [text.split(",")[0] for text in warnings(caplog)] == [
        "worker w1 is not mirrored after 3 attempts",
        "worker w1 is mirrored again",
    ]
    assert warnings(caplog)[0].endswith(": its stream cannot be read")


def test_fault_while_streams_are_read_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        async with reading(store) as reader:
            read = reader.feed.read

            async def broken_read(worker_to_entry: Mapping[WorkerId, EntryId], wait_s: float) -> object:
                raise KeyError("a fault of ours")

            reader.feed.read = broken_read  # type: ignore[method-assign,assignment]
            await asyncio.sleep(20.0)
            assert reader.directory.num_faults > 100
            reader.feed.read = read  # type: ignore[method-assign]
            await store.apply(batch("w1", E1, 2, [5]))
            await reader.directory.caught_up()
            assert await reader.depths_in_memory(range(8), W1) == {W1: 6}

    run_virtual(scenario())
    assert warnings(caplog) == ["following event streams failed"]


def test_set_that_no_pool_could_have_is_read_once_in_an_epoch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(follower, "_MAX_KEYS_PER_WORKER", 50)

    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(100))
        await store.hold("w2", range(5))
        async with reading(store) as reader:
            await asyncio.sleep(60.0)
            assert (reader.feed.num_scans, reader.directory.shown) == (2, {W2})
            assert await reader.depths(range(100), W1, W2) == {W1: 100, W2: 5}
            await store.stage(W1, E1, E2, keys(range(101)))
            await store.commit(W1, E1, E2, 101)
            await asyncio.sleep(60.0)
            assert (reader.feed.num_scans, reader.directory.shown) == (3, {W2})
            await store.stage(W1, E2, epoch(3), keys(range(7)))
            await store.commit(W1, E2, epoch(3), 7)
            await reader.directory.caught_up()
            assert await reader.depths_in_memory(range(100), W1, W2) == {W1: 7, W2: 5}
            assert not reader.directory._mirror.has_dropped

    run_virtual(scenario())
    assert warnings(caplog) == ["worker w1 claims over 50 blocks: not mirrored"]


def test_few_workers_are_loaded_at_a_time() -> None:
    async def scenario() -> None:
        store = Store()
        for number in range(20):
            await store.hold(f"w{number}", range(5))
        reader = Reader(store)
        scan = reader.feed.scan
        under_way: set[WorkerId] = set()
        most = 0

        async def counted_scan(worker: WorkerId) -> AsyncGenerator[Sequence[BlockKey], None]:
            nonlocal most
            under_way.add(worker)
            most = max(most, len(under_way))
            await asyncio.sleep(1.0)
            async for piece in scan(worker):
                yield piece
            under_way.discard(worker)

        reader.feed.scan = counted_scan  # type: ignore[method-assign]
        reader.directory.start()
        await reader.directory.caught_up()
        assert (len(reader.directory.shown), most) == (20, 4)
        await reader.directory.close()

    run_virtual(scenario())


def test_loads_that_fail_leave_nothing_in_the_mirror() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(20))
        reader = Reader(store)
        scan = reader.feed.scan

        async def cut_scan(worker: WorkerId) -> AsyncGenerator[Sequence[BlockKey], None]:
            async for piece in scan(worker):
                yield piece
                raise DirectoryUnavailable("scan: cut off")

        reader.feed.scan = cut_scan  # type: ignore[method-assign]
        reader.directory.start()
        await wait_until(lambda: reader.directory.num_wasted_loads == 10)
        mirror = reader.directory._mirror
        await wait_until(lambda: not mirror.has_dropped)
        assert (mirror.num_slots, mirror.num_keys) == (0, 0)
        await reader.directory.close()

    run_virtual(scenario())


def test_nothing_is_kept_of_the_loads_of_workers_that_have_left() -> None:
    async def scenario() -> None:
        store = Store()
        async with reading(store) as reader:
            for number in range(20):
                name = f"w{number}"
                await store.hold(name, range(5))
                await wait_until(lambda name=name: name in reader.directory.shown)  # type: ignore[misc]
                await store.forget(WorkerId(name), worker_info(name).instance)
                await wait_until(lambda: not reader.directory.shown)
            assert reader.directory.num_loads == 20
            assert reader.directory._follower._worker_to_loads == {}

    run_virtual(scenario())


def test_late_answer_about_a_copy_that_was_replaced_does_nothing_to_the_new_one() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        async with reading(store) as reader:
            read, is_released = reader.feed.read, asyncio.Event()

            async def late_read(
                worker_to_entry: Mapping[WorkerId, EntryId], wait_s: float
            ) -> Mapping[WorkerId, Sequence[Entry]]:
                news = await read(worker_to_entry, wait_s)
                if news:
                    await is_released.wait()
                return news

            reader.feed.read = late_read  # type: ignore[method-assign]
            await asyncio.sleep(1.0)  # the read that was under way ends
            await store.apply(batch("w1", E1, 2, [5]))
            await store.register(worker_info("w1"), E2, LONG_LEASE_S)
            await wait_until(lambda: reader.directory.num_loads == 2)
            is_released.set()
            await reader.directory.caught_up()
            await asyncio.sleep(60.0)
            assert (reader.directory.shown, reader.directory.num_loads) == ({W1}, 2)

    run_virtual(scenario())
