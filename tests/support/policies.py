"""Loads and requests as policies get them, built from what a test cares about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from router.policies.base import Loads, Requests
from shared.types import Instance, WorkerId

IDLE: dict[str, float] = {
    "is_cache_aware": True,
    "is_home": True,
    "num_requests": 0,
    "num_waiting": 0,
    "max_num_seqs": 8,
    "queued_prefill_tokens": 0,
    "kv_used_blocks": 0,
    "kv_demand_blocks": 0,
    "kv_total_blocks": 800,
    "num_resident_blocks": 0,
    "step_budget_tokens": 2048,
    "prefill_s_per_token": 1e-4,
    "step_s": 0.01,
    "decode_s_per_seq": 0.001,
    "round_trip_s": 0.0,
    "status_age_s": 0.0,
}


def loads_of(*columns: dict[str, Any]) -> Loads:
    """A column for each, named w0, w1 and so on where it has no `worker`; idle in what it does not say."""
    workers = tuple(WorkerId(column.get("worker", f"w{at}")) for at, column in enumerate(columns))
    assert list(workers) == sorted(workers)
    fields = {name: np.array([column.get(name, idle) for column in columns]) for name, idle in IDLE.items()}
    return Loads(
        workers=workers,
        instances=(Instance("i"),) * len(workers),
        hashes=np.array([xxh3_64_intdigest(worker.encode()) for worker in workers], dtype=np.uint64),
        **fields,
    )


def request_of(matched_tokens: Sequence[int], num_prompt_tokens: int = 4096, **fields: Any) -> Requests:
    """One request with its matched tokens on each worker."""
    return requests_of((matched_tokens, {"num_prompt_tokens": num_prompt_tokens, **fields}))


def requests_of(*rows: tuple[Sequence[int], dict[str, Any]]) -> Requests:
    """A row for each pair of matched tokens and what else is said of the request."""

    def column(name: str, default: float, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
        return np.array([fields.get(name, default) for _, fields in rows], dtype=dtype)

    return Requests(
        ordinals=column("ordinal", 0, np.int64),
        num_prompt_tokens=column("num_prompt_tokens", 4096, np.int64),
        prefix_hashes=column("prefix_hash", 11, np.uint64),
        next_hashes=column("next_hash", 12, np.uint64),
        demand_blocks=column("demand_blocks", 66, np.int64),
        age_s=column("age_s", 0.0, np.float64),
        matched_tokens=np.array([matched for matched, _ in rows], dtype=np.int64),
        under_way=np.array([fields.get("under_way", (0, 0, 0)) for _, fields in rows], dtype=np.int64),
    )
