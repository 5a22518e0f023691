"""How old the oldest change is that the store is not known to have, whatever the store does. In virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from shared.directory.base import MAX_KEYS_PER_CALL, Reply
from shared.directory.memory import MemoryDirectory
from shared.errors import DirectoryUnavailable
from shared.types import BlockKey, Epoch, EventBatch, WorkerId
from shared.vtime import run_virtual
from tests.support.stores import SCHEME, keys, wait_until, worker_info
from worker.backlog import Backlog
from worker.engines.base import BlockChange
from worker.publisher import Publisher

W1 = WorkerId("w1")


def test_the_oldest_change_counts_until_it_has_arrived() -> None:
    backlog = Backlog()
    assert backlog.lag_s(5.0) == 0.0
    backlog.gather(10.0)
    backlog.gather(11.0)
    assert backlog.lag_s(12.0) == 2.0
    backlog.send(12.0)
    backlog.gather(13.0)
    assert backlog.lag_s(14.0) == 4.0
    backlog.arrive()
    assert backlog.lag_s(14.0) == 1.0
    backlog.send(14.0)
    backlog.arrive()
    assert backlog.lag_s(15.0) == 0.0


def test_what_a_batch_leaves_behind_is_not_younger_than_the_batch() -> None:
    backlog = Backlog()
    backlog.gather(10.0)
    backlog.send(11.0, is_all=False)
    backlog.arrive()
    assert backlog.lag_s(12.0) == 2.0


def test_a_snapshot_is_as_old_as_what_it_takes_over() -> None:
    backlog = Backlog()
    backlog.gather(10.0)
    backlog.send(11.0)
    backlog.send(12.0)
    backlog.arrive(is_all=False)
    assert backlog.lag_s(13.0) == 3.0
    backlog.arrive()
    backlog.send(20.0)
    assert backlog.lag_s(21.0) == 1.0


class SwitchedDirectory(MemoryDirectory):
    """Answers, or does not."""

    is_away = False

    async def apply(self, batch: EventBatch) -> Reply:
        if self.is_away:
            raise DirectoryUnavailable("apply: away")
        return await super().apply(batch)

    async def stage(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, keys: Sequence[BlockKey]) -> Reply:
        if self.is_away:
            raise DirectoryUnavailable("stage: away")
        return await super().stage(worker, epoch, snapshot, keys)


@pytest.mark.parametrize("num_blocks", [3, 3 * MAX_KEYS_PER_CALL, 1 << 17], ids=["a batch", "batches", "a snapshot"])
def test_a_publisher_tells_for_how_long_the_store_has_missed_something(num_blocks: int) -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        directory = SwitchedDirectory(SCHEME, clock)
        publisher = Publisher(directory, worker_info("w1"), rng=random.Random(1), lease_s=3600.0)
        await publisher.start()
        assert publisher.lag_s == 0.0
        directory.is_away = True
        publisher.on_blocks(BlockChange(stored=keys([0])))
        await asyncio.sleep(30.0)
        publisher.on_blocks(BlockChange(stored=keys(range(1, num_blocks))))
        await asyncio.sleep(10.0)
        assert publisher.lag_s == pytest.approx(40.0)
        directory.is_away = False
        await wait_until(lambda: publisher.is_quiet)
        assert publisher.lag_s == 0.0
        assert len(await directory.resident(W1)) == num_blocks
        await publisher.stop()

    run_virtual(scenario())
