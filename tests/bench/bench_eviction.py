"""Compares the eviction rules on simulated pools: `python -m tests.bench.bench_eviction [--trace FILE] [--json]`.

Prompts are served one after another, so the figures are simulated hit ratios of blocks, not times, and the same
everywhere. Floods are counted over their second half, the rest after one turnover of the pool. Each figure is that of
all seeds together; `worst` is the least share, over the seeds, that `adaptive` gets of the hits of the rule that suits
the workload: `shared_first` in a flood, `lru` elsewhere. A trace is one in Mooncake's format, with blocks as its lines
have them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.errors import ConfigError
from tests.support import cache_workloads
from tests.support.cache_workloads import Prompt
from worker.eviction import FreeBlocks

COMMAND = "python -m tests.bench.bench_eviction"
RULES = ("lru", "shared_first", "adaptive")
NUM_SEEDS = 5
FLOOD_POOLS = (64, 256)
POOLS = (200, 640)
TRACE_POOLS = (500, 1000, 2000, 4000, 8000, 16000, 30000)


@dataclass(frozen=True, slots=True)
class Case:
    """One workload on one pool, with the prompts of each seed."""

    name: str
    num_blocks: int
    peer: str
    """The rule that `worst` is a share of."""
    counted_from: float
    """Share of the prompts that only warm the pool up."""
    runs: Sequence[Sequence[Prompt]]


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one case."""

    workload: str
    num_blocks: int
    hit_ratio: dict[str, float]
    """By rule."""
    worst: float
    head_start: float
    """Of `adaptive` at the end, in pool sizes, on average."""


def simulate(prompts: Sequence[Prompt], num_blocks: int, rule: str) -> tuple[list[int], float]:
    """Cached blocks of each prompt, and the head start at the end. A prompt longer than the pool is cut."""
    free: FreeBlocks[int] = FreeBlocks(rule, num_blocks)
    free.push_unhashed(range(num_blocks))
    hits = []
    for number, prompt in enumerate(prompts):
        request = str(number)
        keys = prompt[:num_blocks]
        blocks: list[int] = []
        for key in keys:
            block = free.find(key)
            if block is None:
                break
            blocks.append(block)
        hits.append(len(blocks))
        free.serve(blocks, request)
        new_blocks = [free.pop() for _ in keys[len(blocks) :]]
        for block, key in zip(new_blocks, keys[len(blocks) :], strict=True):
            free.cache(block, key, request, parent=blocks[-1] if blocks else None)
            blocks.append(block)
        free.push(reversed(blocks))
    return hits, free.head_start


def measure(case: Case) -> Row:
    hits = dict.fromkeys(RULES, 0)
    num_asked = 0
    shares, head_starts = [], []
    for prompts in case.runs:
        start = int(len(prompts) * case.counted_from)
        counted = {}
        for rule in RULES:
            found, head_start = simulate(prompts, case.num_blocks, rule)
            counted[rule] = sum(found[start:])
            hits[rule] += counted[rule]
        head_starts.append(head_start)
        num_asked += sum(min(len(prompt), case.num_blocks) for prompt in prompts[start:])
        if counted[case.peer]:
            shares.append(counted["adaptive"] / counted[case.peer])
    return Row(
        case.name,
        case.num_blocks,
        {rule: round(hits[rule] / num_asked, 4) for rule in RULES},
        round(min(shares, default=1.0), 3),
        round(sum(head_starts) / len(head_starts), 2),
    )


def cases() -> list[Case]:
    found = []
    seeds = range(NUM_SEEDS)
    for num_blocks in FLOOD_POOLS:
        for prompt_share in (0.05, 0.15):
            for share in (0.2, 0.1, 0.05, 0.02):
                name = f"flood: prompt of {prompt_share:.0%} of the pool in {share:.0%} of requests"
                runs = [
                    cache_workloads.flood(num_blocks, seed, share=share, prompt_share=prompt_share, num_turnovers=60)
                    for seed in seeds
                ]
                found.append(Case(name, num_blocks, "shared_first", 0.5, runs))
    for num_blocks in POOLS:
        after_one = 1 / cache_workloads.NUM_TURNOVERS
        runs = [cache_workloads.mixed_flood(num_blocks, seed) for seed in seeds]
        found.append(Case("flood: twenty prompts", num_blocks, "shared_first", 0.5, runs))
        for turnovers in (0.2, 0.5, 1.0, 2.0):
            runs = [cache_workloads.chats(num_blocks, seed, return_turnovers=turnovers) for seed in seeds]
            found.append(Case(f"chats: next turn after {turnovers:g} turnovers", num_blocks, "lru", after_one, runs))
        runs = [cache_workloads.phases(num_blocks, seed) for seed in seeds]
        found.append(Case("phases: flood, chats, flood, chats", num_blocks, "lru", after_one / 4, runs))
        runs = [cache_workloads.system_prompts(num_blocks, seed) for seed in seeds]
        found.append(Case("system prompts: half the pool", num_blocks, "lru", after_one, runs))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Simulated hit ratios of the eviction rules.")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format to run as well")
    parser.add_argument("--json", action="store_true", help="one JSON line in place of a table")
    parsed = parser.parse_args(arguments)
    all_cases = cases()
    if parsed.trace is not None:
        try:
            prompts = cache_workloads.read_trace(parsed.trace)
        except ConfigError as error:
            parser.error(f"--trace: {error}")
        all_cases += [
            Case(f"trace {parsed.trace.name}", num_blocks, "lru", 0.0, [prompts]) for num_blocks in TRACE_POOLS
        ]
    rows = [measure(case) for case in all_cases]
    if parsed.json:
        report = {"bench": "eviction", "command": COMMAND, "kind": "simulated", "num_seeds": NUM_SEEDS}
        sys.stdout.write(json.dumps({**report, "rows": [asdict(row) for row in rows]}) + "\n")
        return 0
    sys.stdout.write(f"simulated hit ratios of blocks, {NUM_SEEDS} seeds together ({COMMAND})\n")
    sys.stdout.write(f"{'workload':55}{'blocks':>8}{''.join(f'{rule:>14}' for rule in RULES)}{'worst':>8}{'c':>7}\n")
    for row in rows:
        ratios = "".join(f"{row.hit_ratio[rule]:14.4f}" for rule in RULES)
        sys.stdout.write(f"{row.workload:55}{row.num_blocks:8}{ratios}{row.worst:8.3f}{row.head_start:7.2f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
