"""A real server that is killed, comes back empty, or freezes: nobody waits long, and publishers mend what was lost."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from shared.directory.base import Match, Reply
from shared.directory.embedded import EmbeddedStore
from shared.directory.redis import RedisDirectory
from shared.errors import DirectoryUnavailable
from shared.types import WorkerId
from tests.support.stores import LONG_LEASE_S, PATIENT_S, SCHEME, embedded_store, epoch, keys, wait_until, worker_info
from worker.engines.base import BlockChange
from worker.publisher import Publisher

__all__ = ["embedded_store"]
pytestmark = pytest.mark.redis

W1 = WorkerId("w1")
REST_S = 0.05
IMPATIENT_S = 0.05
"""Deadline of calls to a server that is frozen: none of them is ever answered in time."""


@pytest.fixture
def store(embedded_store: EmbeddedStore) -> Iterator[EmbeddedStore]:
    """The module's server, running again after whatever a test did to it."""
    yield embedded_store
    if embedded_store.pid is not None:
        os.kill(embedded_store.pid, signal.SIGCONT)
    embedded_store.start()


async def kill(store: EmbeddedStore) -> None:
    assert store.pid is not None
    os.kill(store.pid, signal.SIGKILL)
    await wait_until(lambda: store.pid is None)


def freeze(store: EmbeddedStore) -> None:
    assert store.pid is not None
    os.kill(store.pid, signal.SIGSTOP)


@contextmanager
def frozen(store: EmbeddedStore, reader: RedisDirectory, publishers: RedisDirectory | None = None) -> Iterator[None]:
    """The server frozen, and calls given up soon meanwhile: a reader's matches and all of a publisher's.

    A server that runs is given all the time it needs, since how soon it answers is the machine's business.
    """
    reader._match_deadline_s = IMPATIENT_S
    if publishers is not None:
        publishers._publish_deadline_s = IMPATIENT_S
    freeze(store)
    try:
        yield
    finally:
        reader._match_deadline_s = PATIENT_S
        if publishers is not None:
            publishers._publish_deadline_s = PATIENT_S
        assert store.pid is not None
        os.kill(store.pid, signal.SIGCONT)


def patient(store: EmbeddedStore, *, deadline_s: float = PATIENT_S, rest_s: float = REST_S) -> RedisDirectory:
    return RedisDirectory(store.url, SCHEME, match_deadline_s=deadline_s, publish_deadline_s=PATIENT_S, rest_s=rest_s)


@asynccontextmanager
async def reading(
    store: EmbeddedStore, *, deadline_s: float = PATIENT_S, rest_s: float = REST_S
) -> AsyncIterator[RedisDirectory]:
    directory = patient(store, deadline_s=deadline_s, rest_s=rest_s)
    yield directory
    await directory.close()


@asynccontextmanager
async def publishing(store: EmbeddedStore, directory: RedisDirectory | None = None) -> AsyncIterator[Publisher]:
    """A publisher with twenty resident blocks, in the store already. Its lease never runs out."""
    directory = directory or patient(store)
    publisher = Publisher(directory, worker_info("w1"), rng=random.Random(0), lease_s=LONG_LEASE_S, heartbeat_s=0.1)
    await publisher.start()
    publisher.on_blocks(BlockChange(stored=keys(range(20))))
    await wait_until(lambda: publisher.is_quiet)
    yield publisher
    await publisher.stop()
    await directory.close()


async def wait_for_match(directory: RedisDirectory, num_blocks: int) -> None:
    expected = {W1: Match(worker_info("w1").instance, num_blocks)}
    async with asyncio.timeout(PATIENT_S):
        while True:
            try:
                if await directory.match(keys(range(50)), [W1]) == expected:
                    return
            except DirectoryUnavailable:
                pass
            await asyncio.sleep(0.01)


async def test_killed_server_that_comes_back_empty_is_filled_by_the_publisher(store: EmbeddedStore) -> None:
    async with publishing(store) as publisher, reading(store) as directory:
        await wait_for_match(directory, 20)
        await kill(store)
        with pytest.raises(DirectoryUnavailable, match=r"^match: "):
            await directory.match(keys(range(5)), [W1])
        publisher.on_blocks(BlockChange(stored=keys([20])))
        store.start()
        await wait_for_match(directory, 21)
        assert not publisher.is_evicted


