"""A deployment that grows and shrinks under requests: none is lost, and no answer is another one.

Its workers are simulated, and answer by the prompt alone; `test_upgrade` exchanges real ones under requests, too.
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.batches import chat_row, write_rows
from tests.support.commands import assert_no_process_left, tagged_environment
from tests.support.live_deployment import LiveDeployment, is_asked, until
from worker.engines.profiles import LatencyProfile

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

PROFILE = LatencyProfile("steady", 5e-3, 1e-6, 0.0, 1e-6, 1e-9, kv_capacity_tokens=1 << 15)
SIMULATED = ["--model", "tiny", "--engine", "simulator", "--max-num-seqs", "4"]
SIMULATED += ["--kv-cache-blocks", "200", "--max-model-len", "2048"]


@pytest_asyncio.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[LiveDeployment]:
    tag = uuid.uuid4().hex
    profile = tmp_path / "steady.yaml"
    profile.write_text(PROFILE.to_yaml())
    with tempfile.TemporaryDirectory() as run_dir:
        deployment = LiveDeployment(Path(run_dir), tagged_environment(tag))
        try:
            code, told = await deployment.run("up", "--workers", "1", *SIMULATED, "--profile", profile)
            assert code == 0, told
            yield deployment
        finally:
            await deployment.run("down")
            assert_no_process_left(tag)


async def test_workers_come_and_go_under_a_router_that_loses_nothing(
    tmp_path: Path, deployment: LiveDeployment
) -> None:
    async with deployment.under_load() as asked:
        code, told = await deployment.run("scale", "999")
        assert (code, "too many workers: 999 workers need 1 CPU each" in told) == (2, True), told

        code, told = await deployment.run("scale", "0")
        assert (code, "scale 0: not a number of workers from 1 to 4096" in told) == (2, True), told
        code, told = await deployment.run("drain", "w0")
        assert (code, "without w0 no worker is left that takes requests" in told) == (2, True), told

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
    deployment: LiveDeployment,
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
