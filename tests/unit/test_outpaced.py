"""Submits that come to a worker after those of other routers: taken back, weighed anew, and taken in the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from router.service import MAX_REFUSALS
from shared.errors import Outpaced
from shared.messages import Submit
from shared.transport.session import Session
from shared.vtime import run_virtual
from tests.support.fakes import fake_tokens
from tests.support.rack import Rack, ask, prompt, rack

REAL = {"token_s": 0.01, "prefill_s_per_token": 0.0002, "step_budget_tokens": 512, "is_contended": True}


def test_of_two_routers_that_go_for_one_worker_the_second_is_refused_and_weighs_anew() -> None:
    async def scenario() -> None:
        async with rack(1, **REAL) as workers, workers.router() as one, workers.router() as other:
            await asyncio.sleep(1.5)
            answers = await asyncio.gather(
                *(ask(router, "a", prompt(number, 3200, 0)) for number, router in enumerate((one, other)))
            )
            traces = [trace for _, trace in answers]
            assert [trace.num_refusals for trace in traces] == [0, 1]
            assert [(trace.num_attempts, trace.failed_workers) for trace in traces] == [(1, []), (1, [])]
            # To come again is not to come after oneself.
            assert [trace.possible_tokens for trace in traces] == [0, 0]
            assert [router.watch.groups.hottest(9) for router in (one, other)] == [[], []]
            # It waited in its router, and not behind the other one's.
            assert traces[1].bound_at_s is not None
            assert traces[0].first_token_at_s is not None
            assert traces[1].bound_at_s - traces[1].received_at_s > 0.5 * (
                traces[0].first_token_at_s - traces[0].received_at_s
            )
            assert [router.num_outpaced for router in (one, other)] == [0, 1]
            assert one.fleet.state_to_count()["ready"] == other.fleet.state_to_count()["ready"] == 1

    run_virtual(scenario())


def test_a_router_alone_submits_without_a_condition_and_so_do_policies_that_bind_early() -> None:
    async def scenario(policy: str, num_others: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            workers = await stack.enter_async_context(rack(1, **REAL))
            router = await stack.enter_async_context(workers.router(policy))
            for _ in range(num_others):
                await stack.enter_async_context(workers.router(policy))
            await asyncio.sleep(1.5)
            refuse_all(workers)
            _, trace = await ask(router, "a", prompt(1, 320, 0))
            assert trace.num_refusals == 0

    run_virtual(scenario("cost", 0))
    run_virtual(scenario("least_load", 1))
    run_virtual(scenario("dynamo", 1))


def test_whoever_comes_too_late_again_and_again_is_taken_in_the_end() -> None:
    async def scenario() -> None:
        async with rack(2, **REAL) as workers, workers.router() as router, workers.router():
            await asyncio.sleep(1.5)
            refuse_all(workers)
            answer, trace = await ask(router, "a", prompt(1, 320, 0))
            assert answer == fake_tokens(prompt(1, 320, 0), 8)
            assert (trace.num_refusals, trace.num_attempts) == (MAX_REFUSALS, 1)
            assert len(router.hints) == 1

    run_virtual(scenario())


def refuse_all(workers: Rack) -> None:
    """Have workers take no submit with a condition: others are always faster."""
    for slot in workers.worker_to_slot.values():
        submit = slot.host._requests.start

        def start(session: Session, message: Submit, submit: Callable[[Session, Submit], None] = submit) -> None:
            if message.max_queued_tokens is not None:
                raise Outpaced("others were faster")
            submit(session, message)

        slot.host._requests.start = start  # type: ignore[method-assign]
