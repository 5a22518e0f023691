"""Workers that fail under a request at any point of its way: its answer is whole, or one clear error ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from router.requests import GenerateRequest, RequestTrace, RichGenerated
from router.service import Router
from shared.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    InvalidRequest,
    KvrouteError,
    Overloaded,
    StreamBroken,
    WorkerLost,
)
from shared.hashing import pack_tokens
from shared.messages import MessagePart, TokenLogprobs
from shared.types import FinishReason, Reading, RequestId, Sampling, ToolChoice, WorkerId
from shared.vtime import run_virtual
from tests.support.fakes import FakeEngine, fake_tokens
from tests.support.rack import Rack, Slot, ask, prompt, rack
from worker.engines.base import EngineDelta, EngineRequest, RichEngineDelta

PROMPT = prompt(1, 64, tail=1)
NUM_TOKENS = 9
WHOLE = fake_tokens(PROMPT, NUM_TOKENS)
GREEDY = Sampling(NUM_TOKENS, temperature=0.0)
SEEDED = Sampling(NUM_TOKENS, seed=1)
PACE = {"token_s": 0.02, "prefill_s_per_token": 0.001}


@dataclass
class Told:
    """All that one reader was told."""

    token_ids: tuple[int, ...] = ()
    finishes: list[FinishReason] = field(default_factory=list)
    error: KvrouteError | None = None
    trace: RequestTrace = field(default_factory=RequestTrace)


async def read(
    router: Router,
    sampling: Sampling = GREEDY,
    *,
    after: Callable[[int], None] = lambda num_tokens: None,
    deadline_at_s: float | None = None,
    token_ids: list[int] = PROMPT,
    name: str = "a",
) -> Told:
    """Read one answer to its end, calling `after` with the number of tokens after each item."""
    told = Told()
    request = GenerateRequest(RequestId(name), pack_tokens(token_ids), sampling, deadline_at_s=deadline_at_s)
    try:
        async with aclosing(router.generate(request, told.trace)) as generated:
            async for item in generated:
                assert not told.finishes
                told.token_ids += item.token_ids
                told.finishes += [item.finish] if item.finish is not None else []
                after(len(told.token_ids))
    except KvrouteError as error:
        told.error = error
    return told


def dying(workers: Rack, name: str | None) -> None:
    """Let a worker's engine die now; it will not be looked at any more."""
    slot = workers.worker_to_slot.pop(WorkerId(str(name)))
    publishing = slot.publisher._task
    assert publishing is not None
    publishing.cancel()
    slot.engine.die()


async def when(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def rack_of(make_engine: Callable[..., FakeEngine], num_workers: int) -> AsyncIterator[Rack]:
    """A rack with engines of a test's own."""
    async with rack(0) as workers:
        workers.make_engine = make_engine
        for index in range(num_workers):
            await workers.start_worker(f"w{index}")
        yield workers


# One death.


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["may-continue", "may-not"])
def test_death_while_a_request_is_held_costs_it_nothing(sampling: Sampling) -> None:
    async def scenario() -> None:
        async with rack(1, **PACE, max_num_seqs=1) as workers, workers.router() as router:
            running = asyncio.create_task(read(router, Sampling(1000), name="running"))
            await when(lambda: workers.worker_to_slot[WorkerId("w0")].engine.num_live == 1)
            asking = asyncio.create_task(read(router, sampling))
            await when(lambda: len(router.queue) == 1)
            dying(workers, "w0")
            await workers.start_worker("w1")
            told = await asking
            assert (told.token_ids, told.finishes, told.error) == (WHOLE, [FinishReason.LENGTH], None)
            assert (told.trace.num_attempts, told.trace.failed_workers) == (1, [])
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run_virtual(scenario())


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["may-continue", "may-not"])
def test_death_before_the_first_token_costs_another_attempt(sampling: Sampling) -> None:
    async def scenario() -> None:
        async with rack(2, **PACE) as workers, workers.router() as router:
            asking = asyncio.create_task(read(router, sampling))
            await when(lambda: any(slot.engine.num_live for slot in workers.worker_to_slot.values()))
            (busy,) = [name for name, slot in workers.worker_to_slot.items() if slot.engine.num_live]
            dying(workers, busy)
            told = await asking
            assert (told.token_ids, told.finishes, told.error) == (WHOLE, [FinishReason.LENGTH], None)
            assert (told.trace.failed_workers, told.trace.num_continuations) == ([busy], 0)

    run_virtual(scenario())


