"""What every policy keeps: a cost for every pairing, equal for equal arguments; and what sets each one apart."""

from __future__ import annotations

import random
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.policies import POLICY_NAMES, make_policy
from router.policies.base import FleetState, Loads, Policy, Ranking, Requests
from router.policies.cost import CostPolicy, CostWeights
from shared.config import Settings
from shared.errors import ConfigError
from tests.support.policies import IDLE, loads_of, request_of, requests_of

README = Path(__file__).parents[2] / "README.md"

PEERS = ("dynamo", "llm_d", "llm_d_affinity", "sglang", "ray_prefix")
VARIANTS = (
    "dynamo:temperature=0.5",
    "dynamo:selection_policy=lmetric:overlap_score_credit_decay=1",
    "dynamo:queue_threshold=1",
    "llm_d:load_aware_weight=1:active_request_weight=1",
    "llm_d_affinity:affinity_threshold=0.3:max_ttft_penalty_ms=100:exploration_probability=0.2",
    "sglang:cache_threshold=0.1:balance_abs_threshold=5",
    "ray_prefix:imbalanced_threshold=5",
)
"""Knobs that take another way through a rule."""
NAMES = (*POLICY_NAMES, *VARIANTS)
FLEET = FleetState(prefill_s_per_token=1e-4, mean_full_s=0.4, mean_own_s=0.2, mean_output_tokens=64.0)


def rank(
    policy: Policy, loads: Loads, request: Requests | None = None, *, fleet: FleetState = FLEET, seed: int = 7
) -> tuple[list[str], bool]:
    """All workers, best first, and whether the best may be sent to."""
    request = request or request_of([0] * len(loads))
    costs = policy.costs(request, loads, fleet, random.Random(seed))
    best = int(costs.best(loads)[0])
    can_send = costs.can_send is None or bool(costs.can_send[0, best])
    return list(Ranking.of_row(costs, loads, request, 0, best).order), can_send


def order_of(policy: Policy, loads: Loads, request: Requests | None = None, seed: int = 7) -> list[str]:
    return rank(policy, loads, request, seed=seed)[0]


def random_load(draws: random.Random) -> dict[str, float]:
    return {
        "num_requests": draws.randrange(12),
        "num_waiting": draws.randrange(4),
        "max_num_seqs": draws.choice((8, 16)),
        "queued_prefill_tokens": draws.randrange(9000),
        "kv_used_blocks": draws.randrange(800),
        "kv_demand_blocks": draws.randrange(1200),
        "num_resident_blocks": draws.randrange(800),
        "prefill_s_per_token": draws.uniform(0.5e-4, 2e-4),
        "status_age_s": draws.uniform(0, 0.1),
        "round_trip_s": draws.uniform(0, 0.01),
        "is_home": draws.random() < 0.5,
    }


def random_requests(draws: random.Random, num_requests: int, num_workers: int) -> Requests:
    return requests_of(
        *(
            (
                [draws.randrange(0, 4096, 64) for _ in range(num_workers)],
                {
                    "num_prompt_tokens": draws.randrange(1, 4096),
                    "demand_blocks": draws.randrange(1, 300),
                    "age_s": draws.uniform(0, 5),
                    "next_hash": draws.getrandbits(64),
                    "ordinal": ordinal,
                    "under_way": (draws.randrange(num_workers), draws.randrange(2048), draws.choice((0, 2048, 4032))),
                },
            )
            for ordinal in range(num_requests)
        )
    )


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_policy(request.param)


def test_ranking_is_a_permutation_that_depends_on_the_arguments_only(policy: Policy) -> None:
    draws = random.Random(3)
    for _ in range(50):
        loads = loads_of(*(random_load(draws) for _ in range(draws.randrange(1, 9))))
        request = random_requests(draws, 1, len(loads))
        order = order_of(policy, loads, request)
        assert sorted(order) == list(loads.workers)
        assert order_of(policy, loads, request) == order


