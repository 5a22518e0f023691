"""One run of `kvroute doctor`: opens what a doctor looks at, and shows what was found."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from typing import Any

from router.doctor import Doctor
from router.findings import Findings
from router.runfile import Run
from router.tables import or_dash, table
from shared.config import Settings
from shared.directory.mirrored import MirroredDirectory
from shared.directory.redis import RedisDirectory
from shared.directory.survey import StoreSurvey
from shared.errors import DirectoryUnavailable
from shared.transport.channel import open_channel
from shared.transport.inspection import Inspected, inspect_worker
from shared.types import CacheScheme, RouterId, WorkerId, WorkerInfo

TOOL_DEADLINE_S = 10.0
"""Longest wait of a tool for the store: nobody's request waits for it, and a resident set may be large."""
_ANSWER_S = 30.0
"""Longest wait for a worker, or for the mirror to be loaded."""

Say = Callable[[str], None]


async def check_up(run: Run, settings: Settings, parity_key: bytes, *, is_repair: bool, say: Say) -> dict[str, Any]:
    """Examine a deployment, and have it repaired and look again if that is asked for; what `doctor --json` prints.

    Raises `ConfigError` where the store refuses the user.
    """
    async with _doctor(run, settings, parity_key) as doctor:
        findings = await doctor.examine()
        repaired: list[str] = []
        if is_repair and not findings.is_healthy:
            for problem in findings.problems:
                say(problem)
            repaired = await doctor.repair(findings)
            for line in repaired or ["nothing here can be repaired from here"]:
                say(line)
            if repaired:
                findings = await doctor.examine()
    return _state(findings, repaired)


@contextlib.asynccontextmanager
async def _doctor(run: Run, settings: Settings, parity_key: bytes) -> AsyncIterator[Doctor]:
    """A doctor and all that it looks at; a store that is away is for it to find."""
    scheme = CacheScheme(settings.model_name, settings.block_size)
    name = f"doctor-{secrets.token_hex(4)}"
    async with contextlib.AsyncExitStack() as stack:
        directory = RedisDirectory(run.redis_url, scheme)
        mirror = MirroredDirectory(directory, directory.feed(name))
        stack.push_async_callback(mirror.close)
        connect_error = ""
        try:
            await directory.connect()
        except DirectoryUnavailable as error:
            connect_error = str(error)
        survey = StoreSurvey(run.redis_url, scheme, deadline_s=TOOL_DEADLINE_S)
        stack.push_async_callback(survey.close)
        yield Doctor(
            map(WorkerId, run.workers),
            survey,
            mirror,
            functools.partial(_inspect, RouterId(name), bytes.fromhex(run.secret)),
            parity_key=parity_key,
            connect_error=connect_error,
            # Past this a publisher whose call failed has tried again.
            pause_s=Settings(**run.settings).heartbeat_s,
            answer_s=_ANSWER_S,
        )


async def _inspect(router: RouterId, secret: bytes, info: WorkerInfo, is_repair: bool) -> Inspected:
    connect = functools.partial(open_channel, info.address)
    return await inspect_worker(connect, info.worker, info.instance, router, secret, is_repair=is_repair)


def _state(findings: Findings, repaired: list[str]) -> dict[str, Any]:
    return {
        "is_healthy": findings.is_healthy,
        "problems": findings.problems,
        "notes": findings.notes,
        "repaired": repaired,
        "store": {
            "is_reachable": not findings.store_error,
            "error": findings.store_error,
            "connect_error": findings.connect_error,
            "servers": [{**asdict(server), "may_evict": server.may_evict} for server in findings.servers],
            "leftovers": findings.leftovers,
        },
        "mirror": {
            "load_s": findings.mirror_load_s,
            "lag_s": findings.mirror_lag_s,
            "error": findings.mirror_error,
        },
        "workers": [{**asdict(found), "spoilt": list(found.spoilt)} for found in findings.workers],
    }


def check_up_text(state: Mapping[str, Any]) -> str:
    """What was found as tables, and then what is wrong."""
    rows: list[tuple[str, ...]] = [
        (
            "worker", "state", "parity", "engine", "store", "mirror", "phantom", "missing", "mismatched", "moving",
            "pending", "lag", "batch", "lease", "drifts",
        )
    ]  # fmt: skip
    for worker in state["workers"]:
        cells = [worker[name] for name in ("worker", "state", "parity", "num_resident", "num_in_store")]
        cells += [worker[f"num_{name}"] for name in ("in_mirror", "phantom", "missing", "mismatched", "moving")]
        cells += [worker["num_pending"], _seconds(worker["lag_s"])]
        cells += [f"{or_dash(worker['store_seq'])}/{or_dash(worker['seq'])}", _seconds(worker["lease_left_s"])]
        rows.append(tuple(map(or_dash, [*cells, worker["num_drifts"]])))
    parts = [table(rows)]
    if state["store"]["servers"]:
        parts.append(table([_SERVER_HEAD, *map(_server_row, state["store"]["servers"])]))
    mirror = state["mirror"]
    if mirror["lag_s"] is not None:
        parts.append(f"mirror: loaded in {mirror['load_s']:.3f} s, level with the store within {mirror['lag_s']:.3f} s")
    if state["repaired"]:
        parts.append("\n".join(f"repaired: {line}" for line in state["repaired"]))
    if state["notes"]:
        parts.append("\n".join(state["notes"]))
    parts.append("\n".join(state["problems"]) or ("nothing else is amiss" if state["notes"] else "all is well"))
    return "\n\n".join(parts)


_SERVER_HEAD = (
    "store", "version", "role", "ping p50", "memory", "limit", "when full", "evicted", "keys", "clients", "saves",
)  # fmt: skip


def _server_row(server: Mapping[str, Any]) -> tuple[str, ...]:
    ping_s, is_failing = server["ping_p50_s"], server["is_save_failing"]
    cells = [server["name"], server["version"], server["role"], None if ping_s is None else f"{ping_s * 1e6:.0f} us"]
    cells += [_mib(server["used_memory_bytes"]), _mib(server["max_memory_bytes"]), server["eviction_policy"]]
    cells += [server["num_evicted"], server["num_keys"]]
    cells.append(None if server["num_clients"] is None else f"{server['num_clients']}/{or_dash(server['max_clients'])}")
    saves = "append-only file" if server["has_append_only_file"] else "ok"
    cells.append(None if is_failing is None else "failing" if is_failing else saves)
    return tuple(map(or_dash, cells))


def _seconds(duration_s: float | None) -> str | None:
    return None if duration_s is None else f"{duration_s:.1f} s"


def _mib(num_bytes: int | None) -> str | None:
    return None if num_bytes is None else f"{num_bytes / (1 << 20):.1f} MiB"
