"""The routing benchmark runs each thing once, goes on where it stopped, and measures peers as they were tuned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.bench_routing import Comparison, compare, rows_text
from tests.support import routing_runs
from tests.support.routing_runs import (
    MOONCAKE,
    MOONCAKE_SAYING_LENGTHS,
    PEERS,
    Cell,
    Figures,
    Results,
    Run,
    grid,
    run_all,
    saturation,
    trace_requests,
)
from tests.support.traces import TRACE_DIR_VARIABLES, TRACE_NAME, lines, mooncake

CELL = Cell("flood", 860, 1, 0.7)
BEST = "llm_d:prefix_weight=8"


def figures(run: Run) -> Figures:
    """One peer is quicker with one of its values; ours is at half of that, with seeds two percent apart."""
    if run.load is None:
        return {"saturated_rate_per_s": 3.0}
    ttft_s = (1.0 + 0.02 * run.seed) if run.policy == "cost" else 2.0 if run.policy == BEST else 4.0
    return {"ttft_mean_s": ttft_s, "ttft_p99_s": 2 * ttft_s, "goodput_share": 1 / ttft_s, "hit_ratio": 0.5}


class Executor:
    """Stands for the simulation and remembers what it was asked; may fail after some runs."""

    def __init__(self, most: int = 10_000) -> None:
        self.asked: list[tuple[Run, float | None]] = []
        self._most = most

    def __call__(self, run: Run, saturated_per_s: float | None) -> Figures:
        if len(self.asked) == self._most:
            raise InterruptedError
        self.asked.append((run, saturated_per_s))
        return figures(run)


def comparison(results: Results, *, is_tuned: bool = True) -> Comparison:
    return Comparison(results, peers=("llm_d", "sglang"), seeds=(0, 1), num_requests=8, is_tuned=is_tuned)


def run_comparison(path: Path, executor: Executor, *, is_tuned: bool = True) -> list[object]:
    results = Results(path)
    return list(
        compare(
            comparison(results, is_tuned=is_tuned),
            [CELL],
            ["random"],
            lambda runs: run_all(runs, results, 1, lambda line: None, executor),
        )
    )


def test_peers_are_tuned_in_two_rounds_and_measured_on_other_requests_near_ones_with_all_seeds(tmp_path: Path):
    executor = Executor()
    (row,) = run_comparison(tmp_path / "r.jsonl", executor)
    assert (row.best_peer, row.ttft_mean_s) == (BEST, 1.01)  # type: ignore[attr-defined]
    assert (row.ttft_ratio, row.ttft_ratio_worst) == (0.505, 0.51)  # type: ignore[attr-defined]
    assert row.default_ratios == {"llm_d": 0.25, "sglang": 0.25}  # type: ignore[attr-defined]
    assert row.tuned_ratios == {"llm_d": 0.5, "sglang": 0.25}  # type: ignore[attr-defined]
    measured = [(run.policy, run.seed) for run, _ in executor.asked if run.half == "measure" and run.load]
    assert measured == [
        *((policy, 0) for policy in ("cost", "random", "llm_d", "sglang", BEST)),
        *((policy, 1) for policy in ("cost", "random", BEST)),
    ]
    tuned = [(run.policy, run.num_requests) for run, _ in executor.asked if run.half == "tune" and run.load]
    assert tuned == [
        *((policy, 2) for policy in (*grid("llm_d"), *grid("sglang"))),
        *((policy, 8) for policy in (BEST, *grid("llm_d")[:2], *grid("sglang")[:3])),
    ]
    assert {rate for run, rate in executor.asked if run.load} == {3.0}
    assert BEST in rows_text([row], is_tuned=True)  # type: ignore[list-item]


def test_values_that_hold_requests_are_tried_on_all_of_them_since_their_queues_fill_late(tmp_path: Path):
    executor, results = Executor(), Results(tmp_path / "r.jsonl")
    dynamo = Comparison(results, peers=("dynamo",), seeds=(0,), num_requests=8, is_tuned=True)
    list(compare(dynamo, [CELL], [], lambda runs: run_all(runs, results, 1, lambda line: None, executor)))
    tried = {run.policy for run, _ in executor.asked if run.half == "tune" and run.num_requests == 8 and run.load}
    holding = {text for text in grid("dynamo") if "queue_threshold" in text}
    assert len(holding) == 8
    assert tried == holding | set(grid("dynamo")[:3])


def test_stopped_benchmark_goes_on_where_it_was_and_a_torn_line_is_run_again(tmp_path: Path):
    path, first = tmp_path / "r.jsonl", Executor(most=20)
    with pytest.raises(InterruptedError):
        run_comparison(path, first)
    with path.open("a") as file:
        file.write('{"run": {"workl')
    second = Executor()
    rows = run_comparison(path, second)
    whole = Executor()
    assert rows == run_comparison(tmp_path / "whole.jsonl", whole)
    assert first.asked + second.asked == whole.asked
    assert len(path.read_bytes().splitlines()) == len(whole.asked)
    third = Executor()
    assert (run_comparison(path, third), third.asked) == (rows, [])


def test_untuned_peers_are_measured_as_they_come_alone(tmp_path: Path):
    executor = Executor()
    run_comparison(tmp_path / "r.jsonl", executor, is_tuned=False)
    assert {run.half for run, _ in executor.asked} == {"measure"}
    assert {run.policy for run, _ in executor.asked if run.load} == {"cost", "random", "llm_d", "sglang"}


def test_load_of_every_seed_and_of_several_routers_is_measured_once():
    run = Run("flood", 860, 4, 1.3, "measure", 5, 2, "cost")
    assert saturation(run) == Run("flood", 860, 1, None, "measure", 5, 0, "round_robin")


@pytest.mark.parametrize("peer", PEERS)
def test_every_value_is_tried_once_and_the_defaults_first(peer: str):
    texts = grid(peer)
    assert texts[0] == peer
    assert len(set(texts)) == len(texts) >= 10


def test_runs_of_other_code_are_kept_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "r.jsonl"
    run = Run("flood", 860, 1, 1.3, "measure", 5, 2, "cost")
    Results(path).add(run, figures(run))
    assert Results(path).num_outdated == 0
    monkeypatch.setattr(routing_runs, "code_fingerprint", lambda: "other")
    kept = Results(path)
    assert (kept.num_outdated, kept[run]) == (1, figures(run))


def test_without_a_file_runs_are_kept_in_memory():
    results, run = Results(None), Run("flood", 860, 1, 1.3, "measure", 5, 2, "cost")
    results.add(run, figures(run))
    assert (run in results, results.num_outdated) == (True, 0)


def test_requests_say_the_lengths_of_their_answers_in_one_workload_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / TRACE_NAME).write_bytes(b"".join(lines(mooncake(output_length=8), mooncake(3000, output_length=5))))
    monkeypatch.setenv(TRACE_DIR_VARIABLES[0], str(tmp_path))
    silent, saying = (list(trace_requests(name, seed=0)) for name in (MOONCAKE, MOONCAKE_SAYING_LENGTHS))
    assert [request.max_tokens for request in silent] == [None, None]
    assert [request.max_tokens for request in saying] == [8, 5]
    assert [replace(request, max_tokens=None) for request in saying] == silent
