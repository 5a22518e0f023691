"""After every test: nothing of a request may be left, in fronts, in routers, in workers' hosts or in engines.

What counts is what any test builds, directly or through a fixture, however long the fixture lives: objects are met as
they are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from router.admission import Admission
from router.bookings import Claims
from router.hints import Hints
from router.http import Front
from router.keys import Allowance
from router.service import Router
from router.shares import Shares
from tests.support.fakes import FakeEngine
from worker.engines.attached import AttachedEngine
from worker.engines.simulator import SimulatorEngine
from worker.requests import EngineRequests

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 60.0
_OUR_ROOMS = tuple(f"{_ROOT / room}/" for room in ("router", "shared", "worker"))


def _held(admission: Admission) -> int:
    return len(admission)


def _lanes(shares: Shares) -> int:
    return len(shares)


def _bookings(claims: Claims) -> int:
    """With all sums that are kept of them."""
    sums = [value for value in vars(claims).values() if isinstance(value, int)]
    return len(claims) + claims.num_unseen + sum(map(abs, sums))


def _promises(hints: Hints) -> int:
    """Those that no time will end."""
    return len(hints._live - {promise for _, promise in hints._settled})


def _requests(requests: EngineRequests) -> int:
    return requests.num_live


def _engine_requests(engine: AttachedEngine | FakeEngine | SimulatorEngine) -> int:
    return len(engine._live)


def _under_way(one: Front | Allowance) -> int:
    return one.num_under_way


_COUNTS: dict[type, Callable[[Any], int]] = {
    Admission: _held,
    Shares: _lanes,
    Claims: _bookings,
    Hints: _promises,
    Front: _under_way,
    Allowance: _under_way,
    EngineRequests: _requests,
    AttachedEngine: _engine_requests,
    FakeEngine: _engine_requests,
    SimulatorEngine: _engine_requests,
}
_OF_ROUTERS = (Admission, Shares, Claims, Hints)
"""What tests of these alone may leave as they please: it is ended by a router."""


class LeakCheck:
    """A plugin of pytest: fails a test that left something behind."""

    def __init__(self) -> None:
        self._met: weakref.WeakSet[object] = weakref.WeakSet()
        self._of_test: list[object] = []
        """Met in this test, kept until it is over."""
        self._has_router = False
        self._tasks: list[str] = []
        self._runners: weakref.WeakSet[asyncio.Runner] = weakref.WeakSet()
        """Of loops; those of modules and classes outlive a test."""
        self._patch = pytest.MonkeyPatch()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self._of_test, self._tasks, self._has_router = [], [], False
        for kind in _COUNTS:
            self._meet(kind)
        self._meet(Router)
        self._watch_loops()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self._patch.undo()
            self._check()

    def _check(self) -> None:
        for runner in list(self._runners):
            loop = runner._loop  # type: ignore[attr-defined]
            if loop is None or loop.is_closed() or not self._blamed():
                continue
            with contextlib.suppress(TimeoutError):
                if loop.is_running():  # in another thread
                    asyncio.run_coroutine_threadsafe(self._settled(), loop).result(_PATIENCE_S)
                else:
                    runner.run(self._settled())
        found, told = self._left(), self._blamed()
        self._met.difference_update([one for one in self._met if found.get(type(one))])
        self._of_test.clear()
        told += [f"task {task} left" for task in self._tasks if self._has_router]
        if told:
            pytest.fail(f"the test leaves something behind: {'; '.join(told)}", pytrace=False)

    async def _settled(self) -> None:
        """Where the loop goes on, an answer's last word may be there before its worker has put the request away."""
        async with asyncio.timeout(_PATIENCE_S):
            while self._blamed():
                await asyncio.sleep(0.01)

    def _blamed(self) -> list[str]:
        """What a test has to answer for."""
        return [
            f"{kind.__name__}: {count} left"
            for kind, counts in self._left().items()
            for count in counts
            if self._has_router or kind not in _OF_ROUTERS
        ]

    def _left(self) -> dict[type, list[int]]:
        found: dict[type, list[int]] = {type(one): [] for one in self._met}
        for one in self._met:
            if type(one) in _COUNTS and (count := _COUNTS[type(one)](one)):
                found[type(one)].append(count)
        return found

    def _meet(self, kind: type) -> None:
        begin = kind.__init__

        def meet(made: Any, *args: Any, **options: Any) -> None:
            begin(made, *args, **options)
            if type(made) in _COUNTS or isinstance(made, Router):
                self._met.add(made)
                self._of_test.append(made)
            self._has_router |= isinstance(made, Router)

        self._patch.setattr(kind, "__init__", meet)

    def _watch_loops(self) -> None:
        """Note which of our tasks are under way when a loop is closed, which cancels them silently."""
        close, run = asyncio.Runner.close, asyncio.Runner.run

        def noted(runner: asyncio.Runner, *args: Any, **options: Any) -> Any:
            self._runners.add(runner)
            return run(runner, *args, **options)

        def watched(runner: asyncio.Runner) -> None:
            loop = runner._loop  # type: ignore[attr-defined]
            if loop is not None and not loop.is_closed():
                self._tasks += [task.get_name() for task in asyncio.all_tasks(loop) if _is_ours(task)]
            close(runner)

        self._patch.setattr(asyncio.Runner, "close", watched)
        self._patch.setattr(asyncio.Runner, "run", noted)


def _is_ours(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and code.co_filename.startswith(_OUR_ROOMS)
