"""The demo as users run it, but for a third of its rows: real answers, and caches used as well as can be."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from tests.support.batches import read_records
from tests.support.commands import assert_no_process_left, run_command, tagged_environment

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(1900)]

NUM_ROWS = 48
"""All but one of the system prompts come at least three times among them."""


def test_demo_answers_everything_and_cost_finds_what_the_caches_hold(tmp_path: Path) -> None:
    tag = uuid.uuid4().hex
    demo = run_command(
        *(str(NUM_ROWS), "demo", "--json", "-o", tmp_path),
        environment=tagged_environment(tag),
        module="tests.support.short_demo",
        timeout_s=1800.0,
    )
    assert_no_process_left(tag)
    assert demo.returncode == 0, demo.stderr
    (line,) = demo.stdout.splitlines()
    figures = json.loads(line)
    cost, round_robin = figures["cost"], figures["round_robin"]
    assert cost["requests"] == round_robin["requests"] == NUM_ROWS
    assert (cost["failed"], round_robin["failed"]) == (0, 0)
    assert cost["prompt_tokens"] == round_robin["prompt_tokens"]
    # Counted in tokens and not in seconds, so that a slow machine changes nothing.
    assert cost["cached_tokens"] >= 0.9 * cost["possible_cached_tokens"]
    assert cost["cached_tokens"] > 1.2 * round_robin["cached_tokens"]
    for policy in ("cost", "round_robin"):
        records = read_records(tmp_path / f"{policy}.jsonl")
        assert len({record["custom_id"] for record in records}) == cost["requests"]
        words = [record["response"]["body"]["choices"][0]["message"]["content"] for record in records]
        assert len(set(words)) > cost["requests"] / 2
