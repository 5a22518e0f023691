"""Rows that run by a plan: how far ahead is read, what workers are given, and what happens when they go."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from router.planned_run import FleetMeans, Outline, PlannedRun, fleet_of, no_fleet
from router.planner import Room
from router.row_groups import Pace
from shared.types import WorkerId

W0, W1 = WorkerId("w0"), WorkerId("w1")


class Bench:
    """Rows that are numbers, with two beginnings in turn, and a stand-in for what runs them."""

    def __init__(self, **options: Any) -> None:
        self.rooms: dict[WorkerId, Room] | None = {W0: Room(2), W1: Room(2)}
        self.ran: list[tuple[int, WorkerId | None]] = []
        self.num_read = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_live = self.most_live = 0
        self.is_busy = asyncio.Event()
        self.run = PlannedRun(
            self.outline, self.carry, **{"block_size_tokens": 16, "max_under_way": 4, "fleet": self.fleet, **options}
        )

    def fleet(self) -> FleetMeans | None:
        return None if self.rooms is None else FleetMeans(self.rooms, Pace())

    def rows(self, num_rows: int) -> Iterator[int]:
        for number in range(num_rows):
            self.num_read += 1
            yield number

    async def outline(self, row: int) -> Outline[int] | None:
        chain = (b"even" if row % 2 == 0 else b"odd.") * 4
        return Outline(row, chain, 70, body={"row": row, "text": "\ud800é"}, packed=b"%04d" % row)

    async def carry(self, row: int, body: Any, packed: bytes | None, worker: WorkerId | None) -> None:
        assert (body, packed) == ({"row": row, "text": "\ud800é"}, b"%04d" % row)
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        if self.num_live == 4:
            self.is_busy.set()
        await self.gate.wait()
        await asyncio.sleep(0)
        self.num_live -= 1
        self.ran.append((row, worker))


async def test_each_row_runs_once_with_what_was_put_aside_of_it():
    bench = Bench()
    await bench.run.run(bench.rows(100))
    assert sorted(row for row, _ in bench.ran) == list(range(100))
    assert bench.most_live == 4


async def test_rows_of_one_beginning_go_to_one_worker():
    bench = Bench()
    await bench.run.run(bench.rows(100))
    parities = {worker: {row % 2 for row, at in bench.ran[:80] if at == worker} for worker in (W0, W1)}
    assert sorted(map(sorted, parities.values())) == [[0], [1]]


async def test_rows_that_need_not_run_are_passed_over():
    bench = Bench()

    async def outline(row: int) -> Outline[int] | None:
        return None if row % 3 else await Bench.outline(bench, row)

    bench.run._outline = outline
    await bench.run.run(bench.rows(30))
    assert sorted(row for row, _ in bench.ran) == list(range(0, 30, 3))


async def test_only_as_many_rows_are_read_ahead_as_memory_is_meant_for():
    bench = Bench(first_rows=10, max_rows=40)
    bench.gate.clear()
    run = asyncio.create_task(bench.run.run(bench.rows(1000)))
    await bench.is_busy.wait()
    for _ in range(2000):
        await asyncio.sleep(0)
    # 10 and twice 40 in all at most, of which four are under way; whoever has more than 40 waiting reads no further.
    assert bench.num_read <= 90
    bench.gate.set()
    await run
    assert bench.num_read == len(bench.ran) == 1000
    assert bench.run.most_waiting <= 80


async def test_only_as_many_bytes_are_put_aside_as_are_meant_for_it():
    # Some 36 bytes each.
    bench = Bench(first_rows=10, max_stored_bytes=1000)
    await bench.run.run(bench.rows(1000))
    assert sorted(row for row, _ in bench.ran) == list(range(1000))
    assert 1000 <= bench.run.most_stored_bytes <= 2 * 1050


async def test_what_is_put_aside_ends_with_its_last_row():
    bench = Bench(first_rows=10, max_rows=10)
    await bench.run.run(bench.rows(100))
    assert all(store.num_left == 0 for store in bench.run._stores)
    assert len(bench.run._stores) <= 3


async def test_a_run_that_is_cancelled_leaves_nothing_open():
    bench = Bench()
    bench.gate.clear()
    run = asyncio.create_task(bench.run.run(bench.rows(100)))
    await bench.is_busy.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    del bench
    gc.collect()  # an open file would be a warning, and a failure


async def test_what_a_row_raises_ends_the_run():
    bench = Bench()

    async def carry(*_: Any) -> None:
        raise OSError("full")

    bench.run._carry = carry
    with pytest.RaisesGroup(OSError, flatten_subgroups=True, allow_unwrapped=True):
        await bench.run.run(bench.rows(1))


async def test_rows_of_a_lost_worker_go_to_the_others():
    bench = Bench()
    bench.gate.clear()
    run = asyncio.create_task(bench.run.run(bench.rows(100)))
    await bench.is_busy.wait()
    bench.rooms = {W0: Room(2)}
    bench.run.look()
    bench.gate.set()
    await run
    assert sorted(row for row, _ in bench.ran) == list(range(100))
    assert sum(worker == W1 for _, worker in bench.ran) == 2


async def test_a_worker_that_comes_is_given_rows():
    bench = Bench(max_under_way=8)
    bench.rooms = {W0: Room(4)}
    bench.gate.clear()
    run = asyncio.create_task(bench.run.run(bench.rows(100)))
    await bench.is_busy.wait()
    bench.rooms = {W0: Room(2), W1: Room(2)}
    bench.run.look()
    bench.gate.set()
    await run
    assert {worker for _, worker in bench.ran} == {W0, W1}


async def test_without_any_word_of_workers_rows_are_for_whoever_takes_them():
    bench = Bench(fleet=no_fleet)
    await bench.run.run(bench.rows(20))
    assert {worker for _, worker in bench.ran} == {None}
    assert bench.most_live == 4


def test_what_a_sequence_adds_to_a_step_is_by_the_context_that_it_reads():
    loads = SimpleNamespace(
        workers=[W0, W1],
        max_num_seqs=np.array([16, 48]),
        kv_total_blocks=np.array([100, 200]),
        step_s=np.array([0.02, 0.06]),
        decode_s_per_seq=np.array([0.001, 0.003]),
    )
    state = SimpleNamespace(prefill_s_per_token=1e-3, mean_full_s=5.0, mean_output_tokens=10.0)
    router = MagicMock(**{"fleet.loads.return_value": MagicMock(**vars(loads), __len__=lambda _: 2)})
    router.queue.fleet_state.return_value = state

    means = fleet_of(router)

    assert means is not None
    assert means.worker_to_room == {W0: Room(20, 90), W1: Room(60, 180)}
    # Ten steps of 0.04 s among 32 sequences, and ten times 0.002 s for a context of 5,000 tokens.
    assert means.pace == Pace(1e-3, 10 * 0.04 / 32, 10.0, 10 * 0.002 / 5000)

    state.prefill_s_per_token = state.mean_full_s = 0.0
    unknown = fleet_of(router)
    assert unknown is not None
    assert unknown.pace == Pace(1.0, 0.0, 10.0)
