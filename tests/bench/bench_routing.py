"""Compares untuned kvroute with tuned peers on simulated fleets: `python -m tests.bench.bench_routing`.

Sixteen 13B workers. Each peer's knobs are tried on the first requests of a trace, for each cache, number of routers and
load anew: every value on a quarter of them, the best few of each peer on all, and all that hold requests. The values
with the least mean TTFT are measured on the next requests, which nobody was tuned on. The first seed measures every
peer, as it comes and as tuned; the other seeds measure the tuned peers that came near the best one. Load is the rate of
arrivals over what round robin serves when saturated. Several routers see the fleet 100 ms late. Prompts are cut to
16,384 tokens. A seed draws where within its tick of 3 s a request of Mooncake's trace arrives and all that policies
draw; of a made-up trace it draws the trace as well. All policies get the same arrivals and the same eviction rule.

No policy knows how long an answer will be: requests of these traces do not say what they asked for. Those of
`mooncake_saying_lengths` do, by a `max_tokens` of just the answer's length, which is the most that could be known.

Without `--proof` a short part runs, with peers as they come. Runs that stand in `--results` are not run again; those of
other code are told of, and stay until the file is removed. All figures are simulated, the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from router.policies import make_policy
from router.tables import table
from tests.support.routing_runs import (
    MOONCAKE,
    PEERS,
    WORKLOADS,
    Cell,
    Figures,
    Results,
    Run,
    grid,
    run_all,
    saturation,
)
from tests.support.traces import TRACE_DIR_VARIABLES, trace_path

COMMAND = "python -m tests.bench.bench_routing"
OURS = "cost"
PROOF_LOADS = (0.4, 0.7, 1.0, 1.3, 1.6)
PROOF_BLOCKS = (860, 3440)
PROOF_ROUTERS = (1, 4)
PROOF_SEEDS = (0, 1, 2)
PROOF_REQUESTS = 3000
SHORT_REQUESTS = 400
NUM_FINALISTS = 3
"""Values of a peer's knobs that are tried on all requests of the tuning."""
NEAR_RATIO = 1.25
"""A tuned peer whose mean TTFT on the first seed is farther than this from the best one's is not run on other seeds."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Row:
    """One situation: our figures over the best tuned peer's. Means over the seeds, where nothing else is said."""

    workload: str
    num_blocks: int
    num_routers: int
    load: float
    best_peer: str
    """The tuned peer with the least mean TTFT on the measured requests."""
    ttft_mean_s: float
    ttft_ratio: float
    ttft_ratio_worst: float
    """Of all seeds."""
    p99_ratio: float
    goodput_share: float
    peer_goodput_share: float
    hit_ratio: float
    peer_hit_ratio: float
    default_ratios: dict[str, float]
    """By peer: mean TTFT over that of the peer as it comes, on the first seed."""
    tuned_ratios: dict[str, float]
    """By peer: mean TTFT over that of the peer as tuned, on the first seed."""
    tuned: dict[str, str]
    """By peer: its knobs."""


