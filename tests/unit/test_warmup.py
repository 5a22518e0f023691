"""What operators do with pins, over a real store and workers with fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from router import cli, pins, runfile, warmup
from router.runfile import Run
from router.status import deployment_state
from router.tokenizer import Tokenizer
from router.warmup import Order
from shared.config import Settings
from shared.directory.base import Reply
from shared.directory.embedded import EmbeddedStore
from shared.directory.memory import MemoryDirectory
from shared.directory.pin_board import MemoryPinBoard, PinSpec, PinState
from shared.directory.redis import RedisDirectory
from shared.directory.redis_pin_board import RedisPinBoard
from shared.errors import ConfigError, DirectoryUnavailable, NoWorker, UnknownPin
from shared.hashing import pack_tokens
from shared.types import WorkerId
from shared.vtime import run_virtual
from tests.support.boards import FlakyBoard, Follower
from tests.support.stores import (
    LONG_LEASE_S,
    PATIENT_S,
    SCHEME,
    embedded_store,
    epoch,
    pin_spec,
    redis_bench,
    redis_board,
    wait_until,
    worker_info,
)
from tests.support.tokenizers import write_model_folder

__all__ = ["embedded_store"]

HEARTBEAT_S = 0.05
W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")
SETTINGS = Settings(model=SCHEME.model, block_size=SCHEME.block_size_tokens, heartbeat_s=HEARTBEAT_S)
TOKENS = list(range(200))
ORDER = Order("system", "a prompt", None, None, None, "")


@dataclass
class Deployment:
    """A store, the workers on it, and what operators were told."""

    directory: RedisDirectory
    board: RedisPinBoard
    run: Run
    followers: dict[str, Follower] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)

    async def start(self, name: str, *, life: int = 1, **engine: Any) -> Follower:
        """A worker that holds a lease and follows the board."""
        assert await self.directory.register(worker_info(name, life=life), epoch(life), LONG_LEASE_S) == Reply.OK
        follower = Follower.start(self.board, name, life=life, heartbeat_s=HEARTBEAT_S, lease_s=LONG_LEASE_S, **engine)
        self.followers[name] = follower
        return follower

    async def warm_up(self, order: Order = ORDER, token_ids: list[int] = TOKENS, **more: Any) -> bool:
        settings = SETTINGS.model_copy(update=more)
        return await warmup.warm_up(self.run, settings, order, token_ids, say=self.said.append, show=self.shown.append)

    async def wanted(self) -> dict[str, tuple[WorkerId, ...]]:
        found = await self.board.look()
        names = found.pins if found is not None else {}
        specs = [await self.board.spec(name) for name in names]
        return {spec.name: spec.workers for spec in specs if spec is not None}


@pytest.fixture
async def deployment(embedded_store: EmbeddedStore) -> AsyncIterator[Deployment]:
    """A deployment of `w0` and `w1`, whose engines have 20 blocks for pins."""
    async with redis_bench(embedded_store) as bench, contextlib.AsyncExitStack() as stack:
        assert isinstance(bench.directory, RedisDirectory)
        board = RedisPinBoard(embedded_store.url, SCHEME, deadline_s=PATIENT_S)
        stack.push_async_callback(board.close)
        url = embedded_store.url
        run = Run("marker", "00", {"redis_url": url}, url, "host:1", ("w0", "w1"), is_ready=True)
        found = Deployment(bench.directory, board, run)
        for name in run.workers:
            await found.start(name)
        yield found
        for follower in found.followers.values():
            await follower.pinner.stop()


pytestmark = pytest.mark.redis

# Warming up.


async def test_a_prompt_is_kept_on_all_workers_and_each_is_told(deployment: Deployment) -> None:
    assert await deployment.warm_up(replace(ORDER, salt="tenant"))
    told = "pinned 3 blocks (192 of 200 tokens)"
    assert deployment.shown == [f"w0: {told}", f"w1: {told}"]
    assert deployment.said[0] == "200 tokens are computed on w0, w1"
    spec = await deployment.board.spec("system")
    assert spec == PinSpec("system", pack_tokens(TOKENS), spec.revision, salt="tenant")  # type: ignore[union-attr]
    for follower in deployment.followers.values():
        assert await follower.held() == {"system": 3}


async def test_a_time_to_live_reaches_the_store(deployment: Deployment) -> None:
    assert await deployment.warm_up(replace(ORDER, ttl_s=600.0))
    state = await pins.pin_state(deployment.run, SETTINGS)
    assert 500.0 < state["pins"][0]["expires_in_s"] <= 600.0


async def test_a_number_of_workers_takes_those_with_the_fewest_pinned_blocks(deployment: Deployment) -> None:
    await deployment.warm_up(replace(ORDER, name="first", num_workers=1))
    await deployment.warm_up(replace(ORDER, name="second", num_workers=1))
    await deployment.warm_up(replace(ORDER, name="first", num_workers=1), TOKENS[:130])
    assert await deployment.wanted() == {"first": (W0,), "second": (W1,)}, "a renewed pin stays where it is"
    await deployment.warm_up(replace(ORDER, name="third", num_workers=1), TOKENS[:64])
    assert await deployment.wanted() == {"first": (W0,), "second": (W1,), "third": (W0,)}


async def hand_over(deployment: Deployment, leaving: str, heir: str) -> list[str]:
    """What is said while an heir takes a worker's pins."""
    said: list[str] = []
    await pins.hand_over(deployment.run, SETTINGS, WorkerId(leaving), WorkerId(heir), said.append)
    return said


