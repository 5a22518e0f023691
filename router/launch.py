"""The composition root: starts store, Ray and workers, joins them to a router, and ends what it started.

The one place that knows both rooms.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from router import cluster, runfile
from router.cluster import WorkerResources
from router.plan import download_config
from router.policies import make_policy
from router.service import Router
from router.tokenizer import Tokenizer
from shared.config import Settings
from shared.directory import connect_directory
from shared.directory.base import Directory, WorkerRecord
from shared.directory.embedded import EmbeddedStore, stop_detached
from shared.errors import ConfigError, DirectoryUnavailable, EngineError, NoWorker
from shared.hashing import parity_key
from shared.telemetry import Metrics
from shared.transport.base import OnChange, WorkerClient
from shared.transport.client import connect_worker
from shared.types import CacheScheme, RouterId, WorkerId, WorkerInfo
from shared.wire import decode_record
from worker.actor import WorkerActor
from worker.engines.demo_model import BUILT_IN_MODELS, prepare_model
from worker.process import WorkerOptions, check_engine

_RAY_LOG_NAME = "ray.log"

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
    await _check_given_store(settings)
    model_folder = await prepare_model_folder(settings, say)
    marker = runfile.new_marker()
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-", ignore_cleanup_errors=True))
        # Last of all: what a frozen worker or a killed Ray has left.
        stack.callback(runfile.end_processes, marker)
        store = None
        if not settings.redis_url:
            # Started from the main thread: the server dies with the thread that started it.
            store = stack.enter_context(EmbeddedStore(environment=_environment(marker)))
        redis_url = store.url if store is not None else settings.redis_url
        say("starting Ray" if not settings.ray_address else f"joining Ray at {settings.ray_address}")
        cluster.connect_ray(
            settings.ray_address,
            num_local_cpus=settings.workers,
            environment=_worker_environment(marker, None if settings.ray_address else folder),
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
    model_folder = await prepare_model_folder(settings, say)
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
        if known is not None and known.is_alive:
            raise ConfigError(
                f"a deployment is running already ({known.settings.get('model')}); see `kvroute status`, "
                "and `kvroute down` ends it"
            )
        run = runfile.Run(
            runfile.new_marker(),
            secrets.token_hex(32),
            settings.model_dump(mode="json", exclude_unset=True),
            redis_url=settings.redis_url,
            folder="" if settings.ray_address else tempfile.mkdtemp(prefix="kvroute-"),
        )
        runfile.write_run(run_dir, run)
        try:
            async with contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as undo:
                run = await _bring_up(settings, run_dir, run, say, stack, undo)
                undo.pop_all()
                return run
        except BaseException:
            await take_down(run_dir, say)
            raise


async def take_down(run_dir: Path, say: Say) -> bool:
    """End the deployment of the run file; says whether there was one."""
    run = runfile.read_run(run_dir)
    if run is None:
        return False
    if not run.has_own_ray:
        await _end_actors(run, say)
    await asyncio.to_thread(runfile.end_processes, run.marker)
    if run.redis_url and not run.settings.get("redis_url"):
        stop_detached(run.redis_url)
    if run.folder:
        shutil.rmtree(run.folder, ignore_errors=True)
    (run_dir / _RAY_LOG_NAME).unlink(missing_ok=True)
    runfile.remove_run(run_dir)
    return True


async def _end_actors(run: runfile.Run, say: Say) -> None:
    """End the workers that live in a Ray of somebody else, which itself stays."""
    try:
        cluster.connect_ray(run.ray_address, num_local_cpus=0, environment={})
    except ConfigError as error:
        # A Ray that is gone has taken its workers along; what runs here is to end all the same.
        say(f"workers {', '.join(run.workers)} were not told to end: {error}")
        return
    try:
        for worker in run.workers:
            actor = cluster.find_actor(_actor_name(WorkerId(worker)))
            if actor is not None:
                await _stop_worker(WorkerId(worker), actor)
    finally:
        cluster.leave_ray()


async def live_workers(run: runfile.Run, settings: Settings) -> list[WorkerRecord]:
    """The deployment's workers that hold a lease now."""
    directory = await _connect_directory(run.redis_url, settings)
    try:
        return [record for record in await directory.workers() if record.info.worker in run.workers]
    finally:
        await directory.close()


