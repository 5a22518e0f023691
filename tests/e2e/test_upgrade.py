"""Deployments that change under requests: `kvroute up` again replaces workers, and nobody loses anything."""

from __future__ import annotations

import asyncio
import re
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis

from router import cluster, runfile
from tests.support.batches import chat_row, write_rows
from tests.support.commands import assert_no_process_left, tagged_environment
from tests.support.live_deployment import PATIENCE_S, LiveDeployment, is_asked, until
from worker.engines.profiles import LatencyProfile

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

PROFILE = LatencyProfile("fast", 1e-3, 1e-6, 0.0, 1e-6, 1e-9, kv_capacity_tokens=1 << 15)
SIZES = ["--model", "tiny", "--max-num-seqs", "4", "--kv-cache-blocks", "200", "--max-model-len", "2048"]


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag for one test's processes; none of them may outlive it."""
    tag = uuid.uuid4().hex
    yield tag
    assert_no_process_left(tag)


@pytest.fixture
def simulated(tmp_path: Path) -> list[str]:
    """Flags of workers that take a millisecond for a step."""
    (tmp_path / "fast.yaml").write_text(PROFILE.to_yaml())
    return [*SIZES, "--engine", "simulator", "--profile", str(tmp_path / "fast.yaml")]


@asynccontextmanager
async def up(tag: str, *arguments: str) -> AsyncIterator[LiveDeployment]:
    with tempfile.TemporaryDirectory() as run_dir:
        variables = {"RAY_AUTH_MODE": "disabled"} if "--address" in arguments else {}
        deployment = LiveDeployment(Path(run_dir), tagged_environment(tag, **variables))
        try:
            code, told = await deployment.run("up", *arguments)
            assert code == 0, told
            yield deployment
        finally:
            code, told = await deployment.run("down")
            assert code == 0, told


def keys_of(run: runfile.Run, worker: str) -> list[bytes]:
    """What the store holds of a worker, but for what expires: routers' looks at it, and its last word on its pins."""
    with Redis.from_url(run.redis_url) as client:
        keys = list(client.scan_iter(match=f"*:{worker}}}*"))
        return [key for key in keys if not re.search(rb":(canary:.*|pins)$", key) or client.pttl(key) == -1]


def assert_gone(deployment: LiveDeployment, *workers: str) -> None:
    run = runfile.running(deployment.run_dir)
    assert [key for worker in workers for key in keys_of(run, worker)] == []
    assert all(keys_of(run, worker) for worker in run.workers)


async def test_changed_settings_take_new_workers_while_requests_flow(
    tmp_path: Path, tag: str, simulated: list[str]
) -> None:
    async with up(tag, "--workers", "2", *simulated) as deployment:
        (tmp_path / "prompt.txt").write_text("word " * 300)
        for number in ("1", "all"):
            code, told = await deployment.run(
                "warmup", f"on-{number}", "--file", tmp_path / "prompt.txt", "--workers", number
            )
            assert code == 0, told
        rows = [chat_row(f"row-{index}", f"question {index}", model="tiny", max_tokens=64) for index in range(500)]
        input_path, output_path = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
        async with deployment.under_load() as asked:
            await until(lambda: is_asked(asked, "w0", 0) and is_asked(asked, "w1", 0))
            batch = await deployment.start_until("using the 2 workers", "batch", input_path, "-o", output_path)
            code, told = await deployment.run("up", "--max-num-seqs", "8", "--eviction", "lru")
            assert code == 0, told
            assert "changing --max-num-seqs: 4 -> 8" in told
            assert "changing --eviction: adaptive -> lru" in told
            assert "--kv-cache-blocks" not in told
            steps = ["successor starts beside it", "worker w2 is ready", "worker w0 has left", "worker w3 is ready"]
            places = [told.index(step) for step in [*steps, "worker w1 has left", "2 workers serve tiny: w2, w3"]]
            assert places == sorted(places)
            num_asked = len(asked)
            await until(lambda: is_asked(asked, "w2", num_asked) and is_asked(asked, "w3", num_asked))
            _, told = await asyncio.to_thread(batch.communicate)
            assert (batch.returncode, "500 rows answered, 0 failed" in told) == (0, True), told

        assert_gone(deployment, "w0", "w1")
        status = await deployment.status()
        assert [(one["worker"], one["state"], one["eviction"]) for one in status["workers"]] == [
            ("w2", "ready", "lru"),
            ("w3", "ready", "lru"),
        ]
        pins = await deployment.show("pins")
        assert {pin["name"]: [(row["worker"], row["state"]) for row in pin["workers"]] for pin in pins["pins"]} == {
            "on-1": [("w2", "pinned")],
            "on-all": [("w2", "pinned"), ("w3", "pinned")],
        }

        before = runfile.running(deployment.run_dir)
        code, told = await deployment.run("up", "--workers", "2", "--max-num-seqs", "8")
        assert (code, "changing" in told, "2 workers serve tiny: w2, w3" in told) == (0, False, True), told
        assert runfile.running(deployment.run_dir) == before


