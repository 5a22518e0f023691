"""`kvroute serve --attach` as a process of its own, over servers that speak as vLLM does."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.fake_vllm import FakeOptions, FakeVllm
from tests.support.tokenizers import write_model_folder


async def test_serve_answers_from_attached_servers_in_two_processes_until_it_is_told_to_end(tmp_path: Path):
    servers = [await FakeVllm(FakeOptions(has_events=has_events)).start() for has_events in (True, False)]
    command = [
        sys.executable,
        "-m",
        "router.cli",
        "serve",
        "--port",
        "0",
        "--routers",
        "2",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    command += [word for server in servers for word in ("--attach", server.attach)]
    command += ["--tokenizer", str(write_model_folder(tmp_path / "model"))]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    said: list[str] = []
    async with asyncio.timeout(120.0), aiohttp.ClientSession() as session:
        url = None
        while url is None:
            line = (await process.stderr.readline()).decode()
            assert line, "".join(said)
            said.append(line)
            listening = re.search(r"listening on (http://[^/]+)/v1", line)
            url = listening[1] if listening else None
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello. " * 20}], "max_tokens": 8}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
        assert answer["usage"]["completion_tokens"] == 8
        async with session.get(f"{url}/metrics") as response:
            metrics = await response.text()
        # Whichever process is asked; one that is too busy to answer another in time is left out.
        views: list[dict[str, Any]] = []
        while len(views) < 8:
            async with aiohttp.ClientSession() as asking, asking.get(f"{url}/dashboard/snapshot.json") as response:
                view = await response.json()
            views += [view] if len(view["routers"]) == 2 else []
        process.send_signal(signal.SIGTERM)
        rest = (await process.stderr.read()).decode()
        assert await process.wait() == 0, rest
    for view in views:
        assert sorted(router["num_requests"] for router in view["routers"]) == [0, 1]
        assert view["num_requests"] == sum(worker["num_requests"] for worker in view["workers"]) == 1
        assert view["decisions"][0]["router"] in {router["router"] for router in view["routers"]}
    for router in "01":
        labels = f'router="{router}",worker="127.0.0.1:{servers[1].port}"'
        assert f"kvroute_worker_hints_only{{{labels}}} 1.0" in metrics
    told = "".join(said)
    assert f"server 127.0.0.1:{servers[0].port} is ready: vllm serve 0.32.0, 64 blocks, KV events" in told
    assert f"server 127.0.0.1:{servers[1].port} is ready: vllm serve 0.32.0, 64 blocks, hints only" in told
    assert "starting Ray" not in told
    for server in servers:
        await server.stop()
