"""Whether an attached server has been heard of lately, in virtual time."""

from __future__ import annotations

import asyncio

from shared.errors import EngineError
from shared.vtime import run_virtual
from worker.engines.attached_beat import BEAT_S, Beat


class Server:
    """Answers at once, unless it hangs or refuses."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_refusing = False
        self.answers = asyncio.Event()
        self.answers.set()

    async def ask(self) -> bool:
        self.num_asked += 1
        await self.answers.wait()
        if self.is_refusing:
            raise EngineError("the connection broke")
        return True


def test_server_that_hangs_is_out_of_touch_within_two_beats_and_back_with_its_first_word() -> None:
    async def scenario() -> None:
        server = Server()
        beat = Beat(server.ask)
        await asyncio.sleep(10.0)
        assert beat.is_in_touch
        assert 10.0 / BEAT_S - 2 <= server.num_asked <= 10.0 / BEAT_S + 2
        server.answers.clear()
        await asyncio.sleep(2.1 * BEAT_S)
        assert not beat.is_in_touch
        await asyncio.sleep(60.0)
        assert not beat.is_in_touch
        server.answers.set()
        await asyncio.sleep(0.001)
        assert beat.is_in_touch
        await beat.stop()
        num_asked = server.num_asked
        await asyncio.sleep(10.0)
        assert server.num_asked == num_asked

    run_virtual(scenario())


def test_token_is_a_word_too_and_a_broken_connection_is_none() -> None:
    async def scenario() -> None:
        server = Server()
        server.is_refusing = True
        beat = Beat(server.ask)
        await asyncio.sleep(3 * BEAT_S)
        assert not beat.is_in_touch
        beat.heard()
        assert beat.is_in_touch
        await beat.stop()

    run_virtual(scenario())