async def test_an_heir_keeps_what_was_kept_by_name_and_for_all(deployment: Deployment) -> None:
    await deployment.warm_up(replace(ORDER, name="here", num_workers=1, ttl_s=600.0))
    await deployment.warm_up(replace(ORDER, name="both", num_workers=2), TOKENS[:130])
    await deployment.warm_up(replace(ORDER, name="all"), TOKENS[:64])
    await deployment.start("w2")
    assert await hand_over(deployment, "w0", "w2") == []
    assert await deployment.wanted() == {"here": (W2,), "both": (W2, W1), "all": ()}
    assert await deployment.followers["w2"].held() == {"here": 3, "both": 2, "all": 1}
    expires_in_s = {
        pin["name"]: pin["expires_in_s"] for pin in (await pins.pin_state(deployment.run, SETTINGS))["pins"]
    }
    assert 500.0 < expires_in_s.pop("here") <= 600.0
    assert expires_in_s == {"both": None, "all": None}
    # An heir that keeps it already is named once.
    assert await hand_over(deployment, "w1", "w2") == []
    assert await deployment.wanted() == {"here": (W2,), "both": (W2,), "all": ()}


async def test_an_heir_without_room_says_so_and_holds_up_nobody(deployment: Deployment) -> None:
    await deployment.warm_up(replace(ORDER, name="large", num_workers=1), list(range(64 * 15)))
    await deployment.warm_up(replace(ORDER, name="other", num_workers=1), list(range(5, 64 * 15)))
    assert await deployment.wanted() == {"large": (W0,), "other": (W1,)}
    (told,) = await hand_over(deployment, "w0", "w1")
    assert "worker w1 does not keep pin large: " in told


async def test_more_workers_than_live_are_refused_with_the_number(deployment: Deployment) -> None:
    with pytest.raises(ConfigError, match="--workers: 3 are asked for, 2 are alive"):
        await deployment.warm_up(replace(ORDER, num_workers=3))
    assert await deployment.wanted() == {}


async def test_a_prompt_over_the_context_is_refused_with_the_numbers(deployment: Deployment) -> None:
    with pytest.raises(ConfigError, match=r"has 4096 tokens; .* context of 4096"):
        await deployment.warm_up(token_ids=[1] * 4096)
    assert await deployment.wanted() == {}


