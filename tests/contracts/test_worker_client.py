"""What every way between a router and a worker must do: in process, over Unix sockets and over TCP."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import random
import stat
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

from shared.errors import AuthenticationFailed, ContextTooLong, EngineError, InvalidRequest, Overloaded, WorkerLost
from shared.hashing import pack_tokens
from shared.messages import PROTOCOL_VERSION, Ack, Delta, Hello, Submit, decode, encode
from shared.transport.base import Channel, Timings
from shared.transport.client import ChannelClient, _check_sampling
from shared.transport.handshake import greet_worker
from shared.types import FinishReason, Instance, RequestId, RouterId, Sampling
from shared.wire import MAX_MESSAGE_BYTES
from tests.support.fakes import VOCABULARY, FakeEngine, fake_tokens
from tests.support.transport import (
    BRISK,
    KINDS,
    SECRET,
    Kind,
    Rig,
    collect,
    drain_channel,
    running,
    submit,
    tokens_of,
    until,
)
from worker.engines.base import EngineDelta, EngineRequest, EngineStats
from worker.host import HostLimits

PROMPT = list(range(100, 150))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
async def rig(kind: Kind, tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(kind, tmp_path) as rig:
        yield rig


async def test_a_stream_brings_every_token_once_and_in_order(rig: Rig) -> None:
    client, _ = await rig.connected()
    deltas = await collect(submit(client, "a", PROMPT, 200))
    assert tokens_of(deltas) == fake_tokens(PROMPT, 200)
    assert [delta.finish for delta in deltas if delta.finish] == [FinishReason.LENGTH] == [deltas[-1].finish]
    assert deltas[0].cached_tokens == 0
    assert client.num_open == 0


async def test_many_requests_of_many_routers_run_side_by_side(rig: Rig) -> None:
    clients = [(await rig.connected(router=f"r{number}"))[0] for number in range(3)]
    prompts = {f"q{number}": [number + 1] * (number + 1) for number in range(40)}
    # The same request ids on every router: they must not meet in the engine.
    answers = await asyncio.gather(
        *(collect(submit(client, request, prompt, 20)) for client in clients for request, prompt in prompts.items())
    )
    assert [tokens_of(deltas) for deltas in answers] == [fake_tokens(p, 20) for p in prompts.values()] * 3


async def test_a_submit_is_numbered_at_once_and_acknowledged_with_a_status(rig: Rig) -> None:
    changed = asyncio.Event()
    client, _ = rig.client(on_change=changed.set)
    assert (client.status, client.status_age_s, client.is_connected) == (None, float("inf"), False)
    await client.connect()
    streams = [submit(client, request, PROMPT, 1) for request in ("a", "b")]
    assert client.last_submit == 2
    async with asyncio.timeout(60):
        while client.acknowledged_submit < 2:
            changed.clear()
            await changed.wait()
    assert client.status is not None
    assert client.status_age_s < 60
    await asyncio.gather(*map(collect, streams))


async def test_what_routing_depends_on_is_told_and_single_tokens_are_not(kind: Kind, tmp_path: Path) -> None:
    timings = dataclasses.replace(BRISK, status_interval_s=3600.0)
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.002), timings=timings) as rig:
        changes: list[str] = []
        what = "connected"
        client, connect = rig.client(on_change=lambda: changes.append(what))
        await client.connect()
        await until(lambda: client.status is not None)
        what = "first token"
        stream = submit(client, "a", PROMPT, 50)
        await anext(stream)
        what = "token"
        await anext(stream)
        what = "end"
        await collect(stream)
        what = "cut"
        connect.cut()
        await until(lambda: client.num_reconnects == 1)
        # Connection and first status; first token; end; gone, back, and the status that comes with that.
        await until(lambda: len(changes) == 7)
        assert changes == ["connected"] * 2 + ["first token", "end"] + ["cut"] * 3


async def test_closing_a_stream_early_frees_the_engine(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.002)) as rig:
        client, _ = await rig.connected()
        async with aclosing(submit(client, "a", PROMPT, 1_000_000)) as stream:
            await anext(stream)
            assert rig.engine.num_live == 1
        await until(lambda: client.num_open == 0)
        assert (rig.engine.num_live, rig.engine.num_cancelled, rig.host.num_requests) == (0, 1, 0)


async def test_a_stream_that_nobody_reads_can_be_closed(rig: Rig) -> None:
    client, _ = await rig.connected()
    await submit(client, "a", PROMPT, 1_000_000).aclose()
    await until(lambda: client.num_open == 0)
    assert rig.engine.num_live == 0


async def test_cancelling_the_waiting_task_frees_the_engine(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, engine=FakeEngine(prefill_s_per_token=60.0)) as rig:
        client, _ = await rig.connected()
        task = asyncio.create_task(collect(submit(client, "a", PROMPT, 10)))
        await until(lambda: rig.engine.num_live == 1)
        assert rig.host.status().queued_prefill_tokens == len(PROMPT)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: client.num_open == 0)
        assert (rig.engine.num_live, rig.engine.num_cancelled) == (0, 1)


async def test_errors_arrive_as_their_own_class(kind: Kind, tmp_path: Path) -> None:
    engine = FakeEngine(max_model_len_tokens=200)
    async with running(kind, tmp_path, engine=engine, limits=HostLimits(retry_after_s=3.5)) as rig:
        client, _ = await rig.connected()
        with pytest.raises(ContextTooLong, match="200 tokens"):
            await collect(submit(client, "long", [1] * 200, 1))
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await collect(submit(client, "foreign", [VOCABULARY], 1))
        with pytest.raises(InvalidRequest, match="token_ids"):
            await collect(submit(client, "empty", [], 1))
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await collect(submit(client, "none", [1], 0))
        await rig.host.drain()
        with pytest.raises(Overloaded) as overloaded:
            await collect(submit(client, "late", [1], 1))
        assert overloaded.value.retry_after_s == 3.5
        await until(lambda: client.status is not None and client.status.is_draining)


async def test_an_engine_fault_ends_only_its_request_after_its_tokens(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, engine=FakeEngine(mode="flaky", fault_rate=1.0)) as rig:
        client, _ = await rig.connected()
        deltas: list[Delta] = []
        with pytest.raises(EngineError, match="flaky"):
            await collect(submit(client, "a", PROMPT, 20), into=deltas)
        assert tokens_of(deltas) == fake_tokens(PROMPT, 10)
        assert client.is_connected


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"sampling": Sampling(1, seed=1 << 70)}, "cannot be sent: "),
        ({"sampling": Sampling(1, temperature=float("nan"))}, r"Sampling\.temperature: nan is not a finite number"),
        ({"sampling": Sampling(1.5)}, r"Sampling\.max_tokens: float instead of int"),  # type: ignore[arg-type]
        ({"request": RequestId("\ud800")}, "surrogates not allowed"),
        ({"token_ids": bytes(MAX_MESSAGE_BYTES)}, "over the limit of 67108864"),
    ],
    ids=["huge", "not finite", "wrong type", "no text", "large"],
)
async def test_what_no_worker_could_read_is_refused_at_once_and_costs_nobody_else_anything(
    rig: Rig, field: dict[str, Any], message: str
) -> None:
    client, _ = await rig.connected()
    plain = {"request": RequestId("a"), "attempt": 0, "token_ids": pack_tokens(PROMPT), "sampling": Sampling(1)}
    with pytest.raises(InvalidRequest, match=message):
        client.submit(**{**plain, **field})
    deltas = await collect(submit(client, "b", PROMPT, 20))
    assert tokens_of(deltas) == fake_tokens(PROMPT, 20)
    assert (client.last_submit, client.num_reconnects) == (1, 0)


async def test_a_value_that_equals_a_known_one_and_is_of_another_type_is_refused(rig: Rig) -> None:
    client, _ = await rig.connected()
    await collect(submit(client, "a", PROMPT, 1))
    with pytest.raises(InvalidRequest, match=r"Sampling\.max_tokens: float instead of int"):
        submit(client, "b", PROMPT, 1.0)  # type: ignore[arg-type]


async def test_a_large_way_of_sampling_is_checked_and_not_kept(rig: Rig) -> None:
    client, _ = await rig.connected()
    _check_sampling.cache_clear()
    schema = json.dumps({"description": "x" * 10_000})
    with pytest.raises(InvalidRequest, match=r"Sampling\.max_tokens: float instead of int"):
        client.submit(RequestId("a"), 0, pack_tokens(PROMPT), Sampling(1.0, json_schema=schema))  # type: ignore[arg-type]
    await collect(client.submit(RequestId("b"), 0, pack_tokens(PROMPT), Sampling(1, json_schema=schema)))
    assert _check_sampling.cache_info().currsize == 0


async def test_a_submit_goes_out_before_the_writer_wakes_and_by_it_where_there_is_no_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = await rig.connected()
    told: list[bytes] = []

    def refuse(raw: bytes) -> bool:
        told.append(raw)
        return False

    monkeypatch.setattr(client._channel, "send_now", refuse)
    streams = [submit(client, name, PROMPT, 5) for name in ("a", "b")]
    # What waits for the writer is not overtaken.
    assert [decode(raw).request for raw in told] == ["a"]
    for stream in streams:
        assert tokens_of(await collect(stream)) == fake_tokens(PROMPT, 5)


class _Unwritable:
    """A channel with a fault of our own in it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.is_faulty = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def send(self, raw: bytes) -> None:
        if self.is_faulty:
            raise RuntimeError("a fault of our own")
        await self._channel.send(raw)

    def send_now(self, raw: bytes) -> bool:
        return False


