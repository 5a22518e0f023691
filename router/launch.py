"""The composition root: starts store, Ray and workers, and joins workers to a router.

The one place that knows both rooms.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from router import cluster, runfile
from router.borrowed_tokenizer import fetch_from_workers, usable_tokenizer
from router.placement import WorkerResources
from router.plan import download_config
from router.request_log import check_request_log
from router.serving import Say, Serving, enter_router
from router.tables import counted
from shared.config import Settings
from shared.directory import connect_directory
from shared.directory.base import Directory, WorkerRecord
from shared.directory.embedded import EmbeddedStore
from shared.errors import ConfigError, DirectoryUnavailable, EngineError, NoWorker
from shared.telemetry_ray import keep_in_ray
from shared.transport.base import OnChange, WorkerClient
from shared.transport.client import connect_worker
from shared.types import CacheScheme, RouterId, WorkerId, WorkerInfo
from shared.wire import decode_record
from worker.actor import WorkerActor
from worker.engines.demo_model import BUILT_IN_MODELS, prepare_model
from worker.process import WorkerOptions, check_engine


@dataclass(frozen=True, slots=True)
class _OwnWorkers(Container[WorkerId]):
    """All workers of one deployment, those included that it will have later: their names end with its tag."""

    tag: str

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, str) and worker.endswith(self.tag)


@contextlib.asynccontextmanager
async def launched(settings: Settings, say: Say) -> AsyncIterator[Serving]:
    """Start everything that `settings` does not name, serve, and stop it again however this ends."""
    await check_given_store(settings)
    if settings.request_log is not None:
        await check_request_log(settings.request_log)
    model_folder = await prepare_model_folder(settings, say)
    marker = runfile.new_marker()
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-", ignore_cleanup_errors=True))
        # Last of all: what a frozen worker or a killed Ray has left.
        stack.callback(runfile.end_processes, marker)
        say("starting Ray" if not settings.ray_address else f"joining Ray at {settings.ray_address}")
        cluster.connect_ray(
            settings.ray_address,
            num_local_cpus=settings.workers,
            environment=worker_environment(marker, None if settings.ray_address else folder),
        )
        stack.callback(cluster.leave_ray)
        store = None
        if not settings.redis_url:
            # Started from the main thread: the server dies with the thread that started it.
            store = stack.enter_context(
                EmbeddedStore(environment=process_environment(marker), host=store_host(settings), is_kept=True)
            )
            stack.callback(asyncio.create_task(store.watch(say), name="store-watch").cancel)
        redis_url = store.url if store is not None else settings.redis_url
        secret = secrets.token_bytes(32)
        tag = runfile.worker_tag(marker, settings.model_dump())
        ids = worker_ids(range(settings.workers), tag)
        workers = await start_workers(settings, redis_url, secret, say, stack, ids=ids, is_detached=False)
        infos = tuple(info for info, _ in workers.values())
        actors = {worker: actor for worker, (_, actor) in workers.items()}
        own_settings = settings.model_dump(mode="json", exclude_unset=True)
        run = runfile.Run(marker, secret.hex(), own_settings, redis_url, workers=tuple(ids), is_ready=True)
        yield await _enter_router(stack, settings, run, model_folder, infos, actors, store)


@contextlib.asynccontextmanager
async def attached(
    run: runfile.Run, settings: Settings, say: Say, *, is_observer: bool = False
) -> AsyncIterator[Serving]:
    """Serve over the workers of a running `kvroute up`; an observer does not count as one of their routers."""
    model_folder = await prepare_model_folder(settings, say)
    async with contextlib.AsyncExitStack() as stack:
        records = await live_workers(run, settings)
        infos = tuple(record.info for record in records)
        if not infos:
            raise NoWorker("`kvroute up` is running, but none of its workers is alive; see `kvroute status`")
        yield await _enter_router(stack, settings, run, model_folder, infos, {}, None, is_observer=is_observer)


async def live_workers(run: runfile.Run, settings: Settings) -> list[WorkerRecord]:
    """The deployment's workers that hold a lease now."""
    directory = await _connect_directory(run.redis_url, settings)
    try:
        return [record for record in await directory.workers() if record.info.worker in run.workers]
    finally:
        await directory.close()


async def start_workers(
    settings: Settings,
    redis_url: str,
    secret: bytes,
    say: Say,
    stack: contextlib.AsyncExitStack,
    *,
    ids: Sequence[WorkerId],
    is_detached: bool,
) -> dict[WorkerId, tuple[WorkerInfo, Any]]:
    """Start workers and wait until each has told that it serves; `stack` ends them. There must be room for all of
    `settings.workers`, of which these are some or all.
    """
    resources = _resources(settings)
    has_own_ray = not settings.ray_address
    check_resources(settings)
    say(f"starting {counted(len(ids), 'worker')} with {settings.model}")
    missing = cluster.missing_room(len(ids), resources)
    if missing is not None:
        say(f"waiting for room, at most {settings.start_timeout_s:g} s: {missing}")
    worker_to_actor: dict[WorkerId, Any] = {}
    stack.push_async_callback(stop_workers, worker_to_actor)
    for worker in ids:
        options = WorkerOptions(worker, settings, redis_url, secret, is_local=has_own_ray)
        actor = cluster.start_actor(
            WorkerActor, actor_name(worker), resources, is_detached=is_detached, options=options.to_wire()
        )
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


