"""A worker's host: accounting, draining, limits, and what it does with engines that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.errors import ConfigError, EngineError, Overloaded, WorkerLost
from shared.hashing import pack_tokens
from shared.messages import Ack, Cancel, Frame, Submit, decode, encode
from shared.transport.base import Channel
from shared.transport.handshake import greet_worker
from shared.types import CacheScheme, FinishReason, RequestId, RouterId, Sampling
from shared.wire import MAX_MESSAGE_BYTES
from tests.support.fakes import FakeEngine, fake_tokens
from tests.support.transport import INSTANCE, SECRET, WORKER, collect, drain_channel, running, submit, tokens_of, until
from worker.engines.base import BlockChange, EngineDelta, EngineRequest
from worker.host import HostLimits, WorkerHost


async def _session(host: WorkerHost, session: bytes = bytes(16)) -> Channel:
    """The router's end of a connection that stands."""
    channel = await host.open_local()
    await greet_worker(channel, SECRET, RouterId("r1"), session, 0)
    return channel


async def _until_ended(channel: Channel, num_requests: int) -> dict[RequestId, tuple[int, ...]]:
    """Hear frames until so many requests have ended; their tokens."""
    answers: dict[RequestId, tuple[int, ...]] = {}
    while num_requests:
        frame = decode(await channel.receive())
        assert isinstance(frame, Frame)
        for delta in frame.deltas:
            answers[delta.request] = answers.get(delta.request, ()) + delta.token_ids
            num_requests -= delta.finish is not None or delta.fault is not None
    return answers


async def test_prompt_tokens_are_queued_until_the_engine_tells_of_them(tmp_path: Path) -> None:
    engine = FakeEngine(prefill_s_per_token=0.001, token_s=60.0, max_num_seqs=1, num_blocks=77)
    async with running("local", tmp_path, engine=engine) as rig:
        client, _ = await rig.connected()
        first = client.submit(RequestId("a"), 0, pack_tokens(range(50)), Sampling(max_tokens=9), matched_tokens=32)
        second = submit(client, "b", [1] * 30, 9)
        await until(lambda: engine.num_live == 2)
        status = rig.host.status()
        assert (status.queued_prefill_tokens, status.num_running, status.num_waiting) == (18 + 30, 1, 1)
        assert (status.kv_total_blocks, status.step_budget_tokens, status.step_s) == (77, 8192, 60.0)
        await first.aclose()
        await until(lambda: rig.host.num_requests == 1)
        assert rig.host.status().queued_prefill_tokens == 30
        engine.token_s = 0.001
        await anext(second)
        assert rig.host.status().queued_prefill_tokens == 0
        await collect(second)


async def test_wrong_expectations_of_the_cache_never_count_below_zero(tmp_path: Path) -> None:
    async with running("local", tmp_path, engine=FakeEngine(prefill_s_per_token=60.0)) as rig:
        client, _ = await rig.connected()
        stream = client.submit(RequestId("a"), 0, pack_tokens([1, 2]), Sampling(max_tokens=1), matched_tokens=640)
        await until(lambda: rig.host.num_requests == 1)
        assert rig.host.status().queued_prefill_tokens == 0
        await stream.aclose()