async def test_a_fault_in_the_writer_is_told_once_and_loses_the_worker_instead_of_hanging(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    client, connect = rig.client()
    faulty: list[_Unwritable] = []

    def wrap(channel: Channel) -> Channel:
        faulty.append(_Unwritable(channel))
        return cast(Channel, faulty[-1])

    connect.wrap = wrap
    await client.connect()
    faulty[0].is_faulty = True
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLost, match="a fault of our own"):
            await collect(submit(client, "a", PROMPT, 20))
    assert client.is_lost
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "worker w1 is lost to a fault of this client"
    ]


async def test_a_worker_that_cannot_build_its_frames_ends_the_session_instead_of_hanging(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = await rig.connected()
    stream = submit(client, "a", PROMPT, 1_000_000)
    await anext(stream)
    stats = rig.engine.stats

    def fail() -> EngineStats:
        raise RuntimeError("a fault of our own")

    rig.engine.stats = fail  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLost, match="given up this router's session"):
            await collect(stream)
    rig.engine.stats = stats  # type: ignore[method-assign]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"][:1] == [
        "sending to router r1 failed, its session ends"
    ]
    await until(lambda: rig.host.num_requests == 0)


async def test_a_request_that_the_worker_fails_to_start_fails_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault of our own")

    client, _ = await rig.connected()
    with monkeypatch.context() as patched:
        patched.setattr(rig.host._requests, "start", fail)
        with pytest.raises(EngineError, match="failed to start this request"):
            await collect(submit(client, "a", PROMPT, 20))
    assert tokens_of(await collect(submit(client, "b", PROMPT, 20))) == fake_tokens(PROMPT, 20)


