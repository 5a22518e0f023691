"""Random silences, short and long, under requests: every answer is the undisturbed one, and nothing is left of any."""

from __future__ import annotations

import asyncio
import random

import pytest

from router.hints import SETTLE_S
from shared.transport.base import Timings
from shared.types import WorkerId
from shared.vtime import run_virtual
from tests.support.fakes import fake_tokens
from tests.support.lines import Lines, lines_to
from tests.support.rack import ask, prompt

NUM_WORKERS, NUM_REQUESTS, NUM_SILENCES = 3, 60, 12
PULSE_S = Timings().pulse_s


async def _answer(lines: Lines, number: int, rng: random.Random) -> int:
    """Ask one request; how many workers it has left."""
    await asyncio.sleep(rng.uniform(0.0, 60.0))
    token_ids, num_tokens = prompt(rng.randrange(4), 64, tail=number), rng.randint(1, 60)
    answer, trace = await ask(lines.router, f"q{number}", token_ids, max_tokens=num_tokens)
    assert answer == fake_tokens(token_ids, num_tokens)
    return len(trace.failed_workers)


async def _walk(seed: int) -> int:
    rng = random.Random(seed)
    engine = {
        "token_s": rng.choice((0.02, 0.3)),
        "prefill_s_per_token": rng.choice((0.001, 0.03)),
        "max_num_seqs": rng.choice((2, 16)),
    }
    async with lines_to(NUM_WORKERS, max_attempts=1000, **engine) as lines:
        asking = [
            asyncio.create_task(_answer(lines, number, random.Random(f"{seed}:{number}")))
            for number in range(NUM_REQUESTS)
        ]
        workers = sorted(lines.worker_to_connect)
        for _ in range(NUM_SILENCES):
            silent = [WorkerId(worker) for worker in rng.sample(workers, rng.choice((1, 1, 1, 2, 3)))]
            lines.freeze(*silent)
            # Short of what makes a silence, of what moves requests, and of what cuts the connection; or past it.
            await asyncio.sleep(rng.choice((0.5, 1.2, 2.5, 4.0, 12.0)) * PULSE_S)
            lines.thaw(*silent)
            await asyncio.sleep(rng.uniform(0.0, 2.0))
        num_moved = sum(await asyncio.gather(*asking))
        await lines.workers.settle()
        await asyncio.sleep(SETTLE_S + 10.0)
        assert len(lines.router.hints) == 0
        assert lines.router.fleet.state_to_count()["ready"] == NUM_WORKERS
        return num_moved


@pytest.mark.parametrize("seed", range(12))
def test_no_reader_sees_that_workers_fall_silent(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    assert run_virtual(_walk(seed)) > 0
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
