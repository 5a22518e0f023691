"""The command that serves: a front over a router, listening until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import random
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from router.batch import BatchLimits
from router.batch_book import BatchBook
from router.batch_service import BatchRuns, BatchService
from router.http import Backend, Front
from router.http_call import App, Limits
from router.http_files import FilesApi
from router.http_server import bind, is_loopback, serving_http
from router.huge_pages import gather_in_huge_pages
from router.keys import KeyEntry, KeyRing, read_key_file
from router.planned_run import view_of
from router.request_log import check_request_log, log_of_process
from router.serve_dashboard import dashboard_of, words_of
from router.serving import Say, Serving, url_of
from router.sibling_metrics import all_metrics
from router.sibling_words import Place, telling_siblings
from router.siblings import Siblings
from router.stored_files import FileStore
from router.tables import counted
from shared.config import Settings
from shared.errors import ConfigError

_ALLOCATIONS_PER_COLLECTION = 20_000
"""Some 2 MB at most; Python's own 700 is reached with every second request."""
_IN_FLIGHT_PER_SEQ = 2
"""Batch rows under way for each sequence that the workers can run: less than a batch alone has, since others wait."""
_MIN_BODY_BYTES = 4 << 20
_BODY_BYTES_PER_TOKEN = 32
"""Far over what a token's text or id takes in JSON, so that no prompt that fits the context is refused for its size."""


async def run_serve(
    settings: Settings, entering: AbstractAsyncContextManager[Serving], num_routers: int, say: Say
) -> bool:
    """Serve over what `entering` gives, in so many processes, until told to end; whether that was by Ctrl-C.

    Raises:
        ConfigError: the address, the keys, a log or the files' folder is wrong; nothing has been started then.
    """
    entries = await asyncio.to_thread(read_keys, settings)
    _check_exposure(settings, say)
    files = await asyncio.to_thread(open_files, settings)
    if settings.request_log is not None:
        for number in range(num_routers):
            await check_request_log(log_of_process(settings.request_log, number))
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(bind(settings.host, settings.port, is_shared=num_routers > 1))
        port = listener.getsockname()[1]
        serving = await stack.enter_async_context(entering)
        siblings, place = None, None
        if num_routers > 1:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-")))
            place = Place(folder, 0, num_routers)
            told = telling_siblings(stack.enter_context(place.listen()), words_of(serving))
            await stack.enter_async_context(told)
            orders = [_order(serving, port, folder, number, num_routers) for number in range(1, num_routers)]
            siblings = await stack.enter_async_context(Siblings(orders, settings.drain_timeout_s, say))
        front = make_front(serving, entries, files=files, place=place)
        await stack.enter_async_context(make_batch_service(serving, entries, files))
        await set_apart_what_stays()
        banner = _banner(serving, entries, port, num_routers)
        return await _serve_until_told(front, listener, siblings, settings.drain_timeout_s, say, banner)


def _order(serving: Serving, port: int, folder: Path, number: int, num_routers: int) -> dict[str, Any]:
    """What one of several server processes is told; it goes through a pipe, since it holds secrets."""
    settings = serving.settings.model_dump(mode="json", exclude_unset=True)
    for name in {"api_key", "attach_api_key"} & settings.keys():
        settings[name] = getattr(serving.settings, name).get_secret_value()
    if serving.settings.request_log is not None:
        settings["request_log"] = str(log_of_process(serving.settings.request_log, number))
    return {
        "settings": settings,
        # A process finds attached servers by itself.
        "run": None if serving.run is None else dataclasses.asdict(serving.run),
        "port": port,
        "folder": str(folder),
        "number": number,
        "num_routers": num_routers,
    }


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
    serving: Serving,
    entries: Sequence[KeyEntry],
    *,
    mounts: Mapping[str, App] | None = None,
    files: tuple[FileStore, BatchBook] | None = None,
    place: Place | None = None,
) -> Front:
    """A front over what serves. It may be one of several that share each key's limits, and then has a `place`."""
    settings = serving.settings
    ring = _key_ring(settings, entries, 1 if place is None else place.num_processes)
    policy = settings.policy.partition(":")[0]
    max_model_len_tokens = serving.max_model_len_tokens
    backend = Backend.over(
        serving.router,
        serving.tokenizer,
        settings.model_name,
        max_model_len_tokens,
        policy,
        has_reasoning=bool(settings.reasoning_parser),
    )
    limits = Limits(max_body_bytes=max(_MIN_BODY_BYTES, _BODY_BYTES_PER_TOKEN * max_model_len_tokens))
    dashboard = dashboard_of(serving, ring, None if files is None else files[1], lambda: front.is_draining, place)
    front = Front(
        backend,
        ring,
        # What must be told apart is drawn by the system, not from the seed: two servers may have the same.
        name=secrets.token_hex(6),
        limits=limits,
        mounts={"dashboard": dashboard, **(mounts or {})},
        files_api=None if files is None else FilesApi(*files, limits),
        own_hosts=_own_hosts(settings),
        all_metrics=None if place is None else partial(all_metrics, place, serving.router.render_metrics),
    )
    return front


