"""The server on real sockets: what it takes from callers that are broken, slow or hostile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from router.dashboard import dashboard_app
from router.http_call import DEPARTURE, Call, Departure, Limits, Receive, Scope, Send
from router.http_server import _JoinedWrites, bind, is_loopback, serving_http
from router.requests import Generated, GenerateRequest, RequestTrace
from router.tokenizer import Tokenizer
from shared.errors import BodyTooLarge, ConfigError
from shared.types import FinishReason
from tests.support.fake_generate import FakeGenerate
from tests.support.http_front import PATIENT_S, echo, listening, make_front
from tests.support.tokenizers import write_model_folder

BODY = b'{"model": "m", "prompt": "abc", "stream": true}'
QUICK = Limits(
    max_body_bytes=1000,
    max_header_bytes=2000,
    header_timeout_s=0.2,
    body_timeout_s=0.2,
    write_timeout_s=0.2,
    linger_s=0.1,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


def post(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    given = [b"host: x", b"content-type: application/json", b"content-length: %d" % (length or len(body)), *headers]
    return b"POST /v1/completions HTTP/1.1\r\n" + b"\r\n".join(given) + b"\r\n\r\n" + body


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    async with asyncio.timeout(PATIENT_S):
        connection = socket.socket()
        # Little enough to be full soon where nobody reads.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 12)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def answers(url: str, *sent: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Everything that comes back until the server closes the connection: (status, headers, rest) of each answer."""
    async with connected(url) as (reader, writer):
        for raw in sent:
            writer.write(raw)
            await writer.drain()
        raw = await reader.read()
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = int(headers.get("content-length", len(raw)))
        found.append((int(status.split()[1]), headers, raw[:length]))
        raw = raw[length:]
    return found


def code(body: bytes) -> str:
    told: str = json.loads(body)["error"]["code"]
    return told


async def test_answers_over_a_socket_are_kept_alive_and_pipelined(tokenizer: Tokenizer) -> None:
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer)
    get = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    async with listening(front) as url:
        last = get.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        found = await answers(url, get + get, last)
    assert [status for status, _, _ in found] == [200, 200, 200]


@pytest.mark.parametrize(
    ("sent", "status", "told"),
    [
        ((b"nonsense\r\n\r\n",), 400, "invalid_request_error"),
        ((b"GET /\xff HTTP/1.1\r\n\r\n",), 400, "invalid_request_error"),
        ((b"GET / HTTP/1.1\r\nx: " + b"a" * 2000 + b"\r\n\r\n",), 431, "request_headers_too_large"),
        ((b"GET /" + b"a" * 1000, b"a" * 1000, b"a" * 1000), 431, "request_headers_too_large"),
        ((b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 400,), 431, "request_headers_too_large"),
        ((b"GET / HTTP/1.1\r\nhost:",), 408, "request_timeout"),
        ((b"\r\n",), 408, "request_timeout"),
        ((post(b"x" * 1001),), 413, "request_too_large"),
        ((post(b"x" * 100, length=10**12),), 413, "request_too_large"),
        ((post(b"{", length=2),), 408, "request_timeout"),
        (
            (
                b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
                + b"c8\r\n" + b"x" * 200 + b"\r\n",
                b"3e8\r\n" + b"x" * 1000 + b"\r\n",
            ),
            413,
            "request_too_large",
        ),
        (
            (
                b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
                + b"2\r\n{}\r\n",
                b"ZZ\r\n",
            ),
            400,
            "invalid_request_error",
        ),
    ],
    ids=["no-http", "bad-path", "long-header", "long-line", "many-headers", "slow-headers", "newlines", "long-body",
         "announced", "slow-body", "chunked", "bad-chunk"],
)  # fmt: skip
async def test_broken_and_hostile_senders_get_an_answer_and_lose_the_connection(
    tokenizer: Tokenizer, sent: tuple[bytes, ...], status: int, told: str
) -> None:
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, limits=QUICK)
    async with listening(front) as url:
        ((found, headers, body),) = await answers(url, *sent)
    assert (found, code(body), headers["connection"]) == (status, told, "close")
    assert headers["x-should-retry"] == ("true" if status == 408 else "false")
    assert front.num_under_way == 0


