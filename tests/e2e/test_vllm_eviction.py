"""The eviction rules in real engines: what survives a flood of prompts that are used once, and what of chats does."""

from __future__ import annotations

import random
from functools import reduce
from operator import xor

import pytest
import pytest_asyncio

from shared.config import Settings
from tests.support.engines import BLOCK_SIZE, EngineUnderTest
from tests.support.eviction_workloads import (
    CHATS,
    MODELS,
    PINNED,
    RETURNING_10,
    RULES,
    SILENT,
    Tally,
    run_workloads,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

NUM_SHARED_TOKENS = 10 * BLOCK_SIZE


def tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(5, 250) for _ in range(num_tokens)]


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=list(MODELS))
async def rule_to_tallies(request: pytest.FixtureRequest) -> dict[str, dict[str, Tally]]:
    """What the workloads got from a model under each rule, from one engine after another."""
    cache_dir = Settings().model_cache_dir
    return {rule: await run_workloads(request.param, rule, cache_dir) for rule in RULES}


async def test_a_shared_prompt_that_nobody_asks_for_survives_a_flood_under_shared_first_alone(
    rule_to_tallies: dict[str, dict[str, Tally]],
):
    strict, plain = rule_to_tallies["shared_first"][SILENT], rule_to_tallies["lru"][SILENT]
    assert (strict.cached_tokens, plain.cached_tokens) == (strict.possible_tokens, 0)
    assert all(tallies[SILENT].is_same_answer for tallies in rule_to_tallies.values())


async def test_a_shared_prompt_that_returns_in_a_flood_survives_under_adaptive_too(
    rule_to_tallies: dict[str, dict[str, Tally]],
):
    adaptive, strict, plain = (rule_to_tallies[rule][RETURNING_10] for rule in ("adaptive", "shared_first", "lru"))
    assert (strict.cached_tokens, plain.cached_tokens) == (strict.possible_tokens, 0)
    assert adaptive.cached_tokens >= 0.9 * strict.cached_tokens


async def test_a_pinned_prompt_survives_a_flood_under_every_rule(rule_to_tallies: dict[str, dict[str, Tally]]):
    pinned = [rule_to_tallies[rule][PINNED] for rule in RULES]
    assert [tally.cached_tokens for tally in pinned] == [tally.possible_tokens for tally in pinned]
    assert all(tally.is_same_answer for tally in pinned)


async def test_chats_that_go_on_keep_their_histories_under_adaptive_as_under_lru(
    rule_to_tallies: dict[str, dict[str, Tally]],
):
    adaptive, plain, strict = (rule_to_tallies[rule][CHATS] for rule in ("adaptive", "lru", "shared_first"))
    assert plain.cached_tokens == plain.possible_tokens == adaptive.possible_tokens
    assert adaptive.cached_tokens >= 0.97 * plain.cached_tokens
    # Ended chats' blocks are shared, and crowd out those of the ones that go on.
    assert strict.cached_tokens < 0.8 * plain.cached_tokens


async def test_a_digest_of_the_pool_is_that_of_the_resident_keys(vllm_engine: EngineUnderTest):
    if vllm_engine.info is not None and vllm_engine.info.eviction == "stock":
        pytest.skip("a stock pool has no keys of ours")
    await vllm_engine.ask(tokens(random.Random(9), NUM_SHARED_TOKENS))
    resident = await vllm_engine.engine.resident()
    digest = await vllm_engine.engine.pool_digest()
    assert digest == (len(resident), reduce(xor, (int.from_bytes(key, "big") for key in resident)).to_bytes(16, "big"))


async def test_answers_vary_and_depend_on_the_first_block(vllm_engine: EngineUnderTest):
    rng = random.Random(8)
    token_ids = tokens(rng, NUM_SHARED_TOKENS)
    answer = (await vllm_engine.ask(token_ids, max_tokens=96)).token_ids
    assert len(set(answer)) >= 16
    other = tokens(rng, BLOCK_SIZE) + token_ids[BLOCK_SIZE:]
    assert (await vllm_engine.ask(other, max_tokens=96)).token_ids != answer
