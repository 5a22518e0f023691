"""Pools of blocks to test with, and short names for what goes into them."""

from __future__ import annotations

from typing import Any

from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme
from worker.blocks import BlockPool
from worker.sequences import Sequence

BLOCK_SIZE = 16
STRIDE_BYTES = BLOCK_SIZE * 4
ROOT = root_key(CacheScheme("model", BLOCK_SIZE))
OTHER_ROOT = root_key(CacheScheme("model", BLOCK_SIZE), salt="tenant")


def make_pool(num_blocks: int, rule: str = "lru", **more: Any) -> BlockPool:
    """A pool whose longest sequence fills it."""
    return BlockPool(num_blocks, BLOCK_SIZE, rule, **{"max_sequence_tokens": num_blocks * BLOCK_SIZE, **more})


def text(*starts: int, tail: int = 0) -> bytes:
    """Packed tokens: one full block for each start, and `tail` tokens more."""
    tokens = [start * 1000 + number for start in starts for number in range(BLOCK_SIZE)]
    return pack_tokens([*tokens, *range(9_000_000, 9_000_000 + tail)])


def start(pool: BlockPool, request: str, packed: bytes, **more: Any) -> Sequence:
    """A sequence whose prompt has been computed."""
    sequence = pool.allocate(request, packed, more.pop("root", ROOT), **more)
    pool.commit(sequence, sequence.num_tokens)
    return sequence


def run(pool: BlockPool, request: str, packed: bytes, **more: Any) -> int:
    """A whole request; the number of its cached tokens."""
    sequence = start(pool, request, packed, **more)
    pool.release(sequence)
    return sequence.num_cached_tokens


def state(pool: BlockPool) -> object:
    """All that a refused call must leave as it was."""
    store = pool._store
    sequences = [(each, list(each.blocks), each.num_tokens) for each in pool._sequences]
    head_start = store.free.adaptive and (store.free.adaptive.num_ghosts, store.free.head_start)
    return pool.statistics(), store.free.in_order(), list(store.tokens), sequences, pool.pins(), head_start


def weak_chain(packed: bytes, block_size_tokens: int, parent: BlockKey) -> list[BlockKey]:
    """Chained keys of which there are only eight: most texts collide with some other one."""
    keys: list[BlockKey] = []
    stride = block_size_tokens * 4
    for end in range(stride, len(packed) + 1, stride):
        (strong,) = block_keys(packed[end - stride : end], block_size_tokens, parent)
        parent = BlockKey(bytes([strong[0] % 8]) * 16)
        keys.append(parent)
    return keys