def test_policies_change_nothing_that_they_are_given(policy: Policy) -> None:
    draws = random.Random(4)
    loads = loads_of(*(random_load(draws) for _ in range(5)))
    request = random_requests(draws, 1, 5)
    for snapshot in (loads, request):
        for name in type(snapshot).__slots__:
            value = getattr(snapshot, name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
    policy.costs(request, loads, FLEET, random.Random(1))
    policy.is_ready(loads, FLEET, request.age_s)


def test_no_worker_is_cheaper_than_the_best(policy: Policy) -> None:
    draws = random.Random(5)
    for _ in range(50):
        loads = loads_of(*(random_load(draws) for _ in range(6)))
        costs = policy.costs(random_requests(draws, 1, 6), loads, FLEET, random.Random(1))
        assert costs.total[0, costs.best(loads)[0]] == costs.total.min()


def test_nothing_may_be_sent_to_a_worker_that_is_not_ready(policy: Policy) -> None:
    draws = random.Random(6)
    for num_routers in (1, 3):
        fleet = FleetState(1e-4, 0.4, 0.2, num_routers=num_routers)
        for _ in range(50):
            loads = loads_of(*(random_load(draws) for _ in range(6)))
            requests = random_requests(draws, 5 if policy.is_late_binding else 1, 6)
            costs = policy.costs(requests, loads, fleet, random.Random(1))
            is_ready = policy.is_ready(loads, fleet, requests.age_s.max())
            if costs.can_send is not None:
                assert not costs.can_send[:, ~is_ready].any()


def test_explanation_names_every_worker_the_best_one_first(policy: Policy) -> None:
    draws = random.Random(7)
    loads = loads_of(*(random_load(draws) for _ in range(3)))
    request = request_of([64, 0, 128])
    costs = policy.costs(request, loads, FLEET, random.Random(1))
    best = int(costs.best(loads)[0])
    explanation = Ranking.of_row(costs, loads, request, 0, best).explain()
    assert all(worker in explanation for worker in loads.workers)
    assert explanation.startswith(f"{loads.workers[best]}={costs.total[0, best]:.4g}")


def test_only_cost_binds_late_and_one_rule_that_is_told_to() -> None:
    assert [name for name in NAMES if make_policy(name).is_late_binding] == ["cost", "dynamo:queue_threshold=1"]


@pytest.mark.parametrize("num_routers", [1, 4])
def test_only_cost_says_what_may_be_before_a_request_and_only_among_several_routers(
    policy: Policy, num_routers: int
) -> None:
    draws = random.Random(9)
    fleet = replace(FLEET, num_routers=num_routers)
    for _ in range(20):
        loads = loads_of(*({**random_load(draws), "round_trip_s": draws.uniform(0, 0.2)} for _ in range(5)))
        request = random_requests(draws, 1, len(loads))
        costs = policy.costs(request, loads, fleet, random.Random(1))
        told = [Ranking.of_row(costs, loads, request, 0, column).max_queued_tokens for column in range(len(loads))]
        if policy.name != "cost" or num_routers == 1:
            assert told == [None] * len(loads)
            continue
        # A step of the worker or a round trip, whichever is longer, and more the longer the request has waited.
        max_queued_s = np.maximum(loads.step_budget_s, loads.round_trip_s) + CostWeights().patience * request.age_s[0]
        assert told == [int(tokens) for tokens in max_queued_s / loads.prefill_s_per_token]


def test_what_may_be_before_a_request_is_a_number_that_can_be_sent_whatever_a_worker_has_measured() -> None:
    loads = loads_of({"prefill_s_per_token": 1e-300, "step_s": 1.0})
    costs = CostPolicy().costs(request_of([0]), loads, replace(FLEET, num_routers=2), random.Random(1))
    assert Ranking.of_row(costs, loads, request_of([0]), 0, 0).max_queued_tokens == 1 << 40


def test_names_are_those_that_help_and_readme_tell() -> None:
    told = Settings.model_fields["policy"].description or ""
    assert [name for name in POLICY_NAMES if not re.search(rf"\b{name}\b", told)] == []
    readme = README.read_text(encoding="utf-8")
    assert [name for name in POLICY_NAMES if f"`{name}`" not in readme] == []


@pytest.mark.parametrize("name", ["cost", "prefix_hash", *PEERS])
def test_costs_do_not_depend_on_where_a_worker_stands_nor_on_other_requests(name: str) -> None:
    draws = random.Random(8)
    policy = make_policy(name)
    for _ in range(30):
        loads = loads_of(*(random_load(draws) for _ in range(6)))
        requests = random_requests(draws, 4, 6)
        costs = policy.costs(requests, loads, FLEET, random.Random(1))
        order = draws.sample(range(6), 6)
        moved = Loads(*(_taken(getattr(loads, field.name), order) for field in fields(Loads) if field.init))
        for row, request in enumerate(_rows(requests)):
            alone = policy.costs(request, loads, FLEET, random.Random(1))
            assert alone.total[0] == pytest.approx(costs.total[row], rel=1e-12, abs=1e-12)
        under_way = requests.under_way.copy()
        under_way[:, 0] = np.argsort(order)[under_way[:, 0]]
        seen = replace(requests, matched_tokens=requests.matched_tokens[:, order], under_way=under_way)
        elsewhere = policy.costs(seen, moved, FLEET, random.Random(1))
        assert elsewhere.total == pytest.approx(costs.total[:, order], rel=1e-12, abs=1e-12)
        best = [loads.workers[column] for column in costs.best(loads)]
        assert [moved.workers[column] for column in elsewhere.best(moved)] == best


@pytest.mark.parametrize("name", ["dynamo", "dynamo:queue_threshold=1", "llm_d", "sglang", "ray_prefix"])
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_rules_that_know_no_times_decide_the_same_at_any_speed(name: str, factor: float) -> None:
    draws = random.Random(9)
    columns = [random_load(draws) for _ in range(6)]
    times = ("prefill_s_per_token", "step_s", "decode_s_per_seq", "status_age_s", "round_trip_s")
    slower = [column | {time: column.get(time, IDLE[time]) * factor for time in times} for column in columns]
    requests = random_requests(draws, 4, 6)
    ours, theirs = (
        make_policy(name).costs(requests, loads_of(*given), FleetState(1e-4 * scale), random.Random(1))
        for given, scale in ((columns, 1.0), (slower, factor))
    )
    assert (ours.total == theirs.total).all()
    assert ours.can_send is None or (ours.can_send == theirs.can_send).all()


def _taken(values: Any, order: list[int]) -> Any:
    return tuple(values[at] for at in order) if isinstance(values, tuple) else values[order]


def _rows(requests: Requests) -> list[Requests]:
    return [
        Requests(*(getattr(requests, field)[row : row + 1] for field in Requests.__slots__))
        for row in range(len(requests))
    ]


def test_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"--policy: invalid value 'kv' \(choose from cost, random, "):
        make_policy("kv")


