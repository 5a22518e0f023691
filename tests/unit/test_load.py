"""Load as a router sees it, over the real transport in virtual time: it drifts nowhere and idles nobody."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing

import pytest

from router.requests import GenerateRequest, RequestTrace
from router.service import Router
from shared.errors import KvrouteError
from shared.hashing import pack_tokens
from shared.types import RequestId, Sampling, WorkerId
from shared.vtime import run_virtual
from tests.support.rack import ask, assert_no_leftovers, prompt, rack

STATUS_INTERVAL_S = 0.1
REAL = {"token_s": 0.01, "decode_s_per_seq": 0.0005, "prefill_s_per_token": 0.0002, "is_contended": True}


async def _ask_and_leave(router: Router, name: str, token_ids: list[int], after_s: float) -> None:
    request = GenerateRequest(RequestId(name), pack_tokens(token_ids), Sampling(max_tokens=400))
    try:
        async with asyncio.timeout(after_s), aclosing(router.generate(request, RequestTrace())) as generated:
            async for _ in generated:
                pass
    except TimeoutError:
        pass


@pytest.mark.parametrize("seed", range(4))
def test_load_is_zero_within_a_status_interval_after_any_mix_of_ends(seed: int) -> None:
    async def scenario() -> None:
        draws = random.Random(seed)
        async with (
            rack(3, **REAL, mode="flaky", fault_rate=0.02, max_num_seqs=8) as workers,
            workers.router() as router,
            workers.router("least_load") as other,
        ):
            asking = []
            for index in range(120):
                await asyncio.sleep(draws.expovariate(50.0))
                token_ids = prompt(draws.randrange(6), 160, index)
                to = draws.choice([router, other])
                kind = draws.randrange(3)
                if kind == 0:
                    asking.append(_ask_and_leave(to, f"r{index}", token_ids, draws.uniform(0.0, 1.0)))
                elif kind == 1:
                    asking.append(ask(to, f"r{index}", [1 << 20, *token_ids]))
                else:
                    asking.append(ask(to, f"r{index}", token_ids, max_tokens=draws.randrange(1, 40)))
                asking[-1] = asyncio.create_task(asking[-1])
            results = await asyncio.gather(*asking, return_exceptions=True)
            assert all(isinstance(result, KvrouteError | tuple | None) for result in results)
            await asyncio.sleep(1.5 * STATUS_INTERVAL_S)
            assert_no_leftovers(router)
            assert_no_leftovers(other)
            for loads in (router.fleet.loads(), other.fleet.loads()):
                assert not loads.queued_prefill_tokens.any()
                assert not loads.kv_used_blocks.any()

    run_virtual(scenario())


def test_news_of_an_end_tells_the_load_without_it() -> None:
    async def scenario() -> None:
        async with rack(1, **REAL) as workers, workers.router() as router:
            await ask(router, "a", prompt(1, 160, 0))
            assert router.fleet.loads().num_requests.tolist() == [0]

    run_virtual(scenario())


def test_two_routers_do_not_pile_up_on_one_worker_within_a_status_lag() -> None:
    async def scenario() -> None:
        async with rack(4, **REAL) as workers, workers.router() as one, workers.router() as other:
            await asyncio.sleep(0.5)
            bursts = (
                ask(router, f"{name}{index}", prompt(1000 * number + index, 320, 0), max_tokens=50)
                for number, (name, router) in enumerate([("a", one), ("b", other)])
                for index in range(20)
            )
            answers = await asyncio.gather(*bursts)
            counts = Counter(trace.worker for _, trace in answers)
            assert sum(counts.values()) == 40
            assert max(counts.values()) <= 2 * 40 / 4

    run_virtual(scenario())


def test_worker_that_looks_slow_is_tried_now_and_then_and_used_again_once_it_is_well() -> None:
    async def scenario() -> None:
        async with rack(3, **REAL) as workers, workers.router() as router:
            slow = workers.worker_to_slot[WorkerId("w0")].engine
            slow.prefill_s_per_token *= 20
            await asyncio.sleep(0.5)
            for index in range(400):
                await ask(router, f"r{index}", prompt(index, 160, 0), max_tokens=1)
            assert 1 <= slow.num_submitted <= 20
            slow.prefill_s_per_token /= 20
            await asyncio.sleep(0.5)
            before = slow.num_submitted
            for index in range(400, 500):
                await ask(router, f"r{index}", prompt(index, 160, 0), max_tokens=1)
            assert slow.num_submitted - before >= 15

    run_virtual(scenario())


def test_idle_fleet_adds_no_wait() -> None:
    async def scenario() -> None:
        async with rack(4, **REAL) as workers, workers.router() as router:
            for index in range(40):
                _, trace = await ask(router, f"r{index}", prompt(index % 5, 160, index), max_tokens=2)
                assert trace.bound_at_s == pytest.approx(trace.received_at_s, abs=1e-6)

    run_virtual(scenario())


def test_routers_share_the_workers_out_as_homes_and_take_over_those_of_one_that_has_left() -> None:
    def homes_of(router: Router) -> set[WorkerId]:
        loads = router.fleet.loads()
        return {worker for worker, is_home in zip(loads.workers, loads.is_home, strict=True) if is_home}

    async def scenario() -> None:
        async with rack(5) as workers, workers.router() as one:
            assert (one.fleet.num_routers, homes_of(one)) == (1, set(workers.worker_to_slot))
            async with workers.router() as other:
                await asyncio.sleep(2.0)
                assert one.fleet.num_routers == other.fleet.num_routers == 2
                assert homes_of(one) == {"w0", "w2", "w4"}
                assert homes_of(other) == {"w1", "w3"}
            await asyncio.sleep(5.0)
            assert (one.fleet.num_routers, homes_of(one)) == (1, set(workers.worker_to_slot))

    run_virtual(scenario())


@pytest.mark.parametrize("max_num_seqs", [4, 16])
def test_holding_never_idles_a_worker_that_has_work_where_slots_are_the_limit(max_num_seqs: int) -> None:
    async def makespan_s(policy: str) -> float:
        loop = asyncio.get_running_loop()
        async with (
            rack(2, token_s=0.02, prefill_s_per_token=1e-4, max_num_seqs=max_num_seqs, num_blocks=8192) as workers,
            workers.router(policy) as router,
        ):
            started_at_s = loop.time()
            await asyncio.gather(
                *(ask(router, f"r{index}", prompt(index, 64, 0), max_tokens=20 + index % 13) for index in range(300))
            )
            return loop.time() - started_at_s

    assert run_virtual(makespan_s("cost")) <= 1.01 * run_virtual(makespan_s("least_load"))
