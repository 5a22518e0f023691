"""A dataset of Ray Data that is mapped over two simulated workers: Ray, store, router and sockets are real."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from tests.support.commands import assert_no_process_left, run_command, tagged_environment
from worker.engines.profiles import LatencyProfile

pytest.importorskip("pyarrow")
pytest.importorskip("pandas")

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

PROFILE = LatencyProfile("fast", 1e-3, 1e-6, 0.0, 1e-6, 1e-9, kv_capacity_tokens=1 << 15)


def test_dataset_is_answered_row_by_row_from_the_caches_of_the_workers(tmp_path: Path) -> None:
    from tests.support.ray_data_child import NUM_BEGINNINGS, NUM_ROWS, rows

    tag = uuid.uuid4().hex
    environment = tagged_environment(tag)
    (tmp_path / "fast.yaml").write_text(PROFILE.to_yaml())
    output = tmp_path / "out.json"
    with tempfile.TemporaryDirectory() as run_dir:
        fleet = ["--workers", "2", "--model", "tiny", "--engine", "simulator", "--profile", str(tmp_path / "fast.yaml")]
        try:
            up = run_command("up", *fleet, "--run-dir", run_dir, environment=environment)
            assert up.returncode == 0, up.stderr
            child = [sys.executable, "-m", "tests.support.ray_data_child", run_dir, str(output)]
            ended = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=300, check=False)
            assert ended.returncode == 0, ended.stderr
        finally:
            run_command("down", "--run-dir", run_dir, environment=environment)
            assert_no_process_left(tag)
    answered = {row["number"]: row for row in json.loads(output.read_text())}
    assert [answered[row["number"]]["text"] for row in rows()] == [row["text"] for row in rows()]
    assert len(answered) == NUM_ROWS
    failed = answered.pop(100)
    assert failed["error"].startswith("context_length_exceeded: ")
    assert (failed["answer"], failed["prompt_tokens"]) == (None, None)
    assert {row["error"] for row in answered.values()} == {None}
    assert {row["completion_tokens"] for row in answered.values()} == {4}
    assert all(isinstance(row["answer"], str) for row in answered.values())
    num_prompt_tokens = sum(row["prompt_tokens"] for row in answered.values())
    assert sum(row["cached_tokens"] for row in answered.values()) > num_prompt_tokens / 2
    assert len({row["answer"] for row in answered.values()}) > NUM_BEGINNINGS
