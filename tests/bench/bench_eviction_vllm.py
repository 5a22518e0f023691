"""Measures the eviction rules in real engines and prints a table or, with `--json`, one JSON line.

`python -m tests.bench.bench_eviction_vllm --model tiny|smollm2`. The workloads of `tests.support.eviction_workloads`,
one request after another, in float32. For each rule: prompt tokens that came from the cache, those that a boundless
cache would have given, and the median time to the first token of the measured requests, which are a single one where a
prompt is not asked for meanwhile. The tokens are the same in each run, the times are not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from shared.config import Settings
from tests.support.eviction_workloads import MODELS, RULES, WORKLOADS, Tally, run_workloads


async def measure(model: str, cache_dir: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Workload to rule to figures."""
    rule_to_tallies = {rule: await run_workloads(model, MODELS[model], rule, WORKLOADS, cache_dir) for rule in RULES}
    return {workload: {rule: figures(rule_to_tallies[rule][workload]) for rule in RULES} for workload in WORKLOADS}


def figures(tally: Tally) -> dict[str, Any]:
    return {
        "cached_tokens": tally.cached_tokens,
        "possible_tokens": tally.possible_tokens,
        "ttft_p50_ms": round(statistics.median(tally.ttfts_s) * 1e3, 1),
        "is_same_answer": tally.is_same_answer,
    }


def table(measured: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [f"{'cached/possible tokens, TTFT p50':<34}" + "".join(f"{rule:>26}" for rule in RULES)]
    for workload, rules in measured.items():
        cells = (
            f"{cell['cached_tokens']}/{cell['possible_tokens']}, {cell['ttft_p50_ms']:.1f} ms"
            for cell in rules.values()
        )
        lines.append(f"{workload:<34}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument("--json", action="store_true", help="Print one JSON line.")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.model, Settings().model_cache_dir))
    sys.stdout.write((json.dumps(result) if arguments.json else table(result)) + "\n")
