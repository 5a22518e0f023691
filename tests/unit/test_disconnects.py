"""Clients and routers that leave at any time: what is left of their requests, in virtual time."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from router.http import Backend, Front
from router.keys import KeyRing
from router.requests import Generated, GenerateRequest, RequestTrace
from router.service import Router
from router.tokenizer import Tokenizer
from shared.hashing import pack_tokens
from shared.transport.base import Channel
from shared.transport.client import ChannelClient
from shared.types import RequestId, RouterId, Sampling
from shared.vtime import run_virtual
from tests.support.fakes import fake_tokens
from tests.support.http_front import MODEL, Asking, Fleet, make_front
from tests.support.rack import SECRET, Rack, ask, assert_no_leftovers, prompt, rack
from tests.support.tokenizers import write_model_folder

SLOW = {"token_s": 0.1, "prefill_s_per_token": 0.5}
_FREED_S = 1.0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


def _num_live(workers: Rack) -> int:
    return sum(slot.engine.num_live for slot in workers.worker_to_slot.values())


WHEN: dict[str, Callable[[Rack, Router], bool]] = {
    "while-held": lambda workers, router: len(router.queue) > 0,
    "before-the-first-token": lambda workers, router: _num_live(workers) > 0,
    "at-the-first-token": lambda workers, router: router.metrics.num_output_tokens == 1,
    "after-the-first-token": lambda workers, router: router.metrics.num_output_tokens > 3,
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("is_streamed", [True, False])
def test_everything_is_free_within_a_second_after_a_client_has_left(
    tokenizer: Tokenizer, when: str, is_streamed: bool
) -> None:
    async def scenario() -> None:
        async with rack(0 if when == "while-held" else 2, **SLOW) as workers, workers.router() as router:
            front = Front(
                replace(
                    Backend.over(router, tokenizer, MODEL, 512, "cost"),
                    state_to_count=lambda: {"ready": 1},
                ),
                KeyRing([], asyncio.get_running_loop().time),
                name="test",
            )
            body = {"model": MODEL, "prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": is_streamed}
            headers = {"content-type": "application/json"}
            asking = Asking(front, "POST", "/v1/completions", json.dumps(body).encode(), headers)
            async with asyncio.timeout(30.0):
                while not WHEN[when](workers, router):
                    await asyncio.sleep(0.01)
            asking.go_away()
            await asyncio.sleep(_FREED_S)
            assert asking.task.done()
            assert (front.num_under_way, _num_live(workers), router.fleet.num_bookings) == (0, 0, 0)
            assert_no_leftovers(router)

    run_virtual(scenario())


def test_requests_of_a_router_that_vanishes_are_free_five_seconds_later_and_no_others() -> None:
    async def scenario() -> None:
        async with rack(1, **SLOW) as workers, workers.router() as router:
            (slot,) = workers.worker_to_slot.values()
            is_there = True

            async def open_channel() -> Channel:
                if not is_there:
                    raise ConnectionRefusedError("it has vanished")
                return await slot.host.open_local()

            client = ChannelClient(
                slot.info.worker, slot.info.instance, RouterId("doomed"), SECRET, open_channel, rng=random.Random(0)
            )
            await client.connect()
            doomed = [client.submit(RequestId(f"d{n}"), 1, pack_tokens([n]), Sampling(1 << 20)) for n in range(5)]
            for stream in doomed:
                await anext(stream)
            asked = asyncio.create_task(ask(router, "mine", prompt(1, 16, 0), max_tokens=200))
            while _num_live(workers) < 6:
                await asyncio.sleep(0.01)
            is_there = False
            assert client._channel is not None
            client._channel.close()
            cut_at_s = asyncio.get_running_loop().time()
            while _num_live(workers) > 1:
                await asyncio.sleep(0.01)
            assert asyncio.get_running_loop().time() - cut_at_s == pytest.approx(5.0, abs=0.1)
            assert slot.engine.num_cancelled == 5
            answer, trace = await asked
            assert (answer, trace.failed_workers) == (fake_tokens(prompt(1, 16, 0), 200), [])
            await client.close()

    run_virtual(scenario())


@pytest.mark.parametrize(("state", "lasted_s"), [("away", 5.0), ("ready", 60.0), ("draining", 60.0)])
def test_server_that_is_to_end_waits_for_no_answers_once_no_worker_is_left_to_finish_them(
    tokenizer: Tokenizer, state: str, lasted_s: float
) -> None:
    async def scenario() -> None:
        async def never(request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
            yield Generated((5,))
            await asyncio.Event().wait()

        front = make_front(never, tokenizer, fleet=(fleet := Fleet()))
        body = json.dumps({"model": MODEL, "prompt": "abc", "stream": True}).encode()
        asking = Asking(front, "POST", "/v1/completions", body, {"content-type": "application/json"})
        while not any(message["type"] == "http.response.body" for message in asking.sent):
            asking.news.clear()
            await asking.news.wait()
        fleet.state_to_count |= {"ready": 0, state: 1}
        clock = asyncio.get_running_loop().time
        began_at_s = clock()
        await front.drain(60.0)
        assert clock() - began_at_s == pytest.approx(lasted_s)
        front.cut()
        *_, last = (await asking.answered()).events
        assert last["error"]["message"] == "this server is shutting down"

    run_virtual(scenario())
