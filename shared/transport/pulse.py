"""Tells when a peer that speaks at regular times has fallen silent, long before its connection is cut for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_SLACK_S = 1e-4
"""Timers may fire a moment early."""


class Pulse:
    """Counts the periods in a row that passed without a sign of life.

    A time in which this process itself stood still counts as one period at most, however long it was: its timer fires
    once, and what has arrived meanwhile is read before the next.
    """

    def __init__(self, period_s: float, on_silence: Callable[[], None]) -> None:
        self.num_silences = 0
        self._period_s = period_s
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._heard_at_s = self._loop.time()
        self._timer = self._loop.call_later(period_s, self._look)

    def heard(self) -> None:
        """Note a sign of life: the count begins anew. Costs no timer."""
        self.num_silences = 0
        self._heard_at_s = self._loop.time()

    def stop(self) -> None:
        """Count no further."""
        self._timer.cancel()

    def _look(self) -> None:
        left_s = self._heard_at_s + self._period_s - self._loop.time()
        is_silent = left_s <= _SLACK_S
        self._timer = self._loop.call_later(self._period_s if is_silent else left_s, self._look)
        if is_silent:
            self.num_silences += 1
            self._on_silence()
