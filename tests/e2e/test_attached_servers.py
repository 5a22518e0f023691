"""Two real `vllm serve` processes behind one router, one of them killed and started again under traffic."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio

from router.attach import attached_router, find_servers
from router.requests import GenerateRequest, RequestTrace, RichGenerated
from router.serving import Serving
from shared.config import Settings
from shared.errors import InvalidRequest
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, Reading, RequestId, Sampling, ToolChoice, WorkerId
from tests.support.fake_vllm import free_ports
from tests.support.vllm_servers import BLOCK_SIZE, ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

_PATIENCE_S = 120.0


@dataclass
class Deployment:
    """The servers and the router over them."""

    servers: list[ServerProcess]
    serving: Serving
    num_asked: int = 0

    @property
    def workers(self) -> list[WorkerId]:
        return [WorkerId(f"127.0.0.1:{server.port}") for server in self.servers]

    def keys(self, token_ids: list[int]) -> list[BlockKey]:
        return block_keys(pack_tokens(token_ids), BLOCK_SIZE, root_key(self.serving.scheme))

    def request(self, token_ids: list[int], max_tokens: int) -> GenerateRequest:
        self.num_asked += 1
        sampling = Sampling(max_tokens, temperature=0.0, ignore_eos=True)
        return GenerateRequest(RequestId(f"r{self.num_asked}"), pack_tokens(token_ids), sampling)

    async def ask(self, token_ids: list[int], max_tokens: int = 24) -> tuple[list[int], RequestTrace]:
        trace = RequestTrace()
        answer: list[int] = []
        async for generated in self.serving.router.generate(self.request(token_ids, max_tokens), trace):
            answer += generated.token_ids
        return answer, trace

    async def ask_knowing(self, token_ids: list[int]) -> tuple[list[int], RequestTrace]:
        """Ask once the directory has what the servers have told, and without the router's own memory."""
        for worker in self.workers:
            self.serving.router.hints.forget(worker)
        return await self.ask(token_ids)

    async def resident(self, worker: WorkerId) -> set[BlockKey]:
        return await self.serving.router.directory.resident(worker)

    async def wait_for_keys(self, trace: RequestTrace, token_ids: list[int]) -> None:
        """Until the directory has a prompt's blocks where it was computed."""
        assert trace.worker is not None
        async with asyncio.timeout(_PATIENCE_S):
            while not set(self.keys(token_ids)) <= await self.resident(trace.worker):
                await asyncio.sleep(0.01)


def prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(num_tokens)]


