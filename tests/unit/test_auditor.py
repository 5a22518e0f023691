"""The slow comparison inside a worker, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from shared.directory.base import Reply
from shared.directory.memory import MemoryDirectory
from shared.directory.survey import Audited
from shared.errors import DirectoryUnavailable
from shared.types import BlockKey, Epoch, WorkerId
from shared.vtime import run_virtual
from tests.support.fakes import FakeEngine
from tests.support.stores import SCHEME, keys, worker_info
from worker.auditor import Auditor, digest_of
from worker.engines.base import BlockChange
from worker.publisher import Publisher

W1 = WorkerId("w1")
AUDIT_S = 60.0
LONGEST_ROUND_S = 1.5 * AUDIT_S + 10.0
"""Past the longest pause, and the looks after it."""


class MemorySurvey:
    """As far as an auditor asks."""

    def __init__(self, directory: MemoryDirectory) -> None:
        self._directory = directory
        self.is_down = False
        self.num_looked_up = 0

    async def audit(self, worker: WorkerId, epoch: Epoch, seq: int, asked: Sequence[BlockKey]) -> Audited | None:
        await asyncio.sleep(0.001)
        if self.is_down:
            raise DirectoryUnavailable("down")
        self.num_looked_up += len(asked)
        for record in await self._directory.workers():
            if (record.info.worker, record.epoch, record.seq) == (worker, epoch, seq):
                resident = await self._directory.resident(worker)
                return Audited(len(resident), len(set(asked) - resident))
        return None


class PoolEngine(FakeEngine):
    """A pool that tests change, and whose events they lose."""

    is_stock = False
    num_looks = 0

    def store(self, numbers: Iterable[int], *, is_lost: bool = False) -> None:
        for one in keys(numbers):
            self._resident[one] = None
        if not is_lost and self._on_blocks is not None:
            self._on_blocks(BlockChange(stored=keys(numbers)))

    def evict(self, numbers: Iterable[int], *, is_lost: bool = False) -> None:
        for one in keys(numbers):
            del self._resident[one]
        if not is_lost and self._on_blocks is not None:
            self._on_blocks(BlockChange(removed=keys(numbers)))

    async def look(self) -> set[BlockKey]:
        self.num_looks += 1
        return await super().look()

    async def pool_digest(self) -> tuple[int, bytes] | None:
        return None if self.is_stock else await super().pool_digest()


@dataclass
class Audit:
    """An audited worker."""

    engine: PoolEngine
    publisher: Publisher
    auditor: Auditor
    survey: MemorySurvey
    directory: MemoryDirectory

    @property
    def found(self) -> tuple[int, int]:
        return self.auditor.counts.num_audits, self.auditor.counts.num_drifts

    def spoil_store(self, *, add: Iterable[int] = (), drop: Iterable[int] = ()) -> None:
        entry = self.directory._entry_of[W1]
        entry.resident = (entry.resident | set(keys(add))) - set(keys(drop))

    async def is_true(self) -> bool:
        """Whether engine, publisher and store agree."""
        return set(self.engine._resident) == self.publisher.resident == await self.directory.resident(W1)


@asynccontextmanager
async def audited(num_blocks: int = 10, *, keys_per_audit: int = 4096) -> AsyncIterator[Audit]:
    """A worker with so many blocks that has published all of them; its audits are made by the test."""
    directory = MemoryDirectory(SCHEME, asyncio.get_running_loop().time)
    publishers: list[Publisher] = []
    engine = PoolEngine(scheme=SCHEME, on_blocks=lambda change: publishers[0].on_blocks(change))
    publisher = Publisher(directory, replace(worker_info("w1"), num_blocks=1024), rng=random.Random(1))
    publishers.append(publisher)
    survey = MemorySurvey(directory)
    auditor = Auditor(
        W1,
        engine,
        publisher,
        survey,  # type: ignore[arg-type]
        rng=random.Random(2),
        audit_s=AUDIT_S,
        keys_per_audit=keys_per_audit,
    )
    await publisher.start()
    engine.store(range(num_blocks))
    await asyncio.sleep(0.5)
    yield Audit(engine, publisher, auditor, survey, directory)
    await auditor.stop()
    await publisher.stop()
    assert len(asyncio.all_tasks()) == 1


def test_a_worker_that_is_well_costs_one_digest_and_one_call() -> None:
    async def scenario() -> None:
        async with audited() as worker:
            assert await worker.auditor.audit()
            assert (worker.found, worker.engine.num_looks, worker.survey.num_looked_up) == ((1, 0), 0, 10)

    run_virtual(scenario())


@pytest.mark.parametrize("is_stock", [False, True])
@pytest.mark.parametrize("is_removal", [False, True])
def test_a_lost_event_of_the_engine_is_found_and_mended(is_removal: bool, is_stock: bool) -> None:
    async def scenario() -> None:
        async with audited() as worker:
            worker.engine.is_stock = is_stock
            if is_removal:
                worker.engine.evict([3], is_lost=True)
            else:
                worker.engine.store([77], is_lost=True)
            assert not await worker.auditor.audit()
            await asyncio.sleep(1.0)
            assert await worker.is_true()
            assert worker.publisher.num_snapshots["audit"] == 1
            assert await worker.auditor.audit()
            assert worker.found == (2, 1)

    run_virtual(scenario())


def test_a_block_that_took_the_place_of_another_one_unseen_is_found_and_mended() -> None:
    async def scenario() -> None:
        async with audited() as worker:
            worker.engine.evict([3], is_lost=True)
            worker.engine.store([77], is_lost=True)
            assert not await worker.auditor.audit()
            await asyncio.sleep(1.0)
            assert (await worker.is_true(), worker.found) == (True, (1, 1))

    run_virtual(scenario())


@pytest.mark.parametrize(("add", "drop"), [([500], []), ([], [4]), ([500], [4])])
def test_a_store_that_holds_something_else_is_found_and_mended(add: list[int], drop: list[int]) -> None:
    async def scenario() -> None:
        async with audited() as worker:
            worker.spoil_store(add=add, drop=drop)
            assert not await worker.auditor.audit()
            await asyncio.sleep(1.0)
            assert await worker.is_true()
            assert await worker.auditor.audit()

    run_virtual(scenario())


def test_audits_take_turns_through_a_set_that_is_larger_than_one_may_look_up() -> None:
    async def scenario() -> None:
        async with audited(25, keys_per_audit=10) as worker:
            absent = list(worker.publisher.resident)[24]
            entry = worker.directory._entry_of[W1]
            entry.resident = (entry.resident - {absent}) | set(keys([500]))  # as many as before
            healthy = [await worker.auditor.audit() for _ in range(3)]
            assert (healthy, worker.survey.num_looked_up) == ([True, True, False], 25)

    run_virtual(scenario())


def test_what_is_on_its_way_from_engine_to_publisher_is_no_drift() -> None:
    async def scenario() -> None:
        async with audited() as worker:
            worker.engine.store([77], is_lost=True)
            asyncio.get_running_loop().call_later(0.5, worker.publisher.on_blocks, BlockChange(stored=keys([77])))
            assert await worker.auditor.audit()
            assert (worker.found, worker.engine.num_looks) == ((1, 0), 2)

    run_virtual(scenario())


def test_an_engine_that_never_rests_is_no_drift() -> None:
    async def scenario() -> None:
        async with audited() as worker:
            engine, number = worker.engine, 100

            async def churn() -> None:
                nonlocal number
                while True:
                    engine.store([number], is_lost=True)
                    late = BlockChange(stored=keys([number]))
                    asyncio.get_running_loop().call_later(0.02, worker.publisher.on_blocks, late)
                    number += 1
                    await asyncio.sleep(0.01)

            churning = asyncio.create_task(churn())
            healthy = [await worker.auditor.audit() for _ in range(5)]
            churning.cancel()
            await asyncio.wait({churning})
            assert (all(healthy), worker.publisher.num_snapshots["audit"]) == (True, 0)

    run_virtual(scenario())


def test_a_publisher_that_has_something_to_tell_is_not_compared_with_the_store() -> None:
    async def scenario() -> None:
        async with audited() as worker:
            worker.engine.store([77])
            assert await worker.auditor.audit()
            assert worker.survey.num_looked_up == 0

    run_virtual(scenario())


@pytest.mark.parametrize("is_before", [True, False])
def test_what_is_published_while_the_store_is_asked_is_no_drift(is_before: bool) -> None:
    async def scenario() -> None:
        async with audited() as worker:
            ask = worker.survey.audit

            async def overtaken_audit(*arguments: Any) -> Audited | None:
                found = None if is_before else await ask(*arguments)
                worker.engine.store([77])
                worker.engine.evict([3])
                await asyncio.sleep(0.5)
                return await ask(*arguments) if is_before else found

            worker.survey.audit = overtaken_audit  # type: ignore[method-assign]
            assert await worker.auditor.audit()
            assert (await worker.is_true(), worker.found) == (True, (1, 0))

    run_virtual(scenario())


def test_a_snapshot_that_is_being_staged_is_not_taken_for_drift() -> None:
    async def scenario() -> None:
        async with audited() as worker:
            stage = worker.directory.stage

            async def slow_stage(*arguments: Any) -> Reply:
                await asyncio.sleep(3.0)
                return await stage(*arguments)

            worker.directory.stage = slow_stage  # type: ignore[method-assign]
            worker.engine.store(range(20, 40), is_lost=True)
            worker.publisher.replace(set(worker.engine._resident), "overflow")
            await asyncio.sleep(1.0)
            assert not worker.publisher.is_quiet
            assert await worker.auditor.audit()
            await asyncio.sleep(20.0)
            assert (await worker.is_true(), worker.publisher.is_quiet) == (True, True)
            assert (worker.found, dict(worker.publisher.num_snapshots)) == ((1, 0), {"overflow": 1})

    run_virtual(scenario())


def test_audits_come_by_themselves_and_stop() -> None:
    async def scenario() -> None:
        async with audited() as worker:
            worker.auditor.start()
            await asyncio.sleep(0.4 * AUDIT_S)
            assert worker.found == (0, 0)
            await asyncio.sleep(LONGEST_ROUND_S)
            assert worker.found[0] >= 1
            worker.spoil_store(add=[500])
            await asyncio.sleep(LONGEST_ROUND_S)
            assert await worker.is_true()
            await worker.auditor.stop()
            num_audits = worker.found[0]
            await asyncio.sleep(10 * AUDIT_S)
            assert worker.found == (num_audits, 1)

    run_virtual(scenario())


def test_audits_of_a_worker_are_spread_over_time() -> None:
    async def scenario() -> None:
        async with audited() as worker:
            clock, audited_at_s = asyncio.get_running_loop().time, []
            ask = worker.survey.audit

            async def timed_audit(*arguments: Any) -> Audited | None:
                audited_at_s.append(clock())
                return await ask(*arguments)

            worker.survey.audit = timed_audit  # type: ignore[method-assign]
            worker.auditor.start()
            await asyncio.sleep(100 * AUDIT_S)
            pauses_s = [later - earlier for earlier, later in pairwise(audited_at_s)]
            assert 0.5 * AUDIT_S <= min(pauses_s) < 0.6 * AUDIT_S
            assert 1.4 * AUDIT_S < max(pauses_s) <= 1.5 * AUDIT_S + 1.0

    run_virtual(scenario())


def test_a_fault_that_comes_back_is_one_alarm_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with audited() as worker:
            for _ in range(3):
                worker.spoil_store(add=[500])
                assert not await worker.auditor.audit()
                await asyncio.sleep(1.0)
            assert worker.found == (3, 3)
            assert await worker.auditor.audit()
            worker.spoil_store(add=[500])
            assert not await worker.auditor.audit()

    with caplog.at_level(logging.ERROR):
        run_virtual(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "worker w1: the store holds 11 blocks where 10 are published, and lacks 0 of 10 looked up; "
        "it publishes its engine's own account anew"
    ] * 2


def test_neither_store_nor_engine_that_is_away_ends_the_audits(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with audited() as worker:
            worker.auditor.start()
            worker.survey.is_down = True
            await asyncio.sleep(5 * AUDIT_S)
            assert worker.found == (0, 0)
            worker.survey.is_down = False
            await asyncio.sleep(LONGEST_ROUND_S)
            assert worker.found[0] >= 1

    with caplog.at_level(logging.WARNING):
        run_virtual(scenario())
    assert caplog.records == []


def test_a_digest_is_that_of_the_different_keys_in_any_order() -> None:
    some = [*keys([1, 2, 4]), *keys([2])]
    assert digest_of(some) == digest_of(reversed(some)) == (3, (7).to_bytes(16, "big"))
    assert digest_of([]) == (0, bytes(16))
