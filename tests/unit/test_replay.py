"""What a replay tells: its figures, its load, its refusals. The fleet is arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router import replay_plot
from router.cli import main
from router.replay import PolicyRun, prepare, read_options, run_policies, saturated_rate_per_s
from router.replay_report import PolicyReport, Slo, report, report_json, report_text
from router.simulation import FleetResult, FleetSpec
from shared.config import Settings
from shared.errors import ConfigError
from tests.support.fake_fleet import FakeFleet, outcome, result
from tests.support.traces import lines, mooncake, parsed

SLO = Slo(2.0)


def figures(found: FleetResult, slo: Slo = SLO, possible_cached_tokens: int = 100) -> PolicyReport:
    return report("p", found, slo=slo, possible_cached_tokens=possible_cached_tokens)


def trace_file(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines(*rows)))
    return path


def prepared(trace: object, fleet: FakeFleet, settings: Settings | None = None, **own: Any) -> Any:
    options = read_options({"trace": str(trace), "policies": "cost", **own})
    return prepare(options, settings or Settings(workers=2, block_size=64), None, run=fleet)


def test_figures_of_answered_requests_are_means_and_quantiles():
    outcomes = [outcome(at, at + 1, cached_tokens=25) for at in range(4)]
    found = figures(result(*outcomes, busy_s=(3.0, 1.0), makespan_s=8.0))
    assert (found.num_requests, found.num_rejected, found.hit_ratio, found.hit_share_of_bound) == (4, 0, 0.25, 1.0)
    assert (found.ttft_mean_s, found.ttft_p50_s, found.ttft_p90_s, found.ttft_p99_s) == (2.5, 2, 4, 4)
    assert (found.itl_mean_s, found.itl_p99_s) == (pytest.approx(0.1), pytest.approx(0.1))
    assert (found.e2e_mean_s, found.e2e_p99_s) == (3.5, 5.0)
    assert (found.tokens_per_s, found.load_imbalance, found.makespan_s) == (4 * 111 / 8, 1.5, 8.0)
    assert (found.num_evictions, found.num_preemptions, found.most_held) == (7, 2, 3)
    assert (found.busy_share, found.held_p99_s) == (0.25, 0.5)


def test_time_between_tokens_weighs_each_token_alike():
    found = figures(result(outcome(itl_s=0.1, num_output_tokens=31), outcome(itl_s=0.5, num_output_tokens=11)))
    assert (found.itl_mean_s, found.itl_p99_s) == (pytest.approx(0.2), pytest.approx(0.5))


def test_answer_of_one_token_has_no_time_between_tokens_and_meets_any_bound_on_it():
    found = figures(result(outcome(num_output_tokens=1)), Slo(2.0, 1e-9))
    assert (found.itl_mean_s, found.itl_p99_s, found.goodput_share) == (None, None, 1.0)


def test_goodput_counts_what_was_refused_as_missed():
    refused = outcome(ttft_s=None, error="Overloaded")
    failed_late = outcome(error="WorkerLost")
    found = figures(result(outcome(), outcome(ttft_s=2.5), refused, failed_late, makespan_s=4.0))
    assert (found.num_rejected, found.goodput_share, found.goodput_per_s) == (2, 0.25, 0.25)
    assert found.ttft_mean_s == 1.75


def test_service_level_between_tokens_is_that_of_an_answers_mean():
    outcomes = [outcome(itl_s=0.05), outcome(itl_s=0.2)]
    assert figures(result(*outcomes), Slo(2.0, 0.1)).goodput_share == 0.5


def test_fleet_that_refuses_everything_has_figures_all_the_same():
    found = figures(result(outcome(ttft_s=None, error="Overloaded"), busy_s=(0.0, 0.0), makespan_s=0.0))
    assert (found.ttft_mean_s, found.hit_ratio, found.tokens_per_s, found.load_imbalance) == (None, 0.0, 0.0, 0.0)
    assert "TTFT mean" in report_text([found])
    assert json.loads(report_json(found, {}))["ttft_mean_s"] is None


def test_json_of_a_policy_says_that_it_is_simulated_and_how_to_get_it_again():
    told = json.loads(report_json(figures(result(outcome())), {"seed": 3, "command": "kvroute replay x"}))
    assert (told["policy"], told["simulated"], told["seed"], told["command"]) == ("p", True, 3, "kvroute replay x")
    assert told["ttft_mean_s"] == 1.0


def test_table_says_that_it_is_simulated_and_has_a_column_for_each_policy():
    found = figures(result(outcome()))
    head, *rows = report_text([found, found]).splitlines()
    assert head.split() == ["simulated", "p", "p"]
    assert rows[4].split() == ["TTFT", "mean", "1.000", "s", "1.000", "s"]


def test_load_is_the_rate_over_what_round_robin_serves_when_saturated(tmp_path: Path):
    path = trace_file(tmp_path, *(mooncake(1000 * number, 10, (number,)) for number in range(11)))
    fleet = FakeFleet()
    ready = prepared(path, fleet, load="0.5", routers="4", lag_s="0.1")
    (asked,) = fleet.asked
    assert (asked[0].num_routers, asked[0].lag_s, asked[1], set(asked[2])) == (1, 0.0, "round_robin", {0.0})
    # Each request takes one of two workers for a second.
    assert (ready.saturated_rate_per_s, ready.workload.rate_per_s, ready.workload.span_s) == (2.0, 1.0, 10.0)
    assert (ready.spec.num_routers, ready.spec.lag_s) == (4, 0.1)


def test_load_is_measured_with_a_part_of_a_long_trace():
    fleet = FakeFleet()
    requests = parsed(*(mooncake(0, 10, (number,)) for number in range(1100)))
    assert saturated_rate_per_s(FleetSpec(num_workers=2, profile="13b-a100"), requests, run=fleet) == 2.0
    assert len(fleet.asked[0][2]) == 1000


def test_fleet_that_answers_nothing_has_no_load():
    def refuse(*_: Any) -> FleetResult:
        return result(outcome(ttft_s=None, error="Overloaded"))

    with pytest.raises(ConfigError, match="--load"):
        saturated_rate_per_s(FleetSpec(num_workers=1, profile="13b-a100"), parsed(mooncake()), run=refuse)


def test_without_rate_or_load_the_traces_own_times_stand(tmp_path: Path):
    fleet = FakeFleet()
    ready = prepared(trace_file(tmp_path, mooncake(2000), mooncake(6000)), fleet)
    assert (fleet.asked, [each.at_s for each in ready.workload]) == ([], [0.0, 4.0])


def test_each_policy_gets_the_same_arrivals_and_its_time_is_taken(tmp_path: Path):
    fleet, ticks = FakeFleet(), iter([0.0, 2.0, 5.0, 6.0])
    ready = prepared(trace_file(tmp_path, mooncake(0), mooncake(1000)), fleet, policies="cost, random")
    runs = list(run_policies(ready, lambda name, workload: workload, lambda: next(ticks), run=fleet))
    assert [(run.report.policy, run.wall_s) for run in runs] == [("cost", 2.0), ("random", 1.0)]
    assert [asked[1:] for asked in fleet.asked] == [("cost", [0.0, 1.0]), ("random", [0.0, 1.0])]


def test_fleet_is_that_of_the_settings_with_the_profiles_limits(tmp_path: Path):
    path = trace_file(tmp_path, mooncake())
    ready = prepared(path, FakeFleet(), Settings(workers=12, seed=5, eviction="lru"))
    facts = ready.facts()
    assert (facts["num_workers"], facts["seed"], facts["eviction"]) == (12, 5, "lru")
    assert (facts["num_blocks"], facts["max_num_seqs"], facts["step_budget_tokens"]) == (858, 256, 2048)
    limited = prepared(path, FakeFleet(), Settings(max_num_seqs=4), cache_blocks="100").facts()
    assert (limited["num_blocks"], limited["max_num_seqs"]) == (100, 4)


def test_made_up_trace_is_limited_and_follows_the_seed():
    first, again, other = (
        [each.token_ids[:4] for each in prepared("flood", FakeFleet(), Settings(seed=seed)).workload]
        for seed in (1, 1, 2)
    )
    assert (len(first), first == again, first == other) == (1000, True, False)
    assert len(prepared("flood", FakeFleet(), limit="7").workload) == 7


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"rate": "0"}, ["--rate", "'0'"]),
        ({"load": "nan"}, ["--load", "'nan'"]),
        ({"rate": "1", "load": "1"}, ["--rate, --load", "exclude"]),
        ({"routers": "0"}, ["--routers", "'0'"]),
        ({"limit": "x"}, ["--limit", "'x'"]),
        ({"skip": "-1"}, ["--skip", "'-1'"]),
        ({"cache_blocks": "1"}, ["--cache-blocks", "'1'"]),
        ({"max_prompt_tokens": "0"}, ["--max-prompt-tokens", "'0'"]),
        ({"slo_ttft_s": "0"}, ["--slo-ttft-s", "'0'"]),
        ({"slo_itl_s": "-1"}, ["--slo-itl-s", "'-1'"]),
        ({"lag_s": "-0.1"}, ["--lag-s", "'-0.1'"]),
        ({"policies": "cost,best"}, ["--policy", "'best'", "round_robin"]),
        ({"policies": "cost,cost"}, ["--policy", "cost is named twice"]),
        ({"policies": ""}, ["--policy", "''"]),
        ({"trace": "none.jsonl"}, ["none.jsonl", "No such file"]),
    ],
)
def test_wrong_argument_is_named_with_its_value(own: dict[str, str], words: list[str]):
    with pytest.raises(ConfigError) as caught:
        prepared(own.pop("trace", "flood"), FakeFleet(), **own)
    assert [word for word in words if word not in str(caught.value)] == []


def test_profile_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"--profile.*a100x"):
        prepared("flood", FakeFleet(), Settings(profile="a100x"))


def test_stock_eviction_is_not_simulated():
    with pytest.raises(ConfigError, match="--eviction: stock"):
        prepared("flood", FakeFleet(), Settings(eviction="stock"))


def test_command_refuses_a_broken_trace_with_code_2_and_says_nothing_else(tmp_path: Path, capsys: Any):
    path = trace_file(tmp_path, mooncake(0), mooncake(-5))
    assert main(["replay", str(path), "--workers", "2", "--policy", "cost,random"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert f"trace {path}: line 2: " in told.err
    assert "-5" in told.err


def test_picture_without_matplotlib_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
):
    monkeypatch.setattr(replay_plot, "find_spec", lambda name: None)
    assert main(["replay", "none.jsonl", "--plot", str(tmp_path / "out.png")]) == 2
    assert "kvroute[plot]" in capsys.readouterr().err


def test_picture_is_drawn_and_the_same_for_the_same_runs(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    with pytest.raises(ConfigError, match=r"out\.jpgx"):
        replay_plot.require_plot(tmp_path / "out.jpgx")
    with pytest.raises(ConfigError, match="is not a folder"):
        replay_plot.require_plot(tmp_path / "none" / "out.png")
    found = figures(result(outcome(), outcome(ttft_s=None, error="Overloaded"), outcome(ttft_s=3.0)))
    runs = [PolicyRun(found, [1.0, 3.0], 0.1)]
    for name in ("a.png", "b.png"):
        replay_plot.require_plot(tmp_path / name)
        replay_plot.draw(tmp_path / name, runs, SLO, "two requests")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
