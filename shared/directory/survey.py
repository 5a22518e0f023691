"""Looks at a store from the side: how it does, how much it holds, what nobody owns. Never a part of routing.

The layout of what is looked at is that of `shared.directory.redis`.
"""

from __future__ import annotations

import asyncio
import functools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

from shared.directory.base import WorkerRecord, check_num_keys
from shared.directory.connection import Command, StoreConnection
from shared.directory.redis import ACL_RULES, RECORD_FIELDS, parse_record, worker_keys
from shared.errors import DirectoryUnavailable, ProtocolError
from shared.hashing import KEY_SIZE_BYTES
from shared.types import BlockKey, CacheScheme, Epoch, WorkerId

_SCRIPTS = ("keys+audit", "reap")
_DATA_KINDS = ("blocks", "events", "staged")
"""What lives by a worker's lease, which is its `meta` and has an end."""
_NUM_PINGS = 9
_NEARLY = 0.9
"""Share of a limit at which it is time to tell."""
_NO_KEY = -2
"""What the store says of the expiry of a key that is not there."""
_SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class Audited:
    """A worker's set, at a batch that was asked for."""

    num_entries: int
    num_absent: int
    """Of the keys that were looked up."""


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """One server of the store. What it does not tell to this user is `None`."""

    name: str
    """Host and port, or the path of its socket."""
    error: str = ""
    """Why it does not answer: then nothing else is known of it."""
    version: str | None = None
    role: str | None = None
    ping_p50_s: float | None = None
    """Median of a few round trips, one after another."""
    used_memory_bytes: int | None = None
    max_memory_bytes: int | None = None
    """`None` without a limit, too."""
    eviction_policy: str | None = None
    num_evicted: int | None = None
    """Keys that the server has thrown out for room since it started, whoever's."""
    num_keys: int | None = None
    """All that the server holds, other users' too."""
    num_clients: int | None = None
    max_clients: int | None = None
    has_append_only_file: bool | None = None
    is_save_failing: bool | None = None
    """Whether its last try to save to its disk failed: with Redis's defaults it takes no writes then."""

    @property
    def may_evict(self) -> bool:
        """Whether the server throws out what is ours when it runs out of room."""
        return bool(self.max_memory_bytes) and self.eviction_policy not in (None, "noeviction")

    @property
    def is_nearly_full(self) -> bool:
        """Whether it has so little room left that it will soon throw things out, or take nothing more."""
        return bool(self.max_memory_bytes) and (self.used_memory_bytes or 0) >= _NEARLY * (self.max_memory_bytes or 0)

    @property
    def is_nearly_out_of_clients(self) -> bool:
        """Whether it will soon turn connections away."""
        return bool(self.max_clients) and (self.num_clients or 0) >= _NEARLY * (self.max_clients or 0)


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """What the store holds of one worker; what it does not tell to this user is `None`."""

    num_entries: int | None
    num_bytes: int | None
    num_stream_entries: int | None
    lease_left_s: float | None
    """`None` without a lease."""
    error: str = ""
    """Why nothing is known: the server that holds it does not answer."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What the store holds of one worker, at about one moment."""

    record: WorkerRecord | None
    """`None` without a lease, and for one that nobody can read or that never ends, which is `spoilt`."""
    lease_left_s: float | None
    """`None` without a lease, and for one that never ends."""
    blocks: frozenset[BlockKey]
    num_foreign: int
    """Members of the set of blocks that are no block keys."""
    num_staged: int
    """Blocks of a snapshot in the making."""
    spoilt: tuple[str, ...]
    """Kinds of the worker's keys that hold something else than they should: `meta`, `blocks`, `events`, `staged`."""


