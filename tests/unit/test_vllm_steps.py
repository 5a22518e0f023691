from __future__ import annotations

import pytest

from worker.engines.base import StepFit
from worker.engines.vllm_steps import StepMeter


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def step(meter: StepMeter, clock: Clock, seconds: float, prefill: int, decode: int, unfinished: int) -> None:
    clock.now_s += seconds
    meter.stepped(
        num_prefill_tokens=prefill,
        num_decode_seqs=decode,
        num_running=unfinished,
        num_unfinished=unfinished,
        kv_usage=0,
    )


def test_the_first_step_begins_with_the_submit_and_later_ones_with_the_report(clock: Clock):
    meter = StepMeter(clock)
    for idle_s in (100.0, 0.0, 7.0):
        clock.now_s += idle_s
        meter.submitted(num_unfinished=0)
        step(meter, clock, 0.010 + 0.001 * 200, prefill=200, decode=0, unfinished=1)
        step(meter, clock, 0.010 + 0.002 * 1, prefill=0, decode=1, unfinished=1)
        meter.submitted(num_unfinished=1)  # runs beside the other: the step under way began earlier
        step(meter, clock, 0.010 + 0.002 * 1, prefill=0, decode=1, unfinished=2)
        step(meter, clock, 0.010 + 0.001 * 50 + 0.002, prefill=50, decode=1, unfinished=2)
        step(meter, clock, 0.010 + 0.002 * 2, prefill=0, decode=2, unfinished=0)
    assert meter.fit() == StepFit(
        pytest.approx(0.010),
        pytest.approx(0.001),
        pytest.approx(0.002),  # type: ignore[arg-type]
    )


def test_a_step_without_tokens_is_not_counted(clock: Clock):
    meter = StepMeter(clock)
    meter.submitted(num_unfinished=0)
    step(meter, clock, 5.0, prefill=0, decode=0, unfinished=0)
    assert meter.fit() == StepFit()


def test_a_submit_that_came_to_nothing_does_not_lengthen_the_next_step(clock: Clock):
    meter = StepMeter(clock)
    meter.submitted(num_unfinished=0)  # and refused
    clock.now_s += 100
    meter.submitted(num_unfinished=0)
    step(meter, clock, 0.5, prefill=0, decode=1, unfinished=0)
    assert meter.fit() == StepFit(step_s=0.5)


def test_reports_of_an_engine_that_was_never_given_anything_are_not_counted(clock: Clock):
    meter = StepMeter(clock)
    step(meter, clock, 5.0, prefill=10, decode=0, unfinished=0)
    assert meter.fit() == StepFit()


def test_a_step_ages_while_a_request_waits_for_it_and_not_while_the_engine_is_idle(clock: Clock):
    meter = StepMeter(clock)
    clock.now_s += 50.0
    assert meter.step_age_s == 0.0
    meter.submitted(num_unfinished=0)
    clock.now_s += 7.0
    assert meter.step_age_s == 7.0
    step(meter, clock, 1.0, prefill=0, decode=1, unfinished=1)
    assert meter.step_age_s == 0.0
    step(meter, clock, 1.0, prefill=0, decode=1, unfinished=0)
    clock.now_s += 50.0
    assert meter.step_age_s == 0.0
