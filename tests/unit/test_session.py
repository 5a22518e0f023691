"""The worker's end of a session: numbering, gathering, keeping, pausing and repeating frames."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from shared.errors import ProtocolError
from shared.messages import Delta, Fault, Frame, MessagePart, Refused, RichDelta, TokenLogprobs, decode
from shared.transport.base import Timings
from shared.transport.channel import LocalChannel, local_pair
from shared.transport.session import RequestKey, Session
from shared.types import FinishReason, Instance, RequestId, RouterId, WorkerStatus
from shared.vtime import run_virtual

A: RequestKey = (RequestId("a"), 0)
B: RequestKey = (RequestId("b"), 1)
STATUS = WorkerStatus(1, 2, 3, 4, 5, 0.1, 0.2, 0.3, 8192)


def a_session(max_unacknowledged_bytes: int = 1 << 20) -> Session:
    return Session(RouterId("r1"), Instance("i1"), lambda: STATUS, Timings(), max_unacknowledged_bytes)


class _Peer:
    """The router's end: hears frames and when they came."""

    def __init__(self, session: Session, last_frame: int = 0) -> None:
        ours, self._theirs = local_pair()
        self._theirs.receive_limit_bytes = 1 << 26
        self.channel: LocalChannel = ours
        session.attach(ours, last_frame)
        self._sending = asyncio.create_task(session.send_frames(ours))

    async def hear(self) -> Any:
        return decode(await self._theirs.receive())

    async def frame_with_deltas(self) -> Frame:
        while True:
            frame = await self.hear()
            if isinstance(frame, Frame) and frame.deltas:
                return frame

    async def leave(self) -> None:
        self._theirs.close()
        await self._sending