async def until(condition: Any) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    pytest.importorskip("vllm")
    from worker.engines.demo_model import prepare_model

    folder = tmp_path_factory.mktemp("attached")
    model_dir = prepare_model("tiny", folder)
    servers = []
    # Two kinds of hashes in the events, which must not matter.
    for number, environment in enumerate(({}, {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"})):
        events_port, replay_port = free_ports(1)
        (port, _) = free_ports(1)
        server = ServerProcess(
            model_dir, folder / f"server-{number}.log", port, events_port, replay_port, environment=environment
        )
        servers.append(server)
    try:
        for server in servers:
            server.start()
        await asyncio.gather(*(server.ready() for server in servers))
        settings = Settings(attach=tuple(server.attach for server in servers))
        found = await find_servers(settings, lambda line: None)
        async with attached_router(found, lambda line: None) as serving:
            yield Deployment(servers, serving)
    finally:
        for server in servers:
            server.kill()


async def test_block_size_model_and_tokenizer_are_the_servers_own(deployment: Deployment):
    serving = deployment.serving
    assert (serving.scheme.block_size_tokens, serving.settings.model_name) == (BLOCK_SIZE, "tiny")
    assert serving.max_model_len_tokens == 1024
    assert [info.num_blocks for info in serving.workers] == [511, 511]
    assert all(one.is_cache_aware and one.info.tells_blocks for one in serving.router.fleet.members())


async def test_requests_go_where_their_prefix_is_and_the_servers_say_so(deployment: Deployment):
    shared = [prompt(seed, 5 * BLOCK_SIZE) for seed in range(4)]
    holders = []
    for number, prefix in enumerate(shared):
        _, trace = await deployment.ask(prefix + prompt(100 + number, 10))
        await deployment.wait_for_keys(trace, prefix)
        holders.append(trace.worker)
    for number, (prefix, holder) in enumerate(zip(shared, holders, strict=True)):
        answer, trace = await deployment.ask_knowing(prefix + prompt(200 + number, 10))
        assert (trace.worker, trace.matched_tokens, trace.cached_tokens) == (holder, 5 * BLOCK_SIZE, 5 * BLOCK_SIZE)
        assert len(set(answer)) >= 8


async def test_a_request_that_is_given_up_is_freed_on_the_server(deployment: Deployment):
    before = RequestTrace()
    async with aclosing(deployment.serving.router.generate(deployment.request(prompt(7, 40), 900), before)) as stream:
        async for _ in stream:
            break
    (server,) = [one for one in deployment.servers if before.worker == f"127.0.0.1:{one.port}"]
    async with asyncio.timeout(_PATIENCE_S):
        while await server.num_requests():
            await asyncio.sleep(0.02)
    assert deployment.serving.router.fleet.num_bookings == 0


async def test_form_and_probabilities_are_the_servers_own(deployment: Deployment):
    serving = deployment.serving
    schema = '{"type":"string","enum":["Paris","Rome"]}'
    sampling = Sampling(64, temperature=0.0, logprobs=2, json_schema=schema)
    request = replace(deployment.request(prompt(8, 40), 64), sampling=sampling)
    generated = [item async for item in serving.router.generate(request, RequestTrace())]
    token_ids = [token_id for item in generated for token_id in item.token_ids]
    told = [one for item in generated if isinstance(item, RichGenerated) for one in item.logprobs]
    assert json.loads(serving.tokenizer.decode(token_ids)) in ("Paris", "Rome")
    assert [len(one.top_token_ids) for one in told] == [2] * len(token_ids)
    for wrong, param in (
        (replace(sampling, json_schema='{"type":"banana"}'), "response_format"),
        (replace(sampling, reading=Reading("[{}]", ToolChoice.AUTO)), "tools"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            async for _ in serving.router.generate(
                replace(deployment.request(prompt(8, 40), 64), sampling=wrong), RequestTrace()
            ):
                pass
        assert caught.value.param == param


async def test_a_server_that_is_killed_and_comes_back_costs_no_request_and_leaves_no_phantom(deployment: Deployment):
    fleet = deployment.serving.router.fleet
    prompts = [prompt(1000 + number, 4 * BLOCK_SIZE + number) for number in range(10)]
    asked = [await deployment.ask(token_ids, 64) for token_ids in prompts]
    undisturbed = [answer for answer, _ in asked]
    # The one that prompts go to, for what it holds of them.
    lost = asked[0][1].worker
    assert lost is not None
    lost_server = deployment.servers[deployment.workers.index(lost)]
    first_life = fleet.worker_to_instance[lost]
    traces: list[RequestTrace] = []
    pause_s = 0.0
    is_over = asyncio.Event()

    async def keep_asking(number: int) -> None:
        while not is_over.is_set():
            for token_ids, expected in list(zip(prompts, undisturbed, strict=True))[number::3]:
                answer, trace = await deployment.ask(token_ids, 64)
                assert answer == expected
                traces.append(trace)
                await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(keep_asking(number))
        await until(lambda: lost in {trace.worker for trace in traces})
        lost_server.kill()
        num_before = len(traces)
        await until(lambda: lost not in fleet.worker_to_instance and len(traces) > num_before + 10)
        assert await deployment.resident(lost) == set()
        # A start takes all of a core for a while, which the other server's answers need not take from it.
        pause_s = 0.5
        lost_server.start()
        await lost_server.ready()
        await until(lambda: lost in fleet.worker_to_instance)
        is_over.set()
    assert fleet.worker_to_instance[lost] != first_life
    # What it held in its first life it does not hold now, and nobody expects it to.
    for token_ids in prompts:
        answer, trace = await deployment.ask_knowing(token_ids)
        assert (trace.matched_tokens, answer) == (trace.cached_tokens, undisturbed[prompts.index(token_ids)][:24])
    # It takes part again, and what it is expected to hold is what it holds.
    fresh: dict[int, tuple[list[int], RequestTrace]] = {}
    async with asyncio.timeout(_PATIENCE_S):
        while lost not in {trace.worker for _, trace in fresh.values()}:
            seeds = range(2000 + len(fresh), 2004 + len(fresh))
            answers = await asyncio.gather(*(deployment.ask(prompt(seed, 4 * BLOCK_SIZE + 5)) for seed in seeds))
            fresh |= zip(seeds, answers, strict=True)
    for seed, (answer, first) in fresh.items():
        token_ids = prompt(seed, 4 * BLOCK_SIZE + 5)
        await deployment.wait_for_keys(first, token_ids[: 4 * BLOCK_SIZE])
        again, trace = await deployment.ask_knowing(token_ids)
        assert (trace.worker, trace.matched_tokens, trace.cached_tokens) == (first.worker, 128, 128)
        assert again == answer
