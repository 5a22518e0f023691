"""Whose tokenizer a router works with: its own, or a copy of a worker's where its own is missing or another one.

With the files of a worker, ids and block keys are the engine's by construction; nothing is guessed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from router.overview import Flag
from router.tokenizer import Tokenizer
from shared.errors import ConfigError, KvrouteError
from shared.hashing import parity_key
from shared.transport.channel import open_channel
from shared.transport.tokenizer_files import fetch_tokenizer
from shared.types import RouterId, WorkerInfo

logger = logging.getLogger(__name__)

_FETCH_S = 30.0
"""Longest wait for one worker's files, which are some MB."""

Fetch = Callable[[WorkerInfo], Awaitable[Mapping[str, bytes]]]


def fetch_from_workers(router: RouterId, secret: bytes) -> Fetch:
    """Asks workers over connections of their own."""

    async def fetch(info: WorkerInfo) -> Mapping[str, bytes]:
        connect = functools.partial(open_channel, info.address)
        return await fetch_tokenizer(connect, info.worker, info.instance, router, secret)

    return fetch


async def usable_tokenizer(folder: Path, infos: Sequence[WorkerInfo], fetch: Fetch, rng: random.Random) -> Tokenizer:
    """The tokenizer in `folder`, or a worker's where that one is missing, broken or not what the workers have.

    Raises:
        ConfigError: it cannot be loaded, and no worker gives its own.
    """
    own: Tokenizer | None = None
    try:
        own = await asyncio.to_thread(Tokenizer, folder, rng=rng)
        if any(info.parity_key == parity_key(info.scheme, own.fingerprint) for info in infos):
            return own
        why, failure = "the router's tokenizer is not the workers'", None
    except ConfigError as error:
        why, failure = str(error), error
    for info in infos:
        try:
            async with asyncio.timeout(_FETCH_S):
                borrowed = await _borrowed(await fetch(info), why, rng)
        except (KvrouteError, OSError, TimeoutError) as error:
            logger.warning("worker %s does not give its tokenizer: %s", info.worker, error or "no answer in time")
            continue
        logger.error("%s: prompts are tokenised with a copy of that of worker %s", why, info.worker)
        return borrowed
    if own is None:
        assert failure is not None
        raise failure
    return own


async def _borrowed(name_to_content: Mapping[str, bytes], why: str, rng: random.Random) -> Tokenizer:
    def load() -> Tokenizer:
        with tempfile.TemporaryDirectory(prefix="kvroute-") as name:
            for file_name, content in name_to_content.items():
                (Path(name) / file_name).write_bytes(content)
            return Tokenizer(Path(name), rng=rng, why_borrowed=why)

    return await asyncio.to_thread(load)


def tokenizer_flags(tokenizer: Tokenizer) -> list[Flag]:
    """What an operator should know of the tokenizer."""
    flags = []
    if tokenizer.why_borrowed:
        flags.append(
            Flag("tokenizer", f"A worker's is used, since the router's own is of no use: {tokenizer.why_borrowed}.")
        )
    if tokenizer.segments.num_mismatches:
        flags.append(Flag("tokenising", f"Prompts are tokenised as a whole: {tokenizer.segments.why_off}."))
    return flags
