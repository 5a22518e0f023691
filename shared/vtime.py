"""An event loop on virtual time: its clock jumps to the next timer whenever nothing else is left to do."""

from __future__ import annotations

import asyncio
import gc
import heapq
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, TypeVar

Result = TypeVar("Result")
_TICK_S = 1e-9
_NUM_OWN_FILES = 1
"""What a loop itself registers, to be woken by other threads: it has no news in virtual time."""
_ALLOCATIONS_PER_COLLECTION = 100_000
"""Some ten megabytes at most; Python's own is 700."""
_FEW_TIMERS = 100
"""Cancelled ones among so many are not worth looking for."""


class VirtualTimeDeadlock(Exception):
    """Every task waits for something that no timer will bring."""


class _Turn(asyncio.TimerHandle):
    """One call that is due, with a time or without: what asyncio's own does for debugging is half of their cost."""

    __slots__ = ()
    _repr = None
    _source_traceback = None

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualTimeLoop,
        context: Context | None,
        is_timer: bool,
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._scheduled = is_timer

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None  # type: ignore[assignment]  # as asyncio's own does, to let go of them
            if self._scheduled:
                self._loop._note_cancelled()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. For coroutines alone: what threads or other processes bring takes no virtual time to wait for.

    Timers of one moment fire in the order in which they were set, which asyncio's own heap does not promise; and as
    pairs of numbers they are compared without calling Python, which is most of what its heap costs.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._timers: list[tuple[float, int, _Turn]] = []
        self._num_set = 0
        self._num_cancelled = 0
        super().__init__()
        self._files = self._selector._fd_to_key  # type: ignore[attr-defined]  # its own mapping is asked in Python

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]  # as with `call_at`
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:  # type: ignore[attr-defined]
            self._check_closed()  # type: ignore[attr-defined]
        turn = _Turn(self._now_s, callback, args, self, context, False)
        self._ready.append(turn)  # type: ignore[attr-defined]
        return turn

    def call_later(  # type: ignore[override]  # as with `call_at`
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # mypy does not know asyncio's own with a tuple of any types
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._closed:  # type: ignore[attr-defined]
            self._check_closed()  # type: ignore[attr-defined]
        timer = _Turn(when, callback, args, self, context, True)
        self._num_set += 1
        heapq.heappush(self._timers, (when, self._num_set, timer))
        return timer

    def _note_cancelled(self) -> None:
        """A timer will not fire. Modifies."""
        self._num_cancelled += 1
        if len(self._timers) > _FEW_TIMERS and self._num_cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._num_cancelled = 0

    def _run_once(self) -> None:
        """Turn after turn, until the loop is told to stop. Of what asyncio's own does, most serves real time."""
        ready, files = self._ready, self._files  # type: ignore[attr-defined]
        is_stopping = False
        while not is_stopping:
            if len(files) > _NUM_OWN_FILES or not (ready or self._jump()):
                # Asking the system takes longer than most of what a simulation does in between.
                self._process_events(self._selector.select(0))  # type: ignore[attr-defined]
                if not ready and not self._jump():
                    raise VirtualTimeDeadlock
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                # As a handle runs itself, without two calls for each.
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    told = {"message": f"Exception in callback {handle!r}", "exception": error, "handle": handle}
                    self.call_exception_handler(told)
            is_stopping = self._stopping  # type: ignore[attr-defined]

    def _jump(self) -> bool:
        """Move the clock to the next timer and have all fire that are due by then; false if there is none."""
        timers, has_jumped, due_s = self._timers, False, math.inf
        while timers and timers[0][0] < due_s:
            when_s, _, timer = heapq.heappop(timers)
            timer._scheduled = False
            if timer._cancelled:
                self._num_cancelled -= 1
                continue
            if not has_jumped:
                has_jumped = True
                # A real clock never stands still: rounding must not leave a deadline a hair ahead of a clock that waits
                # for it.
                self._now_s = max(self._now_s + _TICK_S, when_s)
                due_s = self._now_s + _TICK_S
            self._ready.append(timer)  # type: ignore[attr-defined]
        return has_jumped


def run_virtual(scenario: Coroutine[Any, Any, Result]) -> Result:
    """Run `scenario` on a fresh virtual-time loop; like `asyncio.run`, cancels what it leaves behind."""
    with _seldom_collected(), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Have the collector of garbage look for cycles less often: a fleet is much to go through, and leaves few."""
    thresholds = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
