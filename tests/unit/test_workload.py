"""What is asked of a fleet: which requests, when, and how much of them any cache could serve."""

from __future__ import annotations

import random
from typing import Any

import pytest

from router.workload import Workload, arrival_times_s, select
from shared.errors import ConfigError
from shared.hashing import unpack_tokens
from tests.support.traces import logged, mooncake, parsed


def times_s(*at_s: float, **more: Any) -> list[float]:
    options = {"rate_per_s": None, "is_spread": False, "rng": random.Random(1), **more}
    return arrival_times_s(parsed(*(logged(each) for each in at_s)), **options)


def selected(*rows: Any, **more: Any) -> list[Any]:
    return select(parsed(*rows), "t", **{"num_blocks": 20, "block_size_tokens": 64, **more})


def test_times_stay_as_they_are_but_begin_at_zero():
    assert times_s(5, 5, 7.5) == [0.0, 0.0, 2.5]


def test_times_are_stretched_to_a_rate():
    assert times_s(0, 1, 4, rate_per_s=1.0) == [0.0, 0.5, 2.0]
    workload = Workload(parsed(logged(0), logged(1), logged(4)), [0.0, 0.5, 2.0])
    assert (workload.rate_per_s, workload.span_s) == (1.0, 2.0)


def test_requests_of_one_time_arrive_at_random_where_a_rate_is_asked_for():
    times = times_s(*[3.0] * 2000, rate_per_s=4.0)
    assert times == sorted(times)
    assert len(set(times)) == 2000
    assert 450 < times[-1] < 550
    assert Workload(parsed(logged()), [0.0]).rate_per_s is None


def test_rounded_times_are_spread_over_their_ticks_in_order_and_by_the_seed():
    times = times_s(0, 0, 0, 3, 3, 9, is_spread=True)
    assert times == sorted(times)
    assert all(0 <= each < 3 for each in times[:3])
    assert all(3 <= each < 9 for each in times[3:5])
    assert 9 <= times[5] < 15
    assert times == times_s(0, 0, 0, 3, 3, 9, is_spread=True)
    assert times != times_s(0, 0, 0, 3, 3, 9, is_spread=True, rng=random.Random(2))


def test_requests_that_all_came_at_one_time_cannot_be_spread():
    assert times_s(1, 1, is_spread=True) == [0.0, 0.0]


def test_window_leaves_out_the_beginning_and_all_after_its_end():
    rows = [mooncake(0, 10, (number,)) for number in range(6)]
    assert [request.line for request in selected(*rows, skip=2, limit=3)] == [3, 4, 5]


def test_prompts_are_cut_before_they_are_measured_against_a_worker():
    long = mooncake(0, 5000, tuple(range(10)))
    (cut,) = selected(long, max_prompt_tokens=1000)
    assert (cut.num_prompt_tokens, len(unpack_tokens(cut.token_ids()))) == (1000, 1000)
    with pytest.raises(
        ConfigError, match=r"trace t: line 2: 5000 prompt tokens and 8 of output need 79 KV blocks.* 20"
    ):
        selected(mooncake(), long)


def test_request_that_just_fits_is_taken():
    assert len(selected(mooncake(0, 1272, (0, 1, 2), output_length=8))) == 1
    with pytest.raises(ConfigError, match="need 21 KV blocks"):
        selected(mooncake(0, 1273, (0, 1, 2), output_length=8))


def test_window_past_the_end_is_refused():
    with pytest.raises(ConfigError, match="--skip 1: leaves no requests"):
        selected(mooncake(), skip=1)


def test_arrivals_are_the_requests_with_their_times_any_number_of_times():
    workload = Workload(parsed(logged(0, tenant="a", priority=2), logged(1, token_ids=[4])), [0.0, 0.25])
    first, second = list(workload), list(workload)
    assert [(each.at_s, len(each.token_ids) // 4, each.num_output_tokens) for each in first] == [
        (0.0, 150, 8),
        (0.25, 1, 8),
    ]
    assert (first[0].tenant, first[0].priority, first) == ("a", 2, second)
    assert [each.at_s for each in workload.at_once(1)] == [0.0]


def test_endless_cache_serves_what_an_earlier_prompt_began_with():
    # 16 blocks are shared by two; a prompt that ends with a block cannot use its last one itself.
    workload = Workload(
        parsed(mooncake(0, 1600, (0, 1, 2, 3)), mooncake(0, 1024, (0, 1)), mooncake(0, 64, (9,))), [0.0] * 3
    )
    assert workload.possible_cached_tokens(64) == 16 * 64
    assert workload.num_prompt_tokens == 1600 + 1024 + 64
