"""The OpenAI-compatible front of one router: an ASGI application without a framework, since each microsecond counts.

Owns which address leads where, who is let in, and how answers are told. What listens is `router.http_server`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from importlib import resources

from router.answers import Answer, Generate, all_wholes, answers_to, merged, usage_of
from router.chunks import DONE, Chunks
from router.fields import brief_name
from router.http_call import (
    App,
    Call,
    ClientGone,
    Counted,
    Header,
    Limits,
    Receive,
    Scope,
    Send,
    WhileConnected,
    log_failure,
)
from router.http_files import FilesApi
from router.keys import ANYBODY, UNLIMITED, Allowance, Caller, KeyRing
from router.openai import Endpoint, ParsedRequest, completion_body, parse_request
from router.readiness import Readiness
from router.service import Router
from router.tokenizer import Tokenizer
from shared import __version__
from shared.errors import Forbidden, MethodNotAllowed, ModelNotFound, NotFound, NoWorker

logger = logging.getLogger(__name__)

_EVENTS: Sequence[Header] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the kind of nginx gather what they pass on unless they are told not to.
    (b"x-accel-buffering", b"no"),
)
_METRICS: Sequence[Header] = ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),)
_LOOK_S = 1.0
_MOST_LOOKS_ALONE = 5
"""How often no worker may be found, once this server is to end, before what they had is given up."""
_DRAINING_RETRY_S = 1.0
"""By then a balancer has noticed, and another server answers."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What a front needs of the router behind it."""

    model: str
    max_model_len_tokens: int
    tokenizer: Tokenizer
    generate: Generate
    policy: str
    state_to_count: Callable[[], Mapping[str, int]]
    """Workers by state, as `Fleet` tells them."""
    render_metrics: Callable[[], bytes]
    note_failure: Callable[[str], None]
    """Counts a request that gets no further than the front, by its error's code."""
    has_reasoning: bool = False
    """Whether workers tell a chat's reasoning from its content."""

    @classmethod
    def over(
        cls,
        router: Router,
        tokenizer: Tokenizer,
        model: str,
        max_model_len_tokens: int,
        policy: str,
        *,
        has_reasoning: bool = False,
    ) -> Backend:
        """A router in this process."""
        return cls(
            model=model,
            max_model_len_tokens=max_model_len_tokens,
            tokenizer=tokenizer,
            generate=router.generate,
            policy=policy,
            state_to_count=router.fleet.state_to_count,
            render_metrics=router.render_metrics,
            note_failure=router.metrics.note_failure,
            has_reasoning=has_reasoning,
        )


Handler = Callable[[Call, Caller, Allowance], Awaitable[None]]


class _Access(Enum):
    """Who may ask at an address."""

    EVERYBODY = auto()
    CALLERS = auto()
    """Whoever has a key, where there are keys."""
    ADMINS = auto()
    """Those of them whose key opens what tells of all tenants."""


@dataclass(slots=True)
class _Route:
    method_to_handler: dict[str, Handler]
    access: _Access


