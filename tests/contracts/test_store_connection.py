"""Calls whose slot of a real Redis Cluster is on its way: some of their keys have gone to another node already."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from redis.crc import key_slot

from shared.directory import connection
from shared.directory.base import Match, Reply
from shared.directory.redis import RedisDirectory
from shared.errors import DirectoryUnavailable
from shared.types import WorkerId
from tests.faults.test_cluster import begin_move, command, end_move, move, move_keys, names_on, tag
from tests.support.servers import ClusterProcesses, redis_cluster
from tests.support.stores import LONG_LEASE_S, PATIENT_S, SCHEME, batch, epoch, instance, keys, worker_info

__all__ = ["redis_cluster"]

pytestmark = pytest.mark.redis

E1 = epoch(1)


class Moving:
    """A worker whose set of blocks has gone to another node, while its lease has not."""

    def __init__(self, cluster: ClusterProcesses) -> None:
        self._cluster = cluster
        self._source, self._target = cluster.nodes[0], cluster.nodes[1]
        (self.name,) = names_on(cluster, self._source)
        self._slot = key_slot(tag(self.name).encode())

    @contextmanager
    def on_its_way(self) -> Iterator[None]:
        begin_move(self._slot, self._source, self._target)
        try:
            command(self._source, "MIGRATE", "127.0.0.1", self._target.port, f"{tag(self.name)}blocks", 0, 5000)
            yield
        finally:
            self.finish()
            move(self._cluster, self._slot, self._target, self._source)

    def finish(self) -> None:
        """Let the rest of the keys follow. Idempotent."""
        move_keys(self._slot, self._source, self._target)
        end_move(self._cluster, self._slot, self._target)


@asynccontextmanager
async def reading(cluster: ClusterProcesses, name: WorkerId) -> AsyncIterator[RedisDirectory]:
    """A directory that holds three blocks of a worker."""
    directory = RedisDirectory(cluster.url, SCHEME, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S)
    try:
        await directory.connect()
        assert await directory.register(worker_info(name), E1, LONG_LEASE_S) == Reply.OK
        assert await directory.apply(batch(name, E1, 1, range(3))) == Reply.OK
        yield directory
        assert (directory.num_misses, directory.num_breaker_openings) == (0, 0)
    finally:
        await directory.close()


def after_first_try(directory: RedisDirectory, act: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Call `act` once the store has said TRYAGAIN for the first time; the answers of all tries, by name."""
    inner: Any = directory._connection
    original = inner._send
    seen: list[str] = []

    async def send(server: Any, errands: list[Any], answers: list[Any]) -> None:
        await original(server, errands, answers)
        is_first = "TryAgainError" not in seen
        seen.extend(type(answers[errand.place]).__name__ for errand in errands)
        if is_first and "TryAgainError" in seen:
            act()

    monkeypatch.setattr(inner, "_send", send)
    return seen


async def test_a_match_is_tried_again_and_follows_the_slot(
    redis_cluster: ClusterProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = Moving(redis_cluster)
    async with reading(redis_cluster, moving.name) as directory:
        with moving.on_its_way():
            seen = after_first_try(directory, moving.finish, monkeypatch)
            assert await directory.match(keys(range(5)), [moving.name]) == {moving.name: Match(instance(1), 3)}
            assert seen[0] == "TryAgainError"


async def test_a_publishers_call_is_tried_again_and_follows_the_slot(
    redis_cluster: ClusterProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = Moving(redis_cluster)
    async with reading(redis_cluster, moving.name) as directory:
        with moving.on_its_way():
            seen = after_first_try(directory, moving.finish, monkeypatch)
            assert await directory.apply(batch(moving.name, E1, 2, range(3, 5))) == Reply.OK
            assert seen[0] == "TryAgainError"
        assert await directory.resident(moving.name) == set(keys(range(5)))


async def test_a_slot_that_stays_on_its_way_is_tried_twice_and_is_no_miss(
    redis_cluster: ClusterProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = Moving(redis_cluster)
    async with reading(redis_cluster, moving.name) as directory:
        with moving.on_its_way():
            seen = after_first_try(directory, lambda: None, monkeypatch)
            for number in range(1, 6):
                with pytest.raises(DirectoryUnavailable, match=r"^match: .*Multiple keys request during rehashing"):
                    await directory.match(keys(range(5)), [moving.name])
                assert seen == ["TryAgainError"] * 2 * number
            assert not directory.is_resting


async def test_what_was_answered_is_not_lost_to_what_is_tried_again(
    redis_cluster: ClusterProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = Moving(redis_cluster)
    _, other = names_on(redis_cluster, redis_cluster.nodes[0], 2)
    async with reading(redis_cluster, moving.name) as directory:
        assert await directory.register(worker_info(other), E1, LONG_LEASE_S) == Reply.OK
        assert await directory.apply(batch(other, E1, 1, range(2))) == Reply.OK
        # A pause that no deadline has room for.
        monkeypatch.setattr(connection, "_TRY_AGAIN_S", PATIENT_S)
        with moving.on_its_way():
            seen = after_first_try(directory, lambda: None, monkeypatch)
            found = await directory.match(keys(range(5)), [moving.name, other])
        assert found == {other: Match(instance(1), 2)}
        assert seen.count("TryAgainError") == 1