class TestCost:
    def test_longest_holder_wins_at_equal_load(self) -> None:
        loads = loads_of({"worker": "w1"}, {"worker": "w2"}, {"worker": "w4"})
        request = request_of([3 * 64, 9 * 64, 0], num_prompt_tokens=640)
        assert order_of(make_policy("cost"), loads, request) == ["w2", "w1", "w4"]

    def test_a_least_cached_worker_under_load_is_left_alone(self) -> None:
        loads = loads_of(
            {"num_requests": 40, "queued_prefill_tokens": 40 * 4096, "max_num_seqs": 64}, {"kv_used_blocks": 700}
        )
        assert order_of(make_policy("cost"), loads)[0] == "w1"

    def test_a_busy_holder_is_waited_for_and_not_replaced_while_its_cache_saves_more(self) -> None:
        loads = loads_of({"num_requests": 3, "queued_prefill_tokens": 2200}, {})
        order, can_send = rank(make_policy("cost"), loads, request_of([4032, 0]))
        assert (order[0], can_send) == ("w0", False)

    def test_a_holder_with_a_long_queue_loses_to_an_idle_worker(self) -> None:
        loads = loads_of({"num_requests": 8, "queued_prefill_tokens": 60_000}, {})
        order, can_send = rank(make_policy("cost"), loads, request_of([4032, 0]))
        assert (order[0], can_send) == ("w1", True)

    def test_a_prompt_larger_than_the_free_blocks_waits_unless_the_worker_is_empty(self) -> None:
        policy = make_policy("cost")
        assert not rank(policy, loads_of({"num_requests": 1, "kv_used_blocks": 790}))[1]
        assert rank(policy, loads_of({"kv_total_blocks": 10}))[1]
        costs = policy.costs(
            request_of([0]), loads_of({"num_requests": 1, "kv_used_blocks": 790}), FLEET, random.Random(1)
        )
        assert costs.lacks_blocks is not None
        assert costs.lacks_blocks.all()

    def test_blocks_that_the_worker_holds_are_not_asked_for_again(self) -> None:
        loads = loads_of({"num_requests": 1, "kv_used_blocks": 790})
        demand = {"num_prompt_tokens": 4096, "demand_blocks": 65}
        assert [
            rank(make_policy("cost"), loads, request_of([cached], **demand))[1] for cached in (54 * 64, 55 * 64)
        ] == [False, True]

    def test_a_large_prompt_goes_where_there_is_room_before_it_waits_for_a_place_that_is_as_good(self) -> None:
        full, roomy = {"num_requests": 2, "kv_used_blocks": 750}, {"num_requests": 4, "kv_used_blocks": 600}
        loads, request = loads_of(full, roomy), request_of([640, 0], num_prompt_tokens=8192, demand_blocks=150)
        assert rank(make_policy("cost"), loads, request, fleet=replace(FLEET, mean_output_tokens=500.0)) == (
            ["w1", "w0"],
            True,
        )

    def test_equal_prompts_agree_on_a_worker_before_any_holds_them(self) -> None:
        loads = loads_of(*({} for _ in range(8)))
        first = [
            order_of(make_policy("cost"), loads, request_of([0] * 8, next_hash=1), seed=seed)[0] for seed in range(4)
        ]
        assert len(set(first)) == 1
        spread = {order_of(make_policy("cost"), loads, request_of([0] * 8, next_hash=h))[0] for h in range(64)}
        assert len(spread) == 8

    def test_prompts_that_share_what_all_hold_are_spread_by_what_nobody_holds(self) -> None:
        loads = loads_of(*({} for _ in range(8)))
        spread = {
            order_of(make_policy("cost"), loads, request_of([640] * 8, prefix_hash=1, next_hash=h))[0]
            for h in range(64)
        }
        assert len(spread) == 8

    @pytest.mark.parametrize("num_routers", [1, 4])
    @pytest.mark.parametrize("factor", [0.1, 10.0])
    def test_a_fleet_of_another_speed_decides_the_same(self, factor: float, num_routers: int) -> None:
        draws = random.Random(11)
        policy = make_policy("cost")
        for _ in range(200):
            columns = [random_load(draws) for _ in range(5)]
            times = {"prefill_s_per_token": 1e-4, "step_s": 0.01, "decode_s_per_seq": 0.001}
            times |= {"status_age_s": 0.0, "round_trip_s": 0.0}
            slower = [column | {t: column.get(t, idle) * factor for t, idle in times.items()} for column in columns]
            requests = random_requests(draws, 7, 5)
            older = Requests(*(getattr(requests, n) * (factor if n == "age_s" else 1) for n in Requests.__slots__))
            times = (1e-4, 0.4, 0.2, 3.0)
            counts: dict[str, Any] = {"mean_output_tokens": 64.0, "num_workers": 5, "num_routers": num_routers}
            fleet = FleetState(*times, **counts, token_s=2.0 / 64)
            slow = FleetState(*(time * factor for time in times), **counts, token_s=2.0 / 64 * factor)
            ours = policy.costs(requests, loads_of(*columns), fleet, random.Random(1))
            theirs = policy.costs(older, loads_of(*slower), slow, random.Random(1))
            assert ours.best(loads_of(*columns)).tolist() == theirs.best(loads_of(*slower)).tolist()
            assert (ours.can_send == theirs.can_send).all()
            assert (ours.lacks_blocks == theirs.lacks_blocks).all()
            own_s = np.linspace(0.01, 1.0, 7)
            work_s = own_s + requests.demand_blocks / 800 * 2.0
            urgency = policy.urgency(requests.age_s, own_s, work_s, fleet)
            scaled = policy.urgency(older.age_s, own_s * factor, work_s * factor, slow)
            assert urgency == pytest.approx(scaled)

    def test_who_takes_up_the_least_of_a_worker_goes_first(self) -> None:
        # Own prefill, and that with what the answer takes up.
        own_s, work_s = np.array([0.2, 0.3, 0.01]), np.array([0.4, 0.32, 1.01])
        urgency = make_policy("cost").urgency(np.zeros(3), own_s, work_s, FLEET)
        assert (-urgency).argsort().tolist() == [1, 0, 2]

    @pytest.mark.parametrize("num_routers", [1, 3])
    def test_who_has_waited_for_longer_than_all_that_is_held_takes_goes_first_the_oldest_before_all(
        self, num_routers: int
    ) -> None:
        own_s = work_s = np.array([0.01, 0.8, 0.8, 0.4])
        policy, fleet = make_policy("cost"), replace(FLEET, num_workers=2, num_routers=num_routers)
        # All that is held keeps two workers busy for about a second for each router, and one mean request is added.
        limit_s = CostWeights().longest_wait * (num_routers * 2.01 / 2 + fleet.mean_own_s)
        early = policy.urgency(np.array([0.0, 0.9, 0.0, 0.5]) * limit_s, own_s, work_s, fleet)
        assert (-early).argsort(kind="stable").tolist() == [0, 3, 1, 2]
        late = policy.urgency(np.array([0.0, 1.1, 1.2, 0.5]) * limit_s, own_s, work_s, fleet)
        assert (-late).argsort().tolist() == [2, 1, 0, 3]

    def test_routers_keep_to_their_homes_among_busy_equals_and_leave_them_for_much_cheaper_workers(self) -> None:
        policy, several = make_policy("cost"), FleetState(1e-4, 0.4, 0.2, num_routers=2)
        away, home = ({"is_home": is_home, "queued_prefill_tokens": 1000} for is_home in (False, True))
        loads = loads_of(away, home, away)
        firsts = {rank(policy, loads, request_of([0] * 3, next_hash=h), fleet=several)[0][0] for h in range(16)}
        assert firsts == {"w1"}
        assert rank(policy, loads, request_of([2048, 0, 0]), fleet=several)[0][0] == "w0"

    def test_routers_of_an_idle_fleet_agree_on_a_worker_whoever_s_home_it_is(self) -> None:
        several = FleetState(1e-4, 0.4, 0.2, num_routers=2)
        homes = [[worker % 2 == rank for worker in range(8)] for rank in range(2)]
        for next_hash in range(16):
            request = request_of([0] * 8, next_hash=next_hash)
            firsts = [
                rank(make_policy("cost"), loads_of(*({"is_home": home} for home in own)), request, fleet=several)[0][0]
                for own in homes
            ]
            assert firsts[0] == firsts[1]

    def test_slower_news_lets_more_be_sent_ahead(self) -> None:
        policy = make_policy("cost")
        busy = {"num_requests": 2, "queued_prefill_tokens": 2200}
        assert [
            rank(policy, loads_of(busy | late))[1]
            for late in ({}, {"status_age_s": 0.05}, {"round_trip_s": 0.05}, {"queued_prefill_tokens": 2000})
        ] == [False, True, True, True]

    @pytest.mark.parametrize("seed", range(20))
    def test_the_arrays_say_what_the_formula_says(self, seed: int) -> None:
        draws = random.Random(seed)
        weights = CostWeights(crowd=draws.choice((0.0, 1.0)), room=draws.choice((0.0, 0.7)))
        columns = [random_load(draws) for _ in range(draws.randrange(1, 11))]
        loads, requests = loads_of(*columns), random_requests(draws, draws.randrange(1, 9), len(columns))
        fleet = FleetState(1e-4, 0.4, 0.2, draws.uniform(0, 9), 64.0, draws.choice((1, 4)))
        costs = CostPolicy(weights).costs(requests, loads, fleet, random.Random(1))
        for row in range(len(requests)):
            for column in range(len(loads)):
                total, can_send = plain_cost(weights, loads, requests, fleet, row, column)
                assert costs.total[row, column] == pytest.approx(total, rel=1e-12)
                assert costs.can_send is not None
                assert costs.can_send[row, column] == can_send


