"""Measures what is claimed for block pools of this kind on our own: `python -m tests.bench.bench_claims [--only NAME]`.

    blocks    fragmentation, overhead and CPU cost of book-keeping, by block size and workload
    sharing   memory saved by sharing and against static allocation, reuse in a batch, hashes of a prompt
    copies    what copy-on-write costs, against computing the same tokens
    prefix    on a real engine, from which length on a cached prefix makes a first token come sooner

Text is real, the demo's and this project's, in SmolLM2's tokens; `--trace` adds the lengths of a trace in Mooncake's
format. Bytes are those of a 13B model in fp16. Counts are the same everywhere; times are medians with their quartiles,
of this machine and of whatever else runs on it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from router.tokenizer import Tokenizer
from shared.config import Settings
from shared.errors import ConfigError
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme
from tests.bench.prefix_times import NUM_PAIRS, measure_prefixes
from tests.support.pool_replay import Replayed, replay
from tests.support.text_workloads import (
    Job,
    long_prompts,
    multi_turn,
    short_chats,
    template_batches,
    trace_jobs,
)
from worker.blocks import BlockPool
from worker.sequences import PoolStatistics

COMMAND = "python -m tests.bench.bench_claims"
SEED = 0
BYTES_PER_TOKEN = 819_200
"""13B in fp16: 2 x 40 layers x 40 heads x 128 x 2 bytes."""
MODEL_TO_BYTES_PER_TOKEN = {"13b_fp16": BYTES_PER_TOKEN, "smollm2_bf16": 2 * 30 * 3 * 64 * 2}
POOL_TOKENS = 860 * 64
"""What 80 GB hold beside the weights."""
BLOCK_SIZES = (16, 32, 64, 128, 256)
MAX_CONTEXT_TOKENS = 4096
MAX_LONG_CONTEXT_TOKENS = 32_768
NUM_RUNNING = 8
NUM_TRACE_JOBS = 150
NUM_REPEATS = 200

Figures = dict[str, Any]


class Workloads:
    """The jobs of each name, made once, and the longest sequence of a model that would serve them."""

    def __init__(self, trace: Path | None) -> None:
        from worker.engines.demo_model import prepare_model

        self.model_dir = prepare_model("smollm2", Settings().model_cache_dir)
        tokenizer = Tokenizer(self.model_dir)
        root = Path(__file__).parents[2]
        paths = sorted(path for room in ("router", "shared", "worker") for path in (root / room).rglob("*.py"))
        self.multi_turn = multi_turn(tokenizer, SEED)
        self.multi_turn_one_assistant = multi_turn(tokenizer, SEED, one_assistant=True)
        self.template_batches = template_batches(tokenizer, SEED)
        self.by_name: dict[str, tuple[list[Job], int]] = {
            "short_chats": (short_chats(tokenizer, SEED), MAX_CONTEXT_TOKENS),
            "multi_turn": (self.multi_turn, MAX_CONTEXT_TOKENS),
            "template_batch": (self.template_batches[0], MAX_CONTEXT_TOKENS),
            "long_prompts": (long_prompts(tokenizer, SEED, [root / "README.md", *paths]), 2 * MAX_CONTEXT_TOKENS),
        }
        if trace is not None:
            self.by_name["trace"] = (trace_jobs(trace, NUM_TRACE_JOBS), MAX_LONG_CONTEXT_TOKENS)


def make_pool(block_size: int, max_sequence_tokens: int, num_tokens: int = POOL_TOKENS) -> BlockPool:
    return BlockPool(
        num_tokens // block_size,
        block_size,
        "adaptive",
        max_sequence_tokens=max_sequence_tokens,
        bytes_per_token=BYTES_PER_TOKEN,
        pin_budget_blocks=0,
    )


def spread(samples: Sequence[float], digits: int = 1) -> Figures:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(samples, n=4)
    return {"median": round(median, digits), "quartiles": [round(low, digits), round(high, digits)]}


# blocks


def measure_blocks(workloads: Workloads) -> Figures:
    """By workload and block size.

    `fragmentation`: slots of used blocks that hold no token, as a share of the slots of used blocks, over all steps.
    `overhead`: bytes of those slots and of the pool's book-keeping for the used blocks, over the KV bytes of the tokens
    that the used blocks hold.
    """
    bookkeeping = {size: bookkeeping_bytes_per_block(size) for size in BLOCK_SIZES}
    figures: Figures = {"bookkeeping_bytes_per_block": bookkeeping}
    for name, (jobs, max_sequence_tokens) in workloads.by_name.items():
        lengths = sorted(len(job.prompt) + len(job.output) for job in jobs)
        figures[name] = {"num_requests": len(jobs), "tokens_median": lengths[len(lengths) // 2]}
        for size in BLOCK_SIZES:
            figures[name][f"{size}_tokens"] = measure_fragmentation(
                jobs, size, max_sequence_tokens, bookkeeping[size]
            ) | time_bookkeeping(jobs, size, max_sequence_tokens)
    return figures


def measure_fragmentation(jobs: Sequence[Job], size: int, max_sequence_tokens: int, bookkeeping_bytes: int) -> Figures:
    shares: list[float] = []
    num_slots = num_unused = num_blocks = 0.0

    def look(seen: PoolStatistics) -> None:
        nonlocal num_slots, num_unused, num_blocks
        if seen.num_used:
            shares.append(seen.fragmentation)
            num_blocks += seen.num_used
            num_slots += seen.num_used * size
            num_unused += seen.fragmentation * seen.num_used * size

    replayed = replay(
        make_pool(size, max_sequence_tokens), jobs, NUM_RUNNING, look, max_sequence_tokens=max_sequence_tokens
    )
    kv_bytes = (num_slots - num_unused) * BYTES_PER_TOKEN
    overhead_bytes = num_unused * BYTES_PER_TOKEN + num_blocks * bookkeeping_bytes
    return {
        "fragmentation": round(num_unused / num_slots, 4),
        "fragmentation_worst_step": round(max(shares), 4),
        "overhead": round(overhead_bytes / kv_bytes, 4),
        "bookkeeping_share": round(num_blocks * bookkeeping_bytes / kv_bytes, 7),
        "reused_prompt_tokens": reuse(replayed),
        "num_refused": len(replayed.refused),
    }


def reuse(replayed: Replayed) -> float:
    return round(replayed.num_cached_tokens / replayed.num_prompt_tokens, 3)


def bookkeeping_bytes_per_block(size: int, num_blocks: int = 512) -> int:
    """Memory of a pool all of whose blocks hold findable tokens, these included, for each block."""
    draws = random.Random(SEED)
    root = root_key(CacheScheme("bookkeeping", size))
    prompts = [pack_tokens([draws.randrange(30_000) for _ in range(8 * size)]) for _ in range(num_blocks // 8)]
    tracemalloc.start()
    before_bytes, _ = tracemalloc.get_traced_memory()
    pool = make_pool(size, 8 * size, num_blocks * size)
    for number, prompt in enumerate(prompts):
        sequence = pool.allocate(f"request-{number}", prompt, root)
        pool.commit(sequence, sequence.num_tokens)
        pool.release(sequence)
    del sequence
    after_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after_bytes - before_bytes) // num_blocks


def time_bookkeeping(jobs: Sequence[Job], size: int, max_sequence_tokens: int) -> Figures:
    """CPU time of the pool for a request (its keys, blocks and release) and for a generated token."""
    root = root_key(CacheScheme("replay", size))
    pool = make_pool(size, max_sequence_tokens)
    request_us: list[float] = []
    us_per_1000_tokens: list[float] = []
    token_us: list[float] = []
    for job in jobs:
        if len(job.prompt) + len(job.output) > max_sequence_tokens:
            continue
        packed = pack_tokens(job.prompt)
        started_at_s = time.perf_counter()
        sequence = pool.allocate(job.name, packed, root)
        pool.commit(sequence, sequence.num_tokens)
        elapsed_us = (time.perf_counter() - started_at_s) * 1e6
        outputs = [pack_tokens([token]) for token in job.output]
        started_at_s = time.perf_counter()
        for output in outputs:
            pool.append(sequence, output)
            pool.commit(sequence, sequence.num_tokens)
        token_us.append((time.perf_counter() - started_at_s) * 1e6 / len(outputs))
        started_at_s = time.perf_counter()
        pool.release(sequence)
        elapsed_us += (time.perf_counter() - started_at_s) * 1e6
        request_us.append(elapsed_us)
        us_per_1000_tokens.append(elapsed_us * 1000 / len(job.prompt))
    return {
        "cpu_us_per_request": spread(request_us),
        "cpu_us_per_1000_prompt_tokens": spread(us_per_1000_tokens),
        "cpu_us_per_generated_token": spread(token_us, 2),
    }


# sharing


def measure_sharing(workloads: Workloads) -> Figures:
    """At 64 tokens a block.

    `saved_by_sharing`: of the blocks that requests running at once would need without sharing, the share that need not
    be there, over all steps. `saved_against_static`: the same against room for a longest sequence for each.
    """
    size = 64
    figures: Figures = {"max_sequence_tokens": MAX_CONTEXT_TOKENS}
    for name, jobs in (
        ("multi_turn_all_assistants", workloads.multi_turn),
        ("multi_turn_one_assistant", workloads.multi_turn_one_assistant),
        ("template_batch", workloads.template_batches[0]),
    ):
        for num_running in (NUM_RUNNING, 4 * NUM_RUNNING):
            figures[f"{name}_{num_running}_running"] = measure_saving(jobs, size, num_running)
    figures["multi_turn_all_assistants_every_turn_kept"] = measure_saving(
        workloads.multi_turn, size, len(workloads.multi_turn), run_to_end=False, num_tokens=4 * POOL_TOKENS
    )
    figures["template_batches"] = [measure_reuse(jobs) for jobs in workloads.template_batches]
    figures["hashes"] = count_hashes(size)
    return figures


def measure_reuse(jobs: Sequence[Job]) -> Figures:
    """Share of a batch's prompt tokens that were found, by block size."""
    figures: Figures = {"shortest_and_longest_prompt_tokens": [f(len(job.prompt) for job in jobs) for f in (min, max)]}
    for size in BLOCK_SIZES:
        pool = make_pool(size, MAX_CONTEXT_TOKENS)
        replayed = replay(pool, jobs, NUM_RUNNING, lambda seen: None, max_sequence_tokens=MAX_CONTEXT_TOKENS)
        figures[f"{size}_tokens"] = reuse(replayed)
    return figures


