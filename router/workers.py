"""Whose workers a command uses: servers that run already, those of `kvroute up`, or own ones where neither is."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from router import attach, launch, runfile
from router.serving import Say, Serving
from shared.config import Settings
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Workers:
    """Whose workers a command uses: servers that run already, those of `kvroute up`, or own ones where neither is."""

    settings: Settings
    """With what those that run have fixed."""
    run: runfile.Run | None = None
    servers: attach.Servers | None = None


async def find_workers(settings: Settings, run_dir: Path, say: Say) -> Workers:
    """Settle whose workers to use, before anything is started. Raises `ConfigError` or `NoWorker`."""
    if settings.attach:
        servers = await attach.find_servers(settings, say)
        return Workers(servers.settings, servers=servers)
    run = _run_to_attach(settings, run_dir, say)
    settings = with_run(settings, run)
    launch.require_model(settings)
    return Workers(settings, run)


@contextlib.asynccontextmanager
async def serving_of(workers: Workers, say: Say) -> AsyncIterator[Serving]:
    """A router over them; own ones are started first, and end with this."""
    if workers.servers is not None:
        entering = attach.attached_router(workers.servers, say)
    elif workers.run is not None:
        say(f"using the {len(workers.run.workers)} workers of `kvroute up`")
        entering = launch.attached(workers.run, workers.settings, say)
    else:
        entering = launch.launched(workers.settings, say)
    async with entering as serving:
        yield serving


_OF_THE_WORKERS = attach.OF_OWN_WORKERS | {"model", "served_model_name", "block_size", "ray_address"}
"""Settings that are fixed once workers run."""


def _run_to_attach(settings: Settings, run_dir: Path, say: Say) -> runfile.Run | None:
    """The running deployment that a batch may use: one that has all that is asked of workers, if anything is."""
    run = runfile.read_run(run_dir)
    if run is None or not run.is_ready:
        return None
    running = Settings(**run.settings)
    asked = settings.model_fields_set & _OF_THE_WORKERS
    differing = [name for name in sorted(asked) if getattr(settings, name) != getattr(running, name)]
    if settings.ray_address in ("auto", run.ray_address):
        # A job of Ray's is told where its Ray is; those workers live there.
        differing = [name for name in differing if name != "ray_address"]
    if "workers" in asked or differing:
        why = "--workers is given" if "workers" in asked else f"they differ in {', '.join(differing)}"
        say(f"the workers of `kvroute up` are left alone, since {why}: starting own ones")
        return None
    if not run.is_alive:
        raise ConfigError("`kvroute up` has died without `kvroute down`; run that, or ask for own --workers")
    return run


def with_run(settings: Settings, run: runfile.Run | None) -> Settings:
    """Settings with those that a running deployment has fixed; the rest stays the caller's."""
    if run is None:
        return settings
    running = Settings(**run.settings)
    fixed = {name: getattr(running, name) for name in (*_OF_THE_WORKERS, "cache_dir")}
    return settings.model_copy(update=fixed)
