"""The command line on real workers: batches that are killed and resumed, deployments that stay, and what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from router import runfile
from tests.support.batches import chat_row, read_records, write_rows
from tests.support.commands import (
    assert_no_process_left,
    run_command,
    start_command,
    tagged_environment,
    tagged_processes,
)

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

TINY = ["--model", "tiny", "--kv-cache-blocks", "100", "--max-model-len", "2048", "--max-num-seqs", "4"]
SIMULATED = [*TINY, "--engine", "simulator"]
KILLING = "tests.support.killing_command"


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag for one test's processes; none of them may outlive it."""
    tag = uuid.uuid4().hex
    yield tag
    assert_no_process_left(tag)


def batch_rows(num_rows: int, max_tokens: int = 8) -> list[dict[str, object]]:
    beginnings = [f"beginning {group} " * 30 for group in range(4)]
    return [
        chat_row(f"row-{index}", f"{beginnings[index % 4]} question {index}", model="tiny", max_tokens=max_tokens)
        for index in range(num_rows)
    ]


def test_batch_killed_in_the_middle_is_resumed_without_computing_anything_twice(tmp_path: Path, tag: str) -> None:
    environment = tagged_environment(tag)
    input_path, output_path = write_rows(tmp_path / "in.jsonl", batch_rows(80, max_tokens=64)), tmp_path / "out.jsonl"
    command = ["batch", input_path, "-o", output_path, "--workers", "2"]

    killed = run_command(
        json.dumps([(20, None, signal.SIGKILL)]), *command, *TINY, environment=environment, module=KILLING
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = output_path.read_bytes()
    assert len(read_records(output_path)) == 20
    assert_no_process_left(tag)
    # As where the last line was half written: the resume cuts it.
    with output_path.open("ab") as output:
        output.write(finished[:100])

    refused = run_command(*command, *TINY, environment=environment)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--resume" in refused.stderr

    # Rows are counted alike, whichever engine answers them.
    resumed = run_command(*command, *SIMULATED, "--resume", environment=environment)
    assert resumed.returncode == 0, resumed.stderr
    assert output_path.read_bytes().startswith(finished), "a finished row was computed or written again"
    records = read_records(output_path)
    assert Counter(record["custom_id"] for record in records) == Counter(f"row-{index}" for index in range(80))
    assert all(record["response"]["status_code"] == 200 for record in records)
    assert "20 done before" in resumed.stderr


@pytest.mark.parametrize(
    ("sent", "engine"), [(signal.SIGINT, TINY), (signal.SIGTERM, SIMULATED)], ids=["ctrl-c", "sigterm"]
)
def test_interrupted_batch_says_so_and_leaves_a_whole_output(
    tmp_path: Path, tag: str, sent: signal.Signals, engine: list[str]
) -> None:
    input_path, output_path = write_rows(tmp_path / "in.jsonl", batch_rows(80, max_tokens=64)), tmp_path / "out.jsonl"
    command = ["batch", input_path, "-o", output_path, "--workers", "1", *engine]
    ended = run_command(json.dumps([(5, None, sent)]), *command, environment=tagged_environment(tag), module=KILLING)
    assert ended.returncode == 130, ended.stderr
    assert "--resume" in ended.stderr
    assert 5 <= len(read_records(output_path)) < 80


def test_batch_ended_while_its_workers_start_leaves_nothing(tmp_path: Path, tag: str) -> None:
    input_path, output_path = write_rows(tmp_path / "in.jsonl", batch_rows(10)), tmp_path / "out.jsonl"
    process = start_command("batch", input_path, "-o", output_path, *TINY, environment=tagged_environment(tag))
    assert process.stderr is not None
    for line in process.stderr:
        if "starting 1 worker " in line:
            break
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=240.0)
    assert (process.returncode, stderr) == (130, "kvroute: interrupted\n")
    assert not output_path.exists()


