"""Listens for HTTP: sockets, what a connection may take of time and room, and the graceful end.

Knows nothing of what is asked for. uvicorn does the talking; here is what it lacks: limits on headers, on slow senders
and on slow readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.failures import body_of
from router.http_call import DEPARTURE, Departure, Limits, Receive, Scope, Send
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

_MOST_JOINED_BYTES = 64 << 10
_LAST_WORDS_S = 1
"""How long connections may take to end once nothing is under way any more."""
UVICORN_OPTIONS: Mapping[str, Any] = {
    "ws": "none",
    "lifespan": "off",
    "log_config": None,
    "log_level": "error",
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
}
"""What uvicorn is to leave out."""


class Endable(Protocol):
    """An application that can be told to end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def cut(self) -> None:
        """Begin nothing more, and end what is under way, with an error each."""
        ...


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A bound socket, which refuses connections until something listens on it; with `is_shared` other processes may
    bind the same address and get their part.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        (family, kind, *_, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        bound = socket.socket(family, kind)
        try:
            # Connections of a server that has just ended keep nobody from the port.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
        return bound
    except (OSError, OverflowError) as error:
        raise _cannot_listen(f"{host} port {port}", error) from None


def _cannot_listen(where: str, error: Exception) -> ConfigError:
    told = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"--host, --port: cannot listen on {where}: {told}")


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can connect to what `bind` takes for such an address or name."""
    try:
        (*_, address), *_ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return ipaddress.ip_address(address[0]).is_loopback
    except (OSError, ValueError):
        return False


@contextlib.asynccontextmanager
async def serving_http(app: Endable, sockets: Sequence[socket.socket], limits: Limits) -> AsyncIterator[None]:
    """Listen and answer on bound `sockets`, which are closed at the end; what is then under way is cut off.

    Raises `ConfigError` where somebody else listens there by now.
    """
    config = uvicorn.Config(
        app,
        http=functools.partial(_Connection, limits=limits),  # type: ignore[arg-type]
        timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=_LAST_WORDS_S,
        **UVICORN_OPTIONS,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(list(sockets)), name="http-server")
    try:
        starting = asyncio.create_task(server.has_started.wait())
        await asyncio.wait([starting, task], return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        if task.done():
            task.result()
        yield
    finally:
        app.cut()
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """A server whose signals are its owner's business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:
            # Somebody else has bound the same address, and was the first to listen.
            names = [bound.getsockname() for bound in sockets or ()]
            raise _cannot_listen(", ".join(f"{host} port {port}" for host, port, *_ in names), error) from None
        self.has_started.set()


class _JoinedWrites:
    """A transport that hands on in one go what is written in one turn of the loop: the head of an answer and its body,
    which would be two calls of the system.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._num_bytes += len(data)
        if self._num_bytes >= _MOST_JOINED_BYTES:
            # So that the writer hears in time that its reader is slow.
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._num_bytes = 0
            self._transport.write(data)


class _Connection(HttpToolsProtocol):
    """One connection, with limits on what comes before a request's body and on what its reader leaves lying."""

    def __init__(self, *arguments: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._departure = Departure()
        self._is_in_headers = True
        self._num_header_bytes = 0
        """Of headers that have come in several reads."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _JoinedWrites(transport, self.loop)))
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503, "service_unavailable", "there are too many connections")
            return
        self._header_timer = self.loop.call_later(self._limits.idle_timeout_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        super().connection_lost(exc)
        self._departure.tell()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        # What comes between two requests is no request yet, and ends uvicorn's own wait for one.
        is_idle = self.cycle is None or (self.cycle.response_complete and self.timeout_keep_alive_task is None)
        if not (self._is_in_headers or is_idle):
            return
        if self._num_header_bytes == 0:
            self._stop_header_timer()
            self._header_timer = self.loop.call_later(self._limits.header_timeout_s, self._give_up_headers)
        self._num_header_bytes += len(data)
        if self._num_header_bytes > self._limits.max_header_bytes:
            self._refuse(431, "request_headers_too_large", "the request's headers are over the limit")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[DEPARTURE] = self._departure  # type: ignore[literal-required]
        self._departure.is_body_in = False
        self._is_in_headers = True

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._num_header_bytes = 0
        self._stop_header_timer()
        num_bytes = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
        if num_bytes > self._limits.max_header_bytes:
            self.app = _too_large
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._departure.is_body_in = True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self._give_up_reader)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_request_error", "the request is not HTTP/1.1")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer what never reaches the application, and close."""
        if not self.transport.is_closing():
            # What is broken may be the body of a request that nobody has answered yet.
            if self.cycle is None or self.cycle.response_complete or self._is_in_body:
                self.transport.write(_canned(status, code, message))
            self.transport.close()

    @property
    def _is_in_body(self) -> bool:
        """Whether what comes in belongs to a request that waits for it."""
        return self.cycle.more_body and not self.cycle.response_started

    def _give_up_headers(self) -> None:
        self._refuse(408, "request_timeout", "the request's headers did not arrive in time")

    def _give_up_reader(self) -> None:
        logger.info("a connection is cut: its reader takes nothing of its answer")
        self.transport.abort()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


async def _too_large(scope: Any, receive: Any, send: Any) -> None:
    body = body_of("the request's headers are over the limit", "request_headers_too_large")
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-should-retry", b"false"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 431, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _canned(status: int, code: str, message: str) -> bytes:
    body = body_of(message, code)
    return (
        b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-should-retry: %b\r\n"
        b"connection: close\r\n\r\n%b" % (status, len(body), b"true" if status in (408, 503) else b"false", body)
    )
