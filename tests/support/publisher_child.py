"""A worker's publisher in a process of its own that stops for ever between two chunks of a snapshot, to be killed.

Usage: `python -m tests.support.publisher_child URL`. Tells `staged` on stdout once the first chunk is in the store.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence

from shared.directory.base import MAX_KEYS_PER_CALL, Reply
from shared.directory.redis import RedisDirectory
from shared.types import BlockKey, Epoch, WorkerId
from tests.support.stores import PATIENT_S, SCHEME, keys, wait_until, worker_info
from worker.engines.base import BlockChange
from worker.publisher import Publisher

NUM_BLOCKS = 20
NUM_SNAPSHOT_BLOCKS = 3 * MAX_KEYS_PER_CALL
LEASE_S = 600.0


class StallingDirectory(RedisDirectory):
    """Answers its first chunk never, after it has arrived."""

    async def stage(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, keys: Sequence[BlockKey]) -> Reply:
        await super().stage(worker, epoch, snapshot, keys)
        sys.stdout.write("staged\n")
        sys.stdout.flush()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


async def main(url: str) -> None:
    directory = StallingDirectory(url, SCHEME, publish_deadline_s=PATIENT_S)
    publisher = Publisher(directory, worker_info("w1"), rng=random.Random(0), lease_s=LEASE_S, heartbeat_s=0.2)
    await publisher.start()
    publisher.on_blocks(BlockChange(stored=keys(range(NUM_BLOCKS))))
    await wait_until(lambda: publisher.is_quiet)
    publisher.on_blocks(BlockChange(is_reset=True, stored=keys(range(NUM_SNAPSHOT_BLOCKS))))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
