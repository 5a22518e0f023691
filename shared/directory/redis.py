"""The directory in Redis 7+ or Valkey: keys, scripts, answers. Holds connections and counters, never entries.

    kvr:{<ns>:<worker>}:meta     hash    instance, epoch, seq, info, draining, staged (the epoch of
                                         the snapshot in the making)
    kvr:{<ns>:<worker>}:blocks   set     resident block keys, 16 bytes each
    kvr:{<ns>:<worker>}:staged   set     the snapshot in the making
    kvr:{<ns>:<worker>}:events   stream  batches applied of late: epoch, seq, holder (rank:tier:group), stored, removed;
                                         an entry of seq 0 tells that everything before it is void
    kvr:{<ns>}:workers           set     ids announced and not yet reaped

All keys of a worker share one hash tag, hence one slot of a Redis Cluster, and one expiry: the lease. Each script is
given all its keys and stays within one slot. The list of workers lies in another slot, so that no script can change it
together with a lease; `_reap` and the announcement with each heartbeat keep it right.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from redis.exceptions import NoScriptError, ResponseError

from shared.directory.base import (
    MAX_KEYS_PER_CALL,
    Match,
    Reply,
    WorkerRecord,
    check_batch,
    check_num_keys,
    check_scheme,
)
from shared.directory.breaker import Breaker
from shared.directory.connection import StoreConnection
from shared.directory.redis_feed import RedisFeed
from shared.errors import DirectoryUnavailable, ProtocolError
from shared.hashing import KEY_SIZE_BYTES
from shared.messages import decode_record, encode_record
from shared.types import BlockKey, CacheScheme, Epoch, EventBatch, Instance, WorkerId, WorkerInfo

_SCRIPTS = ("register", "heartbeat", "announce", "apply", "stage", "commit", "set_draining", "forget", "match")
_RECORD_FIELDS = ("instance", "epoch", "seq", "draining", "info")
_MATCH_BYTES_PER_ROUND = MAX_KEYS_PER_CALL * KEY_SIZE_BYTES


class RedisDirectory:
    """`Directory` over a Redis-protocol server.

    Every call has a deadline and raises `DirectoryUnavailable` past it. After misses in a row `match`, which requests
    wait for, fails at once for `rest_s`; a store that is too slow for it may still serve publishers and the list of
    workers, so that they always ask. Counters only grow: `num_misses` counts calls without an answer, `num_spared`
    matches that failed at once, `num_malformed` values in the store that were refused.
    """

    def __init__(
        self,
        url: str,
        scheme: CacheScheme,
        *,
        match_deadline_s: float = 0.02,
        publish_deadline_s: float = 2.0,
        rest_s: float = 0.5,
        max_stream_entries: int = 1000,
    ) -> None:
        self._scheme = scheme
        self._match_deadline_s = match_deadline_s
        self._max_stream_entries = max_stream_entries
        self._breaker = Breaker(rest_s)
        self.num_spared = 0
        self.num_malformed = 0
        self._publish_deadline_s = publish_deadline_s
        self._connection = StoreConnection(url, longest_deadline_s=publish_deadline_s, scripts=_SCRIPTS)
        self._client = self._connection.client
        self._script_of = self._connection.scripts
        self._workers_key = f"kvr:{{{scheme.namespace}}}:workers"

    @property
    def is_resting(self) -> bool:
        """Whether the store missed so often that `match` fails at once; told in the log when it begins and ends."""
        return self._breaker.is_open

    @property
    def num_misses(self) -> int:
        return self._connection.num_misses

    @property
    def num_breaker_openings(self) -> int:
        return self._breaker.num_openings

    @property
    def breaker(self) -> Breaker:
        """For another reader of the same store: one outage is one alarm."""
        return self._breaker

    def feed(self, reader: str, *, deadline_s: float = 1.0, canary_s: float = 60.0) -> RedisFeed:
        """What a mirror reads, over this directory's connections. `reader` names its canary in the store."""
        return RedisFeed(
            self._client,
            self._connection.call,
            self._keys,
            namespace=self._scheme.namespace,
            reader=reader,
            deadline_s=min(deadline_s, self._publish_deadline_s),
            canary_s=canary_s,
        )

    async def connect(self) -> None:
        """Connect and check the server's version, as the first call does otherwise.

        Raises `ConfigError` if it is too old, `DirectoryUnavailable` if it does not answer.
        """
        await self._connection.connect()

    async def register(self, info: WorkerInfo, epoch: Epoch, lease_s: float) -> Reply:
        check_scheme(info, self._scheme)
        lease_ms = _milliseconds(lease_s)

        async def work() -> Reply:
            keys = self._keys(info.worker, "meta", "blocks", "events", "staged")
            arguments = (info.instance, epoch, encode_record(info), lease_ms, self._max_stream_entries)
            reply = await self._run("register", keys, *arguments)
            if reply is Reply.OK:
                await self._announce(info.worker, lease_ms)
            return reply

        return await self._connection.call("register", self._publish_deadline_s, work)

    async def heartbeat(self, worker: WorkerId, epoch: Epoch, seq: int, lease_s: float) -> Reply:
        lease_ms = _milliseconds(lease_s)

        async def work() -> Reply:
            keys = self._keys(worker, "meta", "blocks", "events", "staged")
            reply = await self._run("heartbeat", keys, epoch, seq, lease_ms)
            if reply in (Reply.OK, Reply.GAP):
                await self._announce(worker, lease_ms)
            return reply

        return await self._connection.call("heartbeat", self._publish_deadline_s, work)

    async def apply(self, batch: EventBatch) -> Reply:
        check_batch(batch)
        holder = batch.holder
        return await self._publish(
            "apply",
            self._keys(holder.worker, "meta", "blocks", "events"),
            holder.epoch,
            batch.seq,
            f"{holder.rank}:{holder.tier}:{holder.group}",
            b"".join(batch.stored),
            b"".join(batch.removed),
            self._max_stream_entries,
        )

    async def stage(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, keys: Sequence[BlockKey]) -> Reply:
        check_num_keys(len(keys))
        return await self._publish("stage", self._keys(worker, "meta", "staged"), epoch, snapshot, b"".join(keys))

    async def commit(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, num_keys: int) -> Reply:
        store_keys = self._keys(worker, "meta", "blocks", "events", "staged")
        return await self._publish("commit", store_keys, epoch, snapshot, num_keys, self._max_stream_entries)

    async def set_draining(self, worker: WorkerId, epoch: Epoch, is_draining: bool) -> Reply:
        return await self._publish("set_draining", self._keys(worker, "meta"), epoch, int(is_draining))

    async def forget(self, worker: WorkerId, instance: Instance) -> Reply:
        async def work() -> Reply:
            reply = await self._run("forget", self._keys(worker, "meta", "blocks", "events", "staged"), instance)
            await self._reap([worker])
            return reply

        return await self._connection.call("forget", self._publish_deadline_s, work)

    async def match(self, keys: Sequence[BlockKey], workers: Iterable[WorkerId]) -> Mapping[WorkerId, Match]:
        candidates = list(workers)
        if not keys or not candidates:
            return {}
        chain = b"".join(keys)
        breaker = self._breaker
        clock = asyncio.get_running_loop().time
        if not breaker.admit(clock()):
            self.num_spared += 1
            raise DirectoryUnavailable("match: the store has not answered lately")
        try:
            found = await self._connection.call("match", self._match_deadline_s, lambda: self._match(chain, candidates))
        except DirectoryUnavailable as error:
            breaker.miss(clock(), str(error))
            raise
        except BaseException:
            breaker.abandon()
            raise
        breaker.succeed(clock())
        return found

    async def workers(self) -> list[WorkerRecord]:
        return await self._connection.call("workers", self._publish_deadline_s, self._read_workers)

    async def resident(self, worker: WorkerId) -> set[BlockKey]:
        async def work() -> set[BlockKey]:
            members: Any = await self._client.smembers(*self._keys(worker, "blocks"))
            return set(members)

        return await self._connection.call("resident", self._publish_deadline_s, work)

    async def close(self) -> None:
        await self._connection.close()

    async def _publish(self, script: str, keys: Sequence[str], *arguments: str | bytes | int) -> Reply:
        return await self._connection.call(
            script, self._publish_deadline_s, lambda: self._run(script, keys, *arguments)
        )

    async def _run(self, script: str, keys: Sequence[str], *arguments: str | bytes | int) -> Reply:
        raw = await self._script_of[script](keys=keys, args=arguments)
        return Reply(raw.decode())

    # Reading.

    async def _match(self, chain: bytes, candidates: list[WorkerId]) -> dict[WorkerId, Match]:
        """One round trip; one more for each 4,096 keys that some worker holds all of."""
        found: dict[WorkerId, Match] = {}
        asked = candidates
        for start in range(0, len(chain), _MATCH_BYTES_PER_ROUND):
            part = chain[start : start + _MATCH_BYTES_PER_ROUND]
            num_before = start // KEY_SIZE_BYTES
            longest = []
            for worker, (instance, num_blocks) in (await self._match_round(part, asked)).items():
                if num_blocks:
                    found[worker] = Match(instance, num_before + num_blocks)
                if num_blocks * KEY_SIZE_BYTES == len(part):
                    longest.append(worker)
            asked = longest
            if not asked:
                break
        return found

    async def _match_round(self, part: bytes, asked: list[WorkerId]) -> dict[WorkerId, tuple[Instance, int]]:
        replies = await self._evaluate_match(part, asked)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            await self._client.script_load(self._script_of["match"].script)
            replies = await self._evaluate_match(part, asked)
        found = {}
        for worker, reply in zip(asked, replies, strict=True):
            if reply is None:
                continue
            if isinstance(reply, ResponseError):
                if "WRONGTYPE" not in str(reply):
                    raise reply
                self.num_malformed += 1
                continue
            instance = _text(reply[0])
            if instance is None:
                self.num_malformed += 1
                continue
            found[worker] = (Instance(instance), int(reply[1]))
        return found

    async def _evaluate_match(self, part: bytes, asked: list[WorkerId]) -> list[Any]:
        sha = self._script_of["match"].sha
        async with self._client.pipeline(transaction=False) as pipeline:
            for worker in asked:
                pipeline.execute_command("EVALSHA", sha, 2, *self._keys(worker, "meta", "blocks"), part)
            return await pipeline.execute(raise_on_error=False)

    async def _read_workers(self) -> list[WorkerRecord]:
        names = [_text(raw) for raw in await self._client.smembers(self._workers_key)]
        ids = sorted(WorkerId(name) for name in names if name is not None)
        self.num_malformed += len(names) - len(ids)
        async with self._client.pipeline(transaction=False) as pipeline:
            for worker in ids:
                pipeline.hmget(*self._keys(worker, "meta"), *_RECORD_FIELDS)
            rows = await pipeline.execute(raise_on_error=False)
        records = []
        for worker, row in zip(ids, rows, strict=True):
            if isinstance(row, ResponseError) and "WRONGTYPE" not in str(row):
                raise row
            if not isinstance(row, Exception) and not any(row):
                continue
            try:
                records.append(self._parse_record(worker, row))
            except (ProtocolError, TypeError, ValueError):
                self.num_malformed += 1
        await self._reap([worker for worker, row in zip(ids, rows, strict=True) if row == [None] * len(_RECORD_FIELDS)])
        return records

    def _parse_record(self, worker: WorkerId, row: Any) -> WorkerRecord:
        """A worker's record from its meta fields. Raises `ProtocolError`, `TypeError` or `ValueError`."""
        raw_instance, raw_epoch, seq, draining, raw_info = row
        info = decode_record(WorkerInfo, raw_info)
        epoch = _text(raw_epoch)
        if epoch is None or (info.worker, info.scheme, info.instance) != (worker, self._scheme, _text(raw_instance)):
            raise ProtocolError(f"the record of {worker} is about another worker")
        return WorkerRecord(info, Epoch(epoch), int(seq), is_draining=draining == b"1")

    # The list of workers.

    async def _announce(self, worker: WorkerId, lease_ms: int) -> None:
        await self._script_of["announce"](keys=[self._workers_key], args=[worker, lease_ms])

    async def _reap(self, workers: list[WorkerId]) -> None:
        """Take workers off the list unless they hold a lease.

        A worker registers first and announces itself after. Whoever reaps does it the other way round: takes the id
        off, looks at the lease after, and puts the id back if there is one. So of the two, the later one always lists a
        live worker, whatever the interleaving.
        """
        if not workers:
            return
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.srem(self._workers_key, *workers)
            for worker in workers:
                pipeline.pttl(*self._keys(worker, "meta"))
            _, *leases_ms = await pipeline.execute()
        for worker, lease_ms in zip(workers, leases_ms, strict=True):
            if lease_ms > 0:
                await self._announce(worker, lease_ms)

    def _keys(self, worker: WorkerId, *kinds: str) -> list[str]:
        # The id is quoted: a brace in it would end the hash tag early, a colon make two ids look like one.
        tag = f"{self._scheme.namespace}:{quote(worker, safe='')}"
        return [f"kvr:{{{tag}}}:{kind}" for kind in kinds]


def _milliseconds(duration_s: float) -> int:
    return max(1, math.ceil(duration_s * 1000))


def _text(raw: Any) -> str | None:
    """A value of the store as text; `None` if it is none."""
    try:
        return raw.decode() if isinstance(raw, bytes) else None
    except UnicodeDecodeError:
        return None
