"""Inspections over every kind of channel: what comes through, what is refused, and on which side."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from pathlib import Path
from unittest.mock import Mock

import pytest

from shared.errors import EngineError, Overloaded, ProtocolError, WorkerLost
from shared.hashing import pack_tokens
from shared.messages import (
    MAX_KEYS_PER_PART,
    Frame,
    Inspect,
    Inspection,
    Refused,
    ResidentKeys,
    Submit,
    decode,
    encode,
)
from shared.transport.channel import local_pair
from shared.transport.handshake import greet_worker, receive_hello, send_welcome
from shared.transport.inspection import MAX_INSPECTED_KEYS, Inspected, inspect_worker
from shared.types import BlockKey, Instance, RequestId, RouterId, Sampling
from tests.support.stores import epoch, keys
from tests.support.transport import (
    INSTANCE,
    KINDS,
    SECRET,
    WORKER,
    Kind,
    Rig,
    collect,
    drain_channel,
    running,
    submit,
    tokens_of,
)

DOCTOR = RouterId("doctor")


def report(num_resident: int, number: int = 1) -> Inspection:
    return Inspection(number, num_resident, epoch(1), 2, 3, 4, 5, is_quiet=True)


class FixedInspector:
    """Tells what it is given; waits while `may_answer` is cleared."""

    def __init__(self, resident: Set[BlockKey] = frozenset(), error: Exception | None = None) -> None:
        self.resident = resident
        self.error = error
        self.asked: list[Inspect] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def inspect(self, asked: Inspect) -> tuple[Inspection, Set[BlockKey]]:
        self.asked.append(asked)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return report(len(self.resident), asked.number), self.resident


def give_inspector(rig: Rig, inspector: FixedInspector) -> None:
    rig.host._inspector = inspector


async def inspect(rig: Rig, *, instance: Instance = INSTANCE, is_repair: bool = False) -> Inspected:
    return await inspect_worker(rig.connect_function(), WORKER, instance, DOCTOR, SECRET, is_repair=is_repair)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_keys", [0, 1, MAX_KEYS_PER_PART, 10 * MAX_KEYS_PER_PART + 7])
async def test_the_engines_keys_come_in_parts_and_whole(kind: Kind, num_keys: int, tmp_path: Path) -> None:
    async with running(kind, tmp_path) as rig:
        inspector = FixedInspector(frozenset(keys(range(num_keys))))
        give_inspector(rig, inspector)
        found = await inspect(rig, is_repair=True)
        assert (found.keys, found.report) == (inspector.resident, report(num_keys))
        assert inspector.asked == [Inspect(1, is_repair=True)]


async def test_requests_of_others_go_on_during_an_inspection(tmp_path: Path) -> None:
    async with running("unix", tmp_path) as rig:
        inspector = FixedInspector(frozenset(keys(range(50_000))))
        give_inspector(rig, inspector)
        inspector.may_answer.clear()
        inspecting = asyncio.create_task(inspect(rig))
        client, _ = await rig.connected()
        deltas = await collect(submit(client, "a", [1, 2], 20))
        assert len(tokens_of(deltas)) == 20
        inspector.may_answer.set()
        assert len((await inspecting).keys) == 50_000


@pytest.mark.parametrize("error", [EngineError("the engine is dead"), Overloaded("not now")])
async def test_the_workers_own_error_arrives(error: Exception, tmp_path: Path) -> None:
    async with running("local", tmp_path) as rig:
        give_inspector(rig, FixedInspector(error=error))
        with pytest.raises(type(error), match=str(error)):
            await inspect(rig)


async def test_an_unexpected_error_is_answered_and_harms_nobody(tmp_path: Path) -> None:
    async with running("local", tmp_path) as rig:
        give_inspector(rig, FixedInspector(error=RuntimeError("a bug")))
        with pytest.raises(EngineError, match="the inspection failed: RuntimeError"):
            await inspect(rig)
        client, _ = await rig.connected()
        assert len(tokens_of(await collect(submit(client, "a", [1], 3)))) == 3


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError("no buffer space")])
async def test_an_answer_that_cannot_be_sent_ends_its_connection_and_no_other(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running("local", tmp_path) as rig:
        give_inspector(rig, FixedInspector(frozenset(keys(range(10)))))
        monkeypatch.setattr("worker.inspector.ResidentKeys", Mock(side_effect=error))
        async with asyncio.timeout(60.0):
            with pytest.raises(ConnectionError):
                await inspect(rig)
        monkeypatch.undo()
        assert len((await inspect(rig)).keys) == 10
        client, _ = await rig.connected()
        assert len(tokens_of(await collect(submit(client, "a", [1], 3)))) == 3


async def test_a_worker_without_an_inspector_says_so(tmp_path: Path) -> None:
    async with running("local", tmp_path) as rig:
        with pytest.raises(Overloaded, match="nothing to be inspected"):
            await inspect(rig)


async def test_another_life_of_the_worker_is_not_taken_for_this_one(tmp_path: Path) -> None:
    async with running("local", tmp_path) as rig:
        give_inspector(rig, FixedInspector())
        with pytest.raises(WorkerLost, match="answers in place of worker w1"):
            await inspect(rig, instance=Instance("2" * 32))


async def test_an_inspection_leaves_no_session_behind(tmp_path: Path) -> None:
    async with running("local", tmp_path) as rig:
        give_inspector(rig, FixedInspector(frozenset(keys(range(10)))))
        await inspect(rig)
        async with asyncio.timeout(60.0):
            while rig.host.num_sessions:
                await asyncio.sleep(0)


async def test_a_second_inspection_at_once_costs_that_connection_alone(tmp_path: Path) -> None:
    async with running("local", tmp_path) as rig:
        inspector = FixedInspector()
        give_inspector(rig, inspector)
        inspector.may_answer.clear()
        client, _ = await rig.connected()
        greedy = await rig.host.open_local()
        await greet_worker(greedy, SECRET, DOCTOR, bytes(16), 0)
        await greedy.send(encode(Inspect(1)))
        await greedy.send(encode(Inspect(2)))
        with pytest.raises(ConnectionError):
            await drain_channel(greedy)
        assert rig.host.counts.num_protocol_errors == 1
        assert len(tokens_of(await collect(submit(client, "a", [1], 3)))) == 3
        # The session of the greedy one would wait for it to come back.
        again = await rig.host.open_local()
        await greet_worker(again, SECRET, DOCTOR, bytes(16), 0)
        await again.send(encode(Refused("closed", "")))


# What a hostile worker may send.


async def told(*messages: object) -> Inspected:
    """What a doctor makes of a worker that answers with these messages."""
    ours, theirs = local_pair(capacity_bytes=1 << 24)

    async def worker() -> None:
        greeting = await receive_hello(theirs, SECRET)
        await send_welcome(theirs, SECRET, greeting, WORKER, INSTANCE, is_resumed=False, last_submit=0)
        assert isinstance(decode(await theirs.receive()), Inspect)
        for message in messages:
            await theirs.send(encode(message))

    async def connect() -> object:
        return ours

    serving = asyncio.create_task(worker())
    try:
        async with asyncio.timeout(60.0):
            return await inspect_worker(connect, WORKER, INSTANCE, DOCTOR, SECRET)  # type: ignore[arg-type]
    finally:
        await asyncio.gather(serving, return_exceptions=True)
        theirs.close()


def part(numbers: range, number: int = 1) -> ResidentKeys:
    return ResidentKeys(number, b"".join(keys(numbers)))


async def test_frames_in_between_tell_the_status_and_no_more() -> None:
    found = await told(Frame(INSTANCE, 1, 0), report(3), part(range(2)), Frame(INSTANCE, 2, 0), part(range(2, 3)))
    assert (found.keys, found.status) == (frozenset(keys(range(3))), None)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([part(range(1))], "does not send ResidentKeys in an inspection"),
        ([report(1), report(1)], "does not send Inspection in an inspection"),
        ([report(1, number=2)], "does not send Inspection in an inspection"),
        ([report(1), part(range(1), number=2)], "does not send ResidentKeys in an inspection"),
        ([report(-1)], "announces -1 keys"),
        ([report(MAX_INSPECTED_KEYS + 1)], f"announces {MAX_INSPECTED_KEYS + 1} keys; the limit is"),
        ([report(1), part(range(2))], "more than the 1 keys it announced"),
        ([report(2), ResidentKeys(1, b"")], "a part of an inspection has 0 bytes"),
        ([report(2), ResidentKeys(1, b"x" * 17)], "a part of an inspection has 17 bytes"),
        ([report(1 << 20), part(range(MAX_KEYS_PER_PART + 1))], "a part of an inspection has"),
        ([report(2), part(range(1)), part(range(1))], "1 of 2 are different"),
        ([Submit(1, RequestId("a"), 0, pack_tokens([1]), Sampling(1))], "does not send Submit"),
    ],
    ids=lambda value: "" if isinstance(value, list) else value,
)
async def test_a_hostile_answer_is_refused_by_name(messages: list[object], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        await told(*messages)


async def test_a_worker_that_ends_meanwhile_is_lost() -> None:
    with pytest.raises(WorkerLost, match="the worker ends: bye"):
        await told(report(2), Refused("closed", "bye"))
