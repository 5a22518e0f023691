"""The embedded store of a service or a deployment is killed: it is there again, filled again, and nobody is failed."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from redis import Redis, RedisError

from router import runfile
from tests.support.commands import assert_no_process_left, start_command, tagged_environment, tagged_processes
from tests.support.live_deployment import PATIENCE_S, LiveDeployment, until

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

SIMULATED = ["--model", "tiny", "--engine", "simulator", "--kv-cache-blocks", "200", "--max-model-len", "4096"]


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag for one test's processes; none of them may outlive it."""
    tag = uuid.uuid4().hex
    yield tag
    assert_no_process_left(tag)


def server_of(tag: str) -> tuple[psutil.Process, str]:
    """The store's server that a command has started, and its URL."""
    found = []
    for process in tagged_processes(tag):
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            # The keeper has the server's whole command among its arguments.
            if "--unixsocket" in command and "-I" not in command:
                found.append((process, "unix://" + command[command.index("--unixsocket") + 1]))
    (server,) = found
    return server


def workers_in(url: str) -> set[str]:
    """Workers that hold a lease and have told the store of blocks."""

    def having(client: Redis, kind: str) -> set[str]:
        keys = client.scan_iter(match=f"kvr:*:{kind}")
        return {key.decode().partition("}")[0].rpartition(":")[2] for key in keys}

    with contextlib.suppress(RedisError), Redis.from_url(url) as client:
        return having(client, "meta") & having(client, "blocks")
    return set()


async def test_service_goes_on_while_its_store_is_killed_and_fills_the_one_that_follows(
    tmp_path: Path, tag: str
) -> None:
    process = start_command(
        *("serve", "--port", "0", "--workers", "2", "--policy", "round_robin", *SIMULATED),
        *("--run-dir", tmp_path / "run", "--files-dir", tmp_path / "files"),
        environment=tagged_environment(tag),
    )
    assert process.stderr is not None
    port = 0
    while not port:
        line = await asyncio.to_thread(process.stderr.readline)
        assert line, process.wait()
        if "listening on http://127.0.0.1:" in line:
            port = int(line.partition("127.0.0.1:")[2].partition("/")[0])

    async def ask(number: int) -> None:
        body = f'{{"model": "tiny", "prompt": "{number} {"word " * 100}", "max_tokens": 4}}'.encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer

    try:
        async with asyncio.timeout(PATIENCE_S):
            number = 0
            server, url = server_of(tag)
            for death in (1, 2):
                while workers_in(url) != {"w0", "w1"}:
                    await ask(number := number + 1)
                server, _ = server_of(tag)
                server.kill()
                for _ in range(20):
                    await ask(number := number + 1)
                while "started again" not in (line := await asyncio.to_thread(process.stderr.readline)):
                    assert line
                assert f"has died by signal 9 and is started again, empty: workers fill it ({death} of" in line
            while workers_in(url) != {"w0", "w1"}:
                await ask(number := number + 1)
            keeper = server_of(tag)[0].parent()
            assert keeper is not None
            keeper.kill()
            while "the keeper of the store" not in (line := await asyncio.to_thread(process.stderr.readline)):
                assert line
            assert "both are started again, empty: workers fill the store" in line
            while workers_in(url) != {"w0", "w1"}:
                await ask(number := number + 1)
    finally:
        process.terminate()
        await asyncio.to_thread(process.communicate)
    assert process.returncode == 0


async def test_store_of_a_deployment_is_started_again_and_status_tells(tmp_path: Path, tag: str) -> None:
    (tmp_path / "prompt.txt").write_text("word " * 300)
    with tempfile.TemporaryDirectory() as run_dir:
        deployment = LiveDeployment(Path(run_dir), tagged_environment(tag))
        code, told = await deployment.run("up", *SIMULATED)
        assert code == 0, told
        code, told = await deployment.run("warmup", "kept", "--file", tmp_path / "prompt.txt")
        assert code == 0, told
        assert (await deployment.status())["store_restarts"] == []
        server, url = server_of(tag)
        assert url == runfile.running(deployment.run_dir).redis_url
        server.kill()
        await until(lambda: workers_in(url) == {"w0"})
        async with asyncio.timeout(PATIENCE_S):
            while True:
                status = await deployment.status()
                pins = await deployment.show("pins")
                states = [row["state"] for pin in pins["pins"] for row in pin["workers"]]
                if (status["workers"][0]["state"], states) == ("ready", ["pinned"]):
                    break
        (line,) = status["store_restarts"]
        assert "has died by signal 9 and is started again" in line
        keeper = server_of(tag)[0].parent()
        assert keeper is not None
        keeper.kill()
        status = await deployment.status()
        assert (status["is_store_kept"], status["store"].partition(":")[0]) == (False, "unreachable")
        code, told = await deployment.run("up", *SIMULATED)
        assert code == 0, told
        assert "the keeper of the store had died, and the store with it: both are started again" in told
        await until(lambda: workers_in(url) == {"w0"})
        code, told = await deployment.run("down")
        assert code == 0, told
