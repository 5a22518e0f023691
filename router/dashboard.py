"""The dashboard as routes: page, assets, and the picture of a router as JSON and as a stream of events.

Knows nothing of what is in the picture, nor of keys: the front that mounts the routes says who may look.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from router.failures import error_body, retry_headers, status_of
from router.http_call import CALLER, Call, Limits
from router.keys import ANYBODY, Caller
from router.overview import Overview
from shared.errors import KvrouteError

Explain = Callable[[bytes, Caller], Awaitable[Mapping[str, Any]]]
"""What would be decided about the prompt in a caller's JSON body. Raises `KvrouteError` that says what is wrong with
it."""
Take = Callable[[bool], Awaitable[Overview]]
"""The picture as of now, with its history or without."""

PATH = "/dashboard"
_INTERVAL_S = 1.0
_RETRY_MS = 2000
_LIMITS = Limits(max_body_bytes=4 << 20)
"""Of a prompt that is to be explained."""
_MAX_VIEWERS = 64
"""Each costs a connection; more are told to come back."""
_ASSETS = {
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
}
_CHARTS = "plotly.min.js"
"""Served out of the package that ships it."""

_OWN_STYLE = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')
"""How the charts' script asks for an element before it adds a style of its own, which the page does not allow. It is
one for maps, and we have none: where an element with that id is there already, the script adds nothing."""
_OWN_STYLE_MARK = b"<!-- own styles of charts -->"

_SECURITY = {
    # `style-src` holds for style elements and attributes in the page; scripts may set single properties all the same.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def dashboard_app(
    take: Take,
    explain: Explain | None = None,
    *,
    is_ending: Callable[[], bool] = lambda: False,
) -> Starlette:
    """One dashboard as an application, for everything under `/dashboard`.

    Whoever looks is let go within a second once `is_ending` says so, so that nobody waits for streams to end.
    """
    dashboard = _Dashboard(take, explain, is_ending)
    routes = [
        Route("/dashboard/", dashboard.redirect, methods=["GET"]),
        Route(PATH, dashboard.page, methods=["GET"]),
        Route(f"{PATH}/static/{{name}}", dashboard.asset, methods=["GET"]),
        Route(f"{PATH}/snapshot.json", dashboard.snapshot, methods=["GET"]),
        Route(f"{PATH}/events", dashboard.events, methods=["GET"]),
        Route(f"{PATH}/explain", dashboard.explain, methods=["POST"]),
    ]
    return Starlette(routes=routes)


class _Dashboard:
    """Owns the picture that all viewers of one second share."""

    def __init__(self, take: Take, explain: Explain | None, is_ending: Callable[[], bool]) -> None:
        self._take = take
        self._explain = explain
        self._is_ending = is_ending
        self._static = resources.files("router") / "static"
        self._own_styles: bytes | None = None
        self._num_viewers = 0
        self._rendering = asyncio.Lock()
        self._rendered = b""
        self._rendered_at_s: float | None = None

    async def redirect(self, request: Request) -> Response:
        return RedirectResponse(PATH, status_code=308)

    async def page(self, request: Request) -> Response:
        if self._own_styles is None:
            self._own_styles = await asyncio.to_thread(_own_styles)
        page = (self._static / "index.html").read_bytes().replace(_OWN_STYLE_MARK, self._own_styles)
        return _cacheable(page, "text/html; charset=utf-8", request)

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name == _CHARTS:
            return FileResponse(
                charts_path(),
                media_type="text/javascript; charset=utf-8",
                headers={**_SECURITY, "Cache-Control": "private, max-age=86400"},
            )
        if name not in _ASSETS:
            return Response(status_code=404, headers=_SECURITY)
        return _cacheable((self._static / name).read_bytes(), _ASSETS[name], request)

    async def snapshot(self, request: Request) -> Response:
        overview = await self._take(True)
        return Response(_encoded(overview), media_type="application/json", headers=_uncached())

    async def events(self, request: Request) -> Response:
        """The whole picture at once, then a new one each second; its history is told in the first one only."""
        if self._num_viewers >= _MAX_VIEWERS or self._is_ending():
            return Response(status_code=503, headers={**_uncached(), "Retry-After": "5"})
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=_uncached())

    async def explain(self, request: Request) -> Response:
        """What would be decided about a prompt, which is not run."""
        if self._explain is None:
            return Response(status_code=404, headers=_SECURITY)
        call = Call(request.scope, request.receive, _send_nothing, own_id="")
        try:
            call.check_json()
            body = await call.body(_LIMITS)
            told = await self._explain(body, request.scope.get(CALLER, ANYBODY))
            return JSONResponse(dict(told), headers=_uncached())
        except KvrouteError as error:
            return _refusal(error)

    async def _stream(self) -> AsyncIterator[bytes]:
        self._num_viewers += 1
        try:
            yield f"retry: {_RETRY_MS}\ndata: ".encode() + _encoded(await self._take(True)) + b"\n\n"
            while not self._is_ending():
                await asyncio.sleep(_INTERVAL_S)
                yield b"data: " + await self._shared() + b"\n\n"
        finally:
            self._num_viewers -= 1

    async def _shared(self) -> bytes:
        """The picture without history, made at most twice a second however many look."""
        async with self._rendering:
            now = asyncio.get_running_loop().time()
            if self._rendered_at_s is None or now - self._rendered_at_s >= _INTERVAL_S / 2:
                self._rendered = _encoded(await self._take(False))
                self._rendered_at_s = now
            return self._rendered


def _refusal(error: KvrouteError) -> Response:
    headers = {name.decode(): value.decode() for name, value in retry_headers(error)}
    return JSONResponse(error_body(error), status_of(error), headers={**_uncached(), **headers})


async def _send_nothing(message: Mapping[str, Any]) -> None:
    """For a call whose answer goes another way."""


def _cacheable(body: bytes, media_type: str, request: Request) -> Response:
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {**_SECURITY, "Cache-Control": "no-cache", "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)


def _own_styles() -> bytes:
    """Elements that stand for the styles which the charts' script would add."""
    ids = sorted(set(_OWN_STYLE.findall(charts_path().read_bytes())))
    return b"".join(b'<template id="%b"></template>' % style_id for style_id in ids)


def charts_path() -> Path:
    """Where the installed package keeps the charts' script. The package itself, which is large, is not imported."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package plotly, which ships the dashboard's charts, is not installed")
    return Path(spec.origin).parent / "package_data" / _CHARTS


def _uncached() -> dict[str, str]:
    return {**_SECURITY, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def _encoded(overview: Overview) -> bytes:
    return json.dumps(overview.to_json(), separators=(",", ":"), allow_nan=False).encode()
