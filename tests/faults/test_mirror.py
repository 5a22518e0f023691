"""A real server that freezes, dies or cuts its readers off: a mirror goes on matching, and is right again after it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.directory.base import Match, Reply
from shared.directory.embedded import EmbeddedStore
from shared.directory.feed import Standing
from shared.directory.mirrored import MirroredDirectory
from shared.errors import DirectoryUnavailable
from shared.types import WorkerId
from tests.faults.test_store import IMPATIENT_S, frozen, kill, patient, publishing, store
from tests.support.stores import PATIENT_S, embedded_store, keys, wait_until, worker_info
from worker.engines.base import BlockChange

__all__ = ["embedded_store", "store"]
pytestmark = pytest.mark.redis

W1 = WorkerId("w1")
TAG = "kvr:{org%2Fmodel:64:v1:w1}"
TWENTY = {W1: Match(worker_info("w1").instance, 20)}


@asynccontextmanager
async def mirroring(store: EmbeddedStore) -> AsyncIterator[MirroredDirectory]:
    """A mirror that looks often, of a store that is given all the time it needs."""
    inner = patient(store)
    directory = MirroredDirectory(inner, inner.feed("reader", deadline_s=PATIENT_S), refresh_s=0.05, wait_s=0.05)
    directory.start()
    yield directory
    await directory.close()


@contextmanager
def impatient(directory: MirroredDirectory) -> Iterator[None]:
    """Looks are given up soon: for a store that does not answer at all."""
    feed: Any = directory._feed
    feed._deadline_s = IMPATIENT_S
    yield
    feed._deadline_s = PATIENT_S


async def until_match(directory: MirroredDirectory, num_blocks: int) -> None:
    """Until the mirror itself, not the store behind it, tells this depth."""
    expected = {W1: Match(worker_info("w1").instance, num_blocks)}
    async with asyncio.timeout(PATIENT_S):
        while W1 not in directory.shown or await directory.match(keys(range(50)), [W1]) != expected:
            await asyncio.sleep(0.005)


async def test_frozen_server_costs_no_match_and_is_one_alarm(
    store: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    publishers = patient(store)
    async with publishing(store, publishers) as publisher, mirroring(store) as directory:
        await until_match(directory, 20)
        async with Redis.from_url(store.url) as client:
            await client.ping()
            with frozen(store, publishers, publishers), impatient(directory):
                await wait_until(lambda: directory.is_resting)
                for _ in range(10):
                    assert await directory.match(keys(range(50)), [W1]) == TWENTY
                # What the server does first when it wakes, as if the lease had run out meanwhile.
                gone = asyncio.ensure_future(client.unlink(*(f"{TAG}:{kind}" for kind in ("meta", "blocks", "events"))))
                await asyncio.sleep(0)
                publisher.on_blocks(BlockChange(stored=keys([20])))
            assert await gone == 3
        await wait_until(lambda: not directory.is_resting)
        await until_match(directory, 21)
        assert directory.num_stale_matches >= 10
    told = [record for record in caplog.records if record.name == "shared.directory.breaker"]
    assert [record.levelno for record in told] == [logging.ERROR, logging.ERROR]


async def test_looks_call_no_store_well_that_is_too_slow_for_matches(store: EmbeddedStore) -> None:
    inner = patient(store, deadline_s=0.0)  # no store is as fast as this
    feed = inner.feed("reader", deadline_s=PATIENT_S)
    for _ in range(3):
        with pytest.raises(DirectoryUnavailable):
            await inner.match(keys(range(5)), [W1])
    for _ in range(3):
        assert await feed.look([W1]) == {W1: Standing(None, is_canary_kept=True)}
        assert inner.is_resting
    await inner.close()


async def test_outage_that_looks_have_met_ends_with_any_answer(store: EmbeddedStore) -> None:
    inner = patient(store, deadline_s=0.0)
    feed = inner.feed("reader", deadline_s=PATIENT_S)
    await feed.look([W1])
    with frozen(store, patient(store)):
        feed._deadline_s = IMPATIENT_S
        for _ in range(3):
            with pytest.raises(DirectoryUnavailable, match=r"^look: no answer"):
                await feed.look([W1])
        assert inner.is_resting
        feed._deadline_s = PATIENT_S
    await feed.look([W1])
    assert (inner.is_resting, inner.num_breaker_openings) == (False, 1)
    await inner.close()


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
        await asyncio.gather(task, return_exceptions=True)
        assert await directory.heartbeat(W1, publisher.epoch, publisher.seq, 0.001) == Reply.OK
        await wait_until(lambda: W1 not in directory.shown)
        assert await directory.match(keys(range(50)), [W1]) == {}
        assert await directory.workers() == []
