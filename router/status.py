"""The state of a running deployment, asked of its store and of each worker itself."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Mapping
from typing import Any

from router import changes, runfile
from router.pins import connected, of_this_life
from router.tables import or_dash
from shared.config import Settings
from shared.directory.base import WorkerRecord
from shared.directory.embedded import is_kept, restarts
from shared.directory.pin_board import WorkerPins
from shared.errors import KvrouteError
from shared.transport.client import connect_worker
from shared.types import RouterId, WorkerId, WorkerStatus

_ANSWER_S = 2.0
"""How long a worker may take to tell its load before it is shown as silent."""


async def deployment_state(run: runfile.Run, settings: Settings) -> dict[str, Any]:
    """What `kvroute status` shows, as plain values. A store or a worker that is silent is part of the answer."""
    state: dict[str, Any] = {
        "is_running": run.is_ready and run.is_alive,
        "model": settings.model_name,
        "block_size": settings.block_size,
        "ray_address": run.ray_address,
        "store": "ok",
        "outdated": changes.outdated(run),
        "workers": [],
    }
    if run.has_own_store:
        state["store_restarts"] = restarts(run.redis_url)
        state["is_store_kept"] = is_kept(run.redis_url)
    records: dict[str, WorkerRecord] = {}
    pins: dict[WorkerId, WorkerPins] = {}
    try:
        async with connected(run, settings) as (directory, board):
            found = await directory.workers()
            records = {record.info.worker: record for record in found if record.info.worker in run.workers}
            live = {record.info.worker: record.info for record in records.values()}
            pins = of_this_life(await board.reports(live), live)
    except KvrouteError as error:
        state["store"] = f"unreachable: {error}"
    statuses = await asyncio.gather(*(_ask(record, run) for record in records.values()))
    worker_to_status = dict(zip(records, statuses, strict=True))
    absent = "no lease" if state["store"] == "ok" else "unknown"
    state["workers"] = [
        _worker_state(worker, records.get(worker), worker_to_status.get(worker), pins.get(WorkerId(worker)), absent)
        for worker in run.workers
    ]
    return state


async def _ask(record: WorkerRecord, run: runfile.Run) -> WorkerStatus | None:
    """The worker's load in its own words; `None` if it does not answer."""
    changed = asyncio.Event()
    client = connect_worker(
        record.info,
        RouterId(f"status-{secrets.token_hex(4)}"),
        bytes.fromhex(run.secret),
        on_change=changed.set,
        rng=random.Random(0),
    )
    try:
        with contextlib.suppress(TimeoutError, KvrouteError):
            async with asyncio.timeout(_ANSWER_S):
                await client.connect()
                while client.status is None:
                    await changed.wait()
                    changed.clear()
        return client.status
    finally:
        await client.close()


def _worker_state(
    worker: str, record: WorkerRecord | None, status: WorkerStatus | None, pins: WorkerPins | None, absent: str
) -> dict[str, Any]:
    if record is None:
        word = absent
    elif status is None:
        word = "silent"
    else:
        word = "draining" if status.is_draining or record.is_draining else "ready"
    return {
        "worker": worker,
        "state": word,
        "address": record.info.address if record else None,
        "engine": record.info.engine if record else None,
        "eviction": record.info.eviction if record else None,
        "num_running": status.num_running if status else None,
        "num_waiting": status.num_waiting if status else None,
        "kv_used_blocks": status.kv_used_blocks if status else None,
        "kv_total_blocks": status.kv_total_blocks if status else None,
        "num_resident_blocks": status.num_resident_blocks if status else None,
        "num_pinned_blocks": pins.num_pinned_blocks if pins else None,
        "pin_budget_blocks": pins.budget_blocks if pins else None,
    }


def status_text(state: Mapping[str, Any]) -> str:
    """The state of a deployment as a table."""
    lines = [f"model {state['model']}, KV blocks of {state['block_size']} tokens, store {state['store']}"]
    lines += [f"! {told}" for told in state.get("store_restarts", ())]
    if state.get("is_store_kept") is False:
        lines.append("! the keeper of the store has died, and the store with it; `kvroute up` starts both again, empty")
    if state["outdated"]:
        names = ", ".join(state["outdated"])
        lines.append(f"! {names}: started with other settings or by another version; `kvroute up` replaces them")
    lines.append(
        f"{'worker':<12} {'state':<12} {'running':>7} {'waiting':>7} {'KV blocks':>12} {'cached':>7} "
        f"{'pinned':>9}  engine"
    )
    for worker in state["workers"]:
        pinned = f"{or_dash(worker['num_pinned_blocks'])}/{or_dash(worker['pin_budget_blocks'])}"
        used = f"{or_dash(worker['kv_used_blocks'])}/{or_dash(worker['kv_total_blocks'])}"
        lines.append(
            f"{worker['worker']:<12} {worker['state']:<12} {or_dash(worker['num_running']):>7} "
            f"{or_dash(worker['num_waiting']):>7} {used:>12} {or_dash(worker['num_resident_blocks']):>7} "
            f"{pinned:>9}  {worker['engine'] or '-'}"
        )
    return "\n".join(lines)
