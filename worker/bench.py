"""Measures our own block pool, at 1,000 and at 1,000,000 blocks, and what our rule costs in vLLM's scheduler.

Chains are prompts of 128 full blocks of 64 tokens, and one token. They are written as engines write: half at once as a
prompt, half block by block in turn with seven others, so that the blocks of a chain do not lie side by side. Which
chain is asked for is drawn anew each time; its keys are known, as they are to an engine. Calls to the two pools
alternate.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from shared.errors import ConfigError
from shared.hashing import TOKEN_SIZE_BYTES, block_keys, root_key
from shared.types import BlockKey, CacheScheme
from worker.blocks import BlockPool

_BLOCK_SIZE_TOKENS = 64
_STRIDE_BYTES = _BLOCK_SIZE_TOKENS * TOKEN_SIZE_BYTES
_ROOT = root_key(CacheScheme("bench", _BLOCK_SIZE_TOKENS))
_CHAIN_BLOCKS = 128
_CHAINS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    seed: int = 0
    small_pool_blocks: int = 1_000
    large_pool_blocks: int = 1_000_000
    num_rounds: int = 1_000
    vllm_num_requests: int = 300
    vllm_num_rounds: int = 4
    """0 leaves vLLM out."""


async def measure(say: Callable[[str], None], sizes: Sizes | None = None) -> dict[str, float]:
    """All figures. `bytes_per_block` is the growth of resident memory while the large pool is made and filled.

    That counts everything but the tokens: blocks, keys, index, links, counts. What `adaptive` remembers of blocks that
    went comes on top, for at most as many keys as there are blocks. An eviction's time is that of a prompt's
    allocation, divided by the blocks that it took from others.
    """
    sizes = sizes or Sizes()
    figures = await _measure_pools(sizes, say)
    gc.collect()
    if importlib.util.find_spec("vllm") is None:
        say("vLLM is not installed: what our rule costs in its scheduler is not measured")
    elif sizes.vllm_num_rounds:
        say("running vLLM's scheduler and ours")
        from worker.engines.vllm_bench import measure_schedule_overhead

        try:
            figures |= await measure_schedule_overhead(sizes.seed, sizes.vllm_num_requests, sizes.vllm_num_rounds)
        except ConfigError as error:
            say(f"what our rule costs in vLLM's scheduler is not measured: {error}")
    return figures


async def _measure_pools(sizes: Sizes, say: Callable[[str], None]) -> dict[str, float]:
    say(f"filling pools of {sizes.small_pool_blocks} and {sizes.large_pool_blocks} blocks")
    small = await _Filled.create(sizes.small_pool_blocks)
    gc.collect()
    resident_before_bytes = psutil.Process().memory_info().rss
    large = await _Filled.create(sizes.large_pool_blocks)
    gc.collect()
    grown_bytes = psutil.Process().memory_info().rss - resident_before_bytes
    rng = random.Random(sizes.seed)
    suffix_to_pool = {"": small, "_at_1m_blocks": large}
    figures: dict[str, float] = {"seed": sizes.seed, "num_rounds": sizes.num_rounds}
    for name, time_one in (
        (f"acquire_release_{_CHAIN_BLOCKS}", _Filled.time_hit),
        ("evict", _Filled.time_eviction),
    ):
        say(f"measuring {name}")
        suffix_to_times: dict[str, list[float]] = {suffix: [] for suffix in suffix_to_pool}
        for _ in range(sizes.num_rounds):
            for suffix, pool in suffix_to_pool.items():
                suffix_to_times[suffix].append(time_one(pool, rng))
            await asyncio.sleep(0)
        for suffix, times_us in suffix_to_times.items():
            figures |= _percentiles(f"{name}{suffix}_us", times_us)
    figures["bytes_per_block"] = grown_bytes / sizes.large_pool_blocks - sys.getsizeof(bytes(_STRIDE_BYTES))
    return figures


class _Filled:
    """A pool that holds as many chains as fit, all of them free, and room for one sequence more."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(
            num_blocks, _BLOCK_SIZE_TOKENS, "adaptive", max_sequence_tokens=(_CHAIN_BLOCKS + 1) * _BLOCK_SIZE_TOKENS
        )
        self.num_chains = num_blocks // _CHAIN_BLOCKS - 1
        self._num_written = 0
        self._num_requests = 0

    @classmethod
    async def create(cls, num_blocks: int) -> _Filled:
        filled = cls(num_blocks)
        while filled._num_written < filled.num_chains:
            filled._write_at_once(min(_CHAINS_AT_ONCE, filled.num_chains - filled._num_written))
            await asyncio.sleep(0)
        return filled

    def time_hit(self, rng: random.Random) -> float:
        """Microseconds to acquire a chain that is there, and to release it."""
        prompt, keys, request = self._ask(rng.randrange(self.num_chains))
        started_s = time.perf_counter()
        sequence = self.pool.allocate(request, prompt, _ROOT, keys=keys)
        self.pool.release(sequence)
        duration_us = (time.perf_counter() - started_s) * 1e6
        if sequence.num_cached_tokens != _CHAIN_BLOCKS * _BLOCK_SIZE_TOKENS:
            raise AssertionError(f"{sequence.num_cached_tokens} tokens of a chain were found")
        return duration_us

    def time_eviction(self, rng: random.Random) -> float:
        """Microseconds for each block that a new chain takes from others."""
        while True:
            prompt, keys, request = self._ask(self._num_written)
            self._num_written += 1
            num_before = sum(self.pool.statistics().num_evicted)
            started_s = time.perf_counter()
            sequence = self.pool.allocate(request, prompt, _ROOT, keys=keys)
            duration_us = (time.perf_counter() - started_s) * 1e6
            self.pool.commit(sequence, sequence.num_tokens)
            self.pool.release(sequence)
            num_evicted = sum(self.pool.statistics().num_evicted) - num_before
            if num_evicted >= _CHAIN_BLOCKS:  # else there was still room that nobody had used
                return duration_us / num_evicted

    def _ask(self, chain: int) -> tuple[bytes, list[BlockKey], str]:
        """A chain's tokens and keys, made anew as for any request, and the name of a new request."""
        self._num_requests += 1
        prompt = _full_blocks(chain) + bytes(TOKEN_SIZE_BYTES)
        return prompt, block_keys(prompt, _BLOCK_SIZE_TOKENS, _ROOT), f"request-{self._num_requests}"

    def _write_at_once(self, num_chains: int) -> None:
        chains = range(self._num_written, self._num_written + num_chains)
        texts = [_full_blocks(chain) for chain in chains]
        half = len(texts[0]) // 2
        sequences = [
            self.pool.allocate(f"writer-{chain}", text[:half], _ROOT) for chain, text in zip(chains, texts, strict=True)
        ]
        for start in range(half, len(texts[0]), _STRIDE_BYTES):
            for sequence, text in zip(sequences, texts, strict=True):
                self.pool.append(sequence, text[start : start + _STRIDE_BYTES])
        for sequence in sequences:
            self.pool.commit(sequence, sequence.num_tokens)
            self.pool.release(sequence)
        self._num_written += num_chains


def _full_blocks(chain: int) -> bytes:
    return random.Random(chain).randbytes(_CHAIN_BLOCKS * _STRIDE_BYTES)


def _percentiles(name: str, values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"{name}_p{share}": ordered[len(ordered) * share // 100] for share in (10, 50, 90)}
