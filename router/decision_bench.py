"""Measures what deciding costs a router: the real queue, fleet, hints and policy over clients that only tell statuses.

`decision`: a prompt of 8,192 tokens, from its tokens to its booking, one after the other. All workers hold its first
half, one holds all of it. Before each a status comes in from some worker, and the request before has ended.

`dispatch`: see `router.dispatch_bench`.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from router.bench_rig import CHAIN_BLOCKS, INSTANCE, PROMPT_TOKENS, SCHEME, STATUS, BenchDirectory, bench_rig
from router.dispatch_bench import measure_dispatch
from router.policies.base import FleetState, Loads, Requests
from router.policies.cost import CostPolicy
from router.requests import GenerateRequest
from shared.hashing import block_keys, root_key
from shared.types import RequestId, Sampling, WorkerId

_ROOT = root_key(SCHEME)
_HALF_BYTES = PROMPT_TOKENS // 2 * 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    seed: int = 0
    num_workers: int = 64
    num_entries: int = 1_000_000
    num_decisions: int = 2_000
    num_held: int = 1_000
    arrivals_per_s: float = 500.0
    num_dispatched: int = 4_000


async def measure(say: Callable[[str], None], sizes: Sizes | None = None) -> dict[str, float]:
    """All figures by name. Takes about a minute and a gigabyte."""
    sizes = sizes or Sizes()
    figures = {"seed": float(sizes.seed), "num_workers": float(sizes.num_workers)}
    say("ranking fleets of three sizes")
    for num_workers in (8, 64, 256):
        figures[f"rank_{num_workers}_workers_us_p50"] = _measure_ranking(sizes, num_workers)
    say(f"filling a mirror with {sizes.num_entries} entries of {sizes.num_workers} workers")
    figures |= await _measure_decisions(sizes)
    gc.collect()
    say(f"holding {sizes.num_held} requests while {sizes.arrivals_per_s:g} arrive each second")
    dispatch = await measure_dispatch(
        sizes.seed, sizes.num_workers, sizes.num_held, sizes.arrivals_per_s, sizes.num_dispatched
    )
    return figures | dispatch


# One decision after the other.


def _measure_ranking(sizes: Sizes, num_workers: int) -> float:
    """Microseconds to weigh all workers for one request and find the best."""
    rng = np.random.default_rng(sizes.seed)

    def ints(high: int) -> Any:
        return rng.integers(0, high, num_workers)

    def all_of(value: float) -> Any:
        return np.full(num_workers, value)

    loads = Loads(
        workers=tuple(WorkerId(f"w{number:03}") for number in range(num_workers)),
        instances=(INSTANCE,) * num_workers,
        hashes=rng.integers(0, 2**63, num_workers, dtype=np.uint64),
        is_cache_aware=all_of(True),
        is_home=all_of(True),
        num_requests=ints(32),
        num_waiting=all_of(0),
        max_num_seqs=all_of(64),
        queued_prefill_tokens=ints(8192),
        kv_used_blocks=ints(1000),
        kv_demand_blocks=ints(1000),
        kv_total_blocks=all_of(2000),
        num_resident_blocks=all_of(2000),
        step_budget_tokens=all_of(2048),
        prefill_s_per_token=all_of(1e-4),
        step_s=all_of(0.01),
        decode_s_per_seq=all_of(5e-4),
        round_trip_s=all_of(0.0),
        status_age_s=all_of(0.05),
    )
    request = Requests(
        ordinals=np.array([0]),
        num_prompt_tokens=np.array([PROMPT_TOKENS]),
        prefix_hashes=np.array([1], dtype=np.uint64),
        next_hashes=np.array([2], dtype=np.uint64),
        demand_blocks=np.array([130]),
        age_s=np.array([0.0]),
        matched_tokens=ints(CHAIN_BLOCKS)[None, :] * SCHEME.block_size_tokens,
    )
    fleet, draws, policy = FleetState(1e-4, 0.4, 0.2, 1.0, 64.0), random.Random(sizes.seed), CostPolicy()
    return _share(_time(lambda: policy.costs(request, loads, fleet, draws).best(loads), sizes.num_decisions), 0.5)


async def _measure_decisions(sizes: Sizes) -> dict[str, float]:
    async with bench_rig(sizes.num_workers, sizes.seed) as rig:
        prompts = _fill(rig.directory, sizes)
        for client in rig.clients:
            client.tell(STATUS)
        await asyncio.sleep(0)
        hashing = _time(lambda: block_keys(prompts[0], SCHEME.block_size_tokens, _ROOT), sizes.num_decisions)
        draws = random.Random(sizes.seed)
        durations_us: list[float] = []
        for number in range(sizes.num_decisions + 1):
            rig.now_s[0] += 0.01
            draws.choice(rig.clients).tell(replace(STATUS, num_running=draws.randrange(8)))
            await asyncio.sleep(0)
            tokens = draws.choice(prompts)
            request = GenerateRequest(RequestId(f"r{number}"), tokens, Sampling(max_tokens=64))
            started_at_s = time.perf_counter()
            keys = block_keys(tokens, SCHEME.block_size_tokens, _ROOT)
            placement = await rig.queue.place(request, keys, frozenset(), rig.now_s[0])
            durations_us.append((time.perf_counter() - started_at_s) * 1e6)
            rig.hints.withdraw(placement.promise)
            rig.fleet.release(placement.booking)
        durations_us = sorted(durations_us[1:])
        return {
            "num_mirror_entries": float(rig.directory.mirror.num_entries),
            "hash_8k_us_p50": _share(hashing, 0.5),
            "decision_us_p50": _share(durations_us, 0.5),
            "decision_us_p99": _share(durations_us, 0.99),
            "decisions_per_s": 1e6 * len(durations_us) / sum(durations_us),
        }


def _fill(directory: BenchDirectory, sizes: Sizes) -> list[bytes]:
    """Give every worker its share of the entries; packed prompts that it holds, some for each worker."""
    draws = random.Random(sizes.seed)
    beginning = draws.randbytes(_HALF_BYTES)
    shared = block_keys(beginning, SCHEME.block_size_tokens, _ROOT)
    num_chains = max(1, sizes.num_entries // (sizes.num_workers * len(shared)) - 1)
    prompts = []
    for worker in directory.names:
        copy = directory.mirror.begin(worker, INSTANCE)
        directory.mirror.apply(copy, shared, ())
        for chain in range(num_chains):
            rest = draws.randbytes(_HALF_BYTES)
            directory.mirror.apply(copy, block_keys(rest, SCHEME.block_size_tokens, shared[-1]), ())
            if chain < 4:
                prompts.append(beginning + rest)
        directory.mirror.show(copy)
    return prompts


def _time(call: Callable[[], object], num_calls: int) -> list[float]:
    """Sorted durations in microseconds, after one call that does not count."""
    call()
    durations_us = []
    for _ in range(num_calls):
        started_at_s = time.perf_counter()
        call()
        durations_us.append((time.perf_counter() - started_at_s) * 1e6)
    return sorted(durations_us)


def _share(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
