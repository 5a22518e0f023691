"""Measures the connection of a router and a worker: what a streamed token, a frame and a submit cost both ends.

Both ends live in one process and speak over a real Unix socket, so that the process's CPU time is that of both.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

from shared.hashing import pack_tokens
from shared.transport.base import DeltaStream
from shared.transport.channel import open_channel
from shared.transport.client import ChannelClient
from shared.types import FinishReason, Instance, RequestId, RouterId, Sampling, WorkerId
from worker.engines.base import Engine, EngineDelta, EngineInfo, EngineRequest, EngineStats, StepFit
from worker.host import WorkerHost

_SEED = 0
_NUM_STREAMS = 64
_PROMPT_TOKENS = 8192
_WORKER = WorkerId("bench")
_STEP_S = 0.01
"""As fast as an engine may step before tokens of two steps share a frame."""
_INSTANCE = Instance("0" * 32)
_SECRET = b"bench"


async def measure(
    say: Callable[[str], None], *, num_rounds: int = 7, num_steps: int = 200, num_submits: int = 200
) -> dict[str, float]:
    """All figures by name. Times are CPU times of both ends together, the stand-in for an engine included."""
    engine = _SteadyEngine()
    # Of the engine protocol it has what a host without pins or audits asks for.
    host = WorkerHost(cast(Engine, engine), await engine.start(), worker=_WORKER, instance=_INSTANCE, secret=_SECRET)
    with tempfile.TemporaryDirectory(prefix="kvroute-") as folder:
        address = await host.listen(f"unix:{Path(folder) / 'socket'}")
        connect = partial(open_channel, address)
        client = ChannelClient(_WORKER, _INSTANCE, RouterId("bench"), _SECRET, connect, rng=random.Random(_SEED))
        await client.connect()
        try:
            say(f"{_NUM_STREAMS} streams get a token each step")
            figures = await _measure_streams(client, engine, num_rounds, num_steps)
            say(f"{num_submits} prompts of {_PROMPT_TOKENS} tokens are submitted")
            return {"seed": float(_SEED), **figures, "submit_us": await _measure_submits(client, engine, num_submits)}
        finally:
            await client.close()
            await host.close()


async def _measure_streams(
    client: ChannelClient, engine: _SteadyEngine, num_rounds: int, num_steps: int
) -> dict[str, float]:
    rounds = [await _stream_once(client, engine, index, num_steps) for index in range(num_rounds)]
    return {
        "num_streams": float(_NUM_STREAMS),
        "frame_us": 1e6 * _NUM_STREAMS / median(rounds),
        "tokens_per_s_per_core": median(rounds),
        "tokens_per_s_per_core_min": min(rounds),
        "tokens_per_s_per_core_max": max(rounds),
    }


async def _stream_once(client: ChannelClient, engine: _SteadyEngine, number: int, num_steps: int) -> float:
    """Tokens for each second of CPU time."""
    first = number * _NUM_STREAMS
    prompt = _prompt(64)
    streams = [_submit(client, first + index, prompt, max_tokens=num_steps) for index in range(_NUM_STREAMS)]
    heard = _Heard()
    readers = asyncio.gather(*(_read(stream, heard) for stream in streams))
    for _ in streams:
        await engine.started.get()
    loop = asyncio.get_running_loop()
    due_s, started_cpu_s = loop.time(), time.process_time()
    for step in range(1, num_steps + 1):
        engine.step()
        # Else a busy machine would put tokens of several steps into one frame, and look the faster for it.
        await heard.wait(step * _NUM_STREAMS)
        due_s += _STEP_S
        await asyncio.sleep(due_s - loop.time())
    num_tokens = sum(await readers)
    return num_tokens / (time.process_time() - started_cpu_s)


async def _measure_submits(client: ChannelClient, engine: _SteadyEngine, num_submits: int) -> float:
    """CPU microseconds from a submit until its router has heard the only token, one after the other."""
    prompt = _prompt(_PROMPT_TOKENS)
    times_s = []
    for index in range(num_submits):
        started_cpu_s = time.process_time()
        reader = asyncio.create_task(_read(_submit(client, -1 - index, prompt, max_tokens=1), _Heard()))
        await engine.started.get()
        engine.step()
        await reader
        times_s.append(time.process_time() - started_cpu_s)
    return 1e6 * median(times_s)


def _prompt(num_tokens: int) -> bytes:
    draws = random.Random(_SEED)
    return pack_tokens([draws.randrange(30_000) for _ in range(num_tokens)])


def _submit(client: ChannelClient, index: int, prompt: bytes, *, max_tokens: int) -> DeltaStream:
    return client.submit(RequestId(f"request-{index}"), 1, prompt, Sampling(max_tokens=max_tokens))


async def _read(stream: DeltaStream, heard: _Heard) -> int:
    """Number of tokens of one answer."""
    num_tokens = 0
    async for delta in stream:
        num_tokens += len(delta.token_ids)
        heard.note(len(delta.token_ids))
    return num_tokens


class _Heard:
    """Counts the tokens that have come to their readers."""

    def __init__(self) -> None:
        self._num_tokens = self._num_awaited = 0
        self._has_come = asyncio.Event()

    def note(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if self._num_tokens >= self._num_awaited:
            self._has_come.set()

    async def wait(self, num_tokens: int) -> None:
        """Until so many have come."""
        self._num_awaited = num_tokens
        if self._num_tokens < num_tokens:
            self._has_come.clear()
            await self._has_come.wait()


class _SteadyEngine:
    """Gives each request one token for each `step`. As cheap as it can be, and without any cache."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[RequestId] = asyncio.Queue()
        """Requests that wait for their first step."""
        self._request_to_next_step: dict[RequestId, asyncio.Future[None]] = {}

    def step(self) -> None:
        """Compute one token for everybody."""
        for next_step in self._request_to_next_step.values():
            if not next_step.done():
                next_step.set_result(None)

    async def start(self) -> EngineInfo:
        return EngineInfo("steady", 1 << 20, _NUM_STREAMS, 1 << 20, 1 << 20, "none")

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        loop = asyncio.get_running_loop()
        name = request.request
        self.started.put_nowait(name)
        try:
            for num_left in range(request.sampling.max_tokens, 0, -1):
                self._request_to_next_step[name] = loop.create_future()
                await self._request_to_next_step[name]
                yield EngineDelta((num_left,), FinishReason.LENGTH if num_left == 1 else None)
        finally:
            self._request_to_next_step.pop(name, None)

    @property
    def num_prefilled_tokens(self) -> int:
        return 0

    async def cancel(self, request: RequestId) -> None:
        """Every request runs to its end here."""

    def stats(self) -> EngineStats:
        return EngineStats(len(self._request_to_next_step), 0, 0, StepFit())
