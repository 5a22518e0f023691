"""Deployments that outlive the command that starts them: up, down, and more or fewer workers in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from router import cluster, launch, runfile
from router.changes import build_of, given
from router.serving import Say
from shared.config import Settings
from shared.directory.embedded import EmbeddedStore, stop_detached
from shared.errors import ConfigError, EngineError
from shared.types import WorkerId

_RAY_LOG_NAME = "ray.log"
_ANSWER_S = 2.0
"""How long a worker may take to say whether it is on its way out."""
_STOP_S = 30.0
"""How long a worker may take to end once it is idle."""


async def bring_up(settings: Settings, run_dir: Path, say: Say) -> runfile.Run:
    """Start a deployment that outlives this process; on failure nothing of it is left.

    Raises:
        ConfigError: there is one already, which is not `rollout.change`d since it never got ready.
    """
    with runfile.changing(run_dir):
        known = runfile.read_run(run_dir)
        if known is not None and known.is_alive:
            raise ConfigError(
                f"`kvroute up` has begun a deployment of {known.settings.get('model')} here and not finished it; "
                "`kvroute down` ends it"
            )
        run = runfile.Run(
            runfile.new_marker(),
            secrets.token_hex(32),
            given(settings),
            redis_url=settings.redis_url,
            folder="" if settings.ray_address else tempfile.mkdtemp(prefix="kvroute-"),
            ray_token="" if settings.ray_address else launch.own_ray_token(),
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
    if run.workers and not run.has_own_ray:
        await _end_actors(run, say)
    await asyncio.to_thread(runfile.end_processes, run.marker)
    if run.has_own_store:
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
            actor = cluster.find_actor(launch.actor_name(WorkerId(worker)))
            if actor is not None:
                await launch.stop_worker(WorkerId(worker), actor)
            else:
                cluster.free_place(launch.actor_name(WorkerId(worker)))
    finally:
        cluster.leave_ray()


async def _bring_up(
    settings: Settings,
    run_dir: Path,
    run: runfile.Run,
    say: Say,
    stack: contextlib.AsyncExitStack,
    undo: contextlib.AsyncExitStack,
) -> runfile.Run:
    """The steps of `bring_up`. `stack` ends with this process's part, `undo` only where the whole fails."""
    await launch.check_given_store(settings)
    await launch.prepare_model_folder(settings, say)
    environment = launch.process_environment(run.marker)
    ray_address = settings.ray_address
    if not ray_address:
        say("starting Ray")
        log_path = run_dir / _RAY_LOG_NAME
        # One more than there are workers, so that the successor of each can start beside it.
        num_cpus = max(settings.workers + 1, os.cpu_count() or 1)
        of_workers = launch.worker_environment(run.marker, run.folder)
        head, ray_address = cluster.start_head({**environment, **of_workers}, log_path, num_cpus=num_cpus)
        await cluster.wait_for_head(head, ray_address, log_path, timeout_s=settings.start_timeout_s)
        run = replace(run, python_path=of_workers["PYTHONPATH"])
    run = replace(run, ray_address=ray_address)
    runfile.write_run(run_dir, run)
    # Where `auto` has led to is where all later commands go.
    run = replace(run, ray_address=stack.enter_context(joined(run)))
    if not run.redis_url:
        host = launch.store_host(settings)
        store = EmbeddedStore(environment=environment, host=host, is_detached=True, is_kept=True)
        store.start()
        run = replace(run, redis_url=store.url)
        runfile.write_run(run_dir, run)
    ids = launch.worker_ids(range(settings.workers), run.worker_tag)
    run = replace(run, workers=tuple(ids), worker_to_build=dict.fromkeys(ids, build_of(settings)))
    runfile.write_run(run_dir, run)
    await launch.start_workers(settings, run.redis_url, bytes.fromhex(run.secret), say, undo, ids=ids, is_detached=True)
    run = replace(run, is_ready=True)
    runfile.write_run(run_dir, run)
    return run


async def scale(run_dir: Path, num_workers: int, settings: Settings, say: Say) -> runfile.Run:
    """Bring the running deployment to `num_workers`: start what is missing, or drain and end the newest.

    Of `settings`, only how long to wait counts; workers get those that `up` was given. Workers that do not live go
    before those that do. Whatever ends this early leaves a deployment that a repeat completes.

    Raises:
        ConfigError: nothing is running, somebody else is changing it, it does not fit, or nobody who lives would stay.
        EngineError: a new worker did not start; those that this began with still serve.
    """
    with runfile.changing(run_dir):
        run = runfile.running(run_dir)
        wanted = {"workers": num_workers, "start_timeout_s": settings.start_timeout_s}
        run_settings = Settings(**run.settings).model_copy(update=wanted)
        with joined(run):
            # A command that was killed may have left workers that are on their way out: nothing calls them back.
            leaving = await on_their_way_out(run)
            staying = [worker for worker in run.workers if worker not in leaving]
            if num_workers < len(staying):
                leaving += await least_missed(run, run_settings, staying, len(staying) - num_workers)
            if leaving:
                run = await let_go(run_dir, run, leaving, settings.drain_timeout_s, say)
            return await grow(run_dir, run, run_settings, say)


async def drain(run_dir: Path, worker: WorkerId, settings: Settings, say: Say) -> runfile.Run:
    """Let one worker finish what it has, and end it for good. `scale` brings a new one in its place.

    Raises:
        ConfigError: there is no such worker, or nobody who lives would stay; and as `scale` does.
    """
    with runfile.changing(run_dir):
        run = runfile.running(run_dir)
        if worker not in run.workers:
            raise ConfigError(f"there is no worker {worker!r}; the workers are {', '.join(run.workers)}")
        check_stay(await serving(run, Settings(**run.settings)), [worker])
        with joined(run):
            return await let_go(run_dir, run, [worker], settings.drain_timeout_s, say)


