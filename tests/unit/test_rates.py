"""Rates and percentiles over sliding windows of what a router counts."""

from __future__ import annotations

import pytest

from router.rates import Rates, Window
from router.requests import RequestTrace
from shared.telemetry import Metrics
from tests.unit.test_prefix_groups import Clock


class Counted:
    """A router's metrics and their rates."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.metrics = Metrics()
        self.rates = Rates(self.metrics, self.clock)

    def answer(self, at_s: float, *, ttft_s: float = 0.1, cached_tokens: int = 50) -> None:
        self.clock.now_s = at_s
        trace = RequestTrace(
            received_at_s=at_s - ttft_s,
            first_token_at_s=at_s,
            cached_tokens=cached_tokens,
            matched_tokens=64,
            possible_tokens=80,
        )
        self.metrics.note_first_token(100, trace)
        self.metrics.note_cache(100, 64, cached_tokens)
        self.metrics.note_next_tokens(2, 0.05)
        self.metrics.num_output_tokens += 3
        self.metrics.note_request("cost", "ok", trace)
        self.rates.tick()


def test_rates_are_those_of_the_window_alone() -> None:
    counted = Counted()
    for second in range(1, 31):
        counted.answer(float(second))
    for second in range(31, 41):
        counted.answer(float(second), ttft_s=1.0, cached_tokens=80)
        counted.answer(float(second), ttft_s=1.0, cached_tokens=80)
    window = counted.rates.window(counted.rates.span(10.0))
    assert window.requests_per_s == pytest.approx(2.0, rel=0.1)
    assert window.output_tokens_per_s == pytest.approx(6.0, rel=0.1)
    assert window.ttft_p50_s == pytest.approx(1.0, rel=0.08)
    assert (window.cached_share, window.matched_share, window.possible_share) == (0.8, 0.64, 0.8)
    assert window.itl_p95_s == pytest.approx(0.025, rel=0.08)


def test_quiet_router_has_rates_of_zero_and_knows_no_percentiles() -> None:
    counted = Counted()
    counted.answer(1.0)
    for second in range(2, 30):
        counted.clock.now_s = float(second)
        counted.rates.tick()
    assert counted.rates.window(counted.rates.span(10.0)) == Window(29.0, 0.0, 0.0, 0.0, 0.0, *[None] * 7)


def test_history_has_a_window_for_each_second_of_five_minutes() -> None:
    counted = Counted()
    for tenth in range(4000):
        counted.answer(0.1 * tenth)
    history = [counted.rates.window(span) for span in counted.rates.spans(10.0)]
    assert 290 <= len(history) <= 301
    assert all(window.requests_per_s == pytest.approx(10.0, rel=0.2) for window in history[12:])
    assert [window.ends_at_s for window in history] == sorted(window.ends_at_s for window in history)


def test_rate_after_a_long_silence_is_over_the_time_that_passed() -> None:
    counted = Counted()
    counted.answer(100.0)
    assert counted.rates.window(counted.rates.span(10.0)).requests_per_s == pytest.approx(0.01)
    assert counted.rates.window(counted.rates.spans(10.0)[-1]).requests_per_s == pytest.approx(0.01)
