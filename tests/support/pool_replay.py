"""Runs a workload through a block pool as an engine would, a few requests at once, and looks at it after each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.errors import OutOfBlocks
from shared.hashing import pack_tokens, root_key
from shared.types import CacheScheme
from tests.support.text_workloads import Job
from worker.blocks import BlockPool
from worker.sequences import PoolStatistics
from worker.sequences import Sequence as Held

OnStep = Callable[[PoolStatistics], None]


@dataclass(slots=True)
class _Running:
    sequence: Held
    job: Job
    num_generated: int = 0


@dataclass(slots=True)
class Replayed:
    """What came of a replay."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    refused: list[str] = field(default_factory=list)
    """Names of jobs that are longer than the pool's longest sequence."""


def replay(
    pool: BlockPool,
    jobs: Sequence[Job],
    num_running: int,
    on_step: OnStep,
    *,
    max_sequence_tokens: int,
    run_to_end: bool = True,
) -> Replayed:
    """Each step starts what there is room for, at most `num_running` at once, and gives every request one token.

    Where `run_to_end` is not set, nothing ends: all that fits is held at once, as when every turn keeps its blocks.
    """
    root = root_key(CacheScheme("replay", pool.block_size_tokens))
    waiting = deque(jobs)
    running: list[_Running] = []
    replayed = Replayed()
    while waiting or running:
        while waiting and len(running) < num_running:
            job = waiting[0]
            if len(job.prompt) + len(job.output) > max_sequence_tokens:
                replayed.refused.append(waiting.popleft().name)
                continue
            try:
                sequence = pool.allocate(job.name, pack_tokens(job.prompt), root)
            except OutOfBlocks:
                if not running:
                    raise
                break
            pool.commit(sequence, sequence.num_tokens)
            waiting.popleft()
            running.append(_Running(sequence, job))
            replayed.num_requests += 1
            replayed.num_prompt_tokens += sequence.num_tokens
            replayed.num_cached_tokens += sequence.num_cached_tokens
        on_step(pool.statistics())
        if not run_to_end:
            break
        running = [each for each in running if _advance(pool, each)]
    return replayed


def _advance(pool: BlockPool, running: _Running) -> bool:
    """One more token, or the end. A request that finds no room for it ends early, as if its output were shorter."""
    output, number = running.job.output, running.num_generated
    if number < len(output):
        try:
            pool.append(running.sequence, pack_tokens([output[number]]))
        except OutOfBlocks:
            pool.release(running.sequence)
            return False
        pool.commit(running.sequence, running.sequence.num_tokens)
        running.num_generated += 1
        return True
    pool.release(running.sequence)
    return False