@pytest.mark.parametrize("tokens_per_delta", [1, 4])
@pytest.mark.parametrize("num_tokens", range(1, NUM_TOKENS + 1))
def test_death_after_any_token_is_not_seen_by_the_reader(num_tokens: int, tokens_per_delta: int) -> None:
    async def scenario() -> None:
        async with rack(2, **PACE, tokens_per_delta=tokens_per_delta) as workers, workers.router() as router:
            trace = RequestTrace()
            request = GenerateRequest(RequestId("a"), pack_tokens(PROMPT), GREEDY)
            answer: tuple[int, ...] = ()
            finishes = []
            async for item in router.generate(request, trace):
                answer += item.token_ids
                finishes.append(item.finish)
                if len(answer) >= num_tokens and len(workers.worker_to_slot) == 2:
                    dying(workers, trace.worker)
            assert answer == WHOLE
            assert finishes[-1] is FinishReason.LENGTH
            assert not any(finishes[:-1])
            # One that dies with the end on its way has lost nothing.
            assert trace.num_continuations == (num_tokens < NUM_TOKENS)

    run_virtual(scenario())


@pytest.mark.parametrize("num_tokens", range(1, NUM_TOKENS))
def test_death_under_an_answer_that_may_not_continue_is_one_clear_error(num_tokens: int) -> None:
    async def scenario() -> None:
        async with rack(2, **PACE, dies_after=num_tokens) as workers, workers.router() as router:
            told = await read(router, SEEDED)
            assert (told.token_ids, told.finishes) == (WHOLE[:num_tokens], [])
            assert isinstance(told.error, StreamBroken)
            assert f"broke off after {num_tokens} tokens (the engine of worker w" in str(told.error)
            assert str(told.error).endswith("cannot go on elsewhere since it sets seed")
            assert told.trace.num_attempts == 1
            workers.worker_to_slot.pop(WorkerId(str(told.trace.worker)))

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (replace(GREEDY, logprobs=0), "logprobs"),
        (replace(GREEDY, json_schema="{}"), "response_format"),
        (replace(GREEDY, reading=Reading("[]", ToolChoice.AUTO)), "tools or reasoning"),
    ],
)
# With the last token there it lacks its end alone, which a worker would have had to read.
@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS - 1])
def test_answer_of_which_more_is_told_than_tokens_does_not_go_on_elsewhere(
    sampling: Sampling, words: str, num_tokens: int
) -> None:
    async def scenario() -> None:
        async with rack(2, **PACE, dies_after=num_tokens) as workers, workers.router() as router:
            told = await read(router, sampling)
            assert (told.token_ids, told.finishes) == (WHOLE[:num_tokens], [])
            assert isinstance(told.error, StreamBroken)
            assert str(told.error).endswith(f"cannot go on elsewhere since it sets {words}")
            workers.worker_to_slot.pop(WorkerId(str(told.trace.worker)))

    run_virtual(scenario())


