"""Connections to a Redis-protocol store: scripts by name, a deadline for every call, and a server for every key.

Knows nothing of keys and what they mean. Shared by all that is kept in the store.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from shared.directory.servers import Server, Servers, UnfitStore
from shared.errors import ConfigError, DirectoryUnavailable

logger = logging.getLogger(__name__)

_MAX_TRIES = 5
"""Of one command: a script that is lost, a slot on its way, one that has moved, and the script lost there too."""
_TRY_AGAIN_S = 0.002
"""Pause before a command is repeated, once, whose keys were split between two servers. Redis Cluster Specification, on
multiple keys operations: such a command gets TRYAGAIN until all of its keys have moved, and may then be tried again."""

_NO_PERMISSION_IN_SCRIPT = ("ACL failure in script", "executing the script can't run")
"""What Valkey and Redis say to a script in place of NOPERM; some leave out the command's name."""

Answer = TypeVar("Answer")
Argument = str | bytes | int
_Ask = Callable[[Server, str, float, "list[Command]"], Awaitable[list[Any]]]


@dataclass(frozen=True, slots=True)
class Command:
    """One command, and a key whose server it is for: any of those that it names, since all lie in one slot."""

    key: str
    arguments: tuple[Argument, ...]
    is_waiting: bool = False
    """Whether it may wait at the server for something to come: such a command keeps no other from a connection."""


@dataclass(slots=True)
class _Errand:
    """A command on its way through servers."""

    place: int
    command: Command
    server: Server
    is_asking: bool = False
    """Whether the slot is just being moved to that server."""
    has_tried_again: bool = False
    """Whether the server has told before that only some of the keys were there."""


class SlotOnItsWay(DirectoryUnavailable):
    """The server answers, but the keys of a command lie on two servers while their slot moves."""


