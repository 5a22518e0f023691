"""Measures what carrying tokens costs and prints one JSON line: `python -m tests.bench.bench_router`.

A Unix socket to a host on an instant engine, both ends in this process, so `tokens_per_s_per_core` and `submit_us`
(processor time from the submit of a prompt of 8,192 tokens to the end of a one-token answer) include both. One warm-up
call for each figure. What deciding costs is told by `kvroute bench decision`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.hashing import pack_tokens
from shared.messages import Delta, Frame, decode, encode
from shared.transport.base import Timings
from shared.types import Instance, RequestId, Sampling
from tests.support.fakes import FakeEngine
from tests.support.transport import running

NUM_TOKENS = 8192
NUM_CALLS = 300


def percentile(durations_us: Sequence[float], share: float) -> float:
    return sorted(durations_us)[min(len(durations_us) - 1, int(len(durations_us) * share))]


def time_us(call: Callable[[], object], num_calls: int = NUM_CALLS) -> list[float]:
    call()
    durations_us = []
    for _ in range(num_calls):
        started_at_s = time.perf_counter()
        call()
        durations_us.append((time.perf_counter() - started_at_s) * 1e6)
    return durations_us


def measure_frames() -> dict[str, float]:
    """A frame of 64 deltas of one token, encoded and decoded."""
    deltas = tuple(Delta(RequestId(f"request-{index}"), 1, 100, (index,)) for index in range(64))
    frame = Frame(Instance("0" * 32), 1, 1, deltas)
    return {"frame_us": percentile(time_us(lambda: decode(encode(frame))), 0.5)}


async def measure_transport() -> dict[str, float]:
    prompt = pack_tokens(range(NUM_TOKENS))
    num_requests, num_tokens = 64, 500
    with tempfile.TemporaryDirectory() as folder:
        engine = FakeEngine()
        async with running("unix", Path(folder), engine=engine, timings=Timings()) as rig:
            client, _ = await rig.connected()

            async def stream(index: int, max_tokens: int, token_ids: bytes) -> int:
                deltas = client.submit(RequestId(f"r{index}"), 1, token_ids, Sampling(max_tokens=max_tokens))
                return sum([len(delta.token_ids) async for delta in deltas])

            await stream(-1, num_tokens, pack_tokens(range(16)))
            started_at_s = time.process_time()
            counts = await asyncio.gather(
                *(stream(index, num_tokens, pack_tokens(range(16))) for index in range(num_requests))
            )
            tokens_per_s = sum(counts) / (time.process_time() - started_at_s)
            durations_us = []
            for index in range(1000, 1000 + NUM_CALLS):
                started_at_s = time.process_time()
                await stream(index, 1, prompt)
                durations_us.append((time.process_time() - started_at_s) * 1e6)
    return {"tokens_per_s_per_core": tokens_per_s, "submit_us": percentile(durations_us, 0.5)}


async def measure() -> dict[str, float]:
    return {**measure_frames(), **await measure_transport()}


if __name__ == "__main__":
    figures = {name: round(figure, 1) for name, figure in asyncio.run(measure()).items()}
    command = "python -m tests.bench.bench_router"
    sys.stdout.write(json.dumps({"bench": "router", "command": command, **figures}) + "\n")
