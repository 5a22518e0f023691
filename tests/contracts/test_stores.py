"""What a store must be: the ones that will not do are named at the start, and only alarmed about later."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router import launch
from shared.config import Settings
from shared.directory import connect_directory
from shared.directory.base import Match, Reply
from shared.directory.mirrored import MirroredDirectory
from shared.directory.redis import ACL_RULES, RedisDirectory
from shared.directory.redis_pin_board import RedisPinBoard
from shared.errors import ConfigError, DirectoryUnavailable
from shared.types import WorkerId
from tests.support.servers import (
    USER,
    USER_PASSWORD,
    SecuredServer,
    ServerProcess,
    find_redis_server,
    free_port,
    redis_server,
    secured_server,
)
from tests.support.stores import (
    LONG_LEASE_S,
    PATIENT_S,
    SCHEME,
    batch,
    epoch,
    instance,
    keys,
    pin_spec,
    wait_until,
    worker_info,
)
from worker.engines.base import BlockChange
from worker.publisher import Publisher

__all__ = ["redis_server", "secured_server"]
pytestmark = pytest.mark.redis

E1 = epoch(1)
W1 = WorkerId("w1")
LUA = Path(__file__).parents[2] / "shared/directory/lua"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RedisDirectory]:
    directory = RedisDirectory(url, SCHEME, match_deadline_s=PATIENT_S, publish_deadline_s=PATIENT_S)
    try:
        await directory.connect()
        yield directory
    finally:
        await directory.close()


@asynccontextmanager
async def held(server: ServerProcess) -> AsyncIterator[tuple[RedisDirectory, Any]]:
    """A directory with one worker of three blocks, and an administrator's client."""
    client = server.client()
    await client.flushall()
    try:
        async with connected(server.url) as directory:
            assert await directory.register(worker_info("w1"), E1, LONG_LEASE_S) == Reply.OK
            assert await directory.apply(batch("w1", E1, 1, range(3))) == Reply.OK
            yield directory, client
    finally:
        await client.aclose()


