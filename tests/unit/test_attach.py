"""The composition over attached servers: what it agrees on with them, what it refuses, and that it needs no Ray."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router import commands
from router.attach import attached_router, find_servers
from router.cli import EXIT_OK
from router.overview import Viewpoint
from router.requests import GenerateRequest, RequestTrace
from router.serving import Serving
from router.top import plain_text
from shared.config import Settings
from shared.errors import ConfigError, NoWorker
from shared.hashing import pack_tokens
from shared.types import RequestId, Sampling
from tests.support.fake_vllm import FakeOptions, FakeVllm, free_ports
from tests.support.tokenizers import write_model_folder
from tests.support.transport import until


@asynccontextmanager
async def servers(*options: FakeOptions) -> AsyncIterator[list[FakeVllm]]:
    running = [await FakeVllm(one).start() for one in options]
    try:
        yield running
    finally:
        for server in running:
            await server.stop()


def settings(running: list[FakeVllm], folder: Path, **more: Any) -> Settings:
    return Settings(attach=tuple(server.attach for server in running), tokenizer=str(folder), **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("tokenizer"))


def nobody(line: str) -> None:
    """Nobody is told."""


@asynccontextmanager
async def serving(chosen: Settings) -> AsyncIterator[Serving]:
    async with attached_router(await find_servers(chosen, nobody), nobody) as over:
        yield over


async def ask(over: Serving, number: int, token_ids: list[int], max_tokens: int = 4) -> RequestTrace:
    trace = RequestTrace()
    sampling = Sampling(max_tokens, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(RequestId(f"r{number}"), pack_tokens(token_ids), sampling)
    async for _ in over.router.generate(request, trace):
        pass
    return trace


def prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(num_tokens)]


async def test_model_and_block_size_follow_the_servers(folder: Path):
    async with servers(FakeOptions(model="org/m", block_size=16), FakeOptions(model="org/m", block_size=16)) as running:
        found = await find_servers(settings(running, folder), nobody)
        assert (found.model, found.settings.model_name, found.settings.block_size) == ("org/m", "org/m", 16)
        async with attached_router(found, nobody) as over:
            assert over.scheme.namespace == "org%2Fm:16:v1"
            assert [info.worker for info in over.workers] == [f"127.0.0.1:{server.port}" for server in running]
            assert over.max_model_len_tokens == 1024


async def test_requests_follow_their_prefix_and_match_what_the_server_gives(folder: Path):
    async with servers(FakeOptions(), FakeOptions()) as running, serving(settings(running, folder)) as over:
        traces: list[RequestTrace] = []
        # Names of servers, and so who is asked first for what nobody holds, are other ones in each run.
        while len({trace.worker for trace in traces}) < 2:
            traces.append(await ask(over, len(traces), prompt(len(traces), 100)))
        num_blocks = 96 // FakeOptions().block_size
        async with asyncio.timeout(60.0):
            for worker, num_prompts in Counter(trace.worker for trace in traces).items():
                while len(await over.router.directory.resident(worker)) < num_prompts * num_blocks:
                    await asyncio.sleep(0.01)
        for number, trace in enumerate(traces):
            again = await ask(over, 1000 + number, prompt(number, 100))
            assert (again.worker, again.matched_tokens, again.cached_tokens) == (trace.worker, 96, 96)


async def test_what_a_router_tells_and_logs_it_tells_and_logs_of_attached_servers_too(folder: Path, tmp_path: Path):
    log = tmp_path / "requests.jsonl"
    async with servers(FakeOptions()) as running:
        async with serving(settings(running, folder, request_log=log, tenant_weights={"gold": 3.0})) as over:
            await ask(over, 1, prompt(1, 100))
            assert "kvroute_segment_cache_on 1.0" in over.router.render_metrics().decode()
            assert over.router.queue._shares.weight("gold") == 3.0
        (line,) = map(json.loads, log.read_text().splitlines())
        assert (line["prompt_tokens"], line["output_tokens"]) == (100, 4)


async def test_a_server_lost_under_a_request_costs_no_answer_and_comes_back_empty(folder: Path):
    async with servers(FakeOptions(), FakeOptions()) as running, serving(settings(running, folder)) as over:
        expected: list[int] = []
        request = GenerateRequest(RequestId("r"), pack_tokens(prompt(1, 70)), Sampling(400, 0.0, ignore_eos=True))
        async for generated in over.router.generate(request, RequestTrace()):
            expected += generated.token_ids
        answer, trace, lost = [], RequestTrace(), None
        async for generated in over.router.generate(request, trace):
            answer += generated.token_ids
            if lost is None:
                lost = trace.worker
                (at,) = [n for n, server in enumerate(running) if lost == f"127.0.0.1:{server.port}"]
                await running[at].stop()
        assert (answer, trace.failed_workers, trace.num_continuations) == (expected, [lost], 1)
        await until(lambda: lost not in over.router.fleet.worker_to_instance)
        assert await over.router.directory.resident(lost) == set()
        old = running[at]
        running[at] = await FakeVllm(old.options, old.port, old.event_ports, 2.0).start()
        await until(lambda: lost in over.router.fleet.worker_to_instance)
        assert await over.router.directory.resident(lost) == set()


async def test_a_server_without_events_is_flagged_and_gets_its_prefix_by_hints(folder: Path):
    silent = FakeOptions(has_events=False)
    async with servers(silent, silent) as running, serving(settings(running, folder)) as over:
        workers = sorted(f"127.0.0.1:{server.port}" for server in running)
        assert [one.info.worker for one in over.router.fleet.members() if not one.info.tells_blocks] == workers
        told = over.router.render_metrics().decode()
        for worker in workers:
            assert f'kvroute_worker_hints_only{{worker="{worker}"}} 1.0' in told
        assert "kvroute_worker_cache_unaware{" not in told
        overview = await Viewpoint(over.router).take()
        (flag,) = overview.flags
        assert (flag.name, flag.text.endswith(f"counts as held: {', '.join(workers)}.")) == ("hints only", True)
        assert [row.tells_blocks for row in overview.workers] == [False, False]
        assert plain_text(overview.to_json()).count("ready, hints only") == 2
        # At once, so that all but the first know of it by hints alone.
        traces = await asyncio.gather(*(ask(over, number, prompt(1, 100)) for number in range(3)))
        assert len({trace.worker for trace in traces}) == 1
        assert sorted(trace.matched_tokens for trace in traces) == [0, 96, 96]


async def test_a_server_with_other_blocks_is_flagged_and_used(folder: Path):
    async with (
        servers(FakeOptions(), FakeOptions(block_size=64)) as running,
        serving(settings(running, folder)) as over,
    ):
        assert [one.info.worker for one in over.router.fleet.members() if not one.is_cache_aware] == [
            f"127.0.0.1:{running[1].port}"
        ]
        traces = await asyncio.gather(*(ask(over, number, prompt(number, 100)) for number in range(30)))
        assert len({trace.worker for trace in traces}) == 2


async def test_a_server_that_is_away_at_the_start_is_waited_for_only_if_all_are(folder: Path):
    async with servers(FakeOptions()) as running:
        away = f"http://127.0.0.1:{free_ports(1)[0]}"
        chosen = settings(running, folder).model_copy(update={"attach": (away, running[0].attach)})
        async with serving(chosen) as over:
            assert [info.worker for info in over.workers] == [f"127.0.0.1:{running[0].port}"]
        alone = chosen.model_copy(update={"attach": (away,), "start_timeout_s": 0.1})
        with pytest.raises(NoWorker, match=rf"no attached server answers: --attach {away}: .* cannot be reached"):
            await find_servers(alone, nobody)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"workers": 2}, "--workers: of no use with --attach"),
        ({"engine": "simulator", "redis_url": "memory://"}, "--engine, --redis-url: of no use with --attach"),
        ({"block_size": 64}, "--block-size: 64 tokens asked for, but the attached servers' blocks have 32"),
        ({"tokenizer": "/nowhere/at/all"}, "--tokenizer: '/nowhere/at/all' is no folder"),
    ],
)
async def test_settings_that_cannot_be_meant_are_refused(folder: Path, more: dict[str, Any], said: str):
    async with servers(FakeOptions()) as running:
        chosen = Settings(**{**settings(running, folder).model_dump(exclude_unset=True), **more})
        with pytest.raises(ConfigError, match=said):
            async with serving(chosen):
                pass


async def test_servers_of_two_models_are_refused_by_name(folder: Path):
    async with servers(FakeOptions(model="one"), FakeOptions(model="two")) as running:
        with pytest.raises(ConfigError, match=rf"--attach {running[1].url}: it serves two, and not one"):
            async with serving(settings(running, folder)):
                pass


async def test_a_server_with_another_tokenizer_is_refused(folder: Path):
    async with servers(FakeOptions()) as running:
        running[0].is_tokenizer_other = True
        with pytest.raises(ConfigError, match=rf"--attach {running[0].url}: --tokenizer: not the server's own"):
            async with serving(settings(running, folder)):
                pass


async def test_a_batch_runs_on_attached_servers(folder: Path, tmp_path: Path):
    rows = [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": prompt(number % 3, 100), "max_tokens": 8},
        }
        for number in range(30)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with servers(FakeOptions(), FakeOptions()) as running:
        own = {
            "input": [tmp_path / "in.jsonl"],
            "output": tmp_path / "out.jsonl",
            "error_file": None,
            "max_errors": None,
            "shard": None,
            "summary": tmp_path / "summary.json",
            "resume": False,
            "strict": True,
            "progress": False,
        }
        said: list[str] = []
        call = commands.Invocation(settings(running, folder, run_dir=tmp_path), own, said.append, said.append)
        assert await commands._batch(call) == EXIT_OK
        assert sum(server.num_asked for server in running) == 30
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {answer["custom_id"] for answer in answers} == {row["custom_id"] for row in rows}
    assert {answer["response"]["status_code"] for answer in answers} == {200}
    assert any(
        answer["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] == 96 for answer in answers
    )
    assert said[-1].startswith("30 rows answered, 0 failed")


def test_attaching_needs_neither_ray_nor_vllm():
    code = "import sys, router.attach; print({'ray', 'vllm', 'torch'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout == "set()\n"