async def test_an_error_that_quotes_what_is_no_text_arrives(kind: Kind, tmp_path: Path) -> None:
    class QuotingEngine(FakeEngine):
        async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
            raise EngineError("no file caf\udce9")
            yield

    async with running(kind, tmp_path, engine=QuotingEngine()) as rig:
        client, _ = await rig.connected()
        with pytest.raises(EngineError, match=r"no file caf\\udce9"):
            await collect(submit(client, "a", PROMPT, 20))


async def test_a_dead_engine_is_a_lost_worker_at_once(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.001, dies_after=30)) as rig:
        clients = [(await rig.connected(router=f"r{number}"))[0] for number in range(2)]
        results = await asyncio.gather(
            *(collect(submit(client, "a", PROMPT, 1000)) for client in clients for _ in "a"), return_exceptions=True
        )
        assert all(isinstance(result, WorkerLost | EngineError) for result in results)
        await rig.host.wait_closed()
        await until(lambda: all(client.is_lost for client in clients))
        with pytest.raises(WorkerLost):
            await collect(submit(clients[0], "b", PROMPT, 1))


async def test_too_many_requests_of_one_router_are_refused(kind: Kind, tmp_path: Path) -> None:
    engine = FakeEngine(prefill_s_per_token=60.0)
    async with running(kind, tmp_path, engine=engine, limits=HostLimits(max_requests_per_session=2)) as rig:
        client, _ = await rig.connected()
        streams = [submit(client, f"q{number}", PROMPT, 1) for number in range(3)]
        with pytest.raises(Overloaded):
            await collect(streams[2])
        assert rig.host.num_requests == 2
        for stream in streams:
            await stream.aclose()


