"""Clients that leave before, at and after the first token: what is left of their requests, in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from router.http import Backend, Front
from router.keys import KeyRing
from router.service import Router
from router.tokenizer import Tokenizer
from shared.vtime import run_virtual
from tests.support.http_front import MODEL, Asking
from tests.support.rack import Rack, assert_no_leftovers, rack
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
                Backend(MODEL, 512, tokenizer, router.generate, "cost", lambda: {"ready": 1}, router.render_metrics),
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