async def test_a_prompt_over_every_budget_is_refused_with_the_figures_and_taken_back(deployment: Deployment) -> None:
    assert not await deployment.warm_up(token_ids=list(range(21 * 64)))
    assert (deployment.shown, await deployment.wanted()) == ([], {})
    refused = [line for line in deployment.said if "refused" in line]
    assert [line.partition(":")[0] for line in refused] == ["w0", "w1"]
    assert all("21 pinned blocks, the budget is 20" in line and "(0 of 20 blocks)" in line for line in refused)
    assert deployment.said[-1] == "pin system is taken back"


async def test_after_one_refusal_the_others_go_on_keeping_it(deployment: Deployment) -> None:
    await deployment.followers["w1"].pinner.stop()
    await deployment.directory.forget(W1, worker_info("w1").instance)
    small = await deployment.start("w1", life=2, pin_budget_blocks=2)
    assert not await deployment.warm_up()
    assert deployment.shown == ["w0: pinned 3 blocks (192 of 200 tokens)"]
    assert deployment.said[-1] == "pin system stays on w0 alone"
    assert await deployment.wanted() == {"system": (W0,)}
    await wait_until(lambda: small.states == {} and deployment.followers["w0"].pinner.pins.pins != ())
    assert deployment.followers["w0"].engine.pin_calls == ["system"]


async def test_a_renewal_that_all_refuse_leaves_the_pin_as_it_was(deployment: Deployment) -> None:
    await deployment.warm_up(replace(ORDER, ttl_s=600.0, num_workers=1))
    assert not await deployment.warm_up(token_ids=list(range(21 * 64)))
    assert deployment.said[-1] == "pin system stays as it was"
    spec = await deployment.board.spec("system")
    assert spec is not None
    assert (spec.token_ids, spec.workers) == (pack_tokens(TOKENS), (W0,))
    state = await pins.pin_state(deployment.run, SETTINGS)
    assert 500.0 < state["pins"][0]["expires_in_s"] <= 600.0
    w0 = deployment.followers["w0"]
    await wait_until(lambda: w0.states == {"system": PinState.PINNED})
    assert (await w0.held(), w0.engine.pin_calls) == ({"system": 3}, ["system", "system"])


async def test_a_worker_that_takes_too_long_is_told_and_goes_on(deployment: Deployment) -> None:
    slow = deployment.followers["w1"]
    slow.engine.may_pin.clear()
    warming = asyncio.create_task(deployment.warm_up(start_timeout_s=1.0))
    assert not await warming
    assert deployment.said[-1] == "w1: not done within 1 s; it goes on with it"
    slow.engine.may_pin.set()
    await wait_until(lambda: slow.states == {"system": PinState.PINNED})


async def test_what_a_former_life_of_a_worker_has_said_is_void(deployment: Deployment) -> None:
    await deployment.warm_up()
    await deployment.followers["w1"].pinner.stop()
    await deployment.directory.forget(W1, worker_info("w1").instance)
    await deployment.directory.register(worker_info("w1", life=2), epoch(2), LONG_LEASE_S)
    state = await pins.pin_state(deployment.run, SETTINGS)
    assert [(row["worker"], row["state"]) for row in state["pins"][0]["workers"]] == [("w0", "pinned"), ("w1", "away")]
    workers = (await deployment_state(deployment.run, SETTINGS))["workers"]
    assert [worker["num_pinned_blocks"] for worker in workers] == [3, None]
    assert not await deployment.warm_up(start_timeout_s=0.1)


async def test_a_worker_that_is_away_is_told_of_and_not_waited_for(deployment: Deployment) -> None:
    await deployment.directory.forget(W1, worker_info("w1").instance)
    assert await deployment.warm_up()
    assert deployment.shown == ["w0: pinned 3 blocks (192 of 200 tokens)"]
    assert deployment.said[-1] == "w1: away; it makes the pin when it is back"


