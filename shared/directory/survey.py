"""Looks at a store from the side: how it does, how much it holds, what nobody owns. Never a part of routing.

The layout of what is looked at is that of `shared.directory.redis`.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

from shared.directory.base import check_num_keys
from shared.directory.connection import Command, StoreConnection
from shared.directory.redis import worker_keys
from shared.types import BlockKey, CacheScheme, Epoch, WorkerId

_SCRIPTS = ("audit", "reap")
_DATA_KINDS = ("blocks", "events", "staged")
"""What lives by a worker's lease, which is its `meta` and has an end."""
_NUM_PINGS = 5
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

    version: str | None
    ping_s: float
    """The fastest of a few round trips."""
    used_memory_bytes: int | None
    max_memory_bytes: int | None
    """`None` without a limit, too."""
    eviction_policy: str | None
    num_evicted: int | None
    """Keys that the server has thrown out for room since it started, whoever's."""
    role: str | None
    num_keys: int | None
    """All that the server holds, other users' too."""

    @property
    def may_evict(self) -> bool:
        """Whether the server throws out what is ours when it runs out of room."""
        return bool(self.max_memory_bytes) and self.eviction_policy not in (None, "noeviction")


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """What the store holds of one worker; what it does not tell to this user is `None`."""

    num_entries: int | None
    num_bytes: int | None
    num_stream_entries: int | None
    lease_left_s: float | None
    """`None` without a lease."""


class Survey(Protocol):
    """What auditors and doctors ask. Every method raises `DirectoryUnavailable` where the store does not answer."""

    async def audit(self, worker: WorkerId, epoch: Epoch, seq: int, keys: Sequence[BlockKey]) -> Audited | None:
        """Compare with a worker's set as it is after batch `seq`; `None` where that was not the last one.

        At most `MAX_KEYS_PER_CALL` keys.
        """
        ...

    async def health(self, workers: Iterable[WorkerId]) -> list[ServerHealth]:
        """The servers that hold anything of `workers`, or the first one."""
        ...

    async def sizes(self, workers: Iterable[WorkerId]) -> dict[WorkerId, WorkerSize]:
        """What the store holds of each worker."""
        ...

    async def leftovers(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        """Ids that hold something in the store for ever and have no lease, on the servers of `workers`."""
        ...

    async def reap(self, worker: WorkerId) -> int:
        """Drop what a worker without a lease has left; the number of keys dropped. Modifies."""
        ...

    async def close(self) -> None:
        """Release the connections."""
        ...


class StoreSurvey:
    """`Survey` over a Redis-protocol store, with connections of its own, made with the first call."""

    def __init__(self, url: str, scheme: CacheScheme, *, deadline_s: float = 2.0) -> None:
        self._namespace = scheme.namespace
        self._deadline_s = deadline_s
        self._connection = StoreConnection(url, longest_deadline_s=deadline_s, scripts=_SCRIPTS)

    async def audit(self, worker: WorkerId, epoch: Epoch, seq: int, keys: Sequence[BlockKey]) -> Audited | None:
        check_num_keys(len(keys))
        names = self._keys(worker, "meta", "blocks")

        async def work() -> Any:
            return await self._connection.run("audit", names, epoch, seq, b"".join(keys))

        found = await self._connection.call("audit", self._deadline_s, work)
        return None if found is None else Audited(int(found[0]), int(found[1]))

    async def health(self, workers: Iterable[WorkerId]) -> list[ServerHealth]:
        run_id_to_health: dict[Any, ServerHealth] = {}
        for place in self._places(workers):
            look = functools.partial(self._look, place)
            run_id, health = await self._connection.call("health", self._deadline_s, look)
            run_id_to_health.setdefault(run_id, health)
        return list(run_id_to_health.values())

    async def sizes(self, workers: Iterable[WorkerId]) -> dict[WorkerId, WorkerSize]:
        asked = list(workers)

        async def work() -> list[Any]:
            return await self._connection.pipeline([command for worker in asked for command in self._size_of(worker)])

        answers = await self._connection.call("sizes", self._deadline_s, work)
        width = len(answers) // max(1, len(asked))
        return {worker: _parse_size(answers[at * width : (at + 1) * width]) for at, worker in enumerate(asked)}

    async def leftovers(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        found: set[WorkerId] = set()
        for place in self._places(workers):
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

    async def close(self) -> None:
        await self._connection.close()

    def _places(self, workers: Iterable[WorkerId]) -> list[str]:
        """A key on each server that matters."""
        return [key for worker in workers for key in self._keys(worker, "meta")] or [self._workers_key]

    @property
    def _workers_key(self) -> str:
        return f"kvr:{{{self._namespace}}}:workers"

    async def _look(self, key: str) -> tuple[Any, ServerHealth]:
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
        return told.get("run_id", key), ServerHealth(
            version=_name_and_version(told),
            ping_s=min(pings_s),
            used_memory_bytes=told.get("used_memory"),
            max_memory_bytes=told.get("maxmemory") or None,
            eviction_policy=told.get("maxmemory_policy"),
            num_evicted=told.get("evicted_keys"),
            role=told.get("role"),
            num_keys=sum(database.get("keys", 0) for database in databases) if told else None,
        )

    def _size_of(self, worker: WorkerId) -> list[Command]:
        meta, *data = self._keys(worker, "meta", *_DATA_KINDS)
        blocks, events, _ = data
        return [
            Command(meta, ("PTTL", meta)),
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


def _parse_size(answers: Sequence[Any]) -> WorkerSize:
    lease_ms, num_entries, num_stream_entries, *sizes = answers
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
