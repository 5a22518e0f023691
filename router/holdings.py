"""`kvroute directory`: who holds how much of a prompt, and how much the directory holds of whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from router.checkup import TOOL_DEADLINE_S
from router.runfile import Run
from router.tables import or_dash, table
from shared.config import Settings
from shared.directory import connect_directory
from shared.directory.survey import StoreSurvey
from shared.errors import DirectoryUnavailable
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import CacheScheme, WorkerId


async def who_holds(run: Run, settings: Settings, token_ids: Sequence[int], *, salt: str) -> dict[str, Any]:
    """How much of a prompt each worker holds now. Raises `DirectoryUnavailable` where the store does not answer."""
    scheme = CacheScheme(settings.model_name, settings.block_size)
    keys = block_keys(pack_tokens(token_ids), scheme.block_size_tokens, root_key(scheme, salt=salt))
    directory = await connect_directory(
        run.redis_url, scheme, match_deadline_s=TOOL_DEADLINE_S, publish_deadline_s=TOOL_DEADLINE_S
    )
    try:
        live = {record.info.worker for record in await directory.workers()}
        found = await directory.match(keys, [worker for worker in map(WorkerId, run.workers) if worker in live])
    finally:
        await directory.close()
    workers = []
    for worker in map(WorkerId, run.workers):
        num_blocks = found[worker].num_blocks if worker in found else 0
        workers.append(
            {
                "worker": worker,
                "is_away": worker not in live,
                "num_blocks": num_blocks,
                "num_tokens": num_blocks * scheme.block_size_tokens,
            }
        )
    return {
        "num_prompt_tokens": len(token_ids),
        "num_prompt_blocks": len(keys),
        "block_size": scheme.block_size_tokens,
        "workers": workers,
    }


def who_text(state: Mapping[str, Any]) -> str:
    """Who holds what, as a table."""
    rows = [("worker", "blocks", "tokens")]
    for worker in state["workers"]:
        told = ("away", "-") if worker["is_away"] else (str(worker["num_blocks"]), str(worker["num_tokens"]))
        rows.append((worker["worker"], *told))
    head = f"{state['num_prompt_tokens']} tokens, {state['num_prompt_blocks']} full blocks of {state['block_size']}"
    return f"{head}\n{table(rows)}"


_SIZES = ("num_entries", "num_bytes", "num_stream_entries")


async def directory_size(run: Run, settings: Settings) -> dict[str, Any]:
    """How much the store holds of each worker, and why of some it is not known.

    Raises `DirectoryUnavailable` where all of it does not answer, `ConfigError` where it refuses the user.
    """
    scheme = CacheScheme(settings.model_name, settings.block_size)
    survey = StoreSurvey(run.redis_url, scheme, deadline_s=TOOL_DEADLINE_S)
    try:
        sizes = await survey.sizes(map(WorkerId, run.workers))
    finally:
        await survey.close()
    errors = [size.error for size in sizes.values() if size.error]
    if errors and len(errors) == len(sizes):
        raise DirectoryUnavailable(errors[0])
    workers = [{"worker": worker, **asdict(size)} for worker, size in sizes.items()]
    return {"workers": workers, "total": {name: _total([worker[name] for worker in workers]) for name in _SIZES}}


def size_text(state: Mapping[str, Any]) -> str:
    """Sizes as a table, the last row of which is the sum."""
    rows = [("worker", "blocks", "bytes", "stream entries")]
    for worker in [*state["workers"], {"worker": "total", **state["total"]}]:
        rows.append((worker["worker"], *(or_dash(worker[name]) for name in _SIZES)))
    unknown = [f"{worker['worker']}: not known: {worker['error']}" for worker in state["workers"] if worker["error"]]
    return "\n".join([table(rows), *unknown])


def _total(values: list[int | None]) -> int | None:
    """The sum; `None` where a part of it is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