async def test_a_deployment_without_a_live_worker_is_refused(deployment: Deployment) -> None:
    for worker in (W0, W1):
        await deployment.directory.forget(worker, worker_info(worker).instance)
    with pytest.raises(NoWorker, match="none of its workers is alive"):
        await deployment.warm_up()
    assert await deployment.wanted() == {}


async def test_an_interrupted_warmup_says_that_the_pin_stays_wanted(deployment: Deployment) -> None:
    deployment.followers["w0"].engine.may_pin.clear()
    warming = asyncio.create_task(deployment.warm_up())
    await wait_until(lambda: bool(deployment.said))
    warming.cancel()
    await asyncio.wait({warming})
    assert "`kvroute unpin system` gives it up" in deployment.said[-1]
    assert await deployment.wanted() == {"system": ()}


async def test_a_warmup_ends_when_its_pin_is_given_up_meanwhile(deployment: Deployment) -> None:
    slow = deployment.followers["w0"]
    slow.engine.may_pin.clear()
    warming = asyncio.create_task(deployment.warm_up(lease_s=4 * HEARTBEAT_S))
    await wait_until(lambda: slow.engine.pin_calls == ["system"])
    await pins.unpin(deployment.run, SETTINGS, "system")
    with pytest.raises(UnknownPin, match="pin system was given up, or its time was over, before all workers kept it"):
        await warming
    await wait_until(lambda: slow.engine.num_pins_cancelled == 1 and slow.states == {})
    slow.engine.may_pin.set()
    assert (await slow.held(), slow.engine.pin_calls) == ({}, ["system"])


async def test_a_warmup_ends_when_the_time_of_its_pin_is_over(deployment: Deployment) -> None:
    deployment.followers["w0"].engine.may_pin.clear()
    with pytest.raises(UnknownPin, match="its time was over"):
        await deployment.warm_up(replace(ORDER, ttl_s=0.2), lease_s=4 * HEARTBEAT_S)


async def test_a_warmup_goes_on_when_the_store_has_lost_its_pin_and_workers_put_it_back(deployment: Deployment) -> None:
    slow = deployment.followers["w0"]
    slow.engine.may_pin.clear()
    warming = asyncio.create_task(deployment.warm_up(lease_s=PATIENT_S))
    await wait_until(lambda: slow.engine.pin_calls == ["system"])
    await deployment.board.clear()
    slow.engine.may_pin.set()
    assert await warming
    assert await deployment.wanted() == {"system": ()}


@dataclass
class Outage:
    """A warm-up on `w0`, which has made the pin, and `w1`, which computes it, when the store stops to answer."""

    board: FlakyBoard
    followers: dict[str, Follower]
    said: list[str]
    warming: asyncio.Task[bool]


@contextlib.asynccontextmanager
async def outage(monkeypatch: pytest.MonkeyPatch, **more: Any) -> AsyncIterator[Outage]:
    loop = asyncio.get_running_loop()
    directory = MemoryDirectory(SCHEME, loop.time)
    board = FlakyBoard(MemoryPinBoard(loop.time))

    @contextlib.asynccontextmanager
    async def connected(*_: Any) -> AsyncIterator[tuple[Any, Any]]:
        yield directory, board

    monkeypatch.setattr(warmup, "connected", connected)
    followers = {name: Follower.start(board, name) for name in ("w0", "w1")}
    for name in followers:
        await directory.register(worker_info(name), epoch(1), LONG_LEASE_S)
    followers["w1"].engine.may_pin.clear()
    run = Run("marker", "00", {}, "redis://nowhere", "host:1", ("w0", "w1"), is_ready=True)
    settings = Settings(model=SCHEME.model, block_size=SCHEME.block_size_tokens, **more)
    said: list[str] = []
    warming = asyncio.create_task(warmup.warm_up(run, settings, ORDER, TOKENS, say=said.append, show=said.append))
    await asyncio.sleep(3.0)
    board.is_down = True
    yield Outage(board, followers, said, warming)
    for follower in followers.values():
        await follower.pinner.stop()


