"""A worker in a process of its own, for faults that only a process can have: a fake engine behind a real host.

Usage: `python -m tests.support.worker_child URL ID LIFE FOLDER CLOCK_OFFSET_S`. Tells `ready` on stdout once it serves.
A line on stdin has it publish a snapshot of several chunks; it tells `staged` once the first is in the store, and stops
there for ever, to be killed.
"""

from __future__ import annotations

import asyncio
import datetime
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from shared.directory.base import MAX_KEYS_PER_CALL, Reply
from shared.directory.redis import RedisDirectory
from shared.types import BlockKey, Epoch, Instance, WorkerId, WorkerInfo
from tests.support.fakes import FakeEngine
from tests.support.rack import PARITY_KEY, SCHEME, SECRET
from tests.support.stores import LONG_LEASE_S, PATIENT_S, keys
from worker.auditor import AuditCounts
from worker.host import WorkerHost
from worker.inspector import PoolInspector
from worker.publisher import Publisher

FIRST_KEYS = keys(range(20))
"""What its engine holds from the start on."""
_NUM_SNAPSHOT_BLOCKS = 3 * MAX_KEYS_PER_CALL


class StallingDirectory(RedisDirectory):
    """Answers its first chunk never, after it has arrived."""

    async def stage(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, keys: Sequence[BlockKey]) -> Reply:
        await super().stage(worker, epoch, snapshot, keys)
        tell("staged")
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


def instance_of(life: int) -> Instance:
    """Another one than any worker of a rack has."""
    return Instance(f"{1000 + life:032x}")


def tell(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def shift_clock(offset_s: float) -> None:
    """Let this process's wall clock be wrong, whoever asks for it and however."""
    right_time_s = time.time

    class ShiftedDatetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return datetime.datetime.fromtimestamp(time.time(), tz)

    time.time = lambda: right_time_s() + offset_s
    time.time_ns = lambda: int(time.time() * 1e9)
    datetime.datetime = ShiftedDatetime  # type: ignore[misc]


async def main(url: str, name: str, life: str, folder: str, clock_offset_s: str) -> None:
    shift_clock(float(clock_offset_s))
    worker, instance = WorkerId(name), instance_of(int(life))
    publishers: list[Publisher] = []
    engine = FakeEngine(
        scheme=SCHEME, num_blocks=2 * _NUM_SNAPSHOT_BLOCKS, on_blocks=lambda change: publishers[0].on_blocks(change)
    )
    info = await engine.start()
    inspector = PoolInspector(engine, lambda: publishers[0], AuditCounts())
    host = WorkerHost(engine, info, worker=worker, instance=instance, secret=SECRET, inspector=inspector)
    address = await host.listen(f"unix:{folder}/{name}-{life}.sock")
    told = WorkerInfo(
        worker, instance, address, SCHEME, PARITY_KEY, info.num_blocks, 8, info.max_model_len_tokens, "fake 1", "lru"
    )
    directory = StallingDirectory(url, SCHEME, publish_deadline_s=PATIENT_S)
    publishers.append(Publisher(directory, told, rng=random.Random(0), lease_s=LONG_LEASE_S, heartbeat_s=0.1))
    await publishers[0].start()
    engine._put(list(FIRST_KEYS))
    tell("ready")
    await asyncio.to_thread(sys.stdin.readline)
    await engine.reset_cache()
    engine._put(list(keys(range(_NUM_SNAPSHOT_BLOCKS))))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
