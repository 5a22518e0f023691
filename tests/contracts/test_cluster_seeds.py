"""A URL that names several nodes of a Redis Cluster: any of them that answers leads to all."""

from __future__ import annotations

import pytest

from shared.directory.base import Match, Reply
from shared.directory.redis import RedisDirectory
from shared.directory.servers import _split_hosts
from shared.errors import ConfigError, DirectoryUnavailable
from shared.types import WorkerId
from tests.support.servers import ClusterProcesses, ServerProcess, free_port, redis_cluster, redis_server
from tests.support.stores import LONG_LEASE_S, PATIENT_S, SCHEME, batch, epoch, instance, keys, worker_info

__all__ = ["redis_cluster", "redis_server"]


def directory_at(*ports: int) -> RedisDirectory:
    url = "redis://" + ",".join(f"127.0.0.1:{port}" for port in ports)
    return RedisDirectory(url, SCHEME, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S)


@pytest.mark.redis
async def test_nodes_that_are_away_are_passed_over(redis_cluster: ClusterProcesses) -> None:
    directory = directory_at(free_port(), redis_cluster.nodes[1].port, free_port())
    try:
        await directory.connect()
        workers = [WorkerId(f"w{number}") for number in range(10)]
        for worker in workers:
            assert await directory.register(worker_info(worker), epoch(1), LONG_LEASE_S) == Reply.OK
            assert await directory.apply(batch(worker, epoch(1), 1, range(3))) == Reply.OK
        assert await directory.match(keys(range(5)), workers) == {worker: Match(instance(1), 3) for worker in workers}
    finally:
        await directory.close()


@pytest.mark.redis
async def test_where_no_node_answers_the_store_is_away(redis_cluster: ClusterProcesses) -> None:
    directory = directory_at(free_port(), free_port())
    with pytest.raises(DirectoryUnavailable, match=r"^connect: ConnectionError"):
        await directory.connect()
    await directory.close()


@pytest.mark.redis
async def test_several_hosts_without_a_cluster_are_refused(redis_server: ServerProcess) -> None:
    directory = directory_at(redis_server.port, free_port())
    with pytest.raises(ConfigError, match=r"^--redis-url: the server at .* is no node of a cluster; give one host"):
        await directory.connect()
    await directory.close()


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("redis://a:1,b:2", ["redis://a:1", "redis://b:2"]),
        ("rediss://u:p,w@a,b:2/0?x=1", ["rediss://u:p,w@a/0?x=1", "rediss://u:p,w@b:2/0?x=1"]),
        ("redis://u:p,w@a:1", ["redis://u:p,w@a:1"]),
        ("redis://a?x=1,2", ["redis://a?x=1,2"]),
        ("unix:///run/a,b.sock", ["unix:///run/a,b.sock"]),
    ],
)
def test_a_comma_parts_hosts_and_nothing_else(url: str, parts: list[str]) -> None:
    assert _split_hosts(url) == parts


@pytest.mark.parametrize("hosts", ["a:1,", ",a:1", "a:1,b:port"])
def test_a_host_that_is_none_is_refused_without_telling_the_password(hosts: str) -> None:
    with pytest.raises(ConfigError, match=r"^--redis-url: malformed") as caught:
        RedisDirectory(f"redis://:hunter2@{hosts}", SCHEME)
    assert "hunter2" not in str(caught.value)
