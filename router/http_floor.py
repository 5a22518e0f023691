"""The least that any server here takes for the same requests: uvicorn reads the body and answers, and that is all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from router.http_call import Receive, Scope, Send
from router.http_server import UVICORN_OPTIONS

_WHOLE, _STREAMED = (
    b'{"answer":"%b","usage":{"prompt_tokens":0,"completion_tokens":16}}' % (b"x" * num_bytes)
    for num_bytes in (350, 880)
)
"""As long as a router's answers of 16 tokens that come at once."""
_IS_STREAMED = b'"stream": true'
_TAIL_BYTES = 200


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body and answer, in chunks where a stream is asked for."""
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    is_streamed = _IS_STREAMED in body[-_TAIL_BYTES:]
    told = _STREAMED if is_streamed else _WHOLE
    headers = [(b"content-type", b"application/json")]
    if not is_streamed:
        headers.append((b"content-length", b"%d" % len(told)))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": told})


@contextlib.asynccontextmanager
async def serving_floor() -> AsyncIterator[int]:
    """Answer on a port of this host, which is given, with the options of the router's own server."""
    config = uvicorn.Config(answer, **UVICORN_OPTIONS)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: HttpToolsProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
