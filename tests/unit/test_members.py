"""How a worker's KV blocks are told by what they are good for."""

from __future__ import annotations

import pytest

from router.members import KvBlocks
from shared.types import WorkerStatus
from tests.support.engines import NUM_BLOCKS, start_simulator


def status(**fields: int | None) -> WorkerStatus:
    """A status of a pool of 100 blocks."""
    load = {"num_running": 0, "num_waiting": 0, "queued_prefill_tokens": 0, "kv_used_blocks": 0, "kv_total_blocks": 100}
    times = {"prefill_s_per_token": 0.0, "step_s": 0.0, "decode_s_per_seq": 0.0, "step_budget_tokens": 0}
    return WorkerStatus(**{**load, **times, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, KvBlocks(0, 0, 0, 0, 100)),
        (
            {"kv_used_blocks": 30, "kv_pinned_blocks": 10, "kv_shared_blocks": 20, "kv_private_blocks": 15},
            KvBlocks(10, 20, 20, 15, 35),
        ),
        # A pool that does not tell classes: all that it caches counts as private.
        ({"kv_used_blocks": 30, "num_resident_blocks": 70}, KvBlocks(0, 30, 0, 40, 30)),
        # Classes are told a moment later than what is used: no block counts twice.
        (
            {"kv_used_blocks": 90, "kv_pinned_blocks": 0, "kv_shared_blocks": 30, "kv_private_blocks": 30},
            KvBlocks(0, 90, 10, 0, 0),
        ),
    ],
)
def test_every_block_counts_once(fields: dict[str, int | None], expected: KvBlocks) -> None:
    assert KvBlocks.of(status(**fields)) == expected


async def test_engine_tells_shared_private_and_pinned_blocks_apart() -> None:
    engine = await start_simulator()
    try:
        size = engine.engine._pool.block_size_tokens  # type: ignore[attr-defined]
        once, twice, kept = ([seed] * (2 * size + 1) for seed in (7, 8, 9))
        await engine.ask(once, max_tokens=1)
        for _ in range(2):
            await engine.ask(twice, max_tokens=1)
        await engine.engine.pin("kept", kept)
        pool = engine.engine.stats().pool
        assert pool is not None
        assert (pool.num_pinned, pool.num_shared, pool.num_private) == (2, 2, 2)
        assert engine.engine.stats().kv_used_blocks == 2 <= NUM_BLOCKS
    finally:
        await engine.engine.close()