async def test_too_many_routers_are_refused(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, limits=HostLimits(max_sessions=1)) as rig:
        await rig.connected(router="r1")
        client, _ = rig.client(router="r2")
        with pytest.raises(WorkerLost, match="1 sessions"):
            await client.connect()


async def test_a_router_that_stands_still_pauses_its_requests_alone(kind: Kind, tmp_path: Path) -> None:
    limit_bytes = 20_000
    limits = HostLimits(max_unacknowledged_bytes=limit_bytes)
    async with running(kind, tmp_path, limits=limits) as rig:
        slow, connect = await rig.connected(router="slow")
        brisk, _ = await rig.connected(router="brisk")
        connect.channel.stall()
        stream = submit(slow, "a", PROMPT, 30_000)
        await until(lambda: len(rig.host.paused_routers) == 1)
        assert rig.host.paused_routers == ["slow"]
        assert tokens_of(await collect(submit(brisk, "a", PROMPT, 5_000))) == fake_tokens(PROMPT, 5_000)
        assert rig.host.paused_routers == ["slow"]
        connect.channel.flow()
        assert tokens_of(await collect(stream)) == fake_tokens(PROMPT, 30_000)
        assert rig.host.paused_routers == []


async def test_a_paused_request_can_be_cancelled(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, limits=HostLimits(max_unacknowledged_bytes=5_000)) as rig:
        client, connect = await rig.connected()
        connect.channel.stall()
        stream = submit(client, "a", PROMPT, 1_000_000)
        await until(lambda: rig.host.paused_routers == ["r1"])
        await stream.aclose()
        await until(lambda: rig.engine.num_live == 0)
        connect.channel.flow()
        await until(lambda: client.num_open == 0)


def _has_reconnected(client: ChannelClient, num_times: int) -> bool:
    return client.num_reconnects == num_times


async def test_after_a_cut_nothing_is_lost_or_repeated(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.0005)) as rig:
        client, connect = await rig.connected()
        streams = {f"q{number}": submit(client, f"q{number}", [number + 1], 300) for number in range(8)}
        answers = {request: asyncio.create_task(collect(stream)) for request, stream in streams.items()}
        for num_cuts in range(1, 5):
            await until(lambda: client.is_connected and client.status_age_s < 1)
            connect.num_refusals = 2
            connect.cut()
            # Submitted while the worker is away: sent as soon as it is back.
            request, prompt = f"away{num_cuts}", [num_cuts + 50]
            answers[request] = asyncio.create_task(collect(submit(client, request, prompt, 30)))
            await until(functools.partial(_has_reconnected, client, num_cuts))
        for number in range(8):
            assert tokens_of(await answers[f"q{number}"]) == fake_tokens([number + 1], 300)
        for number in range(1, 5):
            assert tokens_of(await answers[f"away{number}"]) == fake_tokens([number + 50], 30)
        assert rig.engine.num_submitted == 12
        assert rig.host.counts.num_resumed == 4


