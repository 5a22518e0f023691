"""Several routers that ask the same few workers at the same moments: who comes late asks again, and nothing is left."""

from __future__ import annotations

import asyncio
import random

import pytest

from router.service import MAX_REFUSALS, Router
from shared.vtime import run_virtual
from tests.support.fakes import fake_tokens
from tests.support.rack import ask, prompt, rack

NUM_BURSTS = 12


class _Walk:
    def __init__(self, routers: list[Router], rng: random.Random) -> None:
        self._routers = routers
        self._rng = rng
        self._num_asked = 0
        self.num_refusals = 0
        self.num_cancelled = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_BURSTS):
                for router in self._routers:
                    for _ in range(self._rng.randint(0, 3)):
                        self._num_asked += 1
                        group.create_task(self._ask(router, self._num_asked, self._rng.random() < 0.2))
                await asyncio.sleep(self._rng.choice((0.0, 0.001, 0.02, 0.1, 0.5)))

    async def _ask(self, router: Router, number: int, is_impatient: bool) -> None:
        rng = random.Random(number)
        token_ids = prompt(rng.randrange(3), rng.choice((0, 64, 320)), tail=number, num_tail_tokens=rng.randint(1, 200))
        num_tokens = rng.randint(1, 12)
        asking = ask(router, f"q{number}", token_ids, max_tokens=num_tokens)
        try:
            async with asyncio.timeout(rng.choice((0.001, 0.01, 0.05)) if is_impatient else None):
                answer, trace = await asking
        except TimeoutError:
            self.num_cancelled += 1
            return
        assert answer == fake_tokens(token_ids, num_tokens)
        # To come late is no failure of anybody.
        assert (trace.num_attempts, trace.failed_workers, trace.num_continuations) == (1, [], 0)
        assert trace.num_refusals <= MAX_REFUSALS
        self.num_refusals += trace.num_refusals


async def _walk(seed: int) -> tuple[int, int]:
    rng = random.Random(seed)
    engine = {
        "token_s": 0.004,
        "prefill_s_per_token": rng.choice((0.0002, 0.001)),
        "step_budget_tokens": 64,
        "max_num_seqs": rng.choice((2, 64)),
    }
    async with (
        rack(rng.randint(1, 3), **engine) as workers,
        workers.router() as one,
        workers.router() as two,
        workers.router() as three,
    ):
        # Each hears of the others with its next look at the directory.
        await asyncio.sleep(1.5)
        walk = _Walk([one, two, three], rng)
        await walk.run()
        assert {router.fleet.state_to_count()["ready"] for router in (one, two, three)} == {len(workers.worker_to_slot)}
        told = sum(_outpaced(router) for router in (one, two, three))
        assert told >= walk.num_refusals
        return walk.num_refusals, walk.num_cancelled


def _outpaced(router: Router) -> int:
    (line,) = [
        line for line in router.render_metrics().decode().splitlines() if line.startswith("kvroute_outpaced_total ")
    ]
    return int(float(line.split()[1]))


@pytest.mark.parametrize("seed", range(12))
def test_whoever_comes_late_is_answered_all_the_same_and_leaves_nothing(seed: int) -> None:
    num_refusals, _ = run_virtual(_walk(seed))
    assert num_refusals > 0
