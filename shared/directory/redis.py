"""The directory in Redis 7+ or Valkey: keys, scripts and what they answer. Holds counters, never entries.

    kvr:{<ns>:<worker>}:meta     hash    instance, epoch, seq, info, draining, staged (the epoch of
                                         the snapshot in the making)
    kvr:{<ns>:<worker>}:blocks   set     resident block keys, 16 bytes each
    kvr:{<ns>:<worker>}:staged   set     the snapshot in the making
    kvr:{<ns>:<worker>}:events   stream  batches applied of late: epoch, seq, holder (rank:tier:group), stored, removed;
                                         an entry of seq 0 tells that everything before it is void
    kvr:{<ns>}:workers           set     ids announced and not yet reaped
    kvr:{<ns>}:routers           zset    ids of live routers by the time at which they run out

All keys of a worker share one hash tag, hence one slot of a Redis Cluster, and one expiry: the lease. Each script is
given all its keys and stays within one slot. The list of workers lies in another slot, so that no script can change it
together with a lease; `_reap` and the announcement with each heartbeat keep it right.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from shared.directory.base import (
    MAX_KEYS_PER_CALL,
    MAX_ROUTERS,
    Match,
    Reply,
    RouterPlace,
    WorkerRecord,
    check_batch,
    check_num_keys,
    check_scheme,
)
from shared.directory.connection import Command, StoreConnection, as_text, is_malformed
from shared.directory.redis_feed import RedisFeed, list_command, parse_list, parse_members
from shared.directory.refusals import Refusals
from shared.errors import DirectoryUnavailable, ProtocolError
from shared.hashing import KEY_SIZE_BYTES
from shared.telemetry import Readings
from shared.types import BlockKey, CacheScheme, Epoch, EventBatch, Instance, RouterId, WorkerId, WorkerInfo
from shared.wire import decode_record, encode_record

_SCRIPTS = (
    *("register", "forget", "announce", "announce_router", "keys+match", "look", "position", "probe"),
    *("lease+heartbeat", "lease+keys+apply", "lease+keys+stage", "lease+commit", "lease+set_draining"),
)
RECORD_FIELDS = ("instance", "epoch", "seq", "draining", "info")
_MATCH_BYTES_PER_ROUND = MAX_KEYS_PER_CALL * KEY_SIZE_BYTES


ACL_RULES = (
    "resetkeys ~kvr:* resetchannels -@all +info +cluster|slots +asking +evalsha +script|load +time +type +exists "
    "+unlink +rename +pexpire +pexpireat +pexpiretime +pttl +get +set +hset +hget +hmget +hgetall +hdel +hexists +hlen "
    "+sadd +srem +scard +smembers +smismember +srandmember +sscan +zadd +zrem +zscore +zrangebyscore "
    "+zremrangebyrank +xadd +xtrim +xread +xrevrange +xlen +scan +memory|usage"
)
"""All that a user of the store needs, as `ACL SETUSER` takes it: for the directory and for the pin board."""


class RedisDirectory:
    """`Directory` over a Redis-protocol server, or over the primaries of a Redis Cluster.

    Every call has a deadline and raises `DirectoryUnavailable` past it. After misses in a row of one server, `match`,
    which requests wait for, passes it over for `rest_s`; a store that is too slow for it may still serve publishers and
    the list of workers, so that they always ask. Of a cluster, `match` and `workers` tell what the servers that answer
    know. Counters only grow: `num_misses` counts calls without an answer, `num_spared` matches that failed at once,
    `num_malformed` values in the store that were refused here and by the directory's feeds.
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
        self._publish_deadline_s = publish_deadline_s
        self._max_stream_entries = max_stream_entries
        self._refusals = Refusals()
        self._connection = StoreConnection(url, longest_deadline_s=publish_deadline_s, rest_s=rest_s, scripts=_SCRIPTS)
        self._workers_key = f"kvr:{{{scheme.namespace}}}:workers"
        self._routers_key = f"kvr:{{{scheme.namespace}}}:routers"

    @property
    def is_resting(self) -> bool:
        """Whether the store missed so often that `match` fails at once; told in the log when it begins and ends."""
        return self._connection.is_resting

    @property
    def num_malformed(self) -> int:
        return self._refusals.num_malformed

    @property
    def num_misses(self) -> int:
        return self._connection.num_misses

    @property
    def num_spared(self) -> int:
        return self._connection.num_spared

    @property
    def num_breaker_openings(self) -> int:
        return self._connection.num_breaker_openings

    def feed(self, reader: str, *, deadline_s: float = 1.0, canary_s: float = 60.0) -> RedisFeed:
        """What a mirror reads, over this directory's connections. `reader` names its canaries in the store."""
        return RedisFeed(
            self._connection,
            self._keys,
            workers_key=self._workers_key,
            refusals=self._refusals,
            reader=reader,
            deadline_s=min(deadline_s, self._publish_deadline_s),
            prompt_s=self._match_deadline_s,
            canary_s=canary_s,
        )

    async def connect(self) -> None:
        """Connect and find out whether the store will do.

        Raises `ConfigError` for one that is too old or refuses the user, `DirectoryUnavailable` for one that does not
        answer, or takes no writes now.
        """

        def probe(tag: str) -> Command:
            return self._connection.script_command("probe", [f"kvr:{{{tag}}}:probe:{number}" for number in range(6)])

        await self._connection.connect(probe, ACL_RULES)

    async def register(self, info: WorkerInfo, epoch: Epoch, lease_s: float) -> Reply:
        check_scheme(info, self._scheme)
        lease_ms = _milliseconds(lease_s)
        keys = self._keys(info.worker, "meta", "blocks", "events", "staged")
        arguments = (info.instance, epoch, encode_record(info), lease_ms, self._max_stream_entries)
        reply = await self._publish("register", keys, *arguments)
        if reply is Reply.OK:
            await self._announce(info.worker, lease_ms)
        return reply

    async def heartbeat(self, worker: WorkerId, epoch: Epoch, seq: int, lease_s: float) -> Reply:
        lease_ms = _milliseconds(lease_s)
        keys = self._keys(worker, "meta", "blocks", "events", "staged")
        reply = await self._publish("lease+heartbeat", keys, epoch, seq, lease_ms)
        if reply in (Reply.OK, Reply.GAP):
            await self._announce(worker, lease_ms)
        return reply

    async def apply(self, batch: EventBatch) -> Reply:
        check_batch(batch)
        holder = batch.holder
        return await self._publish(
            "lease+keys+apply",
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
        return await self._publish(
            "lease+keys+stage", self._keys(worker, "meta", "staged"), epoch, snapshot, b"".join(keys)
        )

    async def commit(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, num_keys: int) -> Reply:
        store_keys = self._keys(worker, "meta", "blocks", "events", "staged")
        return await self._publish("lease+commit", store_keys, epoch, snapshot, num_keys, self._max_stream_entries)

    async def set_draining(self, worker: WorkerId, epoch: Epoch, is_draining: bool) -> Reply:
        return await self._publish("lease+set_draining", self._keys(worker, "meta"), epoch, int(is_draining))

    async def forget(self, worker: WorkerId, instance: Instance) -> Reply:
        keys = self._keys(worker, "meta", "blocks", "events", "staged")
        reply = await self._publish("forget", keys, instance)
        await self._reap([worker])
        return reply

    async def announce_router(self, router: RouterId, lease_s: float) -> RouterPlace:
        async def work() -> Any:
            arguments = (router, _milliseconds(lease_s), MAX_ROUTERS)
            return await self._connection.run("announce_router", [self._routers_key], *arguments)

        rank, num_routers = await self._connection.call("announce_router", self._publish_deadline_s, work)
        return RouterPlace(int(rank), int(num_routers))

    async def match(self, keys: Sequence[BlockKey], workers: Iterable[WorkerId]) -> Mapping[WorkerId, Match]:
        """One round trip to each server; one more for each 4,096 keys that some worker holds all of, if time is left.

        What a worker is known to hold stands, whether more of it can be told in time or not.
        """
        asked = list(workers)
        if not keys or not asked:
            return {}
        chain = b"".join(keys)
        clock = asyncio.get_running_loop().time
        left_s = self._match_deadline_s
        found: dict[WorkerId, Match] = {}
        for start in range(0, len(chain), _MATCH_BYTES_PER_ROUND):
            part = chain[start : start + _MATCH_BYTES_PER_ROUND]
            num_before = start // KEY_SIZE_BYTES
            asked_at_s = clock()
            try:
                answers = await self._match_round(part, asked, left_s)
            except DirectoryUnavailable:
                if not found:
                    raise
                break
            took_s = clock() - asked_at_s
            left_s -= took_s
            asked = []
            for worker, answer in answers.items():
                if answer.num_blocks:
                    found[worker] = Match(answer.instance, num_before + answer.num_blocks)
                if answer.num_blocks * KEY_SIZE_BYTES == len(part):
                    asked.append(worker)
            # A round that is asked for in less time than the last one took is a miss of ours and not of the store.
            if not asked or left_s < took_s:
                break
        return found

    async def workers(self) -> list[WorkerRecord]:
        async def read_list() -> Any:
            (answer,) = await self._connection.pipeline([list_command(self._workers_key)])
            if isinstance(answer, Exception):
                # A list that is none of ours is no sign that all workers are gone.
                if is_malformed(answer):
                    self._refusals.note(self._workers_key, answer)
                raise answer
            return answer

        names = await self._connection.call("workers", self._publish_deadline_s, read_list)
        ids = sorted(parse_list(self._workers_key, names, self._refusals))
        metas = [self._keys(worker, "meta")[0] for worker in ids]
        commands = [
            Command(meta, arguments)
            for meta in metas
            for arguments in (("HMGET", meta, *RECORD_FIELDS), ("PTTL", meta))
        ]
        answers = await self._ask_each("workers", self._publish_deadline_s, commands)
        records, gone = [], []
        for worker, meta, row, ttl_ms in zip(ids, metas, answers[::2], answers[1::2], strict=True):
            if row == [None] * len(RECORD_FIELDS):
                gone.append(worker)
            elif not isinstance(row, DirectoryUnavailable):
                try:
                    records.append(parse_record(self._scheme, worker, row, ttl_ms))
                except (ProtocolError, ValueError) as error:
                    self._refusals.note(meta, error)
        await self._reap(gone)
        return records

    async def resident(self, worker: WorkerId) -> set[BlockKey]:
        (blocks,) = self._keys(worker, "blocks")

        async def work() -> Any:
            return await self._connection.execute(blocks, "SMEMBERS", blocks)

        members = await self._connection.call("resident", self._publish_deadline_s, work)
        return set(parse_members(blocks, members, self._refusals))

    def expose(self, readings: Readings) -> None:
        readings.add_counter(
            "kvroute_store_malformed",
            "Values of the directory in the store that were refused as none of ours.",
            lambda: self.num_malformed,
        )
        readings.add_counter(
            "kvroute_store_misses", "Calls of the directory to the store without an answer.", lambda: self.num_misses
        )
        readings.add_counter(
            "kvroute_store_spared_matches",
            "Matches that were not asked of a server of the store since it had missed.",
            lambda: self.num_spared,
        )
        readings.add_counter(
            "kvroute_store_breaker_openings",
            "Times that a server of the store missed so often that matches passed it over.",
            lambda: self.num_breaker_openings,
        )

    async def close(self) -> None:
        await self._connection.close()

    async def _publish(self, script: str, keys: Sequence[str], *arguments: str | bytes | int) -> Reply:
        """A script's reply. Where it finds a value that is none of ours, nobody is known: registering replaces it."""

        async def work() -> Any:
            (answer,) = await self._connection.pipeline([self._connection.script_command(script, keys, *arguments)])
            if isinstance(answer, Exception) and not is_malformed(answer):
                raise answer
            return answer

        raw = await self._connection.call(script.rpartition("+")[2], self._publish_deadline_s, work)
        if isinstance(raw, Exception):
            self._refusals.note(" or ".join(keys), raw)
            return Reply.UNKNOWN
        return Reply(raw.decode())

    # Reading.

    async def _ask_each(
        self, operation: str, deadline_s: float, commands: list[Command], *, is_guarded: bool = False
    ) -> list[Any]:
        """As the connection's; raises `DirectoryUnavailable` where no server answers."""
        answers = await self._connection.ask_each(operation, deadline_s, commands, is_guarded=is_guarded)
        if answers and all(isinstance(answer, DirectoryUnavailable) for answer in answers):
            raise answers[0]
        return answers

    async def _match_round(self, part: bytes, asked: list[WorkerId], deadline_s: float) -> dict[WorkerId, Match]:
        """What is known of the workers; one whose server does not answer is absent."""
        commands = [
            self._connection.script_command("keys+match", self._keys(worker, "meta", "blocks"), part)
            for worker in asked
        ]
        found: dict[WorkerId, Match] = {}
        answers = await self._ask_each("match", deadline_s, commands, is_guarded=True)
        for worker, answer in zip(asked, answers, strict=True):
            if answer is None or isinstance(answer, DirectoryUnavailable):
                continue
            instance = None if isinstance(answer, Exception) else as_text(answer[0])
            if instance is None:
                reason = answer if isinstance(answer, Exception) else "an instance that is no text"
                self._refusals.note(" or ".join(self._keys(worker, "meta", "blocks")), reason)
                continue
            found[worker] = Match(Instance(instance), int(answer[1]))
        return found

    # The list of workers.

    async def _announce(self, worker: WorkerId, lease_ms: int) -> None:
        """Put a worker on the list. Where that fails, the next heartbeat does it: the lease stands all the same."""

        async def work() -> None:
            await self._connection.run("announce", [self._workers_key], worker, lease_ms)

        with contextlib.suppress(DirectoryUnavailable):
            await self._connection.call("announce", self._publish_deadline_s, work)

    async def _reap(self, workers: list[WorkerId]) -> None:
        """Take workers off the list unless they hold a lease.

        A worker registers first and announces itself after. Whoever reaps does it the other way round: takes the id
        off, looks at the lease after, and puts the id back if there is one. So of the two, the later one always lists a
        live worker, whatever the interleaving. Where that is cut short, a live worker's next heartbeat lists it, and
        the next reader of the list finds a dead one.
        """
        if not workers:
            return
        metas = [self._keys(worker, "meta")[0] for worker in workers]

        async def work() -> list[Any]:
            await self._connection.execute(self._workers_key, "SREM", self._workers_key, *workers)
            return await self._connection.pipeline([Command(meta, ("PTTL", meta)) for meta in metas])

        with contextlib.suppress(DirectoryUnavailable):
            leases_ms = await self._connection.call("reap", self._publish_deadline_s, work)
            for worker, lease_ms in zip(workers, leases_ms, strict=True):
                if not isinstance(lease_ms, Exception) and lease_ms > 0:
                    await self._announce(worker, lease_ms)

    def _keys(self, worker: WorkerId, *kinds: str) -> list[str]:
        return worker_keys(self._scheme.namespace, worker, *kinds)


def worker_keys(namespace: str, worker: WorkerId, *kinds: str) -> list[str]:
    """Names in the store of what is kept of one worker. They share a hash tag, so that they lie in one slot."""
    # The id is quoted: a brace in it would end the hash tag early, a colon make two ids look like one.
    tag = f"{namespace}:{quote(worker, safe='')}"
    return [f"kvr:{{{tag}}}:{kind}" for kind in kinds]


def parse_record(scheme: CacheScheme, worker: WorkerId, row: Any, lease_ms: Any) -> WorkerRecord:
    """A worker's record from its meta fields and its lease's time. Raises `ProtocolError` or `ValueError`."""
    if isinstance(row, Exception):
        raise ProtocolError(str(row))
    raw_instance, raw_epoch, seq, draining, raw_info = row
    if None in (raw_instance, raw_epoch, seq, raw_info):
        raise ProtocolError("a record that lacks fields")
    if lease_ms == -1:
        raise ProtocolError("a lease without an end")
    info = decode_record(WorkerInfo, raw_info)
    epoch = as_text(raw_epoch)
    if epoch is None or (info.worker, info.scheme, info.instance) != (worker, scheme, as_text(raw_instance)):
        raise ProtocolError("a record of another worker")
    return WorkerRecord(info, Epoch(epoch), int(seq), is_draining=draining == b"1")


def _milliseconds(duration_s: float) -> int:
    return max(1, math.ceil(duration_s * 1000))
