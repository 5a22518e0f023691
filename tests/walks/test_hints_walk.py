"""Random promises over chains that branch: every answer is what a plain list of live promises gives."""

from __future__ import annotations

import random

import pytest

from router.hints import SETTLE_S, Hints, Promise
from shared.types import BlockKey, WorkerId

WORKERS = [WorkerId(f"w{number}") for number in range(6)]
NUM_STEPS = 400


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Walk:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = _Clock()
        self.hints = Hints(self.clock)
        self.hints.on_change = self._hear
        self.live: list[tuple[Promise, float]] = []
        """With the time at which each ends by itself."""
        self.chains = [self._chain() for _ in range(8)]
        self.told = {(worker, number): 0 for worker in WORKERS for number in range(len(self.chains))}
        """How deep each chain is promised to each worker, by what was told alone."""

    def _chain(self) -> list[BlockKey]:
        """A path in a tree with few branches; its keys stand for all before them."""
        path, keys = b"", []
        for _ in range(self.rng.choice((0, 1, 2, 7, 20, 40))):
            path += self.rng.choices((b"a", b"b"), (9, 1))[0]
            keys.append(BlockKey(path.rjust(48, b".")))
        return keys

    def run(self) -> None:
        actions = [self._promise] * 6 + [self._settle] * 3 + [self._withdraw] * 3 + [self._pass_time] * 3
        actions.append(self._forget)
        for _ in range(NUM_STEPS):
            self.rng.choice(actions)()
            self.hints.expire()
            self.live = [(promise, end_s) for promise, end_s in self.live if end_s > self.clock.now_s]
            self._check()
        for worker in WORKERS:
            self.hints.forget(worker)
        assert len(self.hints) == 0
        assert not self.hints._key_to_bits
        assert not self.hints._worker_to_bit
        assert not self.hints._worker_to_more

    def _promise(self) -> None:
        chain = self.rng.choice(self.chains)
        keys = chain[: self.rng.randint(0, len(chain))]
        self.live.append((self.hints.promise(self.rng.choice(WORKERS), keys), float("inf")))

    def _settle(self) -> None:
        unsettled = [at for at, (_, end_s) in enumerate(self.live) if end_s == float("inf")]
        if unsettled:
            at = self.rng.choice(unsettled)
            self.hints.settle(self.live[at][0])
            self.live[at] = (self.live[at][0], self.clock.now_s + SETTLE_S)

    def _withdraw(self) -> None:
        if self.live:
            promise, _ = self.live.pop(self.rng.randrange(len(self.live)))
            self.hints.withdraw(promise)
            self.hints.withdraw(promise)

    def _forget(self) -> None:
        worker = self.rng.choice(WORKERS)
        self.hints.forget(worker)
        self.live = [(promise, end_s) for promise, end_s in self.live if promise.worker != worker]

    def _pass_time(self) -> None:
        self.clock.now_s += self.rng.random()

    def _hear(self, worker: WorkerId, keys: list[BlockKey], depth: int) -> None:
        for number, chain in enumerate(self.chains):
            if len(chain) > depth and chain[depth] == keys[depth]:
                self.told[worker, number] = self.hints.promised(chain).get(worker, 0)

    def _check(self) -> None:
        assert len(self.hints) == len(self.live)
        for number, chain in enumerate(self.chains):
            expected: dict[WorkerId, int] = {}
            for promise, _ in self.live:
                depth = next((at for at, key in enumerate(chain) if key not in promise.keys), len(chain))
                if depth:
                    expected[promise.worker] = max(depth, expected.get(promise.worker, 0))
            assert self.hints.promised(chain) == expected
            assert {worker: self.told[worker, number] for worker in expected} == expected
            assert all(self.told[worker, number] == 0 for worker in WORKERS if worker not in expected)


@pytest.mark.parametrize("seed", range(30))
def test_hints_are_what_the_live_promises_say_and_every_change_is_told(seed: int) -> None:
    _Walk(seed).run()