class _Telling(FakeEngine):
    """Tells more of each token, and refuses what it cannot hold an answer to."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        if request.sampling.json_schema:
            raise InvalidRequest("no such form", param="response_format")
        async with aclosing(super().generate(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                logprobs = tuple([TokenLogprobs(-1.0, (token_id,), (-0.5,)) for token_id in delta.token_ids])
                parts = (MessagePart(f"<{delta.token_ids}>"),)
                yield RichEngineDelta(delta.token_ids, delta.finish, delta.cached_tokens, logprobs, parts)


def test_all_that_an_engine_tells_comes_through_once_and_in_order() -> None:
    async def scenario() -> None:
        async with rack_of(_Telling, 1) as workers, workers.router() as router:
            plain = asyncio.create_task(read(router, name="plain"))
            request = GenerateRequest(RequestId("rich"), pack_tokens(PROMPT), replace(GREEDY, logprobs=1))
            generated = [item async for item in router.generate(request, RequestTrace())]
            assert all(isinstance(item, RichGenerated) for item in generated)
            assert tuple(token_id for item in generated for token_id in item.token_ids) == WHOLE
            told = [one for item in generated if isinstance(item, RichGenerated) for one in item.logprobs]
            assert told == [TokenLogprobs(-1.0, (token_id,), (-0.5,)) for token_id in WHOLE]
            parts = [part for item in generated if isinstance(item, RichGenerated) for part in item.parts]
            assert [part.content for part in parts] == [f"<({token_id},)>" for token_id in WHOLE]
            assert (await plain).token_ids == WHOLE

    run_virtual(scenario())


def test_what_an_engine_refuses_is_the_callers_fault_and_speaks_against_no_worker() -> None:
    async def scenario() -> None:
        async with rack_of(_Telling, 2) as workers, workers.router() as router:
            told = await read(router, replace(GREEDY, json_schema="{}"))
            assert isinstance(told.error, InvalidRequest)
            assert (str(told.error), told.error.param) == ("no such form", "response_format")
            assert (told.trace.num_attempts, told.trace.failed_workers) == (1, [])
            assert router.fleet.state_to_count()["ready"] == 2

    run_virtual(scenario())


class _LateEnd(FakeEngine):
    """Tells its last token first and the end later, or dies in between; or gives up where it should go on."""

    dies = True
    gives_up_after: int | None = None

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        num_tokens = 0
        async with aclosing(super().generate(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                num_tokens += len(delta.token_ids)
                if num_tokens == self.gives_up_after:
                    self.gives_up_after = None
                    yield EngineDelta(delta.token_ids, FinishReason.ABORT, delta.cached_tokens)
                    await self.cancel(request.request)
                    return
                if delta.finish is None:
                    yield delta
                    continue
                yield EngineDelta(delta.token_ids, None, delta.cached_tokens)
                await asyncio.sleep(1.0)
                if self.dies:
                    self.die()
                    raise AssertionError("dead")
                yield EngineDelta((), delta.finish)


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [
        (GREEDY, FinishReason.LENGTH),
        (SEEDED, FinishReason.LENGTH),
        (Sampling(1000, stop_token_ids=(WHOLE[-1],)), FinishReason.STOP),
        (Sampling(NUM_TOKENS, seed=1, stop_token_ids=(WHOLE[-1],)), FinishReason.STOP),
    ],
)
def test_answer_that_lacks_only_its_end_is_whole(sampling: Sampling, finish: FinishReason) -> None:
    async def scenario() -> None:
        async with rack_of(lambda **wiring: _LateEnd(**PACE, **wiring), 2) as workers, workers.router() as router:
            told = await read(router, sampling)
            assert (told.token_ids, told.finishes, told.error) == (WHOLE, [finish], None)
            assert told.trace.num_attempts == 1
            workers.worker_to_slot.pop(WorkerId(str(told.trace.worker)))

    run_virtual(scenario())


def test_answer_that_its_engine_gives_up_goes_on_elsewhere() -> None:
    def make_engine(**wiring: Any) -> FakeEngine:
        engine = _LateEnd(**PACE, **wiring)
        engine.dies, engine.gives_up_after = False, 4
        return engine

    async def scenario() -> None:
        async with rack_of(make_engine, 3) as workers, workers.router() as router:
            told = await read(router)
            assert (told.token_ids, told.finishes, told.error) == (WHOLE, [FinishReason.LENGTH], None)
            assert told.trace.num_continuations == 2

    run_virtual(scenario())


def test_continuation_is_asked_with_the_longer_prompt_and_told_as_the_original() -> None:
    async def scenario() -> None:
        async with rack(2, **PACE) as workers, workers.router() as router:
            _, warm = await ask(router, "warm", PROMPT[:64])
            await workers.settle()
            slots = dict(workers.worker_to_slot)

            def after(num_tokens: int) -> None:
                if num_tokens == 4:
                    dying(workers, warm.worker)

            told = await read(router, after=after)
            assert (told.token_ids, told.error) == (WHOLE, None)
            other = next(slot for name, slot in slots.items() if name != warm.worker)
            (seen,) = other.engine.seen
            assert (seen.token_ids, seen.sampling) == ([*PROMPT, *WHOLE[:4]], Sampling(NUM_TOKENS - 4, temperature=0.0))
            assert (told.trace.matched_tokens, told.trace.cached_tokens) == (64, 64)
            assert told.trace.failed_workers == [warm.worker]
            metrics = router.render_metrics().decode()
            assert 'kvroute_failovers_total{stage="stream"} 1.0' in metrics
            assert f"kvroute_prompt_tokens_total {64 + len(PROMPT)}.0" in metrics

    run_virtual(scenario())


# Several deaths.


@pytest.mark.parametrize(("dies_after", "num_continuations"), [(4, 2), (5, 1), (8, 1), (9, 0)])
def test_several_deaths_in_a_row_are_not_seen_by_the_reader(dies_after: int, num_continuations: int) -> None:
    async def scenario() -> None:
        async with rack(3, **PACE, dies_after=dies_after) as workers, workers.router() as router:
            told = await read(router)
            assert (told.token_ids, told.finishes, told.error) == (WHOLE, [FinishReason.LENGTH], None)
            assert told.trace.num_continuations == num_continuations
            for name in told.trace.failed_workers:
                workers.worker_to_slot.pop(name)

    run_virtual(scenario())


def test_answer_whose_workers_die_one_after_the_other_ends_with_one_error() -> None:
    async def scenario() -> None:
        async with rack(4, **PACE, dies_after=2) as workers, workers.router() as router:
            told = await read(router)
            assert (told.token_ids, told.finishes) == (WHOLE[:6], [])
            assert isinstance(told.error, AttemptsExhausted)
            assert str(told.error).startswith("failed on 3 workers: w")
            assert all(f"{name} (the engine of" in str(told.error) for name in told.trace.failed_workers)
            for name in told.trace.failed_workers:
                workers.worker_to_slot.pop(name)
            assert len(workers.worker_to_slot) == 1

    run_virtual(scenario())


class _Poisonable(FakeEngine):
    """Dies of a prompt with this token, at once or with its first tokens out."""

    POISON = 31_999

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        async with aclosing(super().generate(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if request.token_ids[0] == self.POISON:
                    self.die("poisoned")
                yield delta


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_request_that_kills_its_workers_leaves_the_others_to_the_rest(max_attempts: int) -> None:
    async def scenario() -> None:
        async with (
            rack_of(lambda **wiring: _Poisonable(**PACE, **wiring), 5) as workers,
            workers.router(max_attempts=max_attempts) as router,
        ):
            others = [
                asyncio.create_task(read(router, token_ids=prompt(index, 64, 0), name=f"o{index}"))
                for index in range(20)
            ]
            poisoned = await read(router, token_ids=[_Poisonable.POISON, *PROMPT], name="poison")
            assert isinstance(poisoned.error, AttemptsExhausted if max_attempts > 1 else WorkerLost)
            assert len(set(poisoned.trace.failed_workers)) == max_attempts
            for name in poisoned.trace.failed_workers:
                workers.worker_to_slot.pop(name)
            assert len(router.fleet.loads()) == 5 - max_attempts
            for index, told in enumerate(await asyncio.gather(*others)):
                if max_attempts > 1:
                    assert told.error is None
                if told.error is None:
                    assert told.token_ids == fake_tokens(prompt(index, 64, 0), NUM_TOKENS)

    run_virtual(scenario())


# Workers that leave on purpose.


def test_workers_that_leave_on_purpose_do_not_count_as_failures() -> None:
    async def scenario() -> None:
        async with rack(6, **PACE) as workers, workers.router(max_attempts=2) as router:
            leaving: list[asyncio.Task[None]] = []
            trace = RequestTrace()
            request = GenerateRequest(RequestId("a"), pack_tokens(PROMPT), GREEDY)
            answer: tuple[int, ...] = ()
            async for item in router.generate(request, trace):
                answer += item.token_ids
                if len(leaving) < 5 and len(answer) > len(leaving):
                    leaving.append(asyncio.create_task(workers.stop_worker(str(trace.worker))))
            await asyncio.gather(*leaving)
            assert answer == WHOLE
            assert len(trace.failed_workers) >= 4

    run_virtual(scenario())


def test_draining_workers_cost_a_request_nothing_and_the_queues_room_is_not_asked_for_again() -> None:
    async def scenario() -> None:
        async with rack(4, **PACE) as workers, workers.router("round_robin", max_attempts=1, max_held=1) as router:
            drains = [
                asyncio.create_task(workers.worker_to_slot[WorkerId(f"w{index}")].host.drain()) for index in range(3)
            ]
            # At once, before a status can have told of it.
            told = await asyncio.gather(*(_soon(router, index) for index in range(8)))
            assert [(one.token_ids, one.error) for one in told] == [(WHOLE, None)] * 8
            assert {one.trace.worker for one in told} == {"w3"}
            await asyncio.gather(*drains)

    run_virtual(scenario())


def test_workers_that_drain_and_end_under_load_cost_nobody_an_attempt() -> None:
    async def scenario() -> None:
        async with rack(3, **PACE) as workers, workers.router("round_robin", max_attempts=1) as router:
            is_over = False
            told: list[Told] = []

            async def ask_on(place: int) -> None:
                while not is_over:
                    told.append(await read(router, name=f"{place}-{len(told)}"))

            asking = [asyncio.create_task(ask_on(place)) for place in range(12)]
            for number in range(20):
                await asyncio.sleep(0.1 + 0.013 * number)
                name = f"w{number}"
                slot = workers.worker_to_slot[WorkerId(name)]
                slot.publisher.set_draining(True)
                await slot.host.drain()
                await workers.stop_worker(name)
                await workers.start_worker(f"w{number + 3}")
            is_over = True
            await asyncio.gather(*asking)
            assert {(one.token_ids, one.error) for one in told} == {(WHOLE, None)}
            assert len(told) > 100
            # A busy answer of a worker that the router did not know to drain is the most that happens.
            assert {one.trace.num_continuations for one in told} == {0}

    run_virtual(scenario())


@pytest.mark.parametrize("num_steps", range(0, 60, 4))
def test_request_that_meets_an_idle_worker_on_its_way_out_goes_elsewhere(num_steps: int) -> None:
    async def scenario() -> None:
        async with rack(2, **PACE) as workers, workers.router("round_robin", max_attempts=1) as router:

            async def leave() -> None:
                await workers.worker_to_slot[WorkerId("w0")].host.drain()
                await workers.stop_worker("w0")

            leaving = asyncio.create_task(leave())
            for _ in range(num_steps):
                await asyncio.sleep(0)
            told = await asyncio.gather(*(read(router, name=f"r{index}") for index in range(4)))
            assert [(one.token_ids, one.error) for one in told] == [(WHOLE, None)] * 4
            await leaving

    run_virtual(scenario())


async def _soon(router: Router, index: int) -> Told:
    for _ in range(10 * index):
        await asyncio.sleep(0)
    return await read(router, name=f"r{index}")


def test_fleet_that_answers_busy_for_ever_is_told_to_the_reader() -> None:
    async def scenario() -> None:
        async with rack(2, **PACE) as workers, workers.router("round_robin", queue_timeout_s=20.0) as router:
            drains = [asyncio.create_task(slot.host.drain()) for slot in workers.worker_to_slot.values()]
            told = await read(router)
            assert isinstance(told.error, Overloaded)
            await asyncio.gather(*drains)

    run_virtual(scenario())


# One attempt at a time.


def test_attempts_of_one_request_never_overlap() -> None:
    live: list[str] = []
    most = 0

    class Watched(FakeEngine):
        async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
            nonlocal most
            live.append(request.request.partition("#")[0])
            most = max(most, live.count(live[-1]))
            try:
                async with aclosing(super().generate(request)) as deltas:  # type: ignore[type-var]
                    async for delta in deltas:
                        yield delta
            finally:
                live.remove(request.request.partition("#")[0])

    async def scenario() -> None:
        async with (
            rack_of(lambda **wiring: Watched(**PACE, mode="flaky", **wiring), 3) as workers,
            workers.router(max_attempts=10) as router,
        ):
            prompts = [prompt(index % 4, 64, tail=index) for index in range(40)]
            told = await asyncio.gather(*(read(router, token_ids=ids, name=f"r{i}") for i, ids in enumerate(prompts)))
            assert [one.token_ids for one in told] == [fake_tokens(ids, NUM_TOKENS) for ids in prompts]
            assert sum(one.trace.num_attempts for one in told) > 50

    run_virtual(scenario())
    assert (most, live) == (1, [])


def test_worker_that_was_only_cut_off_tells_the_reader_nothing_more_and_frees_the_request() -> None:
    async def scenario() -> None:
        async with rack(2, **PACE) as workers, workers.router() as router:
            cut: list[Slot] = []

            def after(num_tokens: int) -> None:
                if num_tokens == 3:
                    name = next(name for name, slot in workers.worker_to_slot.items() if slot.engine.num_live)
                    cut.append(workers.worker_to_slot.pop(name))
                    router.fleet._members[name].client._channel.close()  # type: ignore[attr-defined]

            told = await read(router, Sampling(1000, temperature=0.0), after=after)
            assert (told.token_ids, told.error) == (fake_tokens(PROMPT, 1000), None)
            (slot,) = cut
            workers.worker_to_slot[slot.info.worker] = slot
            await when(lambda: slot.engine.num_live == 0)
            assert slot.engine.num_cancelled == 1
            await when(lambda: len(router.fleet.worker_to_instance) == 2)

    run_virtual(scenario())


# Deadlines.


def test_deadline_that_has_passed_or_cannot_be_met_is_refused_before_anything_is_computed() -> None:
    async def scenario() -> None:
        async with rack(2, token_s=0.01, prefill_s_per_token=0.01) as workers, workers.router() as router:
            _, warm = await ask(router, "warm", PROMPT)
            await workers.settle()
            await asyncio.sleep(5.0)
            now_s = asyncio.get_running_loop().time()
            passed = await read(router, deadline_at_s=now_s)
            long = await read(router, deadline_at_s=now_s + 5.0, token_ids=prompt(7, 640, tail=0))
            assert [type(one.error) for one in (passed, long)] == [DeadlineExceeded] * 2
            assert "had passed when it arrived" in str(passed.error)
            assert "is 5 s away, and its prompt alone takes 6.6 s" in str(long.error)
            assert sum(slot.engine.num_submitted for slot in workers.worker_to_slot.values()) == 1
            # What a worker holds need not be computed.
            told = await read(router, deadline_at_s=now_s + 0.5)
            assert (told.token_ids, told.trace.worker, told.error) == (WHOLE, warm.worker, None)

    run_virtual(scenario())


def test_deadline_ends_a_request_that_is_held() -> None:
    async def scenario() -> None:
        async with rack(1, **PACE, max_num_seqs=1) as workers, workers.router() as router:
            running = asyncio.create_task(read(router, Sampling(200), name="running"))
            await when(lambda: workers.worker_to_slot[WorkerId("w0")].engine.num_live == 1)
            now_s = asyncio.get_running_loop().time()
            told = await read(router, deadline_at_s=now_s + 1.0)
            assert isinstance(told.error, DeadlineExceeded)
            assert "while it waited for a worker" in str(told.error)
            assert asyncio.get_running_loop().time() == pytest.approx(now_s + 1.0)
            assert len(router.queue) == 0
            assert (await running).error is None

    run_virtual(scenario())


def test_deadline_ends_an_answer_and_frees_its_engine() -> None:
    async def scenario() -> None:
        async with rack(1, **PACE) as workers, workers.router() as router:
            now_s = asyncio.get_running_loop().time()
            told = await read(router, Sampling(10_000), deadline_at_s=now_s + 1.0)
            assert isinstance(told.error, DeadlineExceeded)
            assert told.token_ids == fake_tokens(PROMPT, len(told.token_ids))
            assert 30 < len(told.token_ids) < 60
            await workers.settle()
            assert workers.worker_to_slot[WorkerId("w0")].engine.num_cancelled == 1
            assert asyncio.get_running_loop().time() < now_s + 2.0

    run_virtual(scenario())


def test_deadline_holds_over_all_attempts() -> None:
    async def scenario() -> None:
        async with rack(3, **PACE, dies_after=10) as workers, workers.router() as router:
            now_s = asyncio.get_running_loop().time()
            told = await read(router, Sampling(25), deadline_at_s=now_s + 0.5)
            assert isinstance(told.error, DeadlineExceeded)
            assert 10 <= len(told.token_ids) < 25
            for name in told.trace.failed_workers:
                workers.worker_to_slot.pop(name)

    run_virtual(scenario())
