"""A real server that freezes, dies or cuts its readers off: a mirror goes on matching, and is right again after it."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from shared.directory.base import Match
from shared.directory.embedded import EmbeddedStore
from shared.directory.mirrored import MirroredDirectory
from shared.directory.redis import RedisDirectory
from shared.types import WorkerId
from tests.faults.test_store import freeze, impatient, kill, thaw
from tests.support.stores import SCHEME, embedded_store, keys, wait_until, worker_info
from worker.engines.base import BlockChange
from worker.publisher import Publisher

__all__ = ["embedded_store"]
pytestmark = pytest.mark.redis

W1 = WorkerId("w1")
LEASE_S = 3.0
TWENTY = {W1: Match(worker_info("w1").instance, 20)}


@pytest.fixture
def store(embedded_store: EmbeddedStore) -> Iterator[EmbeddedStore]:
    """The module's server, running again after whatever a test did to it."""
    yield embedded_store
    if embedded_store.pid is not None:
        os.kill(embedded_store.pid, signal.SIGCONT)
    embedded_store.start()


@asynccontextmanager
async def mirroring(store: EmbeddedStore) -> AsyncIterator[MirroredDirectory]:
    """A mirror that looks often."""
    inner = RedisDirectory(store.url, SCHEME, match_deadline_s=1.0, publish_deadline_s=1.0, rest_s=0.05)
    directory = MirroredDirectory(inner, inner.feed("reader"), inner.breaker, refresh_s=0.05, prompt_s=5.0, wait_s=0.05)
    directory.start()
    yield directory
    await directory.close()


@asynccontextmanager
async def publishing(store: EmbeddedStore) -> AsyncIterator[Publisher]:
    """A publisher with twenty resident blocks."""
    directory = impatient(store)
    publisher = Publisher(directory, worker_info("w1"), rng=random.Random(0), lease_s=LEASE_S, heartbeat_s=0.1)
    await publisher.start()
    publisher.on_blocks(BlockChange(stored=keys(range(20))))
    yield publisher
    await publisher.stop()
    await directory.close()


async def until_match(directory: MirroredDirectory, num_blocks: int) -> None:
    """Until the mirror itself, not the store behind it, tells this depth."""
    expected = {W1: Match(worker_info("w1").instance, num_blocks)}
    async with asyncio.timeout(20.0):
        while W1 not in directory.shown or await directory.match(keys(range(50)), [W1]) != expected:
            await asyncio.sleep(0.005)


async def test_frozen_server_costs_no_match_and_is_one_alarm(
    store: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with publishing(store) as publisher, mirroring(store) as directory:
        await until_match(directory, 20)
        freeze(store)
        frozen_at_s = asyncio.get_running_loop().time()
        await wait_until(lambda: directory.is_resting)
        # The lease runs out meanwhile, and with it everything when the server wakes.
        while asyncio.get_running_loop().time() < frozen_at_s + LEASE_S + 0.5:
            assert await directory.match(keys(range(50)), [W1]) == TWENTY
            await asyncio.sleep(0.01)
        publisher.on_blocks(BlockChange(stored=keys([20])))
        thaw(store)
        await wait_until(lambda: not directory.is_resting)
        await until_match(directory, 21)
        assert directory.num_stale_matches > 0
    told = [record for record in caplog.records if record.name == "shared.directory.breaker"]
    assert [record.levelno for record in told] == [logging.ERROR, logging.ERROR]


async def test_killed_server_that_comes_back_empty_costs_no_match(store: EmbeddedStore) -> None:
    async with publishing(store) as publisher, mirroring(store) as directory:
        await until_match(directory, 20)
        await kill(store)
        assert await directory.match(keys(range(50)), [W1]) == TWENTY
        publisher.on_blocks(BlockChange(stored=keys([20])))
        store.start()
        await until_match(directory, 21)
        assert not publisher.is_evicted


async def test_reader_whose_connections_are_cut_goes_on_where_it_was(store: EmbeddedStore) -> None:
    async with publishing(store) as publisher, mirroring(store) as directory:
        await until_match(directory, 20)
        client = Redis.from_url(store.url)
        for number in range(20, 40):
            await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            publisher.on_blocks(BlockChange(stored=keys([number])))
            await asyncio.sleep(0.01)
        await client.aclose()
        await until_match(directory, 40)
        assert await directory.match(keys(range(50)), [W1]) == {W1: Match(worker_info("w1").instance, 40)}


async def test_killed_worker_is_forgotten_when_its_lease_ends(store: EmbeddedStore) -> None:
    async with publishing(store) as publisher, mirroring(store) as directory:
        await until_match(directory, 20)
        task = publisher._task
        assert task is not None
        task.cancel()
        await wait_until(lambda: W1 not in directory.shown)
        assert await directory.match(keys(range(50)), [W1]) == {}
        assert await directory.workers() == []
