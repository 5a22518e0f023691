"""What every engine must do. Each implementation runs the same cases through `engine`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from shared.errors import ContextTooLong, InvalidRequest, PinRefused, UnknownPin
from shared.hashing import block_keys, pack_tokens, root_key
from shared.messages import TokenLogprobs
from shared.types import BlockKey, FinishReason, Reading, ToolChoice
from tests.support.engines import BLOCK_SIZE, CONTEXT_TOKENS, NUM_BLOCKS, SCHEME, EngineUnderTest, assert_empty
from tests.support.transport import until
from worker.auditor import digest_of
from worker.engines.base import EngineRequest, PinnedPrefix

TOOLS = '[{"type": "function", "function": {"name": "f"}}]'
BUDGET_BLOCKS = NUM_BLOCKS - CONTEXT_TOKENS // BLOCK_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def engine(any_engine: EngineUnderTest) -> EngineUnderTest:
    return any_engine


@pytest_asyncio.fixture(loop_scope="session")
async def pinning(engine: EngineUnderTest) -> AsyncIterator[EngineUnderTest]:
    """An engine whose pool can keep pins and keeps none, before and after."""
    if engine.info is not None and engine.info.pin_budget_blocks == 0:
        pytest.skip("a stock pool keeps no pins")
    assert await engine.engine.pins() == []
    yield engine
    for pin in await engine.engine.pins():
        await engine.engine.unpin(pin.name)
    await assert_empty(engine)


def prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(num_tokens)]


def _num_live(engine: EngineUnderTest) -> int:
    """Requests that the engine has been handed and has not been told to forget."""
    stats = engine.engine.stats()
    return max(len(engine.engine._live), stats.num_running + stats.num_waiting)


def keys(token_ids: list[int], salt: str = "") -> set[BlockKey]:
    return set(block_keys(pack_tokens(token_ids), BLOCK_SIZE, root_key(SCHEME, salt=salt)))


async def test_info_names_what_was_asked(engine: EngineUnderTest):
    assert engine.info is not None
    assert engine.info.name.startswith(("vllm", "simulator"))
    assert (engine.info.num_blocks, engine.info.max_model_len_tokens) == (NUM_BLOCKS, CONTEXT_TOKENS)
    assert (engine.info.max_num_seqs, engine.info.eviction) == (8, engine.eviction)
    assert engine.info.step_budget_tokens > 0
    # Half the pool, which is also what one longest request leaves.
    assert engine.info.pin_budget_blocks == (BUDGET_BLOCKS if engine.info.eviction != "stock" else 0)


async def test_deltas_then_a_finish(engine: EngineUnderTest):
    answer = await engine.ask(prompt(1, 50), max_tokens=40, priority=3)
    assert (len(answer.token_ids), answer.finish) == (40, FinishReason.LENGTH)
    assert answer.num_deltas > 1


async def test_a_stop_token_ends_the_answer(engine: EngineUnderTest):
    free_running = await engine.ask(prompt(2, 50), max_tokens=20)
    stop = free_running.token_ids[7]
    request = engine.request(prompt(2, 50), 20)
    answer = await engine.finish(replace(request, sampling=replace(request.sampling, stop_token_ids=(stop,))))
    assert answer.finish is FinishReason.STOP
    assert answer.token_ids[-1] == stop
    assert answer.token_ids == free_running.token_ids[: len(answer.token_ids)]


async def test_equal_prompts_are_served_from_the_cache_with_the_same_answer(engine: EngineUnderTest):
    token_ids = prompt(3, 10 * BLOCK_SIZE + 5)
    first = await engine.ask(token_ids, max_tokens=48)
    second = await engine.ask(token_ids, max_tokens=48)
    assert (first.cached_tokens, second.cached_tokens) == (0, 10 * BLOCK_SIZE)
    assert first.token_ids == second.token_ids


async def test_a_prompt_that_ends_on_a_block_boundary_computes_its_last_block(engine: EngineUnderTest):
    token_ids = prompt(4, 4 * BLOCK_SIZE)
    await engine.ask(token_ids)
    assert (await engine.ask(token_ids)).cached_tokens == 3 * BLOCK_SIZE


async def test_salts_keep_tenants_apart(engine: EngineUnderTest):
    token_ids = prompt(5, 3 * BLOCK_SIZE + 1)
    await engine.ask(token_ids, salt="a")
    assert (await engine.ask(token_ids, salt="b")).cached_tokens == 0
    assert (await engine.ask(token_ids, salt="a")).cached_tokens == 3 * BLOCK_SIZE
    resident = await engine.engine.resident()
    assert keys(token_ids, "a") | keys(token_ids, "b") <= resident
    assert not keys(token_ids) & resident


async def test_resident_is_what_was_told_and_what_a_router_computes(engine: EngineUnderTest):
    token_ids = prompt(6, 5 * BLOCK_SIZE)
    answer = await engine.ask(token_ids, max_tokens=2 * BLOCK_SIZE)
    for seed in range(30):  # floods the pool
        await engine.ask(prompt(600 + seed, 6 * BLOCK_SIZE), max_tokens=1)
    resident = await engine.engine.resident()
    assert engine.told == resident
    assert NUM_BLOCKS * 3 // 4 < len(resident) <= NUM_BLOCKS  # less second copies and unfinished blocks
    await engine.ask(token_ids, max_tokens=2 * BLOCK_SIZE)
    # The answer's last token is never computed on, so its block is full only if another token follows.
    computed = (token_ids + answer.token_ids)[:-1]
    assert keys(computed) <= await engine.engine.resident()
    assert engine.info is not None
    assert engine.info.is_cache_aware


async def test_a_look_at_the_pool_finds_what_is_resident(engine: EngineUnderTest):
    token_ids = prompt(31, 5 * BLOCK_SIZE + 1)
    await engine.ask(token_ids)
    found = await engine.engine.look()
    assert keys(token_ids) <= found
    assert found == await engine.engine.resident()
    digest = await engine.engine.pool_digest()
    assert digest is None or digest == digest_of(found)


async def test_reset_drops_all_that_nobody_holds(engine: EngineUnderTest):
    token_ids = prompt(7, 4 * BLOCK_SIZE + 1)
    await engine.ask(token_ids)
    await engine.engine.reset_cache()
    assert await engine.engine.resident() == set() == engine.told
    assert (await engine.ask(token_ids)).cached_tokens == 0
    assert keys(token_ids) <= await engine.engine.resident()


async def test_cancel_ends_with_abort_and_frees(engine: EngineUnderTest):
    request = engine.request(prompt(8, 100), max_tokens=900)
    finish, num_deltas = None, 0
    async for delta in engine.engine.generate(request):
        finish = delta.finish
        num_deltas += 1
        if num_deltas == 1:
            await engine.engine.cancel(request.request)
    assert finish is FinishReason.ABORT
    await assert_empty(engine)


async def test_cancel_of_an_unknown_request_is_no_error(engine: EngineUnderTest):
    await engine.engine.cancel("never heard of")


async def test_closing_the_stream_early_frees(engine: EngineUnderTest):
    async with aclosing(engine.engine.generate(engine.request(prompt(9, 100), max_tokens=900))) as deltas:
        async for _ in deltas:
            break
    await assert_empty(engine)


async def test_cancelling_the_reader_frees(engine: EngineUnderTest):
    started = asyncio.Event()

    async def read() -> None:
        async for _ in engine.engine.generate(engine.request(prompt(10, 100), max_tokens=900)):
            started.set()

    task = asyncio.create_task(read())
    async with asyncio.timeout(120):
        await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_empty(engine)


async def test_stats_count_what_runs_and_what_waits(engine: EngineUnderTest):
    max_num_seqs = engine.info.max_num_seqs if engine.info else 0
    # Long enough that the first is not over before the last has come, and as long as the pool lets eight of them be.
    requests = [engine.request(prompt(1100 + i, 10), max_tokens=200) for i in range(max_num_seqs + 3)]
    seen: list[tuple[int, int]] = []

    async def read(request: EngineRequest) -> None:
        async for _ in engine.engine.generate(request):
            stats = engine.engine.stats()
            seen.append((stats.num_running, stats.num_waiting))

    await asyncio.gather(*(read(request) for request in requests))
    assert max(running for running, _ in seen) == max_num_seqs
    assert max(waiting for _, waiting in seen) >= 3
    assert all(running + waiting <= len(requests) for running, waiting in seen)
    fit = engine.engine.stats().step_fit
    assert fit.step_s + fit.prefill_s_per_token + fit.decode_s_per_seq > 0
    assert min(fit.step_s, fit.prefill_s_per_token, fit.decode_s_per_seq) >= 0
    await assert_empty(engine)


async def test_requests_that_can_never_be_served_are_refused(engine: EngineUnderTest):
    with pytest.raises(ContextTooLong, match="1024 tokens leaves no room"):
        await engine.ask(prompt(12, CONTEXT_TOKENS))
    for token_ids in ([], [5, -1], [5, 1_000_000]):
        with pytest.raises(InvalidRequest):
            await engine.ask(token_ids)
    request = engine.request(prompt(12, 10))
    with pytest.raises(InvalidRequest):
        await engine.finish(replace(request, sampling=replace(request.sampling, top_p=7.0)))
    with pytest.raises(InvalidRequest, match="no adapter 'poet'"):
        await engine.ask(prompt(12, 10), adapter="poet")
    assert len((await engine.ask(prompt(12, CONTEXT_TOKENS - 1), max_tokens=5)).token_ids) == 1


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"logprobs": 2}, "logprobs"),
        ({"json_schema": '{"type":"banana"}'}, "response_format"),
        ({"reading": Reading(TOOLS, ToolChoice.AUTO)}, "tools"),
        ({"reading": Reading()}, "messages"),
    ],
)
async def test_what_more_is_asked_than_tokens_is_done_or_refused_by_name(
    engine: EngineUnderTest, more: dict[str, Any], param: str
):
    plain = await engine.ask(prompt(13, 40), max_tokens=4)
    request = engine.request(prompt(13, 40), max_tokens=4)
    request = replace(request, sampling=replace(request.sampling, **more))
    logprobs: list[TokenLogprobs] = []
    refused = None
    try:
        async with aclosing(engine.engine.generate(request)) as deltas:
            async for delta in deltas:
                logprobs += delta.logprobs
    except InvalidRequest as error:
        refused = error.param
    # One thing alone can be done without a grammar's library and without parsers.
    done = [2] * 4 if param == "logprobs" and refused is None else []
    assert ([len(one.top_token_ids) for one in logprobs], refused) == (done, None if done else param)
    assert (await engine.ask(prompt(13, 40), max_tokens=4)).token_ids == plain.token_ids
    await assert_empty(engine)


async def test_answers_do_not_depend_on_what_runs_beside_them(engine: EngineUnderTest):
    prompts = [prompt(1300 + i, 60 + 7 * i) for i in range(6)]
    alone = [(await engine.ask(token_ids, max_tokens=32)).token_ids for token_ids in prompts]
    await engine.engine.reset_cache()
    together = await asyncio.gather(*(engine.ask(token_ids, max_tokens=32) for token_ids in prompts))
    assert [answer.token_ids for answer in together] == alone


async def test_a_pinned_prefix_outlives_a_flood_until_it_is_unpinned(pinning: EngineUnderTest):
    engine, token_ids = pinning, prompt(40, 3 * BLOCK_SIZE + 5)
    before = await engine.ask(token_ids)
    pinned = PinnedPrefix("system", 3, 3 * BLOCK_SIZE)
    assert await engine.engine.pin("system", token_ids) == pinned
    assert await engine.engine.pins() == [pinned]
    await engine.flood(2 * NUM_BLOCKS, seed=40)
    assert engine.engine.stats().kv_used_blocks == 3
    assert (await engine.engine.pool_statistics())["num_pinned"] == 3
    await engine.engine.reset_cache()
    assert await engine.engine.resident() == keys(token_ids)
    after = await engine.ask(token_ids)
    assert (after.cached_tokens, after.token_ids) == (3 * BLOCK_SIZE, before.token_ids)
    await engine.engine.unpin("system")
    assert await engine.engine.pins() == []
    await engine.engine.reset_cache()
    assert await engine.engine.resident() == set() == engine.told


async def test_a_pin_keeps_what_its_salt_keeps_apart(pinning: EngineUnderTest):
    engine, token_ids = pinning, prompt(41, 2 * BLOCK_SIZE)
    await engine.engine.pin("tenant", token_ids, salt="a")
    await engine.engine.reset_cache()
    assert await engine.engine.resident() == keys(token_ids, "a")


async def test_a_pin_over_budget_is_refused_before_anything_is_computed(pinning: EngineUnderTest):
    engine, first, second = pinning, prompt(42, 20 * BLOCK_SIZE), prompt(43, 13 * BLOCK_SIZE)
    await engine.engine.pin("a", first)
    refusal = "pin 'b': its 13 blocks would make 33 pinned blocks, the budget is 32, 20 are pinned under other names"
    with pytest.raises(PinRefused) as refused:
        await engine.engine.pin("b", second)
    assert str(refused.value) == refusal
    assert not keys(second) & await engine.engine.resident()
    # What is pinned already costs nothing more, and a pin of the same name makes room for the new one.
    await engine.engine.pin("b", first[: 19 * BLOCK_SIZE] + second[: 12 * BLOCK_SIZE])
    await engine.engine.unpin("b")
    await engine.engine.pin("a", second)
    assert await engine.engine.pins() == [PinnedPrefix("a", 13, 13 * BLOCK_SIZE)]


async def test_pins_computed_at_once_stay_within_the_budget(pinning: EngineUnderTest):
    engine = pinning
    attempts = [engine.engine.pin(f"{number}", prompt(440 + number, 20 * BLOCK_SIZE)) for number in range(3)]
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    (pinned,) = (outcome for outcome in outcomes if not isinstance(outcome, BaseException))
    assert await engine.engine.pins() == [pinned]
    refusals = [str(outcome) for outcome in outcomes if isinstance(outcome, PinRefused)]
    assert len(refusals) == 2
    assert all("would make 40 pinned blocks, the budget is 32, 20 are" in refusal for refusal in refusals)


async def test_what_cannot_be_pinned_is_refused_and_leaves_the_former_pin(pinning: EngineUnderTest):
    engine = pinning
    pinned = await engine.engine.pin("a", prompt(45, BLOCK_SIZE))
    for token_ids, error, message in (
        (prompt(45, BLOCK_SIZE - 1), PinRefused, "pin 'a': 31 tokens do not fill a block of 32"),
        (prompt(45, CONTEXT_TOKENS), ContextTooLong, "1024 tokens leaves no room"),
        ([5] * BLOCK_SIZE + [1_000_000], InvalidRequest, "1000000"),
        ([5] * BLOCK_SIZE + [1 << 40], InvalidRequest, "pin 'a': "),
    ):
        with pytest.raises(error, match=message):
            await engine.engine.pin("a", token_ids)
    with pytest.raises(InvalidRequest, match="no adapter 'poet'"):
        await engine.engine.pin("a", prompt(45, BLOCK_SIZE), adapter="poet")
    with pytest.raises(UnknownPin, match="no pin 'b'; pins are: a"):
        await engine.engine.unpin("b")
    assert await engine.engine.pins() == [pinned]


async def test_a_cancelled_pin_leaves_nothing_behind_but_what_the_engine_tells_of(pinning: EngineUnderTest):
    engine = pinning
    former = await engine.engine.pin("a", prompt(45, BLOCK_SIZE))
    for num_steps in range(12):
        long = prompt(450 + num_steps, 20 * BLOCK_SIZE)
        pin = asyncio.create_task(engine.engine.pin("a", long))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        if num_steps == 11:
            await until(lambda: _num_live(engine) > 0 or pin.done())  # noqa: B023
        pin.cancel()
        await asyncio.wait({pin})
        (kept,) = await engine.engine.pins()
        # One that the engine had made before it was told stands in place of the former one.
        made = PinnedPrefix("a", 20, 20 * BLOCK_SIZE)
        assert kept == made or (kept == former and pin.cancelled())
        assert num_steps or not keys(long) & await engine.engine.resident(), "it had not been handed over"
        former = kept
        assert _num_live(engine) == 0
    await engine.engine.unpin("a")
    await assert_empty(engine)


async def test_longest_requests_are_served_beside_a_full_budget_of_pins(pinning: EngineUnderTest):
    engine = pinning
    # What pins leave holds the first two when they start and not when they end; the third takes all of it.
    requests = [(prompt(470, 496), 64), (prompt(471, 496), 64), (prompt(472, CONTEXT_TOKENS - 1), 1)]
    alone = [(await engine.ask(token_ids, max_tokens)).token_ids for token_ids, max_tokens in requests]
    for name, num_blocks in (("a", 20), ("b", 12)):
        await engine.engine.pin(name, prompt(480 + num_blocks, num_blocks * BLOCK_SIZE))
    assert (await engine.engine.pool_statistics())["num_pinned"] == BUDGET_BLOCKS
    loads: list[tuple[int, int]] = []

    async def read(token_ids: list[int], max_tokens: int) -> list[int]:
        answer: list[int] = []
        async for delta in engine.engine.generate(engine.request(token_ids, max_tokens)):
            answer += delta.token_ids
            loads.append((engine.engine.stats().num_running, engine.engine.stats().num_waiting))
        return answer

    async with asyncio.timeout(120):
        together = await asyncio.gather(*(read(*request) for request in requests))
    assert (1, 2) in loads[loads.index((2, 1)) :], "none was preempted"
    assert together == alone
    assert [pin.num_blocks for pin in await engine.engine.pins()] == [20, 12]
    assert engine.engine.stats().kv_used_blocks == BUDGET_BLOCKS
