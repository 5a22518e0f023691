"""A deployment that grows and shrinks while a batch runs on it: no row is lost, and no answer is another one."""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from router import runfile
from tests.support.batches import chat_row, read_records, write_rows
from tests.support.commands import assert_no_process_left, run_command, start_command, tagged_environment

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

TINY = ["--model", "tiny", "--dtype", "float32", "--kv-cache-blocks", "200", "--max-model-len", "2048"]
NUM_ROWS = 400
PATIENCE_S = 240.0


class Deployment:
    """One `kvroute up` and the commands that are given to it."""

    def __init__(self, run_dir: str, environment: Mapping[str, str]) -> None:
        self._common = ["--run-dir", run_dir]
        self._environment = environment

    def run(self, *arguments: str | Path) -> tuple[int, str]:
        done = run_command(*arguments, *self._common, environment=self._environment)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stderr

    def start(self, *arguments: str | Path) -> Any:
        return start_command(*arguments, *self._common, environment=self._environment)

    def start_until(self, word: str, *arguments: str | Path) -> Any:
        """Start a command and wait until it says `word`."""
        process = self.start(*arguments)
        for line in process.stderr:
            if word in line:
                return process
        raise AssertionError(f"{arguments} never said {word!r}")

    def workers(self) -> dict[str, dict[str, Any]]:
        status = run_command("status", "--json", *self._common, environment=self._environment)
        return {worker["worker"]: worker for worker in json.loads(status.stdout)["workers"]}


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    tag = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as run_dir:
        deployment = Deployment(run_dir, tagged_environment(tag))
        try:
            code, told = deployment.run("up", "--workers", "1", "--max-num-seqs", "4", *TINY)
            assert code == 0, told
            yield deployment
        finally:
            deployment.run("down")
            assert_no_process_left(tag)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def rows() -> list[dict[str, object]]:
    beginnings = [f"beginning {group} " * 30 for group in range(4)]
    return [
        chat_row(
            f"row-{index}",
            f"{beginnings[index % 4]} question {index}",
            model="tiny",
            max_tokens=160,
            temperature=0.0,
            ignore_eos=True,
        )
        for index in range(NUM_ROWS)
    ]


def answers(path: Path) -> dict[str, str]:
    records = read_records(path)
    assert [record["error"] for record in records] == [None] * len(records)
    texts = {record["custom_id"]: record["response"]["body"]["choices"][0]["message"]["content"] for record in records}
    assert len(texts) == len(records) == NUM_ROWS
    return texts


def test_workers_come_and_go_under_a_batch_that_loses_nothing(tmp_path: Path, deployment: Deployment) -> None:
    input_path = write_rows(tmp_path / "in.jsonl", rows())
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"

    code, told = deployment.run("drain", "w0")
    assert (code, "without w0 no worker is left" in told) == (2, True), told
    code, told = deployment.run("drain", "w7")
    assert (code, "no worker 'w7'; the workers are w0" in told) == (2, True), told
    code, told = deployment.run("scale", "999")
    assert (code, "999 workers need 999 CPU" in told) == (2, True), told
    assert list(deployment.workers()) == ["w0"]

    batch = deployment.start("batch", input_path, "-o", first, "--max-attempts", "1")
    scaling = deployment.start_until("starting 1 workers", "scale", "2")
    code, told = deployment.run("scale", "1")
    assert (code, "another `kvroute up`, `scale` or `drain` is at work" in told) == (2, True), told
    _, told = scaling.communicate(timeout=PATIENCE_S)
    assert (scaling.returncode, "2 workers serve tiny: w0, w1" in told) == (0, True), told
    until(lambda: bool(deployment.workers()["w1"]["num_running"]))

    # Without a wait: what runs on it goes on elsewhere. A single attempt is allowed, and this is none.
    code, told = deployment.run("scale", "1", "--drain-timeout-s", "0")
    assert (code, "1 workers serve tiny: w0" in told) == (0, True), told
    assert "worker w1 has left; " in told
    assert "still running and go on elsewhere" in told
    _, told = batch.communicate(timeout=PATIENCE_S)
    assert (batch.returncode, f"{NUM_ROWS} rows answered, 0 failed" in told) == (0, True), told

    code, told = deployment.run("scale", "2")
    assert (code, "2 workers serve tiny: w0, w1" in told) == (0, True), told
    batch = deployment.start("batch", input_path, "-o", second, "--max-attempts", "1")
    until(lambda: all(worker["num_running"] for worker in deployment.workers().values()))
    code, told = deployment.run("drain", "w0")
    assert (code, "worker w0 has left\n" in told, "1 workers serve tiny: w1" in told) == (0, True, True), told
    _, told = batch.communicate(timeout=PATIENCE_S)
    assert (batch.returncode, f"{NUM_ROWS} rows answered, 0 failed" in told) == (0, True), told

    assert answers(first) == answers(second)
    assert len(set(answers(first)["row-0"])) >= 16


def test_drain_whose_command_is_killed_ends_all_the_same_and_the_next_scale_mends_the_rest(
    tmp_path: Path, deployment: Deployment
) -> None:
    code, told = deployment.run("scale", "2")
    assert code == 0, told
    output_path = tmp_path / "out.jsonl"
    batch = deployment.start("batch", write_rows(tmp_path / "in.jsonl", rows()), "-o", output_path)
    until(lambda: all(worker["num_running"] for worker in deployment.workers().values()))
    draining = deployment.start_until("draining w1", "scale", "1", "--drain-timeout-s", "600")
    until(lambda: deployment.workers()["w1"]["state"] != "ready")
    draining.kill()
    draining.communicate()

    code, told = deployment.run("scale", "2")
    assert (code, "2 workers serve tiny: w0, w2" in told or "2 workers serve tiny: w0, w1" in told) == (0, True), told
    assert {worker["state"] for worker in deployment.workers().values()} == {"ready"}
    _, told = batch.communicate(timeout=PATIENCE_S)
    assert (batch.returncode, len(answers(output_path))) == (0, NUM_ROWS), told


@pytest.mark.parametrize("number", ["0", "-1", "abc", "1.5", "4097", ""])
def test_number_of_workers_that_is_none_is_refused(tmp_path: Path, number: str) -> None:
    run = run_command("scale", number, "--run-dir", tmp_path, environment=tagged_environment("none"))
    assert (run.returncode, f"scale {number}: not a number of workers" in run.stderr) == (2, True), run.stderr


@pytest.mark.parametrize("arguments", [("scale", "2"), ("drain", "w0")])
def test_nothing_that_runs_is_nothing_to_change(tmp_path: Path, arguments: tuple[str, str]) -> None:
    run = run_command(*arguments, "--run-dir", tmp_path, environment=tagged_environment("none"))
    assert (run.returncode, "nothing is running; `kvroute up` starts workers" in run.stderr) == (2, True), run.stderr
    assert runfile.read_run(tmp_path) is None
