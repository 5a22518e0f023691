"""A request's own deadline: what cannot be met is refused at once, and what passes it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from router.policies.base import Load
from shared.errors import DeadlineExceeded
from shared.messages import Delta


def least_prefill_s(loads: Iterable[Load], uncached_tokens: Iterable[int]) -> float:
    """The least time in which any worker can compute its uncached tokens; 0.0 while one of them has not measured."""
    times_s = [
        load.prefill_s_per_token * num_tokens if load.step_s else 0.0
        for load, num_tokens in zip(loads, uncached_tokens, strict=True)
    ]
    return min(times_s, default=0.0)


class UntilDeadline:
    """Deltas of one request for as long as its deadline has not passed; then `DeadlineExceeded`."""

    def __init__(self, deltas: AsyncIterator[Delta], deadline_at_s: float) -> None:
        self._deltas = deltas
        self._deadline_at_s = deadline_at_s

    def __aiter__(self) -> UntilDeadline:
        return self

    async def __anext__(self) -> Delta:
        try:
            async with asyncio.timeout_at(self._deadline_at_s):
                return await anext(self._deltas)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed before its answer was whole") from None
