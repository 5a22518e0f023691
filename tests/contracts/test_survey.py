"""Surveys of a real store: what it holds of whom, how it does, and what nobody owns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.asyncio import Redis

from shared.directory.base import MAX_KEYS_PER_CALL, Directory, Reply, WorkerRecord
from shared.directory.redis import RedisDirectory
from shared.directory.survey import Audited, Holding, StoreSurvey, WorkerSize
from shared.errors import ConfigError, DirectoryUnavailable
from shared.types import CacheScheme, WorkerId
from tests.faults.test_cluster import names_on
from tests.support.servers import USER_PASSWORD, ClusterProcesses, redis_cluster, secured_server
from tests.support.stores import (
    LONG_LEASE_S,
    PATIENT_S,
    SCHEME,
    STORES,
    Store,
    batch,
    embedded_store,
    epoch,
    key,
    keys,
    redis_bench,
    worker_info,
)

__all__ = ["embedded_store", "redis_cluster", "secured_server"]

pytestmark = pytest.mark.redis

W1, W2 = WorkerId("w1"), WorkerId("w2")


@dataclass
class Surveyed:
    """A survey, and the store it looks at."""

    survey: StoreSurvey
    directory: Directory
    client: Redis
    url: str

    async def publish(self, name: str, numbers: range) -> None:
        assert await self.directory.register(worker_info(name), epoch(1), LONG_LEASE_S) == Reply.OK
        assert await self.directory.apply(batch(name, epoch(1), 1, stored=numbers)) == Reply.OK


@pytest.fixture(params=["valkey", "redis with TLS and an ACL"])
async def surveyed(request: pytest.FixtureRequest) -> AsyncIterator[Surveyed]:
    store: Store = request.getfixturevalue(STORES[request.param])
    async with redis_bench(store) as bench:
        assert isinstance(bench.client, Redis)
        survey = StoreSurvey(store.url, SCHEME, deadline_s=PATIENT_S)
        yield Surveyed(survey, bench.directory, bench.client, store.url)
        await survey.close()


def store_key(name: str, kind: str) -> str:
    return f"kvr:{{{SCHEME.namespace}:{name}}}:{kind}"


async def test_an_audit_counts_what_is_there_and_what_is_not(surveyed: Surveyed) -> None:
    await surveyed.publish("w1", range(3000))
    asked = keys([*range(2990, 3000), 5000, 5001])
    assert await surveyed.survey.audit(W1, epoch(1), 1, asked) == Audited(3000, 2)
    assert await surveyed.survey.audit(W1, epoch(1), 1, ()) == Audited(3000, 0)
    assert await surveyed.survey.audit(W1, epoch(1), 1, keys(range(MAX_KEYS_PER_CALL))) == Audited(3000, 1096)


async def test_an_audit_answers_only_at_the_batch_that_is_asked_for(surveyed: Surveyed) -> None:
    await surveyed.publish("w1", range(3))
    for worker, in_epoch, seq in [(W1, epoch(1), 0), (W1, epoch(1), 2), (W1, epoch(2), 1), (W2, epoch(1), 1)]:
        assert await surveyed.survey.audit(worker, in_epoch, seq, keys([1])) is None


async def test_an_audit_of_more_keys_than_one_call_takes_is_refused(surveyed: Surveyed) -> None:
    with pytest.raises(ValueError, match="4097 keys"):
        await surveyed.survey.audit(W1, epoch(1), 1, keys(range(MAX_KEYS_PER_CALL + 1)))


async def test_sizes_are_told_for_each_worker(surveyed: Surveyed) -> None:
    await surveyed.publish("w1", range(100))
    sizes = await surveyed.survey.sizes([W1, W2])
    assert (sizes[W1].num_entries, sizes[W1].num_stream_entries) == (100, 2)
    assert (sizes[W1].num_bytes or 0) > 1600
    assert 0 < (sizes[W1].lease_left_s or 0) <= LONG_LEASE_S
    assert (sizes[W2].num_entries, sizes[W2].num_bytes, sizes[W2].lease_left_s) == (0, 0, None)
    assert await surveyed.survey.sizes([]) == {}


async def test_health_is_told_once_for_each_server(surveyed: Surveyed) -> None:
    await surveyed.publish("w1", range(10))
    (server,) = await surveyed.survey.health([W1, W2])
    assert (server.error, server.role, server.may_evict, server.num_evicted) == ("", "master", False, 0)
    assert server.version is not None
    assert server.version.startswith(("Redis ", "Valkey "))
    assert server.name in surveyed.url
    assert (server.num_keys or 0) >= 4
    assert (server.used_memory_bytes or 0) > 0
    assert 0 < (server.num_clients or 0) < (server.max_clients or 0)
    assert (server.has_append_only_file, server.is_save_failing) == (False, False)
    assert (server.is_nearly_full, server.is_nearly_out_of_clients) == (False, False)
    assert server.ping_p50_s is not None
    assert len(await surveyed.survey.health([])) == 1


async def test_a_store_that_cannot_save_is_told(surveyed: Surveyed) -> None:
    with something_instead_of_the_dump((await surveyed.client.config_get("dir"))["dir"]):
        await surveyed.client.bgsave()
        async with asyncio.timeout(PATIENT_S):
            while not (await surveyed.survey.health([]))[0].is_save_failing:
                await asyncio.sleep(0.01)
    await surveyed.client.save()
    assert not (await surveyed.survey.health([]))[0].is_save_failing


@contextmanager
def something_instead_of_the_dump(folder: str) -> Iterator[None]:
    """What a server saves can then not take its name."""
    in_the_way = Path(folder, "dump.rdb")
    in_the_way.mkdir()
    yield
    in_the_way.rmdir()


async def test_what_the_store_holds_of_a_worker_is_told(surveyed: Surveyed) -> None:
    await surveyed.publish("w1", range(100))
    held = await surveyed.survey.holding(W1)
    assert held.record == WorkerRecord(worker_info("w1"), epoch(1), 1)
    assert (held.blocks, held.num_foreign, held.num_staged, held.spoilt) == (frozenset(keys(range(100))), 0, 0, ())
    assert 0 < (held.lease_left_s or 0) <= LONG_LEASE_S
    await surveyed.directory.stage(W1, epoch(1), epoch(2), keys(range(7)))
    await surveyed.client.sadd(store_key("w1", "blocks"), b"short", b"x" * 17)
    held = await surveyed.survey.holding(W1)
    assert (len(held.blocks), held.num_foreign, held.num_staged) == (100, 2, 7)


async def test_of_a_worker_without_a_lease_only_leavings_are_told(surveyed: Surveyed) -> None:
    await surveyed.client.sadd(store_key("w1", "blocks"), key(1))
    assert await surveyed.survey.holding(W1) == Holding(None, None, frozenset([key(1)]), 0, 0, ())


@pytest.mark.parametrize("kind", ["meta", "blocks", "events", "staged"])
async def test_a_key_of_a_wrong_type_is_told_and_hides_nothing_else(surveyed: Surveyed, kind: str) -> None:
    await surveyed.publish("w1", range(3))
    await surveyed.client.set(store_key("w1", kind), "x")
    held = await surveyed.survey.holding(W1)
    assert held.spoilt == (kind,)
    assert (held.record is None) == (kind == "meta")
    assert len(held.blocks) == (0 if kind == "blocks" else 3)


async def test_a_lease_that_never_ends_is_none(surveyed: Surveyed) -> None:
    await surveyed.publish("w1", range(3))
    await surveyed.client.persist(store_key("w1", "meta"))
    held = await surveyed.survey.holding(W1)
    assert (held.record, held.lease_left_s, held.spoilt) == (None, None, ("meta",))


@pytest.mark.parametrize(
    ("name", "value"), [("info", b"junk"), ("seq", b"junk"), ("epoch", b"\xff"), ("instance", b"x")]
)
async def test_a_lease_that_nobody_can_read_is_told_and_dropped(surveyed: Surveyed, name: str, value: bytes) -> None:
    await surveyed.publish("w1", range(3))
    await surveyed.client.hset(store_key("w1", "meta"), name, value)
    held = await surveyed.survey.holding(W1)
    assert (held.record, held.spoilt, len(held.blocks)) == (None, ("meta",), 3)
    assert await surveyed.survey.discard(W1) == 3
    assert await surveyed.survey.holding(W1) == Holding(None, None, frozenset(), 0, 0, ())


async def test_a_store_that_throws_out_keys_is_told(surveyed: Surveyed) -> None:
    await surveyed.client.config_set("maxmemory", 1 << 30)
    await surveyed.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        (server,) = await surveyed.survey.health([W1])
        assert (server.may_evict, server.eviction_policy, server.max_memory_bytes) == (True, "allkeys-lru", 1 << 30)
    finally:
        await surveyed.client.config_set("maxmemory", 0)
        await surveyed.client.config_set("maxmemory-policy", "noeviction")


async def test_only_what_lives_for_ever_without_a_lease_is_left_over(surveyed: Surveyed) -> None:
    await surveyed.publish("w1", range(3))
    await surveyed.client.persist(store_key("w1", "blocks"))  # its owner's next heartbeat mends this
    await surveyed.client.sadd(store_key("gone", "blocks"), key(1))
    await surveyed.client.sadd(store_key("a%7Bb", "staged"), key(1))
    await surveyed.client.sadd(store_key("fading", "blocks"), key(1))
    await surveyed.client.expire(store_key("fading", "blocks"), 600)
    other = CacheScheme("org/other", 64).namespace
    await surveyed.client.sadd(f"kvr:{{{other}:gone}}:blocks", key(1))
    assert await surveyed.survey.leftovers([W1]) == ["a{b", "gone"]
    assert await surveyed.survey.leftovers([]) == ["a{b", "gone"]


OTHERS = [CacheScheme("org/other", 64), CacheScheme("org/model", 16), CacheScheme("org/model", 64, key_version=2)]


@pytest.mark.parametrize("other", OTHERS, ids=["model", "block size", "key version"])
async def test_deployments_on_one_store_survey_and_reap_their_own_only(surveyed: Surveyed, other: CacheScheme) -> None:
    await surveyed.publish("w1", range(3))
    await surveyed.client.sadd(store_key("gone", "blocks"), key(1))
    elsewhere = StoreSurvey(surveyed.url, other, deadline_s=PATIENT_S)
    try:
        assert await elsewhere.leftovers([W1]) == []
        assert await elsewhere.audit(W1, epoch(1), 1, keys([1])) is None
        assert (await elsewhere.sizes([W1]))[W1] == WorkerSize(0, 0, 0, None)
        assert await elsewhere.reap(WorkerId("gone")) == 0
    finally:
        await elsewhere.close()
    assert await surveyed.survey.leftovers([W1]) == ["gone"]
    assert await surveyed.survey.audit(W1, epoch(1), 1, keys([1])) == Audited(3, 0)


async def test_a_lease_without_an_end_is_left_over_and_can_be_reaped(surveyed: Surveyed) -> None:
    await surveyed.publish("w1", range(3))
    await surveyed.publish("w2", range(3))
    await surveyed.client.persist(store_key("w2", "meta"))
    assert await surveyed.survey.leftovers([W1]) == ["w2"]
    assert await surveyed.survey.reap(W2) == 3
    assert await surveyed.survey.leftovers([W1]) == []
    assert await surveyed.directory.resident(W1) == set(keys(range(3)))


async def test_reaping_drops_what_is_left_of_a_worker_and_nothing_of_a_live_one(surveyed: Surveyed) -> None:
    await surveyed.publish("w1", range(3))
    await surveyed.client.sadd(store_key("gone", "blocks"), key(1))
    await surveyed.client.sadd(store_key("gone", "staged"), key(1))
    assert await surveyed.survey.reap(WorkerId("gone")) == 2
    assert await surveyed.survey.reap(W1) == 0
    assert await surveyed.survey.leftovers([W1]) == []
    assert await surveyed.directory.resident(W1) == set(keys(range(3)))


@pytest.mark.parametrize("surveyed", ["valkey"], indirect=True)
async def test_a_user_with_few_rights_is_told_what_it_may_know(surveyed: Surveyed) -> None:
    await surveyed.publish("w1", range(3))
    rules = "on >secret resetkeys ~kvr:* -@all +info +exists +pttl +scard +evalsha +script|load +hmget +smismember"
    await surveyed.client.execute_command("ACL", "SETUSER", "narrow", *rules.split())
    separator = "&" if "?" in surveyed.url else "?"
    survey = StoreSurvey(f"{surveyed.url}{separator}username=narrow&password=secret", SCHEME, deadline_s=PATIENT_S)
    try:
        size = (await survey.sizes([W1]))[W1]
        assert (size.num_entries, size.num_bytes, size.num_stream_entries) == (3, None, None)
        assert await survey.audit(W1, epoch(1), 1, keys([1])) == Audited(3, 0)
        with pytest.raises(DirectoryUnavailable, match="leftovers"):
            await survey.leftovers([W1])
    finally:
        await survey.close()
        await surveyed.client.execute_command("ACL", "DELUSER", "narrow")


@pytest.mark.parametrize("surveyed", ["redis with TLS and an ACL"], indirect=True)
async def test_a_wrong_password_is_told_as_what_it_is(surveyed: Surveyed) -> None:
    survey = StoreSurvey(surveyed.url.replace(USER_PASSWORD, "wrong"), SCHEME, deadline_s=PATIENT_S)
    try:
        for ask in (survey.sizes, survey.health, survey.leftovers):
            with pytest.raises(ConfigError, match="--redis-url: the store refuses the user or the password"):
                await ask([W1])
    finally:
        await survey.close()


async def test_of_a_cluster_what_lies_on_a_lost_node_is_unknown_and_the_rest_is_told(
    redis_cluster: ClusterProcesses,
) -> None:
    lost = redis_cluster.nodes[2]
    (hidden,), (seen,) = names_on(redis_cluster, lost), names_on(redis_cluster, redis_cluster.nodes[0])
    directory = RedisDirectory(redis_cluster.url, SCHEME, publish_deadline_s=PATIENT_S)
    survey = StoreSurvey(redis_cluster.url, SCHEME, deadline_s=PATIENT_S)
    try:
        for name in (hidden, seen):
            assert await directory.register(worker_info(name), epoch(1), LONG_LEASE_S) == Reply.OK
            assert await directory.apply(batch(name, epoch(1), 1, stored=range(3))) == Reply.OK
        assert len((await survey.holding(hidden)).blocks) == 3
        lost.kill()
        with pytest.raises(DirectoryUnavailable, match="holding"):
            await survey.holding(hidden)
        assert len((await survey.holding(seen)).blocks) == 3
        sizes = await survey.sizes([hidden, seen])
        assert (sizes[seen].num_entries, sizes[seen].error) == (3, "")
        assert (sizes[hidden].num_entries, sizes[hidden].error[:6]) == (None, "sizes:")
        health = {server.name: bool(server.error) for server in await survey.health([hidden, seen])}
        assert health[f"127.0.0.1:{lost.port}"]
        assert not health[f"127.0.0.1:{redis_cluster.nodes[0].port}"]
    finally:
        await survey.close()
        await directory.close()
        redis_cluster.start()