class Front:
    """The application. Invariant: a request that has ended, however it did, has nothing under way any more.

    `mounts` are applications for addresses under `/NAME`, which tell of all tenants: where keys are set, an admin's is
    needed.
    """

    def __init__(
        self,
        backend: Backend,
        keys: KeyRing,
        *,
        name: str,
        limits: Limits | None = None,
        mounts: Mapping[str, App] | None = None,
        all_metrics: Callable[[], Awaitable[bytes]] | None = None,
        files_api: FilesApi | None = None,
        own_hosts: Container[str] | None = None,
    ) -> None:
        """`name` keeps the ids of this front's answers apart from those of others; `all_metrics` tells of them all.

        `own_hosts` are the names of this host, where requests for others are refused.
        """
        self.limits = limits or Limits()
        self.is_draining = False
        """Whether new work is refused, so that what is under way can end."""
        self._all_metrics = all_metrics
        self._files_api = files_api
        self._own_hosts = own_hosts
        self._is_cut = False
        self._readiness = Readiness(backend.state_to_count, backend.note_failure, asyncio.get_running_loop().time)
        self._under_way: set[asyncio.Task[None]] = set()
        self._backend = backend
        self._policy = backend.policy.encode()
        self._keys = keys
        self._name = name
        self._numbers = itertools.count(1)
        self._created = int(time.time())
        self._mounts = dict(mounts or {})
        self._description = resources.files("router").joinpath("static", "openapi.json").read_bytes()
        metrics_access = _Access.ADMINS if keys.has_tenants else _Access.EVERYBODY
        self._routes = {
            "/v1/chat/completions": _Route({"POST": partial(self._complete, Endpoint.CHAT)}, _Access.CALLERS),
            "/v1/completions": _Route({"POST": partial(self._complete, Endpoint.COMPLETIONS)}, _Access.CALLERS),
            "/v1/models": _Route({"GET": self._models}, _Access.CALLERS),
            "/health": _Route({"GET": self._health}, _Access.EVERYBODY),
            "/ping": _Route({"GET": self._health, "POST": self._health}, _Access.EVERYBODY),
            "/ready": _Route({"GET": self._ready}, _Access.EVERYBODY),
            "/version": _Route({"GET": self._version}, _Access.EVERYBODY),
            # Whoever sees these before and after a request of somebody else learns how long its prompt was.
            "/metrics": _Route({"GET": self._metrics}, metrics_access),
            "/openapi.json": _Route({"GET": self._openapi}, _Access.EVERYBODY),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = Call(scope, receive, send, own_id=f"req-{self._name}-{next(self._numbers):x}")
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            await self._dispatch(call)
        except ClientGone:
            logger.debug("request %s: the caller has gone", call.request_id.decode())
        except asyncio.CancelledError:
            if not self._is_cut or call.has_ended:
                raise
            await call.fail(NoWorker("this server is shutting down", retry_after_s=_DRAINING_RETRY_S))
        except Exception as error:
            log_failure(call, error)
            if not call.has_ended:
                await call.fail(error)
        finally:
            self._under_way.discard(task)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work, and wait for the end of what is under way, while there are workers to end it. Modifies."""
        self.is_draining = True
        clock = asyncio.get_running_loop().time
        ends_at_s, num_looks_left = clock() + timeout_s, _MOST_LOOKS_ALONE
        while self._under_way and num_looks_left and (left_s := ends_at_s - clock()) > 0.0:
            await asyncio.wait(self._under_way, timeout=min(left_s, _LOOK_S))
            # Where all were told to end at once, as by a service manager, nobody comes back.
            num_looks_left = _MOST_LOOKS_ALONE if self._readiness.is_connected() else num_looks_left - 1

    def cut(self) -> None:
        """Begin nothing more, and end what is under way, with an error each. Modifies."""
        self.is_draining = self._is_cut = True
        for task in self._under_way:
            task.cancel()

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    async def _dispatch(self, call: Call) -> None:
        if self._own_hosts is not None:
            call.check_host(self._own_hosts)
        route = self._routes.get(call.path)
        if route is None:
            route = self._route_below(call)
        handler = route.method_to_handler.get("GET" if call.method == "HEAD" else call.method)
        if handler is None:
            allowed = ", ".join(route.method_to_handler)
            call.extra_headers.append((b"allow", allowed.encode()))
            raise MethodNotAllowed(f"Not allowed for this address: only {allowed} is.")
        if route.access is _Access.EVERYBODY:
            await handler(call, ANYBODY, UNLIMITED)
            return
        caller, allowance = self._keys.identify(call.headers.get(b"authorization"))
        if route.access is _Access.ADMINS and not caller.is_admin:
            raise Forbidden("This tells of all tenants, and needs a key with 'admin: true' in the key file.")
        await handler(call, caller, allowance)

    def _route_below(self, call: Call) -> _Route:
        """The route of an address with something variable in it."""
        first, _, rest = call.path.removeprefix("/").partition("/")
        if first in self._mounts:
            app = self._mounts[first]

            async def run(call: Call, caller: Caller, allowance: Allowance) -> None:
                await call.pass_on(app, caller)

            return _Route(dict.fromkeys(("GET", "POST", "PUT", "DELETE"), run), _Access.ADMINS)
        if first == "v1" and rest.startswith("models/"):
            return _Route({"GET": self._model}, _Access.CALLERS)
        if first == "v1" and self._files_api is not None and (handlers := self._files_api.methods_of(rest)) is not None:
            return _Route(handlers, _Access.CALLERS)
        raise NotFound(f"Unknown request URL: {call.method} {call.path[:100]}. See /openapi.json for what is served.")

    async def _complete(self, endpoint: Endpoint, call: Call, caller: Caller, allowance: Allowance) -> None:
        """Chat and completions."""
        if self.is_draining:
            raise NoWorker("this server is shutting down", retry_after_s=_DRAINING_RETRY_S)
        with Counted(call, allowance):
            parsed = parse_request(
                endpoint,
                await call.json(self.limits),
                served_model=self._backend.model,
                allow_stream=True,
                allow_several=True,
            )
            async with WhileConnected(call):
                await self._answer(call, caller, parsed)

    async def _answer(self, call: Call, caller: Caller, parsed: ParsedRequest) -> None:
        accepted_at_s = asyncio.get_running_loop().time()
        self._readiness.check()
        backend = self._backend
        kind = "chatcmpl" if parsed.endpoint is Endpoint.CHAT else "cmpl"
        name = f"{kind}-{self._name}-{next(self._numbers):x}"
        answers = await answers_to(
            parsed,
            backend.tokenizer,
            name=name,
            max_model_len_tokens=backend.max_model_len_tokens,
            salt=caller.salted(parsed.cache_salt),
            tenant=caller.tenant or parsed.user or "",
            has_reasoning=backend.has_reasoning,
        )
        traceparent = call.headers.get(b"traceparent", b"").decode("latin-1")
        for answer in answers:
            answer.trace.accepted_at_s = accepted_at_s
            if traceparent:
                answer.request = replace(answer.request, traceparent=traceparent)
        if parsed.is_streamed:
            await self._stream(call, parsed, name, answers)
            return
        body = completion_body(
            parsed.endpoint,
            response_id=name,
            model=parsed.model,
            created=int(time.time()),
            answers=await all_wholes(answers, backend.generate),
            usage=usage_of(answers, parsed.num_choices),
        )
        await call.respond_json(body, headers=self._told(answers[0]))

    async def _stream(self, call: Call, parsed: ParsedRequest, name: str, answers: Sequence[Answer]) -> None:
        """Send events. None goes out before the first news, so that what fails until then has a status of its own."""
        created = int(time.time())
        chunks = Chunks(
            parsed.endpoint, response_id=name, model=parsed.model, created=created, wants_usage=parsed.wants_usage
        )
        generate = self._backend.generate
        told = b"".join([chunks.first(answer.index) for answer in answers])
        if len(answers) == 1:
            async with aclosing(answers[0].pieces(generate)) as pieces:
                async for piece in pieces:
                    told += chunks.piece(0, *piece)
                    if piece.finish is None:
                        await self._send_events(call, answers[0], told)
                        told = b""
        else:
            async with aclosing(merged(answers, generate)) as news:
                async for batch in news:
                    told += b"".join([chunks.piece(answer.index, *piece) for answer, piece in batch])
                    await self._send_events(call, batch[0][0], told)
                    told = b""
        if parsed.wants_usage:
            told += chunks.usage(usage_of(answers, parsed.num_choices))
        await self._send_events(call, answers[0], told + DONE, is_last=True)

    async def _send_events(self, call: Call, answer: Answer, events: bytes, *, is_last: bool = False) -> None:
        if not call.has_begun:
            await call.start(200, [*_EVENTS, *self._told(answer)])
        await call.write(events, is_last=is_last)

    def _told(self, answer: Answer) -> list[Header]:
        """The decision on an answer, as headers."""
        trace = answer.trace
        waited_s = 0.0 if trace.bound_at_s is None else trace.bound_at_s - trace.received_at_s
        return [
            (b"x-kvroute-worker", (trace.worker or "").encode()),
            (b"x-kvroute-policy", self._policy),
            (b"x-kvroute-matched-tokens", b"%d" % trace.matched_tokens),
            (b"x-kvroute-queue-ms", b"%.1f" % (1e3 * waited_s)),
        ]

    async def _models(self, call: Call, caller: Caller, allowance: Allowance) -> None:
        await call.respond_json({"object": "list", "data": [self._model_body()]})

    async def _model(self, call: Call, caller: Caller, allowance: Allowance) -> None:
        model = call.path.removeprefix("/v1/models/")
        if model != self._backend.model:
            raise ModelNotFound(
                f"The model '{brief_name(model)}' does not exist; this is '{self._backend.model}'.", param="model"
            )
        await call.respond_json(self._model_body())

    def _model_body(self) -> dict[str, object]:
        return {
            "id": self._backend.model,
            "object": "model",
            "created": self._created,
            "owned_by": "kvroute",
            "max_model_len": self._backend.max_model_len_tokens,
        }

    async def _health(self, call: Call, caller: Caller, allowance: Allowance) -> None:
        """Whether this process lives: it does, or it would not answer."""
        await call.respond(200, b"", ())

    async def _ready(self, call: Call, caller: Caller, allowance: Allowance) -> None:
        """Whether new requests are welcome."""
        state_to_count = self._backend.state_to_count()
        is_ready = not self.is_draining and state_to_count["ready"] > 0
        body = {"is_ready": is_ready, "is_draining": self.is_draining, "workers": dict(state_to_count)}
        await call.respond_json(body, 200 if is_ready else 503)

    async def _version(self, call: Call, caller: Caller, allowance: Allowance) -> None:
        await call.respond_json({"version": __version__})

    async def _metrics(self, call: Call, caller: Caller, allowance: Allowance) -> None:
        await call.respond(
            200, await self._all_metrics() if self._all_metrics else self._backend.render_metrics(), _METRICS
        )

    async def _openapi(self, call: Call, caller: Caller, allowance: Allowance) -> None:
        await call.respond(200, self._description)
