"""Steps of an engine as own answers show them, on a clock that stands where it is put."""

from __future__ import annotations

import pytest

from shared.types import RequestId
from worker.engines.attached_steps import StreamSteps

A, B = RequestId("a"), RequestId("b")
STEP_S, TOKEN_S, SEQ_S = 0.01, 1e-4, 1e-3
"""What the engine of these tests takes: for each step, each prompt token and each answer in it."""


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def steps(clock: Clock) -> StreamSteps:
    return StreamSteps(clock)


def answer_alone(steps: StreamSteps, clock: Clock, num_prompt_tokens: int, cached_tokens: int, num_tokens: int) -> None:
    steps.submitted(A, num_prompt_tokens)
    clock.now_s += STEP_S + TOKEN_S * (num_prompt_tokens - cached_tokens)
    steps.told(A, 1)
    for _ in range(num_tokens - 1):
        clock.now_s += STEP_S + SEQ_S
        steps.told(A, 1)
    steps.ended(A, cached_tokens)
    clock.now_s += 5.0


def test_nothing_is_known_before_the_first_answer(steps: StreamSteps):
    fit = steps.fit()
    assert (fit.step_s, fit.prefill_s_per_token, fit.decode_s_per_seq) == (0.0, 0.0, 0.0)


def test_single_answers_give_the_costs_of_prefill_and_of_steps(steps: StreamSteps, clock: Clock):
    for num_prompt_tokens, cached_tokens in ((100, 0), (1000, 0), (1000, 900), (500, 64), (2000, 0)) * 3:
        answer_alone(steps, clock, num_prompt_tokens, cached_tokens, 5)
    fit = steps.fit()
    assert fit.prefill_s_per_token == pytest.approx(TOKEN_S)
    assert fit.step_s == pytest.approx(STEP_S)
    assert fit.decode_s_per_seq == pytest.approx(SEQ_S)


def test_answers_side_by_side_give_what_one_more_adds_to_a_step(steps: StreamSteps, clock: Clock):
    for _ in range(4):
        steps.submitted(A, 300)
        clock.now_s += STEP_S + TOKEN_S * 300
        steps.told(A, 1)
        steps.submitted(B, 500)
        # B came after the step had begun, so that the next one has it.
        clock.now_s += STEP_S + SEQ_S + TOKEN_S * 500
        steps.told(B, 1)
        steps.told(A, 1)
        for _ in range(6):
            clock.now_s += STEP_S + 2 * SEQ_S
            steps.told(A, 1)
            steps.told(B, 1)
        steps.ended(A, 0)
        steps.ended(B, 0)
        answer_alone(steps, clock, 50, 0, 10)
    fit = steps.fit()
    assert fit.prefill_s_per_token == pytest.approx(TOKEN_S, rel=0.02)
    assert fit.decode_s_per_seq == pytest.approx(SEQ_S, rel=0.2)


def test_steps_beside_a_prompt_that_waits_do_not_count(steps: StreamSteps, clock: Clock):
    answer_alone(steps, clock, 100, 0, 20)
    before = steps.fit()
    steps.submitted(A, 10)
    steps.submitted(B, 100_000)
    for _ in range(20):
        clock.now_s += 3.0  # with a chunk of B's prompt in each
        steps.told(A, 1)
    steps.ended(A, 0)
    clock.now_s += 3.0
    steps.told(B, 1)
    steps.ended(B, 0)
    assert steps.fit() == before


def test_a_request_that_is_given_up_leaves_nothing(steps: StreamSteps, clock: Clock):
    steps.submitted(A, 100)
    steps.submitted(B, 100)
    clock.now_s += 9.0
    steps.told(A, 1)
    assert (steps.num_running, steps.num_waiting, steps.is_waiting(B)) == (1, 1, True)
    steps.ended(A, None)
    steps.ended(B, None)
    assert (steps.num_running, steps.num_waiting, steps.is_waiting(B)) == (0, 0, False)
    assert steps.fit().step_s == 0.0


def test_tokens_that_come_together_are_as_many_steps(steps: StreamSteps, clock: Clock):
    steps.submitted(A, 10)
    clock.now_s += STEP_S
    steps.told(A, 1)
    for _ in range(10):
        clock.now_s += 4 * STEP_S
        steps.told(A, 4)
    steps.ended(A, 0)
    assert steps.fit().step_s == pytest.approx(STEP_S, rel=0.05)
