"""`kvroute serve --attach` as a process of its own, over servers that speak as vLLM does."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from tests.support.batches import chat_row
from tests.support.commands import needs_curl
from tests.support.fake_vllm import FakeOptions, FakeVllm
from tests.support.tokenizers import write_model_folder
from worker.engines.profiles import LatencyProfile

PATIENCE_S = 120.0


@dataclass
class Served:
    """A running command, and what it has told until it listened."""

    process: asyncio.subprocess.Process
    url: str
    said: list[str] = field(default_factory=list)

    async def end(self, sent: signal.Signals) -> str:
        """End it, and wait until it has; gives what it told after it listened."""
        self.process.send_signal(sent)
        assert self.process.stderr is not None
        rest = (await self.process.stderr.read()).decode()
        await self.process.wait()
        return rest


@asynccontextmanager
async def served(folder: Path, servers: list[FakeVllm], *arguments: str) -> AsyncIterator[Served]:
    """The command over so many servers, on a port of its own, once it listens."""
    command = [sys.executable, "-m", "router.cli", "serve", "--port", "0", "--run-dir", str(folder / "run")]
    command += [word for server in servers for word in ("--attach", server.attach)]
    command += ["--tokenizer", str(write_model_folder(folder / "model")), "--files-dir", str(folder / "files")]
    process = await asyncio.create_subprocess_exec(*command, *arguments, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        said: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            # The banner's last line is the call to try.
            while not (said and said[-1].startswith("kvroute:   curl ")):
                line = (await process.stderr.readline()).decode()
                assert line, "".join(said)
                said.append(line)
        listening = re.search(r"listening on (http://[^/]+)/v1", "".join(said))
        assert listening is not None
        yield Served(process, listening[1], said)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_serve_answers_from_attached_servers_in_two_processes_until_it_is_told_to_end(tmp_path: Path):
    servers = [await FakeVllm(FakeOptions(has_events=has_events)).start() for has_events in (True, False)]
    async with (
        asyncio.timeout(PATIENCE_S),
        served(tmp_path, servers, "--routers", "2") as one,
        aiohttp.ClientSession() as session,
    ):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello. " * 20}], "max_tokens": 8}
        async with session.post(f"{one.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
        assert answer["usage"]["completion_tokens"] == 8
        async with session.get(f"{one.url}/metrics") as response:
            metrics = await response.text()
        # Whichever process is asked; one that is too busy to answer another in time is left out.
        views: list[dict[str, Any]] = []
        while len(views) < 8:
            async with aiohttp.ClientSession() as asking, asking.get(f"{one.url}/dashboard/snapshot.json") as response:
                view = await response.json()
            views += [view] if len(view["routers"]) == 2 else []
        rest = await one.end(signal.SIGTERM)
        assert one.process.returncode == 0, rest
    for view in views:
        assert sorted(router["num_requests"] for router in view["routers"]) == [0, 1]
        assert view["num_requests"] == sum(worker["num_requests"] for worker in view["workers"]) == 1
        assert view["decisions"][0]["router"] in {router["router"] for router in view["routers"]}
        assert [flag["name"] for flag in view["flags"]] == ["hints only"]
    for router in "01":
        labels = f'router="{router}",worker="127.0.0.1:{servers[1].port}"'
        assert f"kvroute_worker_hints_only{{{labels}}} 1.0" in metrics
    told = "".join(one.said)
    assert f"server 127.0.0.1:{servers[0].port} is ready: vllm serve 0.32.0, 64 blocks, KV events" in told
    assert f"server 127.0.0.1:{servers[1].port} is ready: vllm serve 0.32.0, 64 blocks, hints only" in told
    assert "starting Ray" not in told
    for server in servers:
        await server.stop()


async def test_all_processes_finish_the_streams_that_they_have_when_told_to_end(tmp_path: Path):
    pace = LatencyProfile("slow", 0.03, 1e-6, 1e-10, 1e-6, 1e-9)
    server = await FakeVllm(FakeOptions(profile=pace, max_num_seqs=16, num_blocks=256)).start()
    num_begun, have_all_begun = 0, asyncio.Event()

    async def read(url: str, number: int) -> str:
        nonlocal num_begun
        # A client of its own, so that no two share a connection: which process gets one is the system's choice.
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(
                model="tiny", prompt=f"question {number}", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
            )
            reasons = []
            async for chunk in stream:
                if not reasons:
                    num_begun += 1
                    if num_begun == 16:
                        have_all_begun.set()
                reasons.append(chunk.choices[0].finish_reason)
            assert set(reasons[:-1]) == {None}
            return str(reasons[-1])

    async with asyncio.timeout(PATIENCE_S), served(tmp_path, [server], "--routers", "3") as one:
        reading = [asyncio.create_task(read(one.url, number)) for number in range(16)]
        await have_all_begun.wait()
        rest = await one.end(signal.SIGTERM)
        assert (one.process.returncode, rest.splitlines()[-1]) == (0, "kvroute: stopped")
        assert await asyncio.gather(*reading) == ["length"] * 16
    await server.stop()


@needs_curl
@pytest.mark.parametrize("key", ["", "sk-the-only-one"])
async def test_call_that_the_banner_gives_works(tmp_path: Path, key: str):
    server = await FakeVllm().start()
    async with served(tmp_path, [server], *(["--api-key", key] if key else [])) as one:
        command = one.said[-1].removeprefix("kvroute: ").strip().replace("KEY'", f"{key}'")
        # A prompt is all that it gives, and without a bound the answer is as long as the context lets it be.
        command = command.replace("}]}", '}], "max_tokens": 5}')
        ran = await asyncio.create_subprocess_shell(
            f"{command} -sS --fail-with-body", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        told, _ = await asyncio.wait_for(ran.communicate(), PATIENCE_S)
        assert ran.returncode == 0, told
        assert json.loads(told)["usage"]["completion_tokens"] == 5
    await server.stop()


async def test_top_and_explain_ask_a_server_that_needs_a_key(tmp_path: Path):
    key, messages = "sk-the-only-one", tmp_path / "messages.json"
    messages.write_text('[{"role": "user", "content": "What goes where, and why?"}]')
    server = await FakeVllm().start()

    async def run(*arguments: str, **variables: str) -> tuple[int | None, bytes]:
        command = [sys.executable, "-m", "router.cli", *arguments, "--url", one.url]
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **variables},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        return process.returncode, told

    async with served(tmp_path, [server], "--api-key", key) as one:
        worker = f"127.0.0.1:{server.port}"
        code, told = await run("top", "--once", KVROUTE_API_KEY=key)
        assert (code, f"{worker}  ready".encode() in told) == (0, True), told
        code, told = await run("explain", "--messages", str(messages), "--json", KVROUTE_API_KEY=key)
        assert (code, json.loads(told)["worker"]) == (0, worker)
        messages.write_text(json.dumps([{"role": "user", "content": "x" * 2000}]))
        code, told = await run("explain", "--messages", str(messages), KVROUTE_API_KEY=key)
        assert (code, b"no worker's context is longer than 1024 tokens" in told) == (1, True), told
        code, told = await run("top", "--once", KVROUTE_API_KEY="sk-another-one")
        assert (code, b"401: Incorrect API key provided." in told, b"Traceback" in told) == (1, True, False), told
    await server.stop()


async def test_batch_of_a_killed_server_is_finished_by_the_next_one_without_doing_anything_twice(tmp_path: Path):
    num_rows, num_before = 60, 5
    rows = [chat_row(f"row-{number}", f"question {number}", model="tiny", max_tokens=8) for number in range(num_rows)]
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    server = await FakeVllm().start()
    is_killed = asyncio.Event()

    async def never(request: web.Request) -> web.StreamResponse:
        await is_killed.wait()
        return web.Response(status=503)

    async with asyncio.timeout(PATIENCE_S):
        async with served(tmp_path, [server]) as one, client_of(one) as client:
            num_probes = server.num_asked
            uploaded = await client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = await client.batches.create(
                input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            while server.num_asked - num_probes < num_before:
                await asyncio.sleep(0.001)
            # No more answers, so that however slow this is the batch is not done before the end.
            server.answer_with = never
            while batch.request_counts is None or batch.request_counts.completed < num_before:
                batch = await client.batches.retrieve(batch.id)
            await one.end(signal.SIGKILL)
        is_killed.set()
        server.answer_with = None
        num_done = batch.request_counts.completed
        async with served(tmp_path, [server]) as one, client_of(one) as client:
            num_asked = server.num_asked
            while (batch := await client.batches.retrieve(batch.id)).status != "completed":
                assert batch.status in ("validating", "in_progress", "finalizing"), batch.errors
                await asyncio.sleep(0.05)
            assert batch.request_counts is not None
            assert (batch.request_counts.completed, batch.request_counts.failed) == (num_rows, 0)
            assert batch.output_file_id is not None
            lines = (await client.files.content(batch.output_file_id)).text.splitlines()
            assert uploaded.id in {stored.id async for stored in client.files.list()}
    names = Counter(json.loads(line)["custom_id"] for line in lines)
    assert names == Counter(row["custom_id"] for row in rows)
    # What was on disk is not computed again.
    assert server.num_asked - num_asked <= num_rows - num_done
    await server.stop()


def client_of(one: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none")
