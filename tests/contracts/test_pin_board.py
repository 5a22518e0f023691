"""What every pin board promises: one suite over the board in memory and every kind of store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from shared.directory.embedded import EmbeddedStore
from shared.directory.pin_board import (
    MAX_PIN_TOKENS,
    MAX_PINS,
    MAX_REMOVED,
    BoardId,
    PinReport,
    PinSpec,
    PinState,
    Revision,
    WorkerPins,
    check_name,
)
from shared.directory.redis_pin_board import RedisPinBoard
from shared.errors import ConfigError, DirectoryUnavailable, PinRefused
from shared.hashing import pack_tokens
from shared.telemetry import Readings
from shared.types import CacheScheme, WorkerId
from shared.wire import encode_record
from tests.support.servers import redis_cluster, redis_server, secured_server
from tests.support.stores import (
    PATIENT_S,
    SCHEME,
    STORES,
    BoardBench,
    embedded_store,
    instance,
    memory_board,
    pin_spec,
    redis_board,
)

__all__ = ["embedded_store", "redis_cluster", "redis_server", "secured_server"]

B1, B2, B3 = (BoardId(f"{number:032x}") for number in (101, 102, 103))
W1, W2, W3 = WorkerId("w1"), WorkerId("w{2}:"), WorkerId("w3")
PINS = f"kvr:{{{SCHEME.namespace}}}:pins"


@pytest.fixture(params=["memory", *(pytest.param(kind, marks=pytest.mark.redis) for kind in STORES)])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[BoardBench]:
    is_memory = request.param == "memory"
    opened = memory_board() if is_memory else redis_board(request.getfixturevalue(STORES[request.param]))
    async with opened as found:
        yield found


@pytest.fixture
async def redis_bench(embedded_store: EmbeddedStore) -> AsyncIterator[BoardBench]:
    async with redis_board(embedded_store) as found:
        yield found


def told(life: int = 1, *pins: PinReport) -> WorkerPins:
    return WorkerPins(instance(life), 40, sum(pin.num_blocks for pin in pins), pins)


async def wanted(bench: BoardBench) -> dict[str, Revision]:
    found = await bench.board.look()
    return {} if found is None else {name: pin.revision for name, pin in found.pins.items()}


# Putting and removing.


async def test_there_is_no_board_before_somebody_makes_one(bench: BoardBench) -> None:
    assert await bench.board.look() is None
    assert await bench.board.spec("system") is None
    assert not await bench.board.remove("system")
    assert await bench.board.look() is None


async def test_a_pin_is_told_with_its_tokens_or_without(bench: BoardBench) -> None:
    spec = pin_spec("system", salt="tenant", adapter="lora", workers=(W1, W2))
    assert await bench.board.put(spec, None)
    found = await bench.board.look()
    assert found is not None
    assert [(name, pin.revision, pin.expires_in_s) for name, pin in found.pins.items()] == [
        ("system", spec.revision, None)
    ]
    assert await bench.board.spec("system") == spec
    assert await bench.board.spec("other") is None


async def test_a_renewed_pin_replaces_the_former_one(bench: BoardBench) -> None:
    renewed = pin_spec("system", life=2, num_tokens=300)
    await bench.board.put(pin_spec("system"), 600.0)
    assert await bench.board.put(renewed, None)
    assert await wanted(bench) == {"system": renewed.revision}
    assert await bench.board.spec("system") == renewed


async def test_a_put_for_a_revision_that_is_gone_changes_nothing(bench: BoardBench) -> None:
    first, second, third = (pin_spec("system", life=life) for life in (1, 2, 3))
    assert not await bench.board.put(first, None, replacing=third.revision)
    assert await bench.board.look() is None
    await bench.board.put(first, None)
    assert not await bench.board.put(second, None, replacing=third.revision)
    assert await wanted(bench) == {"system": first.revision}
    assert await bench.board.put(second, None, replacing=first.revision)
    assert await wanted(bench) == {"system": second.revision}


async def test_a_removed_pin_is_gone_and_the_board_stays(bench: BoardBench) -> None:
    first, second = pin_spec("system"), pin_spec("other", life=2)
    await bench.board.put(first, None)
    await bench.board.put(second, None)
    board = await bench.board.follow(B1)
    assert not await bench.board.remove("system", revision=second.revision)
    assert await bench.board.remove("system", revision=first.revision)
    assert not await bench.board.remove("system")
    assert await wanted(bench) == {"other": second.revision}
    assert await bench.board.remove("other")
    assert (await bench.board.follow(B2)).board == board.board


async def test_a_full_board_takes_no_further_name_and_says_the_limit(bench: BoardBench) -> None:
    for number in range(MAX_PINS):
        await bench.board.put(pin_spec(f"pin-{number}", life=number, num_tokens=1), None)
    with pytest.raises(PinRefused, match=f"there are {MAX_PINS} pins already"):
        await bench.board.put(pin_spec("one-more", life=1000), None)
    assert await bench.board.put(pin_spec("pin-0", life=1001), None)
    assert len(await wanted(bench)) == MAX_PINS


async def test_a_cleared_board_is_gone(bench: BoardBench) -> None:
    await bench.board.put(pin_spec("system"), None)
    await bench.board.clear()
    assert await bench.board.look() is None
    assert await bench.board.spec("system") is None


# Time.


async def test_a_pin_with_a_time_to_live_tells_what_is_left_of_it(bench: BoardBench) -> None:
    await bench.board.put(pin_spec("system"), 600.0)
    found = await bench.board.look()
    assert found is not None
    left_s = found.pins["system"].expires_in_s
    assert left_s is not None
    assert 0 < left_s <= 600.0


async def test_an_expired_pin_is_gone_by_the_clock_of_the_store(bench: BoardBench) -> None:
    await bench.board.put(pin_spec("short"), 0.05)
    await bench.board.put(pin_spec("long", life=2), 600.0)
    await bench.let_pass(0.1)
    assert set(await wanted(bench)) == {"long"}
    assert await bench.board.spec("short") is None
    assert not await bench.board.remove("short")


async def test_a_renewed_pin_has_the_time_to_live_of_its_last_putting(bench: BoardBench) -> None:
    await bench.board.put(pin_spec("system"), 0.05)
    await bench.board.put(pin_spec("system", life=2), None)
    await bench.let_pass(0.1)
    assert set(await wanted(bench)) == {"system"}


async def test_a_pin_that_no_worker_keeps_is_dropped_while_its_board_is_followed(bench: BoardBench) -> None:
    for life, name in enumerate(("kept", "orphan")):
        await bench.board.put(pin_spec(name, life=life), None)
    await bench.board.follow(B1, ["kept"])
    await bench.abandon("orphan")
    if bench.clock is not None:
        # What is kept is kept from here on.
        bench.clock.now_s -= 1.0
        await bench.board.follow(B1, ["kept"])
        bench.clock.now_s += 1.0
    assert set((await bench.board.follow(B1, ["kept"])).pins) == {"kept"}
    assert await bench.board.spec("orphan") is None


async def test_keeping_a_pin_that_is_not_there_makes_none(bench: BoardBench) -> None:
    assert (await bench.board.follow(B1, ["ghost"])).pins == {}
    assert (await bench.board.follow(B1)).pins == {}


# A store that lost its memory.


async def test_a_board_keeps_its_identity_until_the_store_is_lost(bench: BoardBench) -> None:
    assert (await bench.board.follow(B1)).board == B1
    await bench.board.put(pin_spec("system"), None)
    assert (await bench.board.follow(B2)).board == B1
    await bench.lose_everything()
    assert await bench.board.look() is None
    assert (await bench.board.follow(B3)).board == B3


async def test_a_pin_of_a_lost_board_is_put_back_where_nothing_has_its_name(bench: BoardBench) -> None:
    await bench.board.follow(B1)
    newer = pin_spec("newer", life=5)
    await bench.board.put(newer, None)
    assert await bench.board.put_back(pin_spec("system"), 600.0, B1)
    assert not await bench.board.put_back(pin_spec("system", life=2), None, B1)
    assert not await bench.board.put_back(pin_spec("newer", life=3), None, B1)
    assert await wanted(bench) == {"newer": newer.revision, "system": pin_spec("system").revision}
    assert await bench.board.spec("system") == pin_spec("system")


async def test_nothing_is_put_back_on_a_board_that_is_gone_by_now(bench: BoardBench) -> None:
    assert not await bench.board.put_back(pin_spec("system"), None, B1)
    await bench.board.follow(B2)
    assert not await bench.board.put_back(pin_spec("system"), None, B1)
    assert await wanted(bench) == {}


async def test_what_was_given_up_on_a_board_is_not_put_back_on_it(bench: BoardBench) -> None:
    await bench.board.follow(B1)
    first, renewed = pin_spec("system"), pin_spec("system", life=2)
    await bench.board.put(first, None)
    await bench.board.put(renewed, None)
    await bench.board.remove("system")
    assert not await bench.board.put_back(first, None, B1)
    assert not await bench.board.put_back(renewed, None, B1)
    assert await wanted(bench) == {}


async def test_a_full_board_takes_nothing_back(bench: BoardBench) -> None:
    await bench.board.follow(B1)
    for number in range(MAX_PINS):
        await bench.board.put(pin_spec(f"pin-{number}", life=number, num_tokens=1), None)
    assert not await bench.board.put_back(pin_spec("one-more", life=1000), None, B1)


# Reports.


async def test_a_report_is_told_until_it_expires(bench: BoardBench) -> None:
    pinned = PinReport("system", pin_spec().revision, PinState.PINNED, 3, 192)
    refused = PinReport("other", pin_spec(life=2).revision, PinState.REFUSED, message="no room")
    await bench.board.report(W1, told(1, pinned, refused), 600.0)
    await bench.board.report(W2, told(2), 0.05)
    await bench.let_pass(0.1)
    assert await bench.board.reports([W1, W2, W3]) == {W1: told(1, pinned, refused)}
    assert await bench.board.reports([]) == {}
    assert told(1, pinned).of("system", pinned.revision) == pinned
    assert told(1, pinned).of("system", refused.revision) is None


async def test_a_report_replaces_the_one_before(bench: BoardBench) -> None:
    await bench.board.report(W2, told(1), 600.0)
    await bench.board.report(W2, told(2), 600.0)
    assert await bench.board.reports([W2]) == {W2: told(2)}


# Limits.


@pytest.mark.parametrize("name", ["a", "System-prompt_2.1", "x" * 64])
def test_good_names_are_taken(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "a\n", "ä", "a/b", "a:b"])
def test_bad_names_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="a pin's name has 1 to 64"):
        check_name(name)
    with pytest.raises(ValueError, match="no name of a pin"):
        PinSpec(name, b"\0\0\0\0", Revision("0" * 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": b""}, "0 bytes are not 1 to"),
        ({"token_ids": b"\0\0\0"}, "3 bytes are not 1 to"),
        ({"token_ids": bytes(4 * MAX_PIN_TOKENS + 4)}, f"are not 1 to {MAX_PIN_TOKENS} tokens"),
        ({"revision": "another"}, "no revision"),
        ({"salt": "s" * 1025}, "more than 1024 characters"),
        ({"workers": (WorkerId("w" * 1025),)}, "more than 1024 characters"),
        ({"workers": (WorkerId("w"),) * 4097}, "4097 workers; the limit is 4096"),
    ],
)
def test_specs_beyond_the_limits_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(pin_spec(), **change)  # type: ignore[arg-type]


def test_a_report_of_more_pins_than_a_board_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="the limit is 256"):
        told(1, *[PinReport("a", pin_spec().revision, PinState.PINNED)] * (MAX_PINS + 1))


# What only a store outside can do wrong.


@pytest.mark.redis
async def test_keys_of_the_board_share_a_slot_and_an_end(redis_bench: BoardBench) -> None:
    client, board = redis_bench.client, redis_bench.board
    assert client is not None
    await board.put(pin_spec("system"), None)
    await board.put(pin_spec("other", life=2), None)
    await board.remove("other")
    await board.report(W2, told(), 600.0)
    names = sorted([raw.decode() async for raw in client.scan_iter()])
    report = f"kvr:{{{SCHEME.namespace}:w%7B2%7D%3A}}:pins"
    assert names == sorted([f"{PINS}:{kind}" for kind in ("board", "index", "specs", "kept", "removed")] + [report])
    ends = {await client.pexpiretime(name) for name in names if name != report}
    assert len(ends) == 1
    assert ends.pop() > 0


@pytest.mark.redis
@pytest.mark.parametrize(
    "other",
    [CacheScheme("org/other", 64), CacheScheme("org/model", 16), CacheScheme("org/model", 64, key_version=2)],
    ids=["model", "block size", "key version"],
)
async def test_deployments_on_one_store_do_not_see_each_others_pins(
    redis_bench: BoardBench, embedded_store: EmbeddedStore, other: CacheScheme
) -> None:
    board, elsewhere = redis_bench.board, RedisPinBoard(embedded_store.url, other, deadline_s=PATIENT_S)
    try:
        await board.put(pin_spec("system"), None)
        await board.report(W1, told(), 600.0)
        assert await elsewhere.look() is None
        assert await elsewhere.spec("system") is None
        assert await elsewhere.reports([W1]) == {}
        assert await elsewhere.put(pin_spec("system", life=2, num_tokens=64), None)
        assert await elsewhere.remove("system")
        await elsewhere.clear()
    finally:
        await elsewhere.close()
    assert await board.spec("system") == pin_spec("system")
    assert await board.reports([W1]) == {W1: told()}


@pytest.mark.redis
async def test_the_store_remembers_a_bounded_number_of_what_was_given_up(redis_bench: BoardBench) -> None:
    client, board = redis_bench.client, redis_bench.board
    assert client is not None
    await board.put(pin_spec("system"), None)
    await client.zadd(f"{PINS}:removed", {f"{number:032x}": number for number in range(5000, 5000 + MAX_REMOVED)})
    await board.remove("system")
    assert await client.zcard(f"{PINS}:removed") == MAX_REMOVED
    assert await client.zscore(f"{PINS}:removed", pin_spec("system").revision) is not None


@pytest.mark.redis
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        encode_record(pin_spec("other")),
        encode_record(pin_spec("system"))[:-5],
        encode_record(pin_spec("system")).replace(b"system", b"sys em"),
        b"\x93\xa6system\xc4\x03abc\xd9\x20" + b"0" * 32,
        b"\x93\xa6system\xc0\xd9\x20" + b"0" * 32,
    ],
)
async def test_hostile_specs_are_refused_by_name_and_counted(
    redis_bench: BoardBench, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client, board = redis_bench.client, redis_bench.board
    assert client is not None
    await board.put(pin_spec("system"), None)
    await board.put(pin_spec("good", life=2), None)
    await client.hset(f"{PINS}:specs", "system", raw)
    assert await board.spec("system") is None
    assert await board.spec("good") == pin_spec("good", life=2)
    assert board.num_malformed == 1  # type: ignore[attr-defined]
    assert f"{PINS}:specs in the store holds what is not ours and is refused: pin 'system': " in caplog.text
    readings = Readings()
    board.expose(readings)
    assert b"kvroute_pin_board_malformed_total 1.0" in readings.render()


@pytest.mark.redis
async def test_hostile_entries_of_the_index_are_refused_and_the_others_told(redis_bench: BoardBench) -> None:
    client, board = redis_bench.client, redis_bench.board
    assert client is not None
    await board.put(pin_spec("good"), None)
    hostile = {b"bad name": b"x:", b"\xff": b"y:", b"revision": b"beef:", b"time": b"0" * 32 + b":soon", b"none": b""}
    await client.hset(f"{PINS}:index", mapping=hostile)
    await client.zadd(f"{PINS}:kept", dict.fromkeys(hostile, 1e15))
    assert set((await board.follow(B1, ["good"])).pins) == {"good"}
    assert board.num_malformed == len(hostile)  # type: ignore[attr-defined]
    assert await board.remove("revision")
    assert await board.put(pin_spec("none", life=7), None)


@pytest.mark.redis
async def test_a_hostile_report_is_left_out_and_counted(redis_bench: BoardBench) -> None:
    client, board = redis_bench.client, redis_bench.board
    assert client is not None
    await board.report(W1, told(), 600.0)
    await client.set(f"kvr:{{{SCHEME.namespace}:w3}}:pins", b"\x93\x01")
    await client.sadd(f"kvr:{{{SCHEME.namespace}:w4}}:pins", b"x")
    assert await board.reports([W1, W3, WorkerId("w4")]) == {W1: told()}
    assert board.num_malformed == 2  # type: ignore[attr-defined]


@pytest.mark.redis
async def test_a_board_that_is_not_ours_is_no_wish_to_unpin_everything(
    redis_bench: BoardBench, caplog: pytest.LogCaptureFixture
) -> None:
    client, board = redis_bench.client, redis_bench.board
    assert client is not None
    await client.set(f"{PINS}:board", b"somebody's")
    for reading in (board.look(), board.follow(B1)):
        with pytest.raises(DirectoryUnavailable, match="not ours"):
            await reading
    await board.clear()
    await client.sadd(f"{PINS}:index", b"x")
    await client.set(f"{PINS}:board", B1)
    num_malformed = board.num_malformed  # type: ignore[attr-defined]
    with pytest.raises(DirectoryUnavailable, match="WRONGTYPE"):
        await board.follow(B1)
    assert board.num_malformed == num_malformed + 1  # type: ignore[attr-defined]
    assert f'{PINS}:board in the store holds what is not ours and is refused: "somebody' in caplog.text
    assert f"{PINS}:removed in the store holds what is not ours and is refused: WRONGTYPE" in caplog.text


def test_tokens_and_content_of_a_spec() -> None:
    spec = PinSpec("a", pack_tokens([1, 2, 3]), Revision("0" * 32), "salt", "lora", (W1,))
    assert (spec.num_tokens, spec.content) == (3, (pack_tokens([1, 2, 3]), "salt", "lora"))
    assert [spec.is_for(worker) for worker in (W1, W2)] == [True, False]
    assert replace(spec, workers=()).is_for(W2)
