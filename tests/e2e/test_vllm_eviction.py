"""The eviction rules in real engines: what survives a flood of prompts that are used once, and what of chats does.

With the tiny model and a small pool; `tests.bench.bench_eviction_vllm` measures the same in a larger one, and with
SmolLM2.
"""

from __future__ import annotations

import random

import pytest

from shared.config import Settings
from tests.support.engines import BLOCK_SIZE, ON_VLLM, EngineUnderTest
from tests.support.eviction_workloads import (
    CHATS,
    PINNED,
    RETURNING_5,
    RETURNING_10,
    RULES,
    SHORT,
    SILENT,
    WORKLOADS,
    Tally,
    run_workloads,
)
from worker.auditor import digest_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.asyncio(loop_scope="session"),
]

NUM_SHARED_TOKENS = 10 * BLOCK_SIZE


def tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(5, 250) for _ in range(num_tokens)]


class Tallies:
    """What the workloads got under each rule, from one engine after another and each once."""

    def __init__(self) -> None:
        self._tallies: dict[str, dict[str, Tally]] = {}

    async def get(self, rule: str, workload: str) -> Tally:
        """Takes a minute on a busy machine where nobody has asked for this rule before."""
        if rule not in self._tallies:
            names = [name for name in WORKLOADS if name != RETURNING_5]
            self._tallies[rule] = await run_workloads("tiny", SHORT, rule, names, Settings().model_cache_dir)
        return self._tallies[rule][workload]


@pytest.fixture(scope="session")
def tallies() -> Tallies:
    return Tallies()


@pytest.mark.parametrize("rule", RULES)
async def test_a_pinned_prompt_survives_a_flood_under_every_rule(tallies: Tallies, rule: str):
    pinned = await tallies.get(rule, PINNED)
    assert pinned.cached_tokens == pinned.possible_tokens
    assert pinned.is_same_answer


async def test_a_shared_prompt_that_nobody_asks_for_survives_a_flood_where_the_rule_says_so(tallies: Tallies):
    strict, plain, adaptive = [await tallies.get(rule, SILENT) for rule in ("shared_first", "lru", "adaptive")]
    assert (strict.cached_tokens, plain.cached_tokens) == (strict.possible_tokens, 0)
    assert strict.is_same_answer
    assert plain.is_same_answer
    assert adaptive.is_same_answer  # found or not, which is for what it has learnt to say


async def test_a_shared_prompt_that_returns_in_a_flood_survives_under_adaptive_too(tallies: Tallies):
    strict, plain, adaptive = [await tallies.get(rule, RETURNING_10) for rule in ("shared_first", "lru", "adaptive")]
    assert (strict.cached_tokens, plain.cached_tokens) == (strict.possible_tokens, 0)
    assert adaptive.cached_tokens >= 0.9 * strict.cached_tokens


async def test_chats_that_go_on_keep_their_histories_under_adaptive_as_under_lru(tallies: Tallies):
    strict, plain, adaptive = [await tallies.get(rule, CHATS) for rule in ("shared_first", "lru", "adaptive")]
    assert plain.cached_tokens == plain.possible_tokens
    assert adaptive.cached_tokens >= 0.97 * plain.cached_tokens
    # Ended chats leave shared blocks, which crowd out those of the chats that go on.
    assert strict.cached_tokens < 0.8 * plain.cached_tokens


@ON_VLLM
async def test_a_digest_of_the_pool_is_that_of_the_resident_keys(any_engine: EngineUnderTest):
    if any_engine.info is not None and any_engine.info.eviction == "stock":
        pytest.skip("a stock pool has no keys of ours")
    await any_engine.ask(tokens(random.Random(9), NUM_SHARED_TOKENS))
    assert await any_engine.engine.pool_digest() == digest_of(await any_engine.engine.resident())


@ON_VLLM
async def test_answers_vary_and_depend_on_the_first_block(any_engine: EngineUnderTest):
    rng = random.Random(8)
    token_ids = tokens(rng, NUM_SHARED_TOKENS)
    answer = (await any_engine.ask(token_ids, max_tokens=96)).token_ids
    assert len(set(answer)) >= 16
    other = tokens(rng, BLOCK_SIZE) + token_ids[BLOCK_SIZE:]
    assert (await any_engine.ask(other, max_tokens=96)).token_ids != answer
