"""`ray job submit` of batches: on a bare Ray and on the workers of `kvroute up`; what Ray makes of how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.batches import chat_row, read_records, write_rows
from tests.support.commands import assert_no_process_left, run_command, tagged_environment, tagged_processes
from tests.support.servers import free_port

pytest.importorskip("ray", reason="needs Ray")

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(3600)]

DEADLINE_S = 900.0
SIMULATED = ["--engine", "simulator", "--model", "tiny", "--workers", "2"]


@dataclass(frozen=True)
class RayCluster:
    """A Ray of somebody else that takes jobs; it asks for a token, which its clients have in the environment."""

    address: str
    dashboard_url: str
    environment: Mapping[str, str]

    def job(self, action: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run `ray job ACTION WORDS` against it."""
        # Ray colours its own lines even where nobody looks.
        return self._ray("job", action, "--address", self.dashboard_url, "--log-color", "false", *words)

    def actors(self) -> list[dict[str, Any]]:
        """Those that live, as `ray list actors` and Ray's dashboard show them."""
        listed = self._ray("list", "actors", "--address", self.dashboard_url, "--format", "json", "--detail")
        assert listed.returncode == 0, listed.stderr
        return [actor for actor in json.loads(listed.stdout) if actor["state"] == "ALIVE"]

    def _ray(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ray", *map(str, words)],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def run_job(self, name: str, folder: Path, *command: str | Path) -> tuple[str, str]:
        """Run a job to its end: its status and its logs, as Ray tells them later."""
        self.job("submit", "--submission-id", name, "--working-dir", folder, "--", *command)
        return self.status(name), self.logs(name)

    def status(self, name: str) -> str:
        """The word that Ray has for how the job does."""
        told = self.job("status", name)
        said = told.stdout + told.stderr
        return next(word for word in ("SUCCEEDED", "FAILED", "STOPPED", "RUNNING", "PENDING") if word in said.upper())

    def logs(self, name: str) -> str:
        """What the job itself has written so far."""
        return self.job("logs", name).stdout


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    tag, token = uuid.uuid4().hex, uuid.uuid4().hex * 2
    port, dashboard_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="kvj-", dir="/tmp") as folder:
        environment = tagged_environment(
            tag,
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=token,
            RAY_TMPDIR=folder,
            RAY_USAGE_STATS_ENABLED="0",
            PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        )
        command = ["ray", "start", "--head", "--num-cpus=4", f"--port={port}"]
        command += [f"--dashboard-port={dashboard_port}", f"--ray-client-server-port={free_port()}"]
        started = subprocess.run(
            [*command, "--dashboard-agent-listen-port=0"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        try:
            assert started.returncode == 0, started.stdout + started.stderr
            # Ray takes no loopback address for itself; it writes down the one that it has found.
            address = Path(folder, "ray", "ray_current_cluster").read_text()
            yield RayCluster(address, f"http://127.0.0.1:{dashboard_port}", environment)
        finally:
            left = tagged_processes(tag)
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=30.0)
            assert_no_process_left(tag)


def rows(num_rows: int, max_tokens: int = 8) -> list[dict[str, Any]]:
    return [
        chat_row(
            f"row-{index}", f"beginning {index % 4} " * 40 + f"question {index}", model="tiny", max_tokens=max_tokens
        )
        for index in range(num_rows)
    ]


def assert_readable(logs: str) -> None:
    """Whole lines without colours or bars, as somebody reads them in a browser."""
    assert "\x1b" not in logs
    assert "\r" not in logs
    assert "it/s" not in logs


def test_batch_on_a_bare_cluster_starts_its_own_workers_and_succeeds(ray_cluster: RayCluster, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [*rows(40), "no row"])
    output = tmp_path / "out.jsonl"
    batch = ["kvroute", "batch", "in.jsonl", *SIMULATED, "-o"]

    status, logs = ray_cluster.run_job("own-workers", tmp_path, *batch, output, "--progress")

    # A row that failed is no failure of the job: its record tells.
    assert status == "SUCCEEDED", logs
    assert "starting 2 workers with tiny" in logs
    assert "Running batch: 41/41 req" in logs
    assert "40 rows answered, 1 failed" in logs
    assert_readable(logs)
    assert len(read_records(output)) == 41

    # All that it had is free again: as many workers start once more.
    status, logs = ray_cluster.run_job("strict", tmp_path, *batch, tmp_path / "again.jsonl", "--strict")
    assert status == "FAILED", logs
    assert "40 rows answered, 1 failed" in logs


def test_batch_that_cannot_run_fails_its_job_and_says_why(ray_cluster: RayCluster, tmp_path: Path) -> None:
    batch = ["kvroute", "batch", "missing.jsonl", "-o", tmp_path / "out.jsonl", *SIMULATED]
    status, logs = ray_cluster.run_job("broken", tmp_path, *batch)
    assert status == "FAILED"
    assert "missing.jsonl" in logs
    assert_readable(logs)


def test_stopped_job_leaves_a_whole_output_that_a_next_one_completes(ray_cluster: RayCluster, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", rows(200, max_tokens=64))
    output = tmp_path / "out.jsonl"
    batch = ["kvroute", "batch", "in.jsonl", "-o", output, *SIMULATED]
    # One row after the other takes minutes, by the profile: the job is stopped in the middle on any machine.
    slowly = [*batch, "--max-in-flight", "1"]
    ray_cluster.job("submit", "--no-wait", "--submission-id", "halted", "--working-dir", tmp_path, "--", *slowly)
    deadline_s = time.monotonic() + DEADLINE_S
    while not output.exists() or output.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < deadline_s, ray_cluster.logs("halted")
        time.sleep(0.1)
    ray_cluster.job("stop", "halted")
    assert ray_cluster.status("halted") == "STOPPED"
    num_before = output.read_bytes().count(b"\n")
    assert 5 <= num_before < 200

    status, logs = ray_cluster.run_job("resumed", tmp_path, *batch, "--resume")

    assert status == "SUCCEEDED", logs
    records = read_records(output)
    assert Counter(record["custom_id"] for record in records) == Counter(f"row-{index}" for index in range(200))


def test_job_uses_the_workers_that_up_has_deployed(ray_cluster: RayCluster, tmp_path: Path) -> None:
    environment = dict(ray_cluster.environment)
    write_rows(tmp_path / "in.jsonl", rows(40))
    with tempfile.TemporaryDirectory() as run_dir:
        common = ["--run-dir", run_dir]
        up = run_command("up", *SIMULATED, "--ray-address", ray_cluster.address, *common, environment=environment)
        try:
            assert up.returncode == 0, up.stderr
            batch = ["kvroute", "batch", "in.jsonl", "-o", tmp_path / "out.jsonl", *common]
            status, logs = ray_cluster.run_job("on-up", tmp_path, *batch)
            assert status == "SUCCEEDED", logs
            assert "using the 2 workers of `kvroute up`" in logs
            assert "40 rows answered, 0 failed" in logs
            state = run_command("status", *common, environment=environment)
            assert state.stdout.count("ready") == 2, state.stdout
            actors = [actor for actor in ray_cluster.actors() if actor["class_name"] == "WorkerActor"]
            assert sorted(actor["name"].split("-")[0] for actor in actors) == ["kvroute:w0", "kvroute:w1"]
        finally:
            down = run_command("down", *common, environment=environment)
        assert down.returncode == 0, down.stderr