@contextlib.contextmanager
def joined(run: runfile.Run) -> Iterator[str]:
    """Within the Ray that the workers live in; gives its address."""
    environment = launch.worker_environment(run.marker, run.folder or None)
    if run.has_own_ray and environment.get("PYTHONPATH") == run.python_path:
        # It has its environment for them already, unless another installation of kvroute has started it.
        environment = {}
    address = cluster.connect_ray(run.ray_address, num_local_cpus=0, environment=environment)
    try:
        yield address
    finally:
        cluster.leave_ray()


async def grow(
    run_dir: Path, run: runfile.Run, settings: Settings, say: Say, *, recorded: Mapping[str, Any] | None = None
) -> runfile.Run:
    """Start workers up to the number in `settings`, those included that are listed and gone.

    `recorded` is what the run's settings are then; default: the former ones with that number. Where a worker does not
    start, all is as it was.
    """
    ids = list(map(WorkerId, run.workers))
    gone = [worker for worker in ids if cluster.find_actor(launch.actor_name(worker)) is None]
    first = 1 + max((int(worker.removesuffix(run.worker_tag)[1:]) for worker in ids), default=-1)
    new = launch.worker_ids(range(first, first + settings.workers - len(ids)), run.worker_tag)
    if not gone and not new:
        return run
    grown = replace(
        run,
        workers=(*ids, *new),
        settings=dict(recorded or {**run.settings, "workers": settings.workers}),
        worker_to_build={**run.worker_to_build, **dict.fromkeys([*gone, *new], build_of(settings))},
    )
    runfile.update_run(run_dir, grown)
    # While others are still to go, what they and the new ones need together says nothing.
    needed = settings if recorded is None else settings.model_copy(update={"workers": len(gone) + len(new)})
    try:
        async with contextlib.AsyncExitStack() as undo:
            secret = bytes.fromhex(run.secret)
            starting = [*gone, *new]
            await launch.start_workers(needed, run.redis_url, secret, say, undo, ids=starting, is_detached=True)
            undo.pop_all()
    except BaseException:
        with contextlib.suppress(ConfigError):
            runfile.update_run(run_dir, run)
        raise
    return grown


async def on_their_way_out(run: runfile.Run) -> list[WorkerId]:
    """Workers that were told to drain before. One that does not answer is starting again, and stays."""

    async def is_leaving(worker: WorkerId) -> bool:
        actor = cluster.find_actor(launch.actor_name(worker))
        try:
            return actor is not None and await cluster.call(actor.is_leaving, timeout_s=_ANSWER_S, what=worker)
        except EngineError:
            return False

    ids = list(map(WorkerId, run.workers))
    answers = await asyncio.gather(*map(is_leaving, ids))
    return [worker for worker, is_on_its_way in zip(ids, answers, strict=True) if is_on_its_way]


async def least_missed(
    run: runfile.Run, settings: Settings, workers: Sequence[str], num_workers: int
) -> list[WorkerId]:
    """Who of `workers` leaves when so many are to leave: those without a lease first, and of all the newest."""
    live = await serving(run, settings)
    newest_first = map(WorkerId, reversed(workers))
    leaving = sorted(newest_first, key=lambda worker: worker in live)[:num_workers]
    check_stay(live, leaving)
    return leaving


async def serving(run: runfile.Run, settings: Settings) -> set[WorkerId]:
    """Workers that take requests now."""
    records = await launch.live_workers(run, settings)
    return {record.info.worker for record in records if not record.is_draining}


def check_stay(live: Set[WorkerId], leaving: Sequence[WorkerId]) -> None:
    """Raises `ConfigError` where nobody would be left to take requests."""
    if not live - set(leaving):
        raise ConfigError(
            f"without {', '.join(leaving)} no worker is left that takes requests; "
            "`kvroute scale` adds some, `kvroute down` ends all"
        )


async def let_go(
    run_dir: Path,
    run: runfile.Run,
    leaving: Sequence[WorkerId],
    drain_timeout_s: float,
    say: Say,
    *,
    recorded: Mapping[str, Any] | None = None,
) -> runfile.Run:
    """Drain workers side by side, end them and take them off the run.

    `recorded` is what the run's settings are then; default: the former ones with as many workers as are left.
    """
    say(f"draining {', '.join(leaving)}, for at most {drain_timeout_s:g} s")
    await asyncio.gather(*(_drain_one(worker, drain_timeout_s, say) for worker in leaving))
    workers = tuple(worker for worker in run.workers if worker not in leaving)
    run = replace(
        run,
        workers=workers,
        settings=dict(recorded or {**run.settings, "workers": len(workers)}),
        worker_to_build={name: build for name, build in run.worker_to_build.items() if name in workers},
    )
    runfile.update_run(run_dir, run)
    return run


async def _drain_one(worker: WorkerId, drain_timeout_s: float, say: Say) -> None:
    actor = cluster.find_actor(launch.actor_name(worker))
    if actor is None:
        say(f"worker {worker} was gone already")
        cluster.free_place(launch.actor_name(worker))
        return
    try:
        num_cut_off = await cluster.call(
            actor.drain, drain_timeout_s, timeout_s=drain_timeout_s + _STOP_S, what=f"worker {worker}"
        )
    except EngineError as error:
        # It is to go anyway, and its requests go on elsewhere as after any loss.
        say(f"worker {worker} is ended, since it did not drain: {error}")
    else:
        rest = f"; {num_cut_off} requests were still running and go on elsewhere" if num_cut_off else ""
        say(f"worker {worker} has left{rest}")
    cluster.kill_actor(actor, launch.actor_name(worker))
