"""The pin board in Redis 7+ or Valkey: keys and scripts. Holds connections and counters, never pins.

    kvr:{<ns>}:pins:board      string  the board's id
    kvr:{<ns>}:pins:index      hash    name -> revision:time of expiry; what workers read with every heartbeat
    kvr:{<ns>}:pins:specs      hash    name -> PinSpec, tokens and all
    kvr:{<ns>}:pins:kept       zset    name by the time until which a worker keeps it
    kvr:{<ns>}:pins:removed    zset    revision by the time at which it was given up, the last ones only
    kvr:{<ns>:<worker>}:pins   string  what the worker says of its pins; expires with its lease

All keys of the board share one hash tag, hence one slot of a Redis Cluster, and one expiry. A worker's report lies with
the worker's other keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from shared.directory.connection import Argument, Command, StoreConnection, is_malformed
from shared.directory.pin_board import (
    FOLLOWED_S,
    MAX_PINS,
    MAX_REMOVED,
    BoardId,
    PinSpec,
    Revision,
    Wanted,
    WantedPin,
    WorkerPins,
    check_name,
    check_revision,
    full_board,
)
from shared.directory.refusals import Refusals
from shared.errors import ConfigError, DirectoryUnavailable, ProtocolError
from shared.telemetry import Readings
from shared.types import CacheScheme, WorkerId
from shared.wire import decode_record, encode_record

_SCRIPTS = ("pins+pins_put", "pins+pins_put_back", "pins+pins_remove", "pins+pins_read")
_KINDS = ("board", "index", "specs", "kept", "removed")
_FOLLOWED_MS = round(FOLLOWED_S * 1000)


class RedisPinBoard:
    """`PinBoard` over a Redis-protocol server. `num_malformed` counts values in the store that were refused."""

    def __init__(self, url: str, scheme: CacheScheme, *, deadline_s: float = 2.0) -> None:
        self._namespace = scheme.namespace
        self._deadline_s = deadline_s
        self._connection = StoreConnection(url, longest_deadline_s=deadline_s, scripts=_SCRIPTS)
        self._keys = [f"kvr:{{{self._namespace}}}:pins:{kind}" for kind in _KINDS]
        self._board_key, self._index_key, self._specs_key, *_ = self._keys
        self._refusals = Refusals()

    @property
    def num_malformed(self) -> int:
        return self._refusals.num_malformed

    async def put(self, spec: PinSpec, ttl_s: float | None, *, replacing: Revision | None = None) -> bool:
        limits = (_FOLLOWED_MS, replacing or "", MAX_PINS, MAX_REMOVED)
        reply = await self._run("pins_put", spec.name, spec.revision, _ttl_ms(ttl_s), encode_record(spec), *limits)
        if reply == b"FULL":
            raise full_board(spec.name)
        return bool(reply == b"OK")

    async def put_back(self, spec: PinSpec, ttl_s: float | None, board: BoardId) -> bool:
        limits = (_FOLLOWED_MS, board, MAX_PINS)
        arguments = (spec.name, spec.revision, _ttl_ms(ttl_s), encode_record(spec), *limits)
        return bool(await self._run("pins_put_back", *arguments) == b"OK")

    async def remove(self, name: str, *, revision: Revision | None = None) -> bool:
        return bool(await self._run("pins_remove", name, revision or "", MAX_REMOVED) == b"OK")

    async def look(self) -> Wanted | None:
        return self._parse_wanted(await self._run("pins_read", "", 0))

    async def follow(self, fresh: BoardId, kept: Iterable[str] = ()) -> Wanted:
        return self._parse_wanted(await self._run("pins_read", fresh, _FOLLOWED_MS, *kept)) or Wanted(fresh, {})

    async def spec(self, name: str) -> PinSpec | None:
        raw = await self._execute("pin", self._specs_key, "HGET", self._specs_key, name)
        if raw is None:
            return None
        try:
            spec = decode_record(PinSpec, raw)
            if spec.name != name:
                raise ProtocolError(f"it is about {spec.name}")
        except ProtocolError as error:
            self._refusals.note(self._specs_key, f"pin {name!r}: {error}")
            return None
        return spec

    async def report(self, worker: WorkerId, pins: WorkerPins, lease_s: float) -> None:
        key, lease_ms = self._report_key(worker), max(1, math.ceil(lease_s * 1000))
        await self._execute("report", key, "SET", key, encode_record(pins), "PX", lease_ms)

    async def reports(self, workers: Iterable[WorkerId]) -> dict[WorkerId, WorkerPins]:
        worker_to_key = {worker: self._report_key(worker) for worker in workers}
        commands = [Command(key, ("GET", key)) for key in worker_to_key.values()]

        async def work() -> list[Any]:
            answers = await self._connection.pipeline(commands)
            for answer in answers:
                if isinstance(answer, Exception) and not is_malformed(answer):
                    raise answer
            return answers

        answers = await self._connection.call("reports", self._deadline_s, work)
        found = {}
        for worker, raw in zip(worker_to_key, answers, strict=True):
            if raw is None:
                continue
            try:
                if isinstance(raw, Exception):
                    raise ProtocolError(str(raw))
                found[worker] = decode_record(WorkerPins, raw)
            except ProtocolError as error:
                self._refusals.note(worker_to_key[worker], error)
        return found

    async def clear(self) -> None:
        await self._execute("clear", self._board_key, "UNLINK", *self._keys)

    def expose(self, readings: Readings) -> None:
        readings.add_counter(
            "kvroute_pin_board_malformed",
            "Values of the pin board in the store that were refused as none of ours.",
            lambda: self.num_malformed,
        )

    async def close(self) -> None:
        await self._connection.close()

    async def _run(self, script: str, *arguments: Argument) -> Any:
        command = self._connection.script_command(f"pins+{script}", self._keys, *arguments)
        return await self._ask(script, " or ".join(self._keys), command)

    async def _execute(self, operation: str, key: str, *arguments: Argument) -> Any:
        return await self._ask(operation, key, Command(key, arguments))

    async def _ask(self, operation: str, keys: str, command: Command) -> Any:
        async def work() -> Any:
            (answer,) = await self._connection.pipeline([command])
            if is_malformed(answer):
                self._refusals.note(keys, answer)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return await self._connection.call(operation, self._deadline_s, work)

    def _parse_wanted(self, reply: Any) -> Wanted | None:
        if not reply:
            return None
        raw_board, raw_now_ms, index = reply
        try:
            board = BoardId(check_revision(raw_board.decode()))
        except ValueError as error:
            # An empty answer would read as the wish to unpin everything.
            self._refusals.note(self._board_key, error)
            raise DirectoryUnavailable(f"the pin board in the store is not ours: {error}") from None
        pins = {}
        for raw_name, raw in sorted(zip(index[::2], index[1::2], strict=True))[:MAX_PINS]:
            try:
                name = check_name(raw_name.decode())
                revision, _, expires_at_ms = raw.decode().partition(":")
                expires_in_s = (int(expires_at_ms) - int(raw_now_ms)) / 1000 if expires_at_ms else None
                pins[name] = WantedPin(check_revision(revision), expires_in_s)
            except (ConfigError, ValueError) as error:
                self._refusals.note(self._index_key, f"pin {raw_name[:64]!r}: {error}")
        return Wanted(board, pins)

    def _report_key(self, worker: WorkerId) -> str:
        # Quoted as in the directory: a brace in an id would end the hash tag early.
        return f"kvr:{{{self._namespace}:{quote(worker, safe='')}}}:pins"


def _ttl_ms(ttl_s: float | None) -> str:
    return "" if ttl_s is None else str(max(1, math.ceil(ttl_s * 1000)))
