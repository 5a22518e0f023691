"""Chooses the directory's implementation by the scheme of a URL."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from shared.directory.base import Directory
from shared.errors import ConfigError
from shared.types import CacheScheme

REDIS_SCHEMES = ("redis", "rediss", "unix")


def connect_directory(
    url: str, scheme: CacheScheme, *, match_deadline_s: float = 0.02, publish_deadline_s: float = 2.0
) -> Directory:
    """The directory at `url`: `memory://`, `redis://`, `rediss://` or `unix:///path`. Raises `ConfigError`.

    A store is connected to, and its version checked, at the first call. `memory://` is a new, empty directory on the
    clock of the running loop, for this process alone.
    """
    url_scheme = urlsplit(url).scheme
    if url_scheme == "memory":
        from shared.directory.memory import MemoryDirectory

        return MemoryDirectory(scheme, asyncio.get_running_loop().time)
    if url_scheme in REDIS_SCHEMES:
        from shared.directory.redis import RedisDirectory

        return RedisDirectory(url, scheme, match_deadline_s=match_deadline_s, publish_deadline_s=publish_deadline_s)
    choices = ", ".join(f"{name}://" for name in ("memory", *REDIS_SCHEMES))
    raise ConfigError(f"--redis-url: unknown scheme {url_scheme!r} (choose from {choices})")
