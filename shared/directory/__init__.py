"""What router and workers share in a store: the directory, which tells who holds which KV block now, and the pin board.

Chooses implementations by the scheme of a URL.
"""

from __future__ import annotations

import asyncio
import random
from urllib.parse import urlsplit

from shared.directory.base import Directory
from shared.directory.pin_board import MemoryPinBoard, PinBoard
from shared.errors import ConfigError, DirectoryUnavailable
from shared.types import CacheScheme

_REDIS_SCHEMES = ("redis", "rediss", "unix")


async def connect_directory(
    url: str,
    scheme: CacheScheme,
    *,
    match_deadline_s: float = 0.02,
    publish_deadline_s: float = 2.0,
    must_answer: bool = True,
    reader: str = "",
) -> Directory:
    """The directory at `url`: `memory://`, `redis://`, `rediss://` or `unix:///path`.

    `memory://` is a new, empty directory on the clock of the running loop, for this process alone. A URL of one node of
    a Redis Cluster leads to all of them. Raises `ConfigError` for a malformed URL, a server that is too old or one that
    refuses the user; with `must_answer`, `DirectoryUnavailable` for one that does not answer or takes no writes now.

    With `reader`, a name that no other reader has, matches are given from a mirror that follows the store from now on:
    for routers, which match all the time. Tools that match once do without.
    """
    # Imported only when asked for: a router or tool on one kind needs nothing of the other.
    if _is_memory(url):
        from shared.directory.memory import MemoryDirectory

        return MemoryDirectory(scheme, asyncio.get_running_loop().time)
    from shared.directory.redis import RedisDirectory

    directory = RedisDirectory(url, scheme, match_deadline_s=match_deadline_s, publish_deadline_s=publish_deadline_s)
    try:
        await directory.connect()
    except DirectoryUnavailable:
        if must_answer:
            await directory.close()
            raise
    except BaseException:
        await directory.close()
        raise
    if not reader:
        return directory
    from shared.directory.mirrored import MirroredDirectory

    mirrored = MirroredDirectory(directory, directory.feed(reader), rng=random.Random(reader))
    mirrored.start()
    return mirrored


def open_pin_board(url: str, scheme: CacheScheme) -> PinBoard:
    """The pin board at the URL of a directory that was connected to, and thereby tried. Connects with its first call.

    `memory://` needs a running loop. Raises `ConfigError` for a malformed URL.
    """
    if _is_memory(url):
        return MemoryPinBoard(asyncio.get_running_loop().time)
    from shared.directory.redis_pin_board import RedisPinBoard

    return RedisPinBoard(url, scheme)


def _is_memory(url: str) -> bool:
    """Whether the URL is of this process's memory and not of a server. Raises `ConfigError` if it is neither."""
    url_scheme = urlsplit(url).scheme
    if url_scheme not in ("memory", *_REDIS_SCHEMES):
        choices = ", ".join(f"{name}://" for name in ("memory", *_REDIS_SCHEMES))
        raise ConfigError(f"--redis-url: unknown scheme {url_scheme!r} (choose from {choices})")
    return url_scheme == "memory"