@pytest.mark.parametrize("beginning", [b"GET /version HTTP/1.1\r\nx: ", post(b"", length=900)], ids=["headers", "body"])
async def test_sender_that_trickles_is_given_up_however_steady(tokenizer: Tokenizer, beginning: bytes) -> None:
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, limits=QUICK)

    async def trickle(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.01)

    async with listening(front) as url, connected(url) as (reader, writer):
        writer.write(beginning)
        trickling = asyncio.create_task(trickle(writer))
        raw = await reader.readuntil(b"\r\n\r\n")
        trickling.cancel()
    assert raw.startswith(b"HTTP/1.1 408")
    assert front.num_under_way == 0


async def test_caller_that_leaves_amid_a_prompt_to_explain_is_no_fault_of_ours(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    is_asked = asyncio.Event()

    async def take(with_history: bool) -> Any:
        raise AssertionError("nobody looks")

    async def explained(raw: bytes, caller: Any) -> Any:
        raise AssertionError("it never comes whole")

    page = dashboard_app(take, explained)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        is_asked.set()
        await page(scope, receive, send)

    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, mounts={"dashboard": watched})
    async with listening(front) as url:
        async with connected(url) as (_, writer):
            writer.write(post(b"{", length=900).replace(b"/v1/completions", b"/dashboard/explain"))
            await is_asked.wait()
        async with asyncio.timeout(PATIENT_S):
            while front.num_under_way:
                await asyncio.sleep(0.01)
    assert caplog.records == []


async def test_request_after_a_refused_one_finds_a_server_that_works(tokenizer: Tokenizer) -> None:
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, limits=QUICK)
    async with listening(front) as url:
        for _ in range(3):
            await answers(url, post(b"x" * 1001))
        ((status, _, _),) = await answers(url, post(BODY, b"connection: close"))
    assert status == 200


async def test_connection_that_says_nothing_is_closed(tokenizer: Tokenizer) -> None:
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, limits=Limits(idle_timeout_s=0.1))
    async with listening(front) as url, connected(url) as (reader, _):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


async def test_connection_over_the_limit_is_turned_away(tokenizer: Tokenizer) -> None:
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, limits=Limits(max_connections=1))
    async with listening(front) as url, connected(url) as (reader, writer):
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        ((status, headers, body),) = await answers(url)
        assert (status, headers["x-should-retry"], code(body)) == (503, "true", "service_unavailable")