async def complaint(url: str, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        await connect_directory(url, SCHEME, publish_deadline_s=PATIENT_S)
    assert not re.search(f"{USER_PASSWORD}|wrong-secret", str(caught.value))
    return str(caught.value)


# At the start.


async def test_probe_leaves_nothing_in_the_store(redis_server: ServerProcess) -> None:
    async with connected(redis_server.url), redis_server.client() as client:
        assert await client.keys() == []


def test_probe_and_rules_name_every_command_of_every_script() -> None:
    def commands(path: Path) -> set[str]:
        calls = r"(?:redis\.p?call|try|each_chunk)\('(\w+)'"
        return {name.lower() for name in re.findall(calls, path.read_text())}

    used = set[str]().union(*(commands(path) for path in LUA.glob("*.lua") if path.stem != "probe"))
    assert {"sadd", "srem", "smismember"} <= used
    assert used - commands(LUA / "probe.lua") == set()
    assert used - set(re.findall(r"\+(\w+)", ACL_RULES)) == set()


@pytest.mark.parametrize(
    ("user", "password", "expected"),
    [
        (USER, "wrong-secret", r"--redis-url: the store refuses the user or the password: invalid username-password"),
        ("nobody", "wrong-secret", r"--redis-url: the store refuses the user or the password: invalid username-pass"),
        ("", "", r"--redis-url: the store refuses the user or the password: Authentication required"),
    ],
    ids=["wrong password", "unknown user", "no user"],
)
async def test_refused_user_is_one_clear_error(
    secured_server: SecuredServer, user: str, password: str, expected: str
) -> None:
    url = secured_server.url_as(user, password).replace("//:@", "//")
    assert re.match(expected, await complaint(url, ConfigError))


@pytest.mark.parametrize(
    "rules",
    ["-info", "-evalsha", "-script|load", "-xadd", "-smismember", "resetkeys ~other:*"],
)
async def test_user_without_a_right_is_told_all_that_it_needs(secured_server: SecuredServer, rules: str) -> None:
    async with secured_server.client() as client:
        await client.script_flush()
        await client.execute_command(
            "ACL", "SETUSER", "poor", "reset", "on", ">poor-secret", *ACL_RULES.split(), *rules.split()
        )
    told = await complaint(secured_server.url_as("poor", "poor-secret"), ConfigError)
    assert told.startswith("--redis-url: ")
    assert told.endswith(f"; the user needs the rules {ACL_RULES}")
    assert re.search(r"permission|can't run this command", told)


async def test_certificate_of_a_stranger_is_refused(secured_server: SecuredServer) -> None:
    url = secured_server.url.partition("?")[0]  # without the authority that signed it
    assert re.search("certificate verify failed", await complaint(url, DirectoryUnavailable))


async def test_missing_file_of_an_authority_is_named(secured_server: SecuredServer) -> None:
    told = await complaint(secured_server.url.replace("server.crt", "nothing.crt"), DirectoryUnavailable)
    assert re.search("No such file", told)


async def test_plain_connection_to_a_server_with_tls_is_refused(secured_server: SecuredServer) -> None:
    plain = secured_server.url.replace("rediss://", "redis://").partition("?")[0]
    assert (await complaint(plain, DirectoryUnavailable)).startswith("connect: ConnectionError")


async def test_connection_with_tls_to_a_plain_server_is_refused(redis_server: ServerProcess) -> None:
    url = redis_server.url.replace("redis://", "rediss://")
    with pytest.raises(DirectoryUnavailable, match=r"^connect: "):
        await connect_directory(url, SCHEME, publish_deadline_s=0.5)  # the server waits for the end of a line


async def test_replica_is_refused(redis_server: ServerProcess) -> None:
    with ServerProcess("--replicaof", f"127.0.0.1 {redis_server.port}") as replica:
        told = await complaint(replica.url, DirectoryUnavailable)
    assert told.startswith("connect: ReadOnlyError: You can't write against a read only replica")


@pytest.fixture(scope="module")
def full_server() -> Iterator[ServerProcess]:
    find_redis_server()
    with ServerProcess("--maxmemory", "1", "--maxmemory-policy", "noeviction") as server:
        yield server


async def test_full_store_is_refused(full_server: ServerProcess) -> None:
    told = await complaint(full_server.url, DirectoryUnavailable)
    assert told.startswith("connect: OutOfMemoryError: command not allowed when used memory > 'maxmemory'")


async def test_store_that_evicts_is_warned_about_once(
    redis_server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with redis_server.client() as client:
        await client.config_set("maxmemory", "1gb")
        try:
            for policy in ("allkeys-lru", "noeviction"):
                await client.config_set("maxmemory-policy", policy)
                async with connected(redis_server.url):
                    pass
        finally:
            await client.config_set("maxmemory", "0")
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.WARNING,
            f"the store at 127.0.0.1:{redis_server.port} may throw away what the directory keeps there "
            "(maxmemory-policy allkeys-lru): with noeviction it tells when it is full",
        )
    ]


@pytest.mark.parametrize("must_answer", [True, False])
async def test_store_that_takes_no_writes_now_ends_no_worker(full_server: ServerProcess, must_answer: bool) -> None:
    if must_answer:
        with pytest.raises(DirectoryUnavailable):
            await connect_directory(full_server.url, SCHEME, must_answer=True)
    else:
        directory = await connect_directory(full_server.url, SCHEME, must_answer=False)
        assert await directory.workers() == []
        await directory.close()


async def test_command_names_its_flag_whatever_is_wrong(
    full_server: ServerProcess, secured_server: SecuredServer
) -> None:
    for url in (full_server.url, secured_server.url_as(USER, "wrong-secret"), f"redis://127.0.0.1:{free_port()}"):
        with pytest.raises(ConfigError, match=r"^--redis-url: ") as caught:
            await launch.check_given_store(Settings(model="tiny", redis_url=url))
        assert "wrong-secret" not in str(caught.value)


@pytest.mark.parametrize("options", ["protocol=3", "max_connections=1", "decode_responses=yes", "timeout=1"])
async def test_options_that_are_ours_to_choose_change_nothing(redis_server: ServerProcess, options: str) -> None:
    async with held(redis_server), connected(f"{redis_server.url}?{options}") as directory:
        assert await directory.match(keys(range(5)), [W1]) == {W1: Match(instance(1), 3)}
        assert [record.seq for record in await directory.workers()] == [1]


