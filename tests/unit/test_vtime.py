from __future__ import annotations

import asyncio
import gc
import time

import pytest

from shared.vtime import VirtualTimeDeadlock, run_virtual


def test_timers_fire_in_order_without_waiting_for_the_wall_clock() -> None:
    fired: list[tuple[float, int]] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        async def sleeper(number: int) -> None:
            await asyncio.sleep(number * 100.0)
            fired.append((loop.time(), number))

        await asyncio.gather(*(sleeper(number) for number in (3, 1, 2)))

    started_at_s = time.monotonic()
    run_virtual(scenario())
    assert [(round(at_s), number) for at_s, number in fired] == [(100, 1), (200, 2), (300, 3)]
    assert time.monotonic() - started_at_s < 100.0


def test_timeouts_count_virtual_seconds() -> None:
    async def scenario() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 3600.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == pytest.approx(3600.0)


def test_work_that_is_ready_goes_before_the_clock() -> None:
    async def scenario() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) < 0.001


def test_rounding_never_leaves_a_waiter_a_hair_before_its_deadline_for_ever() -> None:
    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        for number in range(1, 1000):
            deadline_s = loop.time() + number / 7
            while loop.time() < deadline_s:
                await asyncio.sleep(deadline_s - loop.time())
        return loop.time()

    assert run_virtual(scenario()) == pytest.approx(sum(range(1000)) / 7)


def test_a_wait_that_nothing_can_end_is_an_error_and_not_a_hang() -> None:
    async def scenario() -> None:
        await asyncio.Event().wait()

    with pytest.raises(VirtualTimeDeadlock):
        run_virtual(scenario())


def test_the_collector_of_garbage_is_left_as_it_was() -> None:
    async def failing() -> None:
        assert gc.get_threshold() != before
        raise KeyError

    before = gc.get_threshold()
    with pytest.raises(KeyError):
        run_virtual(failing())
    assert gc.get_threshold() == before
