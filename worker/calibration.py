"""Fits a latency profile to a live engine, and tells how well a profile predicts what an engine does.

Steps cannot be seen from outside, so requests are timed that take known steps: prompts of several sizes up to their
first token, and groups of equal answers from the last first token on. All are timed in several rounds and the fastest
of each counts, since a machine that does something else makes steps longer and never shorter.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shared.errors import EngineError
from shared.types import CacheScheme, RequestId, Sampling
from shared.vtime import run_virtual
from worker.engines.base import BlockChange, Engine, EngineInfo, EngineRequest
from worker.engines.profiles import LatencyProfile
from worker.engines.simulator import SimulatorEngine
from worker.engines.simulator_options import SimulatorOptions
from worker.head_start import HEAD_STARTS
from worker.latency import non_negative_fit

_PROMPT_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
_DECODE_PROMPT_TOKENS = (32, 512)
_DECODE_STEPS = 16
_NUM_REWEIGHTINGS = 30
_SLOW_WEIGHT = 0.05
"""Of a sample that took longer than the fit says, against one that took less."""
_LEAST_REQUEST_S = 1e-4
"""Samples do not tell less than this from nothing, but an engine never takes two requests at the same moment: with no
time between them, all that are sent together would share a step."""
_SMALLEST_TOKEN_ID, _LARGEST_TOKEN_ID = 5, 250
"""Ordinary ones in every vocabulary."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Some steps: what was in them all together, and how long they took."""

    what: str
    num_requests: int
    """Whose way to the engine is in the time."""
    num_steps: int
    num_prefill_tokens: int
    num_prefill_pairs: float
    num_decode_seqs: int
    """Sequences times steps."""
    num_context_tokens: float
    elapsed_s: float

    @property
    def step_s(self) -> float:
        """The time of one step."""
        return self.elapsed_s / max(1, self.num_steps)

    @property
    def terms(self) -> tuple[float, ...]:
        """In the order of a profile's times, that of a request last."""
        return (
            self.num_steps,
            self.num_prefill_tokens,
            self.num_prefill_pairs,
            self.num_decode_seqs,
            self.num_context_tokens,
            self.num_requests,
        )


