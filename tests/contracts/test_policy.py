"""What every policy keeps: a permutation, best first, equal for equal arguments; and what sets each one apart."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from router.policies import make_policy
from router.policies.base import Candidate, FleetState, Load, Policy, RankRequest
from shared.errors import ConfigError
from shared.types import Instance, WorkerId

NAMES = ["cost", "random", "round_robin", "least_load", "power_of_two", "prefix_hash"]
FLEET = FleetState(prefill_s_per_token=1e-4, mean_full_s=0.4, mean_own_s=0.2)
IDLE = Load(
    worker=WorkerId("w0"),
    instance=Instance("i"),
    is_cache_aware=True,
    num_requests=0,
    max_num_seqs=8,
    queued_prefill_tokens=0,
    kv_used_blocks=0,
    kv_total_blocks=800,
    prefill_s_per_token=1e-4,
    step_s=0.01,
    decode_s_per_seq=0.001,
    step_budget_tokens=2048,
    status_age_s=0.0,
)


def candidate(index: int, matched_tokens: int = 0, **load: float) -> Candidate:
    return Candidate(replace(IDLE, worker=WorkerId(f"w{index}"), **load), matched_tokens)


def request(ordinal: int = 0, num_prompt_tokens: int = 4096, **fields: object) -> RankRequest:
    return replace(RankRequest(ordinal, num_prompt_tokens, b"prefix", demand_blocks=66), **fields)


def order_of(
    policy: Policy, candidates: Sequence[Candidate], ranked: RankRequest | None = None, seed: int = 7
) -> list[str]:
    ranking = policy.rank(ranked or request(), candidates, FLEET, random.Random(seed))
    return [scored.worker for scored in ranking.order]


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_policy(request.param)


def test_rank_is_a_permutation_that_depends_on_the_arguments_only(policy: Policy) -> None:
    draws = random.Random(3)
    for _ in range(50):
        candidates = [
            candidate(
                index,
                draws.randrange(0, 4096, 64),
                num_requests=draws.randrange(12),
                queued_prefill_tokens=draws.randrange(9000),
            )
            for index in range(draws.randrange(1, 9))
        ]
        order = order_of(policy, candidates)
        assert sorted(order) == sorted(one.worker for one in candidates)
        shuffled = draws.sample(candidates, len(candidates))
        assert order_of(policy, candidates) == order
        if policy.name != "least_load":
            assert order_of(policy, shuffled) == order


@pytest.mark.parametrize("name", [name for name in NAMES if name != "power_of_two"])
def test_costs_rise_along_the_order(name: str) -> None:
    policy = make_policy(name)
    candidates = [candidate(index, num_requests=index % 3) for index in range(6)]
    costs = [scored.cost for scored in policy.rank(request(), candidates, FLEET, random.Random(1)).order]
    assert costs == sorted(costs)


def test_explanation_names_every_worker(policy: Policy) -> None:
    candidates = [candidate(index) for index in range(3)]
    explanation = policy.rank(request(), candidates, FLEET, random.Random(1)).explain()
    assert all(one.worker in explanation for one in candidates)


def test_only_cost_binds_late() -> None:
    assert [name for name in NAMES if make_policy(name).is_late_binding] == ["cost"]


def test_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"--policy: invalid value 'kv' \(choose from cost, random, "):
        make_policy("kv")


class TestCost:
    def test_longest_holder_wins_at_equal_load(self) -> None:
        candidates = [candidate(1, 3 * 64), candidate(2, 9 * 64), candidate(4, 0)]
        assert order_of(make_policy("cost"), candidates, request(num_prompt_tokens=640)) == ["w2", "w1", "w4"]

    def test_a_least_cached_worker_under_load_is_left_alone(self) -> None:
        candidates = [
            candidate(1, num_requests=40, queued_prefill_tokens=40 * 4096, max_num_seqs=64),
            candidate(2, kv_used_blocks=700),
        ]
        assert order_of(make_policy("cost"), candidates)[0] == "w2"

    def test_a_busy_holder_is_waited_for_and_not_replaced_while_its_cache_saves_more(self) -> None:
        holder = candidate(1, 4032, num_requests=8, queued_prefill_tokens=128)
        ranking = make_policy("cost").rank(request(), [holder, candidate(2)], FLEET, random.Random(1))
        assert (ranking.order[0].worker, ranking.can_send) == ("w1", False)

    def test_a_holder_with_a_long_queue_loses_to_an_idle_worker(self) -> None:
        holder = candidate(1, 4032, num_requests=8, queued_prefill_tokens=60_000)
        ranking = make_policy("cost").rank(request(), [holder, candidate(2)], FLEET, random.Random(1))
        assert (ranking.order[0].worker, ranking.can_send) == ("w2", True)

    def test_a_prompt_larger_than_the_free_blocks_waits_unless_the_worker_is_empty(self) -> None:
        busy = candidate(1, num_requests=1, kv_used_blocks=790)
        assert not make_policy("cost").rank(request(), [busy], FLEET, random.Random(1)).can_send
        empty = candidate(1, kv_total_blocks=10)
        assert make_policy("cost").rank(request(), [empty], FLEET, random.Random(1)).can_send

    def test_equal_prompts_agree_on_a_worker_before_any_holds_them(self) -> None:
        candidates = [candidate(index) for index in range(8)]
        first = [
            order_of(make_policy("cost"), candidates, request(prefix_hash=b"a"), seed=seed)[0] for seed in range(4)
        ]
        assert len(set(first)) == 1
        spread = {order_of(make_policy("cost"), candidates, request(prefix_hash=bytes([p])))[0] for p in range(64)}
        assert len(spread) == 8

    @pytest.mark.parametrize("factor", [0.1, 10.0])
    def test_a_fleet_of_another_speed_decides_the_same(self, factor: float) -> None:
        draws = random.Random(11)
        for _ in range(200):
            candidates = [
                candidate(
                    index,
                    draws.randrange(0, 4096, 64),
                    num_requests=draws.randrange(9),
                    queued_prefill_tokens=draws.randrange(6000),
                    prefill_s_per_token=draws.uniform(0.5e-4, 2e-4),
                    status_age_s=draws.uniform(0, 0.1),
                )
                for index in range(5)
            ]
            scaled = [
                Candidate(
                    replace(
                        one.load,
                        prefill_s_per_token=one.load.prefill_s_per_token * factor,
                        step_s=one.load.step_s * factor,
                        decode_s_per_seq=one.load.decode_s_per_seq * factor,
                        status_age_s=one.load.status_age_s * factor,
                    ),
                    one.matched_tokens,
                )
                for one in candidates
            ]
            slow = FleetState(1e-4 * factor, FLEET.mean_full_s * factor, FLEET.mean_own_s * factor)
            policy = make_policy("cost")
            ours = policy.rank(request(), candidates, FLEET, random.Random(1))
            theirs = policy.rank(request(), scaled, slow, random.Random(1))
            assert [one.worker for one in ours.order] == [one.worker for one in theirs.order]
            assert ours.can_send == theirs.can_send

    def test_short_uncached_rests_go_first_but_age_overtakes_them(self) -> None:
        policy = make_policy("cost")
        assert policy.urgency(0.0, 0.01, FLEET) > policy.urgency(0.0, 0.8, FLEET)
        assert policy.urgency(60.0, 0.8, FLEET) > policy.urgency(0.0, 0.01, FLEET)


class TestBaselines:
    def test_round_robin_takes_turns(self) -> None:
        candidates = [candidate(index) for index in range(3)]
        turns = [order_of(make_policy("round_robin"), candidates, request(ordinal=n))[0] for n in range(6)]
        assert turns == ["w0", "w1", "w2", "w0", "w1", "w2"]

    def test_least_load_takes_the_emptiest(self) -> None:
        candidates = [candidate(0, num_requests=3), candidate(1, num_requests=1), candidate(2, num_requests=2)]
        assert order_of(make_policy("least_load"), candidates) == ["w1", "w2", "w0"]

    def test_power_of_two_never_sends_to_the_fullest_of_its_two(self) -> None:
        candidates = [candidate(0, num_requests=9), candidate(1), candidate(2)]
        firsts = {order_of(make_policy("power_of_two"), candidates, seed=seed)[0] for seed in range(40)}
        assert firsts == {"w1", "w2"}

    def test_prefix_hash_keeps_a_prefix_at_home_until_home_is_overloaded(self) -> None:
        policy = make_policy("prefix_hash")
        candidates = [candidate(index) for index in range(4)]
        home = order_of(policy, candidates)[0]
        crowded = [Candidate(replace(one.load, num_requests=20 if one.worker == home else 0), 0) for one in candidates]
        assert order_of(policy, candidates, seed=99)[0] == home
        assert order_of(policy, crowded)[-1] == home
