from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.vtime import VirtualTimeDeadlock, run_virtual


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
    assert fired == [(100.0, 1), (200.0, 2), (300.0, 3)]
    assert time.monotonic() - started_at_s < 100.0


def test_timeouts_count_virtual_seconds() -> None:
    async def scenario() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 3600.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == 3600.0


def test_work_that_is_ready_goes_before_the_clock() -> None:
    async def scenario() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == 0.0


def test_a_wait_that_nothing_can_end_is_an_error_and_not_a_hang() -> None:
    async def scenario() -> None:
        await asyncio.Event().wait()

    with pytest.raises(VirtualTimeDeadlock):
        run_virtual(scenario())
