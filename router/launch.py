"""The composition root: starts store, Ray and workers, joins them to a router, and ends what it started.

The one place that knows both rooms.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from router import cluster, runfile
from router.cluster import WorkerResources
from router.policies import make_policy
from router.service import Router
from router.tokenizer import Tokenizer
from shared.config import Settings
from shared.directory import connect_directory
from shared.directory.base import Directory, WorkerRecord
from shared.directory.embedded import EmbeddedStore, stop_detached
from shared.errors import ConfigError, DirectoryUnavailable, EngineError, NoWorker
from shared.hashing import parity_key
from shared.messages import decode_record
from shared.telemetry import Metrics
from shared.transport.base import OnChange, WorkerClient
from shared.transport.client import connect_worker
from shared.types import CacheScheme, RouterId, WorkerId, WorkerInfo
from worker.actor import WorkerActor
from worker.engines.demo_model import prepare_model
from worker.process import WorkerOptions

logger = logging.getLogger(__name__)

Say = Callable[[str], None]
"""Tells the user what is going on, one line at a time."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A router over workers that are ready, and what a front end needs to talk to it."""

    settings: Settings
    router: Router
    tokenizer: Tokenizer
    scheme: CacheScheme
    workers: tuple[WorkerInfo, ...]
    actors: Mapping[WorkerId, Any]
    """Ray handles of workers that were started here; empty when attached to a running deployment."""
    store: EmbeddedStore | None
    """The store that was started here; `None` where one was given."""

    @property
    def max_model_len_tokens(self) -> int:
        """The shortest context among the workers: what every one of them can take."""
        return min(info.max_model_len_tokens for info in self.workers)


@contextlib.asynccontextmanager
async def launched(settings: Settings, say: Say) -> AsyncIterator[Serving]:
    """Start everything that `settings` does not name, serve, and stop it again however this ends."""
    model_folder = await _prepare_model(settings, say)
    marker = runfile.new_marker()
    async with contextlib.AsyncExitStack() as stack:
        # Last of all: what a frozen worker or a killed Ray has left.
        stack.callback(runfile.end_processes, marker)
        store = None
        if not settings.redis_url:
            # Started from the main thread: the server dies with the thread that started it.
            store = stack.enter_context(EmbeddedStore(environment=_environment(marker)))
        redis_url = store.url if store is not None else settings.redis_url
        say("starting Ray" if not settings.ray_address else f"joining Ray at {settings.ray_address}")
        cluster.connect_ray(
            settings.ray_address, num_local_cpus=settings.workers, environment=_worker_environment(marker)
        )
        stack.callback(cluster.leave_ray)
        secret = secrets.token_bytes(32)
        workers = await _start_workers(settings, redis_url, secret, say, stack, is_detached=False)
        infos = tuple(info for info, _ in workers.values())
        actors = {worker: actor for worker, (_, actor) in workers.items()}
        yield await _enter_router(stack, settings, redis_url, secret, model_folder, infos, actors, store)


@contextlib.asynccontextmanager
async def attached(run: runfile.Run, settings: Settings, say: Say) -> AsyncIterator[Serving]:
    """Serve over the workers of a running `kvroute up`."""
    model_folder = await _prepare_model(settings, say)
    async with contextlib.AsyncExitStack() as stack:
        records = await live_workers(run, settings)
        infos = tuple(record.info for record in records)
        if not infos:
            raise NoWorker("`kvroute up` is running, but none of its workers is alive; see `kvroute status`")
        secret = bytes.fromhex(run.secret)
        yield await _enter_router(stack, settings, run.redis_url, secret, model_folder, infos, {}, None)


async def bring_up(settings: Settings, run_dir: Path, say: Say) -> runfile.Run:
    """Start a deployment that outlives this process; on failure nothing of it is left.

    Raises:
        ConfigError: one is running already.
    """
    with runfile.starting(run_dir):
        known = runfile.read_run(run_dir)
        if known is not None and runfile.processes_of(known.marker):
            raise ConfigError(f"a deployment is running already ({known.settings.get('model')}); see `kvroute status`")
        run = runfile.Run(
            runfile.new_marker(),
            secrets.token_hex(32),
            settings.model_dump(mode="json", exclude_unset=True),
            redis_url=settings.redis_url,
        )
        runfile.write_run(run_dir, run)
        try:
            async with contextlib.AsyncExitStack() as stack:
                return await _bring_up(settings, run_dir, run, say, stack)
        except BaseException:
            await take_down(run_dir)
            raise


