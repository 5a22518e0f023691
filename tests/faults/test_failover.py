"""Real workers that die, freeze or go with their machine under 200 streamed requests: every answer stays whole.

One deployment for all of it: two nodes of Ray on loopback, three workers with the tiny model in float32, in which a
greedy answer does not depend on where it is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from router import cluster, deployment, launch
from router.service import Router
from router.serving import Serving
from shared.config import Settings
from shared.types import WorkerId
from tests.support.commands import assert_no_process_left, tagged_environment, tagged_processes
from tests.support.servers import ServerProcess, find_redis_server
from tests.support.streams import Streamed, assert_whole, streams

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.redis,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
]

NUM_REQUESTS, NUM_TOKENS = 200, 64
PATIENCE_S = 300.0
QUIET_S = 0.5
"""What a stopped worker had sent has arrived by then, or the next try finds a request under way."""
FREEZE_S = 20.0
"""Longer than a connection may be silent and may then take to come back; a slow machine freezes it until it is lost."""


@dataclass
class Ground:
    """The deployment, the answers of an undisturbed run, and the longest waits so far."""

    run_dir: Path
    serving: Serving
    node_tag: str
    """Of all processes on the second node."""
    expected: list[list[int]] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    @property
    def router(self) -> Router:
        return self.serving.router

    def connected(self) -> list[WorkerId]:
        return list(self.router.fleet.loads().workers)

    async def processes(self, worker: WorkerId) -> list[psutil.Process]:
        """The worker's actor and, after it, its engine with all that belongs to it."""
        actor = cluster.find_actor(launch.actor_name(worker))
        assert actor is not None
        pid = await cluster.call(actor.pid, timeout_s=PATIENCE_S, what=worker)
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]

    async def on_node(self) -> WorkerId:
        """The worker that lives on the second node."""
        pids = {process.pid for process in tagged_processes(self.node_tag)}
        for worker in self.connected():
            if (await self.processes(worker))[0].pid in pids:
                return worker
        raise AssertionError("no worker is on the second node")

    def note(self, fault: str, asked: list[Streamed]) -> None:
        num_moved = sum(bool(one.trace.failed_workers) for one in asked)
        num_continued = sum(one.trace.num_continuations for one in asked)
        slowest_s = max(one.longest_wait_s for one in asked)
        self.waits.append(f"{fault:<24} {num_moved:>8} {num_continued:>10} {slowest_s:>14.2f} s")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ground(request: pytest.FixtureRequest) -> AsyncIterator[Ground]:
    find_redis_server()
    head_tag, node_tag = uuid.uuid4().hex, uuid.uuid4().hex
    with ServerProcess() as store, tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        log_path = Path(folder) / "ray.log"
        try:
            head, address = cluster.start_head(ray_environment(head_tag), log_path, num_cpus=2)
            await cluster.wait_for_head(head, address, log_path, timeout_s=PATIENCE_S)
            node = start_node(address, node_tag)
            cluster.connect_ray(address, num_local_cpus=0, environment={})
            await until(lambda: len(cluster.nodes()) == 2)
            cluster.leave_ray()
            settings = Settings(
                model="tiny",
                workers=3,
                dtype="float32",
                max_num_seqs=8,
                kv_cache_blocks=300,
                max_model_len=4096,
                redis_url=store.url,
                ray_address=address,
                lease_s=10.0,
                heartbeat_s=0.5,
            )
            run = await deployment.bring_up(settings, run_dir, lambda line: None)
            cluster.connect_ray(address, num_local_cpus=0, environment={})
            async with launch.attached(run, settings, lambda line: None) as serving:
                ground = Ground(run_dir, serving, node_tag)
                undisturbed = streams("undisturbed", NUM_REQUESTS, NUM_TOKENS)
                await asyncio.gather(*(one.read(serving.router) for one in undisturbed))
                ground.expected = [one.token_ids for one in undisturbed]
                ground.note("none", undisturbed)
                yield ground
            tell(request, ground.waits)
        finally:
            cluster.leave_ray()
            for process in [*tagged_processes(node_tag), *tagged_processes(head_tag)]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            with contextlib.suppress(UnboundLocalError):
                head.wait()
                node.wait()
            assert_no_process_left(head_tag)
            assert_no_process_left(node_tag)


def ray_environment(tag: str) -> dict[str, str]:
    """Of a Ray that asks no token of its clients: this process has long loaded Ray, which reads it only then."""
    return tagged_environment(tag, RAY_AUTH_MODE="disabled")


def start_node(address: str, tag: str) -> subprocess.Popen[bytes]:
    """A second node of the Ray at `address`, with room for one worker."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--block"]
    command += ["--node-ip-address=127.0.0.1", "--num-cpus=1", f"--object-store-memory={100 << 20}"]
    return subprocess.Popen(
        command,
        env=ray_environment(tag),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def tell(request: pytest.FixtureRequest, waits: list[str]) -> None:
    """Put the table into the test report, whether or not anything failed."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    if capture is None or reporter is None:
        return
    with capture.global_and_fixture_disabled():
        reporter.write_line("")
        reporter.write_line(f"{'fault':<24} {'requests':>8} {'continued':>10} {'slowest waited':>16}")
        for line in waits:
            reporter.write_line(line)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


