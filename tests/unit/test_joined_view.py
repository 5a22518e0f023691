"""Several routers' shares of one picture, and what comes of them together."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from router.joined_view import SHARE, Share, _read, encoded, joined, own_share, take_joined
from router.overview import Overview, Viewpoint
from router.service import Router
from router.sibling_words import Place, telling_siblings
from shared.vtime import run_virtual
from tests.support.rack import ask, mirrored_rack, prompt, rack

SLOW = {"token_s": 0.01, "prefill_s_per_token": 0.001}


def test_two_routers_are_one_picture_with_the_figures_of_both() -> None:
    async def scenario() -> None:
        async with mirrored_rack(2, **SLOW) as workers, workers.router() as one, workers.router() as other:
            for number, router in enumerate((one, one, one, other)):
                await ask(router, f"r{number}", prompt(1, 320, tail=number))
                await workers.settle()
            await asyncio.sleep(3.0)
            shares = [await own_share(Viewpoint(router), with_history=True) for router in (one, other)]
            # As it comes from another process.
            shares = [shares[0], _sent(shares[1])]
            whole = joined(shares, one.watch.rates)
        parts = [share.overview for share in shares]
        assert [part.num_requests for part in parts] == [3, 1]
        assert (whole.num_requests, whole.num_under_way, whole.flags) == (4, 0, ())
        assert sorted(row.router for row in whole.routers) == sorted((one.router, other.router))
        assert [row.num_requests for row in whole.routers] == [3, 1]
        assert sum(row.num_requests for row in whole.workers) == 4
        assert [row.worker for row in whole.workers] == ["w0", "w1"]
        assert whole.now.requests_per_s == pytest.approx(sum(part.now.requests_per_s for part in parts))
        assert whole.now.cached_share == pytest.approx(3 * 320 / (4 * 340))
        assert {(one.router, one.number) for one in whole.decisions} == {
            *((parts[0].routers[0].router, number) for number in (1, 2, 3)),
            (parts[1].routers[0].router, 1),
        }
        times = [decision.decided_at for decision in whole.decisions]
        assert times == sorted(times, reverse=True)
        assert max(window.requests_per_s for window in whole.history) > 0.0
        assert whole.store.num_degraded == 0

    run_virtual(scenario())


def test_percentiles_are_those_of_all_requests_and_no_mean_of_percentiles() -> None:
    async def scenario() -> None:
        async with rack(1, **SLOW) as workers, workers.router() as one, workers.router() as other:
            for number in range(9):
                await ask(one, f"s{number}", prompt(number, 32, tail=number))
            await ask(other, "long", prompt(77, 3200, tail=0))
            shares = [await own_share(Viewpoint(router), with_history=False) for router in (one, other)]
            whole = joined(shares, one.watch.rates)
        fast, slow = (share.overview.now.ttft_p50_s for share in shares)
        assert fast is not None
        assert slow is not None
        assert slow > 10 * fast
        assert whole.now.ttft_p50_s == pytest.approx(fast, rel=0.2)
        assert whole.now.ttft_p95_s == pytest.approx(slow, rel=0.2)

    run_virtual(scenario())


def test_worker_is_told_in_the_worst_state_that_a_router_sees_it_in() -> None:
    async def scenario() -> None:
        async with rack(2, **SLOW) as workers, workers.router() as one, workers.router() as other:
            await asyncio.sleep(1.5)
            other.fleet.rest(one.fleet.members()[0].info.worker, 60.0)
            shares = [await own_share(Viewpoint(router), with_history=False) for router in (one, other)]
            assert [row.state for row in joined(shares, one.watch.rates).workers] == ["resting", "ready"]

    run_virtual(scenario())


async def test_process_that_does_not_answer_or_tells_nonsense_is_missing_with_a_flag(tmp_path: Path) -> None:
    async def nonsense() -> bytes:
        return b'{"overview": 3}'

    with contextlib.ExitStack() as stack:
        places = [Place(tmp_path, number, 4) for number in range(4)]
        listeners = [stack.enter_context(place.listen()) for place in places[1:3]]
        async with rack(1) as workers, workers.router() as one, workers.router() as other:
            words = {SHARE: lambda: _share_of(other)}
            async with (
                telling_siblings(listeners[0], words),
                telling_siblings(listeners[1], {SHARE: nonsense}),
                asyncio.timeout(30.0),
            ):
                whole: Overview = await take_joined(Viewpoint(one), places[0], with_history=False)
    assert len(whole.routers) == 2
    assert [(flag.name, flag.text) for flag in whole.flags] == [
        ("router missing", "Server process 2 does not answer: its share is missing."),
        ("router missing", "Server process 3 does not answer: its share is missing."),
    ]


async def _share_of(router: Router) -> bytes:
    return encoded(await own_share(Viewpoint(router), with_history=False))


def _sent(share: Share) -> Share:
    read = _read(1, encoded(share))
    assert read == share
    return read
