"""One HTTP request and its answer, as a handler sees them; knows nothing of what is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, Container, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson

from router.failures import RETRY_S, error_body, retry_headers, status_of
from router.fields import brief
from router.keys import Allowance, Caller
from shared.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidRequest,
    KvrouteError,
    NoWorker,
    Overloaded,
    RequestTimeout,
    Unauthorized,
)

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

CALLER = "kvroute.caller"
"""Under which a mounted application's scope has the caller whose key was shown."""
DEPARTURE = "kvroute.departure"
"""Under which a request's scope has the `Departure` of its connection."""

_JSON: Header = (b"content-type", b"application/json")
_MAX_ID_CHARS = 128
_SAFE_ID = re.compile(rb"[\x21-\x7e]+")
_MAX_LINGER_READS = 4096
_PORT = re.compile(r":\d*$")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a caller may take of the server, beside what a key allows."""

    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 32 << 10
    """Request line and headers together."""
    max_connections: int = 16_384
    header_timeout_s: float = 10.0
    """From a connection's or request's first byte to the end of its headers."""
    body_timeout_s: float = 60.0
    linger_s: float = 2.0
    """How long what is too large may still come in before that is told."""
    idle_timeout_s: float = 75.0
    """How long a connection may stay without a request; longer than clients and balancers keep one, so that they are
    the ones to close it."""
    write_timeout_s: float = 60.0
    """How long a reader may leave its answer lying."""


class ClientGone(Exception):
    """The caller has closed the connection: nobody is left to answer."""


class Departure:
    """Tells when a connection has been closed by its caller, to the one request that it is busy with.

    ASGI's own way is a message that has to be waited for, which takes a task beside each request.
    """

    def __init__(self) -> None:
        self.is_body_in = False
        """Whether all of the body has come of the request that came last."""
        self.is_told = False
        self.on_told: Callable[[], None] | None = None

    def tell(self) -> None:
        """Note it. Modifies."""
        self.is_told = True
        if self.on_told is not None:
            self.on_told()


class Call:
    """One request of a caller. At most one answer is sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, own_id: str) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        shown = self.headers.get(b"x-request-id", b"")
        self.request_id = shown if len(shown) <= _MAX_ID_CHARS and _SAFE_ID.fullmatch(shown) else own_id.encode()
        self.has_begun = False
        """Whether the answer's status is out."""
        self.has_ended = False
        """Whether all of the answer is out."""
        self.extra_headers: list[Header] = []
        """Headers that go with whatever is answered."""

    async def body(self, limits: Limits) -> bytes:
        """All of the request's body.

        Raises:
            BodyTooLarge: it is, or says that it will be.
            RequestTimeout: it does not come.
            ClientGone: the caller left before its end.
        """
        max_bytes = limits.max_body_bytes
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced[:20]) > max_bytes:
            await self._refuse_body(limits, has_more=True)
        if self.scope[DEPARTURE].is_body_in:
            # A timer takes longer than to read what is here.
            body, has_more = await self._read(max_bytes)
        else:
            try:
                async with asyncio.timeout(limits.body_timeout_s):
                    body, has_more = await self._read(max_bytes)
            except TimeoutError:
                raise RequestTimeout(
                    f"the request's body did not arrive within {limits.body_timeout_s:g} s", retry_after_s=RETRY_S
                ) from None
        if len(body) > max_bytes:
            await self._refuse_body(limits, has_more)
        return body

    async def _read(self, max_bytes: int) -> tuple[bytes, bool]:
        """The body, and whether there is more of it: where it is longer than that, not all is read."""
        parts: list[bytes] = []
        num_bytes, has_more = 0, True
        while has_more and num_bytes <= max_bytes:
            part, has_more = await self.next_part()
            parts.append(part)
            num_bytes += len(part)
        return b"".join(parts), has_more

    async def next_part(self) -> tuple[bytes, bool]:
        """Some more of the body, and whether that was not all. Raises `ClientGone`."""
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    async def _refuse_body(self, limits: Limits, has_more: bool) -> NoReturn:
        """Let a body that is too large run out for a while, since most callers listen only then; raises."""
        num_reads = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.0 if b"expect" in self.headers else limits.linger_s):
                while has_more and num_reads < _MAX_LINGER_READS:
                    _, has_more = await self.next_part()
                    num_reads += 1
        raise BodyTooLarge(f"the request's body is over the limit of {limits.max_body_bytes} bytes")

    def check_json(self) -> None:
        """Raise `InvalidRequest` where the body is not said to be JSON.

        Also keeps foreign pages in a browser from asking, since they may only send other types unasked.
        """
        kind = self.headers.get(b"content-type", b"")
        if kind.partition(b";")[0].strip().lower() != b"application/json":
            raise InvalidRequest("the header 'Content-Type' must be 'application/json'", param="content-type")

    def check_own_page(self) -> None:
        """Raise `Forbidden` where a page of somebody else has a browser send this, with its user's password perhaps.

        For what browsers send unasked, as forms are. Callers that are no browsers say nothing of pages.
        """
        if self.headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            raise Forbidden("This is not taken from pages of other sites.")

    def check_host(self, names: Container[str]) -> None:
        """Raise `Forbidden` where this was sent for a host with another name.

        A page of another site may give the name of its own host this machine's address, and is then let by a browser to
        read what is answered here. That takes a name, so that addresses are taken; and so is what names no host, as
        every browser does.
        """
        shown = self.headers.get(b"host")
        if shown is None:
            return
        name = _PORT.sub("", shown.decode("latin-1").lower()).removesuffix(".")
        if name not in names and not name.endswith(".localhost") and not _is_address(name):
            raise Forbidden(
                f"This server asks for no key, and so takes no requests for the host {brief(name)}, since a page of "
                "another site may have sent them: use localhost or an address, have your proxy send 'Host: localhost', "
                "or start the server with --api-key or --api-key-file.",
                param="host",
            )

    async def json(self, limits: Limits) -> Any:
        """The body as JSON. Raises what `body` does, and `InvalidRequest`."""
        self.check_json()
        raw = await self.body(limits)
        try:
            return orjson.loads(raw)
        except ValueError as error:
            raise InvalidRequest(f"the request body is not JSON: {_told(error)}") from None

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        """Send status and headers; the body is to follow by `write`."""
        self.has_begun = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"x-request-id", self.request_id), *self.extra_headers, *headers],
            }
        )

    async def write(self, body: bytes, *, is_last: bool = False) -> None:
        """Send more of the body. Waits while the reader is slow."""
        self.has_ended = is_last
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def respond(self, status: int, body: bytes, headers: Sequence[Header] = (_JSON,)) -> None:
        """Send a whole answer."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.write(body, is_last=True)

    async def respond_json(self, body: Any, status: int = 200, headers: Sequence[Header] = ()) -> None:
        await self.respond(status, orjson.dumps(body), [_JSON, *headers])

    async def pass_on(self, app: App, caller: Caller) -> None:
        """Have another application answer, which finds whose call it is in the scope, under `CALLER`."""
        self.has_begun = self.has_ended = True
        await app({**self.scope, CALLER: caller}, self.receive, self._send)

    async def fail(self, error: BaseException) -> None:
        """Answer with an error, or end an answer that has begun with one, as an event."""
        if self.has_begun:
            await self.write(b"data: " + _encoded(error_body(error)) + b"\n\n", is_last=True)
            return
        status = status_of(error)
        headers = [_JSON, *retry_headers(error)]
        if isinstance(error, Unauthorized):
            # Browsers ask their user for a password, and show it from then on: that is how the dashboard is let in.
            # One header for each way: Chromium reads no second one behind a comma.
            headers += [(b"www-authenticate", way + b' realm="kvroute"') for way in (b"Bearer", b"Basic")]
        if isinstance(error, (BodyTooLarge, RequestTimeout)):
            # What is left of the body is not to be waited for.
            headers.append((b"connection", b"close"))
        await self.respond(status, _encoded(error_body(error)), headers)


class Counted:
    """Counts a request against what its key may do, and has its answer tell what is left. Use as `with`.

    Raises `Overloaded`, with the time to come back.
    """

    def __init__(self, call: Call, allowance: Allowance) -> None:
        self._call = call
        self._allowance = allowance

    def __enter__(self) -> None:
        try:
            self._allowance.take()
        finally:
            self._call.extra_headers += self._allowance.headers()

    def __exit__(self, *_: object) -> None:
        self._allowance.give_back()


class WhileConnected:
    """Ends the block with `ClientGone` once the caller has gone. Use as `async with`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._departure: Departure = call.scope[DEPARTURE]
        self._is_gone = False

    async def __aenter__(self) -> WhileConnected:
        if self._departure.is_told:
            raise ClientGone
        self._task = asyncio.current_task()
        self._departure.on_told = self._end
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._departure.on_told = None
        if self._is_gone and self._task is not None:
            # Somebody else's cancellation is let through.
            if self._task.uncancel() > 0:
                return
            if kind is asyncio.CancelledError or kind is None:
                raise ClientGone

    def _end(self) -> None:
        if not self._call.has_ended and self._task is not None:
            self._is_gone = True
            self._task.cancel()


def log_failure(call: Call, error: BaseException) -> None:
    """Tell of an error that a request ended with: loud where it is ours, and speaks of this request alone."""
    name = call.request_id.decode()
    if not isinstance(error, KvrouteError):
        logger.error("request %s: internal error", name, exc_info=error)
    elif status_of(error) >= 500 and not isinstance(error, (NoWorker, Overloaded)):
        logger.warning("request %s failed: %s", name, error)
    else:
        logger.debug("request %s refused: %s", name, error)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _encoded(body: Any) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:
        # A message may quote half of a surrogate pair, which the fast encoder does not take.
        return json.dumps(body).encode()


def _told(error: ValueError) -> str:
    # Of what orjson says, the place; its beginning may quote the input.
    return (str(error).splitlines() or ["it cannot be parsed"])[0][:200]
