"""A router, its workers and a real store with which everything goes wrong: no request fails, and the truth comes back.

Events that ZMQ loses between an engine and its worker never reach the store: tests/unit/test_vllm_events.py has them.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import random
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from router.service import Router
from shared.directory.base import MAX_KEYS_PER_CALL, Match, Reply
from shared.directory.breaker import NUM_MISSES_TO_OPEN
from shared.directory.redis import RedisDirectory
from shared.errors import DirectoryUnavailable
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, WorkerId
from tests.support.fakes import fake_tokens
from tests.support.proxy import Direction, Proxy, proxy
from tests.support.publisher_child import NUM_BLOCKS
from tests.support.rack import SCHEME as RACK_SCHEME
from tests.support.rack import Rack, ask, prompt, rack
from tests.support.servers import START_TIMEOUT_S, ServerProcess, find_redis_server
from tests.support.stores import (
    PATIENT_S,
    SCHEME,
    batch,
    epoch,
    instance,
    keys,
    wait_until,
    worker_info,
)
from worker.engines.base import BlockChange
from worker.publisher import Publisher

pytestmark = pytest.mark.redis

W1 = WorkerId("w1")
NUM_REQUESTS = 12
FROZEN_S = float(os.environ.get("KVROUTE_TEST_FROZEN_S", "0"))
"""How long a frozen store stays so beyond what the requests of the test take."""


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A Redis for one test, since what it leaves on its disk is part of some."""
    find_redis_server()
    with ServerProcess(*getattr(request, "param", ())) as running:
        yield running


class CountingDirectory(RedisDirectory):
    """Counts the matches that failed, those that waited and those that were spared the wait."""

    num_failed_matches = 0

    async def match(self, keys: Sequence[BlockKey], workers: Iterable[WorkerId]) -> Mapping[WorkerId, Match]:
        try:
            return await super().match(keys, workers)
        except DirectoryUnavailable:
            self.num_failed_matches += 1
            raise

    @property
    def num_waited(self) -> int:
        return self.num_failed_matches - self.num_spared


@dataclass(slots=True)
class Deployment:
    """A router over three workers; publishers and router have directories of their own, as processes do."""

    rack: Rack
    router: Router
    directory: CountingDirectory
    publishers: RedisDirectory
    reader: RedisDirectory
    num_asked: int = 0

    async def ask_all(self) -> None:
        """Requests of four prefixes, one after the other, each answered in full."""
        for _ in range(NUM_REQUESTS):
            self.num_asked += 1
            token_ids = prompt(self.num_asked % 4, 160, self.num_asked)
            answer, _ = await ask(self.router, f"request-{self.num_asked}", token_ids)
            assert answer == fake_tokens(token_ids, 8)

    async def wait_for_truth(self) -> None:
        """Until the store tells of each worker what its engine holds, to every reader."""
        token_ids = pack_tokens(prompt(1, 160, 1))
        chain = block_keys(token_ids, RACK_SCHEME.block_size_tokens, root_key(RACK_SCHEME))
        publishers = {worker: slot.publisher for worker, slot in self.rack.worker_to_slot.items()}
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await self._is_true(publishers, chain):
                await asyncio.sleep(0.02)
        assert not any(publisher.is_evicted for publisher in publishers.values())

    async def _is_true(self, publishers: dict[WorkerId, Publisher], chain: Sequence[BlockKey]) -> bool:
        if not all(publisher.is_quiet for publisher in publishers.values()):
            return False
        try:
            held = {worker: await self.reader.resident(worker) for worker in publishers}
            found = await self.reader.match(chain, publishers)
            listed = [record.info.worker for record in await self.reader.workers()]
        except DirectoryUnavailable:
            return False
        expected = {}
        for worker, publisher in publishers.items():
            depth = next((depth for depth, key in enumerate(chain) if key not in publisher.resident), len(chain))
            if depth:
                expected[worker] = depth
        return (
            held == {worker: publisher.resident for worker, publisher in publishers.items()}
            and {worker: match.num_blocks for worker, match in found.items()} == expected
            and listed == sorted(publishers)
        )

    def lose_patience(self, deadline_s: float) -> None:
        """Change every deadline: short ones are for a store that does not answer at all, whatever the machine does."""
        self.directory._match_deadline_s = deadline_s
        self.publishers._publish_deadline_s = deadline_s

    def regain_patience(self) -> None:
        """Undo that, and end the breakers' rest, which is endless so that the number of waits is known."""
        self.lose_patience(PATIENT_S)
        for server in self.directory._connection._servers.primaries:
            server.breaker._rests_until_s = 0.0


