"""A stand-in for a router: answers by rule, counts what is under way, and fails when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from router.requests import Generated, GenerateRequest, RequestTrace, RichGenerated
from shared.hashing import unpack_tokens
from shared.messages import MessagePart, TokenLogprobs, ToolCallPart
from shared.types import FinishReason, Sampling, ToolChoice, WorkerId

Answer = Callable[[list[int]], list[int]]


class FakeGenerate:
    """Answers each prompt with `answer(prompt)`, one token an item; `faults` are raised by the first calls, in order.

    With `gate`, a call waits for it after its first token. `num_live` is zero whenever every stream is closed;
    `is_busy` is set once `busy_at` are open.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        faults: list[Exception] | None = None,
        gate: asyncio.Event | None = None,
        busy_at: int = 1,
        cached_tokens: int | None = 0,
    ) -> None:
        self._answer = answer
        self._faults = list(faults or [])
        self._gate = gate
        self.requests: list[GenerateRequest] = []
        self.num_live = 0
        self.max_live = 0
        self._busy_at = busy_at
        self._cached_tokens = cached_tokens
        self.is_busy = asyncio.Event()

    async def __call__(self, request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
        clock = asyncio.get_running_loop().time
        self.requests.append(request)
        self.num_live += 1
        self.max_live = max(self.max_live, self.num_live)
        if self.num_live >= self._busy_at:
            self.is_busy.set()
        worker = WorkerId(f"w{len(self.requests) % 2}")
        try:
            await asyncio.sleep(0)
            if self._faults:
                raise self._faults.pop(0)
            trace.worker = worker
            trace.bound_at_s = clock()
            trace.cached_tokens = self._cached_tokens
            tokens = self._answer(unpack_tokens(request.token_ids))
            is_cut = len(tokens) > request.sampling.max_tokens
            tokens = tokens[: request.sampling.max_tokens]
            for index, token_id in enumerate(tokens):
                trace.first_token_at_s = trace.first_token_at_s or clock()
                is_last = index == len(tokens) - 1
                finish = (FinishReason.LENGTH if is_cut else FinishReason.STOP) if is_last else None
                yield _generated(request.sampling, token_id, finish)
                if index == 0 and self._gate is not None:
                    await self._gate.wait()
            trace.finished_at_s = clock()
        finally:
            self.num_live -= 1


def _generated(sampling: Sampling, token_id: int, finish: FinishReason | None) -> Generated:
    """What is asked to be told of one token: made up, but for the token."""
    if not sampling.tells_more:
        return Generated((token_id,), finish)
    logprobs, parts = (), ()
    if sampling.logprobs is not None:
        top = tuple([(token_id + place) % 200 for place in range(sampling.logprobs)])
        logprobs = (TokenLogprobs(-0.5, top, tuple([-0.5 - place for place in range(sampling.logprobs)])),)
    if sampling.reading is not None:
        parts = (MessagePart(content=f"<{token_id}>"),)
        if sampling.reading.tool_choice is ToolChoice.REQUIRED:
            parts = (MessagePart(tool_calls=(ToolCallPart(0, f"{token_id}", "call-1", "f"),)),)
    return RichGenerated((token_id,), finish, logprobs, parts)
