"""Random batches, workers that come and go, rows that end in any order: no row is lost, none is handed out twice."""

from __future__ import annotations

import random

import pytest

from router.planner import Planner, Room, Turn
from router.row_groups import Draft, Pace, chain_of, planned, urgency_of
from shared.types import BlockKey, WorkerId

NUM_STEPS = 400


class _Walk:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.max_under_way = self.rng.choice((1, 3, 20, 100))
        self.planner: Planner[int] = Planner(max_under_way=self.max_under_way)
        self.waiting: set[int] = set()
        self.under_way: list[Turn[int]] = []
        self.done: list[int] = []
        self.num_made = 0

    def run(self) -> None:
        actions = [self._add] + [self._take] * 12 + [self._finish] * 12 + [self._workers, self._pace]
        for _ in range(NUM_STEPS):
            self.rng.choice(actions)()
            self._check()
        while self.waiting or self.under_way:
            for seat in list(self.planner.seats):
                while (turn := self.planner.take(seat)) is not None:
                    self._taken(turn)
            self._finish()
            self._check()
        assert sorted(self.done) == list(range(self.num_made))
        assert all((seat.num_under_way, seat.blocks_under_way) == (0, 0) for seat in self.planner.seats)

    def _add(self) -> None:
        draft: Draft[int] = Draft()
        depth = self.rng.choice((0, 1, 3, 12))
        for _ in range(self.rng.choice((0, 1, 2, 30, 80))):
            path, keys = b"", []
            for _ in range(self.rng.randint(0, depth)):
                path += self.rng.choices((b"a", b"b", b"c"), (9, 1, 1))[0]
                keys.append(BlockKey(path.rjust(40, b".")[-16:]))
            urgency = urgency_of(self.rng.choice((0, 0, 0, 5)), self.rng.choice((None, None, 3.0)))
            draft.add(self.num_made, chain_of(keys), 16 * len(keys) + self.rng.randrange(40), urgency)
            self.waiting.add(self.num_made)
            self.num_made += 1
        num_seats = self.rng.randint(1, 9)
        self.planner.add(planned(draft, block_size_tokens=16, num_seats=num_seats, pace=self.planner.pace))

    def _take(self) -> None:
        turn = self.planner.take(self.rng.choice(list(self.planner.seats)))
        if turn is not None:
            self._taken(turn)

    def _taken(self, turn: Turn[int]) -> None:
        self.waiting.remove(turn.item)
        self.under_way.append(turn)

    def _finish(self) -> None:
        """In any order, with whatever result; of workers that are gone, too."""
        if self.under_way:
            turn = self.under_way.pop(self.rng.randrange(len(self.under_way)))
            self.planner.finish(turn)
            self.done.append(turn.item)

    def _workers(self) -> None:
        workers = self.rng.sample(range(6), self.rng.randint(0, 5))
        rooms = {
            WorkerId(f"w{number}"): Room(self.rng.randint(1, 9), self.rng.choice((None, 5, 50))) for number in workers
        }
        self.planner.seat(rooms)
        if rooms:
            assert {seat.worker: seat.room for seat in self.planner.seats} == rooms

    def _pace(self) -> None:
        context_s = self.rng.choice((0.0, 1e-3))
        self.planner.pace = Pace(
            self.rng.choice((0.0, 1e-4, 1.0)), self.rng.random(), self.rng.randrange(64), context_s
        )

    def _check(self) -> None:
        assert self.planner.num_waiting == len(self.waiting)
        assert self.planner.num_under_way == len(self.under_way) <= self.max_under_way


@pytest.mark.parametrize("seed", range(40))
def test_each_row_is_handed_out_once_whatever_happens(seed: int):
    _Walk(seed).run()
