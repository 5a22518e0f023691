"""What every composition has in common: a router as settings have it, and what a front end is handed with it."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from router.fleet import Connect
from router.policies import make_policy
from router.request_log import RequestLog
from router.runfile import Run
from router.service import Router
from router.tokenizer import Tokenizer
from router.tracing import Tracing
from shared.config import Settings
from shared.directory.base import Directory
from shared.directory.embedded import EmbeddedStore
from shared.hashing import parity_key
from shared.telemetry import Metrics
from shared.types import CacheScheme, RouterId, WorkerId, WorkerInfo

Say = Callable[[str], None]
"""Tells the user what is going on, one line at a time."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A router over workers that are ready, and what a front end needs to talk to it."""

    settings: Settings
    router: Router
    tokenizer: Tokenizer
    scheme: CacheScheme
    workers: tuple[WorkerInfo, ...]
    """Those that served when this began."""
    actors: Mapping[WorkerId, Any]
    """Ray handles of workers that were started here; empty where others run them."""
    store: EmbeddedStore | None
    """The store that was started here; `None` where there is none or one was given."""
    run: Run | None
    """What another process needs to serve over the same workers; `None` over attached servers: it finds them itself."""

    @property
    def max_model_len_tokens(self) -> int:
        """The shortest context among the workers: what every one of them can take."""
        return min(info.max_model_len_tokens for info in self.workers)

    def num_in_flight(self, num_per_seq: int, asked: int | None = None) -> int:
        """Batch rows to have under way: as many as are asked for, or settings say, or so many for each sequence.

        Rows beyond what the router holds would only be refused by it.
        """
        num_seqs = sum(info.max_num_seqs for info in self.workers)
        return min(asked or self.settings.max_in_flight or num_seqs * num_per_seq, self.settings.max_queued)


async def enter_router(
    stack: contextlib.AsyncExitStack,
    settings: Settings,
    router_id: RouterId,
    directory: Directory,
    connect: Connect,
    *,
    scheme: CacheScheme,
    tokenizer: Tokenizer,
    rng: random.Random,
    only: Container[WorkerId] | None = None,
    is_observer: bool = False,
) -> Router:
    """A router with its log and its traces, as settings have them, until `stack` ends. An observer leaves no word.

    Takes the directory over, which is closed whatever comes of the router.
    """
    async with contextlib.AsyncExitStack() as until_owned:
        until_owned.push_async_callback(directory.close)
        request_log = tracing = None
        if settings.request_log is not None and not is_observer:
            log = RequestLog(settings.request_log, block_size_tokens=settings.block_size, wall_clock=time.time)
            request_log = await stack.enter_async_context(log)
        if settings.otlp_endpoint and not is_observer:
            tracing = Tracing.to_endpoint(settings.otlp_endpoint)
            stack.push_async_callback(tracing.close)
        until_owned.pop_all()
    router = Router(
        router_id,
        directory,
        connect,
        make_policy(settings.policy),
        scheme=scheme,
        parity_key=parity_key(scheme, tokenizer.fingerprint),
        metrics=Metrics(),
        rng=rng,
        max_attempts=settings.max_attempts,
        max_held=settings.max_queued,
        queue_timeout_s=settings.queue_timeout_s,
        min_prefix_tokens=settings.min_prefix_tokens,
        tenant_to_weight=settings.tenant_weights,
        request_log=request_log,
        only=only,
        refresh_s=settings.heartbeat_s,
        is_observer=is_observer,
        tracing=tracing,
    )
    tokenizer.expose(router.metrics)
    if request_log is not None:
        request_log.expose(router.metrics)
    return await stack.enter_async_context(router)


def url_of(host: str, port: int) -> str:
    """Where an HTTP server at this address is asked."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