def send(processes: list[psutil.Process], sent: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(sent)


async def catch(asked: list[Streamed], worker_to_processes: dict[WorkerId, list[psutil.Process]]) -> WorkerId:
    """Stop a worker in the middle of an answer: only of a stopped one is it sure that it cannot reach the end first.

    Its engine first, so that what that has computed already is told before the rest stops.
    """
    async with asyncio.timeout(PATIENCE_S):
        while True:
            assert any(one.finish is None for one in asked), "nobody was caught before all was answered"
            for worker, processes in worker_to_processes.items():
                if not any(one.is_under_way_on(worker) for one in asked):
                    continue
                send(processes[1:], signal.SIGSTOP)
                await asyncio.sleep(QUIET_S)
                if any(one.is_under_way_on(worker) for one in asked):
                    send(processes[:1], signal.SIGSTOP)
                    return worker
                send(processes[1:], signal.SIGCONT)
            await asyncio.sleep(0.001)


def engine_of(processes: list[psutil.Process]) -> psutil.Process:
    return next(
        process
        for process in processes[1:]
        if "EngineCore" in " ".join(process.cmdline()) or "spawn_main" in " ".join(process.cmdline())
    )


async def disturbed(ground: Ground, fault: str, workers: list[WorkerId]) -> WorkerId:
    """Ask everything, and let the fault happen to one of the workers while it answers. Every answer is whole."""
    worker_to_processes = {worker: await ground.processes(worker) for worker in workers}
    asked = streams(fault, NUM_REQUESTS, NUM_TOKENS)
    reading = [asyncio.create_task(one.read(ground.router)) for one in asked]
    try:
        worker = await catch(asked, worker_to_processes)
        processes = worker_to_processes[worker]
        if fault == "engine killed":
            engine_of(processes).kill()
            send(processes, signal.SIGCONT)
        elif fault == "actor killed":
            processes[0].kill()
            send(processes, signal.SIGCONT)
        elif fault == "worker frozen":
            await asyncio.sleep(FREEZE_S)
            await until(lambda: any(worker in one.trace.failed_workers for one in asked))
            send(processes, signal.SIGCONT)
        else:
            send(tagged_processes(ground.node_tag), signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*reading)
    finally:
        for processes in worker_to_processes.values():
            send(processes, signal.SIGCONT)
        for task in reading:
            task.cancel()
    ground.note(fault, asked)
    assert_whole(asked, ground.expected)
    assert any(one.trace.num_continuations for one in asked if worker in one.trace.failed_workers)
    assert len(ground.router.queue) == ground.router.fleet.num_bookings == 0
    return worker


async def test_undisturbed_answers_are_worth_comparing(ground: Ground) -> None:
    assert min(len(set(token_ids)) for token_ids in ground.expected) >= 16
    assert len({tuple(token_ids) for token_ids in ground.expected}) == NUM_REQUESTS
    assert len(ground.connected()) == 3


@pytest.mark.parametrize("fault", ["engine killed", "actor killed", "worker frozen"])
async def test_fault_of_one_worker_is_seen_by_no_reader(ground: Ground, fault: str) -> None:
    await until(lambda: len(ground.connected()) >= 2)
    on_node = await ground.on_node()
    await disturbed(ground, fault, [worker for worker in ground.connected() if worker != on_node])


async def test_killed_router_breaks_its_own_requests_only(ground: Ground) -> None:
    await until(lambda: len(ground.connected()) >= 2)
    command = [sys.executable, "-m", "tests.support.router_child", str(ground.run_dir), "40", "1000"]
    child = await asyncio.create_subprocess_exec(
        *command, env=tagged_environment("child"), stdout=asyncio.subprocess.PIPE, limit=1 << 20
    )
    assert child.stdout is not None
    try:
        token_ids: dict[int, list[int]] = {}
        asked = streams("other router", NUM_REQUESTS, NUM_TOKENS)
        async with asyncio.timeout(PATIENCE_S):
            while len(token_ids) < 8:
                number, fresh = json.loads(await child.stdout.readline())
                token_ids.setdefault(number, []).extend(fresh)
            reading = [asyncio.create_task(one.read(ground.router)) for one in asked]
            while sum(one.finish is not None for one in asked) < 20:
                number, fresh = json.loads(await child.stdout.readline())
                token_ids.setdefault(number, []).extend(fresh)
        child.kill()
        for line in (await child.stdout.read()).splitlines(keepends=True):
            if line.endswith(b"\n"):
                number, fresh = json.loads(line)
                token_ids.setdefault(number, []).extend(fresh)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*reading)
    ground.note("other router killed", asked)
    assert_whole(asked, ground.expected)
    assert [one.trace.failed_workers for one in asked] == [[]] * NUM_REQUESTS
    for number, told in token_ids.items():
        assert told[:NUM_TOKENS] == ground.expected[number][: len(told)]
    # What the dead router had under way is freed: nothing runs any more.
    await until(lambda: not ground.router.fleet.loads().num_requests.any())


async def test_lost_node_is_seen_by_no_reader(ground: Ground) -> None:
    await until(lambda: len(ground.connected()) >= 2)
    lost = await disturbed(ground, "node lost", [await ground.on_node()])
    assert lost not in ground.connected()