async def test_what_is_cancelled_while_the_worker_is_away_is_freed_when_it_is_back(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.001)) as rig:
        client, connect = await rig.connected()
        seen = submit(client, "seen", PROMPT, 1_000_000)
        await anext(seen)
        connect.block()
        connect.cut()
        await until(lambda: not client.is_connected)
        unseen = submit(client, "unseen", PROMPT, 1_000_000)
        await seen.aclose()
        await unseen.aclose()
        connect.unblock()
        await until(lambda: client.num_open == 0)
        assert (rig.engine.num_live, rig.engine.num_submitted, rig.engine.num_cancelled) == (0, 1, 1)


async def test_messages_that_arrive_twice_change_nothing(rig: Rig) -> None:
    client, connect = await rig.connected()
    connect.channel.is_doubling = True
    deltas = await collect(submit(client, "a", PROMPT, 300))
    assert tokens_of(deltas) == fake_tokens(PROMPT, 300)
    assert (client.is_connected, client.num_reconnects) == (True, 0)


async def test_a_lost_frame_shows_and_is_sent_again(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.0005)) as rig:
        client, connect = await rig.connected()
        task = asyncio.create_task(collect(submit(client, "a", PROMPT, 300)))
        await until(lambda: client.status_age_s < 1)
        lossy = connect.channel
        lossy.num_to_lose = 2
        assert tokens_of(await task) == fake_tokens(PROMPT, 300)
        assert client.num_reconnects == 1


async def test_a_router_that_comes_back_too_late_has_lost_its_requests(kind: Kind, tmp_path: Path) -> None:
    timings = dataclasses.replace(BRISK, resume_s=0.05)
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.001), timings=timings) as rig:
        client, connect = await rig.connected()
        stream = submit(client, "a", PROMPT, 1_000_000)
        await anext(stream)
        connect.block()
        connect.cut()
        with pytest.raises(WorkerLost):
            await collect(stream)
        await until(lambda: rig.host.num_sessions == 0 and rig.engine.num_live == 0)
        assert (rig.host.counts.num_expired, client.is_lost) == (1, True)


async def test_a_session_that_the_worker_gave_up_is_lost(kind: Kind, tmp_path: Path) -> None:
    timings = dataclasses.replace(BRISK, resume_s=0.02)
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.001), timings=timings) as rig:
        rig.timings = BRISK  # the router has noticed the cut later, and still hopes
        client, connect = await rig.connected()
        stream = submit(client, "a", PROMPT, 1_000_000)
        await anext(stream)
        connect.block()
        connect.cut()
        await until(lambda: rig.host.num_sessions == 0)
        connect.unblock()
        with pytest.raises(WorkerLost, match="given up"):
            await collect(stream)
        await until(lambda: rig.engine.num_live == 0)


async def test_a_silent_connection_is_cut_and_resumed(kind: Kind, tmp_path: Path) -> None:
    timings = dataclasses.replace(BRISK, silence_s=0.1)
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.002), timings=timings) as rig:
        client, connect = await rig.connected()
        task = asyncio.create_task(collect(submit(client, "a", PROMPT, 100)))
        await until(lambda: client.status is not None)
        connect.channel.is_lossy = True  # as a machine that has lost its network: no word, no end
        assert tokens_of(await task) == fake_tokens(PROMPT, 100)
        assert client.num_reconnects >= 1


async def test_another_life_of_the_worker_is_a_lost_worker(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.001)) as rig:
        client, connect = await rig.connected()
        stream = submit(client, "a", PROMPT, 1_000_000)
        await anext(stream)
        connect.block()
        connect.cut()
        await rig.restart_host(Instance("2" * 32))
        connect.unblock()
        with pytest.raises(WorkerLost, match="instance 2222"):
            await collect(stream)
        newcomer, _ = rig.client()
        with pytest.raises(WorkerLost, match="instance 2222"):
            await newcomer.connect()


