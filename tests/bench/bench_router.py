"""Measures a router's own cost and prints one JSON line: `python -m tests.bench.bench_router`.

Decisions: a prompt of 8,192 tokens in blocks of 16 over fleets that all hold half of it (a dear case). Transport: a
Unix socket to a host on an instant engine, both ends in this process, so `tokens_per_s_per_core` and `submit_us`
(processor time from the submit of that prompt to the end of a one-token answer) include both. Seed 0, one warm-up call
for each figure.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from router.policies.base import Candidate, FleetState, Load, RankRequest
from router.policies.cost import CostPolicy
from router.requests import GenerateRequest
from shared.hashing import block_keys, pack_tokens, root_key
from shared.messages import Delta, Frame, decode, encode
from shared.transport.base import Timings
from shared.types import CacheScheme, Instance, RequestId, Sampling, WorkerId
from tests.support.fakes import FakeEngine
from tests.support.rack import SCHEME, rack
from tests.support.transport import running
from worker.engines.base import BlockChange

SEED = 0
NUM_TOKENS = 8192
NUM_DECISIONS = 300
BLOCK_SIZE_TOKENS = 16


def percentile(durations_us: Sequence[float], share: float) -> float:
    return sorted(durations_us)[min(len(durations_us) - 1, int(len(durations_us) * share))]


def time_us(call: Callable[[], object], num_calls: int = NUM_DECISIONS) -> list[float]:
    call()
    durations_us = []
    for _ in range(num_calls):
        started_at_s = time.perf_counter()
        call()
        durations_us.append((time.perf_counter() - started_at_s) * 1e6)
    return durations_us


def measure_hash_and_rank() -> dict[str, float]:
    draws = random.Random(SEED)
    scheme = CacheScheme("bench", BLOCK_SIZE_TOKENS)
    root, tokens = root_key(scheme), pack_tokens([draws.randrange(30_000) for _ in range(NUM_TOKENS)])
    figures = {"hash_8k_us_p50": percentile(time_us(lambda: block_keys(tokens, BLOCK_SIZE_TOKENS, root)), 0.5)}
    fleet = FleetState(1e-4, 0.4, 0.2, 1.0, 0.0, 64.0)
    request = RankRequest(0, NUM_TOKENS, b"prefix", demand_blocks=520)
    for num_workers in (64, 256):
        candidates = [random_candidate(draws, index) for index in range(num_workers)]
        durations_us = time_us(lambda ranked=candidates: CostPolicy().rank(request, ranked, fleet, draws))  # type: ignore[misc]
        figures[f"rank_{num_workers}_workers_us_p50"] = percentile(durations_us, 0.5)
    return figures


def random_candidate(draws: random.Random, index: int) -> Candidate:
    load = Load(
        worker=WorkerId(f"w{index}"),
        instance=Instance("i"),
        is_cache_aware=True,
        num_requests=draws.randrange(32),
        max_num_seqs=64,
        queued_prefill_tokens=draws.randrange(8192),
        kv_used_blocks=draws.randrange(1000),
        kv_total_blocks=2000,
        prefill_s_per_token=1e-4,
        step_s=0.01,
        decode_s_per_seq=0.0005,
        step_budget_tokens=2048,
        status_age_s=0.01,
    )
    return Candidate(load, draws.randrange(0, NUM_TOKENS, BLOCK_SIZE_TOKENS))


async def measure_decisions(num_workers: int = 64) -> dict[str, float]:
    """From the tokens to the booking, through the real queue, fleet and hints, while statuses keep coming in."""
    draws = random.Random(SEED)
    tokens = [draws.randrange(30_000) for _ in range(NUM_TOKENS)]
    durations_us = []
    async with rack(num_workers) as workers, workers.router() as router:
        root = root_key(SCHEME)
        shared = block_keys(pack_tokens(tokens), BLOCK_SIZE_TOKENS, root)[: NUM_TOKENS // BLOCK_SIZE_TOKENS // 2]
        for slot in workers.worker_to_slot.values():
            slot.publisher.on_blocks(BlockChange(stored=tuple(shared)))
        await workers.settle()
        for index in range(NUM_DECISIONS + 1):
            packed = pack_tokens([*tokens[: NUM_TOKENS // 2], *reversed(tokens[NUM_TOKENS // 2 :])])
            request = GenerateRequest(RequestId(f"r{index}"), packed, Sampling(max_tokens=64))
            started_at_s = time.perf_counter()
            keys = block_keys(packed, BLOCK_SIZE_TOKENS, root)
            placement = await router.queue.place(request, keys, frozenset(), asyncio.get_running_loop().time())
            durations_us.append((time.perf_counter() - started_at_s) * 1e6)
            router.hints.withdraw(placement.promise)
            router.fleet.release(placement.booking)
            await asyncio.sleep(0)
    del durations_us[0]
    return {"decision_us_p50": percentile(durations_us, 0.5), "decision_us_p99": percentile(durations_us, 0.99)}


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
            for index in range(1000, 1000 + NUM_DECISIONS):
                started_at_s = time.process_time()
                await stream(index, 1, prompt)
                durations_us.append((time.process_time() - started_at_s) * 1e6)
    return {"tokens_per_s_per_core": tokens_per_s, "submit_us": percentile(durations_us, 0.5)}


async def measure() -> dict[str, float]:
    return {**measure_hash_and_rank(), **await measure_decisions(), **measure_frames(), **await measure_transport()}


if __name__ == "__main__":
    figures = {name: round(figure, 1) for name, figure in asyncio.run(measure()).items()}
    command = "python -m tests.bench.bench_router"
    sys.stdout.write(json.dumps({"bench": "router", "command": command, "seed": SEED, **figures}) + "\n")