def make_batch_service(
    serving: Serving, entries: Sequence[KeyEntry], files: tuple[FileStore, BatchBook]
) -> BatchService:
    """What runs the batches that come in over HTTP."""
    settings = serving.settings
    runs = BatchRuns(
        generate=serving.router.generate,
        tokenizer=serving.tokenizer,
        scheme=serving.scheme,
        model=settings.model_name,
        max_model_len_tokens=serving.max_model_len_tokens,
        limits=BatchLimits(serving.num_in_flight(_IN_FLIGHT_PER_SEQ)),
        caller_of=_key_ring(settings, entries, 1).caller_of,
        has_reasoning=bool(settings.reasoning_parser),
        fleet=view_of(serving.router),
    )
    return BatchService(runs, *files, random.Random(settings.seed))


def open_files(settings: Settings) -> tuple[FileStore, BatchBook]:
    """Where uploads and batches lie. Blocks; raises `ConfigError`."""
    folder = settings.files_dir or settings.model_cache_dir / "files"
    try:
        return FileStore(folder / "files"), BatchBook(folder / "batches")
    except OSError as error:
        raise ConfigError(f"--files-dir: cannot write {folder}: {error.strerror}") from None


def _key_ring(settings: Settings, entries: Sequence[KeyEntry], num_shares: int) -> KeyRing:
    clock = asyncio.get_running_loop().time
    if entries:
        return KeyRing(entries, clock, num_shares=num_shares)
    return KeyRing.of_one(settings.api_key.get_secret_value(), clock)


async def set_apart_what_stays() -> None:
    """Have the collector of garbage leave alone what is there from the start on: it is much, and lives to the end.

    It lies in huge pages from then on. The collector also looks less often for cycles among the rest, which requests
    hardly leave.
    """
    gc.collect()
    gc.freeze()
    # In a thread, so that workers are heard meanwhile.
    await asyncio.to_thread(gather_in_huge_pages)
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION)


async def _serve_until_told(
    front: Front,
    listener: socket.socket,
    siblings: Siblings | None,
    drain_timeout_s: float,
    say: Say,
    banner: Sequence[str],
) -> bool:
    """Serve until SIGTERM or Ctrl-C, and then until nothing is under way; whether it was Ctrl-C.

    The banner is said once whoever reads it can connect. A second signal, or the end of `drain_timeout_s`, cuts off
    what is still under way.
    """
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    with _catching(signals.put_nowait):
        async with serving_http(front, [listener], front.limits):
            for line in banner:
                say(line)
            first = await signals.get()
            if siblings is not None:
                siblings.end()
            if front.num_under_way:
                say(f"ending: {front.num_under_way} requests may go on for at most {drain_timeout_s:g} s")
            ending = asyncio.create_task(_ended(front, siblings, drain_timeout_s))
            second = asyncio.create_task(signals.get())
            await asyncio.wait([ending, second], return_when=asyncio.FIRST_COMPLETED)
            for task in (ending, second):
                task.cancel()
            if siblings is not None:
                siblings.cut()
            if front.num_under_way:
                say(f"{front.num_under_way} requests are cut off")
    return first is signal.SIGINT


async def _ended(front: Front, siblings: Siblings | None, timeout_s: float) -> None:
    await front.drain(timeout_s)
    if siblings is not None:
        await siblings.ended()


def _own_hosts(settings: Settings) -> frozenset[str] | None:
    """Names by which this host may be asked; `None` where any will do, since a key is needed or everybody may ask."""
    if _has_key(settings) or not is_loopback(settings.host):
        return None
    return frozenset({"localhost", settings.host.lower()})


def _has_key(settings: Settings) -> bool:
    return settings.api_key_file is not None or bool(settings.api_key.get_secret_value())


def _check_exposure(settings: Settings, say: Say) -> None:
    """Warn where strangers could use what nobody guards."""
    if not is_loopback(settings.host) and not _has_key(settings):
        say(
            f"WARNING: --host {settings.host} lets everybody who reaches this machine use the model, since neither "
            "--api-key nor --api-key-file is given"
        )


def _banner(serving: Serving, entries: Sequence[KeyEntry], port: int, num_routers: int) -> list[str]:
    """What serves, and where."""
    settings = serving.settings
    url = url_of(settings.host, port)
    closed = ""
    if entries:
        has_admin = any(entry.admin for entry in entries)
        closed = " (for admins' keys)" if has_admin else " (closed: no key of --api-key-file has 'admin: true')"
    has_key = _has_key(settings)
    shown_key = "-H 'Authorization: Bearer KEY' " if has_key else ""
    return [
        f"{settings.model_name}: {len(serving.workers)} of {max(settings.workers, len(serving.workers))} workers are "
        f"ready; KV blocks of {settings.block_size} tokens, policy {settings.policy}, "
        f"context of {serving.max_model_len_tokens} tokens",
        f"listening on {url}/v1 ({counted(num_routers, 'router')}, "
        f"{'a key is' if has_key else 'no key is'} needed); "
        f"metrics at {url}/metrics, dashboard at {url}/dashboard{closed}",
        "Next steps:",
        f"  curl {url}/v1/chat/completions {shown_key}-H 'Content-Type: application/json' -d "
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