async def test_a_worker_that_is_gone_is_lost_without_waiting(kind: Kind, tmp_path: Path) -> None:
    timings = dataclasses.replace(BRISK, resume_s=3600.0)
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.001), timings=timings) as rig:
        client, connect = await rig.connected()
        stream = submit(client, "a", PROMPT, 1_000_000)
        await anext(stream)
        connect.channel.is_lossy = True  # the farewell is not heard
        async with asyncio.timeout(60):
            await rig.host.close()
            with pytest.raises(WorkerLost, match="gone"):
                await collect(stream)


async def test_a_closing_worker_tells_its_routers(rig: Rig) -> None:
    client, _ = await rig.connected()
    await rig.host.close()
    await until(lambda: client.is_lost)
    with pytest.raises(WorkerLost):
        await client.connect()


async def test_closing_the_client_frees_everything_at_once(kind: Kind, tmp_path: Path) -> None:
    timings = dataclasses.replace(BRISK, resume_s=3600.0)
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.001), timings=timings) as rig:
        client, _ = await rig.connected()
        stream = submit(client, "a", PROMPT, 1_000_000)
        await anext(stream)
        await client.close()
        with pytest.raises(WorkerLost, match="closed"):
            await collect(stream)
        await until(lambda: rig.host.num_sessions == 0 and rig.engine.num_live == 0)


async def test_a_router_with_the_wrong_secret_is_refused(rig: Rig) -> None:
    client, _ = rig.client(secret=b"another secret")
    with pytest.raises(AuthenticationFailed, match="router does not know"):
        await client.connect()
    assert (rig.host.counts.num_rejected, rig.host.num_sessions) == (1, 0)


async def test_a_worker_with_the_wrong_secret_is_refused(rig: Rig) -> None:
    """An impostor that takes any proof still cannot give its own."""
    client, connect = rig.client()

    def impostor_hears(channel: Channel) -> Channel:
        return _Impostor(channel)

    connect.wrap = impostor_hears
    with pytest.raises(AuthenticationFailed, match="worker does not know"):
        await client.connect()
    assert not client.is_connected


