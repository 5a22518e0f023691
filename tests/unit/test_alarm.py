from __future__ import annotations

import asyncio

import pytest

from shared.vtime import run_virtual
from worker.alarm import Alarm


async def waited_s(alarm: Alarm, until_s: float, gather_s: float) -> float:
    await alarm.wait(until_s, gather_s)
    return asyncio.get_running_loop().time()


def test_without_news_it_rings_at_its_time() -> None:
    async def scenario() -> float:
        return await waited_s(Alarm(), 7.0, 0.5)

    assert run_virtual(scenario()) == pytest.approx(7.0)


def test_news_are_gathered_from_the_first_on() -> None:
    async def scenario() -> float:
        alarm, loop = Alarm(), asyncio.get_running_loop()
        loop.call_at(2.0, alarm.note)
        loop.call_at(2.3, alarm.note)
        return await waited_s(alarm, 7.0, 0.5)

    assert run_virtual(scenario()) == pytest.approx(2.5)


def test_what_comes_right_before_its_time_is_gathered_all_the_same() -> None:
    async def scenario() -> float:
        alarm = Alarm()
        asyncio.get_running_loop().call_at(6.9, alarm.note)
        return await waited_s(alarm, 7.0, 0.5)

    assert run_virtual(scenario()) == pytest.approx(7.4)


def test_news_while_nobody_waits_are_left_to_whoever_waits_next() -> None:
    async def scenario() -> float:
        alarm = Alarm()
        alarm.note()
        return await waited_s(alarm, 7.0, 0.5)

    assert run_virtual(scenario()) == pytest.approx(7.0)


def test_one_timer_serves_all_waits_for_the_same_time() -> None:
    async def scenario() -> tuple[list[float], int]:
        alarm, loop = Alarm(), asyncio.get_running_loop()
        num_set = 0
        call_at = loop.call_at

        def counted(when: float, *args: object) -> asyncio.TimerHandle:
            nonlocal num_set
            num_set += 1
            return call_at(when, *args)  # type: ignore[arg-type]

        for at_s in (1.0, 2.0, 3.0):
            loop.call_at(at_s, alarm.note)
        loop.call_at = counted  # type: ignore[method-assign,assignment]
        return [await waited_s(alarm, 7.0, 0.5) for _ in range(4)], num_set

    rang_at_s, num_set = run_virtual(scenario())
    assert rang_at_s == pytest.approx([1.5, 2.5, 3.5, 7.0])
    assert num_set == 4


def test_a_wait_that_was_cancelled_leaves_no_timer_once_it_is_closed() -> None:
    async def scenario() -> list[bool]:
        alarm, loop = Alarm(), asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        call_at = loop.call_at

        def noted(when: float, *args: object) -> asyncio.TimerHandle:
            timers.append(call_at(when, *args))  # type: ignore[arg-type]
            return timers[-1]

        loop.call_at = noted  # type: ignore[method-assign,assignment]
        task = asyncio.create_task(alarm.wait(7.0, 0.5))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        alarm.note()
        alarm.close()
        return [timer.cancelled() for timer in timers]

    assert run_virtual(scenario()) == [True]