@pytest.mark.parametrize(("more", "silent_s"), [({}, 15.0), ({"lease_s": 20.0}, 60.0), ({"start_timeout_s": 8.0}, 5.0)])
def test_a_warmup_whose_store_dies_gives_up_and_tells_what_is_known(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], silent_s: float
) -> None:
    async def scenario() -> None:
        async with outage(monkeypatch, **more) as after:
            died_at_s = asyncio.get_running_loop().time()
            with pytest.raises(DirectoryUnavailable) as unavailable:
                await after.warming
            assert asyncio.get_running_loop().time() - died_at_s == pytest.approx(silent_s, abs=1.0)
            assert re.fullmatch(
                rf"the store has not answered for {silent_s:.0f} s \(.*: down\); last told of pin system: "
                "w0 pinned, w1 warming; workers go on with what they have read",
                str(unavailable.value),
            )
            after.followers["w1"].engine.may_pin.set()
            await asyncio.sleep(1.0)
            assert [await one.held() for one in after.followers.values()] == [{"system": 3}] * 2

    run_virtual(scenario())


def test_a_warmup_goes_on_when_its_store_is_back_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with outage(monkeypatch) as after:
            for _ in range(5):
                await asyncio.sleep(10.0)
                after.board.is_down = False
                await asyncio.sleep(2.0)
                after.board.is_down = True
            # It comes back without its memory, and has all the time it needs to be given the pin back.
            after.board.inner = MemoryPinBoard(asyncio.get_running_loop().time)
            await asyncio.sleep(10.0)
            after.board.is_down = False
            await asyncio.sleep(3.0)
            after.followers["w1"].engine.may_pin.set()
            assert await after.warming

    run_virtual(scenario())


def test_a_warmup_that_is_interrupted_without_its_store_advises_nothing_that_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with outage(monkeypatch) as after:
            await asyncio.sleep(5.0)
            after.warming.cancel()
            await asyncio.wait({after.warming})
            assert after.warming.cancelled()
            assert after.said[-1] == "workers go on with what they have read of pin system; the store does not answer"

    run_virtual(scenario())


async def test_a_warmup_leaves_a_name_to_the_one_that_put_it_last(deployment: Deployment) -> None:
    for follower in deployment.followers.values():
        follower.engine.may_pin.clear()
    first = asyncio.create_task(deployment.warm_up())
    await wait_until(lambda: bool(deployment.said))
    second = asyncio.create_task(deployment.warm_up(token_ids=TOKENS[:130]))
    with pytest.raises(UnknownPin, match="pin system was put anew by somebody else"):
        await first
    for follower in deployment.followers.values():
        follower.engine.may_pin.set()
    assert await second
    assert [await follower.held() for follower in deployment.followers.values()] == [{"system": 2}] * 2


# Showing and giving up.


async def test_pins_are_shown_for_each_worker_with_their_budgets(deployment: Deployment) -> None:
    await deployment.warm_up(replace(ORDER, num_workers=1))
    await deployment.board.put(pin_spec("elsewhere", workers=(W1, W2), num_tokens=100), 600.0)
    w1 = deployment.followers["w1"]
    await wait_until(lambda: w1.states == {"elsewhere": PinState.PINNED})
    await wait_until(lambda: not w1.pinner._has_news.is_set())
    async with asyncio.timeout(PATIENT_S):
        while (state := await pins.pin_state(deployment.run, SETTINGS))["pins"][0]["workers"][0]["state"] != "pinned":
            await asyncio.sleep(HEARTBEAT_S)
    elsewhere, system = state["pins"]
    assert (elsewhere["name"], elsewhere["num_prompt_tokens"], elsewhere["is_for_all"]) == ("elsewhere", 100, False)
    assert elsewhere["workers"] == [
        {"worker": "w1", "state": "pinned", "num_blocks": 1, "num_tokens": 64, "message": ""},
        {"worker": "w2", "state": "away", "num_blocks": None, "num_tokens": None, "message": ""},
    ]
    assert (system["name"], system["expires_in_s"]) == ("system", None)
    assert state["workers"] == [
        {"worker": "w0", "is_away": False, "num_pinned_blocks": 3, "pin_budget_blocks": 20},
        {"worker": "w1", "is_away": False, "num_pinned_blocks": 1, "pin_budget_blocks": 20},
    ]
    assert json.loads(json.dumps(state)) == state
    assert pins.pin_text({**state, "pins": [{**elsewhere, "expires_in_s": 599.6}, system]}).splitlines() == [
        "pin        worker  state   blocks  tokens  expires in  message",
        "elsewhere  w1      pinned  1       64      600 s",
        "elsewhere  w2      away    -       -       600 s",
        "system     w0      pinned  3       192     -",
        "",
        "worker  pinned  budget",
        "w0      3       20",
        "w1      1       20",
    ]