async def test_frozen_server_that_thaws_is_mended_by_the_publisher(store: EmbeddedStore) -> None:
    publishers = patient(store)
    async with publishing(store, publishers) as publisher, reading(store) as directory:
        await wait_for_match(directory, 20)
        with frozen(store, directory, publishers):
            publisher.on_blocks(BlockChange(stored=keys([20])))
            # The bytes of the calls that are given up are what the server will find in its buffers.
            num_misses = publishers.num_misses
            await wait_until(lambda: publishers.num_misses >= num_misses + 2)
            publisher.on_blocks(BlockChange(removed=keys([10])))
        await wait_for_match(directory, 10)
        publisher.on_blocks(BlockChange(stored=keys([10])))
        await wait_for_match(directory, 21)
        assert await directory.resident(W1) == publisher.resident


async def test_match_on_a_frozen_server_fails_at_its_own_deadline(store: EmbeddedStore) -> None:
    async with reading(store) as directory:
        await directory.connect()
        with frozen(store, directory):
            patient_call = asyncio.ensure_future(directory.workers())
            with pytest.raises(DirectoryUnavailable, match=r"match: no answer within 0\.05 s"):
                await directory.match(keys(range(5)), [W1])
            assert not patient_call.done()
        assert await patient_call == []


async def miss(directory: RedisDirectory, num_times: int) -> None:
    for _ in range(num_times):
        with pytest.raises(DirectoryUnavailable, match="no answer"):
            await directory.match(keys(range(5)), [W1])


async def test_breaker_opens_after_three_misses_and_spares_all_who_follow(store: EmbeddedStore) -> None:
    async with reading(store, rest_s=3600.0) as directory:
        await directory.connect()
        with frozen(store, directory):
            await miss(directory, 3)
        assert (directory.is_resting, directory.num_misses, directory.num_breaker_openings) == (True, 3, 1)
        for _ in range(10):
            with pytest.raises(DirectoryUnavailable, match="has not answered lately"):
                await directory.match(keys(range(5)), [W1])
        assert (directory.num_misses, directory.num_spared) == (3, 10)


async def test_breaker_probes_after_its_rest_and_closes_and_one_outage_is_one_alarm(
    store: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with reading(store, rest_s=0.0) as directory:
        await directory.connect()
        with frozen(store, directory):
            await miss(directory, 5)
            assert directory.is_resting
        await wait_for_match_to_answer(directory)
        assert (directory.is_resting, directory.num_breaker_openings) == (False, 1)
    told = [record for record in caplog.records if record.name.startswith("shared.directory")]
    assert [record.levelno for record in told] == [logging.ERROR, logging.ERROR]


async def test_store_that_is_too_slow_for_matches_still_serves_everybody_else(store: EmbeddedStore) -> None:
    async with reading(store, deadline_s=0.0, rest_s=3600.0) as directory:  # no store is as fast as this
        assert await directory.register(worker_info("w1"), epoch(1), 60.0) == Reply.OK
        for _ in range(8):
            with pytest.raises(DirectoryUnavailable):
                await directory.match(keys(range(5)), [W1])
            assert [record.info.worker for record in await directory.workers()] == [W1]
            assert await directory.heartbeat(W1, epoch(1), 0, 60.0) == Reply.OK
        assert (directory.is_resting, directory.num_misses, directory.num_spared) == (True, 3, 5)
        await directory.forget(W1, worker_info("w1").instance)


async def answers(directory: RedisDirectory) -> bool:
    try:
        return await directory.match(keys(range(5)), [W1]) == {}
    except DirectoryUnavailable:
        return False


async def wait_for_match_to_answer(directory: RedisDirectory) -> None:
    async with asyncio.timeout(PATIENT_S):
        while not await answers(directory):
            await asyncio.sleep(0.01)


async def test_answers_never_get_mixed_up_after_calls_were_given_up(store: EmbeddedStore) -> None:
    async with publishing(store), reading(store, rest_s=0.0) as directory:
        for _ in range(3):
            with frozen(store, directory):
                for _ in range(4):
                    with pytest.raises(DirectoryUnavailable):
                        await directory.match(keys(range(20, 30)), [W1])
            for num_asked in (7, 3, 11):
                found = await directory.match(keys(range(num_asked)), [W1])
                assert found == {W1: Match(worker_info("w1").instance, num_asked)}


async def test_cancelled_calls_leave_a_directory_that_works(store: EmbeddedStore) -> None:
    async with reading(store) as directory:
        await directory.connect()
        for _ in range(30):
            call = asyncio.ensure_future(directory.match(keys(range(50)), [W1]))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert await directory.match(keys(range(5)), [W1]) == {}
        assert (directory.num_misses, directory.is_resting) == (0, False)
