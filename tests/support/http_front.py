"""A front over stand-ins, how to ask it without a network, and how to have it listen on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.answers import Generate
from router.http import Backend, Front
from router.http_call import DEPARTURE, Departure, Limits
from router.http_server import bind, serving_http
from router.keys import KeyRing
from router.membership import STATES
from router.tokenizer import Tokenizer
from tests.support.tokenizers import EOS_TOKEN_ID

MODEL = "m"
CONTEXT_TOKENS = 512
PATIENT_S = 30.0


def echo(tokenizer: Tokenizer) -> Callable[[list[int]], list[int]]:
    """An answer that repeats a plain prompt, or the last message of a rendered chat."""

    def answer(prompt: list[int]) -> list[int]:
        text = tokenizer.decode(prompt).removesuffix("\nassistant\n").rsplit("user\n", 1)[-1]
        return [*tokenizer.encode(text), EOS_TOKEN_ID]

    return answer


@dataclass(slots=True)
class Fleet:
    """How many workers there are, for a test to change."""

    state_to_count: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0) | {"ready": 1})


def make_front(
    generate: Generate,
    tokenizer: Tokenizer,
    *,
    keys: KeyRing | None = None,
    limits: Limits | None = None,
    fleet: Fleet | None = None,
    max_model_len_tokens: int = CONTEXT_TOKENS,
    metrics: bytes = b"# no metrics\n",
    failures: Counter[str] | None = None,
    has_reasoning: bool = False,
    **options: Any,
) -> Front:
    """A front whose answers come from `generate`; it counts what it refuses in `failures`."""
    fleet = fleet or Fleet()
    backend = Backend(
        model=MODEL,
        max_model_len_tokens=max_model_len_tokens,
        tokenizer=tokenizer,
        generate=generate,
        policy="cost",
        state_to_count=lambda: fleet.state_to_count,
        render_metrics=lambda: metrics,
        note_failure=lambda code: (Counter() if failures is None else failures).update([code]),
        has_reasoning=has_reasoning,
    )
    clock = asyncio.get_running_loop().time
    return Front(backend, keys or KeyRing([], clock), name="test", limits=limits, **options)


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str, str | None]:
        """Status, code and parameter of an error."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return self.status, error["code"], error["param"]

    @property
    def events(self) -> list[Any]:
        """What a stream told, the end mark as it is."""
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == ""
        told = [line.removeprefix("data: ") for line in lines]
        return [one if one == "[DONE]" else json.loads(one) for one in told]


class Asking:
    """One request to a front, whose caller may go away at any time."""

    def __init__(self, front: Any, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        path, _, query = path.partition("?")
        self._departure = Departure()
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()],
            DEPARTURE: self._departure,
        }
        self._body: bytes | None = body
        self._is_over = asyncio.Event()
        self.news = asyncio.Event()
        self.sent: list[Any] = []
        self.task = asyncio.create_task(front(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._is_over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._is_over.set()
        self.news.set()

    def go_away(self) -> None:
        """As a client does that closes its connection."""
        self._is_over.set()
        self._departure.tell()

    async def answered(self) -> Answered:
        async with asyncio.timeout(PATIENT_S):
            await self.task
        start, *parts = self.sent
        headers: dict[str, str] = {}
        for name, value in start["headers"]:
            assert name.decode() not in headers or name == b"www-authenticate", f"the header {name} is there twice"
            before = headers.get(name.decode())
            headers[name.decode()] = value.decode() if before is None else f"{before}\n{value.decode()}"
        return Answered(start["status"], headers, b"".join(part["body"] for part in parts))


async def ask(
    front: Any, path: str, body: Any = None, *, method: str | None = None, headers: Mapping[str, str] | None = None
) -> Answered:
    """What the front answers. A body that is not bytes yet is sent as JSON."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    given = {"content-type": "application/json", **(headers or {})}
    return await Asking(front, method, path, raw, given).answered()


@contextlib.asynccontextmanager
async def listening(front: Front) -> AsyncIterator[str]:
    """The address of a server with the front, on a port that the system chooses."""
    listener = bind("127.0.0.1", 0)
    async with serving_http(front, [listener], front.limits):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
