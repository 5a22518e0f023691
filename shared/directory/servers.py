"""Which server of the store holds a key: the one at the URL, or the primaries of the Redis Cluster that it belongs to.

Owns the clients and the breaker of each server, and the map of slots. Never repeats a call: that is its caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import RedisError

from shared.directory.breaker import Breaker
from shared.errors import ConfigError

_MIN_SERVER_MAJOR = 7  # PEXPIRETIME
_MAX_CONNECTIONS = 8
_MAX_WAITING = 128
"""Connections to one server that commands wait on; beyond it they take turns."""
_POOL_OPTIONS = ("max_connections", "timeout")
"""What a URL may say to redis-py, but not to us: here a pool must hold what deadlines leave behind."""
_MALFORMED = "--redis-url: malformed; expected redis://, rediss:// or unix:// and a server"


class UnfitStore(RedisError):
    """The server answers, but it is none that the directory can live in."""


class _EndsAtOnce:
    """What is mixed into redis-py's connections: one that is given up is closed, whatever the server does.

    redis-py (as of 8.1) forgets a TLS connection that failed while both sides still take leave of each other, which a
    frozen server never does.
    """

    async def disconnect(self, *args: Any, **kwargs: Any) -> None:
        writer: asyncio.StreamWriter | None = getattr(self, "_writer", None)
        await super().disconnect(*args, **{**kwargs, "nowait": True})  # type: ignore[misc]  # of the mixed class
        if writer is not None:
            writer.transport.abort()


@dataclass(slots=True, eq=False)
class Server:
    """One process of the store."""

    name: str
    """Host and port, or the socket's path."""
    client: Redis
    waiting_client: Redis
    """For commands that the server lets wait."""
    breaker: Breaker
    is_silent: bool = False
    """Whether whoever watches it had no answer the last time."""


