"""A real Redis Cluster whose nodes freeze, die, come back empty, fail over or hand slots on: the others go on."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from shared.directory.base import Match, Reply
from shared.directory.redis import RedisDirectory
from shared.errors import ConfigError, DirectoryUnavailable
from shared.types import WorkerId
from tests.support.servers import (
    NODE_TIMEOUT,
    START_TIMEOUT_S,
    ClusterProcesses,
    ServerProcess,
    find_redis_server,
    redis_cluster,
)
from tests.support.stores import (
    LONG_LEASE_S,
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

__all__ = ["redis_cluster"]
pytestmark = pytest.mark.redis

E1 = epoch(1)
WORKERS_KEY = f"kvr:{{{SCHEME.namespace}}}:workers"
REST_S = 0.05


@pytest.fixture
def cluster(redis_cluster: ClusterProcesses) -> Iterator[ClusterProcesses]:
    """The module's cluster, emptied, and whole again after whatever a test did to it."""
    for node in redis_cluster.nodes:
        with node.blocking_client() as client:
            client.flushall()
    yield redis_cluster
    redis_cluster.start()


def tag(name: str) -> str:
    return f"kvr:{{{SCHEME.namespace}:{name}}}:"


def owner(cluster: ClusterProcesses, key: str) -> ServerProcess:
    slot = key_slot(key.encode())
    return next(node for node in cluster.nodes if slot in cluster.slots_of(node))


def names_on(cluster: ClusterProcesses, node: ServerProcess, num_names: int = 1) -> list[WorkerId]:
    """Workers whose keys lie on a node."""
    names = (WorkerId(f"w{number}") for number in range(1000))
    return [name for name in names if owner(cluster, tag(name)) is node][:num_names]


@asynccontextmanager
async def reading(
    cluster: ClusterProcesses, *, deadline_s: float = PATIENT_S, rest_s: float = REST_S
) -> AsyncIterator[RedisDirectory]:
    """A directory that is patient while it connects."""
    directory = RedisDirectory(
        cluster.url, SCHEME, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S, rest_s=rest_s
    )
    try:
        await directory.connect()
        directory._match_deadline_s = directory._publish_deadline_s = deadline_s
        yield directory
    finally:
        await directory.close()


@asynccontextmanager
async def publishing(
    cluster: ClusterProcesses, *names: WorkerId, lease_s: float = 5.0
) -> AsyncIterator[dict[WorkerId, Publisher]]:
    """Publishers of twenty blocks each that give calls up soon, each with a directory of its own."""
    directories = [RedisDirectory(cluster.url, SCHEME, publish_deadline_s=0.3, rest_s=REST_S) for _ in names]
    publishers = {
        name: Publisher(
            directory, worker_info(name), rng=random.Random(number), lease_s=lease_s, heartbeat_s=0.1, tick_s=0.005
        )
        for number, (name, directory) in enumerate(zip(names, directories, strict=True))
    }
    try:
        for publisher in publishers.values():
            await publisher.start()
            publisher.on_blocks(BlockChange(stored=keys(range(20))))
        await wait_until(lambda: all(publisher.is_quiet for publisher in publishers.values()))
        yield publishers
    finally:
        for publisher in publishers.values():
            await publisher.stop()
        for directory in directories:
            await directory.close()


async def depths(directory: RedisDirectory, *names: WorkerId) -> dict[WorkerId, int]:
    try:
        found = await directory.match(keys(range(50)), names)
    except DirectoryUnavailable:
        return {}
    return {name: match.num_blocks for name, match in found.items()}


async def wait_for_depths(directory: RedisDirectory, expected: dict[WorkerId, int]) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while await depths(directory, *expected) != expected:
            await asyncio.sleep(0.01)


# Slots.