class _Impostor:
    """A channel behind which the worker's proof is wrong."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.receive_limit_bytes = channel.receive_limit_bytes

    async def send(self, raw: bytes) -> None:
        await self._channel.send(raw)

    def send_now(self, raw: bytes) -> bool:
        return False

    async def receive(self) -> bytes:
        raw = await self._channel.receive()
        message = decode(raw)
        if hasattr(message, "proof"):
            return encode(dataclasses.replace(message, proof=bytes(32)))
        return raw

    def close(self) -> None:
        self._channel.close()


async def _stranger(rig: Rig, *messages: bytes) -> None:
    """Say `messages` without having proved anything, until the host closes."""
    channel = await rig.connect_function()()
    channel.receive_limit_bytes = MAX_MESSAGE_BYTES
    try:
        await channel.receive()
        for raw in messages:
            await channel.send(raw)
        await drain_channel(channel)
    except ConnectionError:
        channel.close()


async def test_strangers_close_only_their_own_connection(rig: Rig) -> None:
    client, _ = await rig.connected()
    rng = random.Random(5)
    hello = Hello(PROTOCOL_VERSION, RouterId("r1"), bytes(16), bytes(32), bytes(32), 0)
    strangers = [
        rng.randbytes(50),
        b"",
        bytes(4097),
        encode(hello),
        encode(hello)[:-1],
        encode(dataclasses.replace(hello, protocol=PROTOCOL_VERSION + 1)),
        encode(dataclasses.replace(hello, session=b"short")),
        encode(Ack(1)),
        encode(Submit(1, RequestId("a"), 0, bytes(4), Sampling(max_tokens=1))),
    ]
    async with asyncio.timeout(60):
        for raw in strangers:
            await _stranger(rig, raw)
    assert rig.host.counts.num_rejected == len(strangers)
    assert tokens_of(await collect(submit(client, "a", PROMPT, 10))) == fake_tokens(PROMPT, 10)


async def test_router_and_worker_of_other_protocols_are_told_both(rig: Rig) -> None:
    for protocol in (PROTOCOL_VERSION + 1, PROTOCOL_VERSION - 1):
        client, connect = rig.client()
        connect.wrap = functools.partial(_OfAnotherVersion, protocol=protocol)
        told = rf"the router speaks protocol {protocol}, this worker \(kvroute .*\) protocol {PROTOCOL_VERSION}"
        with pytest.raises(WorkerLost, match=told):
            await client.connect()
    assert (rig.host.counts.num_rejected, rig.host.num_sessions) == (2, 0)


class _OfAnotherVersion:
    """A channel that a router of another protocol says hello through, in words of its own."""

    def __init__(self, channel: Channel, protocol: int) -> None:
        self._channel = channel
        self._protocol = protocol
        self.receive_limit_bytes = channel.receive_limit_bytes

    async def send(self, raw: bytes) -> None:
        await self._channel.send(msgpack.packb([1, self._protocol, {"all else": "is different"}]))

    def send_now(self, raw: bytes) -> bool:
        return False

    async def receive(self) -> bytes:
        return await self._channel.receive()

    def close(self) -> None:
        self._channel.close()


async def test_what_a_proved_peer_must_not_send_closes_only_its_connection(rig: Rig) -> None:
    client, _ = await rig.connected()
    forbidden = [
        b"\xc1",
        encode(Ack(1_000_000)),
        encode(Hello(PROTOCOL_VERSION, RouterId("r1"), bytes(16), bytes(32), bytes(32), 0)),
    ]
    async with asyncio.timeout(60):
        for number, raw in enumerate(forbidden):
            channel = await rig.connect_function()()
            await greet_worker(channel, SECRET, RouterId("rude"), bytes([number] * 16), 0)
            await channel.send(raw)
            with pytest.raises(ConnectionError):
                await drain_channel(channel)
            channel.close()
    assert rig.host.counts.num_protocol_errors == len(forbidden)
    assert tokens_of(await collect(submit(client, "a", PROMPT, 10))) == fake_tokens(PROMPT, 10)


async def test_a_silent_stranger_is_closed_after_the_deadline(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, timings=Timings(handshake_s=0.02)) as rig, asyncio.timeout(60):
        await _stranger(rig)
        assert rig.host.counts.num_rejected == 1


async def _raw(rig: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if rig.kind == "unix":
        return await asyncio.open_unix_connection(rig.address.removeprefix("unix:"))
    host, _, port = rig.address.removeprefix("tcp://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x10\x00half", b"\x00"])
async def test_bytes_that_are_no_messages_close_only_that_connection(kind: Kind, tmp_path: Path, raw: bytes) -> None:
    async with running(kind, tmp_path) as rig, asyncio.timeout(60):
        client, _ = await rig.connected()
        reader, writer = await _raw(rig)
        writer.write(raw)
        writer.write_eof()
        await reader.read()
        writer.close()
        await until(lambda: rig.host.counts.num_rejected == 1)
        assert tokens_of(await collect(submit(client, "a", PROMPT, 10))) == fake_tokens(PROMPT, 10)


async def test_unix_socket_is_for_its_owner_alone(tmp_path: Path) -> None:
    async with running("unix", tmp_path) as rig:
        path = rig.address.removeprefix("unix:")
        modes = [stat.S_IMODE(os.stat(name).st_mode) for name in (path, os.path.dirname(path))]
        assert modes == [0o600, 0o700]
    with pytest.raises(FileNotFoundError):
        os.stat(path)
