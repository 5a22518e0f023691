"""A mirror of a real Redis Cluster whose nodes freeze, die, fail over or hand slots on: only theirs are in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import pytest
from redis.crc import key_slot

from shared.directory.base import Reply
from shared.directory.mirrored import MirroredDirectory
from shared.directory.redis import RedisDirectory
from shared.types import WorkerId
from tests.faults.test_cluster import (
    REST_S,
    ReplicatedCluster,
    begin_move,
    cluster,
    command,
    end_move,
    lose_patience_with,
    move,
    move_keys,
    names_on,
    owner,
    publishing,
    tag,
)
from tests.support.fakes import fake_tokens
from tests.support.rack import SCHEME as RACK_SCHEME
from tests.support.rack import ask, prompt, rack
from tests.support.servers import ClusterProcesses, find_redis_server, redis_cluster
from tests.support.stores import LONG_LEASE_S, PATIENT_S, SCHEME, keys, wait_until
from worker.engines.base import BlockChange

__all__ = ["cluster", "redis_cluster"]
pytestmark = pytest.mark.redis


@asynccontextmanager
async def mirroring(
    cluster: ClusterProcesses, *, feed_deadline_s: float = PATIENT_S
) -> AsyncIterator[tuple[MirroredDirectory, RedisDirectory]]:
    """A mirror that looks often, and the directory that it wraps."""
    inner = RedisDirectory(cluster.url, SCHEME, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S, rest_s=REST_S)
    mirrored = MirroredDirectory(inner, inner.feed("reader", deadline_s=feed_deadline_s), refresh_s=0.05)
    mirrored.start()
    try:
        yield mirrored, inner
    finally:
        await mirrored.close()


async def until_mirrored(mirrored: MirroredDirectory, worker_to_depth: dict[WorkerId, int]) -> None:
    """Until the mirror itself tells these depths."""
    async with asyncio.timeout(PATIENT_S):
        while {worker: len(mirrored.mirrored(worker) or ()) for worker in worker_to_depth} != worker_to_depth:
            await asyncio.sleep(0.01)


async def depths(mirrored: MirroredDirectory, *names: WorkerId) -> dict[WorkerId, int]:
    found = await mirrored.match(keys(range(50)), names)
    return {name: match.num_blocks for name, match in found.items()}


@pytest.mark.parametrize("fault", ["frozen", "killed"])
async def test_lost_node_costs_no_match_and_excuses_its_own_workers_only(
    cluster: ClusterProcesses, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = cluster.nodes[1]
    (hidden,), (seen, dying) = names_on(cluster, lost), names_on(cluster, cluster.nodes[2], 2)
    async with (
        publishing(cluster, hidden, seen, dying, lease_s=LONG_LEASE_S) as publishers,
        mirroring(cluster) as (mirrored, inner),
    ):
        await until_mirrored(mirrored, dict.fromkeys(publishers, 20))
        lose_patience_with(inner, lost, monkeypatch)
        lost.freeze() if fault == "frozen" else lost.kill()
        for name in (hidden, seen):
            publishers[name].on_blocks(BlockChange(stored=keys([20])))
        await until_mirrored(mirrored, {seen: 21})
        task = publishers[dying]._task
        assert task is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        epoch, seq = publishers[dying].epoch, publishers[dying].seq
        assert await inner.heartbeat(dying, epoch, seq, 0.001) == Reply.OK
        await wait_until(lambda: dying not in mirrored.shown)
        assert await depths(mirrored, *publishers) == {hidden: 20, seen: 21}
        cluster.start()
        await until_mirrored(mirrored, {hidden: 21, seen: 21})
        assert await depths(mirrored, *publishers) == {hidden: 21, seen: 21}


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_replica_that_takes_over_is_followed(fault: str) -> None:
    find_redis_server()
    with ReplicatedCluster() as cluster:
        lost = cluster.nodes[0]
        (name,), (other,) = names_on(cluster, lost), names_on(cluster, cluster.nodes[1])
        async with (
            publishing(cluster, name, other) as publishers,
            mirroring(cluster, feed_deadline_s=1.0) as (mirrored, _),
        ):
            await until_mirrored(mirrored, {name: 20, other: 20})
            lost.kill() if fault == "killed" else lost.freeze()
            for publisher in publishers.values():
                publisher.on_blocks(BlockChange(stored=keys([20])))
            await until_mirrored(mirrored, {name: 21, other: 21})
            assert command(cluster.replica, "ROLE")[0] == b"master"


async def test_slot_that_moves_is_followed(cluster: ClusterProcesses) -> None:
    source, target = cluster.nodes[0], cluster.nodes[1]
    name, other = names_on(cluster, source, 2)
    slot = key_slot(tag(name).encode())
    async with publishing(cluster, name, other) as publishers, mirroring(cluster) as (mirrored, _):
        await until_mirrored(mirrored, {name: 20, other: 20})
        begin_move(slot, source, target)
        try:
            # Half of what scripts name has gone: nobody can tell how the worker stands.
            command(source, "MIGRATE", "127.0.0.1", target.port, f"{tag(name)}blocks", 0, 5000)
            publishers[other].on_blocks(BlockChange(stored=keys([20])))
            await until_mirrored(mirrored, {name: 20, other: 21})
            move_keys(slot, source, target)
            end_move(cluster, slot, target)
            publishers[name].on_blocks(BlockChange(stored=keys([20])))
            await until_mirrored(mirrored, {name: 21, other: 21})
        finally:
            move_keys(slot, source, target)
            end_move(cluster, slot, target)
            move(cluster, slot, target, source)
        publishers[name].on_blocks(BlockChange(stored=keys([21])))
        await until_mirrored(mirrored, {name: 22, other: 21})


async def ask_nobody(*_: object) -> NoReturn:
    raise AssertionError("the store was asked for a match")


@pytest.mark.parametrize("fault", ["frozen", "killed"])
async def test_router_with_a_mirror_waits_for_no_lost_node_and_fails_no_request(
    cluster: ClusterProcesses, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = {"match_deadline_s": PATIENT_S, "publish_deadline_s": PATIENT_S, "rest_s": REST_S}
    publishers = RedisDirectory(cluster.url, RACK_SCHEME, publish_deadline_s=0.5, rest_s=REST_S)
    inner = RedisDirectory(cluster.url, RACK_SCHEME, **patience)
    mirrored = MirroredDirectory(inner, inner.feed("router", deadline_s=PATIENT_S), refresh_s=0.05)
    mirrored.start()
    num_asked = 0
    async with rack(3, publishers) as built:
        built.directory = mirrored
        worker_to_publisher = {worker: slot.publisher for worker, slot in built.worker_to_slot.items()}

        async def until_true() -> None:
            async with asyncio.timeout(PATIENT_S):
                while not all(
                    publisher.is_quiet and mirrored.mirrored(worker) == publisher.resident
                    for worker, publisher in worker_to_publisher.items()
                ):
                    await asyncio.sleep(0.01)

        async with built.router(refresh_s=0.1) as router:

            async def ask_all() -> None:
                nonlocal num_asked
                for _ in range(12):
                    num_asked += 1
                    token_ids = prompt(num_asked % 4, 160, num_asked)
                    answer, _ = await ask(router, f"request-{num_asked}", token_ids)
                    assert answer == fake_tokens(token_ids, 8)

            await ask_all()
            await until_true()
            lost = owner(cluster, f"kvr:{{{RACK_SCHEME.namespace}:w0}}:")
            lose_patience_with(inner, lost, monkeypatch)
            lost.freeze() if fault == "frozen" else lost.kill()
            monkeypatch.setattr(inner, "match", ask_nobody)
            await ask_all()
            monkeypatch.undo()
            cluster.start()
            await until_true()
            await ask_all()
            await until_true()
    await mirrored.close()
    await publishers.close()