class StoreConnection:
    """Calls to the store at a URL, each within a deadline.

    A store that is a Redis Cluster is told by itself; all of it that answers is used. `call` and `ask_each` bound the
    time and turn what goes wrong into `DirectoryUnavailable`; `execute`, `pipeline` and `run` do the work inside of a
    `call` and raise redis-py's own errors. Counters only grow: `num_misses` counts calls without an answer,
    `num_spared` those that breakers spared.
    """

    def __init__(
        self, url: str, *, longest_deadline_s: float, rest_s: float = 0.5, scripts: Iterable[str] = ()
    ) -> None:
        """A script's name is that of its file in `lua/`; `a+b` is file `a` and then `b`, as one script."""
        self._longest_deadline_s = longest_deadline_s
        self._servers = Servers(url, connect_timeout_s=longest_deadline_s, rest_s=rest_s)
        self._late: set[asyncio.Task[Any]] = set()
        self._name_to_sha: dict[str, str] = {}
        self._sha_to_script: dict[str, str] = {}
        folder = resources.files("shared.directory").joinpath("lua")
        for name in scripts:
            script = "\n".join(folder.joinpath(f"{part}.lua").read_text() for part in name.split("+"))
            self._name_to_sha[name] = hashlib.sha1(script.encode()).hexdigest()
            self._sha_to_script[self._name_to_sha[name]] = script
        self.num_misses = 0
        self.num_spared = 0

    @property
    def is_resting(self) -> bool:
        """Whether every server missed so often that guarded calls fail at once."""
        return all(server.breaker.is_open for server in self._servers.primaries)

    @property
    def is_cluster(self) -> bool:
        """Whether keys of different slots cannot be named in one command. Known after the first call."""
        return self._servers.is_cluster

    @property
    def num_breaker_openings(self) -> int:
        return self._servers.num_breaker_openings

    def name_of_server(self, key: str) -> str:
        """Of the server that a key lies on: host and port, or a path. Known after the first call."""
        return self._servers.of(key).name

    async def connect(self, probe: Callable[[str], Command], rules: str) -> None:
        """Connect to all servers and try on each what will be asked of it.

        `probe` makes the command to try from a hash tag, `rules` are the rights that a user needs. Raises `ConfigError`
        for a store that will not do until somebody sets it up otherwise, `DirectoryUnavailable` for one that does not
        answer or takes nothing now.
        """

        async def work() -> None:
            await self._servers.discover()
            await asyncio.gather(*map(self._warn_of_eviction, self._servers.primaries))
            for answer in await self.pipeline([probe(tag) for tag in self._servers.tag_on_each()]):
                if isinstance(answer, Exception):
                    raise answer

        await self._call_of_stranger("connect", self._longest_deadline_s, work, rules)

    async def discover(self, operation: str, deadline_s: float, rules: str) -> None:
        """Learn which server holds which key, and try nothing. Raises as `connect` does."""
        await self._call_of_stranger(operation, deadline_s, self._servers.discover, rules)

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
        except TryAgainError as error:
            raise SlotOnItsWay(f"{operation}: {error}") from error
        except (RedisError, OSError, asyncio.CancelledError) as error:
            raise self._miss(operation, f"{type(error).__name__}: {error}") from error

    async def ask_each(
        self, operation: str, deadline_s: float, commands: Sequence[Command], *, is_guarded: bool = False
    ) -> list[Any]:
        """The answers to commands in their order, where each server has the deadline for itself.

        The answer of a server that fails is a `DirectoryUnavailable` for each of its commands; an error that a
        malformed value makes is the answer to its command alone. A guarded call is not made while the server's breaker
        is open, and tells the breaker how it went.
        """
        ask = self._ask_guarded if is_guarded else self._ask_within
        return await self._ask_servers(ask, operation, deadline_s, commands)

    async def watch_each(
        self, operation: str, deadline_s: float, commands: Sequence[Command], *, prompt_s: float
    ) -> list[Any]:
        """As `ask_each`; made whether breakers are open or not, and tells them how it went.

        An answer that takes longer than `prompt_s` ends no outage that guarded calls have met, since they have less
        patience; it ends one that was met here.
        """
        return await self._ask_servers(functools.partial(self._ask_watching, prompt_s), operation, deadline_s, commands)

    async def _ask_servers(
        self, ask: _Ask, operation: str, deadline_s: float, commands: Sequence[Command]
    ) -> list[Any]:
        server_to_places: dict[Server, list[int]] = defaultdict(list)
        for place, command in enumerate(commands):
            server_to_places[self._servers.of(command.key)].append(place)
        parts = [
            ask(server, operation, deadline_s, [commands[place] for place in places])
            for server, places in server_to_places.items()
        ]
        answers: list[Any] = [None] * len(commands)
        found = [await parts[0]] if len(parts) == 1 else await asyncio.gather(*parts)
        for places, part in zip(server_to_places.values(), found, strict=True):
            for place, answer in zip(places, part, strict=True):
                answers[place] = answer
        return answers

    async def execute(self, key: str, *arguments: Argument, is_waiting: bool = False) -> Any:
        """The answer to one command, as redis-py gives it for the command's name."""
        (answer,) = await self.pipeline([Command(key, arguments, is_waiting)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run(self, script: str, keys: Sequence[str], *arguments: Argument) -> Any:
        """The answer of a script by its name. All keys lie in one slot."""
        command = self.script_command(script, keys, *arguments)
        return await self.execute(command.key, *command.arguments)

    def script_command(self, script: str, keys: Sequence[str], *arguments: Argument) -> Command:
        """What runs a script within a pipeline. All keys lie in one slot."""
        return Command(keys[0], ("EVALSHA", self._name_to_sha[script], len(keys), *keys, *arguments))

    async def pipeline(self, commands: Sequence[Command], *, patience_s: float = math.inf) -> list[Any]:
        """The answers to commands in their order, in one round trip to each server, at once; an error is an answer.

        Scripts that a server has lost are loaded and slots that have moved are followed. What meets a slot on its way
        is tried again after a moment, unless that would be later than `patience_s` from now.
        """
        clock = asyncio.get_running_loop().time
        patient_until_s = clock() + patience_s
        answers: list[Any] = [None] * len(commands)
        errands = [_Errand(place, command, self._servers.of(command.key)) for place, command in enumerate(commands)]
        for _ in range(_MAX_TRIES):
            server_to_errands: dict[Server, list[_Errand]] = defaultdict(list)
            for errand in errands:
                server_to_errands[errand.server].append(errand)
            parts = [self._send(server, part, answers) for server, part in server_to_errands.items()]
            await (parts[0] if len(parts) == 1 else asyncio.gather(*parts))
            is_patient = clock() + _TRY_AGAIN_S <= patient_until_s
            errands = [errand for errand in errands if self._is_to_repeat(errand, answers[errand.place], is_patient)]
            if not errands:
                break
            if any(isinstance(answers[errand.place], TryAgainError) for errand in errands):
                await asyncio.sleep(_TRY_AGAIN_S)
        return answers

    async def close(self) -> None:
        """Give up what is under way and release all connections."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._servers.close()

    # One server.

    async def _ask_guarded(
        self, server: Server, operation: str, deadline_s: float, commands: list[Command]
    ) -> list[Any]:
        breaker = server.breaker
        clock = asyncio.get_running_loop().time
        if not breaker.admit(clock()):
            self.num_spared += 1
            return [DirectoryUnavailable(f"{operation}: the store has not answered lately")] * len(commands)
        try:
            answers = await self._ask_within(server, operation, deadline_s, commands)
        except BaseException:
            breaker.abandon()
            raise
        if all(map(_is_miss, answers)):
            breaker.miss(clock(), str(answers[0]))
        else:
            breaker.succeed(clock())
        return answers

    async def _ask_watching(
        self, prompt_s: float, server: Server, operation: str, deadline_s: float, commands: list[Command]
    ) -> list[Any]:
        clock = asyncio.get_running_loop().time
        asked_at_s = clock()
        answers = await self._ask_within(server, operation, deadline_s, commands)
        if all(map(_is_miss, answers)):
            server.is_silent = True
            server.breaker.miss(clock(), str(answers[0]))
        elif server.is_silent or clock() - asked_at_s <= prompt_s:
            server.is_silent = False
            server.breaker.succeed(clock())
        return answers

    async def _ask_within(
        self, server: Server, operation: str, deadline_s: float, commands: list[Command]
    ) -> list[Any]:
        async def work() -> list[Any]:
            # Those that have their answers must not lose them to the deadline for the sake of one that is tried again.
            answers = await self.pipeline(commands, patience_s=deadline_s / 2)
            for place, answer in enumerate(answers):
                if isinstance(answer, TryAgainError):
                    answers[place] = SlotOnItsWay(f"{operation}: {answer}")
                elif isinstance(answer, Exception) and not is_malformed(answer):
                    raise answer
            return answers

        try:
            return await self.call(operation, deadline_s, work)
        except DirectoryUnavailable as error:
            return [error] * len(commands)

    async def _send(self, server: Server, errands: list[_Errand], answers: list[Any]) -> None:
        """Ask one server, after loading the scripts that it said to have lost. Modifies `answers`."""
        lost = sorted({str(errand.command.arguments[1]) for errand in errands if is_lost(answers[errand.place])})
        try:
            is_waiting = any(errand.command.is_waiting for errand in errands)
            client = server.waiting_client if is_waiting else server.client
            async with client.pipeline(transaction=False) as pipeline:
                for sha in lost:
                    pipeline.execute_command("SCRIPT", "LOAD", self._sha_to_script[sha])
                for errand in errands:
                    if errand.is_asking:
                        pipeline.execute_command("ASKING")
                    pipeline.execute_command(*errand.command.arguments)
                found = iter(await pipeline.execute(raise_on_error=False))
        except (RedisError, OSError) as error:
            found = iter([error] * (len(lost) + 2 * len(errands)))
        sha_to_loaded = {sha: next(found) for sha in lost}
        for errand in errands:
            if errand.is_asking:
                next(found)
            answer = next(found)
            # That the script is missing tells less than why it could not be loaded.
            loaded = sha_to_loaded.get(str(errand.command.arguments[1])) if is_lost(answer) else None
            answers[errand.place] = loaded if isinstance(loaded, Exception) else answer

    def _is_to_repeat(self, errand: _Errand, answer: Any, is_patient: bool) -> bool:
        """Whether a command is to be sent once more. Modifies where to."""
        if isinstance(answer, TryAgainError):
            self._servers.suspect()
            is_first, errand.has_tried_again = not errand.has_tried_again, True
            return is_first and is_patient
        if isinstance(answer, AskError):  # of which `MovedError` is one
            errand.is_asking = not isinstance(answer, MovedError)
            errand.server = self._servers.at(answer.host, answer.port, told_by=errand.server)
            if not errand.is_asking:
                self._servers.move(answer.slot_id, errand.server)
            return True
        if isinstance(answer, (ConnectionError, OSError, ClusterDownError)):
            self._servers.suspect()
        return is_lost(answer)

    async def _bounded(self, work: Callable[[], Awaitable[Answer]]) -> Answer:
        async with asyncio.timeout(self._longest_deadline_s):
            if not self._servers.is_known:
                await self._servers.discover()
            return await work()

    async def _call_of_stranger(
        self, operation: str, deadline_s: float, work: Callable[[], Awaitable[None]], rules: str
    ) -> None:
        """A call to a store that may want to be set up otherwise, which is a `ConfigError`."""
        try:
            await self.call(operation, deadline_s, work)
        except DirectoryUnavailable as error:
            cause = error.__cause__
            if isinstance(cause, AuthenticationError):
                raise ConfigError(f"--redis-url: the store refuses the user or the password: {cause}") from None
            if isinstance(cause, NoPermissionError) or any(words in str(cause) for words in _NO_PERMISSION_IN_SCRIPT):
                raise ConfigError(f"--redis-url: {cause}; the user needs the rules {rules}") from None
            if isinstance(cause, UnfitStore):
                raise ConfigError(f"--redis-url: {cause}") from None
            raise

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # marks the error of a call that was given up as seen

    def _miss(self, operation: str, reason: str) -> DirectoryUnavailable:
        self.num_misses += 1
        self._servers.suspect()
        return DirectoryUnavailable(f"{operation}: {reason}")

    # What is known of the servers.

    async def _warn_of_eviction(self, server: Server) -> None:
        memory = await server.client.info("memory")
        policy = memory.get("maxmemory_policy", "noeviction")
        if memory.get("maxmemory", 0) and policy != "noeviction":
            logger.warning(
                "the store at %s may throw away what the directory keeps there (maxmemory-policy %s): "
                "with noeviction it tells when it is full",
                server.name,
                policy,
            )


def _is_miss(answer: Any) -> bool:
    """Whether a command was not answered at all."""
    return isinstance(answer, DirectoryUnavailable) and not isinstance(answer, SlotOnItsWay)


def is_lost(answer: Any) -> bool:
    """Whether a server has lost the script that it was to run."""
    return isinstance(answer, NoScriptError)


def is_malformed(answer: Any) -> bool:
    """Whether a command met a value that is none of ours: that is about its key alone."""
    if not isinstance(answer, ResponseError):
        return False
    return "WRONGTYPE" in str(answer) or str(answer).removeprefix("ERR ").startswith("user_script:")


def as_text(raw: Any) -> str | None:
    """A value of the store as text; `None` if it is none."""
    try:
        return raw.decode() if isinstance(raw, bytes) else None
    except UnicodeDecodeError:
        return None
