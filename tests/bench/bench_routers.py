"""Compares several routers with one on the same simulated fleet: `python -m tests.bench.bench_routers`.

Sixteen 13B workers and the first requests of Mooncake's conversation trace or of a made-up one, prompts cut to 16,384
tokens. Load is the rate of arrivals over what round robin serves when saturated; the lag is one way, of statuses as of
all else. Each number of routers is compared with one router of the same lag, and with one without any. Beside that, a
burst of equal cold prompts is dealt to the routers, and the workers are counted that compute it.

Without `--proof` a short part runs. All figures are simulated, the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

from router.policies import make_policy
from router.replay import Simulate, saturated_rate_per_s
from router.replay_report import PolicyReport, report
from router.simulation import Arrival, FleetSpec, simulate
from router.tables import table
from router.workload import Workload, arrival_times_s, select
from shared.hashing import pack_tokens
from tests.bench.bench_routing import _listed, _say
from tests.support.routing_runs import (
    BLOCK_SIZE_TOKENS,
    MAX_PROMPT_TOKENS,
    MOONCAKE,
    NUM_WORKERS,
    PROFILE,
    SLO,
    WORKLOADS,
    trace_requests,
)
from tests.support.traces import TRACE_DIR_VARIABLES, trace_path

COMMAND = "python -m tests.bench.bench_routers"
POLICY = "cost"
PROOF_ROUTERS, SHORT_ROUTERS = (1, 2, 4, 8), (1, 4)
PROOF_LOADS, SHORT_LOADS = (0.4, 0.7, 1.0), (0.7,)
PROOF_LAGS_S = (0.1, 0.5)
PROOF_REQUESTS, SHORT_REQUESTS = 1500, 400
BURST_REQUESTS = 32
BURST_PROMPT_TOKENS = 8192
BURST_ANSWER_TOKENS = 300
BURST_AT_S = 3.0
"""By then every router has heard of the others."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number of routers in one situation."""

    load: float
    lag_s: float
    num_routers: int
    ttft_mean_s: float
    ttft_p99_s: float
    ttft_ratio: float
    """Mean TTFT over that of one router with the same lag."""
    ttft_ratio_no_lag: float
    """The same over one router without lag."""
    hit_ratio: float
    hit_difference: float
    """Over one router with the same lag."""
    load_imbalance: float
    """The busiest worker's busy time over the mean."""
    goodput_share: float
    num_refusals: int
    """Submits that came to a worker after those of other routers."""


@dataclass(frozen=True, slots=True)
class Burst:
    """What became of equal prompts that nobody held."""

    lag_s: float
    num_routers: int
    num_computing: int
    """Workers that computed the prompt rather than take it from their cache."""
    most_on_one: int
    """Requests of the worker that got most of them."""
    ttft_mean_s: float
    e2e_mean_s: float


def rows(
    spec: FleetSpec,
    workload_of: Callable[[float], Workload],
    *,
    loads: Sequence[float],
    lags_s: Sequence[float],
    routers: Sequence[int],
    run: Simulate,
    say: Callable[[str], None],
) -> list[Row]:
    """Simulate every situation, one router first."""

    def figures(workload: Workload, num_routers: int, lag_s: float) -> tuple[PolicyReport, int]:
        result = run(replace(spec, num_routers=num_routers, lag_s=lag_s), make_policy(POLICY), workload)
        possible = workload.possible_cached_tokens(spec.block_size_tokens)
        return report(POLICY, result, slo=SLO, possible_cached_tokens=possible), result.num_refusals

    found: list[Row] = []
    for load in loads:
        workload = workload_of(load)
        no_lag, _ = figures(workload, 1, 0.0)
        for lag_s in lags_s:
            one, _ = figures(workload, 1, lag_s)
            for num_routers in routers:
                several, num_refusals = figures(workload, num_routers, lag_s) if num_routers > 1 else (one, 0)
                found.append(_row(load, lag_s, num_routers, several, one, no_lag, num_refusals))
                say(f"load {load:g}, lag {lag_s:g} s, {num_routers} routers: {found[-1].ttft_mean_s:.3f} s")
    return found


def _row(
    load: float,
    lag_s: float,
    num_routers: int,
    several: PolicyReport,
    one: PolicyReport,
    no_lag: PolicyReport,
    num_refusals: int,
) -> Row:
    assert several.ttft_mean_s is not None
    assert several.ttft_p99_s is not None
    assert one.ttft_mean_s is not None
    assert no_lag.ttft_mean_s is not None
    return Row(
        load=load,
        lag_s=lag_s,
        num_routers=num_routers,
        ttft_mean_s=round(several.ttft_mean_s, 4),
        ttft_p99_s=round(several.ttft_p99_s, 4),
        ttft_ratio=round(several.ttft_mean_s / one.ttft_mean_s, 3),
        ttft_ratio_no_lag=round(several.ttft_mean_s / no_lag.ttft_mean_s, 3),
        hit_ratio=round(several.hit_ratio, 4),
        hit_difference=round(several.hit_ratio - one.hit_ratio, 4),
        load_imbalance=round(several.load_imbalance, 3),
        goodput_share=round(several.goodput_share, 4),
        num_refusals=num_refusals,
    )


