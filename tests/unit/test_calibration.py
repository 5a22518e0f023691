from __future__ import annotations

import random

import pytest

from router.calibrate import compare, repeat_error
from shared.errors import EngineError
from shared.types import CacheScheme
from shared.vtime import run_virtual
from worker.calibration import Calibration, Sample, Timed, calibrate, fit, predict, serve
from worker.engines.base import EngineInfo
from worker.engines.profiles import LatencyProfile
from worker.engines.simulator import SimulatorEngine
from worker.engines.simulator_options import SimulatorOptions

SCHEME = CacheScheme("calibrated", 16)
TRUTH = LatencyProfile("truth", 0.02, 1e-3, 1e-7, 2e-3, 1e-6, request_s=0.003, step_budget_tokens=512, max_num_seqs=8)


def make_engine() -> SimulatorEngine:
    options = SimulatorOptions(TRUTH, SCHEME, num_blocks=512, max_model_len_tokens=2048, vocabulary_size=1000)
    return SimulatorEngine(options, lambda change: None, lambda reason: None)


def test_an_engine_of_a_known_profile_is_fitted_by_that_profile():
    async def scenario() -> Calibration:
        engine = make_engine()
        return await calibrate(engine, engine.info, SCHEME, "fitted", random.Random(0))

    calibration = run_virtual(scenario())
    profile = calibration.profile
    assert max(calibration.errors) < 0.01
    assert profile.step_s == pytest.approx(TRUTH.step_s, rel=0.02)
    assert profile.prefill_s_per_token == pytest.approx(TRUTH.prefill_s_per_token, rel=0.02)
    assert profile.prefill_s_per_token_context == pytest.approx(TRUTH.prefill_s_per_token_context, rel=0.05)
    assert profile.decode_s_per_seq == pytest.approx(TRUTH.decode_s_per_seq, rel=0.05)
    assert profile.decode_s_per_context_token == pytest.approx(TRUTH.decode_s_per_context_token, rel=0.1)
    assert profile.request_s == pytest.approx(TRUTH.request_s, rel=0.1)
    assert (profile.step_budget_tokens, profile.max_num_seqs, profile.kv_capacity_tokens) == (512, 8, 512 * 16)


def test_what_a_right_profile_predicts_is_what_was_measured():
    rng = random.Random(1)
    prompts = [[rng.randrange(1000) for _ in range(rng.randrange(20, 600))] for _ in range(20)]
    prompts += prompts[:5]

    async def scenario() -> tuple[list[Timed], EngineInfo]:
        engine = make_engine()
        return await serve(engine, prompts, [30] * len(prompts), max_in_flight=3), engine.info

    timed, info = run_virtual(scenario())
    predicted = predict(timed, TRUTH, info, SCHEME, max_in_flight=3)
    figures = compare(timed, predicted)
    assert figures["error_mean"] == pytest.approx(0.0, abs=1e-6)
    assert figures["cached_tokens_predicted"] == figures["cached_tokens_measured"] > 0
    assert figures["num_requests"] == 25


def test_samples_of_a_disturbed_machine_hardly_move_the_fit():
    rng = random.Random(2)
    terms = [(1, n, n * n / 2, 0, 0.0) for n in (16, 64, 128, 256, 512, 1024)]
    terms += [(16, 0, 0.0, 16 * seqs, 16.0 * seqs * context) for seqs in (1, 2, 4, 8) for context in (32, 512)]
    samples = []
    for number, (steps, tokens, pairs, seqs, context) in enumerate(terms):
        exact_s = 0.02 * steps + 1e-3 * tokens + 1e-7 * pairs + 2e-3 * seqs + 1e-6 * context
        disturbed_s = exact_s * (rng.uniform(1.5, 4.0) if number % 3 == 1 else 1.0)
        samples.append(Sample(f"{number}", int(not seqs), steps, tokens, pairs, seqs, context, disturbed_s))
    profile = fit(samples, "disturbed", make_engine().info, SCHEME).profile
    assert profile.step_s == pytest.approx(TRUTH.step_s, rel=0.2)
    assert profile.prefill_s_per_token == pytest.approx(TRUTH.prefill_s_per_token, rel=0.2)


def test_errors_are_shares_of_what_was_measured():
    fact, guess = Timed([1], 1, 0.2, 0), Timed([1], 1, 0.25, 0)
    figures = compare([fact, fact], [guess, fact])
    assert figures["error_mean"] == pytest.approx(0.125)
    assert figures["error_of_mean"] == pytest.approx(0.125)


def test_samples_that_tell_nothing_of_steps_are_refused():
    info = EngineInfo("none", 16, 8, 2048, 512, "lru")
    with pytest.raises(EngineError, match="the 1 samples do not tell what a step costs"):
        fit([Sample("attention alone", 1, 0, 0, 1e6, 0, 0.0, 1.0)], "none", info, SCHEME)


def test_engines_distance_from_itself_is_that_of_the_middle_pass_from_the_fastest() -> None:
    def passed(*ttfts_s: float) -> list[Timed]:
        return [Timed([1], 1, ttft_s, 0) for ttft_s in ttfts_s]

    # The first request took a fifth longer in the middle than at best, the second as long.
    assert repeat_error([passed(1.5, 2.0), passed(1.0, 2.0), passed(1.2, 9.0)]) == pytest.approx(0.1)
