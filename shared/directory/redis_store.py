"""One server that speaks Redis' protocol: a client made from a URL, on which every call has a deadline.

Knows no key and no script's meaning; those are of the directory and of the pin board, which each hold a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from shared.errors import ConfigError, DirectoryUnavailable

_MIN_SERVER_MAJOR = 7  # PEXPIRETIME
_MAX_CONNECTIONS = 8

Answer = TypeVar("Answer")


class RedisStore:
    """Connections to one server, made when they are needed. Every call raises `DirectoryUnavailable` past its deadline.

    `num_misses` counts calls without an answer; it only grows.
    """

    def __init__(self, url: str, *, longest_call_s: float) -> None:
        self._longest_call_s = longest_call_s
        self._late: set[asyncio.Task[Any]] = set()
        self._is_checked = False
        self.num_misses = 0
        try:
            # Retries and socket timeouts would wait beyond the deadlines that are kept here.
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=longest_call_s,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=None,
                socket_connect_timeout=longest_call_s,
            )
        except (ValueError, TypeError):
            # The parser's own words may quote parts of a password.
            raise ConfigError("--redis-url: malformed; expected redis://, rediss:// or unix:// and a server") from None
        self.client = Redis.from_pool(pool)

    def script(self, *names: str) -> AsyncScript:
        """The files `lua/<name>.lua` end to end as one script, which loads itself into a server that lacks it."""
        folder = resources.files("shared.directory").joinpath("lua")
        return self.client.register_script("\n".join(folder.joinpath(f"{name}.lua").read_text() for name in names))

    async def connect(self) -> None:
        """Connect and check the server's version, as the first call does otherwise.

        Raises `ConfigError` if it is too old, `DirectoryUnavailable` if it does not answer.
        """
        await self.call("connect", self.client.ping)

    async def call(
        self, operation: str, work: Callable[[], Awaitable[Answer]], *, deadline_s: float | None = None
    ) -> Answer:
        """Do `work` within the deadline; without one, within the longest time that any call may take.

        A call that is given up is not cancelled but left to end within that longest time: if it was connecting, the
        next call finds the connection made, even where that takes longer than a request may wait.
        """
        deadline_s = self._longest_call_s if deadline_s is None else deadline_s
        task = asyncio.get_running_loop().create_task(self._bounded(work))
        self._late.add(task)
        task.add_done_callback(self._forget_task)
        try:
            await asyncio.wait({task}, timeout=deadline_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        try:
            if not task.done():
                raise TimeoutError
            return task.result()
        except TimeoutError:
            raise self._miss(operation, f"no answer within {deadline_s:g} s") from None
        except (RedisError, OSError, asyncio.CancelledError) as error:
            raise self._miss(operation, f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Give up calls under way and release the connections."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self.client.aclose()
        await self.client.connection_pool.disconnect()

    async def _bounded(self, work: Callable[[], Awaitable[Answer]]) -> Answer:
        async with asyncio.timeout(self._longest_call_s):
            if not self._is_checked:
                await self._check_server()
            return await work()

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # marks the error of a call that was given up as seen

    def _miss(self, operation: str, reason: str) -> DirectoryUnavailable:
        self.num_misses += 1
        return DirectoryUnavailable(f"{operation}: {reason}")

    async def _check_server(self) -> None:
        server = await self.client.info("server")
        version = str(server.get("redis_version", "unknown"))  # Valkey tells the Redis version that it is compatible to
        major = version.partition(".")[0]
        if not major.isdecimal() or int(major) < _MIN_SERVER_MAJOR:
            raise ConfigError(f"--redis-url: the server is Redis {version}; Redis 7 or later, or Valkey, is needed")
        self._is_checked = True
