"""Reads a Redis-protocol store for a mirror. Holds counters and the canary's name, never entries.

    kvr:{<ns>}:canary:<name>   string   lives as long as its reader does

The layout of what is read is that of `shared.directory.redis`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.directory.base import MAX_KEYS_PER_CALL
from shared.directory.feed import MAX_KEYS_PER_PIECE, Entry, EntryId, Lease, Position
from shared.errors import DirectoryUnavailable
from shared.hashing import KEY_SIZE_BYTES
from shared.types import BlockKey, Epoch, EventBatch, Holder, Instance, WorkerId

_LEASE_FIELDS = ("instance", "epoch", "seq")
_MAX_ENTRIES_PER_READ = 64
"""Over all streams, as far as each gets one: an entry may have 64 KiB."""
_KEYS_PER_TURN = 2048
"""Keys taken out of a reply after which the loop's other tasks have a turn: under a millisecond."""
_GPU_HOLDER = b"0:gpu:0"
_START = EntryId("0-0")

Answer = TypeVar("Answer")


class Call(Protocol):
    """Does `work` within a deadline; an error of the store becomes `DirectoryUnavailable`."""

    async def __call__(self, operation: str, deadline_s: float, work: Callable[[], Awaitable[Answer]]) -> Answer: ...


class RedisFeed:
    """`Feed` over the connections and keys of a `RedisDirectory`.

    A read that waits keeps one connection of the pool to itself. `num_malformed` counts refused values and only grows.
    """

    def __init__(
        self,
        client: Redis,
        call: Call,
        keys: Callable[..., list[str]],
        *,
        namespace: str,
        reader: str,
        deadline_s: float,
        canary_s: float,
    ) -> None:
        self._client = client
        self._call = call
        self._keys = keys
        self._deadline_s = deadline_s
        self._workers_key = f"kvr:{{{namespace}}}:workers"
        self._canary_key = f"kvr:{{{namespace}}}:canary:{reader}"
        self._canary_ms = math.ceil(canary_s * 1000)
        self._has_beaten = False
        self.num_malformed = 0

    async def beat(self) -> bool:
        async def work() -> bool:
            if await self._client.set(self._canary_key, 1, px=self._canary_ms, xx=True):
                return True
            await self._client.set(self._canary_key, 1, px=self._canary_ms)
            return False

        is_kept = await self._call("beat", self._deadline_s, work)
        is_first, self._has_beaten = not self._has_beaten, True
        return is_kept or is_first

    async def leases(self, workers: Iterable[WorkerId]) -> dict[WorkerId, Lease]:
        async def work() -> dict[WorkerId, Lease]:
            listed = {_text(raw) for raw in await self._client.smembers(self._workers_key)}
            asked = sorted({*workers, *(WorkerId(name) for name in listed if name is not None)})
            async with self._client.pipeline(transaction=False) as pipeline:
                for worker in asked:
                    (meta,) = self._keys(worker, "meta")
                    pipeline.hmget(meta, *_LEASE_FIELDS)
                    pipeline.pttl(meta)
                replies = await pipeline.execute(raise_on_error=False)
            found = {}
            for worker, row, ttl_ms in zip(asked, replies[::2], replies[1::2], strict=True):
                lease = self._parse_lease(row, ttl_ms)
                if lease is not None:
                    found[worker] = lease
            return found

        return await self._call("leases", self._deadline_s, work)

    async def position(self, worker: WorkerId) -> Position | None:
        meta, events = self._keys(worker, "meta", "events")

        async def work() -> Position | None:
            # All at one moment: a batch is either in the set that is scanned after this, or in the stream from here on.
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.hmget(meta, *_LEASE_FIELDS)
                pipeline.pttl(meta)
                pipeline.xrevrange(events, count=1)
                row, ttl_ms, last = await pipeline.execute(raise_on_error=False)
            lease = self._parse_lease(row, ttl_ms)
            if lease is None:
                return None
            if isinstance(last, Exception):
                self._refuse(last)
                return None
            return Position(lease, EntryId(last[0][0].decode()) if last else _START)

        return await self._call("position", self._deadline_s, work)

    async def scan(self, worker: WorkerId) -> AsyncGenerator[Sequence[BlockKey], None]:
        (blocks,) = self._keys(worker, "blocks")
        cursor = 0

        async def work() -> tuple[int, list[bytes]]:
            try:
                found: Any = await self._client.sscan(blocks, cursor, count=MAX_KEYS_PER_PIECE)
            except ResponseError as error:
                self._refuse(error)
                return 0, []
            return int(found[0]), found[1]

        while True:
            cursor, members = await self._call("scan", self._deadline_s, work)
            keys = [BlockKey(member) for member in members if len(member) == KEY_SIZE_BYTES]
            self.num_malformed += len(members) - len(keys)
            yield keys
            if cursor == 0:
                return

    async def read(
        self, worker_to_entry: Mapping[WorkerId, EntryId], wait_s: float
    ) -> Mapping[WorkerId, Sequence[Entry]]:
        stream_to_worker = {self._keys(worker, "events")[0]: worker for worker in worker_to_entry}
        stream_to_entry: dict[Any, Any] = dict(zip(stream_to_worker, worker_to_entry.values(), strict=True))
        count = max(1, _MAX_ENTRIES_PER_READ // len(stream_to_entry))
        # 0 would wait for ever.
        wait_ms = math.ceil(min(wait_s, self._deadline_s / 2) * 1000) or None

        async def work() -> Mapping[WorkerId, Sequence[Entry]]:
            try:
                found: Any = await self._client.xread(stream_to_entry, count=count, block=wait_ms)
            except ResponseError as error:
                return await self._find_unreadable(error, stream_to_worker, worker_to_entry)
            news: dict[WorkerId, list[Entry]] = {}
            num_keys = 0
            for name, rows in found or ():
                worker = stream_to_worker[name.decode()]
                for raw_entry, fields in rows:
                    entry = self._parse_entry(worker, raw_entry, fields)
                    news.setdefault(worker, []).append(entry)
                    num_keys += len(entry.batch.stored) + len(entry.batch.removed) if entry.batch is not None else 0
                    if num_keys >= _KEYS_PER_TURN:
                        num_keys = 0
                        await asyncio.sleep(0)
            return news

        return await self._call("read", self._deadline_s, work)

    async def close(self) -> None:
        async def work() -> None:
            await self._client.delete(self._canary_key)

        try:
            await self._call("close", self._deadline_s, work)
        except DirectoryUnavailable:
            return  # it runs out by itself

    async def _find_unreadable(
        self,
        error: ResponseError,
        stream_to_worker: Mapping[str, WorkerId],
        worker_to_entry: Mapping[WorkerId, EntryId],
    ) -> Mapping[WorkerId, Sequence[Entry]]:
        """One stream of a wrong type fails the reading of all: tell which it is."""
        self._refuse(error)
        async with self._client.pipeline(transaction=False) as pipeline:
            for stream in stream_to_worker:
                pipeline.type(stream)
            types = await pipeline.execute()
        return {
            worker: [Entry(worker_to_entry[worker], None)]
            for worker, found in zip(stream_to_worker.values(), types, strict=True)
            if found not in (b"stream", b"none")
        }

    def _refuse(self, error: Exception) -> None:
        """Count a value of a wrong type; any other error is the caller's."""
        if not isinstance(error, ResponseError) or "WRONGTYPE" not in str(error):
            raise error
        self.num_malformed += 1

    def _parse_lease(self, row: Any, ttl_ms: Any) -> Lease | None:
        if isinstance(row, Exception):
            self._refuse(row)
            return None
        if isinstance(ttl_ms, Exception):
            raise ttl_ms
        if row[0] is None or ttl_ms == -2:
            return None
        instance, epoch, seq = _text(row[0]), _text(row[1]), _number(row[2])
        if instance is None or epoch is None or seq is None:
            self.num_malformed += 1
            return None
        return Lease(Instance(instance), Epoch(epoch), seq, ttl_ms / 1000 if ttl_ms >= 0 else math.inf)

    def _parse_entry(self, worker: WorkerId, raw_entry: bytes, fields: Mapping[bytes, bytes] | None) -> Entry:
        entry = EntryId(raw_entry.decode())
        fields = fields or {}
        epoch, seq = _text(fields.get(b"epoch")), _number(fields.get(b"seq"))
        stored, removed = _split(fields.get(b"stored")), _split(fields.get(b"removed"))
        is_known_holder = fields.get(b"holder") in (_GPU_HOLDER, b"")
        if epoch is None or seq is None or stored is None or removed is None or not is_known_holder:
            self.num_malformed += 1
            return Entry(entry, None)
        return Entry(entry, EventBatch(Holder(worker, Epoch(epoch)), seq, stored, removed))


def _split(blob: bytes | None) -> tuple[BlockKey, ...] | None:
    """The keys in `blob`; `None` if it is none, does not hold whole keys, or holds more than a batch may."""
    if blob is None or len(blob) % KEY_SIZE_BYTES or len(blob) > MAX_KEYS_PER_CALL * KEY_SIZE_BYTES:
        return None
    return tuple([BlockKey(blob[at : at + KEY_SIZE_BYTES]) for at in range(0, len(blob), KEY_SIZE_BYTES)])


def _number(raw: Any) -> int | None:
    """A value of the store as a number that is not negative; `None` if it is none, or of absurd length."""
    return int(raw) if isinstance(raw, bytes) and raw.isdigit() and len(raw) < 20 else None


def _text(raw: Any) -> str | None:
    """A value of the store as text; `None` if it is none."""
    try:
        return raw.decode() if isinstance(raw, bytes) else None
    except UnicodeDecodeError:
        return None
