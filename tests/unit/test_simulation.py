from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from router.policies import make_policy
from router.policies.base import Costs, FleetState, Loads, Policy, Requests
from router.policies.cost import CostPolicy
from router.simulation import Arrival, FleetResult, FleetSpec, simulate
from shared.errors import ConfigError
from shared.hashing import pack_tokens
from worker.engines.profiles import LatencyProfile

PROFILE = LatencyProfile(
    "small", 0.01, 1e-4, 1e-9, 1e-5, 1e-8, step_budget_tokens=512, max_num_seqs=16, kv_capacity_tokens=16384
)
SPEC = FleetSpec(num_workers=4, profile=PROFILE, num_routers=2, lag_s=0.003)


def arrivals(
    num_requests: int, rate_per_s: float, seed: int = 0, factor: float = 1.0, begins_at_s: float = 0.0
) -> Iterator[Arrival]:
    """Prompts with one of eight beginnings. `factor` stretches time, and nothing else."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(30_000) for _ in range(768)] for _ in range(8)]
    at_s = begins_at_s
    for _ in range(num_requests):
        at_s += rng.expovariate(rate_per_s)
        tail = [rng.randrange(30_000) for _ in range(rng.randrange(16, 400))]
        yield Arrival(at_s * factor, pack_tokens(rng.choice(beginnings) + tail), rng.randrange(1, 60))


def test_every_request_is_answered_in_full_and_accounted_for():
    asked = list(arrivals(200, 40.0))
    result = simulate(SPEC, make_policy("cost"), asked)
    assert [round(outcome.arrived_at_s, 9) for outcome in result.outcomes] == [
        pytest.approx(arrival.at_s) for arrival in asked
    ]
    assert [outcome.num_output_tokens for outcome in result.outcomes] == [a.num_output_tokens for a in asked]
    assert {outcome.error for outcome in result.outcomes} == {None}
    assert sorted(outcome.router for outcome in result.outcomes) == [0] * 100 + [1] * 100
    assert sum(result.num_requests) == 200
    for outcome in result.outcomes:
        assert outcome.bound_at_s is not None
        assert outcome.first_token_at_s is not None
        assert outcome.finished_at_s is not None
        # To the worker, at least one step, and back.
        assert outcome.first_token_at_s - outcome.bound_at_s >= 2 * SPEC.lag_s + PROFILE.step_s
        assert outcome.arrived_at_s <= outcome.bound_at_s <= outcome.first_token_at_s <= outcome.finished_at_s
        assert outcome.finished_at_s <= result.makespan_s
        assert (outcome.max_itl_s > 0.0) == (outcome.num_output_tokens > 1)
    assert sum(outcome.cached_tokens for outcome in result.outcomes) > 0
    assert all(0.0 < busy_s <= result.makespan_s for busy_s in result.busy_s)
    assert result.num_block_events >= sum(outcome.num_prompt_tokens // 64 for outcome in result.outcomes) // 4


@pytest.mark.parametrize("policy", ["cost", "power_of_two"])
def test_the_same_seed_gives_the_same_result_and_another_seed_another(policy: str):
    spec = replace(SPEC, seed=3)
    first, again, other = (
        simulate(one, make_policy(policy), arrivals(150, 60.0)) for one in (spec, spec, replace(spec, seed=4))
    )
    assert first == again
    assert first != other


def decisions(result: FleetResult) -> list[str | None]:
    return [outcome.worker for outcome in result.outcomes]


@pytest.mark.parametrize("num_routers", [1, 4])
@pytest.mark.parametrize("factor", [0.1, 0.125, 8.0, 10.0])
def test_a_fleet_and_its_traffic_slowed_down_alike_decide_alike(factor: float, num_routers: int):
    # Powers of two leave rounding the same, too; by tens costs differ in their last digits, which decides nothing here.
    # By the first arrival all routers have heard of each other, which takes the time it takes.
    spec = replace(
        SPEC, num_routers=num_routers, status_interval_s=0.125, publish_interval_s=0.0078125, lag_s=0.00390625
    )
    scaled = replace(
        spec,
        profile=PROFILE.scaled(factor),
        status_interval_s=spec.status_interval_s * factor,
        publish_interval_s=spec.publish_interval_s * factor,
        lag_s=spec.lag_s * factor,
    )
    base = simulate(spec, make_policy("cost"), arrivals(200, 60.0, begins_at_s=16.0))
    slowed = simulate(scaled, make_policy("cost"), arrivals(200, 60.0, factor=factor, begins_at_s=16.0))
    assert decisions(slowed) == decisions(base)
    assert slowed.num_refusals == base.num_refusals
    assert (base.num_refusals > 0) == (num_routers > 1)


@pytest.mark.parametrize("num_routers", [1, 4])
@pytest.mark.parametrize("settle_s", [0.25, 16.0])
def test_how_long_a_promise_outlives_its_first_token_decides_nothing(
    settle_s: float, num_routers: int, monkeypatch: pytest.MonkeyPatch
):
    # So it may be a time of its own, whatever the speed of a fleet.
    spec = replace(SPEC, num_routers=num_routers)
    base = simulate(spec, make_policy("cost"), arrivals(200, 60.0))
    monkeypatch.setattr("router.hints.SETTLE_S", settle_s)
    assert decisions(simulate(spec, make_policy("cost"), arrivals(200, 60.0))) == decisions(base)


class EarlyCost(CostPolicy):
    """The same costs; every request goes at once to where it costs least."""

    is_late_binding = False

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        return replace(super().costs(requests, loads, fleet, rng), can_send=None, lacks_blocks=None)


# 60 a second saturate it.
@pytest.mark.parametrize("rate_per_s", [60.0, 120.0])
@pytest.mark.parametrize("lag_s", [0.0, 0.0025])
def test_holding_idles_no_worker(rate_per_s: float, lag_s: float):
    def busy_share(policy: Policy, seed: int) -> float:
        spec = replace(SPEC, num_routers=1, lag_s=lag_s, seed=seed)
        result = simulate(spec, policy, arrivals(400, rate_per_s, seed))
        return sum(result.busy_s) / result.makespan_s

    late, early = (sum(busy_share(policy, seed) for seed in range(2)) for policy in (CostPolicy(), EarlyCost()))
    assert late >= 0.99 * early


def test_an_idle_fleet_holds_nothing_back():
    # A tenth of what saturates it.
    result = simulate(replace(SPEC, num_routers=1, lag_s=0.0025), make_policy("cost"), arrivals(200, 6.0))
    held_s = [
        outcome.bound_at_s - outcome.arrived_at_s for outcome in result.outcomes if outcome.bound_at_s is not None
    ]
    assert len(held_s) == 200
    assert sorted(held_s)[198] < 1e-3


def test_how_long_an_answer_gets_decides_nothing_before_it_has_ended():
    """Routers know what requests ask for at most, here nothing, and the mean of answers that have ended."""
    asked = [replace(arrival, at_s=0.0) for arrival in arrivals(60, 40.0)]
    others = [replace(arrival, num_output_tokens=1000 - arrival.num_output_tokens) for arrival in asked]
    plain, other = (simulate(SPEC, make_policy("cost"), each) for each in (asked, others))
    first_end_s = min(outcome.finished_at_s or math.inf for result in (plain, other) for outcome in result.outcomes)
    sent = [
        [outcome.worker for outcome in result.outcomes if (outcome.bound_at_s or math.inf) < first_end_s]
        for result in (plain, other)
    ]
    assert sent[0] == sent[1]
    assert len(sent[0]) > 4
    assert [outcome.num_output_tokens for outcome in other.outcomes] == [a.num_output_tokens for a in others]


def test_a_request_gets_no_more_than_it_asks_for():
    asked = [replace(arrival, max_tokens=5) for arrival in arrivals(20, 40.0)]
    outcomes = simulate(SPEC, make_policy("cost"), asked).outcomes
    assert [outcome.num_output_tokens for outcome in outcomes] == [min(5, a.num_output_tokens) for a in asked]


def test_a_prompt_that_no_worker_can_hold_is_an_outcome_and_no_end():
    asked = list(arrivals(10, 10.0))
    asked[4] = replace(asked[4], token_ids=pack_tokens(range(20_000)))
    result = simulate(SPEC, make_policy("cost"), asked)
    assert [outcome.error for outcome in result.outcomes] == [None] * 4 + ["ContextTooLong"] + [None] * 5
    failed = result.outcomes[4]
    assert (failed.finished_at_s, failed.first_token_at_s, failed.num_output_tokens) == (None, None, 0)


def test_a_prompt_that_no_worker_can_hold_holds_up_nobody():
    asked = list(arrivals(200, 60.0))
    plain = simulate(SPEC, make_policy("cost"), asked)
    giant = Arrival(asked[99].at_s, pack_tokens(range(20_000)), 100)
    result = simulate(SPEC, make_policy("cost"), [*asked[:100], giant, *asked[100:]])
    assert result.outcomes[100].error == "ContextTooLong"
    assert result.num_requests == pytest.approx(plain.num_requests, abs=20)
    assert result.makespan_s == pytest.approx(plain.makespan_s, rel=0.02)


def test_arrivals_are_taken_one_by_one():
    num_taken = 0

    def watched() -> Iterator[Arrival]:
        nonlocal num_taken
        for number in range(50):
            num_taken += 1
            yield Arrival(number * 10.0, pack_tokens([number] * 100), 2)

    result = simulate(SPEC, make_policy("cost"), watched())
    assert num_taken == 50
    # Each was over long before the next was asked for, so none was ever beside another.
    assert all(
        outcome.finished_at_s is not None and outcome.finished_at_s < outcome.arrived_at_s + 1.0
        for outcome in result.outcomes
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_workers": 0}, "num_workers: 0 is not positive"),
        ({"num_routers": -1}, "num_routers: -1 is not positive"),
        ({"status_interval_s": 0.0}, r"status_interval_s: 0.0 is not positive"),
        ({"lag_s": -1.0}, "lag_s: -1.0 is not a time"),
        ({"lag_s": math.inf}, "lag_s: inf is not a time"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_by_name(more: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        replace(SPEC, **more)


def test_a_cache_of_unknown_size_is_refused():
    with pytest.raises(ConfigError, match="num_blocks: needed, since profile small does not tell the cache's size"):
        simulate(replace(SPEC, profile=replace(PROFILE, kv_capacity_tokens=None)), make_policy("cost"), ())
