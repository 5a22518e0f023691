"""Times first tokens on a real engine with and without a cached prefix, for `bench_claims`."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shared.types import CacheScheme, RequestId, Sampling
from tests.support.engines import EngineUnderTest
from worker.engines.base import Engine, EngineRequest

SEED = 0
BLOCK_SIZE_TOKENS = 64
PREFIX_TOKENS = (0, 64, 128, 256, 512, 1024)
LONG_PROMPT_TOKENS = 1280
TAIL_TOKENS = 64
NUM_PAIRS = 11
NUM_RESAMPLES = 2000
VOCABULARY = 40_000

Figures = dict[str, Any]


def measure_prefixes(model_dir: Path, num_pairs: int) -> Figures:
    """Time to first token of prompts whose first tokens are cached, each beside one of equal length computed afresh.

    In pairs, in turns and in random order, so that both meet the same disturbances. `one_length`: prompts of 1,280
    tokens. `own_length`: the prefix and 64 tokens more. A saving is distinguishable if the bootstrap interval of its
    median (95 %) lies above 0; that of a prefix of no tokens is the noise.
    """
    if find_spec("vllm") is None:
        return {"skipped": "vllm is not installed"}
    return asyncio.run(_measure(model_dir, num_pairs))


async def _measure(model_dir: Path, num_pairs: int) -> Figures:
    from worker.engines.vllm import VllmEngine
    from worker.engines.vllm_options import VllmOptions

    under_test = EngineUnderTest()
    scheme = CacheScheme("smollm2", BLOCK_SIZE_TOKENS)
    options = VllmOptions(model_dir, scheme, max_model_len=2048, eviction="adaptive")
    engine = VllmEngine(options, under_test.on_blocks, under_test.deaths.append)
    info = await engine.start()
    try:
        timer = _Timer(engine)
        for _ in range(3):
            await timer.first_token_s(timer.fresh(LONG_PROMPT_TOKENS), 0)
        return {
            "engine": info.name,
            "model": model_dir.name,
            "step_budget_tokens": info.step_budget_tokens,
            "num_pairs": num_pairs,
            "one_length": await timer.pairs(num_pairs, lambda prefix: LONG_PROMPT_TOKENS),
            "own_length": await timer.pairs(num_pairs, lambda prefix: prefix + TAIL_TOKENS),
        }
    finally:
        await engine.close()


class _Timer:
    """Asks one engine one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._draws = random.Random(SEED)
        self._num_requests = 0

    def fresh(self, num_tokens: int) -> list[int]:
        """Tokens that no request had before."""
        return [self._draws.randrange(VOCABULARY) for _ in range(num_tokens)]

    async def first_token_s(self, token_ids: list[int], cached_tokens: int | None = None) -> float:
        """Time to the first and only token; checks how much of the prompt was cached."""
        self._num_requests += 1
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = EngineRequest(RequestId(f"request-{self._num_requests}"), token_ids, sampling)
        started_at_s = time.perf_counter()
        deltas = [delta async for delta in self._engine.generate(request)]
        elapsed_s = time.perf_counter() - started_at_s
        assert cached_tokens is None or deltas[0].cached_tokens == cached_tokens, deltas[0]
        return elapsed_s

    async def pairs(self, num_pairs: int, length_of: Callable[[int], int]) -> Figures:
        """By prefix length: both times, and what the cached prefix saves."""
        prefix_to_pairs: dict[int, list[tuple[float, float]]] = {prefix: [] for prefix in PREFIX_TOKENS}
        for _ in range(num_pairs):
            for prefix in self._draws.sample(PREFIX_TOKENS, len(PREFIX_TOKENS)):
                prefix_to_pairs[prefix].append(await self._pair(prefix, length_of(prefix)))
        return {f"{prefix}_tokens": _figures(prefix, pairs) for prefix, pairs in prefix_to_pairs.items()}

    async def _pair(self, prefix: int, length: int) -> tuple[float, float]:
        """Seconds afresh and with the prefix cached."""
        beginning = self.fresh(prefix)
        if prefix:
            await self.first_token_s([*beginning, *self.fresh(1)])
        asked = {"afresh": (self.fresh(length), 0), "cached": ([*beginning, *self.fresh(length - prefix)], prefix)}
        times_s = {}
        for kind in self._draws.sample(sorted(asked), 2):
            times_s[kind] = await self.first_token_s(*asked[kind])
        return times_s["afresh"], times_s["cached"]


def _figures(prefix: int, pairs: Sequence[tuple[float, float]]) -> Figures:
    savings_ms = [(afresh - cached) * 1e3 for afresh, cached in pairs]
    low, high = interval_of_median(savings_ms, random.Random(SEED))
    return {
        "afresh_ms": _spread([afresh * 1e3 for afresh, _ in pairs]),
        "cached_ms": _spread([cached * 1e3 for _, cached in pairs]),
        "saving_ms": _spread(savings_ms),
        "saving_interval_ms": [round(low, 1), round(high, 1)],
        "is_distinguishable": low > 0,
        "saving_ms_per_token": round(statistics.median(savings_ms) / prefix, 4) if prefix else None,
    }


def _spread(samples: Sequence[float]) -> Figures:
    low, median, high = statistics.quantiles(samples, n=4)
    return {"median": round(median, 1), "quartiles": [round(low, 1), round(high, 1)]}


def interval_of_median(samples: Sequence[float], draws: random.Random) -> tuple[float, float]:
    """The 95 % bootstrap interval of the samples' median (Efron, 1979)."""
    medians = sorted(statistics.median(draws.choices(samples, k=len(samples))) for _ in range(NUM_RESAMPLES))
    return medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES) - 1]