async def test_drain_waits_for_what_is_under_way_and_refuses_the_rest(tmp_path: Path) -> None:
    async with running("local", tmp_path, engine=FakeEngine(token_s=0.001)) as rig:
        client, _ = await rig.connected()
        task = asyncio.create_task(collect(submit(client, "a", [1], 100)))
        await until(lambda: rig.host.num_requests == 1)
        draining = asyncio.create_task(rig.host.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        with pytest.raises(Overloaded, match="draining"):
            await collect(submit(client, "b", [1], 1))
        assert tokens_of(await task) == fake_tokens([1], 100)
        await draining


async def test_drain_ends_when_every_router_knows_of_it_or_is_away(tmp_path: Path) -> None:
    async with running("local", tmp_path) as rig:
        channel, other = await _session(rig.host), await _session(rig.host, bytes([1] * 16))
        draining = asyncio.create_task(rig.host.drain())
        for _ in range(5):
            frame = decode(await channel.receive())
            assert isinstance(frame, Frame)
        assert frame.status is not None
        assert frame.status.is_draining
        await channel.send(encode(Ack(frame.number)))
        # One has heard of it and the other one not.
        await channel.receive()
        assert not draining.done()
        other.close()
        while not draining.done():
            frame = decode(await channel.receive())
            await channel.send(encode(Ack(frame.number)))
        await draining
        channel.close()


async def test_a_repeated_submit_runs_once(tmp_path: Path) -> None:
    async with running("local", tmp_path) as rig:
        channel = await _session(rig.host)
        message = encode(Submit(1, RequestId("a"), 0, pack_tokens([5]), Sampling(max_tokens=3)))
        await channel.send(message)
        await channel.send(message)
        assert await _until_ended(channel, 1) == {"a": fake_tokens([5], 3)}
        channel.close()
        again = await _session(rig.host)
        await again.send(message)
        await again.send(encode(Submit(2, RequestId("b"), 0, pack_tokens([6]), Sampling(max_tokens=3))))
        assert (await _until_ended(again, 2))["b"] == fake_tokens([6], 3)
        assert rig.engine.num_submitted == 2
        again.close()


async def test_cancel_of_an_unknown_request_changes_nothing(tmp_path: Path) -> None:
    async with running("local", tmp_path) as rig:
        channel = await _session(rig.host)
        await channel.send(encode(Cancel(RequestId("nobody"), 3)))
        await channel.send(encode(Submit(1, RequestId("a"), 0, pack_tokens([5]), Sampling(max_tokens=3))))
        assert await _until_ended(channel, 1) == {"a": fake_tokens([5], 3)}
        channel.close()


async def test_a_request_cancelled_before_it_began_still_ends(tmp_path: Path) -> None:
    async with running("local", tmp_path) as rig:
        channel = await _session(rig.host)
        await channel.send(encode(Submit(1, RequestId("a"), 0, pack_tokens([5]), Sampling(max_tokens=30))))
        await channel.send(encode(Cancel(RequestId("a"), 0)))
        assert await _until_ended(channel, 1) == {"a": ()}
        assert rig.engine.num_submitted == 0
        channel.close()


async def test_a_router_that_submits_without_acknowledging_is_cut_off(tmp_path: Path) -> None:
    async with running("local", tmp_path, limits=HostLimits(max_unacknowledged_bytes=2000)) as rig:
        channel = await _session(rig.host)
        channel.receive_limit_bytes = MAX_MESSAGE_BYTES

        async def submit_for_ever() -> None:
            number = 0
            while True:
                number += 1
                await channel.send(encode(Submit(number, RequestId(f"q{number}"), 0, b"", Sampling(max_tokens=1))))
                await asyncio.sleep(0)

        reading = asyncio.create_task(drain_channel(channel))
        with pytest.raises(ConnectionError):
            await submit_for_ever()
        with pytest.raises(ConnectionError):
            await reading
        assert rig.host.counts.num_protocol_errors == 1


async def test_strangers_over_the_limit_are_closed_unheard(tmp_path: Path) -> None:
    async with running("local", tmp_path, limits=HostLimits(max_strangers=1)) as rig:
        first = await rig.host.open_local()
        await first.receive()
        second = await rig.host.open_local()
        with pytest.raises(ConnectionError):
            await second.receive()
        await greet_worker_after_challenge(first)
        assert rig.host.counts.num_rejected == 2


async def greet_worker_after_challenge(channel: Channel) -> None:
    """Say something wrong, so that the connection ends."""
    await channel.send(b"")
    with pytest.raises(ConnectionError):
        await drain_channel(channel)
    channel.close()


class _OddEngine(FakeEngine):
    """Ends without a reason, or fails with an error of its own kind."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        yield EngineDelta((7,), None, 0)
        if request.token_ids == [1]:
            raise ZeroDivisionError("inside the engine")


async def test_an_engine_that_misbehaves_fails_the_request_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running("local", tmp_path, engine=_OddEngine()) as rig:
        client, _ = await rig.connected()
        with pytest.raises(EngineError, match="log says why") as failed:
            await collect(submit(client, "a", [1], 5))
        assert "ZeroDivisionError" not in str(failed.value)
        assert "ZeroDivisionError" in caplog.text
        with pytest.raises(EngineError, match="without a reason"):
            await collect(submit(client, "b", [2], 5))
        assert client.is_connected


async def test_engine_death_ends_the_host_and_every_session(tmp_path: Path) -> None:
    engine = FakeEngine(token_s=60.0)
    async with running("local", tmp_path, engine=engine) as rig:
        client, _ = await rig.connected()
        stream = submit(client, "a", [1], 5)
        await until(lambda: rig.host.num_requests == 1)
        engine.die("out of memory")
        with pytest.raises((WorkerLost, EngineError), match="out of memory"):
            await collect(stream)
        await rig.host.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            await rig.host.open_local()


def test_an_empty_secret_is_refused() -> None:
    engine = FakeEngine()
    with pytest.raises(ConfigError, match="secret"):
        WorkerHost(engine, engine.info, worker=WORKER, instance=INSTANCE, secret=b"")


async def test_fake_engine_serves_prefixes_from_its_cache_and_tells_changes() -> None:
    changes: list[BlockChange] = []
    scheme = CacheScheme("m", 16)
    engine = FakeEngine(scheme=scheme, num_blocks=4, on_blocks=changes.append)

    async def ask(request: str, prompt: list[int], num_tokens: int = 1) -> list[EngineDelta]:
        asked = EngineRequest(RequestId(request), prompt, Sampling(max_tokens=num_tokens))
        return [delta async for delta in engine.generate(asked)]

    prompt = list(range(48))
    assert (await ask("a", prompt))[0].cached_tokens == 0
    assert (await ask("b", prompt))[0].cached_tokens == 32  # the last block is always computed
    assert (await ask("c", [*prompt, 1]))[0].cached_tokens == 48
    assert len(await engine.resident()) == 3
    # Two more blocks push out the oldest chain from its end.
    await ask("d", [9] * 32)
    assert (await ask("e", [*prompt, 1]))[0].cached_tokens == 32
    held: set[bytes] = set()
    for change in changes:
        held = (held | set(change.stored)) - set(change.removed)
    assert held == await engine.resident()
    await engine.reset_cache()
    assert (changes[-1].is_reset, await engine.resident()) == (True, set())


async def test_fake_engine_answers_go_on_from_prompt_and_tokens_sent() -> None:
    prompt = [3, 1, 4]
    whole = fake_tokens(prompt, 20)
    assert whole[8:] == fake_tokens([*prompt, *whole[:8]], 12)
    assert len(set(whole)) > 16


async def test_fake_engine_keeps_a_request_until_it_is_cancelled() -> None:
    engine = FakeEngine(max_num_seqs=1)
    first = engine.generate(EngineRequest(RequestId("a"), [1], Sampling(max_tokens=100)))
    await anext(first)
    await first.aclose()  # type: ignore[attr-defined]
    assert (engine.num_live, engine.stats().num_running) == (1, 1)
    second = engine.generate(EngineRequest(RequestId("b"), [1], Sampling(max_tokens=2)))
    waiting = asyncio.ensure_future(anext(second))
    await asyncio.sleep(0)
    assert engine.stats().num_waiting == 1
    await engine.cancel(RequestId("a"))
    await waiting
    assert [delta.finish async for delta in second] == [FinishReason.LENGTH]
    assert engine.num_live == 0
