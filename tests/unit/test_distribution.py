"""How values are spread: exact buckets, and percentiles from the finer bounds between them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.distribution import Distribution
from shared.telemetry import ITL_BUCKETS_S, TTFT_BUCKETS_S

BUCKETS = (0.1, 1.0, 10.0)


@given(st.lists(st.one_of(st.floats(0.0, 5000.0), st.sampled_from(TTFT_BUCKETS_S)), max_size=50))
def test_buckets_are_exact_whatever_lies_between_them(values: list[float]) -> None:
    distribution = Distribution(TTFT_BUCKETS_S)
    for value in values:
        distribution.note(value)
    expected = [float(sum(value <= bucket for value in values)) for bucket in TTFT_BUCKETS_S]
    assert [count for _, count in distribution.cumulative()] == [*expected, float(len(values))]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95, 0.99])
def test_percentiles_are_off_by_a_seventh_at_most(share: float) -> None:
    rng = random.Random(7)
    values = sorted(rng.lognormvariate(-5.0, 1.0) for _ in range(5000))
    distribution = Distribution(ITL_BUCKETS_S)
    for value in values:
        distribution.note(value)
    assert distribution.quantile(share, distribution.counts) == pytest.approx(values[int(share * 5000)], rel=0.15)


def test_percentile_of_nothing_is_not_known() -> None:
    distribution = Distribution(BUCKETS)
    assert distribution.quantile(0.5, distribution.counts) is None


def test_percentile_over_all_bounds_is_the_last_of_them() -> None:
    distribution = Distribution(BUCKETS)
    distribution.note(1e6)
    assert distribution.quantile(0.5, distribution.counts) == 10.0


def test_values_that_come_together_count_each() -> None:
    distribution = Distribution(BUCKETS)
    distribution.note(0.5, times=4)
    assert (distribution.cumulative()[-1], distribution.total) == (("+Inf", 4.0), 2.0)


def test_negative_buckets_have_no_grid() -> None:
    distribution = Distribution((-1, 0, 64), is_fine=False)
    for value in (-5, 0, 10, 100):
        distribution.note(value)
    assert distribution.cumulative() == [("-1.0", 1.0), ("0.0", 2.0), ("64.0", 3.0), ("+Inf", 4.0)]
    with pytest.raises(ValueError, match="positive buckets"):
        Distribution((-1, 1))
