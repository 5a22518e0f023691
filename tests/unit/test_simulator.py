from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError, EngineError
from shared.hashing import pack_tokens
from shared.types import BlockKey, CacheScheme, FinishReason, RequestId, Sampling
from shared.vtime import run_virtual
from worker.engines.base import BlockChange, EngineDelta, EngineRequest
from worker.engines.profiles import LatencyProfile
from worker.engines.simulator import SimulatorEngine
from worker.engines.simulator_options import SimulatorOptions

BLOCK_SIZE = 16
PROFILE = LatencyProfile(
    "exact",
    step_s=1.0,
    prefill_s_per_token=0.01,
    prefill_s_per_token_context=0.0001,
    decode_s_per_seq=0.1,
    decode_s_per_context_token=0.001,
)
OPTIONS = SimulatorOptions(
    PROFILE,
    CacheScheme("simulated", BLOCK_SIZE),
    num_blocks=64,
    max_model_len_tokens=1024,
    max_num_seqs=8,
    step_budget_tokens=64,
    vocabulary_size=1000,
)
MERGED = 1 << 30


@dataclass(slots=True)
class Told:
    """What one request got, and when."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """Of each delta."""
    finish: FinishReason | None = None
    cached_tokens: int | None = None


class Bench:
    """A simulated engine with a strict owner."""

    def __init__(self, **more: Any) -> None:
        self.resident: set[BlockKey] = set()
        self.deaths: list[str] = []
        self.engine = SimulatorEngine(replace(OPTIONS, **more), self.on_blocks, self.deaths.append)
        self.num_requests = 0

    def on_blocks(self, change: BlockChange) -> None:
        assert not self.resident & set(change.stored)
        self.resident |= set(change.stored)
        assert set(change.removed) <= self.resident
        self.resident -= set(change.removed)

    async def ask(
        self, token_ids: list[int], max_tokens: int, *, at_s: float = 0.0, name: str = "", **more: Any
    ) -> Told:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(at_s - loop.time())
        self.num_requests += 1
        told = Told()
        sampling = Sampling(max_tokens, temperature=0.0, ignore_eos=True)
        request = EngineRequest(RequestId(name or f"r{self.num_requests}"), token_ids, sampling, **more)
        async for delta in self.engine.generate(request):
            told.token_ids += delta.token_ids
            told.times_s.append(loop.time())
            told.finish = delta.finish
            if delta.cached_tokens is not None:
                told.cached_tokens = delta.cached_tokens
        return told


@asynccontextmanager
async def bench(**more: Any) -> AsyncIterator[Bench]:
    """A bench that is checked for leftovers."""
    opened = Bench(**more)
    yield opened
    opened.engine.pool.check()
    assert await opened.engine.resident() == opened.resident
    stats = opened.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)
    await opened.engine.close()


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return run_virtual(scenario)


def prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(num_tokens)]


def test_a_long_prompt_is_computed_in_steps_of_the_budget() -> None:
    async def scenario() -> None:
        async with bench() as simulated:
            told = await simulated.ask(prompt(1, 150), 1)
            # Steps of 64, 64 and 22 tokens, which see 32, 96 and 139 tokens in the mean.
            expected_s = 3 * 1.0 + 150 * 0.01 + 0.0001 * (64 * 32 + 64 * 96 + 22 * 139)
            assert told.times_s == [pytest.approx(expected_s)]
            assert simulated.engine.busy_s == pytest.approx(expected_s)

    run(scenario())


@pytest.mark.parametrize("tokens_per_delta", [1, 3, MERGED])
def test_an_answer_takes_one_step_for_each_token_whether_they_are_told_one_by_one_or_not(tokens_per_delta: int) -> None:
    async def scenario() -> None:
        async with bench(tokens_per_delta=tokens_per_delta) as simulated:
            told = await simulated.ask(prompt(2, 10), 40)
            first_s = 1.0 + 0.1 + 0.0001 * 50
            decode_s = sum(1.0 + 0.1 + 0.001 * (11 + step) for step in range(39))
            assert (told.times_s[0], told.times_s[-1]) == (pytest.approx(first_s), pytest.approx(first_s + decode_s))
            assert len(told.times_s) == 1 + -(-39 // tokens_per_delta)
            assert (len(told.token_ids), told.finish, told.cached_tokens) == (40, FinishReason.LENGTH, 0)

    run(scenario())


def test_who_comes_during_many_steps_in_a_row_waits_for_the_one_under_way_alone() -> None:
    async def scenario() -> None:
        async with bench(tokens_per_delta=MERGED, num_blocks=128) as simulated:
            first = asyncio.create_task(simulated.ask(prompt(3, 10), 100))
            second = await simulated.ask(prompt(4, 10), 1, at_s=20.0)
            await first
            ends_s = [1.105]
            while ends_s[-1] < 20.0:
                ends_s.append(ends_s[-1] + 1.1 + 0.001 * (10 + len(ends_s)))
            num_before = len(ends_s)
            prefill_step_s = 1.0 + 0.1 + 0.005 + 0.1 + 0.001 * (10 + num_before)
            assert second.times_s == [pytest.approx(ends_s[-1] + prefill_step_s)]

    run(scenario())


def test_sequences_that_decode_go_on_beside_a_prompt_which_gets_the_rest_of_the_budget() -> None:
    async def scenario() -> None:
        async with bench() as simulated:
            decoding = asyncio.create_task(simulated.ask(prompt(5, 10), 60))
            told = await simulated.ask(prompt(6, 126), 1, at_s=2.0)
            # Two steps of 63 tokens each, not of 64 and 62: one place is the other sequence's.
            begin_s = 1.105 + 1.111
            steps_s = 2 * (1.0 + 0.63 + 0.1) + 0.0001 * 63 * (31.5 + 94.5) + 0.001 * (12 + 13)
            assert told.times_s == [pytest.approx(begin_s + steps_s)]
            times_s = (await decoding).times_s
            assert len([at_s for at_s in times_s if begin_s + 0.001 < at_s <= told.times_s[0]]) == 2

    run(scenario())


def test_no_more_than_the_limit_run_at_once_and_the_rest_wait_in_order() -> None:
    async def scenario() -> None:
        async with bench(max_num_seqs=2) as simulated:
            tolds = await asyncio.gather(*(simulated.ask(prompt(10 + i, 5), 5) for i in range(6)))
            firsts_s = [told.times_s[0] for told in tolds]
            assert firsts_s == sorted(firsts_s)
            assert [sum(abs(other - at_s) < 1e-9 for other in firsts_s) for at_s in firsts_s] == [2] * 6

    run(scenario())


def test_a_request_of_higher_priority_goes_first() -> None:
    async def scenario() -> None:
        async with bench(max_num_seqs=1) as simulated:
            asks = [simulated.ask(prompt(20 + i, 5), 5, priority=priority) for i, priority in enumerate((0, 2, 1, 0))]
            firsts_s = [told.times_s[0] for told in await asyncio.gather(*asks)]
            assert sorted(range(4), key=firsts_s.__getitem__) == [0, 3, 2, 1]

    run(scenario())


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    async def scenario() -> None:
        async with bench(num_blocks=20, max_model_len_tokens=320) as simulated:
            first, second = await asyncio.gather(simulated.ask(prompt(30, 200), 20), simulated.ask(prompt(31, 200), 1))
            # 13 blocks and the growth of the answer leave no room for 13 more, though a chunk of four would fit.
            assert second.times_s[0] > first.times_s[-1]
            assert simulated.engine.num_preemptions == 0

    run(scenario())


def test_the_youngest_gives_way_when_blocks_run_out_and_its_answer_is_the_same() -> None:
    async def scenario() -> None:
        prompts = [prompt(40 + i, 60) for i in range(4)]
        async with bench() as roomy:
            alone = [(await roomy.ask(token_ids, 60)).token_ids for token_ids in prompts]
        async with bench(num_blocks=20, max_model_len_tokens=320) as simulated:
            tolds = await asyncio.gather(*(simulated.ask(token_ids, 60) for token_ids in prompts))
            assert [told.token_ids for told in tolds] == alone
            assert simulated.engine.num_preemptions > 0
            ends_s = [told.times_s[-1] for told in tolds]
            assert ends_s == sorted(ends_s)

    run(scenario())


def test_equal_prompts_share_what_is_being_computed() -> None:
    async def scenario() -> None:
        async with bench() as simulated:
            same = prompt(50, 100)
            first, second = await asyncio.gather(simulated.ask(same, 5), simulated.ask(same, 5))
            # As in vLLM, blocks can be found from the moment that a step with them is scheduled.
            assert (first.cached_tokens, second.cached_tokens) == (0, 96)
            assert first.token_ids == second.token_ids

    run(scenario())


def test_an_answer_goes_on_on_another_engine_where_it_broke_off() -> None:
    async def scenario() -> None:
        async with bench() as one, bench() as other:
            whole = (await one.ask(prompt(60, 37), 30)).token_ids
            rest = await other.ask(prompt(60, 37) + whole[:11], 19)
            assert rest.token_ids == whole[11:]
            assert len(set(whole)) >= 16

    run(scenario())


def test_a_cancel_frees_at_once_and_leaves_others_as_they_were() -> None:
    async def scenario() -> None:
        async with bench(tokens_per_delta=MERGED, num_blocks=128) as simulated:
            asks = [asyncio.create_task(simulated.ask(prompt(70 + i, 20), 50, name=f"c{i}")) for i in range(2)]
            await asyncio.sleep(10.0)
            used_blocks = simulated.engine.stats().kv_used_blocks
            await simulated.engine.cancel(RequestId("c0"))
            assert simulated.engine.stats().num_running == 1
            assert simulated.engine.stats().kv_used_blocks < used_blocks
            cancelled, other = await asyncio.gather(*asks)
            assert (cancelled.finish, cancelled.times_s[-1]) == (FinishReason.ABORT, pytest.approx(10.0))
            assert (other.finish, len(other.token_ids)) == (FinishReason.LENGTH, 50)

    run(scenario())


def test_a_request_takes_its_time_to_arrive_and_can_be_cancelled_on_its_way() -> None:
    async def scenario() -> None:
        async with bench(profile=replace(PROFILE, request_s=1.5)) as simulated:
            asks = [asyncio.create_task(simulated.ask(prompt(75 + i, 10), 1, name=f"a{i}")) for i in range(2)]
            await asyncio.sleep(1.0)
            assert simulated.engine.stats().num_waiting == 2
            await simulated.engine.cancel(RequestId("a0"))
            cancelled, other = await asyncio.gather(*asks)
            assert (cancelled.finish, cancelled.times_s) == (FinishReason.ABORT, [pytest.approx(1.0)])
            assert other.times_s == [pytest.approx(3.0 + 1.105)]

    run(scenario())


def test_requests_sent_at_the_same_moment_arrive_one_after_another_so_the_first_has_a_step_of_its_own() -> None:
    async def scenario() -> None:
        async with bench(profile=replace(PROFILE, request_s=0.001)) as simulated:
            first, second = await asyncio.gather(*(simulated.ask(prompt(77 + i, 10), 1) for i in range(2)))
            assert first.times_s == [pytest.approx(0.001 + 1.105)]
            assert second.times_s == [pytest.approx(0.001 + 2 * 1.105)]

    run(scenario())


def test_a_dead_engine_is_told_of_once_and_fails_everything() -> None:
    async def scenario() -> None:
        simulated = Bench(max_num_seqs=1, profile=replace(PROFILE, request_s=0.5))
        asks = [asyncio.create_task(simulated.ask(prompt(80 + i, 20), 50)) for i in range(3)]
        asks.append(asyncio.create_task(simulated.ask(prompt(84, 20), 50, at_s=4.75)))
        await asyncio.sleep(5.0)
        simulated.engine.die("pulled the plug")
        simulated.engine.die("again")
        for ended in await asyncio.gather(*asks, return_exceptions=True):
            assert isinstance(ended, EngineError)
            assert str(ended) == "pulled the plug"
        assert simulated.deaths == ["pulled the plug"]
        for call in (simulated.engine.resident(), simulated.engine.pins(), simulated.ask([1], 1, at_s=5.0)):
            with pytest.raises(EngineError, match="pulled the plug"):
                await call
        simulated.engine.pool.check()

    run(scenario())


def test_step_times_are_learnt_as_those_of_a_real_engine() -> None:
    async def scenario() -> None:
        linear = replace(PROFILE, prefill_s_per_token_context=0.0, decode_s_per_context_token=0.0)
        async with bench(profile=linear) as simulated:
            rng = random.Random(90)
            await asyncio.gather(
                *(simulated.ask(prompt(900 + i, rng.randrange(5, 200)), rng.randrange(1, 60)) for i in range(60))
            )
            fit = simulated.engine.stats().step_fit
            assert fit.step_s == pytest.approx(1.0, rel=0.01)
            assert fit.prefill_s_per_token == pytest.approx(0.01, rel=0.01)
            assert fit.decode_s_per_seq == pytest.approx(0.1, rel=0.01)

    run(scenario())


def test_sizes_that_do_not_fit_each_other_are_refused_by_name() -> None:
    for more, message in (
        ({"max_num_seqs": 65}, "a step of 64 tokens has no place for one of each of 65 sequences"),
        ({"num_blocks": 63}, "63 blocks of 16 tokens hold 1008 tokens, less than one longest sequence of 1024"),
        ({"pin_budget_blocks": 1}, "--pin-budget-blocks: 1 of 64 blocks leave no room for one request of 1024"),
    ):
        with pytest.raises(ConfigError, match=message):
            Bench(**more)


@dataclass(frozen=True, slots=True)
class Job:
    prefix: int
    num_prefix_tokens: int
    num_tail_tokens: int
    max_tokens: int
    at_s: float
    priority: int
    cancelled_after_s: float | None


JOBS = st.lists(
    st.builds(
        Job,
        st.integers(0, 2),
        st.integers(0, 120),
        st.integers(1, 100),
        st.integers(1, 80),
        st.floats(0.0, 60.0),
        st.integers(0, 1),
        st.none() | st.floats(0.0, 60.0),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(jobs=JOBS)
def test_whatever_comes_nothing_is_lost_and_merging_deltas_changes_no_time(jobs: list[Job]) -> None:
    async def scenario(tokens_per_delta: int) -> list[tuple[list[int], FinishReason | None, float]]:
        async with bench(
            num_blocks=20, max_model_len_tokens=320, max_num_seqs=4, tokens_per_delta=tokens_per_delta
        ) as simulated:

            async def serve(number: int, job: Job) -> tuple[list[int], FinishReason | None, float]:
                token_ids = prompt(job.prefix, job.num_prefix_tokens) + prompt(100 + number, job.num_tail_tokens)
                # A loop's timers of one moment fire in no order.
                begin_s = job.at_s + number / 1024
                asking = asyncio.create_task(
                    simulated.ask(token_ids, job.max_tokens, at_s=begin_s, name=f"j{number}", priority=job.priority)
                )
                if job.cancelled_after_s is not None:
                    await asyncio.wait({asking}, timeout=begin_s + job.cancelled_after_s)
                    await simulated.engine.cancel(RequestId(f"j{number}"))
                told = await asking
                if job.cancelled_after_s is None:
                    assert len(told.token_ids) == min(job.max_tokens, 320 - len(token_ids))
                return told.token_ids, told.finish, round(told.times_s[-1], 6)

            return await asyncio.gather(*(serve(number, job) for number, job in enumerate(jobs)))

    one_by_one, merged = run(scenario(1)), run(scenario(MERGED))
    for (tokens, finish, at_s), (other_tokens, other_finish, other_at_s) in zip(one_by_one, merged, strict=True):
        assert (finish, at_s) == (other_finish, pytest.approx(other_at_s, abs=1e-5))
        # What is cancelled has told less where deltas are merged.
        assert other_tokens == tokens[: len(other_tokens)]
        assert finish is FinishReason.ABORT or other_tokens == tokens


class Gaps:
    """A listener that notes the times of deltas and the longest gap that it is told of."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.longest_gap_s = 0.0

    def push(self, delta: EngineDelta, longest_gap_s: float) -> None:
        self.times_s.append(asyncio.get_running_loop().time())
        self.longest_gap_s = longest_gap_s

    def fail(self, error: EngineError) -> None:
        raise error


