"""The HTTP connections to one attached server. Owns them, and knows nothing of what its answers mean for a cache."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from shared.errors import EngineError, KvrouteError
from worker.engines.attached_answers import (
    ServedModels,
    ServerMetrics,
    error_of_response,
    read_metrics,
    read_models,
)
from worker.engines.attached_options import AttachedServer

_KEEP_ALIVE_S = 2.0
"""Less than the 5 s after which vLLM's server closes a connection: of one that both pick up and close, nobody knows
whether the request was taken."""
_DRAIN_S = 1.0
"""Longest wait for the end of an answer that is told in full, after which its connection is given up."""
_MAX_ANSWER_BYTES = 16 << 20
_MAX_ERROR_BYTES = 64 << 10


class ServerGone(EngineError):
    """Nobody listens at the server's address, or the connection broke."""


class ServerClient:
    """Speaks to one server. `open` before anything else, then `close`.

    All methods raise `ServerGone` where the connection fails, and what `error_of_response` gives for an answer that is
    none; both are `KvrouteError`.
    """

    def __init__(self, server: AttachedServer, *, timeout_s: float) -> None:
        self._url = server.url
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        if server.rank is not None:
            self._headers["X-data-parallel-rank"] = str(server.rank)
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Be ready to connect. Needs a running loop."""
        self._session = aiohttp.ClientSession(
            # The router bounds what is under way; a second bound here would let requests wait unseen.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            # An answer may take as long as it takes, and wait in the server's queue before.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 16,
        )

    async def close(self) -> None:
        """Close all connections, those of requests under way as well."""
        if self._session is not None:
            await self._session.close()

    async def version(self) -> str:
        """The server's version; empty where it does not tell."""
        try:
            told = (await self._get_json("/version")).get("version")
        except (KvrouteError, AttributeError):
            return ""
        return told if isinstance(told, str) and told.isprintable() and len(told) < 64 else ""

    async def models(self) -> ServedModels:
        """What it serves."""
        return read_models(await self._get_json("/v1/models"))

    async def metrics(self, rank: int | None) -> ServerMetrics:
        """What it tells of one engine's load; nothing where it has no such page."""
        status, raw = await self._ask("GET", "/metrics")
        return read_metrics(raw.decode("utf-8", errors="replace"), rank) if status == 200 else ServerMetrics()

    async def is_healthy(self) -> bool:
        """Whether it says that its engine lives. Servers without such a page are well as long as they answer."""
        status, _ = await self._ask("GET", "/health")
        return status < 500

    async def tokenise(self, model: str, text: str) -> tuple[int, ...] | None:
        """A plain prompt's tokens by its own tokenizer; None where it does not tell."""
        body = {"model": model, "prompt": text, "add_special_tokens": True}
        status, raw = await self._ask("POST", "/tokenize", body)
        if status != 200:
            return None
        try:
            tokens = _json(raw, "/tokenize")["tokens"]
            return tuple(tokens) if set(map(type, tokens)) <= {int} else None
        except (KeyError, TypeError):
            return None

    async def reset_cache(self) -> None:
        """Have it drop its prefix cache, which it does where it runs in vLLM's development mode only."""
        status, raw = await self._ask("POST", "/reset_prefix_cache")
        if status in (404, 405):
            raise EngineError(f"{self._url} lets nobody reset its cache (vLLM does with VLLM_SERVER_DEV_MODE=1)")
        if status != 200:
            raise error_of_response(status, None, raw)

    @contextlib.asynccontextmanager
    async def completion(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to one completion, to be read as it comes. Left early it closes the connection, which has the
        server free the request.
        """
        assert self._session is not None
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body, allow_redirects=False) as response:
                if response.status != 200:
                    raw = await response.content.read(_MAX_ERROR_BYTES)
                    raise error_of_response(response.status, response.headers.get("Retry-After"), raw)
                yield response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerGone(f"the connection to {self._url} broke: {_words(error)}") from error

    async def _get_json(self, path: str) -> Any:
        status, raw = await self._ask("GET", path)
        if status != 200:
            raise error_of_response(status, None, raw)
        return _json(raw, path)

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and body of an answer that the server has at hand."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with self._session.request(
                method, self._url + path, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                raw = bytearray()
                async for part in response.content.iter_any():
                    raw += part
                    if len(raw) > _MAX_ANSWER_BYTES:
                        raise EngineError(f"{self._url}{path} answers with over {_MAX_ANSWER_BYTES} bytes")
                return response.status, bytes(raw)
        except TimeoutError as error:
            raise EngineError(f"{self._url}{path} gives no answer within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"{self._url} cannot be reached: {_words(error)}") from error


def _json(raw: bytes, path: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise EngineError(f"it answers {path} with something else than JSON") from None


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


async def drain(response: aiohttp.ClientResponse) -> None:
    """Read what follows the end of an answer, which is nothing, so that the connection can be used again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            async for _ in response.content.iter_any():
                pass