def test_deployment_comes_up_serves_batches_tells_its_state_and_goes_down(tmp_path: Path, tag: str) -> None:
    environment = tagged_environment(tag)
    with tempfile.TemporaryDirectory() as run_dir:
        common = ["--run-dir", run_dir]
        nothing = run_command("status", "--json", *common, environment=environment)
        assert (nothing.returncode, json.loads(nothing.stdout)["is_running"]) == (1, False)

        up = run_command("up", "--workers", "2", *TINY, *common, environment=environment)
        assert up.returncode == 0, up.stderr
        assert os.stat(Path(run_dir) / "kvroute.json").st_mode & 0o077 == 0
        again = run_command("up", "--workers", "2", *TINY, *common, environment=environment)
        assert (again.returncode, "2 workers serve tiny: w0, w1" in again.stderr) == (0, True), again.stderr
        other = run_command("up", "--model", "smollm2", *common, environment=environment)
        assert (other.returncode, "--model: smollm2 cannot take the place of tiny" in other.stderr) == (2, True)
        misplaced = run_command("up", "--request-log", tmp_path / "log", *common, environment=environment)
        assert (misplaced.returncode, "--request-log: for routers" in misplaced.stderr) == (2, True)

        input_path = write_rows(tmp_path / "in.jsonl", batch_rows(40))
        for attempt in range(2):
            output_path = tmp_path / f"out-{attempt}.jsonl"
            batch = run_command("batch", input_path, "-o", output_path, *common, environment=environment)
            assert batch.returncode == 0, batch.stderr
            assert "using the 2 workers" in batch.stderr
            records = read_records(output_path)
            assert len(records) == 40
        usage = [record["response"]["body"]["usage"] for record in records]
        cached = [one["prompt_tokens_details"]["cached_tokens"] for one in usage]
        prompt_tokens = sum(one["prompt_tokens"] for one in usage)
        assert sum(cached) > 0.8 * prompt_tokens, (
            "the second batch finds what the first one left in the workers' caches"
        )

        status = run_command("status", "--json", *common, environment=environment)
        state = json.loads(status.stdout)
        assert (status.returncode, state["is_running"], state["store"]) == (0, True, "ok")
        assert [worker["state"] for worker in state["workers"]] == ["ready", "ready"]
        assert sum(worker["num_resident_blocks"] for worker in state["workers"]) > 0
        assert "w0" in run_command("status", *common, environment=environment).stdout

        assert len(tagged_processes(tag)) > 4
        down = run_command("down", *common, environment=environment)
        assert down.returncode == 0, down.stderr
        assert_no_process_left(tag)
        assert "nothing is running" in run_command("down", *common, environment=environment).stderr
        assert list(Path(run_dir).glob("kvroute.json")) == []


def test_up_that_is_killed_in_the_middle_is_undone_by_down(tmp_path: Path, tag: str) -> None:
    environment = tagged_environment(tag)
    with tempfile.TemporaryDirectory() as run_dir:
        process = start_command("up", "--workers", "1", *TINY, "--run-dir", run_dir, environment=environment)
        assert process.stderr is not None
        for line in process.stderr:
            if "starting 1 worker " in line:
                break
        process.kill()
        process.communicate()
        assert tagged_processes(tag)
        down = run_command("down", "--run-dir", run_dir, environment=environment)
        assert down.returncode == 0, down.stderr
        assert_no_process_left(tag)


def test_up_that_is_ended_in_the_middle_leaves_nothing(tmp_path: Path, tag: str) -> None:
    environment = tagged_environment(tag)
    process = start_command("up", "--workers", "1", *TINY, "--run-dir", tmp_path, environment=environment)
    assert process.stderr is not None
    for line in process.stderr:
        if "starting 1 worker " in line:
            break
    second = run_command("up", "--workers", "1", *TINY, "--run-dir", tmp_path, environment=environment)
    assert (second.returncode, "another `kvroute up`, `scale` or `drain` is at work" in second.stderr) == (2, True), (
        second.stderr
    )
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240.0)
    assert process.returncode == 130
    assert_no_process_left(tag)
    assert runfile.read_run(tmp_path) is None


