"""Reads a Redis-protocol store for a mirror. Holds counters and canaries' names, never entries.

    kvr:{<ns>:<worker>}:canary:<reader>   string   written with each look; lives as long as its reader does

A canary lies in the slot of the lease that it watches over, so that whatever part of the store is lost, frozen or
rolled back is so for both. The layout of what is read is that of `shared.directory.redis`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any

from shared.directory.base import MAX_KEYS_PER_CALL, MAX_WORKERS
from shared.directory.connection import Command, StoreConnection, as_text, is_malformed
from shared.directory.feed import MAX_KEYS_PER_PIECE, Entry, EntryId, Lease, Position, Standing
from shared.directory.refusals import Refusals
from shared.errors import DirectoryUnavailable
from shared.hashing import KEY_SIZE_BYTES
from shared.types import BlockKey, Epoch, EventBatch, Holder, Instance, WorkerId

_MAX_ENTRIES_PER_READ = 64
"""Over all streams, as far as each gets one: an entry may have 64 KiB."""
_MAX_ENTRIES_PER_STREAM = 16
_KEYS_PER_TURN = 2048
"""Keys taken out of a reply after which the loop's other tasks have a turn: under a millisecond."""
_GPU_HOLDER = b"0:gpu:0"
_START = EntryId("0-0")
_MAX_WORKER_ID_BYTES = 1024