async def test_unknown_option_of_a_url_is_refused(redis_server: ServerProcess) -> None:
    assert re.match("--redis-url: malformed", await complaint(f"{redis_server.url}?retries=3", ConfigError))


# Later.


@pytest.fixture(scope="module")
def user_server() -> Iterator[SecuredServer]:
    """Without TLS: Redis 7.0 with it may overlook a new connection after it has given up being a replica."""
    find_redis_server()
    with SecuredServer(is_tls=False) as server:
        yield server


class Trouble:
    """Something that a running store may come to refuse, and its end."""

    def __init__(self, name: str, begin: list[str], end: list[str], error: str) -> None:
        self.name, self.begin, self.end, self.error = name, begin, end, error

    def __repr__(self) -> str:
        return self.name


TROUBLES = [
    Trouble("full", ["CONFIG SET maxmemory 1"], ["CONFIG SET maxmemory 0"], "OutOfMemoryError"),
    Trouble("replica", ["REPLICAOF 127.0.0.1 1"], ["REPLICAOF NO ONE"], "ReadOnlyError"),
    Trouble("rights", [f"ACL SETUSER {USER} -evalsha"], [f"ACL SETUSER {USER} +evalsha"], "NoPermissionError"),
    Trouble("rights in scripts", [f"ACL SETUSER {USER} -hset"], [f"ACL SETUSER {USER} +hset"], "ResponseError"),
    Trouble(
        "password",
        [f"ACL SETUSER {USER} resetpass >other", f"CLIENT KILL USER {USER}"],
        [f"ACL SETUSER {USER} resetpass >{USER_PASSWORD}"],
        "AuthenticationError",
    ),
]


def told_by_publisher(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "worker.publisher"]


@pytest.mark.parametrize("trouble", TROUBLES, ids=repr)
async def test_store_that_comes_to_refuse_is_one_alarm_and_heals(
    user_server: SecuredServer, caplog: pytest.LogCaptureFixture, trouble: Trouble
) -> None:
    async with held(user_server) as (directory, client):
        await client.flushall()
        publisher = Publisher(directory, worker_info("w1"), rng=random.Random(0), lease_s=60.0, heartbeat_s=0.1)
        await publisher.start()
        publisher.on_blocks(BlockChange(stored=keys(range(20))))
        await wait_until(lambda: publisher.is_quiet)
        try:
            for command in trouble.begin:
                await client.execute_command(*command.split())
            num_misses = directory.num_misses
            publisher.on_blocks(BlockChange(stored=keys([20]), removed=keys([10])))
            await wait_until(lambda: directory.num_misses > num_misses + 2)
        finally:
            for command in trouble.end:
                await client.execute_command(*command.split())
        await wait_until(lambda: publisher.is_quiet and len(told_by_publisher(caplog)) > 1)
        assert await directory.resident(W1) == publisher.resident == set(keys([*range(10), *range(11, 21)]))
        assert await directory.match(keys(range(20)), [W1]) == {W1: Match(instance(1), 10)}
        await publisher.stop()
    told = told_by_publisher(caplog)
    assert len(told) == 2, told
    assert re.fullmatch(rf"worker w1 cannot publish, its changes are kept: \w+: {trouble.error}: .*", told[0])
    assert re.fullmatch(r"worker w1 publishes again after .* s", told[1])
    assert USER_PASSWORD not in "".join(told)