Measure = Callable[[], Awaitable[Sample]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted profile, and each sample beside what the profile says of it."""

    profile: LatencyProfile
    samples: Sequence[tuple[Sample, float]]

    @property
    def errors(self) -> list[float]:
        """Of each sample, as a share of what was measured."""
        return [abs(predicted_s / sample.elapsed_s - 1.0) for sample, predicted_s in self.samples]


async def calibrate(
    engine: Engine,
    info: EngineInfo,
    scheme: CacheScheme,
    name: str,
    rng: random.Random,
    *,
    num_rounds: int = 4,
    say: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Measure a started engine that nobody else uses. Takes what some dozens of its requests take."""
    bench = _Bench(engine, info, rng)
    await bench.prefill(64)  # the first request of an engine pays for what the others find made
    measures: list[Measure] = []
    for num_tokens in _PROMPT_TOKENS:
        if num_tokens < info.max_model_len_tokens:
            measures.append(partial(bench.prefill, num_tokens))
    num_seqs = 1
    while num_seqs <= info.max_num_seqs:
        for num_tokens in _DECODE_PROMPT_TOKENS:
            num_blocks = -(-(num_tokens + _DECODE_STEPS + 1) // scheme.block_size_tokens)
            if num_tokens + _DECODE_STEPS + 1 < info.max_model_len_tokens and num_seqs * num_blocks <= info.num_blocks:
                measures.append(partial(bench.decode, num_seqs, num_tokens))
        num_seqs *= 2
    best: dict[str, Sample] = {}
    # Rounds, not repeats one after another: what disturbs the machine lasts a while.
    for number in range(num_rounds):
        say(f"timing prompts and answers, round {number + 1} of {num_rounds}")
        for measure in measures:
            sample = await measure()
            known = best.setdefault(sample.what, sample)
            if sample.step_s < known.step_s:
                best[sample.what] = sample
    samples = list(best.values())
    return fit(samples, name, info, scheme)


def fit(samples: Sequence[Sample], name: str, info: EngineInfo, scheme: CacheScheme) -> Calibration:
    """The profile with the least squared error, each as a share of what was measured. Raises `EngineError`.

    What took longer than fitted counts little, so that disturbed samples do not spoil the others: an expectile, not a
    mean (Newey and Powell, 1987), as of a lower envelope.
    """
    rows = [[term / sample.elapsed_s for term in sample.terms] for sample in samples]
    weights = [1.0] * len(rows)
    for _ in range(_NUM_REWEIGHTINGS):
        times_s = _weighted_fit(rows, weights)
        shares = [sum(x * y for x, y in zip(row, times_s, strict=True)) for row in rows]
        weights = [_SLOW_WEIGHT if share < 1.0 else 1.0 for share in shares]
    if times_s[0] + times_s[1] <= 0.0 or times_s[0] + times_s[3] <= 0.0:
        raise EngineError(f"the {len(samples)} samples do not tell what a step costs")
    step_s, prefill_s_per_token, pair_s, decode_s_per_seq, context_s, request_s = times_s
    profile = LatencyProfile(
        name,
        step_s,
        prefill_s_per_token,
        pair_s,
        decode_s_per_seq,
        context_s,
        request_s=max(request_s, _LEAST_REQUEST_S),
        step_budget_tokens=info.step_budget_tokens,
        max_num_seqs=info.max_num_seqs,
        kv_capacity_tokens=info.num_blocks * scheme.block_size_tokens,
    )
    predicted_s = [sum(x * y for x, y in zip(sample.terms, times_s, strict=True)) for sample in samples]
    return Calibration(profile, list(zip(samples, predicted_s, strict=True)))


def _weighted_fit(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    places = range(len(rows[0]))
    weighted = list(zip(rows, weights, strict=True))
    moments = [[sum(weight * row[i] * row[j] for row, weight in weighted) for j in places] for i in places]
    products = [sum(weight * row[i] for row, weight in weighted) for i in places]
    return [value or 0.0 for value in non_negative_fit(moments, products)]


class _Bench:
    """Sends requests of known steps."""

    def __init__(self, engine: Engine, info: EngineInfo, rng: random.Random) -> None:
        self._engine = engine
        self._budget_tokens = info.step_budget_tokens
        self._rng = rng
        self._num_requests = 0

    async def prefill(self, num_tokens: int) -> Sample:
        """Time a prompt that nobody has sent before, alone."""
        began_at_s = asyncio.get_running_loop().time()
        (first_s,) = await self._ask(num_tokens, 1)
        return Sample(
            f"prompt of {num_tokens}",
            1,
            -(-num_tokens // self._budget_tokens),
            num_tokens,
            num_tokens * num_tokens / 2,
            0,
            0.0,
            first_s - began_at_s,
        )

    async def decode(self, num_seqs: int, num_tokens: int) -> Sample:
        """Time equal answers side by side, from where all of them have begun to where the first one ends."""
        tasks = [asyncio.create_task(self._ask(num_tokens, _DECODE_STEPS + 1)) for _ in range(num_seqs)]
        token_times_s = await asyncio.gather(*tasks)
        began_at_s = max(times[0] for times in token_times_s)
        ends_s = [times[-1] for times in token_times_s]
        # Those that began earlier have tokens already that count in nobody's time here.
        num_steps = max(1, min(sum(at_s > began_at_s for at_s in times) for times in token_times_s))
        return Sample(
            f"{num_seqs} answers after {num_tokens}",
            0,
            num_steps,
            0,
            0.0,
            num_seqs * num_steps,
            num_seqs * num_steps * (num_tokens + _DECODE_STEPS - num_steps / 2),
            min(ends_s) - began_at_s,
        )

    async def _ask(self, num_tokens: int, max_tokens: int) -> list[float]:
        """When each token of a request came."""
        self._num_requests += 1
        token_ids = [self._rng.randint(_SMALLEST_TOKEN_ID, _LARGEST_TOKEN_ID) for _ in range(num_tokens)]
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        times_s: list[float] = []
        async for delta in self._engine.generate(
            EngineRequest(RequestId(f"calibrate-{self._num_requests}"), token_ids, sampling)
        ):
            times_s += [asyncio.get_running_loop().time()] * len(delta.token_ids)
        return times_s


@dataclass(frozen=True, slots=True)
class Timed:
    """One request as an engine served it."""

    token_ids: list[int]
    num_output_tokens: int
    ttft_s: float
    cached_tokens: int


def fastest(passes: Sequence[Sequence[Timed]]) -> list[Timed]:
    """Of several passes over the same prompts, each request as it was served soonest."""
    return [min(times, key=lambda timed: timed.ttft_s) for times in zip(*passes, strict=True)]


async def serve(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: Sequence[int], *, max_in_flight: int
) -> list[Timed]:
    """Have an engine answer prompts in their order, some at once, and time them."""
    clock = asyncio.get_running_loop().time
    timed: dict[int, Timed] = {}
    left = iter(range(len(prompts)))

    async def work() -> None:
        for number in left:
            asked_at_s, ttft_s, cached_tokens, num_output_tokens = clock(), 0.0, 0, 0
            sampling = Sampling(max_tokens=max_tokens[number], temperature=0.0)
            request = EngineRequest(RequestId(f"serve-{number}"), prompts[number], sampling)
            async for delta in engine.generate(request):
                if delta.cached_tokens is not None:
                    ttft_s, cached_tokens = clock() - asked_at_s, delta.cached_tokens
                num_output_tokens += len(delta.token_ids)
            timed[number] = Timed(prompts[number], num_output_tokens, ttft_s, cached_tokens)

    async with asyncio.TaskGroup() as group:
        for _ in range(max_in_flight):
            group.create_task(work())
    return [timed[number] for number in range(len(prompts))]


def predict(
    timed: Sequence[Timed], profile: LatencyProfile, info: EngineInfo, scheme: CacheScheme, *, max_in_flight: int
) -> list[Timed]:
    """What a simulated engine of that profile and those sizes makes of the same requests. Takes a loop of its own."""
    options = SimulatorOptions(
        profile,
        scheme,
        num_blocks=info.num_blocks,
        max_model_len_tokens=info.max_model_len_tokens,
        max_num_seqs=info.max_num_seqs,
        step_budget_tokens=info.step_budget_tokens,
        eviction=info.eviction if info.eviction in HEAD_STARTS else "lru",
        vocabulary_size=1 << 30,
    )
    engine = SimulatorEngine(options, _ignore_blocks, _ignore_death)
    prompts, max_tokens = zip(*((request.token_ids, request.num_output_tokens) for request in timed), strict=True)
    return run_virtual(serve(engine, prompts, max_tokens, max_in_flight=max_in_flight))


def _ignore_blocks(change: BlockChange) -> None:
    """No directory follows a prediction."""


def _ignore_death(reason: str) -> None:
    """Simulated engines die when they are told to."""
