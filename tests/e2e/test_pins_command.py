"""Warm-up on a whole deployment: a prefix is computed once, found by the first request, and kept over a restart.

Its engines are simulated; that a real one keeps what is pinned is in the contract of engines.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router import runfile
from shared.directory import connect_directory, open_pin_board
from shared.directory.pin_board import PinState
from shared.types import CacheScheme, Instance, WorkerId
from tests.support.batches import chat_row, read_records, write_rows
from tests.support.commands import assert_no_process_left, run_command, tagged_environment, tagged_processes

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

BLOCK_SIZE = 64
SIMULATED = ["--model", "tiny", "--engine", "simulator", "--kv-cache-blocks", "100", "--max-model-len", "2048"]
W0 = WorkerId("w0")
RESTART_S = 200.0
SYSTEM = "You answer in few words and never guess. " * 20


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag for one test's processes; none of them may outlive it."""
    tag = uuid.uuid4().hex
    yield tag
    assert_no_process_left(tag)


async def kept(redis_url: str, name: str, *, after: Instance | None) -> tuple[Instance, int]:
    """Wait until another life of `w0` than `after` keeps the pin; that life and its number of blocks."""
    scheme = CacheScheme("tiny", BLOCK_SIZE)
    directory, board = await connect_directory(redis_url, scheme), open_pin_board(redis_url, scheme)
    try:
        async with asyncio.timeout(RESTART_S):
            while True:
                lives = {record.info.worker: record.info.instance for record in await directory.workers()}
                told = (await board.reports([W0])).get(W0)
                if told is not None and lives.get(W0) == told.instance != after:
                    for pin in told.pins:
                        if pin.name == name and pin.state is PinState.PINNED:
                            return told.instance, pin.num_blocks
                await asyncio.sleep(0.1)
    finally:
        await board.close()
        await directory.close()


def cached_tokens(record: dict[str, Any]) -> int:
    return int(record["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_prefix_is_kept_found_by_the_first_request_and_made_again_after_a_restart(tmp_path: Path, tag: str) -> None:
    environment = tagged_environment(tag)
    (tmp_path / "system.json").write_text(json.dumps([{"role": "system", "content": SYSTEM}]))
    (tmp_path / "long.txt").write_text("word " * 390)
    with tempfile.TemporaryDirectory() as run_dir:

        def kvroute(*arguments: str | Path) -> Any:
            return run_command(*arguments, "--run-dir", run_dir, environment=environment)

        up = kvroute("up", "--workers", "2", *SIMULATED)
        assert up.returncode == 0, up.stderr

        warmup = kvroute("warmup", "system", "--messages", tmp_path / "system.json")
        assert warmup.returncode == 0, warmup.stderr
        state = json.loads(kvroute("pins", "--json").stdout)
        (pin,) = state["pins"]
        num_tokens, num_blocks = pin["num_prompt_tokens"], pin["num_prompt_tokens"] // BLOCK_SIZE
        assert num_blocks >= 5
        told = f"pinned {num_blocks} blocks ({num_blocks * BLOCK_SIZE} of {num_tokens} tokens)"
        assert warmup.stdout.splitlines() == [f"w0: {told}", f"w1: {told}"]
        status = json.loads(kvroute("status", "--json").stdout)
        assert [worker["num_pinned_blocks"] for worker in status["workers"]] == [num_blocks] * 2
        budget = status["workers"][0]["pin_budget_blocks"]
        assert num_blocks <= budget < 100

        row = chat_row("first", "What now?", model="tiny", max_tokens=4)
        row["body"]["messages"].insert(0, {"role": "system", "content": SYSTEM})  # type: ignore[index]
        batch = kvroute("batch", write_rows(tmp_path / "in.jsonl", [row]), "-o", tmp_path / "out.jsonl")
        assert batch.returncode == 0, batch.stderr
        assert cached_tokens(read_records(tmp_path / "out.jsonl")[0]) >= num_blocks * BLOCK_SIZE

        # One more prompt at a time, until the budget does not suffice.
        for number in range(100 // num_blocks):
            (tmp_path / "more.txt").write_text(f"{number} " + "word " * 390)
            more = kvroute("warmup", f"more-{number}", "--file", tmp_path / "more.txt", "--workers", "1")
            if more.returncode:
                break
        assert (more.returncode, f"budget is {budget}" in more.stderr) == (1, True), more.stderr

        run = runfile.read_run(Path(run_dir))
        assert run is not None
        first_life, _ = asyncio.run(kept(run.redis_url, "system", after=None))
        victims = [process for process in tagged_processes(tag) if "WorkerActor" in " ".join(process.cmdline())]
        assert len(victims) == 2
        for victim in victims:
            victim.kill()
        second_life, num_blocks_again = asyncio.run(kept(run.redis_url, "system", after=first_life))
        assert (second_life != first_life, num_blocks_again) == (True, num_blocks)

        unpin = kvroute("unpin", "system")
        assert unpin.returncode == 0, unpin.stderr
        assert "system" not in kvroute("pins").stdout
        again = kvroute("unpin", "system")
        assert (again.returncode, "no pin 'system'" in again.stderr) == (2, True)
        down = kvroute("down")
        assert down.returncode == 0, down.stderr