class Endless:
    """Streams for as long as somebody reads, and knows how many do."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self.num_live = 0
        self.has_begun = asyncio.Event()
        self.is_idle = asyncio.Event()

    async def __call__(self, request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
        self.num_live += 1
        self.has_begun.set()
        try:
            while True:
                yield Generated(self._token_ids)
                await asyncio.sleep(0)
        finally:
            self.num_live -= 1
            self.is_idle.set()
        yield Generated((), FinishReason.STOP)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_caller_that_closes_its_connection_frees_its_request(tokenizer: Tokenizer, is_streamed: bool) -> None:
    endless = Endless(tuple(tokenizer.encode("abc")))
    front = make_front(endless, tokenizer)
    body = BODY if is_streamed else BODY.replace(b"true", b"false")
    async with listening(front) as url:
        async with connected(url) as (reader, writer):
            writer.write(post(body))
            await endless.has_begun.wait()
            if is_streamed:
                await reader.readuntil(b"data: ")
        async with asyncio.timeout(PATIENT_S):
            await endless.is_idle.wait()
    assert (endless.num_live, front.num_under_way) == (0, 0)


async def test_reader_that_takes_nothing_loses_its_answer(tokenizer: Tokenizer) -> None:
    endless = Endless(tuple(tokenizer.encode("\x01" * 3000)))
    front = make_front(endless, tokenizer, limits=QUICK)
    async with listening(front) as url, connected(url) as (_, writer):
        writer.write(post(BODY))
        async with asyncio.timeout(PATIENT_S):
            await endless.is_idle.wait()
    assert front.num_under_way == 0


async def test_end_of_the_server_tells_those_who_still_read(tokenizer: Tokenizer) -> None:
    fake = FakeGenerate(echo(tokenizer), gate=asyncio.Event())
    front = make_front(fake, tokenizer)
    async with contextlib.AsyncExitStack() as stack:
        async with listening(front) as url:
            reader, writer = await stack.enter_async_context(connected(url))
            writer.write(post(BODY))
            await reader.readuntil(b"data: ")
        rest = await reader.read()
    assert b'"code":"service_unavailable"' in rest
    assert fake.num_live == 0


@pytest.mark.parametrize(("pause_at", "is_in"), [(None, True), (-5, False)], ids=["at once", "in two parts"])
async def test_whether_a_body_is_in_is_told_before_it_is_read(pause_at: int | None, is_in: bool) -> None:
    """So that no timer is set for what need not be waited for."""
    told: list[bool] = []
    is_told = asyncio.Event()

    class App:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            told.append(scope[DEPARTURE].is_body_in)
            is_told.set()
            while (await receive())["more_body"]:
                pass
            told.append(scope[DEPARTURE].is_body_in)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

        def cut(self) -> None:
            pass

    listener = bind("127.0.0.1", 0)
    async with serving_http(App(), [listener], Limits()), connected(f"127.0.0.1:{listener.getsockname()[1]}") as ends:
        reader, writer = ends
        for _ in range(2):
            raw = post(b"x" * 10)
            writer.write(raw[:pause_at])
            await is_told.wait()
            is_told.clear()
            writer.write(raw[pause_at:] if pause_at else b"")
            await reader.readuntil(b"\r\n\r\n")
    assert told == [is_in, True] * 2


async def test_a_body_that_is_in_is_read_without_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"abc", "more_body": False}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    departure = Departure()
    scope = {"method": "POST", "path": "/", "headers": [], DEPARTURE: departure}
    call = Call(scope, receive, send, own_id="a")
    departure.is_body_in = True
    with monkeypatch.context() as patched:
        patched.delattr(asyncio, "timeout")
        assert await call.body(Limits()) == b"abc"
    with pytest.raises(BodyTooLarge):
        await call.body(Limits(max_body_bytes=2))


class _Transport:
    """Notes what is written, and when it is closed."""

    def __init__(self) -> None:
        self.told: list[bytes | None] = []

    def write(self, data: bytes) -> None:
        self.told.append(data)

    def close(self) -> None:
        self.told.append(None)


async def test_what_is_written_in_one_turn_goes_out_at_once_and_before_the_end() -> None:
    told = (transport := _Transport()).told
    joined = _JoinedWrites(cast(asyncio.Transport, transport), asyncio.get_running_loop())
    joined.write(b"head ")
    joined.write(b"body")
    assert told == []
    await asyncio.sleep(0)
    assert told == [b"head body"]
    joined.write(b"last words")
    joined.close()
    await asyncio.sleep(0)
    assert told == [b"head body", b"last words", None]


async def test_a_reader_that_is_slow_is_noticed_before_the_turn_is_over() -> None:
    told = (transport := _Transport()).told
    joined = _JoinedWrites(cast(asyncio.Transport, transport), asyncio.get_running_loop())
    joined.write(b"a")
    joined.write(bytes(1 << 16))
    assert told == [b"a" + bytes(1 << 16)]
    await asyncio.sleep(0)
    assert len(told) == 1


def test_address_that_cannot_be_had_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port: Any = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--host, --port: cannot listen on 127\.0\.0\.1 port {port}"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host, --port: cannot listen on 203\.0\.113\.1"):
        bind("203.0.113.1", 0)


async def test_bound_address_refuses_until_somebody_listens_and_that_is_one_alone(tokenizer: Tokenizer) -> None:
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer)
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    # Two servers that start at the same time both find the port free.
    second = bind("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    async with serving_http(front, [first], front.limits):
        get = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        ((status, _, _),) = await answers(f"http://127.0.0.1:{port}", get)
        assert status == 200
        with second, pytest.raises(ConfigError, match=rf"--host, --port: cannot listen on 127\.0\.0\.1 port {port}: "):
            async with serving_http(front, [second], front.limits):
                raise AssertionError("it does not listen")


def test_several_processes_may_share_a_port() -> None:
    with bind("127.0.0.1", 0, is_shared=True) as one:
        port = one.getsockname()[1]
        with bind("127.0.0.1", port, is_shared=True) as other:
            assert other.getsockname()[1] == port


def test_loopback_is_recognised_by_address_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo
    known = {"this-machine": "127.0.1.1", "its-public-name": "203.0.113.1"}

    def look_up_here(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "nobody":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(known.get(host, host), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)
    hosts = ["127.0.0.1", "127.8.8.8", "::1", "localhost", "this-machine"]
    assert [is_loopback(host) for host in hosts] == [True] * 5
    hosts = ["0.0.0.0", "::", "10.0.0.1", "its-public-name", "nobody"]
    assert [is_loopback(host) for host in hosts] == [False] * 5