async def test_a_former_prompt_that_a_refusal_leaves_is_shown(deployment: Deployment) -> None:
    await deployment.warm_up(replace(ORDER, num_workers=1))
    # As after a command that was killed before it took the refused renewal back.
    await deployment.board.put(pin_spec("system", workers=(W0,), num_tokens=21 * 64), None)
    w0 = deployment.followers["w0"]
    await wait_until(lambda: w0.states == {"system": PinState.REFUSED})
    async with asyncio.timeout(PATIENT_S):
        while "system  w0      refused" not in (text := pins.pin_text(await pins.pin_state(deployment.run, SETTINGS))):
            await asyncio.sleep(HEARTBEAT_S)
    assert "the budget is 20, 0 are pinned under other names; the former prompt is still kept (3 blocks)" in text


async def test_a_deployment_without_pins_says_so(deployment: Deployment) -> None:
    await wait_until(lambda: all(one.pinner._board_id is not None for one in deployment.followers.values()))
    text = pins.pin_text(await pins.pin_state(deployment.run, SETTINGS))
    assert text.splitlines()[0] == "no pins"


async def test_an_unpinned_prompt_is_given_up(deployment: Deployment) -> None:
    await deployment.warm_up()
    await pins.unpin(deployment.run, SETTINGS, "system")
    await wait_until(lambda: all(one.states == {} for one in deployment.followers.values()))
    async with asyncio.timeout(PATIENT_S):
        while any([await one.held() for one in deployment.followers.values()]):
            await asyncio.sleep(HEARTBEAT_S)


async def test_an_unknown_name_is_refused_with_those_that_are_there(deployment: Deployment) -> None:
    with pytest.raises(ConfigError, match="no pin 'other'; pins are: none"):
        await pins.unpin(deployment.run, SETTINGS, "other")
    await deployment.warm_up()
    with pytest.raises(ConfigError, match="no pin 'other'; pins are: system"):
        await pins.unpin(deployment.run, SETTINGS, "other")


async def test_a_deployment_that_ends_takes_its_own_pins_from_a_store_that_others_use(deployment: Deployment) -> None:
    for life, (name, workers) in enumerate({"all": (), "ours": (W0, W1), "theirs": (W2,), "both": (W1, W2)}.items()):
        await deployment.board.put(pin_spec(name, life=life, workers=workers), None)
    for follower in deployment.followers.values():
        await follower.pinner.stop()
    await deployment.directory.register(worker_info("w2"), epoch(1), LONG_LEASE_S)
    await pins.forget_pins(deployment.run, SETTINGS, deployment.said.append)
    assert await deployment.wanted() == {"all": (), "both": (W1, W2), "theirs": (W2,)}
    await deployment.directory.forget(W2, worker_info("w2").instance)
    await pins.forget_pins(deployment.run, SETTINGS, deployment.said.append)
    assert await deployment.board.look() is None
    assert deployment.said == []