def store_host(settings: Settings) -> str | None:
    """Where an embedded store listens for workers on other nodes; `None` where there are none."""
    return cluster.own_address() if settings.ray_address else None


async def stop_workers(worker_to_actor: Mapping[WorkerId, Any]) -> None:
    """End workers and what they have under way, all at once."""
    await asyncio.gather(*(stop_worker(worker, actor) for worker, actor in worker_to_actor.items()))


async def stop_worker(worker: WorkerId, actor: Any) -> None:
    """End a worker and what it has under way."""
    with contextlib.suppress(EngineError):
        await cluster.call(actor.stop, timeout_s=10.0, what=f"worker {worker}")
    cluster.kill_actor(actor, actor_name(worker))


async def _enter_router(
    stack: contextlib.AsyncExitStack,
    settings: Settings,
    run: runfile.Run,
    model_folder: Path,
    infos: tuple[WorkerInfo, ...],
    actors: Mapping[WorkerId, Any],
    store: EmbeddedStore | None,
    *,
    is_observer: bool = False,
) -> Serving:
    """A router that is connected to all the workers, and will be to those that join them."""
    scheme = _scheme(settings)
    secret = bytes.fromhex(run.secret)
    router_id = RouterId(f"router-{secrets.token_hex(4)}")
    fetch = fetch_from_workers(router_id, secret)
    tokenizer = await usable_tokenizer(model_folder, infos, fetch, random.Random(settings.seed))
    # Drawing what must not be guessed is the system's business; everything else follows from the seed.
    rng = random.Random(settings.seed)

    def connect(record: WorkerRecord, on_change: OnChange) -> WorkerClient:
        return connect_worker(record.info, router_id, secret, on_change=on_change, rng=rng)

    router = await enter_router(
        stack,
        settings,
        router_id,
        await _connect_directory(run.redis_url, settings, reader="" if is_observer else router_id),
        connect,
        scheme=scheme,
        tokenizer=tokenizer,
        rng=rng,
        only=_OwnWorkers(run.worker_tag),
        is_observer=is_observer,
    )
    if not is_observer:
        in_ray = asyncio.create_task(keep_in_ray(router.metrics, {"router": router_id}), name="ray-metrics")
        stack.callback(in_ray.cancel)
    missing = {info.worker for info in infos} - set(router.fleet.worker_to_instance)
    if len(missing) == len(infos):
        raise NoWorker(f"no connection to the workers {', '.join(sorted(missing))}")
    return Serving(settings, router, tokenizer, scheme, infos, actors, store, run)


async def check_given_store(settings: Settings) -> None:
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


def worker_ids(numbers: Iterable[int], tag: str) -> list[WorkerId]:
    """Names of a deployment's workers."""
    return [WorkerId(f"w{number}{tag}") for number in numbers]


def own_ray_token() -> str:
    """What a Ray that is started from here will ask of its clients; empty where that is nothing."""
    return os.environ.get("RAY_AUTH_TOKEN", "") if os.environ.get("RAY_AUTH_MODE") == "token" else ""


def actor_name(worker: WorkerId) -> str:
    """The name that Ray knows a worker by."""
    return f"kvroute:{worker}"


def check_resources(settings: Settings) -> None:
    """Raises `ConfigError` where a Ray of ours has no room for so many workers: one of somebody else may still
    grow.
    """
    if not settings.ray_address:
        cluster.check_resources(settings.workers, _resources(settings))


def has_room(settings: Settings) -> bool:
    """Whether Ray can take one more such worker now. What was just freed may show a second later."""
    return cluster.missing_room(1, _resources(settings)) is None


def _resources(settings: Settings) -> WorkerResources:
    return WorkerResources(num_cpus=1, num_gpus=_num_gpus(settings))


def _num_gpus(settings: Settings) -> float:
    """GPUs that each worker asks of Ray. A cluster may have them where this host has none."""
    if settings.engine != "simulator" and _is_gpu_build():
        return settings.gpus_per_worker or settings.tensor_parallel_size
    return settings.gpus_per_worker or 0 if settings.ray_address else 0


def _is_gpu_build() -> bool:
    """Whether the CUDA build of vLLM is installed; the CPU build ships the same package under another name."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return False
    return True


def process_environment(marker: str) -> dict[str, str]:
    """This process's environment with the run's marker in it, for what is started from here."""
    return {**os.environ, runfile.MARKER_VARIABLE: marker}


def worker_environment(marker: str, folder: str | None) -> dict[str, str]:
    """What a worker's process needs beyond what Ray gives it.

    `folder` is where workers on this host put sockets and logs, so that those of a killed one go as well; a cluster of
    somebody else has its own folders, and kvroute installed.
    """
    environment = {runfile.MARKER_VARIABLE: marker}
    if folder is not None:
        environment["TMPDIR"] = folder
        # Ray's own folder stays where it is: the path of its sockets must not grow too long.
        environment["RAY_TMPDIR"] = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return environment
