"""The composition without Ray: a router over servers that run already, with their workers in this process.

Each router follows the servers' events itself and keeps its directory in memory, so that any number of them can attach
to the same servers. Neither starts nor ends a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from router.serving import Say, Serving, enter_router
from router.tokenizer import Tokenizer
from shared.config import Settings
from shared.directory import connect_directory
from shared.directory.base import WorkerRecord
from shared.errors import ConfigError, KvrouteError, NoWorker
from shared.transport.base import OnChange, WorkerClient
from shared.transport.client import ChannelClient
from shared.types import CacheScheme, RouterId, WorkerId
from worker.attachment import Attachment, AttachmentOptions
from worker.engines.attached_answers import ServedModels, ServerMetrics
from worker.engines.attached_http import ServerClient
from worker.engines.attached_options import AttachedOptions, AttachedServer, ParityProbe, parse_servers
from worker.engines.demo_model import prepare_tokenizer

_TIMEOUT_S = 5.0
"""Longest wait for what a server has at hand."""
_PAUSE_S = 1.0
"""Between two rounds of asking servers of which none answers."""
OF_OWN_WORKERS = frozenset(
    {
        "engine",
        "profile",
        "workers",
        "max_model_len",
        "max_num_seqs",
        "kv_cache_blocks",
        "kv_cache_bytes",
        "pin_budget_blocks",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "gpus_per_worker",
        "dtype",
        "eviction",
        "tool_call_parser",
        "reasoning_parser",
        "engine_args",
        "redis_url",
    }
)
"""Settings that say nothing about servers of somebody else."""
_PROBE_TEXT = "Hello, world!  2 + 2 = 4\n\tdéjà vu, 你好 \U0001f600 <|end|> don't"
"""Cut by every tokenizer in its own way: spaces, digits, accents, other scripts, what looks like a special token."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers to attach to, and what those that answer have said of the model."""

    settings: Settings
    """With the model's name and block size as the servers have them."""
    servers: tuple[AttachedServer, ...]
    model: str
    """The servers' own name of it."""
    tokenizer: str
    """Folder or name of its tokenizer."""


async def find_servers(settings: Settings, say: Say) -> Servers:
    """Ask the servers of `--attach` what they serve; one that answers is enough.

    Raises `ConfigError` for what cannot be meant, `NoWorker` where none answers within `start_timeout_s`.
    """
    misplaced = sorted(settings.model_fields_set & OF_OWN_WORKERS)
    if misplaced:
        names = ", ".join("--" + name.replace("_", "-") for name in misplaced)
        raise ConfigError(f"{names}: of no use with --attach, whose servers are somebody else's")
    servers = await asyncio.to_thread(parse_servers, settings.attach, settings.attach_api_key.get_secret_value())
    say(f"asking {len(servers)} servers" if len(servers) > 1 else f"asking {servers[0].url}")
    models, metrics = await _first_answer(servers, settings.start_timeout_s)
    model = settings.served_model_name if settings.served_model_name in models.names else models.names[0]
    block_size = settings.block_size
    if metrics.block_size_tokens is not None and metrics.block_size_tokens != block_size:
        if "block_size" in settings.model_fields_set:
            raise ConfigError(
                f"--block-size: {block_size} tokens asked for, but the attached servers' blocks have "
                f"{metrics.block_size_tokens}; leave it out"
            )
        block_size = metrics.block_size_tokens
    agreed = {"served_model_name": settings.served_model_name or model, "block_size": block_size}
    tokenizer = settings.tokenizer or settings.model or models.root
    return Servers(settings.model_copy(update=agreed), tuple(servers), model, tokenizer)


async def _first_answer(servers: list[AttachedServer], timeout_s: float) -> tuple[ServedModels, ServerMetrics]:
    """What the first of them that answers says, in their order."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + timeout_s
    while True:
        outcomes = await asyncio.gather(*(_ask(server) for server in servers), return_exceptions=True)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, tuple):
                return outcome
            if not isinstance(outcome, KvrouteError):
                raise outcome
            last = f"--attach {server.url}: {outcome}"
        if loop.time() + _PAUSE_S > give_up_at_s:
            raise NoWorker(f"no attached server answers: {last}")
        await asyncio.sleep(_PAUSE_S)


async def _ask(server: AttachedServer) -> tuple[ServedModels, ServerMetrics]:
    client = ServerClient(server, timeout_s=_TIMEOUT_S)
    client.open()
    try:
        return await client.models(), await client.metrics(server.rank)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def attached_router(servers: Servers, say: Say) -> AsyncIterator[Serving]:
    """A router over the attached servers. One that is away, or goes, joins when it answers again.

    Raises `ConfigError` for a server that can never be used as it is asked for, `NoWorker` where none can be used now.
    """
    settings = servers.settings
    folder = await asyncio.to_thread(_prepare_tokenizer, servers)
    tokenizer = await asyncio.to_thread(Tokenizer, folder, rng=random.Random(settings.seed))
    scheme = CacheScheme(settings.model_name, settings.block_size)
    directory = await connect_directory("memory://", scheme)
    options = AttachmentOptions(
        secret=secrets.token_bytes(32),
        tokenizer_fingerprint=tokenizer.fingerprint,
        lease_s=settings.lease_s,
        heartbeat_s=settings.heartbeat_s,
        seed=settings.seed,
    )
    probe = ParityProbe(_PROBE_TEXT, tuple(tokenizer.encode(_PROBE_TEXT)))
    async with contextlib.AsyncExitStack() as stack:
        worker_to_attachment: dict[WorkerId, Attachment] = {}
        for server in servers.servers:
            attachment = Attachment(AttachedOptions(server, scheme, servers.model, probe), options, directory)
            stack.push_async_callback(attachment.close)
            worker_to_attachment[attachment.worker] = attachment
        started = await asyncio.gather(*(attachment.start() for attachment in worker_to_attachment.values()))
        infos = tuple(info for info in started if info is not None)
        for info in infos:
            known_by = "KV events" if info.tells_blocks else "hints only"
            say(f"server {info.worker} is ready: {info.engine}, {info.num_blocks} blocks, {known_by}")
        if not infos:
            raise NoWorker("no attached server can be used now; the log says why")
        router_id = RouterId(f"router-{secrets.token_hex(4)}")
        rng = random.Random(settings.seed)

        def connect(record: WorkerRecord, on_change: OnChange) -> WorkerClient:
            info = record.info
            opening = functools.partial(worker_to_attachment[info.worker].open_channel, info.instance)
            return ChannelClient(
                info.worker, info.instance, router_id, options.secret, opening, rng=rng, on_change=on_change
            )

        router = await enter_router(
            stack, settings, router_id, directory, connect, scheme=scheme, tokenizer=tokenizer, rng=rng
        )
        yield Serving(settings, router, tokenizer, scheme, infos, actors={}, store=None, run=None)


def _prepare_tokenizer(servers: Servers) -> Path:
    """Blocks. Raises `ConfigError`, telling whose name it is where the user gave none."""
    try:
        return prepare_tokenizer(servers.tokenizer, servers.settings.model_cache_dir)
    except ConfigError as error:
        if servers.settings.tokenizer:
            raise
        raise ConfigError(f"{error}; name a folder with --tokenizer DIR") from error