def measure_saving(
    jobs: Sequence[Job], size: int, num_running: int, *, run_to_end: bool = True, num_tokens: int = POOL_TOKENS
) -> Figures:
    used = saved = saved_against_static = 0

    def look(seen: PoolStatistics) -> None:
        nonlocal used, saved, saved_against_static
        used += seen.used_bytes
        saved += seen.bytes_saved_by_sharing
        saved_against_static += seen.bytes_saved_against_static

    replayed = replay(
        make_pool(size, MAX_CONTEXT_TOKENS, num_tokens),
        jobs,
        num_running,
        look,
        max_sequence_tokens=MAX_CONTEXT_TOKENS,
        run_to_end=run_to_end,
    )
    return {
        "saved_by_sharing": round(saved / (used + saved), 3),
        "saved_against_static": round(saved_against_static / (used + saved_against_static), 3),
        "reused_prompt_tokens": reuse(replayed),
    }


def count_hashes(size: int) -> Figures:
    """Blocks hashed for a prompt of 2,048 tokens, and then for 128 generated ones."""
    num_hashed = 0

    def counting(packed: bytes, block_size: int, parent: BlockKey) -> list[BlockKey]:
        nonlocal num_hashed
        keys = block_keys(packed, block_size, parent)
        num_hashed += len(keys)
        return keys

    pool = BlockPool(64, size, "adaptive", max_sequence_tokens=4096, hash_chain=counting)
    sequence = pool.allocate("r", pack_tokens(range(2048)), root_key(CacheScheme("hashes", size)))
    num_of_prompt, num_hashed = num_hashed, 0
    for token in range(128):
        pool.append(sequence, pack_tokens([token]))
    return {"prompt_of_2048_tokens": num_of_prompt, "then_128_generated_tokens": num_hashed}


