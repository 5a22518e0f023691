"""The global directory: which worker holds which KV block now. Chooses the implementation by the scheme of a URL."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from shared.directory.base import Directory
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
) -> Directory:
    """The directory at `url`: `memory://`, `redis://`, `rediss://` or `unix:///path`.

    `memory://` is a new, empty directory on the clock of the running loop, for this process alone. A URL of one node of
    a Redis Cluster leads to all of them. Raises `ConfigError` for a malformed URL, a server that is too old or one that
    refuses the user; with `must_answer`, `DirectoryUnavailable` for one that does not answer or takes no writes now.
    """
    # Imported only when asked for: a router or tool on one kind needs nothing of the other.
    url_scheme = urlsplit(url).scheme
    if url_scheme == "memory":
        from shared.directory.memory import MemoryDirectory

        return MemoryDirectory(scheme, asyncio.get_running_loop().time)
    if url_scheme not in _REDIS_SCHEMES:
        choices = ", ".join(f"{name}://" for name in ("memory", *_REDIS_SCHEMES))
        raise ConfigError(f"--redis-url: unknown scheme {url_scheme!r} (choose from {choices})")
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
    return directory
