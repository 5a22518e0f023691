"""The command that serves: a front over a router, listening until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from router.dashboard import dashboard_app
from router.explain import explain, read_body
from router.http import Backend, Front
from router.http_call import App, Limits
from router.http_server import is_loopback, listen, serving_http
from router.keys import KeyEntry, KeyRing, read_key_file
from router.launch import Say, Serving
from router.overview import Overview, Viewpoint
from router.prompts import prompt_tokens
from shared.config import Settings
from shared.errors import ConfigError

_MIN_BODY_BYTES = 4 << 20
_BODY_BYTES_PER_TOKEN = 32
"""Far over what a token's text or id takes in JSON, so that no prompt that fits the context is refused for its size."""


async def run_serve(settings: Settings, entering: AbstractAsyncContextManager[Serving], say: Say) -> bool:
    """Serve over what `entering` gives, until told to end; whether that was by Ctrl-C.

    Raises:
        ConfigError: the address or the keys are wrong; nothing has been started then.
    """
    entries = await asyncio.to_thread(read_keys, settings)
    _check_exposure(settings, say)
    with listen(settings.host, settings.port) as listener:
        async with entering as serving:
            front = make_front(serving, entries)
            for line in _banner(serving, listener.getsockname()[1], 1):
                say(line)
            return await serve_until_told(front, [listener], settings.drain_timeout_s, say)


def read_keys(settings: Settings) -> list[KeyEntry]:
    """The keys of the key file, if there is one.

    Raises:
        ConfigError: it is wrong, or there are keys in two places.
    """
    if settings.api_key_file is None:
        return []
    if settings.api_key.get_secret_value():
        raise ConfigError("--api-key, --api-key-file: they exclude each other")
    return read_key_file(settings.api_key_file)


def make_front(
    serving: Serving, entries: Sequence[KeyEntry], *, mounts: Mapping[str, App] | None = None, num_shares: int = 1
) -> Front:
    """A front over what serves; it is one of `num_shares` that share each key's limits."""
    settings, router = serving.settings, serving.router
    clock = asyncio.get_running_loop().time
    ring = (
        KeyRing(entries, clock, num_shares=num_shares)
        if entries
        else KeyRing.of_one(settings.api_key.get_secret_value(), clock)
    )
    backend = Backend(
        model=settings.model_name,
        max_model_len_tokens=serving.max_model_len_tokens,
        tokenizer=serving.tokenizer,
        generate=router.generate,
        policy=settings.policy.partition(":")[0],
        has_workers=lambda: len(router.fleet.loads().workers) > 0,
        state_to_count=router.fleet.state_to_count,
        render_metrics=router.render_metrics,
    )
    limits = Limits(max_body_bytes=max(_MIN_BODY_BYTES, _BODY_BYTES_PER_TOKEN * serving.max_model_len_tokens))
    mounts = {"dashboard": _dashboard(serving, lambda: front.is_draining), **(mounts or {})}
    # What must be told apart is drawn by the system, not from the seed: two servers may have the same.
    front = Front(backend, ring, name=secrets.token_hex(6), limits=limits, mounts=mounts)
    return front


def _dashboard(serving: Serving, is_ending: Callable[[], bool]) -> App:
    viewpoint = Viewpoint(serving.router)

    async def take(with_history: bool) -> Overview:
        return await viewpoint.take(with_history=with_history)

    async def explained(raw: bytes) -> Mapping[str, Any]:
        prompt = read_body(raw)
        token_ids = await asyncio.to_thread(
            prompt_tokens, prompt, serving.tokenizer, serving.settings, add_generation_prompt=True
        )
        return (await explain(serving.router, token_ids, salt=prompt.salt)).to_json()

    return dashboard_app(take, explained, is_ending=is_ending)


async def serve_until_told(front: Front, sockets: Sequence[socket.socket], drain_timeout_s: float, say: Say) -> bool:
    """Serve until SIGTERM or Ctrl-C, and then until nothing is under way; whether it was Ctrl-C.

    A second signal, or the end of `drain_timeout_s`, cuts off what is still under way.
    """
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    with _catching(signals.put_nowait):
        async with serving_http(front, sockets, front.limits):
            first = await signals.get()
            if front.num_under_way:
                say(f"ending: {front.num_under_way} requests may go on for at most {drain_timeout_s:g} s")
            ending = asyncio.create_task(front.drain(drain_timeout_s))
            second = asyncio.create_task(signals.get())
            await asyncio.wait([ending, second], return_when=asyncio.FIRST_COMPLETED)
            for task in (ending, second):
                task.cancel()
            if front.num_under_way:
                say(f"{front.num_under_way} requests are cut off")
    return first is signal.SIGINT


def _check_exposure(settings: Settings, say: Say) -> None:
    """Warn where strangers could use what nobody guards."""
    has_key = settings.api_key_file is not None or bool(settings.api_key.get_secret_value())
    if not is_loopback(settings.host) and not has_key:
        say(
            f"WARNING: --host {settings.host} lets everybody who reaches this machine use the model, since neither "
            "--api-key nor --api-key-file is given"
        )


def _banner(serving: Serving, port: int, num_routers: int) -> list[str]:
    """What serves, and where."""
    settings = serving.settings
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{port}"
    keys = "a key is needed" if settings.api_key_file or settings.api_key.get_secret_value() else "no key is needed"
    return [
        f"{settings.model_name}: {len(serving.workers)} of {max(settings.workers, len(serving.workers))} workers are "
        f"ready; KV blocks of {settings.block_size} tokens, policy {settings.policy}, "
        f"context of {serving.max_model_len_tokens} tokens",
        f"listening on {url}/v1 ({num_routers} router{'s' if num_routers > 1 else ''}, {keys}); "
        f"metrics at {url}/metrics, dashboard at {url}/dashboard",
        "Next steps:",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d "
        f'\'{{"model": "{settings.model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'',
    ]


@contextlib.contextmanager
def _catching(take: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hand the signals that ask a process to end to `take`."""
    loop = asyncio.get_running_loop()
    caught = (signal.SIGTERM, signal.SIGINT)
    for number in caught:
        loop.add_signal_handler(number, take, number)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
