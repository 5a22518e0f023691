"""The benchmark of several routers compares each situation with one router of the same lag, and with one without."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from router.policies.base import Policy
from router.simulation import Arrival, FleetResult, FleetSpec
from tests.bench.bench_routers import BURST_REQUESTS, main
from tests.support.fake_fleet import FakeFleet, outcome, result

FEW = ["--requests", "40", "--loads", "0.5", "--lags-s", "0.1,0.2", "--routers", "1,4"]


class _SlowerWithEachRouter(FakeFleet):
    """Answers after a second, one more for each lag of 0.1 s, and a tenth more for each router beyond the first."""

    def __call__(self, spec: FleetSpec, policy: Policy, arrivals: Iterable[Arrival]) -> FleetResult:
        times_s = [arrival.at_s for arrival in arrivals]
        self.asked.append((spec, policy.name, times_s))
        ttft_s = (1.0 + 10.0 * spec.lag_s) * (1.0 + 0.1 * (spec.num_routers - 1))
        outcomes = [outcome(at_s, ttft_s, cached_tokens=0 if number < 2 else 90) for number, at_s in enumerate(times_s)]
        return result(*outcomes, busy_s=(1.0,) * spec.num_workers)


def test_each_number_of_routers_is_compared_with_one_of_the_same_lag_and_with_one_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet = _SlowerWithEachRouter()
    assert main([*FEW, "--json"], fleet) == 0
    told = json.loads(capsys.readouterr().out)
    assert [
        (row["lag_s"], row["num_routers"], row["ttft_mean_s"], row["ttft_ratio"], row["ttft_ratio_no_lag"])
        for row in told["rows"]
    ] == [(0.1, 1, 2.0, 1.0, 2.0), (0.1, 4, 2.6, 1.3, 2.6), (0.2, 1, 3.0, 1.0, 3.0), (0.2, 4, 3.9, 1.3, 3.9)]
    assert [(row["hit_difference"], row["load_imbalance"]) for row in told["rows"]] == [(0.0, 1.0)] * 4
    assert [(one["lag_s"], one["num_routers"], one["num_computing"]) for one in told["bursts"]] == [
        (0.1, 1, 1),
        (0.1, 4, 1),
        (0.2, 1, 1),
        (0.2, 4, 1),
    ]
    sizes = [(spec.num_routers, spec.lag_s, len(times_s)) for spec, _, times_s in fleet.asked]
    assert sizes[1:5] == [(routers, lag_s, BURST_REQUESTS) for lag_s in (0.1, 0.2) for routers in (1, 4)]
    assert sizes[5:] == [(1, 0.0, 40), (1, 0.1, 40), (4, 0.1, 40), (1, 0.2, 40), (4, 0.2, 40)]


def test_people_get_two_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FEW, _SlowerWithEachRouter()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "simulated; python -m tests.bench.bench_routers"
    assert sum("1.300" in line for line in lines) == 2
    assert "32 equal cold prompts of 8,192 tokens, answers of 300" in lines
