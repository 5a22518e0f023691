"""`kvroute bench planner`: how long it takes, and how much memory, to plan batches of short rows of all sizes, what it
takes with many workers, and that an input's length costs no memory: of gigabytes of rows a part is read ahead.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from router.known_keys import KnownKeys
from router.planned_run import FleetMeans, Outline, PlannedRun
from router.planner import Planner, Room
from router.row_groups import Draft, Pace, chain_of, planned
from shared.hashing import KEY_SIZE_BYTES, TOKEN_SIZE_BYTES, pack_tokens
from shared.types import BlockKey, CacheScheme, WorkerId

_SCHEME = CacheScheme("bench", 16)
_POOL_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    seed: int = 0
    nums_rows: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    num_templates: int = 60
    max_row_tokens: int = 80
    num_workers: int = 8
    many_workers: int = 1000
    """For the most rows once more."""
    rows_per_worker: int = 64
    nums_long_rows: tuple[int, ...] = (100_000, 400_000)
    long_row_bytes: int = 10_000


async def measure(say: Callable[[str], None], sizes: Sizes | None = None) -> dict[str, float | str]:
    """Processor time for each number of rows, from tokens to the last row handed out, and the most memory in all."""
    sizes = sizes or Sizes()
    figures: dict[str, float | str] = {"seed": sizes.seed}
    for num_rows in sizes.nums_long_rows:
        say(
            f"running {num_rows} rows of {2 * sizes.long_row_bytes} bytes by their plan, from a file that is read ahead"
        )
        await _run(num_rows, sizes)
        figures[f"peak_memory_{num_rows}_long_rows_mb"] = _peak_memory_mb()
    for num_rows in sizes.nums_rows:
        say(f"planning {num_rows} rows at once and handing them out")
        figures[f"plan_{num_rows}_rows_s"] = (await asyncio.to_thread(_plan, num_rows, sizes.num_workers, sizes)).all_s
    first, last = sizes.nums_rows[0], sizes.nums_rows[-1]
    growth = float(figures[f"plan_{last}_rows_s"]) / float(figures[f"plan_{first}_rows_s"])
    figures["time_growth_over_rows_growth"] = growth / (last / first)
    say(f"planning {last} rows for {sizes.many_workers} workers")
    many = await asyncio.to_thread(_plan, last, sizes.many_workers, sizes)
    figures[f"plan_{last}_rows_{sizes.many_workers}_workers_s"] = many.all_s
    figures[f"first_rows_of_{sizes.many_workers}_workers_s"] = many.first_rows_s
    figures[f"longest_look_at_{sizes.many_workers}_workers_s"] = many.longest_round_s
    figures["peak_memory_mb"] = _peak_memory_mb()
    return figures


def _peak_memory_mb() -> float:
    """The most so far."""
    # Linux gives KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass(frozen=True, slots=True)
class _Times:
    """Of the processor."""

    all_s: float
    first_rows_s: float
    """To give every worker its first rows."""
    longest_round_s: float
    """To give every worker all that it may have, once more."""


def _plan(num_rows: int, num_workers: int, sizes: Sizes) -> _Times:
    """Everything that a plan does with rows, once they are tokens."""
    rng = random.Random(sizes.seed)
    pool = pack_tokens(rng.randrange(1000, 30_000) for _ in range(_POOL_TOKENS))
    prefixes = [_cut(pool, rng, rng.randint(16, sizes.max_row_tokens * 3 // 4)) for _ in range(sizes.num_templates)]
    lengths = [len(prefix) // TOKEN_SIZE_BYTES for prefix in prefixes]
    known_keys = KnownKeys(_SCHEME)
    begun_at_s = time.process_time()
    draft: Draft[int] = Draft()
    for number in range(num_rows):
        template = rng.randrange(sizes.num_templates)
        own = _cut(pool, rng, rng.randint(1, sizes.max_row_tokens - lengths[template]))
        packed = prefixes[template] + own
        draft.add(number, chain_of(known_keys.of(packed)), len(packed) // TOKEN_SIZE_BYTES)
    groups = planned(draft, block_size_tokens=_SCHEME.block_size_tokens, num_seats=num_workers, pace=Pace())
    del draft
    planner: Planner[int] = Planner(max_under_way=sizes.rows_per_worker * num_workers)
    planner.seat({WorkerId(f"w{number}"): Room(sizes.rows_per_worker) for number in range(num_workers)})
    planner.add(groups)
    num_handed_out, round_times_s = 0, list[float]()
    while planner.num_waiting:
        round_at_s = time.process_time()
        turns = [turn for seat in planner.seats for turn in iter(partial(planner.take, seat), None)]
        round_times_s.append(time.process_time() - round_at_s)
        for turn in turns:
            planner.finish(turn)
        num_handed_out += len(turns)
    assert num_handed_out == num_rows, "each row is handed out once"
    return _Times(time.process_time() - begun_at_s, round_times_s[0], max(round_times_s))


async def _run(num_rows: int, sizes: Sizes) -> None:
    """Have rows read, put aside and handed out, half text and half tokens; what runs them does nothing."""
    rng = random.Random(sizes.seed)
    prefixes = [[BlockKey(rng.randbytes(KEY_SIZE_BYTES)) for _ in range(64)] for _ in range(sizes.num_templates)]
    body, packed = "x" * sizes.long_row_bytes, bytes(sizes.long_row_bytes)
    num_done = 0

    async def outline(number: int) -> Outline[int]:
        keys = prefixes[number % len(prefixes)] + [BlockKey(rng.randbytes(KEY_SIZE_BYTES))]
        return Outline(number, chain_of(keys), len(packed) // TOKEN_SIZE_BYTES, body=body, packed=packed)

    async def carry(*_: object) -> None:
        nonlocal num_done
        await asyncio.sleep(0)
        num_done += 1

    rooms = {WorkerId(f"w{number}"): Room(sizes.rows_per_worker) for number in range(sizes.num_workers)}
    run = PlannedRun(
        outline,
        carry,
        block_size_tokens=_SCHEME.block_size_tokens,
        max_under_way=sizes.rows_per_worker * sizes.num_workers,
        fleet=lambda: FleetMeans(rooms, Pace()),
    )
    await run.run(iter(range(num_rows)))
    assert num_done == num_rows, "each row is run once"


def _cut(pool: bytes, rng: random.Random, num_tokens: int) -> bytes:
    start = rng.randrange(_POOL_TOKENS - num_tokens) * TOKEN_SIZE_BYTES
    return pool[start : start + num_tokens * TOKEN_SIZE_BYTES]