@asynccontextmanager
async def deployment(url: str) -> AsyncIterator[Deployment]:
    publishers = RedisDirectory(url, RACK_SCHEME, publish_deadline_s=PATIENT_S)
    patience = {"match_deadline_s": PATIENT_S, "publish_deadline_s": PATIENT_S}
    routers = CountingDirectory(url, RACK_SCHEME, **patience, rest_s=3600.0)
    reader = RedisDirectory(url, RACK_SCHEME, **patience, rest_s=0.05)
    try:
        async with rack(3, publishers) as built:
            built.directory = routers
            async with built.router(refresh_s=0.1) as router:
                deployed = Deployment(built, router, routers, publishers, reader)
                await deployed.ask_all()
                await deployed.wait_for_truth()
                yield deployed
    finally:
        for directory in (publishers, routers, reader):
            await directory.close()


def freeze(server: ServerProcess) -> None:
    server.freeze()


def kill(server: ServerProcess) -> None:
    server.kill()


def save_and_kill(server: ServerProcess) -> None:
    with server.blocking_client() as client:
        client.execute_command("SAVE")
    server.kill()


@pytest.mark.parametrize("break_it", [freeze, kill, save_and_kill], ids=["frozen", "killed, empty", "killed, restored"])
async def test_outage_fails_no_request_costs_three_waits_and_heals(
    server: ServerProcess, break_it: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with deployment(server.url) as deployed:
        directory = deployed.directory
        assert (directory.num_failed_matches, directory.num_breaker_openings) == (0, 0)
        break_it(server)
        deployed.lose_patience(0.1)
        await deployed.ask_all()
        assert (directory.num_waited, directory.num_spared) == (NUM_MISSES_TO_OPEN, NUM_REQUESTS - NUM_MISSES_TO_OPEN)
        await asyncio.sleep(FROZEN_S)
        server.start()
        deployed.regain_patience()
        await deployed.wait_for_truth()
        await deployed.ask_all()
        await deployed.wait_for_truth()
        assert (directory.num_breaker_openings, directory.is_resting) == (1, False)
    assert_one_alarm(caplog)


def assert_one_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """The router's directory tells of the outage and of its end, and each publisher at most once."""
    of_router = [record.getMessage() for record in caplog.records if record.name == "shared.directory.breaker"]
    assert len([text for text in of_router if "asked again every 3.6e+03 s" in text]) == 1
    of_publishers = [record.getMessage() for record in caplog.records if record.name == "worker.publisher"]
    for name in ("w0", "w1", "w2"):
        assert len([text for text in of_publishers if text.startswith(f"worker {name} cannot publish")]) <= 1


@pytest.mark.parametrize("server", [(), ("--appendonly", "yes")], indirect=True, ids=["RDB", "AOF"])
async def test_old_snapshot_is_mended_in_a_quiet_system(server: ServerProcess) -> None:
    """What the store lost is the last batch before a quiet hour: heartbeats alone find it."""
    directory = RedisDirectory(server.url, SCHEME, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S)
    publisher = Publisher(directory, worker_info("w1"), rng=random.Random(0), lease_s=600.0, heartbeat_s=0.1)
    await publisher.start()
    publisher.on_blocks(BlockChange(stored=keys(range(20))))
    await wait_until(lambda: publisher.is_quiet)
    is_log = server.folder.joinpath("appendonlydir").exists()
    if is_log:
        shutil.copytree(server.folder / "appendonlydir", server.folder / "old")
    else:
        with server.blocking_client() as client:
            client.execute_command("SAVE")
    old_epoch, old_seq = publisher.epoch, publisher.seq
    publisher.on_blocks(BlockChange(stored=keys([20]), removed=keys([10])))
    await wait_until(lambda: publisher.is_quiet)
    assert publisher.seq == old_seq + 1
    server.kill()
    if is_log:
        shutil.rmtree(server.folder / "appendonlydir")
        (server.folder / "old").rename(server.folder / "appendonlydir")
    server.start()
    async with asyncio.timeout(START_TIMEOUT_S):
        while publisher.epoch == old_epoch or not publisher.is_quiet:
            await asyncio.sleep(0.01)
    assert dict(publisher.num_snapshots) == {"gap": 1}  # an empty store would not have known it
    assert await directory.resident(W1) == publisher.resident == set(keys([*range(10), *range(11, 21)]))
    await publisher.stop()
    await directory.close()


@pytest.fixture
async def cutting(server: ServerProcess) -> AsyncIterator[Proxy]:
    async with proxy(server.url) as opened:
        yield opened


@pytest.mark.parametrize("direction", ["to the store", "from the store"])
async def test_connection_cut_in_the_middle_of_a_batch_applies_it_once(
    server: ServerProcess, cutting: Proxy, direction: Direction
) -> None:
    directory = RedisDirectory(cutting.url, SCHEME, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S)
    publisher = Publisher(directory, worker_info("w1"), rng=random.Random(0), lease_s=600.0, heartbeat_s=600.0)
    await publisher.start()
    publisher.on_blocks(BlockChange(stored=keys(range(20))))
    await wait_until(lambda: publisher.is_quiet)
    num_misses, seq = directory.num_misses, publisher.seq
    cutting.cut_after(1000 if direction == "to the store" else 0, direction)
    publisher.on_blocks(BlockChange(stored=keys(range(20, MAX_KEYS_PER_CALL)), removed=keys(range(5))))
    await wait_until(lambda: publisher.is_quiet)
    assert (cutting.num_cuts, directory.num_misses - num_misses, publisher.seq - seq) == (1, 1, 1)
    assert await directory.resident(W1) == publisher.resident == set(keys(range(5, MAX_KEYS_PER_CALL)))
    with server.blocking_client() as client:
        entries = client.xrange("kvr:{org%2Fmodel:64:v1:w1}:events")
    assert [entry[b"seq"] for _, entry in entries] == [b"0", b"1", b"2"]  # told once to whoever follows
    assert sum(publisher.num_snapshots.values()) == 0
    await publisher.stop()
    await directory.close()


async def test_requests_go_on_while_every_connection_is_cut_again_and_again(
    server: ServerProcess, cutting: Proxy
) -> None:
    async with deployment(cutting.url) as deployed:
        for num_bytes in (0, 1, 100, 1000, 5000):
            cutting.cut_after(num_bytes, "from the store" if num_bytes % 2 else "to the store")
            await deployed.ask_all()
            cutting.cut()
        deployed.regain_patience()
        await deployed.wait_for_truth()


@pytest.mark.parametrize("hours", [1, -1])
async def test_clock_of_a_worker_that_is_wrong_by_an_hour_changes_nothing(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    real_time_s = time.time

    class ShiftedDatetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return datetime.datetime.fromtimestamp(time.time(), tz)

    monkeypatch.setattr(time, "time", lambda: real_time_s() + 3600 * hours)
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    monkeypatch.setattr(datetime, "datetime", ShiftedDatetime)
    directory = RedisDirectory(server.url, SCHEME, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S)
    publisher = Publisher(directory, worker_info("w1"), rng=random.Random(0), lease_s=600.0, heartbeat_s=0.05)
    await publisher.start()
    publisher.on_blocks(BlockChange(stored=keys(range(20))))
    await wait_until(lambda: publisher.is_quiet)
    assert await directory.heartbeat(W1, publisher.epoch, publisher.seq, 600.0) == Reply.OK
    with server.blocking_client() as client:
        names = [name for name in client.scan_iter() if b":w1}:" in name]
        leases_s = [client.ttl(name) for name in names]
    assert len(names) == 3
    assert all(0 < lease_s <= 600 for lease_s in leases_s)
    assert await directory.match(keys(range(30)), [W1]) == {W1: Match(instance(1), 20)}
    assert (publisher.is_evicted, sum(publisher.num_snapshots.values()), directory.num_misses) == (False, 0, 0)
    await publisher.stop()
    await directory.close()


async def test_publisher_killed_between_two_chunks_of_a_snapshot_leaves_what_was_true_and_then_nothing(
    server: ServerProcess,
) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.publisher_child", server.url, stdout=asyncio.subprocess.PIPE
    )
    directory = RedisDirectory(server.url, SCHEME, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(60.0):
            assert await child.stdout.readline() == b"staged\n"
        child.kill()
        await child.wait()
        with server.blocking_client() as client:
            assert client.scard("kvr:{org%2Fmodel:64:v1:w1}:staged") == MAX_KEYS_PER_CALL
        assert await directory.match(keys(range(100)), [W1]) == {W1: Match(instance(1), NUM_BLOCKS)}
        (record,) = await directory.workers()
        assert await directory.register(worker_info("w1", life=2), epoch(2), 600.0) == Reply.TAKEN
        assert await directory.heartbeat(W1, record.epoch, record.seq, 0.001) == Reply.OK
        # With the lease all of it goes, and the next life starts from nothing.
        async with asyncio.timeout(START_TIMEOUT_S):
            while await directory.register(worker_info("w1", life=2), epoch(2), 600.0) is not Reply.OK:
                await asyncio.sleep(0.01)
        assert await directory.resident(W1) == set()
        assert await directory.apply(batch("w1", epoch(2), 1, range(7))) == Reply.OK
        assert await directory.match(keys(range(100)), [W1]) == {W1: Match(instance(2), 7)}
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await directory.close()
