"""Where `kvroute top` and `kvroute explain` get what they show."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.prompts import Prompt
from router.top_command import run_explain, run_top
from shared.config import Settings
from shared.errors import ConfigError, KvrouteError, NoWorker


@contextlib.asynccontextmanager
async def answering(status: str, body: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server with one answer; gives its address and what it was asked."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        asked.append(head + await reader.readexactly(length))
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


async def top(url: str | None, settings: Settings | None = None) -> list[str]:
    """What one look shows."""
    shown: list[str] = []
    own: dict[str, Any] = {"url": url, "json": True, "once": True}
    await run_top(settings or Settings(), None, own, lambda line: None, shown.append)
    return shown


async def test_snapshot_of_a_front_is_shown_and_the_key_goes_with_the_question() -> None:
    async with answering("200 OK", b'{"version": "x"}') as (url, asked):
        shown = await top(url, Settings(api_key="secret"))  # type: ignore[arg-type]
    assert [json.loads(line) for line in shown] == [{"version": "x"}]
    assert asked[0].startswith(b"GET /dashboard/snapshot.json ")
    assert b"Authorization: Bearer secret" in asked[0]


async def test_prompt_is_sent_to_the_front() -> None:
    async with answering("200 OK", b'{"worker": "w1"}') as (url, asked):
        prompt = Prompt(None, [{"role": "user", "content": "hi"}], "salt")
        told = await run_explain(Settings(), None, {"url": url}, prompt, lambda line: None)
    assert told == {"worker": "w1"}
    assert asked[0].startswith(b"POST /dashboard/explain ")
    assert json.loads(asked[0].partition(b"\r\n\r\n")[2]) == {
        "messages": [{"role": "user", "content": "hi"}],
        "cache_salt": "salt",
        "tenant": "",
    }


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        ("401 Unauthorized", b'{"error": {"message": "Incorrect API key"}}', "401: Incorrect API key; --api-key"),
        ("404 Not Found", b"nothing", "404: Not Found"),
        ("200 OK", b"<html>", "is not JSON: is this a kvroute"),
    ],
)
async def test_refusal_is_told_with_its_reason(status: str, body: bytes, message: str) -> None:
    async with answering(status, body) as (url, _):
        with pytest.raises(KvrouteError, match=message):
            await top(url)


async def test_nobody_at_the_address_is_told_with_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NoWorker, match=rf"nothing answers at http://127.0.0.1:{port}/.* no `kvroute up` runs"):
        await top(None, Settings(port=port))


async def test_url_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="--url: 'ftp://x'"):
        await top("ftp://x")
