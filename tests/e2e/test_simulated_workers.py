"""Whole deployments of simulated workers: Ray, store, publishers, sockets and router are real, the model is not."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.batches import chat_row, read_records, write_rows
from tests.support.commands import assert_no_process_left, run_command, tagged_environment
from worker.engines.profiles import LatencyProfile

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

PROFILE = LatencyProfile("fast", 1e-3, 1e-6, 0.0, 1e-6, 1e-9, kv_capacity_tokens=1 << 15)


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag for one test's processes; none of them may outlive it."""
    tag = uuid.uuid4().hex
    yield tag
    assert_no_process_left(tag)


def test_a_batch_is_answered_by_simulated_workers_from_their_caches(tmp_path: Path, tag: str) -> None:
    environment = tagged_environment(tag)
    (tmp_path / "fast.yaml").write_text(PROFILE.to_yaml())
    beginnings = [f"beginning {group} " * 60 for group in range(3)]
    rows = [
        chat_row(f"row-{index}", f"{beginnings[index % 3]} question {index}", model="tiny", max_tokens=12)
        for index in range(60)
    ]
    input_path, texts = write_rows(tmp_path / "in.jsonl", rows), []
    for run in ("one", "two"):
        output_path = tmp_path / f"{run}.jsonl"
        command = ["batch", input_path, "-o", output_path, "--workers", "3", "--model", "tiny"]
        ended = run_command(
            *command, "--engine", "simulator", "--profile", tmp_path / "fast.yaml", environment=environment
        )
        assert ended.returncode == 0, ended.stderr
        assert "simulator fast, 512 blocks of 64 tokens" in ended.stderr
        assert "60 rows answered, 0 failed" in ended.stderr
        bodies = {record["custom_id"]: record["response"]["body"] for record in read_records(output_path)}
        assert sum(body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies.values()) > 0
        texts.append({name: body["choices"][0]["message"]["content"] for name, body in bodies.items()})
    # What is answered follows from the prompt, whichever worker it went to.
    assert texts[0] == texts[1]


def test_a_profile_that_is_none_is_refused_before_anything_is_started(tmp_path: Path, tag: str) -> None:
    input_path = write_rows(tmp_path / "in.jsonl", [chat_row("row", "Hi", model="tiny")])
    ended = run_command(
        "batch", input_path, "-o", tmp_path / "out.jsonl", "--model", "tiny", "--engine", "simulator",
        "--profile", "13b-b200", environment=tagged_environment(tag),
    )  # fmt: skip
    assert ended.returncode == 2
    assert "--profile: 13b-b200: neither a profile (13b-a100, 13b-h100) nor a file" in ended.stderr
    assert "starting Ray" not in ended.stderr


PROGRAM = """
import asyncio, json, sys
from router.batch import run_batch
from shared.config import Settings

def rows():
    for number in range(20):
        body = {"model": "tiny", "prompt": "beginning " * 100 + str(number), "max_tokens": 4}
        yield {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/completions", "body": body}

settings = Settings(model="tiny", workers=2, engine="simulator", profile=sys.argv[1])
report = asyncio.run(run_batch(rows(), sys.argv[2], settings))
print(json.dumps(report.as_summary()))
"""


def test_a_program_has_rows_answered_by_workers_of_its_own(tmp_path: Path, tag: str) -> None:
    (tmp_path / "fast.yaml").write_text(PROFILE.to_yaml())
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "fast.yaml"), str(tmp_path / "out.jsonl")]
    ended = subprocess.run(
        program, env=tagged_environment(tag), capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert (summary["status"], summary["num_ok"]) == ("completed", 20)
    records = read_records(tmp_path / "out.jsonl")
    assert {record["custom_id"] for record in records} == {f"row-{number}" for number in range(20)}