async def _bring_up(
    settings: Settings,
    run_dir: Path,
    run: runfile.Run,
    say: Say,
    stack: contextlib.AsyncExitStack,
    undo: contextlib.AsyncExitStack,
) -> runfile.Run:
    """The steps of `bring_up`. `stack` ends with this process's part, `undo` only where the whole fails."""
    await _check_given_store(settings)
    await prepare_model_folder(settings, say)
    environment = _environment(run.marker)
    if not run.redis_url:
        store = EmbeddedStore(environment=environment, is_detached=True)
        store.start()
        run = replace(run, redis_url=store.url)
        runfile.write_run(run_dir, run)
    ray_address = settings.ray_address
    if not ray_address:
        say("starting Ray")
        log_path = run_dir / _RAY_LOG_NAME
        head, ray_address = cluster.start_head(
            environment, log_path, num_cpus=max(settings.workers, os.cpu_count() or 1)
        )
        await cluster.wait_for_head(head, ray_address, log_path, timeout_s=settings.start_timeout_s)
    run = replace(run, ray_address=ray_address)
    runfile.write_run(run_dir, run)
    cluster.connect_ray(ray_address, num_local_cpus=0, environment=_worker_environment(run.marker, run.folder or None))
    stack.callback(cluster.leave_ray)
    run = replace(run, workers=tuple(_worker_ids(settings)))
    runfile.write_run(run_dir, run)
    await _start_workers(
        settings, run.redis_url, bytes.fromhex(run.secret), say, undo, is_detached=True, ids=run.workers
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
    resources = WorkerResources(num_cpus=1, num_gpus=_num_gpus(settings))
    if not settings.ray_address:
        # A cluster of somebody else may grow on demand; one of ours will not.
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
        stack.push_async_callback(_stop_worker, worker, actor)
        worker_to_actor[worker] = actor

    async def ready(worker: WorkerId, actor: Any) -> WorkerInfo:
        try:
            raw = await cluster.call(actor.ready, timeout_s=settings.start_timeout_s, what=f"worker {worker}")
        except EngineError as error:
            raise EngineError(f"{error}; {cluster.describe_resources(settings.workers, resources)}") from error
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
        await _connect_directory(redis_url, settings, reader=router_id),
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


async def _check_given_store(settings: Settings) -> None:
    """Find out about a wrong --redis-url before anything is started."""
    if settings.redis_url:
        directory = await _connect_directory(settings.redis_url, settings)
        await directory.close()


async def _connect_directory(redis_url: str, settings: Settings, *, reader: str = "") -> Directory:
    """The deployment's directory, mirrored for `reader`; read through where none is named."""
    try:
        return await connect_directory(
            redis_url, _scheme(settings), match_deadline_s=settings.redis_deadline_s, reader=reader
        )
    except DirectoryUnavailable as error:
        raise ConfigError(f"--redis-url: {error}") from None


def require_model(settings: Settings) -> None:
    """Raises `ConfigError` where no model is named."""
    if not settings.model:
        raise ConfigError("--model: needed: a Hugging Face name, a local folder, smollm2 or tiny")


def model_config_file(settings: Settings) -> Path:
    """The `config.json` of the named model; of one on Hugging Face nothing else is downloaded. Blocks."""
    require_model(settings)
    if settings.model in BUILT_IN_MODELS:
        return prepare_model(settings.model, settings.model_cache_dir) / "config.json"
    folder = Path(settings.model).expanduser()
    return folder / "config.json" if folder.is_dir() else download_config(settings.model)


async def prepare_model_folder(settings: Settings, say: Say) -> Path:
    """The named model's folder, converted or downloaded where need be. Raises `ConfigError`."""
    require_model(settings)
    check_engine(settings)
    say(f"preparing model {settings.model}")
    return await asyncio.to_thread(prepare_model, settings.model, settings.model_cache_dir)


def _scheme(settings: Settings) -> CacheScheme:
    return CacheScheme(settings.model_name, settings.block_size)


def _worker_ids(settings: Settings) -> list[str]:
    """Short names; on a store or a Ray that others may use too they carry a tag that makes them unique there."""
    tag = f"-{secrets.token_hex(3)}" if settings.redis_url or settings.ray_address else ""
    return [f"w{index}{tag}" for index in range(settings.workers)]


def _actor_name(worker: WorkerId) -> str:
    return f"kvroute:{worker}"


def _num_gpus(settings: Settings) -> float:
    """GPUs that each worker asks of Ray. A cluster may have them where this host has none."""
    if settings.engine == "simulator":
        return 0
    if _is_gpu_build():
        return settings.gpus_per_worker or settings.tensor_parallel_size
    return settings.gpus_per_worker or 0 if settings.ray_address else 0


def _is_gpu_build() -> bool:
    """Whether the CUDA build of vLLM is installed; the CPU build ships the same package under another name."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return False
    return True


def _environment(marker: str) -> dict[str, str]:
    """This process's environment with the run's marker in it, for what is started from here."""
    return {**os.environ, runfile.MARKER_VARIABLE: marker}


def _worker_environment(marker: str, folder: str | None) -> dict[str, str]:
    """What a worker's process needs beyond what Ray gives it.

    `folder` is where workers on this host put sockets and logs, so that those of a killed one go as well; a cluster of
    somebody else has its own folders, and kvroute installed.
    """
    environment = {runfile.MARKER_VARIABLE: marker}
    if folder is not None:
        environment["TMPDIR"] = folder
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return environment
