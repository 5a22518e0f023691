"""`kvroute calibrate`: a latency profile fitted to a live engine, and proved on the demo's prompts.

Joins the demo's prompts, which are the router's, and an engine without Ray or router around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from router.demo_input import demo_rows
from router.launch import prepare_model_folder
from router.serving import Say
from router.tables import table
from router.tokenizer import Tokenizer
from shared.config import Settings
from shared.errors import ConfigError, OutputError
from shared.types import CacheScheme
from worker.calibration import Calibration, Timed, calibrate, fastest, predict, serve
from worker.process import make_engine

_DEMO_SEED = 20
_DEMO_MAX_TOKENS = 8
_DEMO_IN_FLIGHT = 2
_NUM_PASSES = 3
"""The fastest of which counts for each request, as in the fit."""
_LONGEST_TOLD_ERROR = 0.15
"""A mean error over this is pointed at: rankings of policies depend on less, plans of capacity on more."""


async def run_calibrate(
    settings: Settings, *, output: Path | None, is_validated: bool, is_json: bool, say: Say, show: Callable[[str], None]
) -> int:
    """Fit a profile, write it or show it, and tell how well it predicts. Gives the exit code.

    Raises `EngineError` or `ConfigError` where the engine does not start, `OutputError` for a file that takes nothing.
    """
    if settings.engine == "simulator" and not is_validated:
        say(f"this fits a profile to the simulator's own: what comes out is {settings.profile} again")
    folder = await prepare_model_folder(settings, say)
    scheme = CacheScheme(settings.model_name, settings.block_size)
    deaths: list[str] = []
    engine = make_engine(settings, scheme, folder, lambda change: None, deaths.append)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        say("starting the engine")
        info = await engine.start()
        rng = random.Random(settings.seed)
        calibration = await calibrate(engine, info, scheme, f"{settings.model_name}-{info.name}", rng, say=say)
        timed: list[Timed] = []
        passes: list[list[Timed]] = []
        if is_validated:
            prompts = await _demo_prompts(folder, info.max_model_len_tokens)
            most = [_DEMO_MAX_TOKENS] * len(prompts)
            for number in range(_NUM_PASSES):
                say(
                    f"timing the {len(prompts)} prompts of the demo, {_DEMO_IN_FLIGHT} at once: "
                    f"pass {number + 1} of {_NUM_PASSES}"
                )
                await engine.reset_cache()
                passes.append(await serve(engine, prompts, most, max_in_flight=_DEMO_IN_FLIGHT))
            timed = fastest(passes)
    figures: dict[str, Any] = _fit_figures(calibration)
    if is_validated:
        predicted = await asyncio.to_thread(
            predict, timed, calibration.profile, info, scheme, max_in_flight=_DEMO_IN_FLIGHT
        )
        figures["validation"] = compare(timed, predicted) | {"repeat_error_mean": repeat_error(passes)}
    if output is not None:
        await asyncio.to_thread(_write, output, calibration.profile.to_yaml())
        say(f"profile {calibration.profile.name} is in {output}; use it with --engine simulator --profile {output}")
    show(json.dumps(figures) if is_json else _text(calibration, figures))
    return 0


def compare(timed: Sequence[Timed], predicted: Sequence[Timed]) -> dict[str, float]:
    """How far predicted times to first token are from measured ones."""
    errors = [abs(guess.ttft_s / fact.ttft_s - 1.0) for fact, guess in zip(timed, predicted, strict=True)]
    measured_s, predicted_s = (mean(request.ttft_s for request in requests) for requests in (timed, predicted))
    return {
        "num_requests": len(timed),
        "ttft_mean_measured_s": measured_s,
        "ttft_mean_predicted_s": predicted_s,
        "error_of_mean": abs(predicted_s / measured_s - 1.0),
        "error_mean": mean(errors),
        "error_p50": median(errors),
        "cached_tokens_measured": sum(request.cached_tokens for request in timed),
        "cached_tokens_predicted": sum(request.cached_tokens for request in predicted),
    }


def repeat_error(passes: Sequence[Sequence[Timed]]) -> float:
    """How far the engine is from itself: of each request's time to first token, the middle pass over the fastest.

    What a quiet machine would show is some percent; no prediction can be held to less than this.
    """
    times_s = [[timed.ttft_s for timed in of_request] for of_request in zip(*passes, strict=True)]
    return float(mean(median(of_request) / min(of_request) - 1.0 for of_request in times_s))


async def _demo_prompts(folder: Path, max_model_len_tokens: int) -> list[list[int]]:
    tokenizer = await asyncio.to_thread(Tokenizer, folder)
    prompts = [await tokenizer.encode_chat(row["body"]["messages"]) for row in demo_rows(_DEMO_SEED)]
    fitting = [prompt for prompt in prompts if len(prompt) + _DEMO_MAX_TOKENS < max_model_len_tokens]
    if not fitting:
        raise ConfigError(f"--max-model-len: {max_model_len_tokens} tokens are too few for any prompt of the demo")
    return fitting


def _fit_figures(calibration: Calibration) -> dict[str, Any]:
    profile = calibration.profile
    return {
        "profile": profile.name,
        "step_s": profile.step_s,
        "prefill_s_per_token": profile.prefill_s_per_token,
        "prefill_s_per_token_context": profile.prefill_s_per_token_context,
        "decode_s_per_seq": profile.decode_s_per_seq,
        "decode_s_per_context_token": profile.decode_s_per_context_token,
        "request_s": profile.request_s,
        "num_samples": len(calibration.samples),
        "fit_error_mean": mean(calibration.errors),
        "fit_error_max": max(calibration.errors),
    }


def _text(calibration: Calibration, figures: dict[str, Any]) -> str:
    rows = [("steps", "measured", "fitted", "error")]
    for (sample, predicted_s), error in zip(calibration.samples, calibration.errors, strict=True):
        rows.append((sample.what, f"{sample.elapsed_s:.4f} s", f"{predicted_s:.4f} s", f"{error:.1%}"))
    lines = [table(rows), "", calibration.profile.to_yaml().rstrip()]
    lines.append(f"mean error of the fit {figures['fit_error_mean']:.1%}, largest {figures['fit_error_max']:.1%}")
    if "validation" in figures:
        told = figures["validation"]
        lines.append(
            f"TTFT of {told['num_requests']} demo requests: measured {told['ttft_mean_measured_s']:.3f} s, predicted "
            f"{told['ttft_mean_predicted_s']:.3f} s in the mean ({told['error_of_mean']:.1%} off); error of a request "
            f"{told['error_mean']:.1%} in the mean, {told['error_p50']:.1%} in the median; the engine itself was "
            f"{told['repeat_error_mean']:.1%} off its fastest pass"
        )
        if told["error_of_mean"] > _LONGEST_TOLD_ERROR:
            lines.append("the prediction is poor: calibrate on a machine that does nothing else")
    return "\n".join(lines)


def _write(output: Path, text: str) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--out: cannot write {output}: {error.strerror}") from None