async def test_a_deployment_ends_without_its_store(deployment: Deployment) -> None:
    gone = replace(deployment.run, redis_url="unix:///nowhere/store.sock")
    await pins.forget_pins(gone, SETTINGS, deployment.said.append)
    assert "at most for a day" in deployment.said[0]


# Arguments.

GOOD = {"name": "system", "file": None, "messages": None, "ttl_s": None, "on_workers": "all", "cache_salt": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prompt.txt").write_text("be brief")
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "messages.json").write_text('[{"role": "system", "content": "be brief"}]')
    (tmp_path / "wrapped.json").write_text('{"messages": [{"role": "system", "content": "be brief"}]}')
    return tmp_path


def test_an_order_reads_its_file(folder: Path) -> None:
    given = {**GOOD, "ttl_s": "1.5", "on_workers": "2", "cache_salt": "tenant"}
    assert warmup.read_order({**given, "file": folder / "prompt.txt"}) == Order(
        "system", "be brief", None, 1.5, 2, "tenant", str(folder / "prompt.txt")
    )
    for name in ("messages.json", "wrapped.json"):
        assert warmup.read_order({**GOOD, "messages": folder / name}) == Order(
            "system", None, [{"role": "system", "content": "be brief"}], None, None, "", str(folder / name)
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "two words"}, "name 'two words'"),
        ({"name": ""}, "name ''"),
        ({"name": "n" * 5000}, "name '" + "n" * 80 + "[.]{3}': a pin's name has 1 to 64"),
        ({"file": None}, "--file, --messages: one is needed"),
        ({"messages": "messages.json"}, "exclude each other"),
        ({"file": "missing"}, "--file: cannot read .*missing: No such file"),
        ({"file": "."}, "--file: cannot read .*: Is a directory"),
        ({"file": "empty"}, "--file: .*empty is empty"),
        ({"file": "binary"}, "--file: .*binary is not UTF-8"),
        ({"file": "pipe"}, "--file: .*pipe is no regular file"),
        ({"file": "device"}, "--file: .*device is no regular file"),
        ({"file": "p" * 5000}, "--file: cannot read .{252}[.]{3}: File name too long$"),
        ({"file": None, "messages": "missing"}, "--messages: cannot read"),
        ({"file": None, "messages": "pipe"}, "--messages: .*pipe is no regular file"),
        ({"file": None, "messages": "prompt.txt"}, "--messages: .*prompt.txt is not JSON"),
        ({"ttl_s": "0"}, "--ttl-s: '0' must be a number of seconds above 0"),
        ({"ttl_s": "-1"}, "--ttl-s: '-1'"),
        ({"ttl_s": "nan"}, "--ttl-s: 'nan'"),
        ({"ttl_s": "inf"}, "--ttl-s: 'inf'"),
        ({"ttl_s": "soon"}, "--ttl-s: 'soon'"),
        ({"on_workers": "0"}, "--workers: '0' must be `all` or a number above 0"),
        ({"on_workers": "-1"}, "--workers: '-1'"),
        ({"on_workers": "most"}, "--workers: 'most'"),
        ({"on_workers": "9" * 5000}, r"--workers: '9{1,20}[.]{3}9{1,20}' must be"),
        ({"ttl_s": "9" * 5000}, r"--ttl-s: '9{1,20}[.]{3}9{1,20}' must be"),
        ({"cache_salt": "s" * 513}, "--cache-salt.* longer than 512"),
        ({"cache_salt": "\udc80"}, "--cache-salt.* surrogate"),
    ],
)
def test_wrong_arguments_are_refused_by_name(folder: Path, wrong: dict[str, Any], message: str) -> None:
    own = {**GOOD, "file": "prompt.txt", **wrong}
    placed = {name: folder / own[name] if own[name] is not None else None for name in ("file", "messages")}
    with pytest.raises(ConfigError, match=message):
        warmup.read_order({**own, **placed})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


