"""What only a store outside can do wrong, and what its layout promises to other readers."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import pytest

from shared.directory import connect_directory
from shared.directory.base import MAX_WORKERS, Match, Reply
from shared.directory.embedded import EmbeddedStore
from shared.directory.memory import MemoryDirectory
from shared.directory.redis import RedisDirectory
from shared.errors import ConfigError, DirectoryUnavailable
from shared.telemetry import Readings
from shared.types import WorkerId
from shared.wire import encode_record
from tests.support.stores import (
    LONG_LEASE_S,
    PATIENT_S,
    SCHEME,
    Bench,
    batch,
    embedded_store,
    epoch,
    instance,
    keys,
    redis_bench,
    wait_until,
    worker_info,
)
from worker.engines.base import BlockChange
from worker.publisher import Publisher

__all__ = ["embedded_store"]
pytestmark = pytest.mark.redis

E1, E2 = epoch(1), epoch(2)
W1, W2 = WorkerId("w1"), WorkerId("w2")
TAG = "kvr:{org%2Fmodel:64:v1:w1}"
WORKERS = "kvr:{org%2Fmodel:64:v1}:workers"
NO_BLOCKS = encode_record(worker_info("w1")).replace(b"\xcd\x03\xe8", b"\x00")  # its 1,000 blocks


@pytest.fixture
async def bench(embedded_store: EmbeddedStore) -> AsyncIterator[Bench]:
    async with redis_bench(embedded_store) as found:
        yield found


@pytest.fixture
async def client(bench: Bench) -> Any:
    assert bench.client is not None
    return bench.client


def refused(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is told loudly of values in the store."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "shared.directory.refusals" and record.levelno >= logging.WARNING
    ]


@pytest.fixture
async def directory(bench: Bench) -> RedisDirectory:
    """With `w1`, which holds three blocks."""
    assert isinstance(bench.directory, RedisDirectory)
    assert await bench.directory.register(worker_info("w1"), E1, LONG_LEASE_S) == Reply.OK
    assert await bench.directory.apply(batch("w1", E1, 1, range(3))) == Reply.OK
    return bench.directory


async def test_keys_of_a_worker_lie_in_one_slot(bench: Bench, directory: RedisDirectory, client: Any) -> None:
    await directory.stage(W1, E1, E2, keys(range(3)))
    assert await bench.stored_keys() == sorted(
        [f"{TAG}:{kind}" for kind in ("meta", "blocks", "events", "staged")] + [WORKERS]
    )
    slots = {
        await client.execute_command("CLUSTER", "KEYSLOT", name) for name in await bench.stored_keys() if TAG in name
    }
    assert len(slots) == 1


async def test_events_tell_mirrors_all_that_was_applied(directory: RedisDirectory, client: Any) -> None:
    await directory.apply(batch("w1", E1, 2, [7], [0, 1]))
    await directory.apply(batch("w1", E1, 2, [7], [0, 1]))
    await directory.apply(batch("w1", E1, 9, [8]))
    await directory.stage(W1, E1, E2, keys([5]))
    await directory.commit(W1, E1, E2, 1)
    holder = b"0:gpu:0"
    names = (b"epoch", b"seq", b"holder", b"stored", b"removed")
    assert [tuple(entry[name] for name in names) for _, entry in await client.xrange(f"{TAG}:events")] == [
        (E1.encode(), b"0", b"", b"", b""),
        (E1.encode(), b"1", holder, b"".join(keys(range(3))), b""),
        (E1.encode(), b"2", holder, b"".join(keys([7])), b"".join(keys([0, 1]))),
        (E2.encode(), b"0", b"", b"", b""),
    ]


async def test_event_stream_is_capped(embedded_store: EmbeddedStore, directory: RedisDirectory, client: Any) -> None:
    capped = RedisDirectory(embedded_store.url, SCHEME, publish_deadline_s=PATIENT_S, max_stream_entries=100)
    for seq in range(2, 600):
        await capped.apply(batch("w1", E1, seq, [seq]))
    await capped.close()
    assert await client.xlen(f"{TAG}:events") <= 200  # the store trims whole nodes of a hundred


@pytest.mark.parametrize("operation", ["apply", "commit"])
async def test_stream_that_the_store_threw_away_begins_anew_and_ends_with_the_lease(
    directory: RedisDirectory, client: Any, operation: str
) -> None:
    await directory.stage(W1, E1, E2, keys([7]))
    await client.delete(f"{TAG}:events")
    if operation == "apply":
        assert await directory.apply(batch("w1", E1, 2, [3])) == Reply.OK
    else:
        assert await directory.commit(W1, E1, E2, 1) == Reply.OK
    assert await client.pexpiretime(f"{TAG}:events") == await client.pexpiretime(f"{TAG}:meta") > 0


async def test_registering_anew_leaves_nothing_of_a_snapshot_in_the_making(
    bench: Bench, directory: RedisDirectory
) -> None:
    """Which heartbeats would keep for as long as the worker lives."""
    await directory.stage(W1, E1, E2, keys([7]))
    assert await directory.register(worker_info("w1"), E2, LONG_LEASE_S) == Reply.OK
    assert await bench.stored_keys() == sorted([f"{TAG}:{kind}" for kind in ("meta", "events")] + [WORKERS])


async def test_lost_scripts_are_loaded_again(directory: RedisDirectory, client: Any) -> None:
    await client.script_flush()
    assert await directory.match(keys(range(3)), [W1]) == {W1: Match(instance(1), 3)}
    await client.script_flush()
    assert await directory.apply(batch("w1", E1, 2, [3])) == Reply.OK


async def test_reaping_a_live_worker_leaves_it_listed_with_an_expiry(directory: RedisDirectory, client: Any) -> None:
    await directory._reap([W1, W2])
    assert await client.smembers(WORKERS) == {b"w1"}
    assert await client.ttl(WORKERS) > LONG_LEASE_S / 2


async def test_heartbeat_lists_a_worker_again_whose_id_was_lost(directory: RedisDirectory, client: Any) -> None:
    await client.delete(WORKERS)
    assert await directory.workers() == []
    await directory.heartbeat(W1, E1, 1, LONG_LEASE_S)
    assert [record.info.worker for record in await directory.workers()] == [W1]


@pytest.mark.parametrize(
    "field",
    [
        {"info": b"\xc1"},
        {"info": b""},
        {"info": encode_record(worker_info("w9"))},
        {"info": encode_record(worker_info("w1", life=9))},
        {"info": NO_BLOCKS},
        {"info": b"\xdd\xff\xff\xff\xff"},
        {"instance": b"\xff\xfe"},
        {"seq": b"many"},
        {"epoch": b"\xff"},
    ],
    ids=str,
)
async def test_malformed_record_is_counted_told_once_by_its_key_and_hides_no_other_worker(
    directory: RedisDirectory, client: Any, field: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    await directory.register(worker_info("w2"), E1, LONG_LEASE_S)
    await client.hset(f"{TAG}:meta", mapping=field)
    for _ in range(3):
        assert [record.info.worker for record in await directory.workers()] == [W2]
    assert directory.num_malformed == 3
    (told,) = refused(caplog)
    assert told.startswith(f"{TAG}:meta in the store holds what is not ours and is refused: ")


async def test_missing_fields_are_counted_and_not_reaped(directory: RedisDirectory, client: Any) -> None:
    await client.hdel(f"{TAG}:meta", "epoch", "info")
    assert await directory.workers() == []
    assert directory.num_malformed == 1
    assert await client.smembers(WORKERS) == {b"w1"}


@pytest.mark.parametrize("kind", ["meta", "blocks"])
async def test_match_survives_values_of_a_wrong_type(
    directory: RedisDirectory, client: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    await directory.register(worker_info("w2"), E1, LONG_LEASE_S)
    await directory.apply(batch("w2", E1, 1, range(2)))
    await client.set(f"{TAG}:{kind}", b"nonsense")
    await client.sadd(WORKERS, b"\xff\xff")
    assert await directory.match(keys(range(3)), [W1, W2]) == {W2: Match(instance(1), 2)}
    assert directory.num_malformed == 1
    assert (await directory.workers())[-1].info.worker == W2
    assert f"{TAG}:meta or {TAG}:blocks in the store holds what is not ours" in refused(caplog)[0]
    assert f"{WORKERS} in the store holds what is not ours and is refused: members that are no ids" in refused(caplog)


async def test_list_that_is_no_set_is_told_and_makes_nobody_look_gone(
    directory: RedisDirectory, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await client.set(WORKERS, b"nonsense")
    for _ in range(2):
        with pytest.raises(DirectoryUnavailable, match=r"^workers: .*WRONGTYPE"):
            await directory.workers()
    assert directory.num_malformed == 2
    (told,) = refused(caplog)
    assert told.startswith(f"{WORKERS} in the store holds what is not ours and is refused: WRONGTYPE")


async def test_endless_list_is_looked_at_in_parts_and_comes_down_again(
    directory: RedisDirectory, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    num_strangers = 3 * MAX_WORKERS
    await client.sadd(WORKERS, *(f"stranger-{number}" for number in range(num_strangers)))
    feed = directory.feed("reader", deadline_s=PATIENT_S)
    assert len(await feed.look([])) <= MAX_WORKERS
    # Each look takes a part of them off.
    for num_looks in range(1, 5):
        found = await directory.workers()
        assert await client.scard(WORKERS) <= max(1, num_strangers + 1 - num_looks * (MAX_WORKERS - 1))
    assert [record.info.worker for record in found] == [W1]
    (told,) = refused(caplog)
    assert told.startswith(f"{WORKERS} in the store holds what is not ours and is refused: over 4096 ids")
    await feed.close()


async def test_ids_of_absurd_length_are_refused(directory: RedisDirectory, client: Any) -> None:
    await client.sadd(WORKERS, b"w" * 1025)
    assert [record.info.worker for record in await directory.workers()] == [W1]
    assert directory.num_malformed == 1


async def test_lease_without_an_end_is_none_and_nothing_that_lived_by_it_is_dropped(
    directory: RedisDirectory, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await directory.stage(W1, E1, E2, keys([7]))
    await client.persist(f"{TAG}:meta")
    kept = {kind: await client.pexpiretime(f"{TAG}:{kind}") for kind in ("blocks", "events", "staged")}
    for refusal in (
        await directory.heartbeat(W1, E1, 1, LONG_LEASE_S),
        await directory.apply(batch("w1", E1, 2, [3])),
        await directory.stage(W1, E1, E2, keys([8])),
        await directory.commit(W1, E1, E2, 1),
        await directory.set_draining(W1, E1, True),
    ):
        assert refusal == Reply.UNKNOWN
    assert {kind: await client.pexpiretime(f"{TAG}:{kind}") for kind in kept} == kept
    assert await directory.match(keys(range(3)), [W1]) == {}
    assert await directory.workers() == []
    feed = directory.feed("reader", deadline_s=PATIENT_S)
    assert {worker: standing.lease for worker, standing in (await feed.look([W1])).items()} == {W1: None}
    assert directory.num_malformed == 2
    assert refused(caplog) == [f"{TAG}:meta in the store holds what is not ours and is refused: a lease without an end"]
    # It holds nobody up.
    assert await directory.register(worker_info("w1", life=2), E2, LONG_LEASE_S) == Reply.OK
    assert await directory.register(worker_info("w1", life=3), epoch(3), LONG_LEASE_S) == Reply.TAKEN
    await feed.close()


async def test_publisher_gives_a_lease_without_an_end_one(directory: RedisDirectory, client: Any) -> None:
    publisher = Publisher(directory, worker_info("w1"), rng=random.Random(0), lease_s=60.0, heartbeat_s=0.05)
    await publisher.start()
    publisher.on_blocks(BlockChange(stored=keys(range(20))))
    await wait_until(lambda: publisher.is_quiet)
    first_epoch = publisher.epoch
    await client.persist(f"{TAG}:meta")
    await wait_until(lambda: publisher.is_quiet and publisher.epoch != first_epoch)
    assert 0 < await client.pttl(f"{TAG}:meta") <= 60_000
    assert await directory.match(keys(range(20)), [W1]) == {W1: Match(instance(1), 20)}
    await publisher.stop()


async def test_everything_that_is_counted_is_told_as_a_metric(directory: RedisDirectory, client: Any) -> None:
    readings = Readings()
    directory.expose(readings)
    await client.sadd(f"{TAG}:blocks", b"short", b"shorter")
    await directory.resident(W1)
    told = [line for line in readings.render().decode().splitlines() if not line.startswith("#")]
    assert told == [
        "kvroute_store_malformed_total 2.0",
        "kvroute_store_misses_total 0.0",
        "kvroute_store_spared_matches_total 0.0",
        "kvroute_store_breaker_openings_total 0.0",
    ]


@pytest.mark.parametrize("kind", ["blocks", "events"])
async def test_batch_that_failed_half_way_does_not_pass_for_applied(
    directory: RedisDirectory, client: Any, kind: str
) -> None:
    await client.set(f"{TAG}:{kind}", b"nonsense")
    assert await directory.apply(batch("w1", E1, 2, [3], [0])) == Reply.UNKNOWN
    await client.delete(f"{TAG}:{kind}")
    assert await directory.apply(batch("w1", E1, 2, [3], [0])) == Reply.OK
    assert set(keys([3])) <= await directory.resident(W1)
    assert [entry[b"seq"] for _, entry in await client.xrange(f"{TAG}:events")][-1:] == [b"2"]


async def test_commit_that_failed_half_way_does_not_pass_for_done(directory: RedisDirectory, client: Any) -> None:
    await directory.stage(W1, E1, E2, keys(range(5, 8)))
    await client.set(f"{TAG}:events", b"nonsense")
    assert await directory.commit(W1, E1, E2, 3) == Reply.UNKNOWN
    assert await directory.resident(W1) == set(keys(range(3)))
    await client.delete(f"{TAG}:events")
    assert await directory.commit(W1, E1, E2, 3) == Reply.OK
    assert await directory.resident(W1) == set(keys(range(5, 8)))
    assert [(entry[b"epoch"], entry[b"seq"]) for _, entry in await client.xrange(f"{TAG}:events")] == [
        (E2.encode(), b"0")
    ]


@pytest.mark.parametrize("kind", ["blocks", "events", "staged"])
async def test_registering_replaces_values_of_a_wrong_type(directory: RedisDirectory, client: Any, kind: str) -> None:
    await client.set(f"{TAG}:{kind}", b"nonsense")
    assert await directory.register(worker_info("w1"), E2, LONG_LEASE_S) == Reply.OK
    assert await directory.apply(batch("w1", E2, 1, [3])) == Reply.OK
    assert await directory.resident(W1) == set(keys([3]))


async def test_members_that_are_no_keys_are_counted_and_left_out(directory: RedisDirectory, client: Any) -> None:
    await client.sadd(f"{TAG}:blocks", b"", b"short", b"far too long for a key")
    assert await directory.resident(W1) == set(keys(range(3)))
    assert directory.num_malformed == 3


async def test_match_survives_an_instance_that_is_no_text(directory: RedisDirectory, client: Any) -> None:
    await client.hset(f"{TAG}:meta", "instance", b"\xff")
    assert await directory.match(keys(range(3)), [W1]) == {}
    assert directory.num_malformed == 1


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        (b"redis_version:6.2.14\r\n", r"the server is Redis 6\.2\.14; Redis 7 or later, or Valkey, is needed"),
        (b"redis_version:7.2.4\r\nredis_mode:sentinel\r\n", "the server runs as sentinel"),
        (b"", "the server is Redis unknown"),
    ],
)
async def test_server_that_will_not_do_is_one_clear_error(told: bytes, complaint: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.strip().upper() == b"SERVER":  # of INFO server
                body = b"# Server\r\n" + told
                writer.write(b"$%d\r\n%s\r\n" % (len(body), body))
            elif line.strip().upper() in (b"LIB-NAME", b"LIB-VER"):  # of CLIENT SETINFO
                writer.write(b"+OK\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    directory = RedisDirectory(f"redis://127.0.0.1:{port}", SCHEME, publish_deadline_s=PATIENT_S)
    try:
        with pytest.raises(ConfigError, match=f"^--redis-url: {complaint}"):
            await directory.connect()
        # One that comes to its address later ends no request and no worker.
        with pytest.raises(DirectoryUnavailable, match=f"^match: UnfitStore: {complaint}"):
            await directory.match(keys(range(3)), [W1])
    finally:
        await directory.close()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("url", ["redis://:hunter2/x@host:1", "redis://:hunter2@host:port", "unix://"])
async def test_malformed_url_is_refused_without_telling_the_password(url: str) -> None:
    with pytest.raises((ConfigError, DirectoryUnavailable)) as caught:
        await connect_directory(url, SCHEME, publish_deadline_s=1.0)
    assert "hunter2" not in str(caught.value)


async def test_server_that_is_not_there_is_named_by_operation_and_without_the_password() -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        directory = RedisDirectory(f"redis://:hunter2@127.0.0.1:{port}", SCHEME, match_deadline_s=PATIENT_S)
        with pytest.raises(DirectoryUnavailable, match=r"^match: ConnectionError") as caught:
            await directory.match(keys(range(3)), [W1])
        await directory.close()
    assert "hunter2" not in str(caught.value)


async def test_urls_choose_the_implementation(embedded_store: EmbeddedStore) -> None:
    assert isinstance(await connect_directory("memory://", SCHEME), MemoryDirectory)
    found = await connect_directory(embedded_store.url, SCHEME, publish_deadline_s=PATIENT_S)
    assert isinstance(found, RedisDirectory)
    await found.close()
    with pytest.raises(ConfigError, match=r"unknown scheme 'http' \(choose from memory://, redis://"):
        await connect_directory("http://host", SCHEME)
    with pytest.raises(DirectoryUnavailable, match=r"^connect: "):
        await connect_directory("unix:///nowhere/store.sock", SCHEME)
