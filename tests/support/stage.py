"""Stands in for Ray, store and workers of a deployment that commands change: who is started, who is let go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router import cluster, deployment, launch, runfile
from shared.config import Settings
from shared.errors import EngineError
from shared.types import WorkerId

RUN = runfile.Run(
    "abcdef0123", "00", {"model": "tiny", "ray_address": "127.0.0.1:1"}, "redis://nowhere", "127.0.0.1:1",
    ("w0-abcdef", "w1-abcdef", "w2-abcdef"), is_ready=True,
)  # fmt: skip


class Stage:
    """Stands in for Ray, store and workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path, run: runfile.Run = RUN) -> None:
        self.run_dir = run_dir
        runfile.write_run(run_dir, run)
        self.serving = set(run.workers)
        self.actors = dict.fromkeys(run.workers, False)
        """Worker -> whether it was told to drain before."""
        self.drained: list[str] = []
        self.started: list[str] = []
        self.events: list[str] = []
        """`+w3` for a start that succeeded, `-w0` for an end."""
        self.said: list[str] = []
        self.freed: list[str] = []
        """Workers whose places were given back although they were gone."""
        self.fails_to_start = False
        self.ends_meanwhile = False
        self.num_free = 1
        """Workers that there is room for beside those that are there."""
        monkeypatch.setattr(cluster, "connect_ray", lambda *arguments, **options: None)
        monkeypatch.setattr(cluster, "leave_ray", lambda: None)
        monkeypatch.setattr(cluster, "find_actor", self._find_actor)
        monkeypatch.setattr(cluster, "kill_actor", self._kill)
        monkeypatch.setattr(cluster, "free_place", lambda name: self.freed.append(name.removeprefix("kvroute:")))
        monkeypatch.setattr(cluster, "call", self._call)
        monkeypatch.setattr(launch, "start_workers", self._start_workers)
        monkeypatch.setattr(launch, "has_room", lambda settings: self.num_free > 0)
        monkeypatch.setattr(deployment, "serving", self._who_serves)

    async def scale(self, num_workers: int) -> tuple[str, ...]:
        run = await deployment.scale(self.run_dir, num_workers, Settings(), self.said.append)
        assert runfile.read_run(self.run_dir) == run
        assert run == RUN or run.settings["workers"] == len(run.workers)
        return run.workers

    async def drain(self, worker: str) -> tuple[str, ...]:
        run = await deployment.drain(self.run_dir, WorkerId(worker), Settings(), self.said.append)
        assert runfile.read_run(self.run_dir) == run
        return run.workers

    def _find_actor(self, name: str) -> Any:
        worker = name.removeprefix("kvroute:")
        return _Actor(worker) if worker in self.actors else None

    def _kill(self, actor: _Actor, name: str) -> None:
        assert name == f"kvroute:{actor.worker}"
        del self.actors[actor.worker]
        self.events.append(f"-{actor.worker.partition('-')[0]}")
        self.serving.discard(actor.worker)
        self.num_free += 1

    async def _call(self, method: tuple[str, str], *arguments: Any, timeout_s: float, what: str) -> Any:
        name, worker = method
        if name == "is_leaving":
            return self.actors[worker]
        if name == "stop":
            return None
        self.drained.append(worker)
        if self.ends_meanwhile:
            runfile.remove_run(self.run_dir)
        if worker not in self.serving:
            raise EngineError(f"{what}: no answer")
        return 3

    async def _start_workers(self, settings: Settings, *arguments: Any, ids: list[str], **options: Any) -> None:
        self.started += ids
        assert set(ids) <= set((runfile.read_run(self.run_dir) or RUN).workers), "started before it was written down"
        await asyncio.sleep(0)
        if self.fails_to_start:
            raise EngineError("no memory")
        self.events += [f"+{worker.partition('-')[0]}" for worker in ids]
        self.serving |= set(ids)
        self.actors |= dict.fromkeys(ids, False)
        self.num_free -= len(ids)

    async def _who_serves(self, run: runfile.Run, settings: Settings) -> set[str]:
        return set(self.serving)


class _Actor:
    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.is_leaving = ("is_leaving", worker)
        self.drain = ("drain", worker)
        self.stop = ("stop", worker)
