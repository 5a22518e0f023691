"""The rules of other projects, on the examples that tell them apart. Prompts have ten blocks of 64 tokens."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from router.policies import make_policy
from router.policies.base import FleetState, Loads, Requests
from shared.errors import ConfigError
from tests.support.policies import loads_of, request_of

FLEET = FleetState(prefill_s_per_token=1e-4, block_size_tokens=64)


def loads(num_workers: int, **columns: list[int]) -> Loads:
    return loads_of(*({name: values[at] for name, values in columns.items()} for at in range(num_workers)))


def requests(matched_tokens: list[int], num_prompt_tokens: int = 640) -> Requests:
    return request_of(matched_tokens, num_prompt_tokens)


def totals(policy: str, asked: Requests, about: Loads, seed: int = 1) -> list[list[float]]:
    costs = make_policy(policy).costs(asked, about, FLEET, random.Random(seed))
    return [[round(float(cost), 9) for cost in row] for row in costs.total]


def winners(policy: str, asked: Requests, about: Loads, num_draws: int = 1) -> set[str]:
    """Who gets the first request, in all draws."""
    return set(shares(policy, asked, about, num_draws))


def shares(policy: str, asked: Requests, about: Loads, num_draws: int) -> Counter[str]:
    made = make_policy(policy)
    rng = random.Random(5)
    return Counter(about.workers[made.costs(asked, about, FLEET, rng).best(about)[0]] for _ in range(num_draws))


class TestDynamo:
    """`docs/components/router/router-concepts.md`; the first example is the one in its picture."""

    def test_cost_is_prefill_plus_decode_blocks(self) -> None:
        about = loads(3, kv_demand_blocks=[2, 0, 7])
        asked = requests([2 * 64, 5 * 64, 8 * 64])
        assert totals("dynamo", asked, about) == [[8 + 10, 5 + 5, 2 + 9]]

    def test_prefill_that_is_queued_counts(self) -> None:
        about = loads(2, queued_prefill_tokens=[6 * 64, 0])
        assert totals("dynamo:prefill_load_scale=3", requests([9 * 64, 0]), about) == [[3 * 7 + 1, 3 * 10 + 10]]

    def test_credit_takes_no_more_than_all_prefill(self) -> None:
        asked, about = requests([8 * 64]), loads(1, queued_prefill_tokens=[4 * 64])
        assert totals("dynamo:overlap_score_credit=0.5:assume_kv_reuse=false", asked, about) == [[10 + 10]]
        assert totals("dynamo:overlap_score_credit=9:assume_kv_reuse=false", asked, about) == [[0 + 10]]

    def test_credit_halves_at_one_request_of_excess_prefill_under_a_decay_of_one(self) -> None:
        about = loads(2, queued_prefill_tokens=[10 * 64, 0])
        asked = requests([8 * 64, 8 * 64])
        policy = "dynamo:overlap_score_credit_decay=1:assume_kv_reuse=false"
        assert totals(policy, asked, about) == [[20 - 4 + 10, 10 - 8 + 10]]

    def test_prefill_may_be_left_out_and_requests_may_count(self) -> None:
        about = loads(2, queued_prefill_tokens=[640, 0], num_requests=[3, 0])
        policy = "dynamo:track_prefill_tokens=false:decode_active_request_weight=2"
        assert totals(policy, requests([0, 0]), about) == [[10 + 6, 10]]

    def test_lmetric_multiplies(self) -> None:
        about = loads(2, kv_demand_blocks=[5, 1])
        asked = requests([8 * 64, 0])
        assert totals("dynamo:selection_policy=lmetric", asked, about) == [[2 * (5 + 2 + 1), 10 * (1 + 10 + 1)]]

    def test_equal_costs_are_drawn(self) -> None:
        assert winners("dynamo", requests([0] * 4), loads(4), num_draws=60) == {"w0", "w1", "w2", "w3"}

    def test_temperature_draws_from_the_softmax_of_scaled_costs(self) -> None:
        about = loads(3, kv_demand_blocks=[0, 50, 100])
        drawn = shares("dynamo:temperature=0.5", requests([0, 0, 0]), about, num_draws=4000)
        weights = np.exp(-np.array([0.0, 0.5, 1.0]) / 0.5)
        expected = weights / weights.sum()
        assert [drawn[worker] / 4000 for worker in about.workers] == pytest.approx(expected, abs=0.03)

    def test_a_threshold_holds_requests_until_some_worker_is_below_it(self) -> None:
        policy = make_policy("dynamo:queue_threshold=2")
        assert (policy.is_late_binding, make_policy("dynamo").is_late_binding) == (True, False)
        busy = loads(2, queued_prefill_tokens=[5000, 4097], step_budget_tokens=[2048, 2048])
        ready = loads(2, queued_prefill_tokens=[5000, 4096], step_budget_tokens=[2048, 2048])
        for about, expected in ((busy, False), (ready, True)):
            costs = policy.costs(requests([640, 0]), about, FLEET, random.Random(1))
            assert costs.can_send is not None
            assert costs.can_send.tolist() == [[expected, expected]]
            assert policy.is_ready(about, FLEET, np.zeros(1)).tolist() == [expected, expected]

    def test_held_requests_go_by_age_or_shortest_first(self) -> None:
        age_s, own_s = np.array([1.0, 2.0, 3.0]), np.array([0.2, 0.1, 0.3])
        fcfs, wspt = make_policy("dynamo"), make_policy("dynamo:queue_policy=wspt")
        assert np.argsort(-fcfs.urgency(age_s, own_s, np.ones(3), FLEET)).tolist() == [2, 1, 0]
        assert np.argsort(-wspt.urgency(age_s, own_s, np.ones(3), FLEET)).tolist() == [1, 0, 2]


class TestLlmD:
    def test_scores_are_weighed_and_added(self) -> None:
        about = loads(3, num_waiting=[0, 2, 4], kv_used_blocks=[800, 400, 0])
        asked = requests([640, 320, 0])
        assert totals("llm_d", asked, about) == [[-(3 + 2 + 0), -(1.5 + 1 + 1), -(0 + 0 + 2)]]

    def test_equal_queues_all_score_one(self) -> None:
        about = loads(2, num_waiting=[7, 7], kv_used_blocks=[0, 800])
        assert totals("llm_d:prefix_weight=0", requests([0, 0]), about) == [[-(2 + 2), -2]]

    def test_scorers_that_the_guide_does_not_weigh(self) -> None:
        about = loads(3, num_waiting=[0, 4, 99], num_requests=[0, 5, 20])
        none = "llm_d:prefix_weight=0:queue_weight=0:kv_utilization_weight=0"
        by_queue = f"{none}:load_aware_weight=1:load_aware_threshold=16"
        assert totals(by_queue, requests([0, 0, 0]), about) == [[-0.5, -0.375, 0]]
        assert totals(f"{none}:active_request_weight=1", requests([0, 0, 0]), about) == [[-1, -0.75, 0]]

    def test_a_prompt_without_a_full_block_scores_by_load(self) -> None:
        about = loads(2, num_waiting=[1, 0])
        assert winners("llm_d", requests([0, 0], num_prompt_tokens=63), about, num_draws=20) == {"w1"}


class TestLlmDAffinity:
    def test_stays_with_holders_of_most_of_the_prompt(self) -> None:
        about = loads(3, queued_prefill_tokens=[9000, 20_000, 0])
        assert winners("llm_d_affinity", requests([512, 512, 448]), about) == {"w0"}

    def test_without_a_holder_the_fewest_uncached_tokens_in_flight_win(self) -> None:
        about = loads(3, queued_prefill_tokens=[100, 300, 0])
        assert winners("llm_d_affinity", requests([0, 448, 0]), about) == {"w1"}

    def test_requests_may_count_in_place_of_tokens(self) -> None:
        about = loads(3, queued_prefill_tokens=[0, 900, 0], num_requests=[2, 1, 0])
        assert winners("llm_d_affinity:load_scorer=active_request", requests([640, 640, 0]), about) == {"w1"}

    def test_leaves_holders_that_would_start_too_late(self) -> None:
        about = loads(2, queued_prefill_tokens=[20_001, 0])
        asked = requests([640, 0])
        assert winners("llm_d_affinity:max_ttft_penalty_ms=2001", asked, about) == {"w0"}
        assert winners("llm_d_affinity:max_ttft_penalty_ms=2000", asked, about) == {"w1"}
        assert winners("llm_d_affinity:max_ttft_penalty_ms=0", asked, about) == {"w0"}

    def test_a_given_throughput_counts_in_place_of_what_workers_measured(self) -> None:
        about = loads(2, queued_prefill_tokens=[20_001, 0])
        policy = "llm_d_affinity:max_ttft_penalty_ms=2000:peak_prefill_throughput=20000"
        assert winners(policy, requests([640, 0]), about) == {"w0"}

    def test_explores_as_often_as_told(self) -> None:
        about = loads(2, queued_prefill_tokens=[1000, 0])
        drawn = shares("llm_d_affinity:exploration_probability=0.25", requests([640, 0]), about, num_draws=2000)
        assert drawn["w1"] / 2000 == pytest.approx(0.25, abs=0.04)


class TestSglang:
    def test_the_longest_match_wins_whatever_the_load_within_the_balance(self) -> None:
        assert winners("sglang", requests([256, 320, 0]), loads(3, num_requests=[0, 64, 0])) == {"w1"}

    def test_a_match_of_just_the_threshold_is_none(self) -> None:
        about = loads(2, num_requests=[1, 0])
        assert winners("sglang:cache_threshold=0.5", requests([320, 0]), about) == {"w1"}
        assert winners("sglang:cache_threshold=0.49", requests([320, 0]), about) == {"w0"}

    @pytest.mark.parametrize(
        ("num_requests", "winner"), [([65, 0], "w1"), ([64, 0], "w0"), ([200, 133], "w1"), ([200, 134], "w0")]
    )
    def test_uneven_loads_pass_both_thresholds_and_the_fewest_requests_win(
        self, num_requests: list[int], winner: str
    ) -> None:
        assert winners("sglang", requests([640, 0]), loads(2, num_requests=num_requests)) == {winner}

    def test_of_equal_matches_the_fewest_requests_win(self) -> None:
        assert winners("sglang", requests([640, 640, 0]), loads(3, num_requests=[5, 4, 0])) == {"w1"}


class TestRayPrefix:
    def test_the_longest_match_wins_at_any_load_by_default(self) -> None:
        assert winners("ray_prefix", requests([64, 0]), loads(2, num_requests=[999, 0])) == {"w0"}

    def test_below_the_rate_the_smallest_tree_wins_and_of_those_the_shortest_queue(self) -> None:
        about = loads(3, num_resident_blocks=[9, 3, 3], num_requests=[0, 2, 1])
        assert winners("ray_prefix:match_rate_threshold=0.11", requests([64, 0, 0]), about) == {"w2"}

    def test_with_uneven_queues_the_shorter_of_two_wins(self) -> None:
        about = loads(3, num_requests=[0, 1, 9])
        policy = "ray_prefix:imbalanced_threshold=8"
        drawn = shares(policy, requests([0, 0, 640]), about, num_draws=900)
        assert set(drawn) == {"w0", "w1"}
        assert drawn["w0"] / 900 == pytest.approx(2 / 3, abs=0.06)
        assert winners("ray_prefix:imbalanced_threshold=9", requests([0, 0, 640]), about) == {"w2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynamo:temperature=-1", "dynamo: invalid value '-1' of temperature: .*numbers >= 0"),
        ("dynamo:temperature=nan", "dynamo: invalid value 'nan' of temperature: .*finite"),
        ("dynamo:prefill_load_scale=inf", "invalid value 'inf' of prefill_load_scale"),
        ("dynamo:selection_policy=best", "invalid value 'best' of selection_policy: .*'linear' or 'lmetric'"),
        ("dynamo:track_prefill_tokens=maybe", "invalid value 'maybe' of track_prefill_tokens"),
        ("llm_d:prefix_weight=heavy", "llm_d: invalid value 'heavy' of prefix_weight: .*numbers >= 0"),
        ("llm_d:load_aware_threshold=0", "invalid value '0' of load_aware_threshold: .*numbers >= 1"),
        ("llm_d_affinity:affinity_threshold=1.5", "'1.5' of affinity_threshold: .*numbers >= 0 and <= 1"),
        ("llm_d_affinity:peak_prefill_throughput=0", "'0' of peak_prefill_throughput: .*numbers > 0"),
        ("sglang:balance_abs_threshold=1.5", "sglang: invalid value '1.5' of balance_abs_threshold: .*integer"),
        ("sglang:balance_rel_threshold=0.9", "'0.9' of balance_rel_threshold: .*numbers >= 1"),
        ("ray_prefix:match_rate_threshold=-0.1", "ray_prefix: invalid value '-0.1' of match_rate_threshold"),
    ],
)
def test_a_knob_out_of_range_is_refused_with_its_name_value_and_range(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(text)


@pytest.mark.parametrize(
    ("policy", "knobs"),
    [
        (
            "dynamo",
            {
                "overlap_score_credit": 1.0,
                "overlap_score_credit_decay": 0.0,
                "prefill_load_scale": 1.0,
                "temperature": 0.0,
                "decode_active_request_weight": 0.0,
                "track_prefill_tokens": True,
                "assume_kv_reuse": True,
                "selection_policy": "linear",
                "queue_threshold": None,
                "queue_policy": "fcfs",
            },
        ),
        (
            "llm_d",
            {
                "prefix_weight": 3.0,
                "queue_weight": 2.0,
                "kv_utilization_weight": 2.0,
                "load_aware_weight": 0.0,
                "load_aware_threshold": 128,
                "active_request_weight": 0.0,
            },
        ),
        (
            "llm_d_affinity",
            {
                "affinity_threshold": 0.8,
                "exploration_probability": 0.0,
                "max_ttft_penalty_ms": 18_000.0,
                "peak_prefill_throughput": None,
                "load_scorer": "token_load",
                "queue_threshold_tokens": 4_194_304,
            },
        ),
        ("sglang", {"cache_threshold": 0.3, "balance_abs_threshold": 64, "balance_rel_threshold": 1.5}),
        ("ray_prefix", {"imbalanced_threshold": float("inf"), "match_rate_threshold": 0.1}),
    ],
)
def test_defaults_are_the_published_ones(policy: str, knobs: dict[str, Any]) -> None:
    made = make_policy(policy)
    assert {name: getattr(made, name) for name in made.__dataclass_fields__} == knobs  # type: ignore[attr-defined]