async def test_match_is_one_round_trip_to_each_server_and_all_at_once(
    cluster: ClusterProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for node in cluster.nodes for name in names_on(cluster, node, 10)]
    async with reading(cluster) as directory:
        for name in names:
            assert await directory.register(worker_info(name), E1, LONG_LEASE_S) == Reply.OK
            assert await directory.apply(batch(name, E1, 1, range(3))) == Reply.OK
        await directory.match(keys(range(5)), names)  # loads the script
        connection: Any = directory._connection
        asked: list[int] = []
        all_asked = asyncio.Event()

        async def send(server: Any, errands: list[Any], answers: list[Any]) -> None:
            asked.append(server.client.connection_pool.connection_kwargs["port"])
            if len(asked) == len(cluster.nodes):
                all_asked.set()
            async with asyncio.timeout(20.0):
                await all_asked.wait()  # comes only if none waits for another one's answer
            await original(server, errands, answers)

        original = connection._send
        monkeypatch.setattr(connection, "_send", send)
        found = await directory.match(keys(range(5)), names)
    assert found == {name: Match(instance(1), 3) for name in names}
    assert sorted(asked) == sorted(node.port for node in cluster.nodes)


async def test_any_node_leads_to_all_of_them(cluster: ClusterProcesses) -> None:
    (name,) = names_on(cluster, cluster.nodes[1])
    for number, node in enumerate(cluster.nodes):
        directory = RedisDirectory(node.url, SCHEME, publish_deadline_s=PATIENT_S, match_deadline_s=PATIENT_S)
        await directory.connect()
        assert await directory.register(worker_info(name), epoch(number), LONG_LEASE_S) == Reply.OK
        assert [record.epoch for record in await directory.workers()] == [epoch(number)]
        await directory.close()


async def test_numbered_database_of_a_cluster_is_refused(cluster: ClusterProcesses) -> None:
    directory = RedisDirectory(f"{cluster.url}/3", SCHEME, publish_deadline_s=PATIENT_S)
    with pytest.raises(DirectoryUnavailable, match="SELECT is not allowed in cluster mode"):
        await directory.connect()
    await directory.close()


async def test_socket_of_a_node_is_refused(tmp_path: Path) -> None:
    find_redis_server()
    with ServerProcess("--unixsocket", str(tmp_path / "node.sock"), is_cluster_node=True):
        directory = RedisDirectory(f"unix://{tmp_path}/node.sock", SCHEME, publish_deadline_s=PATIENT_S)
        with pytest.raises(ConfigError, match=r"^--redis-url: a cluster cannot be reached through the socket"):
            await directory.connect()
        await directory.close()


def command(node: ServerProcess, *arguments: Any) -> Any:
    with node.blocking_client() as client:
        return client.execute_command(*arguments)