def test_a_plain_prompt_is_tokenised_as_a_completion_and_messages_without_the_answers_beginning(
    tokenizer: Tokenizer,
) -> None:
    text, messages = "word " * 40, [{"role": "user", "content": "word " * 40}]
    assert warmup.tokenise(replace(ORDER, text=text), tokenizer, SETTINGS) == tokenizer.encode(text)
    order = replace(ORDER, text=None, messages=messages)
    token_ids = warmup.tokenise(order, tokenizer, SETTINGS)
    whole = tokenizer.render_chat(messages)
    assert (whole[: len(token_ids)], len(whole) > len(token_ids)) == (token_ids, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "short"}, "has 5 tokens and fills no block of 64"),
        ({"text": None, "messages": []}, "--messages: prompt: .*1 to"),
        ({"text": None, "messages": {"role": "user"}}, "--messages: prompt: .*an array"),
        ({"text": None, "messages": [{"role": "king", "content": "x"}]}, "--messages: prompt: .*king"),
        ({"text": None, "messages": [{"role": "tool", "content": "x" * 99}]}, "--messages: prompt: .*no tools here"),
        ({"text": None, "messages": [{"role": "user"}]}, "--messages: prompt: .*content"),
    ],
)
def test_prompts_that_cannot_be_kept_are_refused(tokenizer: Tokenizer, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        warmup.tokenise(replace(ORDER, file="prompt", **change), tokenizer, SETTINGS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pins"], "nothing is running"),
        (["unpin", "system"], "nothing is running"),
        (["warmup", "system", "--file", "prompt.txt"], "nothing is running"),
        (["warmup", "system"], "one is needed"),
        (["warmup", "a/b", "--file", "prompt.txt"], "a/b"),
        (["warmup", "system", "--file", "prompt.txt", "--ttl-s", "0"], "--ttl-s"),
    ],
)
def test_bad_usage_is_told_with_exit_code_2(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    placed = [str(folder / one) if one.endswith(".txt") else one for one in arguments]
    assert cli.main([*placed, "--run-dir", str(folder / "run")]) == 2
    out, err = capsys.readouterr()
    assert (out, message in err, len(err.splitlines())) == ("", True, 1)


def test_a_deployment_that_has_died_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runfile.write_run(folder, Run("no process has this", "00", {"model": "tiny"}, "redis://nowhere", is_ready=True))
    assert cli.main(["pins", "--run-dir", str(folder)]) == 2
    assert "has died without `kvroute down`" in capsys.readouterr().err


def test_commands_show_give_up_and_at_the_end_forget_pins(
    embedded_store: EmbeddedStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def put_two() -> None:
        async with redis_board(embedded_store) as bench:
            await bench.board.put(pin_spec("first"), None)
            await bench.board.put(pin_spec("second", life=2), None)

    async def stored_keys() -> list[str]:
        async with Redis.from_url(embedded_store.url) as client:
            return [raw.decode() async for raw in client.scan_iter()]

    url = embedded_store.url
    settings = {"model": SCHEME.model, "redis_url": url, "ray_address": "127.0.0.1:1"}
    runfile.write_run(tmp_path, Run("marker", "00", settings, url, "127.0.0.1:1", ("w7",), is_ready=True))
    asyncio.run(put_two())
    assert cli.main(["unpin", "first", "--run-dir", str(tmp_path)]) == 0
    assert cli.main(["pins", "--json", "--run-dir", str(tmp_path)]) == 0
    state = json.loads(capsys.readouterr().out)
    assert [(pin["name"], [row["state"] for row in pin["workers"]]) for pin in state["pins"]] == [("second", ["away"])]
    assert cli.main(["status", "--run-dir", str(tmp_path)]) == 0
    assert "pinned" in capsys.readouterr().out
    assert cli.main(["down", "--run-dir", str(tmp_path)]) == 0
    assert "w7 were not told to end" in capsys.readouterr().err
    assert asyncio.run(stored_keys()) == []
