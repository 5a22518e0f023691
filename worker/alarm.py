"""How a publisher's task waits: until a time, or until what happened meanwhile has been gathered."""

from __future__ import annotations

import asyncio


class Alarm:
    """Wakes the one task that waits on it.

    Timers that are no longer needed stay until they fire, and serve again where the same time is waited for: the next
    heartbeat is as far away after each of many batches.
    """

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._wakes_at_s = 0.0
        self._gather_s: float | None = None
        """How long to gather when something happens; None where nobody waits, or it has begun."""
        self._time_to_timer: dict[float, asyncio.TimerHandle] = {}

    async def wait(self, until_s: float, gather_s: float) -> None:
        """Wait until the loop's clock says so, or until `gather_s` after the first `note` from now on."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._gather_s = gather_s
        self._set(loop, until_s)
        try:
            await self._waiter
        finally:
            self._waiter = self._gather_s = None

    def note(self) -> None:
        """Something has happened. Modifies; where nobody waits, nothing."""
        if self._gather_s is not None:
            gather_s, self._gather_s = self._gather_s, None
            loop = asyncio.get_running_loop()
            self._set(loop, loop.time() + gather_s)

    def close(self) -> None:
        """Take back all timers."""
        for timer in self._time_to_timer.values():
            timer.cancel()
        self._time_to_timer.clear()

    def _set(self, loop: asyncio.AbstractEventLoop, at_s: float) -> None:
        self._wakes_at_s = at_s
        if at_s not in self._time_to_timer:
            self._time_to_timer[at_s] = loop.call_at(at_s, self._ring, at_s)

    def _ring(self, at_s: float) -> None:
        del self._time_to_timer[at_s]
        if self._waiter is not None and not self._waiter.done() and at_s >= self._wakes_at_s:
            self._waiter.set_result(None)
