"""Connections to a Redis-protocol store: a client from a URL, scripts by name, deadlines for every call.

Knows nothing of keys and what they mean. Shared by all that is kept in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, RedisError

from shared.errors import ConfigError, DirectoryUnavailable

_MIN_SERVER_MAJOR = 7  # PEXPIRETIME
_MAX_CONNECTIONS = 8

Answer = TypeVar("Answer")
Argument = str | bytes | int


@dataclass(frozen=True, slots=True)
class Command:
    """One command, and a key whose server it is for: any of those that it names, since all lie in one slot."""

    key: str
    arguments: tuple[Argument, ...]


class StoreConnection:
    """Calls to the store at a URL, each within a deadline.

    `num_misses` counts calls without an answer; it only grows. `call` bounds the time and turns what goes wrong into
    `DirectoryUnavailable`; `execute`, `pipeline` and `run` do the work inside it and raise redis-py's own errors.
    """

    def __init__(self, url: str, *, longest_deadline_s: float, scripts: Iterable[str] = ()) -> None:
        self._longest_deadline_s = longest_deadline_s
        self._late: set[asyncio.Task[Any]] = set()
        self._is_checked = False
        self.num_misses = 0
        self._client = _make_client(url, longest_deadline_s)
        self._name_to_script: dict[str, AsyncScript] = {
            name: self._client.register_script(_read_script(name)) for name in scripts
        }
        self._sha_to_script = {script.sha: script for script in self._name_to_script.values()}

    async def connect(self) -> None:
        """Connect and check the server's version, as the first call does otherwise.

        Raises `ConfigError` if it is too old, `DirectoryUnavailable` if it does not answer.
        """
        await self.call("connect", self._longest_deadline_s, self._client.ping)

    async def call(self, operation: str, deadline_s: float, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """Do `work` within the deadline. Raises `DirectoryUnavailable` that names the operation.

        A call that is given up is not cancelled but left to end within the longest deadline: if it was connecting, the
        next call finds the connection made, even where that takes longer than a request may wait.
        """
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

    async def execute(self, key: str, *arguments: Argument) -> Any:
        """The answer to one command, as redis-py gives it for the command's name."""
        (answer,) = await self.pipeline([Command(key, arguments)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run(self, script: str, keys: Sequence[str], *arguments: Argument) -> Any:
        """The answer of a script by its name. All keys lie in one slot."""
        command = self.script_command(script, keys, *arguments)
        return await self.execute(command.key, *command.arguments)

    def script_command(self, script: str, keys: Sequence[str], *arguments: Argument) -> Command:
        """What runs a script within a pipeline. All keys lie in one slot."""
        sha = self._name_to_script[script].sha
        return Command(keys[0], ("EVALSHA", sha, len(keys), *keys, *arguments))

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to commands in their order, in one round trip to each server; an error is an answer.

        Scripts that a server has lost are loaded and run again.
        """
        answers = await self._ask(commands)
        lost = [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if lost:
            for sha in {str(commands[place].arguments[1]) for place in lost}:
                await self._client.script_load(self._sha_to_script[sha].script)
            again = await self._ask([commands[place] for place in lost])
            for place, answer in zip(lost, again, strict=True):
                answers[place] = answer
        return answers

    async def close(self) -> None:
        """Give up what is under way and release all connections."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command.arguments)
            return await pipeline.execute(raise_on_error=False)

    async def _bounded(self, work: Callable[[], Awaitable[Answer]]) -> Answer:
        async with asyncio.timeout(self._longest_deadline_s):
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
        server = await self._client.info("server")
        version = str(server.get("redis_version", "unknown"))  # Valkey tells the Redis version that it is compatible to
        major = version.partition(".")[0]
        if not major.isdecimal() or int(major) < _MIN_SERVER_MAJOR:
            raise ConfigError(f"--redis-url: the server is Redis {version}; Redis 7 or later, or Valkey, is needed")
        self._is_checked = True


def _make_client(url: str, connect_timeout_s: float) -> Redis:
    """A client that connects when it is used. Raises `ConfigError` for a malformed URL."""
    try:
        options: dict[str, Any] = dict(parse_url(url))
        # Retries and socket timeouts would wait beyond the deadlines that are kept here.
        options |= {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": None,
            "socket_connect_timeout": connect_timeout_s,
        }
        options.get("connection_class", Connection)(
            **{name: value for name, value in options.items() if name != "connection_class"}
        )
        options |= {"max_connections": _MAX_CONNECTIONS, "timeout": connect_timeout_s}
        return Redis.from_pool(BlockingConnectionPool(**options))
    except (ValueError, TypeError, RedisError):
        # The parser's own words may quote parts of a password.
        raise ConfigError("--redis-url: malformed; expected redis://, rediss:// or unix:// and a server") from None


def _read_script(name: str) -> str:
    return resources.files("shared.directory").joinpath("lua", f"{name}.lua").read_text()