class Servers:
    """All servers of the store. Every key belongs to the one at the URL until a cluster has told otherwise.

    A URL may name several nodes of a cluster: the first of them to answer leads to all.
    Replicas are never asked: what they hold is late. redis-py (as of 8.1) has a client for clusters too. There the
    command that a slot on its way is asked for with may take another connection than its ASKING and is refused; a full
    pool is an error instead of a wait; and a server that is no cluster takes another client.
    """

    def __init__(self, url: str, *, connect_timeout_s: float, rest_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._rest_s = rest_s
        all_options = [_connection_options(part, connect_timeout_s) for part in _split_hosts(url)]
        self._options = all_options[0]
        self._seeds = [self._make_server(options) for options in all_options]
        self._first = self._seeds[0]
        self._name_to_server = {seed.name: seed for seed in self._seeds}
        self._slot_to_server: list[Server] | None = None
        self._lock = asyncio.Lock()
        self._refresh: asyncio.Task[None] | None = None
        self._next_refresh_s = 0.0
        self._num_past_openings = 0
        self.is_known = False
        """Whether the server at the URL has told what it is."""

    @property
    def is_cluster(self) -> bool:
        return self._slot_to_server is not None

    @property
    def primaries(self) -> list[Server]:
        """The servers that hold keys."""
        return [self._first] if self._slot_to_server is None else list(dict.fromkeys(self._slot_to_server))

    @property
    def num_breaker_openings(self) -> int:
        openings = [server.breaker.num_openings for server in self._name_to_server.values()]
        return self._num_past_openings + sum(openings)

    def of(self, key: str) -> Server:
        if self._slot_to_server is None:
            return self._first
        return self._slot_to_server[key_slot(key.encode())]

    def tag_on_each(self) -> list[str]:
        """Hash tags of which each lies on another server, one for each."""
        server_to_tag: dict[Server, str] = {}
        missing = set(self.primaries)
        number = 0
        while missing:
            tag = f"probe{number}"
            server = self.of(f"{{{tag}}}")
            server_to_tag.setdefault(server, tag)
            missing.discard(server)
            number += 1
        return list(server_to_tag.values())

    async def discover(self) -> None:
        """Learn what the server at the URL is, once. Raises `UnfitStore`, and redis-py's errors."""
        async with self._lock:
            if self.is_known:
                return
            self._first, is_cluster = await self._first_answer()
            if is_cluster:
                await self._take_slots(await self._read_slots(self._first))
            elif len(self._seeds) > 1:
                raise UnfitStore(f"the server at {self._first.name} is no node of a cluster; give one host")
            self.is_known = True

    def move(self, slot: int, server: Server) -> None:
        """A server told that another one holds a slot now. Modifies; the rest of the map is read again soon."""
        if self._slot_to_server is not None and 0 <= slot < REDIS_CLUSTER_HASH_SLOTS:
            self._slot_to_server[slot] = server
            self.suspect()

    def at(self, host: str, port: int, *, told_by: Server) -> Server:
        """The server at an address that another one told; it may leave out its own host. Modifies if it is new."""
        host = told_by.client.connection_pool.connection_kwargs["host"] if host in ("", "?") else host
        name = f"{host}:{port}"
        if name not in self._name_to_server:
            self._name_to_server[name] = self._make_server({**self._options, "host": host, "port": port})
        return self._name_to_server[name]

    def suspect(self) -> None:
        """Something points to a map of slots that is out of date: read it again, in the background. Modifies."""
        loop = asyncio.get_running_loop()
        if self._slot_to_server is None or self._refresh is not None or loop.time() < self._next_refresh_s:
            return
        self._refresh = loop.create_task(self._refresh_slots(), name="slots of the store's cluster")

    async def close(self) -> None:
        if self._refresh is not None:
            self._refresh.cancel()
            await asyncio.wait({self._refresh})
        for server in self._name_to_server.values():
            await _close(server)

    async def _first_answer(self) -> tuple[Server, bool]:
        """The first server of the URL that answers, and whether it is a node of a cluster. Asks all of them at once."""
        asked = [asyncio.ensure_future(_is_cluster_node(seed)) for seed in self._seeds]
        try:
            errors: list[RedisError | OSError] = []
            for answer in asyncio.as_completed(asked):
                try:
                    found = await answer
                except UnfitStore:
                    raise
                except (RedisError, OSError) as error:
                    errors.append(error)
                else:
                    return found
            raise errors[0]
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _refresh_slots(self) -> None:
        """Ask all servers at once, and believe the one that answers first: of those that do not, nobody knows."""
        asked = [asyncio.ensure_future(self._read_slots(server)) for server in self._name_to_server.values()]
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                for answer in asyncio.as_completed(asked):
                    with contextlib.suppress(RedisError, OSError):
                        await self._take_slots(await answer)
                        return
        except TimeoutError:
            pass
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            self._refresh = None
            self._next_refresh_s = asyncio.get_running_loop().time() + self._rest_s

    async def _read_slots(self, server: Server) -> list[Server]:
        """The server of each slot by the word of one of them. Modifies if it tells of new ones."""
        if "path" in self._options:
            raise UnfitStore("a cluster cannot be reached through the socket of one node; give redis://host:port")
        # As two words: for the one-word form redis-py has a format of its own.
        ranges = await server.client.execute_command("CLUSTER", "SLOTS")
        # A slot that nobody serves is anybody's: who is asked says that the cluster is down.
        slot_to_server = [server] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, (raw_host, port, *_), *_ in ranges:
            owner = self.at(raw_host.decode() if raw_host else "", port, told_by=server)
            slot_to_server[first : last + 1] = [owner] * (last + 1 - first)
        return slot_to_server

    async def _take_slots(self, slot_to_server: list[Server]) -> None:
        self._slot_to_server = slot_to_server
        await self._drop_all_but({self._first, *slot_to_server})

    async def _drop_all_but(self, wanted: set[Server]) -> None:
        for server in [server for server in self._name_to_server.values() if server not in wanted]:
            del self._name_to_server[server.name]
            self._num_past_openings += server.breaker.num_openings
            await _close(server)

    def _make_server(self, options: dict[str, Any]) -> Server:
        name = options.get("path") or f"{options['host']}:{options['port']}"
        client, waiting_client = (
            Redis.from_pool(
                BlockingConnectionPool(**options, max_connections=num_connections, timeout=self._connect_timeout_s)
            )
            for num_connections in (_MAX_CONNECTIONS, _MAX_WAITING)
        )
        breaker = Breaker(self._rest_s, subject=f"the directory's store at {name}")
        return Server(name, client, waiting_client, breaker)


async def _is_cluster_node(server: Server) -> tuple[Server, bool]:
    """The server, and whether it is one. Raises `UnfitStore` if it will not do at all, and redis-py's errors."""
    found = await server.client.info("server")
    version = str(found.get("redis_version", "unknown"))  # Valkey: the Redis version that it is compatible to
    major = version.partition(".")[0]
    if not major.isdecimal() or int(major) < _MIN_SERVER_MAJOR:
        raise UnfitStore(f"the server is Redis {version}; Redis 7 or later, or Valkey, is needed")
    mode = found.get("redis_mode") or found.get("server_mode", "standalone")  # server_mode: Valkey 9
    if mode not in ("cluster", "standalone"):
        raise UnfitStore(f"the server runs as {mode}; a server that keeps data is needed")
    return server, mode == "cluster"


def _split_hosts(url: str) -> list[str]:
    """A URL for each host of a URL that names several, as `redis://user:password@host:1,host:2`.

    Raises `ConfigError` for one that leaves a host out.
    """
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    if "," not in hosts:
        return [url]
    named = list(dict.fromkeys(hosts.split(",")))
    if "" in named:
        raise ConfigError(_MALFORMED)
    return [parts._replace(netloc=f"{user}{at}{host}").geturl() for host in named]


def _connection_options(url: str, connect_timeout_s: float) -> dict[str, Any]:
    """What redis-py makes connections from. Raises `ConfigError` for a malformed URL."""
    try:
        options: dict[str, Any] = dict(parse_url(url))
        options = {name: value for name, value in options.items() if name not in _POOL_OPTIONS}
        # Retries and socket timeouts would wait beyond the deadlines that our calls have.
        options |= {
            "protocol": 2,
            "decode_responses": False,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": None,
            "socket_connect_timeout": connect_timeout_s,
        }
        if "path" not in options:
            options = {"host": "localhost", "port": 6379} | options
        connection_class: Any = options.pop("connection_class", Connection)
        options["connection_class"] = type(connection_class.__name__, (_EndsAtOnce, connection_class), {})
        # The pool would only find out about unknown options when it connects.
        connection_class(**{name: value for name, value in options.items() if name != "connection_class"})
    except (ValueError, TypeError, RedisError):
        # The parser's own words may quote parts of a password.
        raise ConfigError(_MALFORMED) from None
    return options


async def _close(server: Server) -> None:
    for client in (server.client, server.waiting_client):
        await client.aclose()
        await client.connection_pool.disconnect()
