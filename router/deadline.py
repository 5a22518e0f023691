"""A request's own deadline: what cannot be met is refused at once, and what passes it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from router.policies.base import Loads
from shared.errors import DeadlineExceeded
from shared.messages import Delta


def least_prefill_s(loads: Loads, uncached_tokens: Sequence[int]) -> float:
    """The least time in which any worker can compute its uncached tokens; 0.0 while one of them has not measured."""
    if not uncached_tokens or not loads.step_s.all():
        return 0.0
    return float((loads.prefill_s_per_token * uncached_tokens).min())


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
