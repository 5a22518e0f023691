"""Batches on simulated fleets: what is computed, how soon all is done, and what others notice of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from router import batch_bench, planner_bench
from router.batch_bench import Sizes, bound_s, distinct_tokens, least_s, templated_rows
from router.batch_simulation import simulate_batch
from router.policies import make_policy
from router.requests import ServiceClass
from router.simulation import Arrival, FleetResult, FleetSpec, simulate
from shared.hashing import pack_tokens
from worker.engines.profiles import LatencyProfile, load_profile

PROFILE = load_profile("13b-a100")
SPEC = FleetSpec(4, PROFILE, num_blocks=300, max_num_seqs=16)
SIZES = Sizes(
    num_rows=400,
    num_templates=24,
    prefix_tokens=(1024, 4096),
    num_workers=4,
    num_blocks=300,
    max_num_seqs=16,
    num_real_rows=0,
)


def computed(result: FleetResult) -> int:
    assert {outcome.error for outcome in result.outcomes} == {None}
    return sum(outcome.num_prompt_tokens - outcome.cached_tokens for outcome in result.outcomes)


def test_a_templated_batch_computes_each_block_about_once_and_all_workers_end_together():
    rows = templated_rows(SIZES)
    result = simulate_batch(SPEC, make_policy("cost"), rows, max_under_way=128)
    assert computed(result) <= 1.10 * distinct_tokens(rows)
    assert result.makespan_s <= 1.30 * bound_s(rows, PROFILE, 4)
    assert min(result.busy_s) >= 0.8 * max(result.busy_s)
    by_round_robin = simulate_batch(SPEC, make_policy("round_robin"), rows, max_under_way=128, is_planned=False)
    assert result.makespan_s < 0.6 * by_round_robin.makespan_s


def test_equal_batches_give_equal_results():
    rows = templated_rows(replace(SIZES, num_rows=60))
    first, second = (simulate_batch(SPEC, make_policy("cost"), rows, max_under_way=128) for _ in range(2))
    assert first == second


def test_one_giant_group_is_computed_by_all_workers():
    rng = random.Random(0)
    prefix = pack_tokens(rng.randrange(30_000) for _ in range(2048))
    rows = [Arrival(0.0, prefix + pack_tokens(rng.randrange(30_000) for _ in range(100)), 32) for _ in range(400)]
    result = simulate_batch(SPEC, make_policy("cost"), rows, max_under_way=128)
    assert computed(result) <= distinct_tokens(rows) + 5 * 2048
    assert min(result.num_requests) >= 60


def test_rows_without_anything_in_common_are_spread_evenly():
    rng = random.Random(0)
    rows = [Arrival(0.0, pack_tokens(rng.randrange(30_000) for _ in range(300)), 8) for _ in range(300)]
    result = simulate_batch(SPEC, make_policy("cost"), rows, max_under_way=128)
    assert computed(result) == distinct_tokens(rows)
    assert min(result.busy_s) >= 0.8 * max(result.busy_s)


def test_interactive_requests_beside_a_batch_hardly_notice_it_and_the_batch_ends():
    rows = [replace(row, service_class=ServiceClass.BATCH) for row in templated_rows(SIZES)]
    rng = random.Random(1)
    beside = [Arrival(0.5 * number, pack_tokens(rng.randrange(30_000) for _ in range(200)), 8) for number in range(30)]
    policy = make_policy("cost")
    alone = simulate(SPEC, policy, beside)
    together = simulate_batch(SPEC, policy, rows, max_under_way=128, beside=beside)
    assert len(together.outcomes) == len(rows) + len(beside)
    computed(together)

    def mean_held_s(result: FleetResult) -> float:
        outcomes = result.outcomes[-len(beside) :]
        return sum((outcome.bound_at_s or 0.0) - outcome.arrived_at_s for outcome in outcomes) / len(outcomes)

    # They wait for a place, of which one is free soon, and never for the batch's end.
    assert mean_held_s(alone) < 0.01
    assert mean_held_s(together) < 0.5
    assert together.makespan_s < 1.3 * simulate_batch(SPEC, policy, rows, max_under_way=128).makespan_s + 15.0


async def test_batch_gives_every_figure_and_says_which_are_simulated():
    said: list[str] = []
    figures = await batch_bench.measure(said.append, replace(SIZES, num_rows=120))
    simulated = str(figures["simulated"]).split()
    assert set(simulated) <= figures.keys()
    assert {"computed_over_distinct", "makespan_over_bound"} <= set(simulated)
    assert 1.0 <= float(figures["computed_over_distinct"]) < float(figures["round_robin_computed_over_distinct"])
    assert float(figures["makespan_over_bound"]) > float(figures["makespan_over_least"]) >= 1.0
    assert len(said) == 3


def test_no_simulation_ends_before_the_bound():
    profile = LatencyProfile("flat", 0.01, 1e-3, 0.0, 0.0, 0.0, step_budget_tokens=512, max_num_seqs=16)
    rows = [Arrival(0.0, pack_tokens(range(number * 64, number * 64 + 64)), 1) for number in range(64)]
    spec = FleetSpec(1, profile, num_blocks=300)
    result = simulate_batch(spec, make_policy("cost"), rows, max_under_way=64)
    bound = bound_s(rows, profile, 1)
    assert bound == least_s(rows, profile, 1)
    assert bound <= result.makespan_s <= 1.5 * bound


def test_the_least_time_counts_what_tokens_see_of_those_before_them_once_for_each_block():
    profile = LatencyProfile("attentive", 0.01, 0.0, 1e-3, 0.0, 0.0, step_budget_tokens=512, max_num_seqs=16)
    prefix = pack_tokens(range(128))
    rows = [Arrival(0.0, prefix + pack_tokens([1000 + number] * 2), 1) for number in range(3)]
    # Two blocks once, and two tokens of each row that see 128 others and each other.
    pairs = 128 * 128 / 2 + 3 * (130 * 130 - 128 * 128) / 2
    assert least_s(rows, profile, 2) - bound_s(rows, profile, 2) == pytest.approx(1e-3 * pairs / 2)


async def test_planner_gives_every_figure():
    sizes = planner_bench.Sizes(nums_rows=(100, 200), many_workers=9, nums_long_rows=(300, 400))
    figures = await planner_bench.measure(lambda _: None, sizes)
    assert set(figures) == {
        *("seed", "plan_100_rows_s", "plan_200_rows_s", "time_growth_over_rows_growth", "peak_memory_mb"),
        *("peak_memory_300_long_rows_mb", "peak_memory_400_long_rows_mb"),
        *("plan_200_rows_9_workers_s", "first_rows_of_9_workers_s", "longest_look_at_9_workers_s"),
    }
