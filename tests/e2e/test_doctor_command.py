"""The doctor on a real deployment: what is spoilt in the store is found by count, and mended from the engine."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from router import runfile
from shared.types import CacheScheme
from tests.support.batches import chat_row, write_rows
from tests.support.commands import assert_no_process_left, run_command, tagged_environment

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

TINY = ["--model", "tiny", "--kv-cache-blocks", "60", "--max-model-len", "1024", "--max-num-seqs", "4"]
TEXT = "word " * 100


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag for one test's processes; none of them may outlive it."""
    tag = uuid.uuid4().hex
    yield tag
    assert_no_process_left(tag)


def test_a_doctor_finds_what_is_wrong_in_the_store_and_has_it_mended(tmp_path: Path, tag: str) -> None:
    environment = tagged_environment(tag)
    with tempfile.TemporaryDirectory() as run_dir:

        def kvroute(*arguments: str | Path) -> Any:
            return run_command(*arguments, "--run-dir", run_dir, environment=environment)

        def doctor(*arguments: str) -> tuple[int, Any]:
            done = kvroute("doctor", "--json", *arguments)
            assert done.stdout, done.stderr
            return done.returncode, json.loads(done.stdout)

        nobody = kvroute("doctor")
        assert (nobody.returncode, "nothing is running" in nobody.stderr) == (2, True)

        # The workers' own audits are not to be quicker than the doctor.
        up = kvroute("up", "--workers", "1", "--audit-s", "36000", *TINY)
        assert up.returncode == 0, up.stderr
        row = chat_row("first", TEXT, model="tiny", max_tokens=4)
        batch = kvroute("batch", write_rows(tmp_path / "in.jsonl", [row]), "-o", tmp_path / "out.jsonl")
        assert batch.returncode == 0, batch.stderr

        code, state = doctor()
        assert (code, state["problems"]) == (0, [])
        (worker,) = state["workers"]
        num_blocks = worker["num_resident"]
        assert num_blocks >= 5
        assert (worker["num_in_store"], worker["num_in_mirror"]) == (num_blocks, num_blocks)
        assert (worker["state"], worker["parity"], worker["is_stuck"]) == ("ready", "ok", False)
        assert (worker["lag_s"], worker["is_mirrored"], worker["spoilt"]) == (0.0, True, [])
        assert 0 < worker["lease_left_s"] <= 5
        (server,) = state["store"]["servers"]
        assert (server["role"], server["may_evict"], state["store"]["leftovers"]) == ("master", False, [])

        messages = tmp_path / "messages.json"
        messages.write_text(json.dumps(row["body"]["messages"]))  # type: ignore[index]
        who = json.loads(kvroute("directory", "who", "--messages", messages, "--json").stdout)
        held = who["workers"][0]["num_blocks"]
        assert held == who["num_prompt_tokens"] // who["block_size"]
        size = json.loads(kvroute("directory", "size", "--json").stdout)
        assert size["total"]["num_entries"] == num_blocks
        assert size["total"]["num_bytes"] > 16 * num_blocks

        run = runfile.read_run(Path(run_dir))
        assert run is not None
        tag_of_worker = f"kvr:{{{CacheScheme('tiny', 64).namespace}:w0}}"
        with Redis.from_url(run.redis_url) as client:
            assert client.spop(f"{tag_of_worker}:blocks") is not None
            assert client.sadd(f"{tag_of_worker}:blocks", b"phantom of 16 by") == 1
            client.sadd(f"kvr:{{{CacheScheme('tiny', 64).namespace}:gone}}:blocks", b"left by nobody..")

        code, state = doctor()
        (worker,) = state["workers"]
        assert (code, worker["num_phantom"], worker["num_missing"]) == (1, 1, 1)
        assert state["store"]["leftovers"] == ["gone"]
        assert len(state["problems"]) == 3

        code, state = doctor("--repair")
        assert (code, state["problems"]) == (0, [])
        assert state["repaired"] == [
            "gone: dropped 1 key that nobody owned",
            f"w0: publishes its engine's {num_blocks} blocks anew",
        ]

        # What is of a wrong type hides a worker from routers until it is mended; a lease that is none of ours for ever.
        with Redis.from_url(run.redis_url) as client:
            client.set(f"{tag_of_worker}:blocks", "junk")
        code, state = doctor("--repair")
        assert (code, state["problems"]) == (0, [])
        assert state["repaired"] == [f"w0: publishes its engine's {num_blocks} blocks anew"]
        with Redis.from_url(run.redis_url) as client:
            client.hset(f"{tag_of_worker}:meta", "info", "junk")
        code, state = doctor()
        assert (code, state["workers"][0]["spoilt"]) == (1, ["meta"])
        code, state = doctor("--repair")
        assert (code, state["problems"], state["workers"][0]["num_in_store"]) == (0, [], num_blocks)

        healthy = kvroute("doctor")
        assert healthy.returncode == 0, healthy.stdout
        assert healthy.stdout.splitlines()[-1] == "all is well"
        who_now = kvroute("directory", "who", "--messages", messages)
        assert f"w0      {held}" in who_now.stdout
        down = kvroute("down")
        assert down.returncode == 0, down.stderr