async def take_down(run_dir: Path) -> bool:
    """End the deployment of the run file; says whether there was one."""
    run = runfile.read_run(run_dir)
    if run is None:
        return False
    if run.settings.get("ray_address"):
        await _stop_actors(run)
    await asyncio.to_thread(runfile.end_processes, run.marker)
    if run.redis_url and not run.settings.get("redis_url"):
        stop_detached(run.redis_url)
    runfile.remove_run(run_dir)
    return True


async def _stop_actors(run: runfile.Run) -> None:
    """End actors that live in a Ray of somebody else: by name, and the Ray stays."""
    try:
        cluster.connect_ray(run.ray_address, num_local_cpus=0, environment={})
    except ConfigError as error:
        # A Ray that is gone has taken its actors along; what runs here is to end all the same.
        logger.error("workers %s were not told to end: %s", ", ".join(run.workers), error)
        return
    for worker in run.workers:
        actor = cluster.find_actor(_actor_name(WorkerId(worker)))
        if actor is not None:
            await _stop_worker(WorkerId(worker), actor)
    cluster.leave_ray()


async def live_workers(run: runfile.Run, settings: Settings) -> list[WorkerRecord]:
    """The deployment's workers that hold a lease now."""
    directory = await _connect_directory(run.redis_url, settings)
    try:
        return [record for record in await directory.workers() if record.info.worker in run.workers]
    finally:
        await directory.close()


async def _bring_up(
    settings: Settings, run_dir: Path, run: runfile.Run, say: Say, stack: contextlib.AsyncExitStack
) -> runfile.Run:
    await _prepare_model(settings, say)
    environment = _environment(run.marker)
    if not run.redis_url:
        store = EmbeddedStore(environment=environment, is_detached=True)
        store.start()
        run = replace(run, redis_url=store.url)
        runfile.write_run(run_dir, run)
    ray_address = settings.ray_address
    if not ray_address:
        say("starting Ray")
        log_path = run_dir / "ray.log"
        head, ray_address = cluster.start_head(
            environment, log_path, num_cpus=max(settings.workers, os.cpu_count() or 1)
        )
        await cluster.wait_for_head(head, ray_address, log_path, timeout_s=settings.start_timeout_s)
    run = replace(run, ray_address=ray_address)
    runfile.write_run(run_dir, run)
    cluster.connect_ray(ray_address, num_local_cpus=0, environment=_worker_environment(run.marker))
    stack.callback(cluster.leave_ray)
    run = replace(run, workers=tuple(_worker_ids(settings)))
    runfile.write_run(run_dir, run)
    await _start_workers(
        settings, run.redis_url, bytes.fromhex(run.secret), say, stack, is_detached=True, ids=run.workers
    )
    run = replace(run, is_ready=True)
    runfile.write_run(run_dir, run)
    return run


async def _start_workers(
    settings: Settings,
    redis_url: str,
    secret: bytes,
    say: Say,
    stack: contextlib.AsyncExitStack,
    *,
    is_detached: bool,
    ids: tuple[str, ...] | None = None,
) -> dict[WorkerId, tuple[WorkerInfo, Any]]:
    """Start all workers and wait until each has told that it serves."""
    num_gpus = (settings.gpus_per_worker or settings.tensor_parallel_size) if _is_gpu_build() else 0
    resources = WorkerResources(num_cpus=1, num_gpus=num_gpus)
    cluster.check_resources(settings.workers, resources)
    is_local = cluster.is_single_node()
    if not is_local and not settings.redis_url:
        raise ConfigError("--redis-url: needed where Ray has more than one node, since the embedded store is local")
    say(f"starting {settings.workers} workers with {settings.model}")
    worker_to_actor: dict[WorkerId, Any] = {}
    for worker in map(WorkerId, ids or _worker_ids(settings)):
        options = WorkerOptions(worker, settings, redis_url, secret, is_local=is_local)
        actor = cluster.start_actor(
            WorkerActor, _actor_name(worker), resources, is_detached=is_detached, options=options.to_wire()
        )
        if not is_detached:
            stack.push_async_callback(_stop_worker, worker, actor)
        worker_to_actor[worker] = actor

    async def ready(worker: WorkerId, actor: Any) -> WorkerInfo:
        raw = await cluster.call(actor.ready, timeout_s=settings.start_timeout_s, what=f"worker {worker}")
        info = decode_record(WorkerInfo, raw)
        say(f"worker {worker} is ready: {info.engine}, {info.num_blocks} blocks of {settings.block_size} tokens")
        return info

    infos = await asyncio.gather(*(ready(worker, actor) for worker, actor in worker_to_actor.items()))
    return {info.worker: (info, worker_to_actor[info.worker]) for info in infos}


