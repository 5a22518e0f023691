"""Whether an attached server has been heard of lately: it is asked for a sign of life a few times a second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from shared.errors import KvrouteError

BEAT_S = 0.25
"""Between an answer and the next question; to say that it is well costs a server some 0.3 ms."""
_LATELY_S = 2 * BEAT_S


class Beat:
    """Owns the time of a server's last word: an answer to this, or whatever else comes from it."""

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        self._ask = ask
        self._clock = asyncio.get_running_loop().time
        self._heard_at_s = self._clock()
        self._task = asyncio.create_task(self._run())

    @property
    def is_in_touch(self) -> bool:
        """Whether there was a word so lately that the server can be taken to live."""
        return self._clock() - self._heard_at_s <= _LATELY_S

    def heard(self) -> None:
        """Note a word. Modifies."""
        self._heard_at_s = self._clock()

    async def stop(self) -> None:
        """Ask no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            # What an answer says, and what none for long means, is for those who look at the server.
            with contextlib.suppress(KvrouteError):
                await self._ask()
                self.heard()
            await asyncio.sleep(BEAT_S)
