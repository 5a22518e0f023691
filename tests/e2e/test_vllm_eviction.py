"""The eviction rules in a real engine: who survives a flood of prompts that are used once."""

from __future__ import annotations

import random

import pytest

from tests.support.engines import BLOCK_SIZE, NUM_BLOCKS, EngineUnderTest
from worker.auditor import digest_of
from worker.free_list import BlockClass

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

NUM_SHARED_TOKENS = 10 * BLOCK_SIZE


def tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(5, 250) for _ in range(num_tokens)]


async def test_a_shared_system_prompt_survives_a_flood_only_where_the_rule_says_so(vllm_engine: EngineUnderTest):
    engine = vllm_engine
    assert engine.info is not None
    await engine.engine.reset_cache()
    rng = random.Random(7)
    system_prompt = tokens(rng, NUM_SHARED_TOKENS)
    question = tokens(rng, 20)

    before = await engine.ask(system_prompt + question, max_tokens=64)
    for _ in range(2):
        assert (await engine.ask(system_prompt + tokens(rng, 20))).cached_tokens == NUM_SHARED_TOKENS
    num_flood = 3 * NUM_BLOCKS // 10
    for _ in range(num_flood):
        await engine.ask(tokens(rng, NUM_SHARED_TOKENS - 10), max_tokens=1)
    after = await engine.ask(system_prompt + question, max_tokens=64)

    # Nobody asks for the prompt meanwhile, so `adaptive` keeps its first head start, which is shorter than the flood.
    survives = engine.info.eviction == "shared_first"
    assert after.cached_tokens == (NUM_SHARED_TOKENS if survives else 0)
    assert after.token_ids == before.token_ids
    if survives:
        statistics = await engine.engine.pool_statistics()
        assert statistics["num_evicted"][BlockClass.SHARED] == 0
        assert statistics["num_evicted"][BlockClass.PRIVATE] > NUM_BLOCKS


async def test_a_digest_of_the_pool_is_that_of_the_resident_keys(vllm_engine: EngineUnderTest):
    if vllm_engine.info is not None and vllm_engine.info.eviction == "stock":
        pytest.skip("a stock pool has no keys of ours")
    await vllm_engine.ask(tokens(random.Random(9), NUM_SHARED_TOKENS))
    assert await vllm_engine.engine.pool_digest() == digest_of(await vllm_engine.engine.resident())


async def test_answers_vary_and_depend_on_the_first_block(vllm_engine: EngineUnderTest):
    rng = random.Random(8)
    token_ids = tokens(rng, NUM_SHARED_TOKENS)
    answer = (await vllm_engine.ask(token_ids, max_tokens=96)).token_ids
    assert len(set(answer)) >= 16
    other = tokens(rng, BLOCK_SIZE) + token_ids[BLOCK_SIZE:]
    assert (await vllm_engine.ask(other, max_tokens=96)).token_ids != answer
