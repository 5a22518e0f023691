"""The look after every test finds what is left, and nothing where nothing is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from router.hints import Hints
from shared.types import BlockKey, WorkerId
from shared.vtime import VirtualTimeLoop, run_virtual
from tests.support.leaks import LeakCheck
from tests.support.rack import ask, prompt, rack


@contextmanager
def watched() -> Iterator[None]:
    """What a look of its own makes of the test within."""
    check = LeakCheck()
    setup: Any = check.pytest_runtest_setup()
    next(setup)
    try:
        yield
    finally:
        teardown: Any = check.pytest_runtest_teardown()
        next(teardown)
        with pytest.raises(StopIteration):
            next(teardown)


def test_whole_answers_leave_nothing() -> None:
    async def scenario() -> None:
        async with rack(2) as workers, workers.router() as router:
            await ask(router, "r", prompt(1, 64, 0), tenant="somebody")

    with watched():
        run_virtual(scenario())


def test_booking_and_promise_that_nobody_ends_are_told() -> None:
    async def scenario() -> None:
        async with rack(1) as workers, workers.router() as router:
            booking = router.fleet.book(WorkerId("w0"), "r", uncached_tokens=5, demand_blocks=1)  # type: ignore[arg-type]
            promise = router.hints.promise(WorkerId("w0"), [b"k"])  # type: ignore[list-item]
            kept.append((booking, promise, router.hints))
            # Past what the rack itself looks for.
            router.fleet._members.clear()

    kept: list[Any] = []
    with pytest.raises(pytest.fail.Exception, match="Claims: 8 left"), watched():
        run_virtual(scenario())
    # The look over this test itself is not to find them.
    booking, promise, hints = kept[0]
    booking.claims.remove(booking)
    hints.withdraw(promise)


def test_nobody_waits_for_what_a_test_without_a_router_may_leave() -> None:
    async def nothing() -> None:
        """Opens the loop."""

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as outlives_the_test:
        with watched():
            outlives_the_test.run(nothing())
            Hints(lambda: 0.0).promise(WorkerId("w0"), [BlockKey(b"k" * 16)])
        assert outlives_the_test.get_loop().time() == 0.0


def test_task_of_ours_that_outlives_its_test_is_told(request: pytest.FixtureRequest) -> None:
    async def scenario() -> None:
        async with rack(1) as workers:
            async with workers.router():
                pass
            await workers.start_worker("w9")
            del workers.worker_to_slot[WorkerId("w9")]
            workers.started.pop()

    with pytest.raises(pytest.fail.Exception, match="task publisher of w9 left"), watched():
        run_virtual(scenario())
    # The look over this test itself has seen it as well.
    request.config.pluginmanager.get_plugin("leaks")._tasks.clear()
