"""Measures the directory on a server of its own: matching, applying, loading, forgetting, and what an entry costs.

Keys and chains come from seed 0. Times are of one caller after another, in one process beside the server's.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from shared.directory.base import MAX_KEYS_PER_CALL
from shared.directory.embedded import EmbeddedStore
from shared.directory.mirrored import MirroredDirectory
from shared.directory.redis import RedisDirectory
from shared.hashing import KEY_SIZE_BYTES
from shared.types import BlockKey, CacheScheme, Epoch, EventBatch, Holder, Instance, WorkerId, WorkerInfo

_SCHEME = CacheScheme("bench", 64)
_EPOCH = Epoch("0" * 32)
_INSTANCE = Instance("0" * 32)
_LEASE_S = 3600.0
_DEADLINE_S = 10.0
_CHAIN_BLOCKS = 128
_LONG_CHAIN_BLOCKS = 6250
"""A prompt of 100,000 tokens in blocks of 16."""
_LATE_ROUTER_BLOCKS = 55_000
"""What 64 GPUs of a 13B model hold in blocks of 64 tokens."""
_FORGOTTEN_BLOCKS = 10_000
_BATCH_BLOCKS = 512
_TAIL_BLOCKS = 60
_NUM_CALLS = 2000
_EVENTS_ARE_OLD_AFTER_S = 11.0

Say = Callable[[str], None]


async def measure(
    say: Say,
    *,
    num_blocks: int = 1_000_000,
    num_workers: int = 64,
    num_events: int = 500_000,
    num_churn_requests: int = 200_000,
) -> dict[str, float]:
    """All figures by name. Takes minutes, and some 500 bytes of memory for each of `num_blocks`.

    Raises `ConfigError` where there is no server to start.
    """
    figures: dict[str, float] = {}
    for part in (_measure_calls, _measure_forgetting):
        with EmbeddedStore() as store:
            figures |= await part(store.url, say)
    for num_publishers in (1, 8):
        with EmbeddedStore() as store:
            figures |= await _measure_applying(store.url, say, num_publishers, num_events)
    with EmbeddedStore() as store:
        figures |= await _measure_late_router(store.url, say, num_workers)
    with EmbeddedStore() as store:
        figures |= await _measure_mirror(store.url, say, num_blocks, num_workers)
    with EmbeddedStore() as store:
        figures |= await _measure_churn(store.url, say, num_churn_requests)
    return figures


async def _measure_calls(url: str, say: Say) -> dict[str, float]:
    say("one caller asks the store")
    rng = random.Random(0)
    keys = _split(rng.randbytes(_CHAIN_BLOCKS * KEY_SIZE_BYTES))
    async with _opened(url) as (directory, client):
        workers = await _register(directory, 4)
        for worker in workers:
            await _store(directory, worker, keys)
        pings = await _time_calls(lambda: client.ping(), _NUM_CALLS)
        matches = await _time_calls(lambda: directory.match(keys, workers), _NUM_CALLS)
    return {"ping_us_p50": _share(pings, 0.5), "read_through_128_us_p50": _share(matches, 0.5)}


async def _measure_mirror(url: str, say: Say, num_blocks: int, num_workers: int) -> dict[str, float]:
    say(f"{num_workers} workers store {num_blocks} blocks")
    rng = random.Random(0)
    per_worker = num_blocks // num_workers
    async with _opened(url) as (directory, client):
        bytes_before = await _used_bytes(client)
        workers = await _register(directory, num_workers)
        blobs = [rng.randbytes(per_worker * KEY_SIZE_BYTES) for _ in workers]
        for worker, blob in zip(workers, blobs, strict=True):
            last_seq = await _store(directory, worker, _split(blob))
        num_entries = per_worker * num_workers
        figures = {"bytes_per_entry_store": (await _used_bytes(client) - bytes_before) / num_entries}

        say("a late router loads them")
        gc.collect()
        resident_before = _resident_bytes()
        started_at_s = time.perf_counter()
        async with _mirrored(url, "late") as mirrored:
            await mirrored.caught_up()
            figures["mirror_load_1m_s"] = (time.perf_counter() - started_at_s) * 1_000_000 / num_entries
            gc.collect()
            figures["bytes_per_entry_mirror"] = (_resident_bytes() - resident_before) / num_entries

            say("it matches")
            chain_bytes = min(_CHAIN_BLOCKS, per_worker) * KEY_SIZE_BYTES
            starts = range(0, per_worker * KEY_SIZE_BYTES - chain_bytes + 1, chain_bytes)
            chains = [
                blob[start : start + chain_bytes]
                for blob, start in ((rng.choice(blobs), rng.choice(starts)) for _ in range(_NUM_CALLS))
            ]
            durations_us = await _time_matches(mirrored, chains, workers)
            figures["mirror_match_128_us_p50"] = _share(durations_us, 0.5)
            figures["mirror_match_128_us_p99"] = _share(durations_us, 0.99)

            # A beginning that all workers hold, then a part that one of them holds.
            shared = rng.randbytes(_CHAIN_BLOCKS // 2 * KEY_SIZE_BYTES)
            long = rng.randbytes(_LONG_CHAIN_BLOCKS * KEY_SIZE_BYTES)
            for worker in workers:
                await _store(directory, worker, _split(shared), after_seq=last_seq)
            await _store(directory, workers[0], _split(long), after_seq=last_seq + 1)
            await mirrored.caught_up()
            branched = [(shared + chain)[:chain_bytes] for chain in chains]
            durations_us = await _time_matches(mirrored, branched, workers)
            figures["mirror_match_128_shared_us_p50"] = _share(durations_us, 0.5)
            durations_us = await _time_matches(mirrored, [long] * 200, workers)
            figures["mirror_match_6250_us_p50"] = _share(durations_us, 0.5)
    return figures


async def _measure_late_router(url: str, say: Say, num_workers: int) -> dict[str, float]:
    say(f"a late router loads {_LATE_ROUTER_BLOCKS} blocks")
    rng = random.Random(0)
    async with _opened(url) as (directory, _):
        for worker in await _register(directory, num_workers):
            await _store(directory, worker, _split(rng.randbytes(_LATE_ROUTER_BLOCKS // num_workers * KEY_SIZE_BYTES)))
        started_at_s = time.perf_counter()
        async with _mirrored(url, "late") as mirrored:
            await mirrored.caught_up()
            return {"mirror_load_55k_s": time.perf_counter() - started_at_s}


async def _measure_applying(url: str, say: Say, num_publishers: int, num_events: int) -> dict[str, float]:
    """Until the mirror, too, has taken everything in, with a match every millisecond on the same loop."""
    say(f"{num_publishers} publishers, a mirror that follows, and matches")
    rng = random.Random(0)
    delays_us: list[float] = []
    async with _opened(url) as (directory, _), _mirrored(url, "follower") as mirrored:
        workers = await _register(directory, num_publishers)
        batches = [tuple(_split(rng.randbytes(_BATCH_BLOCKS * KEY_SIZE_BYTES))) for _ in range(64)]
        await mirrored.caught_up()

        async def match() -> None:
            while True:
                asked_at_s = time.perf_counter()
                await asyncio.sleep(0.001)
                delays_us.append((time.perf_counter() - asked_at_s - 0.001) * 1e6)
                await mirrored.match(batches[0][:_CHAIN_BLOCKS], workers)

        async def publish(worker: WorkerId) -> None:
            for seq in range(1, num_events // num_publishers // _BATCH_BLOCKS + 1):
                # Half of the batches are resident at any time.
                stored, removed = (batches[seq % 64], ()) if seq // 64 % 2 == 0 else ((), batches[seq % 64])
                await directory.apply(EventBatch(Holder(worker, _EPOCH), seq, stored, removed))

        matching = asyncio.create_task(match())
        started_at_s = time.perf_counter()
        await asyncio.gather(*map(publish, workers))
        await mirrored.caught_up()
        elapsed_s = time.perf_counter() - started_at_s
        matching.cancel()
        await asyncio.gather(matching, return_exceptions=True)
    num_done = num_events // num_publishers // _BATCH_BLOCKS * _BATCH_BLOCKS * num_publishers
    name = "apply_events_per_s" if num_publishers == 1 else f"apply_events_per_s_{num_publishers}_publishers"
    delay_name = name.replace("events_per_s", "loop_delay_ms_p99")
    return {name: num_done / elapsed_s, delay_name: _share(sorted(delays_us), 0.99) / 1000}


async def _measure_forgetting(url: str, say: Say) -> dict[str, float]:
    """The longest that the server was busy at once while workers left, by its own account: in words, and by expiry."""
    say(f"workers of {_FORGOTTEN_BLOCKS} blocks are forgotten")
    rng = random.Random(0)
    async with _opened(url) as (directory, client):
        workers = await _register(directory, 20)
        for worker in workers:
            await _store(directory, worker, _split(rng.randbytes(_FORGOTTEN_BLOCKS * KEY_SIZE_BYTES)))
        await client.config_set("slowlog-log-slower-than", 0)
        await client.config_set("slowlog-max-len", 1000)
        await client.config_set("latency-monitor-threshold", 1)
        await client.slowlog_reset()
        for worker in workers[:10]:
            await directory.forget(worker, _INSTANCE)
        for worker in workers[10:]:
            await directory.heartbeat(worker, _EPOCH, 0, 0.001)
        await asyncio.sleep(2.0)  # the server looks for what has expired ten times a second
        longest_us = max(entry["duration"] for entry in await client.slowlog_get(1000))
        expiry: Any = await client.execute_command("LATENCY", "LATEST")
        longest_expiry_ms = max((row[3] for row in expiry), default=0)
    return {"forget_worker_max_stall_ms": max(longest_us / 1000, longest_expiry_ms)}


async def _measure_churn(url: str, say: Say, num_requests: int) -> dict[str, float]:
    """Requests with tails of their own, each stored and removed again: what is left over, in keys and bytes."""
    say(f"{num_requests} tails of {_TAIL_BLOCKS} blocks come and go")
    rng = random.Random(0)
    tails_per_batch = MAX_KEYS_PER_CALL // _TAIL_BLOCKS
    async with _opened(url) as (directory, client), _mirrored(url, "follower") as mirrored:
        (worker,) = await _register(directory, 1)
        await _store(directory, worker, _split(rng.randbytes(1000 * KEY_SIZE_BYTES)))
        seq = 1

        async def churn(num_tails: int) -> None:
            nonlocal seq
            for _ in range(-(-num_tails // tails_per_batch)):
                keys = tuple(_split(rng.randbytes(tails_per_batch * _TAIL_BLOCKS * KEY_SIZE_BYTES)))
                for stored, removed in ((keys, ()), ((), keys)):
                    seq += 1
                    await directory.apply(EventBatch(Holder(worker, _EPOCH), seq, stored, removed))
            await mirrored.caught_up()

        async def rest() -> tuple[int, int]:
            """Bytes of store and of this process once heartbeats have dropped the events that are old by then."""
            await asyncio.sleep(_EVENTS_ARE_OLD_AFTER_S)
            await directory.heartbeat(worker, _EPOCH, seq, _LEASE_S)
            gc.collect()
            return await _used_bytes(client), _resident_bytes()

        await churn(num_requests // 10)  # all tables have their sizes after this
        store_before, mirror_before = await rest()
        await churn(num_requests)
        store_after, mirror_after = await rest()
        return {
            "churn_keys_left": float(len(await directory.resident(worker)) + mirrored.num_entries - 2000),
            "churn_store_growth_bytes": float(store_after - store_before),
            "churn_mirror_growth_bytes": float(mirror_after - mirror_before),
        }


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[tuple[RedisDirectory, Redis]]:
    directory = _directory(url)
    client = Redis.from_url(url)
    try:
        await directory.connect()
        yield directory, client
    finally:
        await client.aclose()
        await directory.close()


@asynccontextmanager
async def _mirrored(url: str, reader: str) -> AsyncIterator[MirroredDirectory]:
    directory = _directory(url)
    mirrored = MirroredDirectory(directory, directory.feed(reader, deadline_s=_DEADLINE_S), directory.breaker)
    mirrored.start()
    try:
        yield mirrored
    finally:
        await mirrored.close()


def _directory(url: str) -> RedisDirectory:
    return RedisDirectory(url, _SCHEME, match_deadline_s=_DEADLINE_S, publish_deadline_s=_DEADLINE_S)


async def _register(directory: RedisDirectory, num_workers: int) -> list[WorkerId]:
    workers = [WorkerId(f"w{number}") for number in range(num_workers)]
    for worker in workers:
        info = WorkerInfo(worker, _INSTANCE, "unix:/none", _SCHEME, b"", 1, 1, 1, "none", "lru")
        await directory.register(info, _EPOCH, _LEASE_S)
    return workers


async def _store(directory: RedisDirectory, worker: WorkerId, keys: Sequence[BlockKey], *, after_seq: int = 0) -> int:
    """Store keys in as few batches as they fit in; gives the number of the last one."""
    seq = after_seq
    for start in range(0, len(keys), MAX_KEYS_PER_CALL):
        seq += 1
        stored = tuple(keys[start : start + MAX_KEYS_PER_CALL])
        await directory.apply(EventBatch(Holder(worker, _EPOCH), seq, stored, ()))
    return seq


async def _time_matches(
    directory: MirroredDirectory, chains: Sequence[bytes], workers: Sequence[WorkerId]
) -> list[float]:
    """As `_time_calls`; a prompt's keys are made right before they are matched, as a router does."""
    durations_us = []
    for chain in [chains[0], *chains]:
        keys = _split(chain)
        started_at_s = time.perf_counter()
        await directory.match(keys, workers)
        durations_us.append((time.perf_counter() - started_at_s) * 1e6)
    return sorted(durations_us[1:])


async def _time_calls(call: Callable[[], Awaitable[object]], num_calls: int) -> list[float]:
    """Sorted durations in microseconds, after one call that does not count."""
    await call()
    durations_us = []
    for _ in range(num_calls):
        started_at_s = time.perf_counter()
        await call()
        durations_us.append((time.perf_counter() - started_at_s) * 1e6)
    return sorted(durations_us)


def _share(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _split(blob: bytes) -> list[BlockKey]:
    return [BlockKey(blob[at : at + KEY_SIZE_BYTES]) for at in range(0, len(blob), KEY_SIZE_BYTES)]


async def _used_bytes(client: Redis) -> int:
    return int((await client.info("memory"))["used_memory"])


def _resident_bytes() -> int:
    """Memory of this process that lies in RAM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell this process's memory")
