"""What exactly a real store has applied after an old snapshot or a connection that was cut, and how it is mended."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Iterator

import pytest

from shared.directory.base import MAX_KEYS_PER_CALL
from shared.directory.redis import RedisDirectory
from shared.types import WorkerId
from tests.support.proxy import Direction, Proxy, proxy
from tests.support.servers import START_TIMEOUT_S, ServerProcess, find_redis_server
from tests.support.stores import (
    PATIENT_S,
    SCHEME,
    keys,
    wait_until,
    worker_info,
)
from worker.engines.base import BlockChange
from worker.publisher import Publisher

pytestmark = pytest.mark.redis

W1 = WorkerId("w1")


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A Redis for one test, since what it leaves on its disk is part of some."""
    find_redis_server()
    with ServerProcess(*getattr(request, "param", ())) as running:
        yield running


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