def begin_move(slot: int, source: ServerProcess, target: ServerProcess) -> None:
    command(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", command(source, "CLUSTER", "MYID"))
    command(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", command(target, "CLUSTER", "MYID"))


def move_keys(slot: int, source: ServerProcess, target: ServerProcess) -> None:
    names = command(source, "CLUSTER", "GETKEYSINSLOT", slot, 100)
    if names:
        command(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)


def end_move(cluster: ClusterProcesses, slot: int, target: ServerProcess) -> None:
    for node in [target, *(node for node in cluster.nodes if node is not target)]:
        command(node, "CLUSTER", "SETSLOT", slot, "NODE", command(target, "CLUSTER", "MYID"))


def move(cluster: ClusterProcesses, slot: int, source: ServerProcess, target: ServerProcess) -> None:
    begin_move(slot, source, target)
    move_keys(slot, source, target)
    end_move(cluster, slot, target)


async def test_slot_that_moves_is_followed(cluster: ClusterProcesses) -> None:
    source, target = cluster.nodes[0], cluster.nodes[1]
    name, other = names_on(cluster, source, 2)
    slot = key_slot(tag(name).encode())
    async with publishing(cluster, name, other) as publishers, reading(cluster) as directory:
        expected = {name: 20, other: 20}
        await wait_for_depths(directory, expected)
        begin_move(slot, source, target)
        try:
            assert await depths(directory, name, other) == expected
            move_keys(slot, source, target)
            assert await depths(directory, name, other) == expected  # by asking where the slot goes
            assert directory.num_misses == 0
            end_move(cluster, slot, target)
            assert await depths(directory, name, other) == expected  # by being sent on
            publishers[name].on_blocks(BlockChange(stored=keys([20])))
            await wait_for_depths(directory, {name: 21, other: 20})
            assert {record.info.worker for record in await directory.workers()} == {name, other}
            assert (directory.num_misses, directory.num_breaker_openings) == (0, 0)
        finally:
            move(cluster, slot, target, source)
        await wait_for_depths(directory, {name: 21, other: 20})


async def test_slot_on_its_way_hides_its_worker_and_no_other(cluster: ClusterProcesses) -> None:
    source, target = cluster.nodes[0], cluster.nodes[1]
    name, other = names_on(cluster, source, 2)
    slot = key_slot(tag(name).encode())
    async with publishing(cluster, name, other) as publishers, reading(cluster) as directory:
        await wait_for_depths(directory, {name: 20, other: 20})
        begin_move(slot, source, target)
        try:
            # Half of what a script names has gone.
            command(source, "MIGRATE", "127.0.0.1", target.port, f"{tag(name)}blocks", 0, 5000)
            for _ in range(5):
                assert await depths(directory, name, other) == {other: 20}
            publishers[name].on_blocks(BlockChange(stored=keys([20])))
            assert not directory.is_resting
        finally:
            move_keys(slot, source, target)
            end_move(cluster, slot, target)
            move(cluster, slot, target, source)
        await wait_for_depths(directory, {name: 21, other: 20})


# Nodes.


async def test_frozen_node_costs_three_waits_and_hides_its_own_workers_only(
    cluster: ClusterProcesses, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = cluster.nodes[1]
    (hidden,), (seen,) = names_on(cluster, frozen), names_on(cluster, cluster.nodes[2])
    async with publishing(cluster, hidden, seen), reading(cluster, rest_s=3600.0) as directory:
        await wait_for_depths(directory, {hidden: 20, seen: 20})
        lose_patience_with(directory, frozen, monkeypatch)
        num_misses, num_openings = directory.num_misses, directory.num_breaker_openings
        frozen.freeze()
        try:
            for _ in range(20):
                assert await depths(directory, hidden, seen) == {seen: 20}
            assert (directory.num_misses - num_misses, directory.num_spared) == (3, 17)
            assert (directory.num_breaker_openings - num_openings, directory.is_resting) == (1, False)
        finally:
            frozen.thaw()
    told = [record for record in caplog.records if record.name == "shared.directory.breaker"]
    assert [record.levelno for record in told] == [logging.ERROR]
    assert told[0].getMessage().startswith(f"the directory's store at 127.0.0.1:{frozen.port} misses (match: no answer")


def lose_patience_with(directory: RedisDirectory, node: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node's deadline alone be short, so that no other one can miss its own."""
    connection: Any = directory._connection
    original = connection._ask_within

    async def ask_within(server: Any, operation: str, deadline_s: float, commands: list[Any]) -> list[Any]:
        is_slow = server.name.endswith(f":{node.port}")
        return await original(server, operation, 0.05 if is_slow else deadline_s, commands)

    monkeypatch.setattr(connection, "_ask_within", ask_within)


@pytest.mark.parametrize("fault", ["frozen", "killed"])
async def test_workers_of_other_nodes_go_on_and_those_of_a_lost_one_come_back(
    cluster: ClusterProcesses, fault: str
) -> None:
    # The hardest one to lose: it holds the list of workers, too.
    lost = owner(cluster, WORKERS_KEY)
    (hidden,) = names_on(cluster, lost)
    others = [name for node in cluster.nodes if node is not lost for name in names_on(cluster, node)]
    async with publishing(cluster, hidden, *others) as publishers, reading(cluster, deadline_s=0.5) as directory:
        await wait_for_depths(directory, dict.fromkeys(publishers, 20))
        lost.freeze() if fault == "frozen" else lost.kill()
        for publisher in publishers.values():
            publisher.on_blocks(BlockChange(stored=keys([20])))
        await wait_for_depths(directory, dict.fromkeys(others, 21))
        assert hidden not in await depths(directory, *publishers)
        with pytest.raises(DirectoryUnavailable):
            await directory.workers()
        cluster.start()
        await wait_for_depths(directory, dict.fromkeys(publishers, 21))
        await wait_for_list(directory, set(publishers))
        assert not any(publisher.is_evicted for publisher in publishers.values())


async def wait_for_list(directory: RedisDirectory, expected: set[WorkerId]) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                if {record.info.worker for record in await directory.workers()} == expected:
                    return
            except DirectoryUnavailable:
                pass
            await asyncio.sleep(0.01)


async def test_listing_tells_the_workers_of_the_nodes_that_answer(cluster: ClusterProcesses) -> None:
    lost = next(node for node in cluster.nodes if node is not owner(cluster, WORKERS_KEY))
    (hidden,), (seen,) = names_on(cluster, lost), names_on(cluster, owner(cluster, WORKERS_KEY))
    async with publishing(cluster, hidden, seen), reading(cluster) as directory:
        lost.kill()
        assert [record.info.worker for record in await directory.workers()] == [seen]
        cluster.start()
        await wait_for_list(directory, {hidden, seen})


async def test_node_that_is_away_at_the_start_is_found_later(cluster: ClusterProcesses) -> None:
    away = cluster.nodes[2]
    (hidden,), (seen,) = names_on(cluster, away), names_on(cluster, cluster.nodes[0])
    away.kill()
    directory = RedisDirectory(
        cluster.url, SCHEME, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S, rest_s=REST_S
    )
    with pytest.raises(DirectoryUnavailable, match=rf"^connect: .*{away.port}"):
        await directory.connect()
    async with publishing_later(cluster, hidden, seen) as publishers:
        await wait_for_depths(directory, {seen: 20})
        cluster.start()
        await wait_for_depths(directory, dict.fromkeys(publishers, 20))
    await directory.close()


@asynccontextmanager
async def publishing_later(cluster: ClusterProcesses, *names: WorkerId) -> AsyncIterator[list[WorkerId]]:
    """Publishers that start whether the store is there or not."""
    directory = RedisDirectory(cluster.url, SCHEME, publish_deadline_s=0.5, rest_s=REST_S)
    publishers = [
        Publisher(directory, worker_info(name), rng=random.Random(number), lease_s=5.0, heartbeat_s=0.1)
        for number, name in enumerate(names)
    ]
    for publisher in publishers:
        await publisher.start()
        publisher.on_blocks(BlockChange(stored=keys(range(20))))
    yield list(names)
    for publisher in publishers:
        await publisher.stop()
    await directory.close()


# Failing over.


class ReplicatedCluster(ClusterProcesses):
    """One more node, which follows the first primary and takes its place when that dies."""

    def __init__(self) -> None:
        super().__init__(3, "--repl-diskless-sync-delay", "0")
        # It takes over however old its data seem: where a virtual machine is stopped for a while, they seem too old.
        takes_over = ("--cluster-replica-validity-factor", "0")
        self.replica = ServerProcess(*NODE_TIMEOUT, *takes_over, is_cluster_node=True)

    def start(self) -> None:
        super().start()
        self.replica.start()
        first = self.nodes[0]
        command(self.replica, "CLUSTER", "MEET", "127.0.0.1", first.port, first.bus_port)
        identity = command(first, "CLUSTER", "MYID")
        until(lambda: identity in command(self.replica, "CLUSTER", "NODES"))
        command(self.replica, "CLUSTER", "REPLICATE", identity)
        until(lambda: command(self.replica, "INFO", "replication")["master_link_status"] == "up")
        # Only nodes that know the replica give it their vote, and only those that it knows tell it of a failure.
        own_line = command(self.replica, "CLUSTER", "MYID") + rb" \S+ slave "
        until(lambda: all(re.search(own_line, command(node, "CLUSTER", "NODES")) for node in self.nodes))
        lines = [command(node, "CLUSTER", "MYID") + rb" \S+ master .* connected" for node in self.nodes]
        until(lambda: all(re.search(line, command(self.replica, "CLUSTER", "NODES")) for line in lines))

    def stop(self) -> None:
        super().stop()
        self.replica.stop()


def until(condition: Any) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_replica_that_takes_over_is_found_and_filled_up(fault: str) -> None:
    find_redis_server()
    with ReplicatedCluster() as cluster:
        lost = cluster.nodes[0]
        (name,), (other,) = names_on(cluster, lost), names_on(cluster, cluster.nodes[1])
        async with publishing(cluster, name, other) as publishers, reading(cluster, deadline_s=0.5) as directory:
            await wait_for_depths(directory, {name: 20, other: 20})
            lost.kill() if fault == "killed" else lost.freeze()
            publishers[name].on_blocks(BlockChange(stored=keys([20])))
            await wait_for_depths(directory, {name: 21, other: 20})
            assert command(cluster.replica, "ROLE")[0] == b"master"
            directory._publish_deadline_s = PATIENT_S
            assert await directory.resident(name) == publishers[name].resident