class RedisFeed:
    """`Feed` over the connections and keys of a `RedisDirectory`.

    Reads wait at the server. A cluster refuses commands that name keys of several slots: there each worker is a place
    of its own and keeps one connection waiting. What it refuses is counted with what the directory refuses.
    """

    def __init__(
        self,
        connection: StoreConnection,
        keys: Callable[..., list[str]],
        *,
        workers_key: str,
        refusals: Refusals,
        reader: str,
        deadline_s: float,
        prompt_s: float,
        canary_s: float,
    ) -> None:
        """A store that answers a look within `prompt_s` is well."""
        self._connection = connection
        self._keys = keys
        self._workers_key = workers_key
        self._refusals = refusals
        self._canary_kind = f"canary:{reader}"
        self._deadline_s = deadline_s
        self._prompt_s = prompt_s
        self._canary_ms = math.ceil(canary_s * 1000)
        self._watched: set[WorkerId] = set()
        """Workers beside whose lease this reader has a canary, unless the store has lost it."""

    async def look(self, workers: Iterable[WorkerId]) -> dict[WorkerId, Standing]:
        asked = sorted(workers)
        listed, *answers = await self._watch([list_command(self._workers_key), *map(self._look_command, asked)])
        newcomers = self._newcomers(listed, asked)
        if newcomers:
            answers += await self._watch([self._look_command(worker) for worker in newcomers])
        elif all(isinstance(answer, DirectoryUnavailable) for answer in (listed, *answers)):
            raise listed
        found: dict[WorkerId, Standing] = {}
        for worker, answer in zip([*asked, *newcomers], answers, strict=True):
            if not isinstance(answer, DirectoryUnavailable):
                found[worker] = self._parse_standing(worker, answer)
        self._watched = {worker for worker in (*asked, *newcomers) if worker in found or worker in self._watched}
        return found

    def place(self, worker: WorkerId) -> str:
        return worker if self._connection.is_cluster else ""

    async def position(self, worker: WorkerId) -> Position | None:
        keys = self._keys(worker, "meta", "events")

        async def work() -> Any:
            return await self._tolerant(" or ".join(keys), self._connection.script_command("position", keys))

        answer = await self._connection.call("position", self._deadline_s, work)
        lease = self._parse_lease(keys[0], *answer[:2]) if answer is not None else None
        return Position(lease, EntryId(answer[2].decode()) if answer[2] else _START) if lease is not None else None

    async def scan(self, worker: WorkerId) -> AsyncGenerator[Sequence[BlockKey], None]:
        (blocks,) = self._keys(worker, "blocks")
        cursor = 0

        async def work() -> Any:
            return await self._tolerant(blocks, Command(blocks, ("SSCAN", blocks, cursor, "COUNT", MAX_KEYS_PER_PIECE)))

        while True:
            cursor, members = await self._connection.call("scan", self._deadline_s, work) or (0, [])
            yield parse_members(blocks, members, self._refusals)
            if cursor == 0:
                return

    async def read(
        self, worker_to_entry: Mapping[WorkerId, EntryId], wait_s: float
    ) -> Mapping[WorkerId, Sequence[Entry]]:
        stream_to_worker = {self._keys(worker, "events")[0]: worker for worker in worker_to_entry}
        count = max(1, min(_MAX_ENTRIES_PER_STREAM, _MAX_ENTRIES_PER_READ // len(stream_to_worker)))
        wait_ms = math.ceil(min(wait_s, self._deadline_s / 2) * 1000)
        waiting = ("BLOCK", wait_ms) if wait_ms else ()  # 0 would wait for ever
        command = ("XREAD", "COUNT", count, *waiting, "STREAMS", *stream_to_worker, *worker_to_entry.values())

        async def work() -> Mapping[WorkerId, Sequence[Entry]]:
            reading = Command(next(iter(stream_to_worker)), command, is_waiting=wait_ms > 0)
            (found,) = await self._connection.pipeline([reading])
            if is_malformed(found):
                return await self._find_unreadable(stream_to_worker, worker_to_entry)
            if isinstance(found, Exception):
                raise found
            news: dict[WorkerId, list[Entry]] = {}
            num_keys = 0
            for name, rows in found:
                worker = stream_to_worker[name.decode()]
                for raw_entry, fields in rows:
                    entry = self._parse_entry(worker, name.decode(), raw_entry, fields)
                    news.setdefault(worker, []).append(entry)
                    num_keys += len(entry.batch.stored) + len(entry.batch.removed) if entry.batch is not None else 0
                    if num_keys >= _KEYS_PER_TURN:
                        num_keys = 0
                        await asyncio.sleep(0)
            return news

        return await self._connection.call("read", self._deadline_s, work)

    async def close(self) -> None:
        canaries = [self._keys(worker, self._canary_kind)[0] for worker in self._watched]
        # Those that are not reached run out by themselves.
        await self._connection.ask_each("close", self._deadline_s, [Command(key, ("UNLINK", key)) for key in canaries])

    # Asking.

    def _look_command(self, worker: WorkerId) -> Command:
        keys = self._keys(worker, "meta", self._canary_kind)
        return self._connection.script_command("look", keys, self._canary_ms)

    async def _watch(self, commands: Sequence[Command]) -> list[Any]:
        return await self._connection.watch_each("look", self._deadline_s, commands, prompt_s=self._prompt_s)

    async def _tolerant(self, keys: str, command: Command) -> Any:
        """The answer to a command on these keys; `None` where it met a value that is none of ours, which is counted."""
        (answer,) = await self._connection.pipeline([command])
        if is_malformed(answer):
            self._refusals.note(keys, answer)
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _find_unreadable(
        self, stream_to_worker: Mapping[str, WorkerId], worker_to_entry: Mapping[WorkerId, EntryId]
    ) -> Mapping[WorkerId, Sequence[Entry]]:
        """One stream of a wrong type fails the reading of all: tell which it is."""
        types = await self._connection.pipeline([Command(stream, ("TYPE", stream)) for stream in stream_to_worker])
        for found in types:
            if isinstance(found, Exception):
                raise found
        news = {}
        for (stream, worker), found in zip(stream_to_worker.items(), types, strict=True):
            if found not in (b"stream", b"none"):
                self._refusals.note(stream, f"a {as_text(found)} and no stream")
                news[worker] = [Entry(worker_to_entry[worker], None)]
        return news

    # Values of the store, which may be anybody's.

    def _newcomers(self, listed: Any, asked: Sequence[WorkerId]) -> list[WorkerId]:
        """The workers listed beside those that are known, as many as there is room for; none without a list."""
        if isinstance(listed, DirectoryUnavailable):
            return []
        found = sorted(parse_list(self._workers_key, listed, self._refusals) - set(asked))
        return found[: max(0, MAX_WORKERS - len(asked))]

    def _parse_standing(self, worker: WorkerId, answer: Any) -> Standing:
        (meta,) = self._keys(worker, "meta")
        if isinstance(answer, Exception):
            self._refusals.note(meta, answer)
            return Standing(None, is_canary_kept=True)
        row, ttl_ms, is_kept = answer
        return Standing(self._parse_lease(meta, row, ttl_ms), bool(is_kept) or worker not in self._watched)

    def _parse_lease(self, meta: str, row: Any, ttl_ms: int) -> Lease | None:
        if row[0] is None or ttl_ms == -2:
            return None
        instance, epoch, seq = as_text(row[0]), as_text(row[1]), _number(row[2])
        if instance is None or epoch is None or seq is None:
            self._refusals.note(meta, "an instance, epoch or sequence number that is none")
            return None
        if ttl_ms < 0:
            self._refusals.note(meta, "a lease without an end")
            return None
        return Lease(Instance(instance), Epoch(epoch), seq, ttl_ms / 1000)

    def _parse_entry(
        self, worker: WorkerId, stream: str, raw_entry: bytes, fields: Mapping[bytes, bytes] | None
    ) -> Entry:
        entry = EntryId(raw_entry.decode())
        fields = fields or {}
        epoch, seq = as_text(fields.get(b"epoch")), _number(fields.get(b"seq"))
        stored, removed = _split(fields.get(b"stored")), _split(fields.get(b"removed"))
        is_known_holder = fields.get(b"holder") in (_GPU_HOLDER, b"")
        if epoch is None or seq is None or stored is None or removed is None or not is_known_holder:
            self._refusals.note(stream, f"entry {entry} is no batch of blocks on a GPU")
            return Entry(entry, None)
        return Entry(entry, EventBatch(Holder(worker, Epoch(epoch)), seq, stored, removed))


def list_command(workers_key: str) -> Command:
    """What reads the list of workers, or a random part of one that is too long.

    Whoever reaps takes those without a lease off, so that a list that was filled up with nonsense comes down again.
    """
    return Command(workers_key, ("SRANDMEMBER", workers_key, MAX_WORKERS + 1))


def parse_list(workers_key: str, answer: Any, refusals: Refusals) -> set[WorkerId]:
    """The ids in what the list of workers was read as."""
    if isinstance(answer, Exception):
        refusals.note(workers_key, answer)
        return set()
    names = [as_text(raw) if len(raw) <= _MAX_WORKER_ID_BYTES else None for raw in answer[:MAX_WORKERS]]
    found = {WorkerId(name) for name in names if name is not None}
    if len(found) < len(names):
        refusals.note(workers_key, "members that are no ids", num_values=len(names) - len(found))
    if len(answer) > MAX_WORKERS:
        refusals.note(workers_key, f"over {MAX_WORKERS} ids, of which only a part is looked at")
    return found


def parse_members(blocks: str, members: Iterable[bytes], refusals: Refusals) -> list[BlockKey]:
    """The block keys among a set's members."""
    all_members = list(members)
    found = [BlockKey(member) for member in all_members if len(member) == KEY_SIZE_BYTES]
    if len(found) < len(all_members):
        refusals.note(blocks, "members that are no block keys", num_values=len(all_members) - len(found))
    return found


def _split(blob: bytes | None) -> tuple[BlockKey, ...] | None:
    """The keys in `blob`; `None` if it is none, does not hold whole keys, or holds more than a batch may."""
    if blob is None or len(blob) % KEY_SIZE_BYTES or len(blob) > MAX_KEYS_PER_CALL * KEY_SIZE_BYTES:
        return None
    return tuple([BlockKey(blob[at : at + KEY_SIZE_BYTES]) for at in range(0, len(blob), KEY_SIZE_BYTES)])


def _number(raw: Any) -> int | None:
    """A value of the store as a number that is not negative; `None` if it is none, or of absurd length."""
    return int(raw) if isinstance(raw, bytes) and raw.isdigit() and len(raw) < 20 else None
