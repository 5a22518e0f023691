from __future__ import annotations

import asyncio

import pytest

from shared.directory.base import Reply
from shared.directory.feed import EntryId
from shared.directory.streamed import StreamedDirectory, StreamedFeed
from shared.types import BlockKey, CacheScheme, Epoch, EventBatch, Holder, Instance, WorkerId, WorkerInfo
from shared.vtime import run_virtual

SCHEME = CacheScheme("m", 16)
W1, W2 = WorkerId("w1"), WorkerId("w2")
EPOCH = Epoch("0" * 32)


def info(worker: WorkerId) -> WorkerInfo:
    return WorkerInfo(worker, Instance("1" * 32), "unix:/nowhere", SCHEME, b"", 8, 8, 1024, "none", "lru")


def batch(worker: WorkerId, seq: int) -> EventBatch:
    return EventBatch(Holder(worker, EPOCH), seq, (BlockKey(bytes([seq]) * 16),), ())


async def opened(**more: int) -> StreamedDirectory:
    store = StreamedDirectory(SCHEME, asyncio.get_running_loop().time, **more)
    for worker in (W1, W2):
        assert await store.register(info(worker), EPOCH, 1000.0) is Reply.OK
    return store


def test_what_is_written_can_be_read_after_the_lag_and_not_before() -> None:
    async def scenario() -> list[tuple[float, list[int]]]:
        loop = asyncio.get_running_loop()
        store = await opened()
        feed = StreamedFeed(store, lag_s=2.0)
        position = await feed.position(W1)
        assert position is not None

        async def write() -> None:
            for seq, at_s in ((1, 5.0), (2, 6.0), (3, 20.0)):
                await asyncio.sleep(at_s - loop.time())
                assert await store.apply(batch(W1, seq)) is Reply.OK

        writing = asyncio.create_task(write())
        last, seen = position.last_entry, []
        while len(seen) < 4:
            news = await feed.read({W1: last}, 10.0)
            seen.append((loop.time(), [entry.batch.seq for entry in news.get(W1, ()) if entry.batch is not None]))
            if W1 in news:
                last = news[W1][-1].entry
        await writing
        return seen

    assert run_virtual(scenario()) == [
        (pytest.approx(7.0), [1]),
        (pytest.approx(8.0), [2]),
        (pytest.approx(18.0), []),
        (pytest.approx(22.0), [3]),
    ]


def test_a_reader_of_one_worker_is_not_woken_by_another() -> None:
    async def scenario() -> float:
        store = await opened()
        feed = StreamedFeed(store)
        position = await feed.position(W2)
        assert position is not None
        reading = asyncio.create_task(feed.read({W2: position.last_entry}, 10.0))
        await asyncio.sleep(1.0)
        await store.apply(batch(W1, 1))
        assert await reading == {}
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == pytest.approx(10.0)


def test_a_stream_keeps_its_last_entries_and_goes_with_the_lease() -> None:
    async def scenario() -> None:
        store = await opened(max_stream_entries=3)
        for seq in range(1, 6):
            await store.apply(batch(W1, seq))
        news = await StreamedFeed(store).read({W1: EntryId("0")}, 0.0)
        assert [entry.batch.seq for entry in news[W1] if entry.batch is not None] == [3, 4, 5]
        await store.forget(W1, Instance("1" * 32))
        await asyncio.sleep(2000.0)
        assert store.lease(W2) is None
        assert store.worker_to_stream == {}

    run_virtual(scenario())