async def _stop_worker(worker: WorkerId, actor: Any) -> None:
    with contextlib.suppress(EngineError):
        await cluster.call(actor.stop, timeout_s=10.0, what=f"worker {worker}")
    cluster.kill_actor(actor)


async def _enter_router(
    stack: contextlib.AsyncExitStack,
    settings: Settings,
    redis_url: str,
    secret: bytes,
    model_folder: Path,
    infos: tuple[WorkerInfo, ...],
    actors: Mapping[WorkerId, Any],
    store: EmbeddedStore | None,
) -> Serving:
    """A router that is connected to all the workers."""
    tokenizer = await asyncio.to_thread(Tokenizer, model_folder)
    scheme = _scheme(settings)
    router_id = RouterId(f"router-{secrets.token_hex(4)}")
    # Drawing what must not be guessed is the system's business; everything else follows from the seed.
    rng = random.Random(settings.seed)

    def connect(record: WorkerRecord, on_change: OnChange) -> WorkerClient:
        return connect_worker(record.info, router_id, secret, on_change=on_change, rng=rng)

    router = Router(
        router_id,
        await _connect_directory(redis_url, settings),
        connect,
        make_policy(settings.policy),
        scheme=scheme,
        parity_key=parity_key(scheme, tokenizer.fingerprint),
        metrics=Metrics(),
        rng=rng,
        max_attempts=settings.max_attempts,
        max_held=settings.max_queued,
        queue_timeout_s=settings.queue_timeout_s,
        min_prefix_tokens=settings.min_prefix_tokens,
        only=frozenset(info.worker for info in infos),
        refresh_s=settings.heartbeat_s,
    )
    await stack.enter_async_context(router)
    missing = {info.worker for info in infos} - set(router.fleet.worker_to_instance)
    if len(missing) == len(infos):
        raise NoWorker(f"no connection to the workers {', '.join(sorted(missing))}")
    return Serving(settings, router, tokenizer, scheme, infos, actors, store)


async def _connect_directory(redis_url: str, settings: Settings) -> Directory:
    try:
        return await connect_directory(redis_url, _scheme(settings), match_deadline_s=settings.redis_deadline_s)
    except DirectoryUnavailable as error:
        raise ConfigError(f"--redis-url: {error}") from None


def require_model(settings: Settings) -> None:
    """Raises `ConfigError` where no model is named."""
    if not settings.model:
        raise ConfigError("--model: needed: a Hugging Face name, a local folder, smollm2 or tiny")


async def _prepare_model(settings: Settings, say: Say) -> Path:
    require_model(settings)
    say(f"preparing model {settings.model}")
    return await asyncio.to_thread(prepare_model, settings.model, settings.model_cache_dir)


def _scheme(settings: Settings) -> CacheScheme:
    return CacheScheme(settings.model_name, settings.block_size)


def _worker_ids(settings: Settings) -> list[str]:
    """Short names; on a store that others may use too they carry a tag that makes them unique there."""
    tag = f"-{secrets.token_hex(3)}" if settings.redis_url else ""
    return [f"w{index}{tag}" for index in range(settings.workers)]


def _actor_name(worker: WorkerId) -> str:
    return f"kvroute:{worker}"


def _is_gpu_build() -> bool:
    """Whether the CUDA build of vLLM is installed; the CPU build ships the same package under another name."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return False
    return True


def _environment(marker: str) -> dict[str, str]:
    """This process's environment with the run's marker in it, for what is started from here."""
    return {**os.environ, **_worker_environment(marker)}


def _worker_environment(marker: str) -> dict[str, str]:
    """What a worker's process needs beyond what Ray gives it."""
    return {runfile.MARKER_VARIABLE: marker, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