def test_the_longest_gap_between_tokens_is_known_without_telling_them_one_by_one() -> None:
    async def scenario(tokens_per_delta: int) -> list[Gaps]:
        async with bench(
            num_blocks=20, max_model_len_tokens=320, max_num_seqs=4, tokens_per_delta=tokens_per_delta
        ) as simulated:
            rng = random.Random(7)
            listeners = []
            for number in range(12):
                await asyncio.sleep(rng.uniform(0.0, 12.0))
                listeners.append(Gaps())
                simulated.engine.submit(
                    RequestId(f"g{number}"),
                    pack_tokens(prompt(number, rng.randrange(5, 150))),
                    Sampling(rng.randrange(2, 90), ignore_eos=True),
                    listeners[-1],
                )
            while simulated.engine.stats().num_running + simulated.engine.stats().num_waiting:
                await asyncio.sleep(10.0)
            assert simulated.engine.num_preemptions > 0
            return listeners

    for one_by_one, merged in zip(run(scenario(1)), run(scenario(MERGED)), strict=True):
        times_s = one_by_one.times_s
        longest_gap_s = max(after - before for before, after in itertools.pairwise(times_s))
        assert one_by_one.longest_gap_s == pytest.approx(longest_gap_s, abs=1e-6)
        assert merged.longest_gap_s == pytest.approx(longest_gap_s, abs=1e-6)
