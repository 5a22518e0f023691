"""What a worker tells of its pool and its publisher when it is asked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared.directory.memory import MemoryDirectory
from shared.errors import EngineError, Overloaded
from shared.messages import Inspect, Inspection
from shared.types import WorkerId
from shared.vtime import run_virtual
from tests.support.fakes import FakeEngine
from tests.support.stores import SCHEME, keys, worker_info
from worker.auditor import AuditCounts
from worker.engines.base import BlockChange
from worker.inspector import PoolInspector
from worker.publisher import Publisher

W1 = WorkerId("w1")


@asynccontextmanager
async def inspected() -> AsyncIterator[tuple[PoolInspector, FakeEngine, Publisher, MemoryDirectory]]:
    """An engine with ten blocks, all of them published."""
    directory = MemoryDirectory(SCHEME, asyncio.get_running_loop().time)
    engine = FakeEngine(scheme=SCHEME)
    publisher = Publisher(directory, worker_info("w1"), rng=random.Random(1))
    await publisher.start()
    engine._resident.update(dict.fromkeys(keys(range(10))))
    publisher.on_blocks(BlockChange(stored=keys(range(10))))
    await asyncio.sleep(1.0)
    yield PoolInspector(engine, lambda: publisher, AuditCounts(3, 1)), engine, publisher, directory
    await publisher.stop()


def test_all_figures_are_of_one_moment() -> None:
    async def scenario() -> None:
        async with inspected() as (inspector, engine, publisher, _):
            engine._resident.update(dict.fromkeys(keys([20, 21])))
            publisher.on_blocks(BlockChange(removed=keys([9])))
            report, resident = await inspector.inspect(Inspect(7))
            assert resident == set(keys([*range(10), 20, 21]))
            assert report == Inspection(
                7, 12, publisher.epoch, 1, 9, 3, 1, is_quiet=False, num_audits=3, num_drifts=1, lag_s=0.0
            )

    run_virtual(scenario())


def test_looking_changes_nothing_and_a_repair_publishes_what_the_engine_holds() -> None:
    async def scenario() -> None:
        async with inspected() as (inspector, engine, publisher, directory):
            engine._resident.update(dict.fromkeys(keys([20])))
            for _ in range(3):
                report, _ = await inspector.inspect(Inspect(1))
                await asyncio.sleep(1.0)
                assert report.num_differing == 1
            assert await directory.resident(W1) == set(keys(range(10)))
            report, _ = await inspector.inspect(Inspect(1, is_repair=True))
            assert (report.num_differing, report.is_quiet) == (0, False)
            await asyncio.sleep(1.0)
            assert await directory.resident(W1) == set(keys([*range(10), 20]))
            assert publisher.num_snapshots == {"repair": 1}

    run_virtual(scenario())


def test_a_dead_engine_and_a_worker_that_starts_are_told() -> None:
    async def scenario() -> None:
        async with inspected() as (inspector, engine, _, _):
            engine.die("killed")
            with pytest.raises(EngineError, match="killed"):
                await inspector.inspect(Inspect(1))
            with pytest.raises(Overloaded, match="not registered yet"):
                await PoolInspector(engine, lambda: None, AuditCounts()).inspect(Inspect(1))

    run_virtual(scenario())
