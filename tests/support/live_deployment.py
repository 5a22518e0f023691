"""A `kvroute up` as its users have it: the commands that are given to it, and a router that asks it without a pause."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from router import launch, runfile
from shared.config import Settings
from tests.support.commands import run_command, start_command
from tests.support.streams import Streamed, assert_whole, streams

NUM_PROMPTS, NUM_TOKENS = 40, 96
PATIENCE_S = 240.0


class LiveDeployment:
    """One `kvroute up`, the commands that are given to it, and a router that asks it without a pause."""

    def __init__(self, run_dir: Path, environment: Mapping[str, str]) -> None:
        self.run_dir = run_dir
        self._environment = environment

    async def run(self, *arguments: str | Path) -> tuple[int, str]:
        """One command's exit code and what it said."""
        done = await asyncio.to_thread(
            run_command, *arguments, "--run-dir", self.run_dir, environment=self._environment
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stderr

    async def start_until(self, word: str, *arguments: str | Path) -> Any:
        """Start a command and wait until it says `word`, or ends."""
        process = start_command(*arguments, "--run-dir", self.run_dir, environment=self._environment)
        while line := await asyncio.to_thread(process.stderr.readline):
            if word in line:
                break
        return process

    async def show(self, *arguments: str) -> Any:
        """What a command prints with `--json`."""
        done = await asyncio.to_thread(
            run_command, *arguments, "--json", "--run-dir", self.run_dir, environment=self._environment
        )
        return json.loads(done.stdout)

    async def status(self) -> Any:
        return await self.show("status")

    async def states(self) -> dict[str, str]:
        return {worker["worker"]: worker["state"] for worker in (await self.status())["workers"]}

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[list[Streamed]]:
        """What an attached router is asked, some at any time; at the end all of it is whole."""
        run = runfile.running(self.run_dir)
        asked: list[Streamed] = []
        # In turn, so that every worker is asked, however little there is to do.
        settings = Settings(**run.settings).model_copy(update={"max_attempts": 1, "policy": "round_robin"})
        async with launch.attached(run, settings, lambda line: None) as serving:
            is_over = False

            async def ask_on() -> None:
                while not is_over:
                    one = streams(f"{len(asked)}", NUM_PROMPTS, NUM_TOKENS)[len(asked) % NUM_PROMPTS]
                    asked.append(one)
                    await one.read(serving.router)
                    # Two cores have workers to start meanwhile.
                    await asyncio.sleep(0.2)

            async with asyncio.TaskGroup() as places:
                for _ in range(4):
                    places.create_task(ask_on())
                yield asked
                is_over = True
            assert len(serving.router.queue) == serving.router.fleet.num_bookings == 0
        prompt_to_answer = {tuple(one.prompt): one.token_ids for one in asked}
        assert_whole(asked, [prompt_to_answer[tuple(one.prompt)] for one in asked])
        assert min(len(set(token_ids)) for token_ids in prompt_to_answer.values()) >= 16


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


def is_asked(asked: list[Streamed], worker: str, since: int) -> bool:
    return any(one.trace.worker == worker for one in asked[since:])
