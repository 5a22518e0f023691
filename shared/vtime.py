"""An event loop on virtual time: its clock jumps to the next timer whenever nothing else is left to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
_TICK_S = 1e-9


class VirtualTimeDeadlock(Exception):
    """Every task waits for something that no timer will bring."""


_NUM_OWN_FILES = 1
"""What the loop itself registers, to be woken by other threads: it has no news in virtual time."""


class _JumpingSelector(selectors.DefaultSelector):
    """Reports what is ready and, instead of waiting for more, moves the clock on."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or len(self.get_map()) > _NUM_OWN_FILES:
            # Asking the system takes longer than most of what a simulation does in between.
            ready = super().select(0)
            if ready:
                return ready
        if timeout is None:
            raise VirtualTimeDeadlock
        # A real clock never stands still: rounding must not leave a deadline a hair ahead of a clock that waits for it.
        self.now_s += max(_TICK_S, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. For coroutines alone: what threads or other processes bring takes no virtual time to wait for."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(scenario: Coroutine[Any, Any, Result]) -> Result:
    """Run `scenario` on a fresh virtual-time loop; like `asyncio.run`, cancels what it leaves behind."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario)