async def test_store_that_is_full_when_a_lease_is_lost_is_one_alarm(
    redis_server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with held(redis_server) as (directory, client):
        await client.flushall()
        publisher = Publisher(directory, worker_info("w1"), rng=random.Random(0), lease_s=60.0, heartbeat_s=0.02)
        await publisher.start()
        publisher.on_blocks(BlockChange(stored=keys(range(20))))
        await wait_until(lambda: publisher.is_quiet)
        first_epoch = publisher.epoch
        await client.config_set("maxmemory", 1)
        try:
            publisher.on_blocks(BlockChange(stored=keys([20])))
            await client.delete("kvr:{org%2Fmodel:64:v1:w1}:meta")
            await wait_until(lambda: publisher.epoch != first_epoch)  # it tries to register anew
            num_misses = directory.num_misses
            await wait_until(lambda: directory.num_misses > num_misses + 20)
        finally:
            await client.config_set("maxmemory", 0)
        async with asyncio.timeout(20.0):
            while await directory.match(keys(range(30)), [W1]) != {W1: Match(instance(1), 21)}:
                await asyncio.sleep(0.01)
        await wait_until(lambda: len(told_by_publisher(caplog)) > 1)
        await publisher.stop()
    assert [re.sub(r":.*| after.*", "", text) for text in told_by_publisher(caplog)] == [
        "worker w1 cannot publish, its changes are kept",
        "worker w1 publishes again",
    ]


async def test_store_that_fills_up_in_the_middle_of_a_snapshot_is_one_alarm_and_heals(
    redis_server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with held(redis_server) as (directory, client):
        await client.flushall()
        publisher = Publisher(directory, worker_info("w1"), rng=random.Random(0), lease_s=60.0, heartbeat_s=0.1)
        await publisher.start()
        publisher.on_blocks(BlockChange(stored=keys(range(20))))
        await wait_until(lambda: publisher.is_quiet)
        num_used = (await client.info("memory"))["used_memory"]
        await client.config_set("maxmemory", num_used + (1 << 20))
        try:
            publisher.on_blocks(BlockChange(stored=keys(range(100_000))))
            await wait_until(lambda: directory.num_misses > 2)
            # What was there before is there still, and nothing half done is seen.
            assert await directory.match(keys(range(30)), [W1]) == {W1: Match(instance(1), 20)}
        finally:
            await client.config_set("maxmemory", 0)
        await wait_until(lambda: publisher.is_quiet)
        assert await directory.resident(W1) == publisher.resident == set(keys(range(100_000)))
        await publisher.stop()
    assert [re.sub(r":.*| after.*", "", text) for text in told_by_publisher(caplog)] == [
        "worker w1 cannot publish, its changes are kept",
        "worker w1 publishes again",
    ]


READERS_ALARM = {"rights": "NoPermissionError", "password": "AuthenticationError"}
"""Trouble that keeps routers from reading, and the error that their alarm names."""


# A script that is cut short has applied a batch without saying so: what mirrors make of that is another matter.
@pytest.mark.parametrize("trouble", [one for one in TROUBLES if one.name != "rights in scripts"], ids=repr)
async def test_router_on_a_store_that_comes_to_refuse_matches_on_and_tells_of_it_once(
    user_server: SecuredServer, caplog: pytest.LogCaptureFixture, trouble: Trouble
) -> None:
    async with held(user_server) as (directory, client), connected(user_server.url) as inner:
        await client.flushall()
        publisher = Publisher(directory, worker_info("w1"), rng=random.Random(0), lease_s=60.0, heartbeat_s=0.1)
        await publisher.start()
        publisher.on_blocks(BlockChange(stored=keys(range(20))))
        mirrored = MirroredDirectory(inner, inner.feed("reader", deadline_s=PATIENT_S), refresh_s=0.05, wait_s=0.05)
        mirrored.start()

        async def until_mirrored(num_blocks: int) -> None:
            await wait_until(lambda: len(mirrored.mirrored(W1) or ()) == num_blocks)
            assert await mirrored.match(keys(range(50)), [W1]) == {W1: Match(instance(1), num_blocks)}

        await until_mirrored(20)
        try:
            for command in trouble.begin:
                await client.execute_command(*command.split())
            num_misses = directory.num_misses
            publisher.on_blocks(BlockChange(stored=keys([20])))
            await wait_until(lambda: directory.num_misses > num_misses + 2)
            if trouble.name in READERS_ALARM:
                await wait_until(lambda: mirrored.is_resting)
            for _ in range(10):
                assert await mirrored.match(keys(range(50)), [W1]) == {W1: Match(instance(1), 20)}
            assert mirrored.num_stale_matches == (10 if trouble.name in READERS_ALARM else 0)
        finally:
            for command in trouble.end:
                await client.execute_command(*command.split())
        await until_mirrored(21)
        await wait_until(lambda: not mirrored.is_resting)
        await publisher.stop()
        await mirrored.close()
    told = [record.getMessage() for record in caplog.records if record.name.startswith("shared.")]
    if trouble.name in READERS_ALARM:
        assert len(told) == 2, told
        assert READERS_ALARM[trouble.name] in told[0]
        assert re.search(r"answers again after .* s$", told[1])
        assert USER_PASSWORD not in "".join(told)
    else:
        assert told == []


@pytest.mark.parametrize("trouble", TROUBLES, ids=repr)
async def test_pin_board_on_a_store_that_comes_to_refuse_is_away_and_comes_back(
    user_server: SecuredServer, trouble: Trouble
) -> None:
    board = RedisPinBoard(user_server.url, SCHEME, deadline_s=PATIENT_S)
    async with user_server.client() as client:
        await client.flushall()
        assert await board.put(pin_spec("system"), None)
        try:
            for command in trouble.begin:
                await client.execute_command(*command.split())
            with pytest.raises(DirectoryUnavailable, match=rf"^pins_put: {trouble.error}"):
                await board.put(pin_spec("other", life=2), None)
        finally:
            for command in trouble.end:
                await client.execute_command(*command.split())
        assert await board.put(pin_spec("other", life=2), None)
        assert await board.spec("system") == pin_spec("system")
    await board.close()


@pytest.mark.parametrize("begin", ["CONFIG SET maxmemory 1", "REPLICAOF 127.0.0.1 1"])
async def test_store_that_takes_no_writes_is_still_read(redis_server: ServerProcess, begin: str) -> None:
    async with held(redis_server) as (directory, client):
        await client.execute_command(*begin.split())
        try:
            with pytest.raises(DirectoryUnavailable):
                await directory.apply(batch("w1", E1, 2, [9]))
            assert await directory.match(keys(range(5)), [W1]) == {W1: Match(instance(1), 3)}
            assert [record.seq for record in await directory.workers()] == [1]
        finally:
            await client.config_set("maxmemory", 0)
            await client.execute_command("REPLICAOF", "NO", "ONE")


async def test_full_store_keeps_the_leases_of_those_who_live(redis_server: ServerProcess) -> None:
    async with held(redis_server) as (directory, client):
        await client.config_set("maxmemory", 1)
        try:
            assert await directory.heartbeat(W1, E1, 1, 2 * LONG_LEASE_S) == Reply.OK
        finally:
            await client.config_set("maxmemory", 0)
        assert await client.ttl("kvr:{org%2Fmodel:64:v1:w1}:meta") > LONG_LEASE_S


# Values of strangers.


@pytest.mark.parametrize("kind", ["meta", "blocks", "events", "staged", "workers"])
@pytest.mark.parametrize("value", ["text", "list", "fields"])
async def test_publisher_replaces_whatever_a_stranger_put_in_its_place(
    redis_server: ServerProcess, kind: str, value: str
) -> None:
    name = "kvr:{org%2Fmodel:64:v1}:workers" if kind == "workers" else f"kvr:{{org%2Fmodel:64:v1:w1}}:{kind}"
    async with held(redis_server) as (directory, client):
        await client.flushall()
        publisher = Publisher(directory, worker_info("w1"), rng=random.Random(0), lease_s=60.0, heartbeat_s=0.05)
        await publisher.start()
        publisher.on_blocks(BlockChange(stored=keys(range(20))))
        await wait_until(lambda: publisher.is_quiet)
        if value == "fields" and kind == "meta":
            await client.hset(name, mapping={"seq": b"many", "epoch": b"\xff"})
        else:
            await client.delete(name)
            await (client.set(name, b"\xdd\xff\xff\xff\xff") if value == "text" else client.rpush(name, b"\x80"))
        publisher.on_blocks(BlockChange(stored=keys([20])))
        publisher._plan_snapshot("asked for")  # what is staged is only met by a snapshot
        async with asyncio.timeout(20.0):
            while not (
                publisher.is_quiet
                and [record.info.worker for record in await listed(directory)] == [W1]
                and await directory.match(keys(range(21)), [W1]) == {W1: Match(instance(1), 21)}
            ):
                await asyncio.sleep(0.01)
        assert not publisher.is_evicted
        await publisher.stop()
        assert await client.keys() == []


async def listed(directory: RedisDirectory) -> list[Any]:
    try:
        return await directory.workers()
    except DirectoryUnavailable:
        return []