def plain_cost(
    weights: CostWeights, loads: Loads, requests: Requests, fleet: FleetState, row: int, column: int
) -> tuple[float, bool]:
    """One pairing by plain arithmetic."""
    w = {field.name: getattr(loads, field.name)[column] for field in fields(Loads) if field.init}
    num_workers = len(loads)
    queued_s = [
        tokens * speed for tokens, speed in zip(loads.queued_prefill_tokens, loads.prefill_s_per_token, strict=True)
    ]
    pressure = (sum(queued_s) / num_workers + fleet.backlog_s / num_workers) / fleet.mean_full_s
    own_tokens = max(1, requests.num_prompt_tokens[row] - requests.matched_tokens[row, column])
    total = queued_s[column] / (1 + pressure)
    total += weights.own_prefill * own_tokens * w["prefill_s_per_token"]
    computing, held_tokens, promised_tokens = requests.under_way[row]
    again_tokens = max(0, promised_tokens - max(held_tokens, requests.matched_tokens[row, column]))
    again_s = again_tokens * w["prefill_s_per_token"]
    total += again_s if queued_s[computing] <= 1.5 * again_s else 0.0
    fullness = max(w["kv_used_blocks"] / w["kv_total_blocks"], w["num_requests"] / w["max_num_seqs"])
    total += weights.fullness * fleet.mean_full_s * fullness
    total += weights.decode * w["decode_s_per_seq"] * w["num_requests"]
    bound_s = w["step_s"] + w["step_budget_tokens"] * w["prefill_s_per_token"] + w["status_age_s"] + w["round_trip_s"]
    if fleet.num_routers > 1:
        total += (
            0.0
            if w["is_home"]
            else weights.away_from_home * min(fleet.mean_full_s, sorted(queued_s)[(num_workers - 1) // 2])
        )
        bound_s += weights.patience * requests.age_s[row]
    num_over = max(0.0, w["num_requests"] - sum(loads.num_requests) / num_workers)
    total += weights.crowd * num_over * (w["step_s"] + w["decode_s_per_seq"] * w["num_requests"])
    new_blocks = requests.demand_blocks[row] - requests.matched_tokens[row, column] // 64
    missing_blocks = new_blocks - (w["kv_total_blocks"] - w["kv_used_blocks"]) if w["num_requests"] else 0
    missing_slots = w["num_requests"] + 1 - w["max_num_seqs"]
    missing = max(0.0, missing_blocks / w["kv_total_blocks"], missing_slots / w["max_num_seqs"])
    answer_s = fleet.mean_output_tokens * (w["step_s"] + w["decode_s_per_seq"] * w["num_requests"])
    total += weights.room * missing * answer_s / (1 + pressure)
    fits = missing_blocks <= 0
    return total, bool(w["num_requests"] < w["max_num_seqs"] and queued_s[column] < bound_s and fits)


class TestBaselines:
    def test_round_robin_takes_turns(self) -> None:
        loads = loads_of({}, {}, {})
        turns = [order_of(make_policy("round_robin"), loads, request_of([0] * 3, ordinal=n))[0] for n in range(6)]
        assert turns == ["w0", "w1", "w2", "w0", "w1", "w2"]

    def test_least_load_takes_the_emptiest(self) -> None:
        loads = loads_of({"num_requests": 3}, {"num_requests": 1}, {"num_requests": 2})
        assert order_of(make_policy("least_load"), loads) == ["w1", "w2", "w0"]

    def test_power_of_two_never_sends_to_the_fullest_of_its_two(self) -> None:
        loads = loads_of({"num_requests": 9}, {}, {})
        firsts = {order_of(make_policy("power_of_two"), loads, seed=seed)[0] for seed in range(40)}
        assert firsts == {"w1", "w2"}

    def test_power_of_two_looks_at_no_more_than_two(self) -> None:
        loads = loads_of({}, *({"num_requests": 9} for _ in range(9)))
        firsts = [order_of(make_policy("power_of_two"), loads, seed=seed)[0] for seed in range(400)]
        # Of ten the emptiest is one of two drawn in a fifth of all draws.
        assert 40 <= firsts.count("w0") <= 120

    def test_prefix_hash_keeps_a_prefix_at_home_until_home_is_overloaded(self) -> None:
        policy = make_policy("prefix_hash")
        idle: list[dict[str, Any]] = [{} for _ in range(4)]
        home = order_of(policy, loads_of(*idle))[0]
        crowded = loads_of(*({"num_requests": 20 if f"w{index}" == home else 0} for index in range(4)))
        assert order_of(policy, loads_of(*idle), seed=99)[0] == home
        assert order_of(policy, crowded)[-1] == home
