"""`kvroute top` and `kvroute explain`: where what they show comes from.

A front that serves is asked by HTTP, since the facts are in its process. Where none answers and workers of `kvroute up`
run, those are joined as one who looks and sends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from router import launch, runfile
from router.explain import explain_prompt, wait_for_statuses
from router.overview import Viewpoint
from router.prompts import Prompt
from router.serving import Say, url_of
from shared.config import Settings
from shared.errors import ConfigError, KvrouteError, NoWorker

_INTERVAL_S = 1.0
_ANSWER_S = 5.0
_MAX_ANSWER_BYTES = 64 << 20

Look = Callable[[], Awaitable[Mapping[str, Any]]]


class _NobodyThere(KvrouteError):
    """Nothing listens at the address."""


async def run_top(
    settings: Settings, run: runfile.Run | None, own: Mapping[str, Any], say: Say, show: Callable[[str], None]
) -> None:
    """Show the picture once, or again each second until interrupted."""
    async with _looking(settings, run, own["url"], say) as look:
        if own["json"]:
            await _repeat(look, own["once"], lambda state: show(json.dumps(state)))
        elif own["once"] or not sys.stdout.isatty():
            from router.top import plain_text

            await _repeat(look, own["once"], lambda state: show(plain_text(state) + ("" if own["once"] else "\n")))
        else:
            await _live(look)


async def run_explain(
    settings: Settings, run: runfile.Run | None, own: Mapping[str, Any], prompt: Prompt, say: Say
) -> Mapping[str, Any]:
    """What the front, or a router like it, would decide about a prompt now."""
    url = _base_url(own["url"], settings)
    body: dict[str, Any] = {"messages": prompt.messages} if prompt.text is None else {"prompt": prompt.text}
    try:
        body |= {"cache_salt": prompt.salt, "tenant": prompt.tenant}
        return await _ask(f"{url}/dashboard/explain", settings, body)
    except _NobodyThere as error:
        if own["url"] or run is None:
            raise NoWorker(f"{error}, and no `kvroute up` runs") from None
    if prompt.tenant:
        raise ConfigError("--tenant: only a server with --api-key-file knows tenants, and none answers")
    say("asking the workers of `kvroute up` as a router that has just begun would")
    async with launch.attached(run, settings, say, is_observer=True) as serving:
        await wait_for_statuses(serving.router)
        return await explain_prompt(serving.router, prompt, serving.tokenizer, settings)


@contextlib.asynccontextmanager
async def _looking(settings: Settings, run: runfile.Run | None, url: str | None, say: Say) -> AsyncIterator[Look]:
    base = _base_url(url, settings)

    async def by_http() -> Mapping[str, Any]:
        return await _ask(f"{base}/dashboard/snapshot.json", settings)

    try:
        await by_http()
    except _NobodyThere as error:
        if url is not None or run is None:
            raise NoWorker(f"{error}, and no `kvroute up` runs") from None
        say("no front answers: showing the workers of `kvroute up`")
        async with launch.attached(run, settings, say, is_observer=True) as serving:
            await wait_for_statuses(serving.router)
            viewpoint = Viewpoint(serving.router)

            async def directly() -> Mapping[str, Any]:
                return (await viewpoint.take()).to_json()

            yield directly
        return
    yield by_http


async def _repeat(look: Look, is_once: bool, tell: Callable[[Mapping[str, Any]], None]) -> None:
    while True:
        tell(await look())
        if is_once:
            return
        await asyncio.sleep(_INTERVAL_S)


async def _live(look: Look) -> None:
    """Redraw in place, on a screen of its own that is gone afterwards."""
    from rich.live import Live

    from router.top import picture

    with Live(picture(await look()), screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            live.update(picture(await look()), refresh=True)


def _base_url(url: str | None, settings: Settings) -> str:
    """Where to ask: what was given, or where `serve` listens by these settings."""
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url: {url!r} is no http:// or https:// URL")
        return url.rstrip("/")
    return url_of(settings.host, settings.port)


async def _ask(url: str, settings: Settings, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """A front's answer. Raises `_NobodyThere` where there is no front, `KvrouteError` where it refuses."""
    headers = {"Content-Type": "application/json"}
    if settings.api_key.get_secret_value():
        headers["Authorization"] = f"Bearer {settings.api_key.get_secret_value()}"
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)

    def ask() -> Mapping[str, Any]:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            told: Mapping[str, Any] = json.loads(answer.read(_MAX_ANSWER_BYTES))
            return told

    try:
        return await asyncio.to_thread(ask)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(url, error) from None
    except OSError as error:
        raise _NobodyThere(f"nothing answers at {url} ({getattr(error, 'reason', error)})") from None
    except ValueError:
        raise KvrouteError(f"{url}: the answer is not JSON: is this a kvroute?") from None


def _refusal(url: str, error: urllib.error.HTTPError) -> KvrouteError:
    try:
        told = json.loads(error.read(1 << 16))["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        told = error.reason
    hint = "; --api-key gives one" if error.code in (401, 403) else ""
    return KvrouteError(f"{url}: {error.code}: {told}{hint}")
