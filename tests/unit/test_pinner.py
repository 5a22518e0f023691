"""The pinner between a board in memory and fake engines, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from shared.directory.pin_board import FOLLOWED_S, MemoryPinBoard, PinReport, PinState, WorkerPins
from shared.errors import EngineError, InvalidRequest, OutOfBlocks
from shared.types import WorkerId
from shared.vtime import run_virtual
from tests.support.boards import HEARTBEAT_S, LEASE_S, FlakyBoard, Follower
from tests.support.stores import instance, pin_spec
from worker.engines.base import PinnedPrefix

W1, W2 = WorkerId("w1"), WorkerId("w2")
WARMING, PINNED, REFUSED = PinState.WARMING, PinState.PINNED, PinState.REFUSED
SOON_S = 2 * HEARTBEAT_S
"""By then a worker has read the board, and done what takes no time."""


def fresh_board() -> MemoryPinBoard:
    return MemoryPinBoard(asyncio.get_running_loop().time)


@asynccontextmanager
async def following(**engine: Any) -> AsyncIterator[tuple[FlakyBoard, Follower]]:
    """A board and one worker that follows it; fails if the worker leaves a task behind."""
    board = FlakyBoard(fresh_board())
    follower = Follower.start(board, **engine)
    yield board, follower
    await follower.pinner.stop()
    assert len(asyncio.all_tasks()) == 1


def times_of_pins(worker: Follower, name: str) -> list[float]:
    """When the engine is asked for a pin from now on, as it grows."""
    pin = worker.engine.pin
    asked_at_s: list[float] = []

    async def noted(asked: str, token_ids: list[int], **more: Any) -> PinnedPrefix:
        if asked == name:
            asked_at_s.append(asyncio.get_running_loop().time())
        return await pin(asked, token_ids, **more)

    worker.engine.pin = noted  # type: ignore[method-assign]
    return asked_at_s


# Quiet weather.


def test_a_wanted_pin_is_made_and_reported_at_once() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            spec = pin_spec("system", num_tokens=200)
            await board.inner.put(spec, None)
            await asyncio.sleep(HEARTBEAT_S + 0.01)
            assert await worker.held() == {"system": 3}
            assert await board.inner.reports([W1, W2]) == {
                W1: WorkerPins(instance(1), 20, 3, (PinReport("system", spec.revision, PINNED, 3, 192),))
            }

    run_virtual(scenario())


def test_salt_and_adapter_reach_the_engine() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            spec = pin_spec("system", salt="tenant", adapter="lora")
            await board.inner.put(spec, None)
            await asyncio.sleep(SOON_S)
            assert await worker.engine.resident() == worker.pinner._held["system"].keys

    run_virtual(scenario())


def test_a_quiet_board_costs_one_read_and_one_report_a_heartbeat() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(), None)
            await asyncio.sleep(SOON_S + HEARTBEAT_S / 2)
            board.calls.clear()
            await asyncio.sleep(10 * HEARTBEAT_S)
            assert [board.calls.count(name) for name in ("follow", "report", "spec")] == [10, 10, 0]
            assert worker.engine.pin_calls == ["system"]

    run_virtual(scenario())


def test_a_removed_pin_is_given_up() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec("system"), None)
            await board.inner.put(pin_spec("other", life=2), None)
            await asyncio.sleep(SOON_S)
            await board.inner.remove("system")
            await asyncio.sleep(SOON_S)
            assert (await worker.held(), worker.states) == ({"other": 3}, {"other": PINNED})

    run_virtual(scenario())


def test_an_expired_pin_is_given_up() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(), 10.0)
            await asyncio.sleep(9.0)
            assert await worker.held() == {"system": 3}
            await asyncio.sleep(SOON_S)
            assert (await worker.held(), worker.states) == ({}, {})

    run_virtual(scenario())


def test_a_renewed_pin_replaces_the_former_one() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(life=1, num_tokens=200), None)
            await asyncio.sleep(SOON_S)
            renewed = pin_spec(life=2, num_tokens=400)
            await board.inner.put(renewed, None)
            await asyncio.sleep(SOON_S)
            assert await worker.held() == {"system": 6}
            assert worker.pinner.pins.pins == (PinReport("system", renewed.revision, PINNED, 6, 384),)

    run_virtual(scenario())


def test_a_renewed_pin_of_the_same_tokens_costs_the_engine_nothing() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(life=1), 10.0)
            await asyncio.sleep(SOON_S)
            renewed = pin_spec(life=2)
            await board.inner.put(renewed, None)
            await asyncio.sleep(20.0)
            assert worker.pinner.pins.pins == (PinReport("system", renewed.revision, PINNED, 3, 192),)
            assert worker.engine.pin_calls == ["system"]

    run_virtual(scenario())


def test_blocks_that_two_pins_share_count_once() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            long = pin_spec("aa", num_tokens=256)
            await board.inner.put(long, None)
            await board.inner.put(pin_spec("a", life=2, num_tokens=128), None)
            await asyncio.sleep(SOON_S)
            assert await worker.held() == {"a": 2, "aa": 4}
            assert worker.pinner.pins.num_pinned_blocks == 4

    run_virtual(scenario())


# Which workers.


def test_a_pin_for_others_is_left_to_them() -> None:
    async def scenario() -> None:
        async with following() as (board, first):
            second = Follower.start(board, "w2", life=2)
            await board.inner.put(pin_spec(workers=(W2,)), None)
            await asyncio.sleep(SOON_S)
            assert (first.states, await first.held()) == ({}, {})
            assert (second.states, await second.held()) == ({"system": PINNED}, {"system": 3})
            await second.pinner.stop()

    run_virtual(scenario())


def test_a_worker_that_joins_late_makes_what_is_for_all() -> None:
    async def scenario() -> None:
        async with following() as (board, _):
            await board.inner.put(pin_spec("everywhere"), None)
            await board.inner.put(pin_spec("elsewhere", life=2, workers=(W1,)), None)
            await asyncio.sleep(SOON_S)
            late = Follower.start(board, "w2", life=2)
            await asyncio.sleep(SOON_S)
            assert late.states == {"everywhere": PINNED}
            await late.pinner.stop()

    run_virtual(scenario())


def test_a_worker_that_is_no_longer_among_those_that_are_to_keep_a_pin_gives_it_up() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(life=1), None)
            await asyncio.sleep(SOON_S)
            await board.inner.put(pin_spec(life=2, workers=(W2,)), None)
            await asyncio.sleep(SOON_S)
            assert await worker.held() == {}

    run_virtual(scenario())


def test_a_pin_lives_by_the_workers_that_keep_it() -> None:
    async def scenario() -> None:
        board = fresh_board()
        worker = Follower.start(board, heartbeat_s=3600.0)
        await board.put(pin_spec("mine"), None)
        await board.put(pin_spec("orphan", life=2, workers=(W2,)), None)
        await asyncio.sleep(2 * FOLLOWED_S)
        wanted = await board.look()
        assert wanted is not None
        assert set(wanted.pins) == {"mine"}
        await worker.pinner.stop()

    run_virtual(scenario())


# Restarts.


def test_a_restarted_worker_makes_its_pins_again() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec("system"), None)
            await board.inner.put(pin_spec("other", life=2, num_tokens=64), 100.0)
            await asyncio.sleep(SOON_S)
            await worker.pinner.stop()
            await asyncio.sleep(2 * LEASE_S)
            assert await board.inner.reports([W1]) == {}
            restarted = Follower.start(board, life=2)
            await asyncio.sleep(SOON_S)
            assert await restarted.held() == {"other": 1, "system": 3}
            assert (await board.inner.reports([W1]))[W1].instance == instance(2)
            await restarted.pinner.stop()

    run_virtual(scenario())


def test_a_reset_of_the_engine_that_takes_pins_along_makes_them_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(), None)
            await asyncio.sleep(SOON_S)
            await worker.engine.lose_cache()
            assert await worker.held() == {}
            await asyncio.sleep(0.01)
            assert (await worker.held(), worker.states) == ({"system": 3}, {"system": PINNED})
            assert "has lost pins" in caplog.text

    run_virtual(scenario())


def test_a_reset_of_the_engine_that_keeps_pins_makes_none_again() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(), None)
            await asyncio.sleep(SOON_S)
            await worker.engine.reset_cache()
            await asyncio.sleep(SOON_S)
            assert worker.engine.pin_calls == ["system"]

    run_virtual(scenario())


def test_what_the_engine_keeps_without_being_asked_is_given_up_or_made_anew() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await worker.engine.pin("stray", [7] * 200)
            await worker.engine.pin("system", [8] * 200)
            await board.inner.put(pin_spec(num_tokens=400), None)
            worker.pinner.engine_was_reset()
            await asyncio.sleep(SOON_S)
            assert await worker.held() == {"system": 6}

    run_virtual(scenario())


# Refusals and failures.


def test_a_refusal_is_reported_with_the_figures_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            spec = pin_spec("large", num_tokens=21 * 64)
            await board.inner.put(spec, None)
            await asyncio.sleep(30.0)
            message = (
                "pin 'large': its 21 blocks would make 21 pinned blocks, the budget is 20, "
                "0 are pinned under other names"
            )
            assert worker.pinner.pins.pins == (PinReport("large", spec.revision, REFUSED, message=message),)
            assert worker.engine.pin_calls == ["large"]
            assert caplog.text.count("budget is 20") == 1

    run_virtual(scenario())


def test_a_refused_pin_is_made_when_room_appears() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec("a-first", num_tokens=15 * 64), None)
            await board.inner.put(pin_spec("second", life=2, num_tokens=10 * 64), None)
            await asyncio.sleep(SOON_S)
            assert worker.states == {"a-first": PINNED, "second": REFUSED}
            await board.inner.remove("a-first")
            await asyncio.sleep(SOON_S)
            assert (worker.states, await worker.held()) == ({"second": PINNED}, {"second": 10})

    run_virtual(scenario())


def test_a_refused_pin_is_tried_again_when_it_is_renewed() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(num_tokens=21 * 64), None)
            await asyncio.sleep(SOON_S)
            await board.inner.put(pin_spec(life=2, num_tokens=20 * 64), None)
            await asyncio.sleep(SOON_S)
            assert worker.states == {"system": PINNED}

    run_virtual(scenario())


def test_a_refused_renewal_leaves_what_was_kept_and_going_back_to_it_costs_nothing() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(life=1, num_tokens=200), None)
            await asyncio.sleep(SOON_S)
            await board.inner.put(pin_spec(life=2, num_tokens=21 * 64), None)
            await asyncio.sleep(SOON_S)
            assert (worker.states, await worker.held()) == ({"system": REFUSED}, {"system": 3})
            (told,) = worker.pinner.pins.pins
            assert told.message.endswith("under other names; the former prompt is still kept (3 blocks)")
            await board.inner.put(pin_spec(life=3, num_tokens=200), None)
            await asyncio.sleep(SOON_S)
            assert (worker.states, await worker.held()) == ({"system": PINNED}, {"system": 3})
            assert worker.engine.pin_calls == ["system", "system"]

    run_virtual(scenario())


@pytest.mark.parametrize("error", [EngineError("flaky"), OutOfBlocks("no room now"), RuntimeError("a fault")])
def test_a_pin_that_fails_is_tried_again_after_growing_pauses_and_stops_no_other(error: Exception) -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            worker.engine.pin_faults["bad"] = error
            asked_at_s = times_of_pins(worker, "bad")
            for life, name in enumerate(("after", "bad", "zeta")):
                await board.inner.put(pin_spec(name, life=life), None)
            await asyncio.sleep(215.0)
            assert worker.states == {"after": PINNED, "bad": WARMING, "zeta": PINNED}
            assert worker.pinner.pins.pins[1].message == f"attempt 9 failed, the next one follows 60 s later: {error}"
            pauses_s = [later - earlier for earlier, later in pairwise(asked_at_s)]
            assert pauses_s == [pytest.approx(pause_s, abs=HEARTBEAT_S) for pause_s in (1, 2, 4, 8, 16, 32, 60, 60)]
            del worker.engine.pin_faults["bad"]
            await asyncio.sleep(61.0)
            assert worker.states == {"after": PINNED, "bad": PINNED, "zeta": PINNED}

    run_virtual(scenario())


def test_a_renewed_pin_is_tried_at_once_whatever_the_former_one_waits_for() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            worker.engine.pin_faults["system"] = EngineError("flaky")
            asked_at_s = times_of_pins(worker, "system")
            await board.inner.put(pin_spec(life=1), None)
            await asyncio.sleep(100.0)
            num_before = len(asked_at_s)
            await board.inner.put(pin_spec(life=2), None)
            await asyncio.sleep(10.0)
            pauses_s = [later - earlier for earlier, later in pairwise(asked_at_s[num_before:])]
            assert pauses_s == [pytest.approx(pause_s, abs=HEARTBEAT_S) for pause_s in (1, 2, 4)]

    run_virtual(scenario())


def test_what_an_engine_keeps_in_spite_of_a_failure_is_found_and_given_up() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            pin = worker.engine.pin

            async def fail_late(name: str, token_ids: list[int], **more: Any) -> Any:
                await pin(name, token_ids, **more)
                raise EngineError("its answer is lost")

            worker.engine.pin = fail_late  # type: ignore[method-assign]
            await board.inner.put(pin_spec(), None)
            await asyncio.sleep(SOON_S)
            assert (worker.states, await worker.held()) == ({"system": WARMING}, {"system": 3})
            await board.inner.remove("system")
            await asyncio.sleep(SOON_S)
            assert await worker.held() == {}

    run_virtual(scenario())


def test_a_prompt_that_cannot_be_computed_is_refused_for_good() -> None:
    async def scenario() -> None:
        async with following(max_model_len_tokens=256) as (board, worker):
            worker.engine.pin_faults["bad"] = InvalidRequest("a token id is outside the vocabulary")
            await board.inner.put(pin_spec("bad"), None)
            await board.inner.put(pin_spec("long", life=2, num_tokens=300), None)
            await board.inner.put(pin_spec("short", life=3, num_tokens=63), None)
            await board.inner.put(pin_spec("good", life=4), None)
            await asyncio.sleep(10.0)
            await board.inner.remove("good")
            await asyncio.sleep(10.0)
            assert worker.states == {"bad": REFUSED, "long": REFUSED, "short": REFUSED}
            assert sorted(worker.engine.pin_calls) == ["-good", "bad", "good", "long", "short", "short"]

    run_virtual(scenario())


def test_an_unreadable_record_is_reported_and_stops_no_other() -> None:
    class Torn(MemoryPinBoard):
        is_torn = True

        async def spec(self, name: str) -> Any:
            return None if self.is_torn and name == "torn" else await super().spec(name)

    async def scenario() -> None:
        board = Torn(asyncio.get_running_loop().time)
        worker = Follower.start(board)
        await board.put(pin_spec("torn"), None)
        await board.put(pin_spec("whole", life=2), None)
        await asyncio.sleep(SOON_S)
        assert worker.states == {"torn": REFUSED, "whole": PINNED}
        board.is_torn = False
        await asyncio.sleep(SOON_S)
        board.is_torn = True
        await board.put(pin_spec("torn", life=3), None)
        await asyncio.sleep(SOON_S)
        told, _ = worker.pinner.pins.pins
        assert (told.state, await worker.held()) == (REFUSED, {"torn": 3, "whole": 3})
        assert told.message.endswith("put the pin again; the former prompt is still kept (3 blocks)")
        await worker.pinner.stop()

    run_virtual(scenario())


def test_a_pin_that_is_given_up_while_its_record_is_fetched_is_never_told_as_refused() -> None:
    class Vanishing(MemoryPinBoard):
        async def spec(self, name: str) -> Any:
            await self.remove(name)
            return await super().spec(name)

    async def scenario() -> None:
        board = Vanishing(asyncio.get_running_loop().time)
        worker = Follower.start(board)
        told: set[PinState] = set()
        await board.put(pin_spec("system"), None)
        for _ in range(30):
            await asyncio.sleep(HEARTBEAT_S / 10)
            told |= set(worker.states.values())
        assert (told, worker.states, await worker.held()) == ({WARMING}, {}, {})
        await worker.pinner.stop()

    run_virtual(scenario())


def test_reports_go_on_while_a_long_prompt_is_computed() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            worker.engine.may_pin.clear()
            await board.inner.put(pin_spec(), None)
            await asyncio.sleep(10 * LEASE_S)
            assert [pin.state for pin in (await board.inner.reports([W1]))[W1].pins] == [WARMING]
            worker.engine.may_pin.set()
            await asyncio.sleep(0.01)
            assert [pin.state for pin in (await board.inner.reports([W1]))[W1].pins] == [PINNED]

    run_virtual(scenario())


async def remove(board: FlakyBoard) -> None:
    await board.inner.remove("system")


async def replace_by_others(board: FlakyBoard) -> None:
    await board.inner.put(pin_spec(life=2, workers=(W2,)), None)


async def let_its_time_pass(board: FlakyBoard) -> None:
    await asyncio.sleep(50.0)


@pytest.mark.parametrize("end", [remove, replace_by_others, let_its_time_pass])
def test_a_pin_that_is_not_wanted_any_more_is_computed_no_further(end: Callable[[FlakyBoard], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with following(prefill_s_per_token=1.0) as (board, worker):
            await board.inner.put(pin_spec("zeta", life=7, num_tokens=64), None)
            await asyncio.sleep(100.0)
            await board.inner.put(pin_spec(), 50.0)
            await asyncio.sleep(SOON_S)
            num_tasks = len(asyncio.all_tasks())
            await end(board)
            await asyncio.sleep(SOON_S)
            assert (await worker.held(), worker.states) == ({"zeta": 1}, {"zeta": PINNED})
            assert (worker.engine.pin_calls, worker.engine.num_pins_cancelled) == (["zeta", "system"], 1)
            assert len(asyncio.all_tasks()) == num_tasks - 1
            assert len(await worker.engine.resident()) == 1

    run_virtual(scenario())


def test_a_renewal_with_another_prompt_is_computed_in_place_of_the_former_one() -> None:
    async def scenario() -> None:
        async with following(prefill_s_per_token=1.0) as (board, worker):
            await board.inner.put(pin_spec(life=1, num_tokens=1024), None)
            await asyncio.sleep(SOON_S)
            renewed = pin_spec("system", life=2, num_tokens=64)
            await board.inner.put(renewed, None)
            await asyncio.sleep(64.0 + SOON_S)
            assert worker.pinner.pins.pins == (PinReport("system", renewed.revision, PINNED, 1, 64),)
            assert (worker.engine.pin_calls, worker.engine.num_pins_cancelled) == (["system", "system"], 1)

    run_virtual(scenario())


def test_a_renewal_with_the_same_prompt_lets_it_be_computed_to_its_end() -> None:
    async def scenario() -> None:
        async with following(prefill_s_per_token=1.0) as (board, worker):
            await board.inner.put(pin_spec(life=1), None)
            await asyncio.sleep(100.0)
            renewed = pin_spec(life=2)
            await board.inner.put(renewed, None)
            await asyncio.sleep(100.0)
            assert worker.pinner.pins.pins == (PinReport("system", renewed.revision, PINNED, 3, 192),)
            assert (worker.engine.pin_calls, worker.engine.num_pins_cancelled) == (["system"], 0)

    run_virtual(scenario())


def test_a_store_that_is_away_lets_a_pin_be_computed_to_its_end() -> None:
    async def scenario() -> None:
        async with following(prefill_s_per_token=1.0) as (board, worker):
            await board.inner.put(pin_spec(), 50.0)
            await asyncio.sleep(SOON_S)
            board.is_down = True
            await asyncio.sleep(300.0)
            assert (worker.states, await worker.held()) == ({"system": PINNED}, {"system": 3})

    run_virtual(scenario())


def keep_late_answers_back(worker: Follower) -> None:
    """Let the engine make each pin and then keep silent, so that who cancels it cancels too late."""
    pin = worker.engine.pin

    async def made_but_silent(name: str, token_ids: list[int], **more: Any) -> PinnedPrefix:
        await pin(name, token_ids, **more)
        return await asyncio.get_running_loop().create_future()

    worker.engine.pin = made_but_silent  # type: ignore[method-assign]


def test_a_pin_made_at_the_moment_of_its_cancellation_is_given_up() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            keep_late_answers_back(worker)
            await board.inner.put(pin_spec(), None)
            await asyncio.sleep(SOON_S)
            assert (worker.states, await worker.held()) == ({"system": WARMING}, {"system": 3})
            await board.inner.remove("system")
            await asyncio.sleep(SOON_S)
            assert (await worker.held(), worker.engine.pin_calls) == ({}, ["system", "-system"])
            assert worker.pinner.pins.num_pinned_blocks == 0

    run_virtual(scenario())


def test_a_renewal_made_at_the_moment_of_its_cancellation_is_not_taken_for_the_former_prompt() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(life=1, num_tokens=200), None)
            await asyncio.sleep(SOON_S)
            pin = worker.engine.pin
            keep_late_answers_back(worker)
            await board.inner.put(pin_spec(life=2, num_tokens=400), None)
            await asyncio.sleep(SOON_S)
            assert await worker.held() == {"system": 6}
            worker.engine.pin = pin  # type: ignore[method-assign]
            again = pin_spec(life=3, num_tokens=200)
            await board.inner.put(again, None)
            await asyncio.sleep(SOON_S)
            assert worker.pinner.pins.pins == (PinReport("system", again.revision, PINNED, 3, 192),)
            assert await worker.held() == {"system": 3}

    run_virtual(scenario())


def test_a_renewal_whose_answer_is_lost_is_not_taken_for_the_former_prompt() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(life=1, num_tokens=200), None)
            await asyncio.sleep(SOON_S)
            pin = worker.engine.pin

            async def fail_late(name: str, token_ids: list[int], **more: Any) -> Any:
                await pin(name, token_ids, **more)
                raise EngineError("its answer is lost")

            worker.engine.pin = fail_late  # type: ignore[method-assign]
            await board.inner.put(pin_spec(life=2, num_tokens=400), None)
            await asyncio.sleep(SOON_S)
            worker.engine.pin = pin  # type: ignore[method-assign]
            await board.inner.put(pin_spec(life=3, num_tokens=200), None)
            await asyncio.sleep(SOON_S)
            assert (worker.states, await worker.held()) == ({"system": PINNED}, {"system": 3})

    run_virtual(scenario())


def test_a_worker_stops_while_a_pin_is_computed() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            worker.engine.may_pin.clear()
            await board.inner.put(pin_spec(), None)
            await asyncio.sleep(SOON_S)

    run_virtual(scenario())


def test_an_engine_that_is_dead_is_left_to_whoever_watches_it() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            worker.engine.die()
            await board.inner.put(pin_spec(), None)
            await asyncio.sleep(10.0)
            assert (worker.states, worker.pinner.num_faults) == ({"system": WARMING}, 0)

    run_virtual(scenario())


# A store that is away, or lost its memory.


def test_a_store_that_is_away_changes_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(), 20.0)
            await asyncio.sleep(SOON_S)
            board.is_down = True
            await asyncio.sleep(100.0)
            assert await worker.held() == {"system": 3}
            board.is_down = False
            await asyncio.sleep(SOON_S)
            assert await worker.held() == {}, "it has expired meanwhile"
            told = [record.levelno for record in caplog.records if "pin board" in record.message]
            assert told == [logging.WARNING, logging.WARNING]

    run_virtual(scenario())


def test_a_store_that_is_away_at_the_start_is_followed_once_it_is_there() -> None:
    async def scenario() -> None:
        board = FlakyBoard(fresh_board())
        board.is_down = True
        await board.inner.put(pin_spec(), None)
        worker = Follower.start(board)
        await asyncio.sleep(10.0)
        assert (await worker.held(), worker.states) == ({}, {})
        board.is_down = False
        await asyncio.sleep(SOON_S)
        assert worker.states == {"system": PINNED}
        await worker.pinner.stop()

    run_virtual(scenario())


def test_a_store_that_came_back_empty_gets_the_pins_back_with_what_is_left_of_their_time() -> None:
    async def scenario() -> None:
        async with following() as (board, first):
            second = Follower.start(board, "w2", life=2)
            await board.inner.put(pin_spec("all"), None)
            await board.inner.put(pin_spec("ours", life=2, workers=(W1,)), 100.0)
            await board.inner.put(pin_spec("over", life=3), 30.0)
            await asyncio.sleep(20.0)
            board.is_down = True
            await asyncio.sleep(20.0)
            board.inner, board.is_down = fresh_board(), False
            await asyncio.sleep(2 * SOON_S)
            wanted = await board.inner.look()
            assert wanted is not None
            assert {name: pin.expires_in_s is None for name, pin in wanted.pins.items()} == {"all": True, "ours": False}
            left_s = wanted.pins["ours"].expires_in_s
            assert left_s == pytest.approx(100.0 - 40.0 - 2 * SOON_S, abs=SOON_S)
            assert await first.held() == {"all": 3, "ours": 3}
            assert await second.held() == {"all": 3}
            assert first.engine.pin_calls.count("all") == second.engine.pin_calls.count("all") == 1
            await second.pinner.stop()

    run_virtual(scenario())


def test_what_is_put_on_the_new_board_wins_over_what_a_worker_brings() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            await board.inner.put(pin_spec(life=1), None)
            await asyncio.sleep(SOON_S)
            board.is_down = True
            board.inner = fresh_board()
            newer = pin_spec(life=9, num_tokens=128)
            await board.inner.put(newer, None)
            board.is_down = False
            await asyncio.sleep(SOON_S)
            assert worker.pinner.pins.pins == (PinReport("system", newer.revision, PINNED, 2, 128),)

    run_virtual(scenario())


def test_what_was_unpinned_on_the_new_board_is_not_brought_back_by_a_worker_that_comes_later() -> None:
    async def scenario() -> None:
        async with following() as (board, first):
            away = FlakyBoard(board.inner)
            second = Follower.start(away, "w2", life=2)
            await board.inner.put(pin_spec(), None)
            await asyncio.sleep(SOON_S)
            away.is_down = True
            board.inner = away.inner = fresh_board()
            await asyncio.sleep(SOON_S)
            assert await board.inner.remove("system"), "the first worker has put it back"
            away.is_down = False
            await asyncio.sleep(SOON_S)
            assert (await first.held(), await second.held()) == ({}, {})
            await second.pinner.stop()

    run_virtual(scenario())


def test_putting_back_is_finished_when_the_store_goes_away_in_the_middle() -> None:
    async def scenario() -> None:
        async with following() as (board, worker):
            for life, name in enumerate(("a", "b", "c")):
                await board.inner.put(pin_spec(name, life=life), None)
            await asyncio.sleep(SOON_S)
            board.inner, board.loss_rate = fresh_board(), 0.8
            await asyncio.sleep(50 * HEARTBEAT_S)
            board.loss_rate = 0.0
            await asyncio.sleep(SOON_S)
            assert worker.states == dict.fromkeys("abc", PINNED)
            assert worker.engine.pin_calls == ["a", "b", "c"]

    run_virtual(scenario())
