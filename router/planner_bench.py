"""`kvroute bench planner`: how long it takes, and how much memory, to plan batches of short rows of all sizes, and what
it takes with many workers."""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from router.known_keys import KnownKeys
from router.planner import Planner, Room
from router.row_groups import Draft, Pace, chain_of, planned
from shared.hashing import pack_tokens
from shared.types import CacheScheme, WorkerId

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


async def measure(say: Callable[[str], None], sizes: Sizes | None = None) -> dict[str, float | str]:
    """Processor time for each number of rows, from tokens to the last row handed out, and the most memory in all."""
    sizes = sizes or Sizes()
    figures: dict[str, float | str] = {"seed": sizes.seed}
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
    # Linux gives KiB.
    figures["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return figures


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
    lengths = [len(prefix) // 4 for prefix in prefixes]
    known_keys = KnownKeys(_SCHEME)
    begun_at_s = time.process_time()
    draft: Draft[int] = Draft()
    for number in range(num_rows):
        template = rng.randrange(sizes.num_templates)
        own = _cut(pool, rng, rng.randint(1, sizes.max_row_tokens - lengths[template]))
        packed = prefixes[template] + own
        draft.add(number, chain_of(known_keys.of(packed)), len(packed) // 4)
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


def _cut(pool: bytes, rng: random.Random, num_tokens: int) -> bytes:
    start = rng.randrange(_POOL_TOKENS - num_tokens) * 4
    return pool[start : start + 4 * num_tokens]