def burst(spec: FleetSpec, run: Simulate) -> Burst:
    """Deal equal prompts that nobody holds to the routers, all at once."""
    rng = random.Random(spec.seed)
    prompt = pack_tokens([rng.randrange(30_000) for _ in range(BURST_PROMPT_TOKENS)])
    result = run(spec, make_policy(POLICY), [Arrival(BURST_AT_S, prompt, BURST_ANSWER_TOKENS)] * BURST_REQUESTS)
    ttfts_s = [one.first_token_at_s - one.arrived_at_s for one in result.outcomes if one.first_token_at_s is not None]
    e2es_s = [one.finished_at_s - one.arrived_at_s for one in result.outcomes if one.finished_at_s is not None]
    return Burst(
        lag_s=spec.lag_s,
        num_routers=spec.num_routers,
        num_computing=len({one.worker for one in result.outcomes if one.cached_tokens < BURST_PROMPT_TOKENS // 2}),
        most_on_one=max(Counter(one.worker for one in result.outcomes).values()),
        ttft_mean_s=round(sum(ttfts_s) / len(ttfts_s), 4),
        e2e_mean_s=round(sum(e2es_s) / len(e2es_s), 4),
    )


def text(found: Sequence[Row], bursts: Sequence[Burst]) -> str:
    """Both tables, for people."""
    lines = [
        [
            "load",
            "lag",
            "routers",
            "TTFT",
            "p99",
            "over one",
            "over one, no lag",
            "hits",
            "imbalance",
            "goodput",
            "late",
        ]
    ]
    lines += [
        [
            f"{row.load:g}",
            f"{row.lag_s:g} s",
            str(row.num_routers),
            f"{row.ttft_mean_s:.3f} s",
            f"{row.ttft_p99_s:.2f} s",
            f"{row.ttft_ratio:.3f}",
            f"{row.ttft_ratio_no_lag:.3f}",
            f"{row.hit_ratio:.1%} ({100 * row.hit_difference:+.1f})",
            f"{row.load_imbalance:.2f}",
            f"{row.goodput_share:.1%}",
            str(row.num_refusals),
        ]
        for row in found
    ]
    head = [["lag", "routers", "workers that compute it", "most on one", "TTFT", "e2e"]]
    head += [
        [
            f"{one.lag_s:g} s",
            str(one.num_routers),
            str(one.num_computing),
            str(one.most_on_one),
            f"{one.ttft_mean_s:.2f} s",
            f"{one.e2e_mean_s:.1f} s",
        ]
        for one in bursts
    ]
    title = f"{BURST_REQUESTS} equal cold prompts of {BURST_PROMPT_TOKENS:,} tokens, answers of {BURST_ANSWER_TOKENS}"
    return f"{table(lines)}\n\n{title}\n{table(head)}"


def main(arguments: Sequence[str] | None = None, run: Simulate = simulate) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Several routers against one on a simulated fleet.")
    parser.add_argument("--proof", action="store_true", help="all that is claimed; some ten minutes")
    parser.add_argument("--workload", choices=WORKLOADS, default=MOONCAKE)
    parser.add_argument("--routers", type=_listed(int), metavar="N,N")
    parser.add_argument("--loads", type=_listed(float), metavar="L,L")
    parser.add_argument("--lags-s", type=_listed(float), metavar="S,S")
    parser.add_argument("--blocks", type=int, default=860, metavar="N", help="KV blocks of a worker")
    parser.add_argument("--requests", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true", help="one JSON line in place of tables")
    given = parser.parse_args(arguments)
    routers = given.routers or (PROOF_ROUTERS if given.proof else SHORT_ROUTERS)
    lags_s = given.lags_s or (PROOF_LAGS_S if given.proof else PROOF_LAGS_S[:1])
    loads = given.loads or (PROOF_LOADS if given.proof else SHORT_LOADS)

    spec = FleetSpec(NUM_WORKERS, PROFILE, num_blocks=given.blocks, seed=given.seed)
    name = given.workload
    if name == MOONCAKE and not trace_path().is_file():
        _say(f"{trace_path()} is missing; {TRACE_DIR_VARIABLES[0]} names its folder. Made-up chats take its place")
        name = "conversations"
    requests = select(
        trace_requests(name, given.seed),
        name,
        num_blocks=given.blocks,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        limit=given.requests or (PROOF_REQUESTS if given.proof else SHORT_REQUESTS),
        max_prompt_tokens=MAX_PROMPT_TOKENS,
    )
    saturated_per_s = saturated_rate_per_s(spec, requests, run=run)

    def workload_of(load: float) -> Workload:
        rng = random.Random(given.seed)
        times_s = arrival_times_s(requests, rate_per_s=load * saturated_per_s, is_spread=True, rng=rng)
        return Workload(requests, times_s)

    bursts = [
        burst(replace(spec, num_routers=num_routers, lag_s=lag_s), run)
        for lag_s, num_routers in product(lags_s, routers)
    ]
    found = rows(spec, workload_of, loads=loads, lags_s=lags_s, routers=routers, run=run, say=_say)
    if given.json:
        told = {"bench": "routers", "command": COMMAND, "simulated": True, "workload": name, "seed": given.seed}
        body = {**told, "rows": [asdict(row) for row in found], "bursts": [asdict(one) for one in bursts]}
        sys.stdout.write(json.dumps(body) + "\n")
    else:
        sys.stdout.write(f"simulated; {COMMAND}\n{text(found, bursts)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
