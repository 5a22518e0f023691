"""Workloads that tell eviction rules apart, for any engine: requests one after another, the same ones each time.

All of them report how many prompt tokens came from the cache and how many a cache without bounds would have given.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.types import CacheScheme
from tests.support.engines import Answer, EngineUnderTest, start_vllm

BLOCK_SIZE = 32
RULES = ("lru", "shared_first", "adaptive")
RETURNING_10, RETURNING_5 = "shared prefix, asked by 10 %", "shared prefix, asked by 5 %"
SILENT, PINNED = "shared prefix, not asked", "pinned prefix, not asked"
CHATS = "chats that go on"
WORKLOADS = (RETURNING_10, PINNED, CHATS, SILENT, RETURNING_5)
"""Their names. Those come first that leave the head start of `adaptive` where it begins."""
_CHAT_ANSWER_TOKENS = 4
_TOKEN_IDS = range(5, 250)
"""Plain tokens in both built-in models' vocabularies."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a pool is and what is asked of it, in blocks of `BLOCK_SIZE` tokens where nothing else is said."""

    num_blocks: int
    longest_blocks: int
    prefix_blocks: int
    one_off_blocks: int
    num_turnovers: int
    """How often a flood replaces the whole pool."""
    num_chats: int
    """Chats under way at once; each goes on after all others have."""
    num_turns: int
    """Turns of one chat, each of which adds two blocks."""
    num_rounds: int
    """How often the chats take turns."""


SHORT = Sizes(12, 6, 3, 2, 4, num_chats=3, num_turns=2, num_rounds=12)
"""Short prompts and a small pool, which tell the rules apart as large ones do."""
MODELS = {"tiny": Sizes(64, 32, 10, 8, 8, num_chats=8, num_turns=4, num_rounds=24), "smollm2": SHORT}
"""What is measured with each: of a real model a CPU computes few tokens in a second."""


@dataclass(slots=True)
class Tally:
    """What a workload's measured requests got."""

    cached_tokens: int = 0
    possible_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    is_same_answer: bool = True
    """Whether a prompt that was asked twice was answered alike."""

    def count(self, answer: Answer, possible_tokens: int) -> None:
        """Add what one request got of what it could have got."""
        self.cached_tokens += answer.cached_tokens
        self.possible_tokens += possible_tokens
        self.ttfts_s.append(answer.ttft_s)


class Workloads:
    """The workloads on one engine of these sizes. One seed makes them all the same each time."""

    def __init__(self, sizes: Sizes, engine: EngineUnderTest, seed: int = 0) -> None:
        self._sizes = sizes
        self._engine = engine
        self._rng = random.Random(seed)

    async def run(self, names: Sequence[str]) -> dict[str, Tally]:
        """Those of these names one after another, each with an empty cache."""
        workloads = {
            RETURNING_10: lambda: self.returning_prefix(10),
            RETURNING_5: lambda: self.returning_prefix(20),
            PINNED: self.pinned_prefix,
            SILENT: self.silent_prefix,
            CHATS: self.chats,
        }
        tallies: dict[str, Tally] = {}
        for name in names:
            await self._engine.engine.reset_cache()
            tallies[name] = await workloads[name]()
        return tallies

    async def silent_prefix(self) -> Tally:
        """A prompt that several requests share is asked for again after a flood, and by nobody meanwhile."""
        prefix, question = self._prefix(), self._tokens(20)
        before = await self._engine.ask(prefix + question)
        for _ in range(2):
            await self._engine.ask(prefix + self._tokens(20), 1)
        await self._flood()
        return await self._ask_again(prefix + question, before)

    async def pinned_prefix(self) -> Tally:
        """A prompt that is pinned, and used by nobody, is asked for after a flood."""
        prefix, question = self._prefix(), self._tokens(20)
        before = await self._engine.ask(prefix + question)
        await self._engine.engine.reset_cache()  # or the pin would be a second use, and the prompt shared
        await self._engine.engine.pin("prefix", prefix)
        await self._flood()
        tally = await self._ask_again(prefix + question, before)
        await self._engine.engine.unpin("prefix")
        return tally

    async def returning_prefix(self, num_requests_apart: int) -> Tally:
        """One in so many requests of a flood asks a prompt that all of them share. The second half is measured."""
        tally, prefix = Tally(), self._prefix()
        for _ in range(2):
            await self._engine.ask(prefix + self._tokens(20), 1)
        num_requests = 2 * self._sizes.num_turnovers * self._sizes.num_blocks // self._sizes.one_off_blocks
        num_requests -= num_requests % (2 * num_requests_apart)
        for number in range(num_requests):
            if number % num_requests_apart:
                await self._one_off()
                continue
            answer = await self._engine.ask(prefix + self._tokens(20), 1)
            if number >= num_requests // 2:
                tally.count(answer, len(prefix))
        return tally

    async def chats(self) -> Tally:
        """Chats take turns, each prompt the whole chat so far; an ended one makes room for a new one.

        Measured from when the pool has been filled once.
        """
        sizes, tally = self._sizes, Tally()
        histories: list[list[int]] = [[] for _ in range(sizes.num_chats)]
        turns_left = [1 + chat % sizes.num_turns for chat in range(sizes.num_chats)]  # so that they end at other times
        num_computed_tokens = 0
        for chat in [*range(sizes.num_chats)] * sizes.num_rounds:
            history = histories[chat]
            if turns_left[chat] == 0:
                turns_left[chat] = sizes.num_turns
                history.clear()
            turns_left[chat] -= 1
            # The answer's last token has not been computed on, and is not in the cache.
            possible_tokens = max(0, len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE
            history += self._tokens(2 * BLOCK_SIZE - _CHAT_ANSWER_TOKENS)
            answer = await self._engine.ask(history, _CHAT_ANSWER_TOKENS)
            if num_computed_tokens >= sizes.num_blocks * BLOCK_SIZE:
                tally.count(answer, possible_tokens)
            num_computed_tokens += len(history) - answer.cached_tokens
            history += answer.token_ids
        return tally

    async def _ask_again(self, token_ids: list[int], before: Answer) -> Tally:
        answer = await self._engine.ask(token_ids)
        tally = Tally(is_same_answer=answer.token_ids == before.token_ids)
        tally.count(answer, self._sizes.prefix_blocks * BLOCK_SIZE)
        return tally

    async def _flood(self) -> None:
        for _ in range(self._sizes.num_turnovers * self._sizes.num_blocks // self._sizes.one_off_blocks):
            await self._one_off()

    async def _one_off(self) -> None:
        await self._engine.ask(self._tokens(self._sizes.one_off_blocks * BLOCK_SIZE), 1)

    def _prefix(self) -> list[int]:
        return self._tokens(self._sizes.prefix_blocks * BLOCK_SIZE)

    def _tokens(self, num_tokens: int) -> list[int]:
        return self._rng.choices(_TOKEN_IDS, k=num_tokens)


async def run_workloads(model: str, sizes: Sizes, rule: str, names: Sequence[str], cache_dir: Path) -> dict[str, Tally]:
    """Workloads on one new engine, in float32; by name."""
    from worker.engines.demo_model import prepare_model

    engine = await start_vllm(
        cache_dir,
        rule,
        model_dir=await asyncio.to_thread(prepare_model, model, cache_dir),
        scheme=CacheScheme(model, BLOCK_SIZE),
        max_model_len=sizes.longest_blocks * BLOCK_SIZE,
        kv_cache_blocks=sizes.num_blocks,
    )
    assert engine.info is not None
    assert engine.info.eviction == rule
    try:
        return await Workloads(sizes, engine).run(names)
    finally:
        await engine.engine.close()
