"""A long batch under which a worker, the store and the command itself are killed: every row is answered once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.batches import chat_row, read_records, write_rows
from tests.support.commands import (
    assert_no_process_left,
    run_command,
    start_command,
    tagged_environment,
    tagged_processes,
)
from tests.support.servers import ServerProcess, find_redis_server
from worker.engines.profiles import LatencyProfile

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

NUM_ROWS, NUM_BEGINNINGS = 2000, 100
NUM_UNTIL_WORKER_DIES, NUM_UNTIL_STORE_DIES, NUM_UNTIL_COMMAND_DIES = 600, 900, 1200
PROFILE = LatencyProfile("steady", 2e-3, 1e-6, 0.0, 1e-6, 1e-9, kv_capacity_tokens=1 << 15)
KV_BLOCKS = 72
"""For each worker: far less than all beginnings take, so that only rows that come together share theirs."""
NUM_SHARED_TOKENS = 3 * 64
PATIENCE_S = 300.0
MAX_REPEATED_SHARE = 0.02
MIN_SHARE_OF_POSSIBLE = 0.5
"""Of what an endless cache could serve: far from both ends. Without deaths a plan gives 0.999 in virtual time, and the
file's order 0.2; each death costs a beginning its blocks once more at most."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def worker_processes(tag: str) -> list[psutil.Process]:
    found = []
    for process in tagged_processes(tag):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and "WorkerActor" in process.cmdline()[0]:
                found.append(process)
    return found


def rows() -> list[dict[str, Any]]:
    """Chats that begin in one of some ways, in random order, and a few rows that cannot be answered."""
    rng = random.Random(7)
    beginnings = [
        f"assistant {number} " + " ".join(f"rule {rng.random():.6f}" for _ in range(12))
        for number in range(NUM_BEGINNINGS)
    ]
    made = []
    for number in range(NUM_ROWS):
        content = f"{beginnings[number % NUM_BEGINNINGS]} question {number}"
        made.append(chat_row(f"row-{number}", content, model="tiny", max_tokens=8))
    for number in range(0, NUM_ROWS, 400):
        made[number]["body"]["n"] = 2
    rng.shuffle(made)
    return made


def usage(record: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = record["response"]["body"]["usage"]
    return found


def num_tokens(records: list[dict[str, Any]]) -> int:
    return sum(usage(record)["total_tokens"] for record in records if record["error"] is None)


async def test_batch_survives_the_death_of_a_worker_of_the_store_and_of_the_command(tmp_path: Path) -> None:
    find_redis_server()
    tag = uuid.uuid4().hex
    environment = tagged_environment(tag)
    input_path, output = write_rows(tmp_path / "in.jsonl", rows()), tmp_path / "out.jsonl"
    summary = tmp_path / "summary.json"
    (tmp_path / "steady.yaml").write_text(PROFILE.to_yaml())
    batch: list[str | Path] = ["batch", input_path, "-o", output]
    with ServerProcess() as store, tempfile.TemporaryDirectory() as run_dir:
        where = ["--run-dir", run_dir]
        try:
            fleet = ["--workers", "2", "--model", "tiny", "--max-num-seqs", "8", "--redis-url", store.url]
            fleet += ["--kv-cache-blocks", str(KV_BLOCKS), "--max-model-len", "1024"]
            fleet += ["--engine", "simulator", "--profile", str(tmp_path / "steady.yaml")]
            up = await asyncio.to_thread(run_command, "up", *fleet, *where, environment=environment)
            assert up.returncode == 0, up.stderr

            kills: list[tuple[int, int | None, int]] = [
                (NUM_UNTIL_WORKER_DIES, worker_processes(tag)[0].pid, signal.SIGKILL),
                (NUM_UNTIL_STORE_DIES, store.pid, signal.SIGKILL),
                (NUM_UNTIL_COMMAND_DIES, None, signal.SIGKILL),
            ]
            log = ["--request-log", tmp_path / "log-1.jsonl"]
            command = start_command(
                *(json.dumps(kills), *batch, *log, *where),
                environment=environment,
                module="tests.support.killing_command",
            )
            await until(lambda: store.pid is None or command.poll() is not None)
            # Whoever watches over it starts it again; it comes back empty.
            store.start()
            _, told = await asyncio.to_thread(command.communicate)
            assert command.returncode == -signal.SIGKILL, told
            before = output.read_bytes()
            assert before.count(b"\n") == NUM_UNTIL_COMMAND_DIES

            log = ["--request-log", tmp_path / "log-2.jsonl", "--summary", summary, "--resume"]
            ended = await asyncio.to_thread(run_command, *batch, *log, *where, environment=environment)
            assert ended.returncode == 0, ended.stderr
        finally:
            await asyncio.to_thread(run_command, "down", *where, environment=environment)
            assert_no_process_left(tag)

    # One line for each row, of which a row's first stays as it was.
    records = read_records(output)
    assert sorted(record["custom_id"] for record in records) == sorted(f"row-{number}" for number in range(NUM_ROWS))
    failed = {record["custom_id"]: record["error"]["code"] for record in records if record["error"] is not None}
    assert failed == {f"row-{number}": "invalid_value" for number in range(0, NUM_ROWS, 400)}
    kept = [raw for raw in before.splitlines() if not is_transient(raw)]
    whole = set(output.read_bytes().splitlines())
    assert whole.issuperset(kept)

    # What was finished was not computed again: neither by the resumed run, nor twice by the first.
    figures = json.loads(summary.read_text())
    assert (figures["num_skipped"], figures["num_ok"] + figures["num_failed"]) == (len(kept), NUM_ROWS - len(kept))
    missing = [record for record in records if json.dumps(record["custom_id"]).encode() not in ids_of(kept)]
    assert figures["prompt_tokens"] + figures["completion_tokens"] == num_tokens(missing)
    logs = [(tmp_path / f"log-{number}.jsonl").read_text() for number in (1, 2)]
    logged = [json.loads(line) for log in logs for line in log.splitlines()]
    num_logged_tokens = sum(one["prompt_tokens"] + one["output_tokens"] for one in logged)
    assert num_logged_tokens <= (1 + MAX_REPEATED_SHARE) * num_tokens(records)

    # Rows of one beginning share its blocks, whoever died meanwhile.
    answered = [usage(record) for record in records if record["error"] is None]
    num_cached_tokens = sum(one["prompt_tokens_details"]["cached_tokens"] for one in answered)
    num_possible_tokens = (len(answered) - NUM_BEGINNINGS) * NUM_SHARED_TOKENS
    assert num_cached_tokens >= MIN_SHARE_OF_POSSIBLE * num_possible_tokens


def is_transient(raw: bytes) -> bool:
    """Whether it is an error that another run heals: those of rows that a death has hit too often."""
    error = json.loads(raw)["error"]
    return error is not None and error["code"] != "invalid_value"


def ids_of(lines: list[bytes]) -> set[bytes]:
    return {json.dumps(json.loads(raw)["custom_id"]).encode() for raw in lines}