class Survey(Protocol):
    """What auditors and doctors ask. Every method raises `DirectoryUnavailable` where the store does not answer.

    `health`, `sizes` and `leftovers` raise `ConfigError` where it refuses the user.
    """

    async def audit(self, worker: WorkerId, epoch: Epoch, seq: int, keys: Sequence[BlockKey]) -> Audited | None:
        """Compare with a worker's set as it is after batch `seq`; `None` where that was not the last one.

        At most `MAX_KEYS_PER_CALL` keys.
        """
        ...

    async def health(self, workers: Iterable[WorkerId]) -> list[ServerHealth]:
        """The servers that hold the list of workers or anything of `workers`, those that do not answer among them."""
        ...

    async def sizes(self, workers: Iterable[WorkerId]) -> dict[WorkerId, WorkerSize]:
        """How much the store holds of each worker; of one whose server does not answer, why."""
        ...

    async def holding(self, worker: WorkerId) -> Holding:
        """What the store holds of one worker. Linear in it."""
        ...

    async def leftovers(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        """Ids that hold something in the store for ever and have no lease, on the servers of `workers`."""
        ...

    async def reap(self, worker: WorkerId) -> int:
        """Drop what a worker without a lease has left; the number of keys dropped. Modifies."""
        ...

    async def discard(self, worker: WorkerId) -> int:
        """Drop all that is kept of a worker, its lease too; the number of keys dropped. Modifies.

        A worker that lives registers anew with its next heartbeat.
        """
        ...

    async def close(self) -> None:
        """Release the connections."""
        ...


class StoreSurvey:
    """`Survey` over a Redis-protocol store, with connections of its own, made with the first call."""

    def __init__(self, url: str, scheme: CacheScheme, *, deadline_s: float = 2.0) -> None:
        self._scheme = scheme
        self._namespace = scheme.namespace
        self._deadline_s = deadline_s
        self._connection = StoreConnection(url, longest_deadline_s=deadline_s, scripts=_SCRIPTS)

    async def audit(self, worker: WorkerId, epoch: Epoch, seq: int, keys: Sequence[BlockKey]) -> Audited | None:
        check_num_keys(len(keys))
        names = self._keys(worker, "meta", "blocks")

        async def work() -> Any:
            return await self._connection.run("keys+audit", names, epoch, seq, b"".join(keys))

        found = await self._connection.call("audit", self._deadline_s, work)
        return None if found is None else Audited(int(found[0]), int(found[1]))

    async def health(self, workers: Iterable[WorkerId]) -> list[ServerHealth]:
        places = await self._places("health", workers)
        return list(await asyncio.gather(*(self._health_of(name, key) for name, key in places.items())))

    async def sizes(self, workers: Iterable[WorkerId]) -> dict[WorkerId, WorkerSize]:
        asked = list(workers)
        await self._connection.discover("sizes", self._deadline_s, ACL_RULES)
        metas = [self._keys(worker, "meta")[0] for worker in asked]
        ttls = [Command(meta, ("PTTL", meta)) for meta in metas]
        leases = await self._connection.ask_each("sizes", self._deadline_s, ttls)
        reached = [one for one, lease in zip(asked, leases, strict=True) if not isinstance(lease, DirectoryUnavailable)]

        async def work() -> list[Any]:
            return await self._connection.pipeline([command for worker in reached for command in self._size_of(worker)])

        answers = iter(await self._connection.call("sizes", self._deadline_s, work))
        found = {}
        for worker, lease in zip(asked, leases, strict=True):
            if isinstance(lease, DirectoryUnavailable):
                found[worker] = WorkerSize(None, None, None, None, str(lease))
            else:
                found[worker] = _parse_size(lease, [next(answers) for _ in self._size_of(worker)])
        return found

    async def holding(self, worker: WorkerId) -> Holding:
        meta, blocks, events, staged = self._keys(worker, "meta", *_DATA_KINDS)
        commands = [
            Command(meta, ("HMGET", meta, *RECORD_FIELDS)),
            Command(blocks, ("SMEMBERS", blocks)),
            Command(events, ("XLEN", events)),
            Command(staged, ("SCARD", staged)),
            Command(meta, ("PTTL", meta)),
        ]
        answers = await self._connection.ask_each("holding", self._deadline_s, commands)
        for answer in answers:
            if isinstance(answer, DirectoryUnavailable):
                raise answer
        *kept, lease_ms = answers
        row, members, _, num_staged = kept
        kinds = ("meta", *_DATA_KINDS)
        spoilt = [kind for kind, answer in zip(kinds, kept, strict=True) if isinstance(answer, Exception)]
        record = None
        if "meta" not in spoilt and lease_ms != _NO_KEY:
            try:
                record = parse_record(self._scheme, worker, row, lease_ms)
            except (ProtocolError, ValueError):
                spoilt.insert(0, "meta")
        found = frozenset() if "blocks" in spoilt else frozenset(members)
        keys = frozenset(BlockKey(member) for member in found if len(member) == KEY_SIZE_BYTES)
        return Holding(
            record,
            lease_ms / 1000 if lease_ms >= 0 else None,
            keys,
            num_foreign=len(found) - len(keys),
            num_staged=0 if "staged" in spoilt else num_staged,
            spoilt=tuple(spoilt),
        )

    async def leftovers(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        found: set[WorkerId] = set()
        for place in (await self._places("leftovers", workers)).values():
            cursor = 0
            while True:
                scan = functools.partial(self._scan, place, cursor)
                cursor, ids = await self._connection.call("leftovers", self._deadline_s, scan)
                found |= ids
                if cursor == 0:
                    break
        return sorted(found)

    async def reap(self, worker: WorkerId) -> int:
        async def work() -> int:
            return int(await self._connection.run("reap", self._keys(worker, "meta", *_DATA_KINDS)))

        return await self._connection.call("reap", self._deadline_s, work)

    async def discard(self, worker: WorkerId) -> int:
        keys = self._keys(worker, "meta", *_DATA_KINDS)

        async def work() -> int:
            return int(await self._connection.execute(keys[0], "UNLINK", *keys))

        return await self._connection.call("discard", self._deadline_s, work)

    async def close(self) -> None:
        await self._connection.close()

    async def _places(self, operation: str, workers: Iterable[WorkerId]) -> dict[str, str]:
        """Servers that matter, and a key on each."""
        await self._connection.discover(operation, self._deadline_s, ACL_RULES)
        keys = [self._workers_key, *(key for worker in workers for key in self._keys(worker, "meta"))]
        return {self._connection.name_of_server(key): key for key in keys}

    @property
    def _workers_key(self) -> str:
        return f"kvr:{{{self._namespace}}}:workers"

    async def _health_of(self, name: str, key: str) -> ServerHealth:
        try:
            return await self._connection.call("health", self._deadline_s, functools.partial(self._look, name, key))
        except DirectoryUnavailable as error:
            return ServerHealth(name, str(error))

    async def _look(self, name: str, key: str) -> ServerHealth:
        loop = asyncio.get_running_loop()
        pings_s = []
        for _ in range(_NUM_PINGS):
            asked_at_s = loop.time()
            # Every user of ours may ask this; many may not PING.
            await self._connection.execute(key, "EXISTS", key)
            pings_s.append(loop.time() - asked_at_s)
        (info,) = await self._connection.pipeline([Command(key, ("INFO",))])
        told: Mapping[str, Any] = info if isinstance(info, dict) else {}
        databases = [value for name, value in told.items() if re.fullmatch(r"db\d+", name) and isinstance(value, dict)]
        saves = [told[kind] for kind in ("rdb_last_bgsave_status", "aof_last_write_status") if kind in told]
        return ServerHealth(
            name,
            version=_name_and_version(told),
            role=told.get("role"),
            ping_p50_s=statistics.median(pings_s),
            used_memory_bytes=told.get("used_memory"),
            max_memory_bytes=told.get("maxmemory") or None,
            eviction_policy=told.get("maxmemory_policy"),
            num_evicted=told.get("evicted_keys"),
            num_keys=sum(database.get("keys", 0) for database in databases) if told else None,
            num_clients=told.get("connected_clients"),
            max_clients=told.get("maxclients"),
            has_append_only_file=bool(told["aof_enabled"]) if "aof_enabled" in told else None,
            is_save_failing=any(status != "ok" for status in saves) if saves else None,
        )

    def _size_of(self, worker: WorkerId) -> list[Command]:
        meta, *data = self._keys(worker, "meta", *_DATA_KINDS)
        blocks, events, _ = data
        return [
            Command(blocks, ("SCARD", blocks)),
            Command(events, ("XLEN", events)),
            *(Command(key, ("MEMORY", "USAGE", key)) for key in (meta, *data)),
        ]

    async def _scan(self, place: str, cursor: int) -> tuple[int, set[WorkerId]]:
        """Ids with something that never expires, in one piece of a server's keys."""
        pattern = f"kvr:{{{_escaped(self._namespace)}:*}}:*"
        answer = await self._connection.execute(place, "SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
        keys = [raw.decode(errors="replace") for raw in answer[1]]
        key_to_worker = {key: worker for key in keys if (worker := self._owner(key)) is not None}
        metas = {worker: self._keys(worker, "meta")[0] for worker in key_to_worker.values()}
        ttls_ms = await self._connection.pipeline([Command(key, ("PTTL", key)) for key in key_to_worker])
        leases_ms = await self._connection.pipeline([Command(meta, ("PTTL", meta)) for meta in metas.values()])
        dead = {worker for worker, lease_ms in zip(metas, leases_ms, strict=True) if lease_ms in (-1, -2)}
        left = zip(key_to_worker.values(), ttls_ms, strict=True)
        return int(answer[0]), {worker for worker, ttl_ms in left if ttl_ms == -1 and worker in dead}

    def _owner(self, key: str) -> WorkerId | None:
        found = re.fullmatch(rf"kvr:\{{{re.escape(self._namespace)}:([^:}}]+)\}}:(meta|{'|'.join(_DATA_KINDS)})", key)
        return WorkerId(unquote(found[1])) if found else None

    def _keys(self, worker: WorkerId, *kinds: str) -> list[str]:
        return worker_keys(self._namespace, worker, *kinds)


def _parse_size(lease_ms: Any, answers: Sequence[Any]) -> WorkerSize:
    num_entries, num_stream_entries, *sizes = answers
    is_told = not any(isinstance(size, Exception) for size in sizes)
    return WorkerSize(
        num_entries=num_entries if isinstance(num_entries, int) else None,
        num_bytes=sum(size or 0 for size in sizes) if is_told else None,
        num_stream_entries=num_stream_entries if isinstance(num_stream_entries, int) else None,
        lease_left_s=lease_ms / 1000 if isinstance(lease_ms, int) and lease_ms >= 0 else None,
    )


def _name_and_version(told: Mapping[str, Any]) -> str | None:
    if "valkey_version" in told:
        return f"Valkey {told['valkey_version']}"
    return f"Redis {told['redis_version']}" if "redis_version" in told else None


def _escaped(text: str) -> str:
    """A text as a pattern of the store that matches it alone."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)
