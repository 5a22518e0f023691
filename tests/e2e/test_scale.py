"""A deployment that grows and shrinks under requests: none is lost, and no answer is another one."""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from router import launch, runfile
from shared.config import Settings
from tests.support.batches import chat_row, write_rows
from tests.support.commands import assert_no_process_left, run_command, start_command, tagged_environment
from tests.support.streams import Streamed, assert_whole, streams

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

TINY = ["--model", "tiny", "--dtype", "float32", "--max-num-seqs", "4"]
TINY += ["--kv-cache-blocks", "200", "--max-model-len", "2048"]
NUM_PROMPTS, NUM_TOKENS = 40, 96
PATIENCE_S = 240.0


class Deployment:
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

    async def states(self) -> dict[str, str]:
        status = await asyncio.to_thread(
            run_command, "status", "--json", "--run-dir", self.run_dir, environment=self._environment
        )
        return {worker["worker"]: worker["state"] for worker in json.loads(status.stdout)["workers"]}

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


@pytest_asyncio.fixture
async def deployment() -> AsyncIterator[Deployment]:
    tag = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as run_dir:
        deployment = Deployment(Path(run_dir), tagged_environment(tag))
        try:
            code, told = await deployment.run("up", "--workers", "1", *TINY)
            assert code == 0, told
            yield deployment
        finally:
            await deployment.run("down")
            assert_no_process_left(tag)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


def is_asked(asked: list[Streamed], worker: str, since: int) -> bool:
    return any(one.trace.worker == worker for one in asked[since:])


async def test_workers_come_and_go_under_a_router_that_loses_nothing(tmp_path: Path, deployment: Deployment) -> None:
    async with deployment.under_load() as asked:
        code, told = await deployment.run("scale", "999")
        assert (code, "too many workers: 999 workers need 1 CPU each" in told) == (2, True), told

        code, told = await deployment.run("scale", "2")
        assert (code, "2 workers serve tiny: w0, w1" in told) == (0, True), told
        await until(lambda: is_asked(asked, "w1", 0))

        # Without a wait: what runs on it goes on elsewhere, though a request that fails is not tried again here.
        code, told = await deployment.run("scale", "1", "--drain-timeout-s", "0")
        assert (code, "worker w1 has left" in told, "1 workers serve tiny: w0" in told) == (0, True, True), told

        num_asked = len(asked)
        code, told = await deployment.run("scale", "2")
        assert (code, "2 workers serve tiny: w0, w1" in told) == (0, True), told
        await until(lambda: is_asked(asked, "w1", num_asked))

        rows = [chat_row(f"row-{index}", f"question {index}", model="tiny", max_tokens=64) for index in range(200)]
        input_path, output_path = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
        batch = await deployment.start_until("using the 2 workers", "batch", input_path, "-o", output_path)
        await until(lambda: output_path.exists() and bool(output_path.stat().st_size))
        code, told = await deployment.run("drain", "w0")
        assert (code, "worker w0 has left\n" in told, "1 workers serve tiny: w1" in told) == (0, True, True), told
        _, told = await asyncio.to_thread(batch.communicate)
        assert (batch.returncode, "200 rows answered, 0 failed" in told) == (0, True), told
        num_asked = len(asked)
        await until(lambda: is_asked(asked, "w1", num_asked))


async def test_drain_whose_command_is_killed_ends_all_the_same_and_the_next_scale_mends_the_rest(
    deployment: Deployment,
) -> None:
    async with deployment.under_load() as asked:
        code, told = await deployment.run("scale", "2")
        assert code == 0, told
        await until(lambda: is_asked(asked, "w1", 0))
        draining = await deployment.start_until("draining w1", "scale", "1")
        draining.kill()
        await asyncio.to_thread(draining.communicate)

        code, told = await deployment.run("scale", "2")
        assert (code, "2 workers serve tiny: w0, w" in told) == (0, True), told
        assert list((await deployment.states()).values()) == ["ready", "ready"]
        num_asked = len(asked)
        await until(lambda: len({one.trace.worker for one in asked[num_asked:]} - {None}) == 2)
