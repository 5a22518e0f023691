"""What can happen to the directory, on real processes under a whole deployment.

Each test shows four things: no request fails; a request waits for the store's deadline at most, and only until the
breaker has opened; store, mirror and engines agree again afterwards, by themselves; and every process that met the
fault tells of it in one line, and of its end in another. Each runs with a router that asks the store and with one that
matches from a mirror.

    fault                                                 test
    store frozen for ten seconds and thawed               test_outage_of_the_store[frozen]
    store killed and back empty                           test_outage_of_the_store[killed, back empty]
    store killed and back with an old snapshot            test_outage_of_the_store[killed, back as it was]
    connection cut in the middle of a batch               test_connection_that_is_cut_in_the_middle_of_a_batch
    a worker's clock wrong by an hour                     test_clock_of_a_worker_that_is_wrong_by_an_hour
    publisher killed between two chunks of a snapshot     test_worker_killed_between_two_chunks_of_a_snapshot
    the last batch before a quiet hour lost               test_last_batch_before_a_quiet_hour_lost_by_the_store
    ZMQ events lost between a real engine and its worker  test_engine_events.py

That a wait ends at its deadline is in test_store.py, what exactly a store has applied in test_store_outages.py, and the
same on a Redis Cluster in test_cluster.py and test_mirror_cluster.py.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.directory.base import Match, Reply
from shared.directory.breaker import NUM_MISSES_TO_OPEN
from shared.directory.mirrored import MirroredDirectory
from shared.types import WorkerId
from tests.support.deployment import (
    NUM_REQUESTS,
    READINGS,
    Deployment,
    Reading,
    WorkerProcess,
    deployment,
    told,
)
from tests.support.proxy import Direction, proxy
from tests.support.rack import SCHEME
from tests.support.servers import ServerProcess, find_redis_server
from tests.support.stores import LONG_LEASE_S, PATIENT_S, key, keys, wait_until
from tests.support.worker_child import FIRST_KEYS

pytestmark = pytest.mark.redis

W1 = WorkerId("w1")
FROZEN_S = float(os.environ.get("KVROUTE_TEST_FROZEN_S", "10" if os.environ.get("CI") else "0"))
"""How long a frozen store stays so; ten seconds are two leases."""

either_reading = pytest.mark.parametrize("reading", READINGS)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """A Redis for one test, since what it leaves on its disk is part of some."""
    find_redis_server()
    with ServerProcess() as running:
        yield running


def save(server: ServerProcess) -> None:
    with server.blocking_client() as client:
        client.execute_command("SAVE")


OUTAGES: dict[str, Callable[[ServerProcess], None]] = {
    "frozen": ServerProcess.freeze,
    "killed, back empty": ServerProcess.kill,
    "killed, back as it was": ServerProcess.kill,
}


@either_reading
@pytest.mark.parametrize("outage", OUTAGES)
async def test_outage_of_the_store(
    server: ServerProcess, outage: str, reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    # The breaker rests for ever, so that the number of waits is known.
    async with deployment(server.url, reading, rest_s=3600.0) as deployed:
        if outage == "killed, back as it was":
            save(server)
            await deployed.ask_all()  # what it will not know
            await deployed.wait_for_truth()
        num_matches, num_waited, num_spared = counts(deployed)
        if outage == "frozen" and FROZEN_S:
            await renew_leases(deployed, server, FROZEN_S / 2)
        OUTAGES[outage](server)
        deployed.lose_patience()
        if reading == "mirrored":
            await deployed.until_everybody_has_noticed()
        await deployed.ask_all()
        await deployed.until_everybody_has_noticed()
        await asyncio.sleep(FROZEN_S if outage == "frozen" else 0.0)
        await deployed.ask_all()
        asked, waited, spared = counts(deployed)
        if isinstance(deployed.directory, MirroredDirectory):
            assert (asked, waited, spared) == (num_matches, num_waited, num_spared)
            assert deployed.directory.num_stale_matches == 2 * NUM_REQUESTS
        else:
            # A request asks once, and so waits for one deadline at most.
            assert asked - num_matches == 2 * NUM_REQUESTS
            assert waited - num_waited == NUM_MISSES_TO_OPEN
            assert spared - num_spared == 2 * NUM_REQUESTS - NUM_MISSES_TO_OPEN
        for slot in deployed.rack.worker_to_slot.values():
            slot.publisher._lease_s = LONG_LEASE_S
        server.start()
        deployed.regain_patience()
        await deployed.wait_for_truth()
        await deployed.ask_all()
        await deployed.wait_for_truth()
        assert (deployed.inner.num_breaker_openings, deployed.inner.is_resting) == (1, False)
    assert told(caplog) == Counter(
        [
            *("the directory's store misses", "the directory's store answers again"),
            *(f"worker w{number} {what}" for number in range(3) for what in ("cannot publish", "publishes again")),
        ]
    )


async def renew_leases(deployed: Deployment, server: ServerProcess, lease_s: float) -> None:
    """Let the next heartbeats ask for leases that will have run out when the store thaws."""
    for slot in deployed.rack.worker_to_slot.values():
        slot.publisher._lease_s = lease_s
    names = [f"kvr:{{{SCHEME.namespace}:{worker}}}:meta" for worker in deployed.rack.worker_to_slot]
    with server.blocking_client() as client:
        async with asyncio.timeout(PATIENT_S):
            while any(client.pttl(name) > 1000 * lease_s for name in names):
                await asyncio.sleep(0.01)


def counts(deployed: Deployment) -> tuple[int, int, int]:
    """Matches that the router asked the store for, those that waited in vain, and those that were spared that."""
    return deployed.inner.num_matches, deployed.inner.num_waited, deployed.inner.num_spared


@either_reading
async def test_last_batch_before_a_quiet_hour_lost_by_the_store(
    server: ServerProcess, reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    async with deployment(server.url, reading) as deployed:
        slot = deployed.rack.worker_to_slot[W1]
        save(server)
        slot.engine._put([key(1)])
        await deployed.wait_for_truth()
        num_failed_matches = deployed.inner.num_failed_matches
        server.kill()
        server.start()
        # Nobody asks and no block changes from here on: heartbeats alone find what is missing.
        await deployed.wait_for_truth()
        assert dict(slot.publisher.num_snapshots) == {"gap": 1}  # an empty store would not have known the worker
        if reading == "mirrored":  # which the test itself asks all the time
            assert deployed.inner.num_failed_matches == num_failed_matches
        await deployed.ask_all()
        await deployed.wait_for_truth()
    assert_one_alarm_of(W1, told(caplog))


def assert_one_alarm_of(worker: WorkerId, lines: Counter[str]) -> None:
    """The worker that met the fault tells of its beginning and of its end, and others that met it, too, no more."""
    assert (lines[f"worker {worker} cannot publish"], lines[f"worker {worker} publishes again"]) == (1, 1), lines
    assert set(lines.values()) == {1}, lines


@either_reading
@pytest.mark.parametrize("direction", ["to the store", "from the store"])
async def test_connection_that_is_cut_in_the_middle_of_a_batch(
    server: ServerProcess, direction: Direction, reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxy(server.url) as cutting, deployment(cutting.url, reading) as deployed:
        engine = deployed.rack.worker_to_slot[W1].engine
        num_openings = deployed.inner.num_breaker_openings
        # Far more than all that others say meanwhile: the cut is in the middle of this.
        cutting.cut_after(30_000 if direction == "to the store" else 0, direction)
        engine._put(list(keys(range(4000))))
        await asyncio.gather(deployed.ask_all(), wait_until(lambda: cutting.num_cuts == 1))
        await deployed.wait_for_truth()
        # A call on a connection that is cut fails at once; one of them is not yet an outage.
        assert (deployed.inner.num_breaker_openings, deployed.inner.num_spared) == (num_openings, 0)
        assert sum(slot.publisher.num_snapshots.total() for slot in deployed.rack.worker_to_slot.values()) == 0
        await deployed.ask_all()
        await deployed.wait_for_truth()
    lines = told(caplog)
    if direction == "to the store":
        assert_one_alarm_of(W1, lines)
    else:  # whoever was answered next
        assert set(lines.values()) <= {1}, lines


@either_reading
@pytest.mark.parametrize("hours", [1, -1])
async def test_clock_of_a_worker_that_is_wrong_by_an_hour(
    server: ServerProcess, hours: int, reading: Reading, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with WorkerProcess(server.url, "w1", tmp_path, clock_offset_s=3600.0 * hours) as process:
        async with deployment(server.url, reading, num_workers=1, processes=[process]) as deployed:
            num_failed_matches = deployed.inner.num_failed_matches
            with server.blocking_client() as client:
                names = [name for name in client.scan_iter() if b":w1}:" in name and b":canary:" not in name]
                leases_s = [client.ttl(name) for name in names]
            assert len(names) == 3
            assert all(0 < lease_s <= 600 for lease_s in leases_s)
            await deployed.ask_all()
            await deployed.wait_for_truth()
            assert deployed.inner.num_failed_matches == num_failed_matches
        # Time is the store's: there is nothing to be alarmed about.
        assert (told(caplog), await process.kill()) == (Counter(), "")


@either_reading
async def test_worker_killed_between_two_chunks_of_a_snapshot(
    server: ServerProcess, reading: Reading, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        WorkerProcess(server.url, "w1", tmp_path) as process,
        deployment(server.url, reading, num_workers=1, processes=[process]) as deployed,
    ):
        directory, inner = deployed.directory, deployed.inner
        num_failed_matches = inner.num_failed_matches
        before = await inner.resident(W1)
        assert before > set(FIRST_KEYS)
        await process.stall_in_a_snapshot()
        # A request of one token has none yet when it loses its worker, and goes to another one.
        asking = asyncio.create_task(deployed.ask_all(max_tokens=1))
        assert await process.kill() == ""
        await asking
        # What was true stays until the lease is over, and the half of a snapshot is never seen.
        assert await inner.resident(W1) == before
        assert await directory.match(keys(range(100)), [W1]) == {W1: Match(process.instance, len(FIRST_KEYS))}
        await end_lease(deployed, W1)
        deployed.processes.clear()
        await deployed.wait_for_truth()
        assert await inner.resident(W1) == set()
        async with WorkerProcess(server.url, "w1", tmp_path, life=2) as second_life:
            deployed.processes.append(second_life)
            await deployed.wait_for_truth()
            await deployed.ask_all()
            await deployed.wait_for_truth()
        assert inner.num_failed_matches == num_failed_matches
        deployed.processes.clear()
        await end_lease(deployed, W1)
        await deployed.wait_for_truth()
    assert told(caplog) == Counter({"worker w1 left": 2})  # each life once, by the router alone


async def end_lease(deployed: Deployment, worker: WorkerId) -> None:
    """Let a dead worker's lease run out."""
    for record in await deployed.inner.workers():
        if record.info.worker == worker:
            assert await deployed.inner.heartbeat(worker, record.epoch, record.seq, 0.001) == Reply.OK
    async with asyncio.timeout(PATIENT_S):
        while worker in [record.info.worker for record in await deployed.inner.workers()]:
            await asyncio.sleep(0.01)