# copies


def measure_copies() -> Figures:
    """A fork that writes into a shared last block, against a sequence of its own that writes into its own.

    `copied_bytes` are for the engine to move; `memory_copy_us` is what that takes in this machine's memory. What
    computing the tokens takes instead, `prefix` tells for SmolLM2.
    """
    size = 64
    figures: Figures = {}
    for num_in_last in (1, 32, 63):
        copied: list[float] = []
        plain: list[float] = []
        for number in range(NUM_REPEATS):
            pool = make_pool(size, 1024, 4096)
            root = root_key(CacheScheme("copies", size))
            parent = pool.allocate("r", pack_tokens(range(256 + num_in_last)), root)
            child = pool.fork(parent)
            token = pack_tokens([number])
            started_at_s = time.perf_counter()
            copy = pool.append(child, token)
            copied.append((time.perf_counter() - started_at_s) * 1e6)
            assert copy is not None
            assert copy.num_tokens == num_in_last
            started_at_s = time.perf_counter()
            assert pool.append(parent, token) is None
            plain.append((time.perf_counter() - started_at_s) * 1e6)
        figures[f"{num_in_last}_tokens"] = {
            "pool_us_with_copy": spread(copied),
            "pool_us_without": spread(plain),
            "copied_bytes": {model: num_in_last * size_bytes for model, size_bytes in MODEL_TO_BYTES_PER_TOKEN.items()},
            "memory_copy_us": {
                model: spread(time_memory_copy(num_in_last * size_bytes))
                for model, size_bytes in MODEL_TO_BYTES_PER_TOKEN.items()
            },
        }
    return figures


