"""A running deployment brought in line with changed settings while it serves: its workers are replaced one by one.

A successor starts beside the worker that it replaces wherever the cluster has room for both. The run file tells at any
time who is there and what each was made of, so that whatever ends this early leaves workers that serve, and the same
command goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from router import changes, deployment, launch, pins, runfile
from router.serving import Say
from shared.config import Settings
from shared.directory.embedded import revive_detached
from shared.errors import ConfigError, EngineError, KvrouteError
from shared.hashing import parity_key, tokenizer_fingerprint
from shared.types import CacheScheme, WorkerId

_SETTLED_S = 5.0
"""Ray tells of what a worker has left about a second later: how long to look for room that there may be."""
_FREED_S = 30.0
"""The same, where a worker has just made room."""
_LOOK_S = 0.1
_NOTICED_HEARTBEATS = 3.0
"""Routers look for new workers with each heartbeat; more of them forgive a store that is late once."""


async def change(run_dir: Path, settings: Settings, say: Say) -> runfile.Run:
    """Give the running deployment the settings that are given, and tell what that changes; what is not given stays.

    Raises:
        ConfigError: nothing is running, somebody else is changing it, or it cannot be so; nothing has been changed.
        EngineError: a new worker did not start, or there is no room for one; the others serve on.
    """
    with runfile.changing(run_dir):
        run = runfile.running(run_dir)
        recorded = changes.changed(run, settings)
        wanted = Settings(**recorded).model_copy(update={"start_timeout_s": settings.start_timeout_s})
        for line in changes.differences(run.settings, recorded):
            say(f"changing {line}")
        if run.has_own_store and revive_detached(run.redis_url, launch.process_environment(run.marker)) is not None:
            say("the keeper of the store had died, and the store with it: both are started again, and workers fill it")
        await _check_against_running(run, wanted, say)
        with deployment.joined(run):
            launch.check_resources(wanted)
            return await _Rollout(run_dir, recorded, wanted, settings.drain_timeout_s, say).carry_out(run)


async def _check_against_running(run: runfile.Run, wanted: Settings, say: Say) -> None:
    """Raises `ConfigError` where new workers would not do for routers that run over the present ones."""
    folder = await launch.prepare_model_folder(wanted, say)
    scheme = CacheScheme(wanted.model_name, wanted.block_size)
    own_key = parity_key(scheme, await asyncio.to_thread(tokenizer_fingerprint, folder))
    records = await launch.live_workers(run, wanted)
    differing = [record.info.worker for record in records if record.info.parity_key not in (b"", own_key)]
    if differing:
        raise ConfigError(
            f"--model {wanted.model}: the tokenizer in {folder} is another one than {', '.join(differing)} compute "
            "block keys with, so that routers that run would not find what new workers hold; `kvroute down` ends them"
        )
    shortest_tokens = min((record.info.max_model_len_tokens for record in records), default=0)
    if wanted.max_model_len is not None and wanted.max_model_len < shortest_tokens:
        raise ConfigError(
            f"--max-model-len: {wanted.max_model_len} is less than the {shortest_tokens} tokens that routers that run "
            "promise to their callers; `kvroute down` ends what runs"
        )


class _Rollout:
    """One change on its way. Holds what is wanted; the run file holds how far it has got."""

    def __init__(
        self, run_dir: Path, recorded: Mapping[str, Any], wanted: Settings, drain_timeout_s: float, say: Say
    ) -> None:
        self._run_dir = run_dir
        self._recorded = recorded
        self._wanted = wanted
        self._build = changes.build_of(wanted)
        self._drain_timeout_s = drain_timeout_s
        self._say = say

    async def carry_out(self, run: runfile.Run) -> runfile.Run:
        """Replace what is made otherwise, and bring the number of workers to what is wanted."""
        outdated = changes.outdated(run, self._build)
        if outdated:
            why = "started with other settings or by another version"
            self._say(f"{', '.join(outdated)}: {why}, and replaced one by one")
        run = await self._let_go(run, await self._lost(run, is_changing=bool(outdated)))
        outdated = changes.outdated(run, self._build)
        num_over = max(0, min(len(outdated), len(run.workers) - self._wanted.workers))
        if num_over:
            run = await self._retire(run, outdated[:num_over])
        for worker in outdated[num_over:]:
            run = await self._replace(run, worker)
        num_over = len(run.workers) - self._wanted.workers
        if num_over > 0:
            leaving = await deployment.least_missed(run, self._wanted, run.workers, num_over)
            run = await self._retire(run, leaving)
        run = await deployment.grow(self._run_dir, run, self._wanted, self._say, recorded=self._recorded)
        if run.settings != self._recorded:
            run = replace(run, settings=dict(self._recorded))
            runfile.update_run(self._run_dir, run)
        return run

    async def _lost(self, run: runfile.Run, *, is_changing: bool) -> list[WorkerId]:
        """Workers to take off before anything else: those on their way out, and in a change those that do not serve."""
        leaving = set(await deployment.on_their_way_out(run))
        if is_changing:
            live = await deployment.serving(run, self._wanted)
            leaving |= set(map(WorkerId, run.workers)) - live if live else set()
        return [WorkerId(worker) for worker in run.workers if worker in leaving]

    async def _replace(self, run: runfile.Run, worker: WorkerId) -> runfile.Run:
        """One worker's place taken by a new one."""
        if await self._has_room(_SETTLED_S):
            self._say(f"worker {worker} is replaced: its successor starts beside it")
            run = await self._start_one(run)
            await self._hand_over(run, worker)
            # Until routers know the successor, nobody would be there for what they are asked.
            await asyncio.sleep(_NOTICED_HEARTBEATS * self._wanted.heartbeat_s)
            return await self._let_go(run, [worker])
        live = await deployment.serving(run, self._wanted)
        if live and not live - {worker}:
            raise ConfigError(
                f"worker {worker} is the only one that serves, and the cluster has no room for a successor beside it: "
                "nobody would serve meanwhile; make room, or use `kvroute down` and `kvroute up`"
            )
        self._say(f"worker {worker} is replaced: it leaves first, since the cluster has no room for two")
        run = await self._let_go(run, [worker])
        if not await self._has_room(_FREED_S):
            raise EngineError(f"the cluster has no room for a new worker\n{self._standing(run)}")
        run = await self._start_one(run)
        await self._hand_over(run, worker)
        return run

    async def _start_one(self, run: runfile.Run) -> runfile.Run:
        """One worker more. Raises `EngineError` that says how things stand."""
        one_more = self._wanted.model_copy(update={"workers": len(run.workers) + 1})
        try:
            return await deployment.grow(self._run_dir, run, one_more, self._say, recorded=self._recorded)
        except KvrouteError as error:
            raise EngineError(f"{error}\n{self._standing(run)}") from error

    async def _has_room(self, within_s: float) -> bool:
        """Whether one more worker finds its place, once Ray has noticed who has gone."""
        for _ in range(round(within_s / _LOOK_S)):
            if launch.has_room(self._wanted):
                return True
            await asyncio.sleep(_LOOK_S)
        return launch.has_room(self._wanted)

    def _standing(self, run: runfile.Run) -> str:
        """What to know once a change has come to a stop."""
        return (
            f"the change stops here, and {', '.join(run.workers)} serve on; the same `kvroute up` goes on with it, one "
            "with the former settings goes back"
        )

    async def _hand_over(self, run: runfile.Run, worker: WorkerId, leaving: Collection[str] = ()) -> None:
        """Have the newest worker that is made as wanted, and stays, keep what `worker` was to keep."""
        heirs = [name for name in run.workers if run.worker_to_build.get(name) == self._build and name not in leaving]
        if heirs:
            await pins.hand_over(run, self._wanted, worker, WorkerId(heirs[-1]), self._say)

    async def _retire(self, run: runfile.Run, leaving: Sequence[WorkerId]) -> runfile.Run:
        """Let workers go whose places nobody takes."""
        live = await deployment.serving(run, self._wanted)
        if live:
            deployment.check_stay(live, leaving)
        for worker in leaving:
            await self._hand_over(run, worker, leaving)
        return await self._let_go(run, leaving)

    async def _let_go(self, run: runfile.Run, leaving: Sequence[WorkerId]) -> runfile.Run:
        if not leaving:
            return run
        return await deployment.let_go(
            self._run_dir, run, leaving, self._drain_timeout_s, self._say, recorded=self._kept_for(run)
        )

    def _kept_for(self, run: runfile.Run) -> Mapping[str, Any]:
        """What the file says while this is under way: what is wanted, once one worker is made so."""
        is_begun = self._build in run.worker_to_build.values()
        return self._recorded if is_begun else run.settings
