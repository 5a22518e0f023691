"""Compares the policies in virtual time and prints one JSON line: `python -m tests.bench.bench_policies`.

Four fake workers whose prefills take turns, behind the real router, hosts and publishers. Thirty prefixes with Zipf
popularity of which a worker's cache holds eight, own tails, Poisson arrivals. Loads are multiples of what the fleet
could prefill if every request found its prefix in the cache half the time. The same arrivals for every policy, seed 0.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from router.requests import RequestTrace
from shared.vtime import run_virtual
from tests.support.rack import ask, prompt, rack

POLICIES = ("cost", "random", "round_robin", "least_load", "power_of_two", "prefix_hash")
SEED = 0
LOADS = (0.4, 0.7, 1.0, 1.3)
NUM_WORKERS = 4
NUM_PREFIXES = 30
NUM_REQUESTS = 600
PREFIX_TOKENS = 1536
TAIL_TOKENS = 256
CACHED_PREFIXES = 8
PREFILL_S_PER_TOKEN = 1e-4


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt: list[int]
    max_tokens: int


def arrivals(load: float) -> list[Arrival]:
    draws = random.Random(SEED)
    weights = [1.0 / (rank + 1) ** 0.6 for rank in range(NUM_PREFIXES)]
    mean_prefill_s = (TAIL_TOKENS + PREFIX_TOKENS / 2) * PREFILL_S_PER_TOKEN
    rate_per_s = load * NUM_WORKERS / mean_prefill_s
    at_s, arrived = 0.0, []
    for index in range(NUM_REQUESTS):
        at_s += draws.expovariate(rate_per_s)
        prefix = draws.choices(range(NUM_PREFIXES), weights)[0]
        tokens = prompt(prefix, PREFIX_TOKENS, tail=index, num_tail_tokens=TAIL_TOKENS)
        arrived.append(Arrival(at_s, tokens, draws.randrange(8, 57)))
    return arrived


async def run_policy(policy: str, arrived: Sequence[Arrival], max_num_seqs: int) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    num_blocks = CACHED_PREFIXES * PREFIX_TOKENS // 16
    async with (
        rack(
            NUM_WORKERS,
            prefill_s_per_token=PREFILL_S_PER_TOKEN,
            token_s=0.01,
            decode_s_per_seq=0.0005,
            is_contended=True,
            tokens_per_delta=8,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            step_budget_tokens=512,
        ) as workers,
        workers.router(policy) as router,
    ):
        started_at_s = loop.time()

        async def send(index: int, arrival: Arrival) -> RequestTrace:
            await asyncio.sleep(started_at_s + arrival.at_s - loop.time())
            return (await ask(router, f"r{index}", arrival.prompt, arrival.max_tokens))[1]

        traces = await asyncio.gather(*(send(index, arrival) for index, arrival in enumerate(arrived)))
        elapsed_s = loop.time() - started_at_s
    ttfts_s = sorted(trace.first_token_at_s - trace.received_at_s for trace in traces)  # type: ignore[operator]
    num_prompt_tokens = sum(len(arrival.prompt) for arrival in arrived)
    return {
        "hit_ratio": round(sum(trace.cached_tokens for trace in traces) / num_prompt_tokens, 3),
        "ttft_mean_ms": round(1e3 * statistics.mean(ttfts_s), 1),
        "ttft_p99_ms": round(1e3 * ttfts_s[len(ttfts_s) * 99 // 100], 1),
        "latency_mean_ms": round(
            1e3 * statistics.mean(trace.finished_at_s - trace.received_at_s for trace in traces), 1
        ),
        "makespan_s": round(elapsed_s, 2),
    }


def main(max_num_seqs: int = 64) -> None:
    table = {
        f"load_{load:g}": {policy: run_virtual(run_policy(policy, arrivals(load), max_num_seqs)) for policy in POLICIES}
        for load in LOADS
    }
    command = "python -m tests.bench.bench_policies"
    sys.stdout.write(json.dumps({"bench": "policies", "command": command, "seed": SEED, **table}) + "\n")


if __name__ == "__main__":
    main()