async def test_worker_that_does_not_start_stops_the_change_and_the_next_command_goes_on_or_back(
    tag: str, simulated: list[str]
) -> None:
    async with up(tag, "--workers", "2", *simulated) as deployment:
        before = runfile.running(deployment.run_dir)
        async with deployment.under_load() as asked:
            for _ in range(2):
                code, told = await deployment.run("up", "--pin-budget-blocks", "199")
                assert code == 1, told
                assert "--pin-budget-blocks: 199 of 200 blocks leave no room" in told
                assert "the change stops here, and w0, w1 serve on" in told
                assert runfile.running(deployment.run_dir) == before
            assert await deployment.states() == {"w0": "ready", "w1": "ready"}

            changing = await deployment.start_until("worker w0 has left", "up", "--pin-budget-blocks", "50")
            changing.kill()
            await asyncio.to_thread(changing.communicate)
            halfway = runfile.running(deployment.run_dir)
            assert {"w1", "w2"} <= set(halfway.workers)
            # It may have been killed before it could write down that w0 has left.
            assert {"w1"} <= set((await deployment.status())["outdated"]) <= {"w0", "w1"}

            code, told = await deployment.run("up", "--pin-budget-blocks", "50", "--workers", "3")
            assert code == 0, told
            assert "worker w2 " not in told, "a worker that is made as wanted is not replaced"
            states = await deployment.states()
            assert (len(states), set(states.values()), {"w0", "w1"} & states.keys()) == (3, {"ready"}, set())
            num_asked = len(asked)
            await until(lambda: all(is_asked(asked, worker, num_asked) for worker in states))
        assert_gone(deployment, "w0", "w1")


@asynccontextmanager
async def ray_cluster(tag: str, log_path: Path, num_cpus: int) -> AsyncIterator[str]:
    """A Ray of somebody else's, with room for so many workers; its address."""
    # A token that the user of this machine happens to have is none of the tests' business.
    environment = tagged_environment(tag, RAY_AUTH_MODE="disabled")
    head, address = cluster.start_head(environment, log_path, num_cpus=num_cpus)
    try:
        await cluster.wait_for_head(head, address, log_path, timeout_s=PATIENCE_S)
        yield address
    finally:
        head.terminate()
        await asyncio.to_thread(head.wait, 60.0)


async def test_two_deployments_share_a_ray_and_each_changes_by_itself_as_far_as_there_is_room(
    tmp_path: Path, tag: str, simulated: list[str]
) -> None:
    async with (
        ray_cluster(tag, tmp_path / "ray.log", num_cpus=3) as address,
        up(tag, "--address", address, *simulated) as other,
    ):
        async with up(tag, "--workers", "2", "--address", address, *simulated) as deployment:
            ((theirs,), ours) = (runfile.running(one.run_dir).workers for one in (other, deployment))
            assert len({theirs.partition("-")[2], *(worker.partition("-")[2] for worker in ours)}) == 2

            code, told = await other.run("up", "--eviction", "lru")
            assert (code, f"worker {theirs} is the only one that serves" in told) == (2, True), told

            async with deployment.under_load() as asked:
                await until(lambda: all(is_asked(asked, worker, 0) for worker in ours))
                code, told = await deployment.run("up", "--eviction", "lru")
                assert (code, told.count("it leaves first, since the cluster has no room for two")) == (0, 2), told
                states = await deployment.states()
                assert (len(states), set(states.values()), states.keys() & {*ours}) == (2, {"ready"}, set())
                num_asked = len(asked)
                await until(lambda: all(is_asked(asked, worker, num_asked) for worker in states))
            assert_gone(deployment, *ours)
            assert await other.states() == {theirs: "ready"}
        async with other.under_load() as asked:
            await until(lambda: is_asked(asked, theirs, 0))
        # What the first one has left is room for a successor.
        code, told = await other.run("up", "--eviction", "lru")
        assert (code, f"worker {theirs} is replaced: its successor starts beside it" in told) == (0, True), told


async def test_auto_leads_to_the_ray_that_runs_and_is_written_down_as_an_address(
    tmp_path: Path, tag: str, simulated: list[str]
) -> None:
    async with ray_cluster(tag, tmp_path / "ray.log", num_cpus=1) as address:
        with tempfile.TemporaryDirectory() as run_dir:
            there = LiveDeployment(
                Path(run_dir), tagged_environment(tag, RAY_AUTH_MODE="disabled", RAY_ADDRESS=address)
            )
            code, told = await there.run("up", "--address", "auto", *simulated)
            assert (code, f"Ray at {address}" in told) == (0, True), told
            elsewhere = LiveDeployment(Path(run_dir), tagged_environment(tag, RAY_AUTH_MODE="disabled"))
            assert list((await elsewhere.states()).values()) == ["ready"]
            code, told = await elsewhere.run("down")
            assert (code, "stopped" in told) == (0, True), told


@pytest.mark.vllm
async def test_real_engines_change_their_options_without_a_token_lost(tag: str) -> None:
    async with up(tag, "--workers", "1", "--dtype", "float32", *SIZES) as deployment:
        async with deployment.under_load() as asked:
            await until(lambda: is_asked(asked, "w0", 0))
            code, told = await deployment.run(
                "up", "--engine-args", '{"max_num_batched_tokens": 512}', "--max-num-seqs", "6"
            )
            assert (code, "1 workers serve tiny: w1" in told) == (0, True), told
            assert 'changing --engine-args: {} -> {"max_num_batched_tokens": 512}' in told
            num_asked = len(asked)
            await until(lambda: is_asked(asked, "w1", num_asked))
        assert_gone(deployment, "w0")