def virtual(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtual(scenario)


def test_deltas_of_one_step_share_a_frame_that_leaves_at_once() -> None:
    async def scenario() -> None:
        session = a_session()
        peer = _Peer(session)
        first = await peer.hear()
        assert (first.number, first.status, first.deltas) == (1, STATUS, ())
        await asyncio.sleep(0.05)
        pushed_at_s = asyncio.get_running_loop().time()
        session.push(A, 0, (1, 2), cached_tokens=64)
        session.push(B, 7, (3,), finish=FinishReason.STOP)
        frame = await peer.hear()
        assert asyncio.get_running_loop().time() == pytest.approx(pushed_at_s, abs=2e-4)
        assert frame.deltas == (Delta(*A, 0, (1, 2), None, 64), Delta(*B, 7, (3,), FinishReason.STOP))

    virtual(scenario())


def test_what_is_told_beside_tokens_is_in_their_frame_and_costs_others_nothing() -> None:
    async def scenario() -> None:
        session = a_session()
        peer = _Peer(session)
        await peer.hear()
        await asyncio.sleep(0.05)
        one, two = TokenLogprobs(-1.0, (1,), (-0.5,)), TokenLogprobs(-2.0)
        session.push(A, 0, (1,), cached_tokens=64)
        session.add_more(A, (one,), ())
        session.push(B, 7, (3,))
        session.push(A, 1, (2,), finish=FinishReason.STOP)
        session.add_more(A, (two,), (MessagePart("x"),))
        frame = await peer.hear()
        assert frame.deltas == (Delta(*B, 7, (3,)),)
        assert frame.rich_deltas == (
            RichDelta(*A, 0, (1, 2), FinishReason.STOP, 64, None, (one, two), (MessagePart("x"),)),
        )
        session.push(A, 2, (4,), finish=FinishReason.STOP)
        assert (await peer.hear()).rich_deltas == ()

    virtual(scenario())


def test_what_is_told_beside_tokens_counts_for_what_is_kept() -> None:
    async def scenario() -> None:
        session = a_session(max_unacknowledged_bytes=2000)
        session.push(A, 0, (1,))
        assert not session.is_full
        session.add_more(A, (), (MessagePart("x" * 2000),))
        assert session.is_full
        session.close()
        session.push(A, 1, (1,))
        session.add_more(A, (TokenLogprobs(-1.0),), ())
        assert session.unacknowledged_bytes == 0

    virtual(scenario())


def test_under_load_frames_keep_their_distance_and_gather_each_request() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        session = a_session()
        peer = _Peer(session)
        await peer.hear()
        await asyncio.sleep(0.05)
        session.push(A, 0, (0,))
        await peer.frame_with_deltas()
        sent_at_s = loop.time()
        for offset in range(1, 6):
            await asyncio.sleep(0.001)
            session.push(A, offset, (offset,))
        frame = await peer.frame_with_deltas()
        assert loop.time() - sent_at_s == pytest.approx(0.01, abs=2e-4)
        assert frame.deltas == (Delta(*A, 1, (1, 2, 3, 4, 5)),)

    virtual(scenario())


def test_first_tokens_and_ends_do_not_wait_for_the_interval() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        session = a_session()
        peer = _Peer(session)
        await peer.hear()
        await asyncio.sleep(0.05)
        session.push(A, 0, (1,))
        await peer.frame_with_deltas()
        sent_at_s = loop.time()
        await asyncio.sleep(0.002)
        session.push(A, 1, (2,))
        await asyncio.sleep(0.002)
        session.push(A, 2, (3,), fault=Fault("engine_error", "why"))
        session.push(B, 0, (7,))
        frame = await peer.frame_with_deltas()
        assert loop.time() - sent_at_s == pytest.approx(0.004, abs=2e-4)
        assert frame.deltas == (Delta(*A, 1, (2, 3), fault=Fault("engine_error", "why")), Delta(*B, 0, (7,)))

    virtual(scenario())


def test_status_comes_ten_times_a_second_without_deltas() -> None:
    async def scenario() -> None:
        peer = _Peer(a_session())
        frames = [await peer.hear() for _ in range(11)]
        assert [frame.number for frame in frames] == list(range(1, 12))
        assert all(frame.status == STATUS for frame in frames)
        assert asyncio.get_running_loop().time() == pytest.approx(1.0, abs=0.01)

    virtual(scenario())


def test_a_frame_accounts_for_the_last_submit() -> None:
    async def scenario() -> None:
        session = a_session()
        peer = _Peer(session)
        assert [session.accept(number) for number in (1, 2, 2, 1, 5)] == [True, True, False, False, True]
        assert (await peer.hear()).last_submit == 5

    virtual(scenario())


def test_a_full_session_holds_its_requests_until_frames_are_acknowledged() -> None:
    async def scenario() -> None:
        session = a_session(max_unacknowledged_bytes=400)
        peer = _Peer(session)
        await peer.hear()
        session.push(A, 0, tuple(range(1000, 1200)))
        assert session.is_full
        frame = await peer.frame_with_deltas()
        assert session.is_full
        waiting = asyncio.create_task(session.room())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        session.acknowledge(frame.number)
        await asyncio.sleep(0)
        assert waiting.done()
        assert (session.unacknowledged_bytes, session.is_full) == (0, False)

    virtual(scenario())


def test_a_new_connection_gets_exactly_what_its_router_has_not_seen() -> None:
    async def scenario() -> None:
        session = a_session()
        peer = _Peer(session)
        await peer.hear()
        sent = []
        for offset in range(4):
            session.push(A, offset, (offset,))
            sent.append(await peer.frame_with_deltas())
        await peer.leave()
        assert session.detach(peer.channel)
        session.push(A, 4, (4,))
        session.push(A, 5, (5,), finish=FinishReason.LENGTH)
        again = _Peer(session, last_frame=sent[1].number)
        assert [await again.hear(), await again.hear()] == sent[2:]
        later = [await again.hear(), await again.hear()]
        assert [frame.number for frame in later] == [sent[-1].number + 1, sent[-1].number + 2]
        # Built while nobody knew yet that the router was away.
        assert later[0].deltas == ()
        assert later[1].deltas == (Delta(*A, 4, (4, 5), FinishReason.LENGTH),)

    virtual(scenario())


def test_a_second_connection_takes_the_place_of_the_first() -> None:
    async def scenario() -> None:
        session = a_session()
        first = _Peer(session)
        await first.hear()
        second = _Peer(session, last_frame=1)
        with pytest.raises(ConnectionError):
            await first.hear()
        assert not session.detach(first.channel)
        assert session.channel is second.channel
        assert (await second.hear()).number == 2

    virtual(scenario())


def test_frames_that_cannot_be_are_protocol_errors() -> None:
    async def scenario() -> None:
        session = a_session()
        peer = _Peer(session)
        await peer.hear()
        with pytest.raises(ProtocolError, match="last one built"):
            session.acknowledge(2)
        session.acknowledge(1)
        with pytest.raises(ProtocolError, match="acknowledged"):
            session.attach(local_pair()[0], 0)

    virtual(scenario())


def test_closing_lets_go_of_all_who_wait_and_keeps_nothing() -> None:
    async def scenario() -> None:
        session = a_session(max_unacknowledged_bytes=10)
        peer = _Peer(session)
        session.push(A, 0, (1, 2, 3))
        waiting = asyncio.create_task(session.room())
        await asyncio.sleep(0)
        session.close()
        await waiting
        session.push(A, 3, (4,))
        assert (session.unacknowledged_bytes, session.is_full) == (0, False)
        await peer.leave()

    virtual(scenario())


def test_a_farewell_comes_after_all_that_is_kept() -> None:
    async def scenario() -> None:
        session = a_session()
        peer = _Peer(session)
        await peer.hear()
        session.push(A, 0, (1,), finish=FinishReason.ABORT)
        session.close(Refused("worker_lost", "bye"))
        assert (await peer.hear()).deltas == (Delta(*A, 0, (1,), FinishReason.ABORT),)
        # The last word; it is for the other side to close.
        assert await peer.hear() == Refused("worker_lost", "bye")
        await peer.leave()

    virtual(scenario())