class Comparison:
    """Plans the runs of all situations and reads their results. `results` holds what has been run."""

    def __init__(
        self,
        results: Results,
        *,
        peers: Sequence[str],
        seeds: Sequence[int],
        num_requests: int,
        is_tuned: bool,
        tuned_loads: Sequence[float] = (),
    ) -> None:
        self._results = results
        self._peers = peers
        self._seeds = seeds
        self._num_requests = num_requests
        self._is_tuned = is_tuned
        self._tuned_loads = tuned_loads
        """Loads that peers are tuned at, each for the loads near it; empty: at every one."""

    def first_tuning_runs(self, cell: Cell) -> list[Run]:
        """Every peer with every value that is tried, on a quarter of the requests. One seed."""
        if not self._is_tuned:
            return []
        return [self._tuning_run(cell, text, is_final=False) for peer in self._peers for text in grid(peer)]

    def last_tuning_runs(self, cell: Cell) -> list[Run]:
        """Every peer with its best values, on all requests. The first tuning runs have run."""
        if not self._is_tuned:
            return []
        return [self._tuning_run(cell, text) for peer in self._peers for text in self._finalists(cell, peer)]

    def first_measuring_runs(self, cell: Cell, extra: Iterable[str] = ()) -> list[Run]:
        """All that are compared, on the requests that nobody was tuned on, with the first seed. The tuning has run."""
        texts = [OURS, *extra, *self._peers, *(self.tuned(cell, peer) for peer in self._peers)]
        return [self._run(cell, "measure", self._seeds[0], text) for text in dict.fromkeys(texts)]

    def further_measuring_runs(self, cell: Cell, extra: Iterable[str] = ()) -> list[Run]:
        """The same with the other seeds, without the peers that are far behind. The first measuring runs have run."""
        texts = [OURS, *extra, *(self.tuned(cell, peer) for peer in self._contenders(cell))]
        return [self._run(cell, "measure", seed, text) for seed in self._seeds[1:] for text in dict.fromkeys(texts)]

    def tuned(self, cell: Cell, peer: str) -> str:
        """A peer with the knobs that gave the least mean TTFT in its tuning."""
        if not self._is_tuned:
            return peer
        return min(self._finalists(cell, peer), key=lambda text: self._ttft_s(self._tuning_run(cell, text)))

    def row(self, cell: Cell) -> Row:
        """The comparison in one situation. Its runs have all been run."""
        ours = self._measured(cell, OURS)
        peer_to_text = {peer: self.tuned(cell, peer) for peer in self._peers}
        peer_to_figures = {peer: self._measured(cell, peer_to_text[peer]) for peer in self._contenders(cell)}
        best = min(peer_to_figures, key=lambda peer: _mean(peer_to_figures[peer], "ttft_mean_s"))
        theirs = peer_to_figures[best]
        ratios = [one["ttft_mean_s"] / other["ttft_mean_s"] for one, other in zip(ours, theirs, strict=True)]
        ttft_mean_s = _mean(ours, "ttft_mean_s")
        return Row(
            **asdict(cell),
            best_peer=peer_to_text[best],
            ttft_mean_s=round(ttft_mean_s, 4),
            ttft_ratio=round(statistics.fmean(ratios), 3),
            ttft_ratio_worst=round(max(ratios), 3),
            p99_ratio=round(_mean(ours, "ttft_p99_s") / _mean(theirs, "ttft_p99_s"), 3),
            goodput_share=round(_mean(ours, "goodput_share"), 4),
            peer_goodput_share=round(_mean(theirs, "goodput_share"), 4),
            hit_ratio=round(_mean(ours, "hit_ratio"), 4),
            peer_hit_ratio=round(_mean(theirs, "hit_ratio"), 4),
            default_ratios={peer: self._first_ratio(cell, peer) for peer in self._peers},
            tuned_ratios={peer: self._first_ratio(cell, text) for peer, text in peer_to_text.items()},
            tuned=peer_to_text,
        )

    def _finalists(self, cell: Cell, peer: str) -> list[str]:
        """The values that did best in the first tuning, and those that hold requests: queues fill later than that."""
        found = sorted(grid(peer), key=lambda text: self._ttft_s(self._tuning_run(cell, text, is_final=False)))
        holding = [text for text in found[NUM_FINALISTS:] if make_policy(text).is_late_binding]
        return [*found[:NUM_FINALISTS], *holding]

    def _contenders(self, cell: Cell) -> list[str]:
        """The peers that, as tuned, come near the best one on the first seed."""
        peer_to_ttft_s = {
            peer: self._ttft_s(self._run(cell, "measure", self._seeds[0], self.tuned(cell, peer)))
            for peer in self._peers
        }
        most_s = NEAR_RATIO * min(peer_to_ttft_s.values())
        return [peer for peer, ttft_s in peer_to_ttft_s.items() if ttft_s <= most_s]

    def _measured(self, cell: Cell, text: str) -> list[Figures]:
        return [self._results[self._run(cell, "measure", seed, text)] for seed in self._seeds]

    def _first_ratio(self, cell: Cell, text: str) -> float:
        """Our mean TTFT over that of `text`, both on the first seed."""
        ours, theirs = (self._ttft_s(self._run(cell, "measure", self._seeds[0], each)) for each in (OURS, text))
        return round(ours / theirs, 3)

    def _ttft_s(self, run: Run) -> float:
        mean_s: float = self._results[run]["ttft_mean_s"]
        return mean_s

    def _tuning_run(self, cell: Cell, text: str, *, is_final: bool = True) -> Run:
        load = min(self._tuned_loads or (cell.load,), key=lambda load: abs(load - cell.load))
        run = self._run(replace(cell, load=load), "tune", self._seeds[0], text)
        return run if is_final else replace(run, num_requests=max(1, self._num_requests // 4))

    def _run(self, cell: Cell, half: str, seed: int, text: str) -> Run:
        return Run(**asdict(cell), half=half, num_requests=self._num_requests, seed=seed, policy=text)


def rows_text(rows: Sequence[Row], is_tuned: bool) -> str:
    """The comparison for people: one table of ratios to the best peer, one of ratios to every peer."""
    kind = "tuned" if is_tuned else "untuned"
    head = ["workload", "blocks", "routers", "load", "TTFT", f"over best {kind}", "worst seed", "p99 over", "goodput"]
    lines = [[*head, "peer's", "hits", "peer's", f"best {kind} peer"]]
    lines += [
        [
            *_situation(row),
            f"{row.ttft_mean_s:.3f} s",
            f"{row.ttft_ratio:.2f}",
            f"{row.ttft_ratio_worst:.2f}",
            f"{row.p99_ratio:.2f}",
            f"{row.goodput_share:.1%}",
            f"{row.peer_goodput_share:.1%}",
            f"{row.hit_ratio:.1%}",
            f"{row.peer_hit_ratio:.1%}",
            row.best_peer,
        ]
        for row in rows
    ]
    peers = list(rows[0].default_ratios)
    each = [["workload", "blocks", "routers", "load", *(f"{peer} (default, tuned)" for peer in peers)]]
    each += [
        [*_situation(row), *(f"{row.default_ratios[peer]:.2f}, {row.tuned_ratios[peer]:.2f}" for peer in peers)]
        for row in rows
    ]
    return f"{table(lines)}\n\nmean TTFT of {OURS} over each peer's\n{table(each)}"


def compare(
    comparison: Comparison, cells: Sequence[Cell], extra: Sequence[str], run: Callable[[Iterable[Run]], None]
) -> list[Row]:
    """Tune, measure and compare; `run` runs what has not been run."""

    def run_stage(runs: list[Run]) -> None:
        run(map(saturation, runs))
        run(runs)

    run_stage([one for cell in cells for one in comparison.first_tuning_runs(cell)])
    run_stage([one for cell in cells for one in comparison.last_tuning_runs(cell)])
    run_stage([one for cell in cells for one in comparison.first_measuring_runs(cell, extra)])
    run_stage([one for cell in cells for one in comparison.further_measuring_runs(cell, extra)])
    return [comparison.row(cell) for cell in cells]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Routing against tuned peers on simulated fleets.")
    parser.add_argument("--proof", action="store_true", help="all that is claimed; hours")
    parser.add_argument("--workloads", type=_listed(str, WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--caches", type=_listed(int), metavar="N,N", help="KV blocks of a worker")
    parser.add_argument("--routers", type=_listed(int), metavar="N,N")
    parser.add_argument("--loads", type=_listed(float), metavar="L,L")
    parser.add_argument("--seeds", type=_listed(int), metavar="N,N")
    parser.add_argument("--requests", type=int, metavar="N", help="requests tuned on, and as many measured on")
    parser.add_argument("--policies", type=_listed(str), metavar="NAME,NAME", help="peers, and others to run as well")
    parser.add_argument("--tune-loads", type=_listed(float), metavar="L,L", help="fewer loads, each for those near it")
    parser.add_argument("--untuned", action="store_true", help="peers as they come, without a tuning")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="finished runs; of a proof out/bench_routing.jsonl"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line in place of tables")
    given = parser.parse_args(arguments)

    workloads = given.workloads or ((MOONCAKE, "system_prompts") if given.proof else (MOONCAKE,))
    if MOONCAKE in workloads and not trace_path().is_file():
        _say(f"{trace_path()} is missing; {TRACE_DIR_VARIABLES[0]} names its folder. Made-up chats take its place")
        workloads = tuple(dict.fromkeys("conversations" if name == MOONCAKE else name for name in workloads))
    policies = given.policies or PEERS
    peers = [name for name in policies if name in PEERS]
    if not peers:
        parser.error(f"--policies: names no peer (choose from {', '.join(PEERS)})")
    cells = [
        Cell(*each)
        for each in product(
            workloads,
            given.caches or (PROOF_BLOCKS if given.proof else PROOF_BLOCKS[:1]),
            given.routers or (PROOF_ROUTERS if given.proof else PROOF_ROUTERS[:1]),
            given.loads or (PROOF_LOADS if given.proof else (0.7, 1.3)),
        )
    ]
    is_tuned = not given.untuned and (given.proof or given.requests is not None)
    path = given.results or (Path("out/bench_routing.jsonl") if given.proof else None)
    results = Results(path)
    if results.num_outdated:
        _say(f"{results.num_outdated} of the runs in {path} are of other code; remove it to run them again")
    comparison = Comparison(
        results,
        peers=peers,
        seeds=given.seeds or (PROOF_SEEDS if given.proof else PROOF_SEEDS[:1]),
        num_requests=given.requests or (PROOF_REQUESTS if given.proof else SHORT_REQUESTS),
        is_tuned=is_tuned,
        tuned_loads=given.tune_loads or (),
    )
    extra = [name for name in policies if name not in (OURS, *PEERS)]
    rows = compare(comparison, cells, extra, lambda runs: run_all(runs, results, given.processes, _say))
    if given.json:
        told = {"bench": "routing", "command": COMMAND, "simulated": True, "is_tuned": is_tuned}
        sys.stdout.write(json.dumps({**told, "rows": [asdict(row) for row in rows]}) + "\n")
    else:
        sys.stdout.write(f"simulated; {COMMAND}\n{rows_text(rows, is_tuned)}\n")
    return 0


def _situation(row: Row) -> list[str]:
    return [row.workload, str(row.num_blocks), str(row.num_routers), f"{row.load:g}"]


def _mean(figures: Sequence[Figures], name: str) -> float:
    return statistics.fmean(one[name] for one in figures)


def _listed(kind: Callable[[str], Value], choices: Sequence[Any] = ()) -> Callable[[str], tuple[Value, ...]]:
    """Reads `A,B`."""

    def read(text: str) -> tuple[Value, ...]:
        found = tuple(kind(word) for word in text.split(","))
        if choices and not set(found) <= set(choices):
            raise argparse.ArgumentTypeError(f"choose from {', '.join(choices)}")
        return found

    return read


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
