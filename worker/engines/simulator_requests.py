"""What comes into a simulated engine and goes out of it: checks of a request, and deltas for whoever reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from shared.errors import EngineError, InvalidRequest
from shared.hashing import pack_tokens
from shared.types import Sampling
from worker.engines.base import EngineDelta, refuse_more


class DeltaReader:
    """Deltas of one sequence on their way to whoever reads them."""

    def __init__(self) -> None:
        self._deltas: deque[EngineDelta] = deque()
        self._error: EngineError | None = None
        self._news = asyncio.Event()

    def push(self, delta: EngineDelta, longest_gap_s: float) -> None:
        self._deltas.append(delta)
        self._news.set()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._news.set()

    async def deltas(self) -> AsyncGenerator[EngineDelta, None]:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._deltas:
                delta = self._deltas.popleft()
                yield delta
                if delta.finish is not None:
                    return
            if self._error is not None:
                raise self._error


def check_sampling(sampling: Sampling) -> None:
    """Refuse what vLLM refuses (`SamplingParams._verify_args`), though nothing is sampled."""
    refusals = (
        (sampling.max_tokens < 1, "max_tokens", "at least 1"),
        (sampling.temperature < 0.0, "temperature", "0 or more"),
        (not 0.0 < sampling.top_p <= 1.0, "top_p", "in (0, 1]"),
        (sampling.top_k < -1, "top_k", "-1, or 0 or more"),
        (not 0.0 <= sampling.min_p <= 1.0, "min_p", "in [0, 1]"),
        (not -2.0 <= sampling.presence_penalty <= 2.0, "presence_penalty", "in [-2, 2]"),
        (not -2.0 <= sampling.frequency_penalty <= 2.0, "frequency_penalty", "in [-2, 2]"),
        (sampling.repetition_penalty <= 0.0, "repetition_penalty", "above 0"),
        (not 0 <= sampling.min_tokens <= sampling.max_tokens, "min_tokens", "from 0 to max_tokens"),
    )
    for is_refused, name, allowed in refusals:
        if is_refused:
            raise InvalidRequest(f"{name} must be {allowed}, got {getattr(sampling, name)}", param=name)
    refuse_more(sampling, "a simulated engine, which has no model", names=("logprobs", "json_schema", "reading"))


def packed(token_ids: list[int], vocabulary_size: int, what: str = "") -> bytes:
    """Token ids as the pool takes them. Raises `InvalidRequest` for one that the model does not have."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocabulary_size:
            raise InvalidRequest(
                f"{what}token id {token_id} is outside the vocabulary of {vocabulary_size}", param="token_ids"
            )
    return pack_tokens(token_ids)