def test_version_and_help_answer_without_starting_anything(tag: str) -> None:
    environment = tagged_environment(tag)
    version = run_command("--version", environment=environment)
    assert (version.returncode, version.stdout.split()[0]) == (0, "kvroute")
    for command in ("batch", "up", "down", "status", "demo"):
        assert run_command(command, "--help", environment=environment).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batch", "missing.jsonl", "-o", "out.jsonl", "--model", "tiny"], "missing.jsonl"),
        (["batch", "empty.jsonl", "-o", "out.jsonl", "--model", "tiny"], "empty"),
        (["batch", "twice.jsonl", "-o", "out.jsonl", "--model", "tiny"], "has the same custom_id"),
        (["batch", "rows.jsonl", "-o", "there.jsonl", "--model", "tiny"], "--resume"),
        (["batch", "rows.jsonl", "-o", "out.jsonl", "--model", "another"], "another"),
        (["batch", "rows.jsonl", "-o", "out.jsonl"], "--model"),
        (["batch", "rows.jsonl", "-o", "out.jsonl", "--model", "tiny", "--workers", "none"], "--workers"),
        (["batch", "rows.jsonl", "-o", "out.jsonl", "--model", "tiny", "--policy", "kv"], "--policy"),
        (["batch", "rows.jsonl", "-o", "out.jsonl", "--model", "tiny", "--engine-args", "{"], "--engine-args"),
        (["batch", "rows.jsonl", "-o", "out.jsonl", "--model", "tiny", "--config", "missing.yaml"], "missing.yaml"),
        (["batch", "rows.jsonl", "-o", "out.jsonl", "--model", "tiny", "--frob"], "--frob"),
        (["batch", "rows.jsonl", "-o", "out.jsonl", "--model", "tiny", "--ray-address", "127.0.0.1:1"], "refused"),
    ],
)
def test_bad_usage_stops_before_anything_starts(tmp_path: Path, tag: str, arguments: list[str], message: str) -> None:
    write_rows(tmp_path / "rows.jsonl", batch_rows(2))
    write_rows(tmp_path / "twice.jsonl", [*batch_rows(1), *batch_rows(1)])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "there.jsonl").touch()
    placed = [str(tmp_path / one) if one.endswith((".jsonl", ".yaml")) else one for one in arguments]
    run = run_command(*placed, environment=tagged_environment(tag))
    assert (run.returncode, run.stdout) == (2, ""), run.stderr
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_result_that_cannot_be_written_is_one_clear_error(tmp_path: Path, tag: str) -> None:
    command = [sys.executable, "-m", "router.cli", "status", "--json", "--run-dir", str(tmp_path)]
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            command, env=tagged_environment(tag), stdout=full, stderr=subprocess.PIPE, text=True, timeout=240.0
        )
    assert (run.returncode, run.stderr) == (
        1,
        "kvroute: error: standard output: cannot write: No space left on device\n",
    )


def test_deployment_in_a_ray_that_is_gone_goes_down_all_the_same(tmp_path: Path, tag: str) -> None:
    address = "127.0.0.1:1"
    runfile.write_run(
        tmp_path, runfile.Run("m", "00", {"model": "tiny", "ray_address": address}, "", address, ("w0",), is_ready=True)
    )
    down = run_command("down", "--run-dir", tmp_path, environment=tagged_environment(tag))
    assert (down.returncode, "w0 were not told to end" in down.stderr) == (0, True), down.stderr
    assert runfile.read_run(tmp_path) is None


def test_unknown_variable_of_ours_is_refused_by_name(tag: str) -> None:
    run = run_command("status", environment=tagged_environment(tag, KVROUTE_FROB="1"))
    assert run.returncode == 2
    assert "KVROUTE_FROB" in run.stderr
