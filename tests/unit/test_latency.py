from __future__ import annotations

import random

import pytest

from worker.engines.base import StepFit
from worker.latency import StepTimes


def feed(times: StepTimes, rng: random.Random, truth: StepFit, num_steps: int, noise: float = 0.0) -> None:
    for _ in range(num_steps):
        prefill = rng.choice([0, 0, 0, rng.randrange(1, 2048)])
        decode = rng.randrange(0 if prefill else 1, 9)
        exact = truth.step_s + truth.prefill_s_per_token * prefill + truth.decode_s_per_seq * decode
        times.add(exact * (1 + noise * rng.uniform(-1, 1)), prefill, decode)


def assert_close(fit: StepFit, truth: StepFit, rel: float) -> None:
    assert fit.step_s == pytest.approx(truth.step_s, rel=rel)
    assert fit.prefill_s_per_token == pytest.approx(truth.prefill_s_per_token, rel=rel)
    assert fit.decode_s_per_seq == pytest.approx(truth.decode_s_per_seq, rel=rel)


def test_no_steps_no_figures():
    assert StepTimes().fit() == StepFit(0.0, 0.0, 0.0)


def test_exact_steps_give_exact_figures():
    truth = StepFit(step_s=0.012, prefill_s_per_token=0.0004, decode_s_per_seq=0.003)
    times = StepTimes()
    feed(times, random.Random(1), truth, 100)
    assert_close(times.fit(), truth, rel=1e-6)


def test_noisy_steps_give_close_figures():
    truth = StepFit(step_s=0.012, prefill_s_per_token=0.0004, decode_s_per_seq=0.003)
    times = StepTimes()
    feed(times, random.Random(2), truth, 2000, noise=0.1)
    assert_close(times.fit(), truth, rel=0.15)


def test_a_slower_engine_is_noticed():
    rng = random.Random(3)
    truth = StepFit(step_s=0.012, prefill_s_per_token=0.0004, decode_s_per_seq=0.003)
    slower = StepFit(step_s=0.024, prefill_s_per_token=0.0008, decode_s_per_seq=0.006)
    times = StepTimes()
    feed(times, rng, truth, 2000)
    feed(times, rng, slower, 3000)
    assert_close(times.fit(), slower, rel=0.02)


def test_ten_times_faster_steps_give_ten_times_smaller_figures():
    truth = StepFit(step_s=0.012, prefill_s_per_token=0.0004, decode_s_per_seq=0.003)
    fast = StepFit(step_s=0.0012, prefill_s_per_token=0.00004, decode_s_per_seq=0.0003)
    times, fast_times = StepTimes(), StepTimes()
    feed(times, random.Random(4), truth, 300, noise=0.2)
    feed(fast_times, random.Random(4), fast, 300, noise=0.2)
    fit = times.fit()
    assert_close(
        fast_times.fit(), StepFit(fit.step_s / 10, fit.prefill_s_per_token / 10, fit.decode_s_per_seq / 10), rel=1e-6
    )


def test_prefill_cost_is_remembered_through_a_long_decode():
    truth = StepFit(step_s=0.012, prefill_s_per_token=0.0004, decode_s_per_seq=0.003)
    times = StepTimes()
    feed(times, random.Random(5), truth, 200)
    for num_decode in [1, 2, 3, 4] * 5000:
        times.add(truth.step_s + truth.decode_s_per_seq * num_decode, 0, num_decode)
    assert_close(times.fit(), truth, rel=0.01)


@pytest.mark.parametrize("seed", range(50))
def test_no_figure_is_ever_negative(seed: int):
    rng = random.Random(seed)
    times = StepTimes()
    for _ in range(rng.randrange(1, 60)):
        times.add(rng.expovariate(100), rng.choice([0, rng.randrange(1000)]), rng.randrange(5))
        fit = times.fit()
        assert min(fit.step_s, fit.prefill_s_per_token, fit.decode_s_per_seq) >= 0


def test_one_kind_of_step_explains_its_own_cost():
    times = StepTimes()
    for _ in range(50):
        times.add(0.02, 0, 4)
    fit = times.fit()
    assert fit.step_s + 4 * fit.decode_s_per_seq == pytest.approx(0.02)
    assert fit.prefill_s_per_token == 0
