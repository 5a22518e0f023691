"""Measures the directory on an embedded server and prints one JSON line: `python -m tests.bench.bench_directory`.

Events applied in batches of several sizes, and `match` over several fleets that all hold the whole chain (the dearest
case). Seed 0, one warm-up call for each figure; times are in microseconds, of one caller after another.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable

from shared.directory.base import MAX_KEYS_PER_CALL
from shared.directory.embedded import EmbeddedStore
from shared.directory.redis import RedisDirectory
from shared.types import BlockKey, Epoch, EventBatch, Holder, WorkerId
from tests.support.stores import LONG_LEASE_S, SCHEME, epoch, worker_info

NUM_EVENTS = 200_000
NUM_MATCHES = 500


async def measure(url: str) -> dict[str, float]:
    rng = random.Random(0)
    keys = [BlockKey(rng.randbytes(16)) for _ in range(MAX_KEYS_PER_CALL)]
    directory = RedisDirectory(url, SCHEME, match_deadline_s=10.0, publish_deadline_s=10.0)
    figures: dict[str, float] = {}
    for batch_size in (64, 512, MAX_KEYS_PER_CALL):
        await directory.register(worker_info("w0"), epoch(1), LONG_LEASE_S)
        num_batches = NUM_EVENTS // batch_size
        started_at_s = time.perf_counter()
        for seq in range(1, num_batches + 1):
            await directory.apply(store_or_remove(epoch(1), seq, keys[:batch_size]))
        elapsed_s = time.perf_counter() - started_at_s
        figures[f"apply_{batch_size}_events_per_s"] = num_batches * batch_size / elapsed_s
    for num_workers in (4, 16, 64):
        workers = [WorkerId(f"w{number}") for number in range(num_workers)]
        for worker in workers:
            await directory.register(worker_info(worker), epoch(1), LONG_LEASE_S)
            await directory.apply(EventBatch(Holder(worker, epoch(1)), 1, tuple(keys), ()))
        durations_us = await time_calls(lambda asked=workers: directory.match(keys[:128], asked))  # type: ignore[misc]
        figures[f"match_128_keys_{num_workers}_workers_p50_us"] = durations_us[len(durations_us) // 2]
        figures[f"match_128_keys_{num_workers}_workers_p99_us"] = durations_us[len(durations_us) * 99 // 100]
    await directory.close()
    return figures


def store_or_remove(in_epoch: Epoch, seq: int, keys: list[BlockKey]) -> EventBatch:
    stored, removed = (tuple(keys), ()) if seq % 2 else ((), tuple(keys))
    return EventBatch(Holder(WorkerId("w0"), in_epoch), seq, stored, removed)


async def time_calls(call: Callable[[], Awaitable[object]]) -> list[float]:
    await call()
    durations_us = []
    for _ in range(NUM_MATCHES):
        started_at_s = time.perf_counter()
        await call()
        durations_us.append((time.perf_counter() - started_at_s) * 1e6)
    return sorted(durations_us)


if __name__ == "__main__":
    with EmbeddedStore() as store:
        measured = asyncio.run(measure(store.url))
    sys.stdout.write(json.dumps({name: round(figure) for name, figure in measured.items()}) + "\n")
