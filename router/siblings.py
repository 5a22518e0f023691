"""Several server processes behind one port: the first one starts, watches and ends the others, which beat meanwhile.

Each has a router of its own, and the system deals connections to them. What they tell each other goes by
`router.sibling_words`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from router.serving import Say

logger = logging.getLogger(__name__)

_CHILD = ("-m", "router.serve_child")
_RESTART_S = 1.0
BEAT_S = 1.0
"""Time between two lines by which a process tells that it lives."""
BEAT = b"alive\n"
_MOST_MISSED = 10
"""Beats that may be missing, one after the other. They are counted one by one, so that a machine that was stopped as a
whole for any time has missed one of each process."""
_LAST_WORDS_S = 5.0


class Siblings:
    """The processes beside this one. Use as `async with`; one that dies is started again, and so is one that hangs: the
    system would go on dealing it connections.
    """

    def __init__(self, orders: Iterable[Mapping[str, Any]], drain_timeout_s: float, say: Say) -> None:
        """`orders` is what each is told at its start; see `router.serve_child`."""
        self._orders = [json.dumps(order).encode() + b"\n" for order in orders]
        self._drain_timeout_s = drain_timeout_s
        self._say = say
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        """The last one of each number, from the moment that it runs: it may have to end before it is ready."""
        self._watchers: list[asyncio.Task[None]] = []
        self._is_ending = False

    async def __aenter__(self) -> Siblings:
        try:
            await asyncio.gather(*map(self._start, range(len(self._orders))))
        except BaseException:
            await self.__aexit__()
            raise
        self._watchers = [asyncio.create_task(self._watch(number)) for number in range(len(self._orders))]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for process in list(self._processes.values()):
            try:
                async with asyncio.timeout(self._drain_timeout_s + _LAST_WORDS_S):
                    await process.wait()
            except (TimeoutError, asyncio.CancelledError):
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def end(self) -> None:
        """Have them finish what they have and end."""
        self._is_ending = True
        for process in list(self._processes.values()):
            if process.stdin is not None:
                process.stdin.close()

    async def ended(self) -> None:
        """Wait until all have ended, once they were told to."""
        for process in list(self._processes.values()):
            await process.wait()

    def cut(self) -> None:
        """Have those that still live cut off what they have."""
        for process in list(self._processes.values()):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def _start(self, number: int) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *_CHILD),
            stdin=pipe,
            stdout=pipe,
            # Ctrl-C at a terminal is for the first process, which then tells the others.
            start_new_session=True,
        )
        self._processes[number] = process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._orders[number])
        if self._is_ending:
            process.stdin.close()
        if await process.stdout.readline() != b"ready\n":
            await process.wait()
            raise ChildProcessError("a server process did not start; its log says why")

    async def _watch(self, number: int) -> None:
        """Start a process again whenever it has ended by itself, or says nothing any more."""
        while True:
            process = self._processes[number]
            if not await _has_ended(process) and not self._is_ending:
                self._say(f"server process {number + 1} has said nothing for {_MOST_MISSED * BEAT_S:g} s: it is killed")
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            code = await process.wait()
            if self._is_ending:
                return
            self._say(f"server process {number + 1} has ended with {code}: it is started again")
            await asyncio.sleep(_RESTART_S)
            if self._is_ending:
                return
            try:
                await self._start(number)
            except (OSError, ChildProcessError) as error:
                logger.error("server process %s cannot be started: %s", number + 1, error)


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Wait until a process closes its output, or does not beat; false for the latter."""
    assert process.stdout is not None
    num_missed = 0
    while num_missed < _MOST_MISSED:
        try:
            async with asyncio.timeout(BEAT_S):
                if not await process.stdout.readline():
                    return True
            num_missed = 0
        except TimeoutError:
            num_missed += 1
    return False