def time_memory_copy(num_bytes: int) -> list[float]:
    source, target = bytearray(num_bytes), bytearray(num_bytes)
    durations_us = []
    for _ in range(30):
        started_at_s = time.perf_counter()
        memoryview(target)[:] = source
        durations_us.append((time.perf_counter() - started_at_s) * 1e6)
    return durations_us


SECTIONS = ("blocks", "sharing", "copies", "prefix")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Measures the claims made for block pools.")
    parser.add_argument("--only", choices=SECTIONS, help="measure one of them")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format, for its lengths")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, help="measurements of each prefix length, at least 2")
    parser.add_argument("--json", action="store_true", help="one JSON line in place of an indented one")
    parsed = parser.parse_args(arguments)
    if parsed.pairs < 2:
        parser.error(f"--pairs: {parsed.pairs} is less than 2")
    try:
        workloads = Workloads(parsed.trace)
    except ConfigError as error:
        parser.error(str(error))
    measures: dict[str, Callable[[], Figures]] = {
        "blocks": lambda: measure_blocks(workloads),
        "sharing": lambda: measure_sharing(workloads),
        "copies": measure_copies,
        "prefix": lambda: measure_prefixes(workloads.model_dir, parsed.pairs),
    }
    report: Figures = {"bench": "claims", "command": COMMAND, "seed": SEED}
    for name in SECTIONS if parsed.only is None else (parsed.only,):
        report[name] = measures[name]()
    sys.stdout.write(json.dumps(report, indent=None if parsed.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
