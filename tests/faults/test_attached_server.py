"""Attached servers that lose events, come back as another process, answer nonsense, or vanish."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from shared.directory.memory import MemoryDirectory
from shared.errors import ConfigError, EngineError, InvalidRequest, KvrouteError, Overloaded
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme, FinishReason
from tests.support.engines import EngineUnderTest, start_attached
from tests.support.fake_vllm import FakeOptions, FakeVllm
from tests.support.transport import until
from worker.attachment import Attachment, AttachmentOptions
from worker.engines.attached_options import AttachedOptions, ParityProbe, parse_servers

BLOCK_SIZE = 32
SCHEME = CacheScheme("tiny", BLOCK_SIZE)
QUIET = {"poll_s": 3600.0, "quiet_s": 3600.0}
"""Nothing is looked for: only what comes is known."""


def prompt(seed: int, num_blocks: int = 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(num_blocks * BLOCK_SIZE + 1)]


def keys(token_ids: list[int], *, salt: str = "", adapter: str = "", scheme: CacheScheme = SCHEME) -> set[BlockKey]:
    root = root_key(scheme, salt=salt, adapter=adapter)
    return set(block_keys(pack_tokens(token_ids), scheme.block_size_tokens, root))


@asynccontextmanager
async def attached(options: FakeOptions | None = None, **more: Any) -> AsyncIterator[tuple[FakeVllm, EngineUnderTest]]:
    """A server and an engine in front of it, which is told nothing but what comes by itself."""
    server = await FakeVllm(options or FakeOptions()).start()
    try:
        engine = await start_attached(server, **{**QUIET, **more})
        try:
            yield server, engine
        finally:
            await engine.engine.close()
    finally:
        await server.stop()


def look_away(engine: EngineUnderTest) -> None:
    """Never look at the server: a look between two of its lives would find nobody there."""

    async def look() -> None: ...

    engine.engine._look_at_server = look


# Events.


async def test_a_hole_between_events_is_filled_by_a_replay():
    async with attached() as (server, engine):
        await engine.ask(prompt(1), 1)
        server.ranks[0].num_lost = 1
        await engine.ask(prompt(2), 1)
        await engine.ask(prompt(3), 1)
        await until(lambda: engine.told == keys(prompt(1)) | keys(prompt(2)) | keys(prompt(3)))
        assert (engine.engine._events.num_replays, engine.num_resets) == (1, 0)


async def test_lost_events_before_a_quiet_time_are_asked_for():
    async with attached(quiet_s=0.05) as (server, engine):
        server.ranks[0].num_lost = 1 << 20
        await engine.ask(prompt(1), 1)
        await until(lambda: engine.told == keys(prompt(1)))


async def test_events_out_of_order_and_twice_are_taken_once_and_in_order():
    async with attached() as (server, engine):
        rank = server.ranks[0]
        rank.num_lost = 1 << 20
        for seed in (1, 2, 3):
            await engine.ask(prompt(seed), 1)
        rank.num_lost = 0
        for seq in (2, 0, 1):
            rank.send(seq, rank.sent[seq])
        await engine.ask(prompt(4), 1)
        await until(lambda: engine.told == set().union(*(keys(prompt(seed)) for seed in (1, 2, 3, 4))))
        assert (engine.num_resets, engine.deaths) == (0, [])


async def test_without_replay_a_hole_makes_all_before_it_forgotten(caplog: pytest.LogCaptureFixture):
    async with attached(FakeOptions(has_replay=False)) as (server, engine):
        await engine.ask(prompt(1), 1)
        await until(lambda: engine.told == keys(prompt(1)))
        server.ranks[0].num_lost = 1
        await engine.ask(prompt(2), 1)
        await engine.ask(prompt(3), 1)
        await until(lambda: engine.told == keys(prompt(3)))
        (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert line.endswith("what it holds is forgotten: batches 1 to 1 are lost, and past replaying")


async def test_who_comes_late_learns_what_the_replay_still_has():
    server = await FakeVllm(FakeOptions(buffer_steps=2)).start()
    first = await start_attached(server, **QUIET)
    for seed in (1, 2, 3):
        await first.ask(prompt(seed), 1)
    late = await start_attached(server, **QUIET)
    assert late.told == keys(prompt(2)) | keys(prompt(3))
    assert (await late.ask(prompt(1), 1)).cached_tokens == 3 * BLOCK_SIZE
    for engine in (first, late):
        await engine.engine.close()
    await server.stop()


async def test_blocks_after_one_that_is_not_known_are_left_out():
    async with attached(FakeOptions(has_replay=False)) as (server, engine):
        server.ranks[0].num_lost = 1
        await engine.ask(prompt(1), 1)
        # Its first blocks are stored already, and nobody tells of them again.
        await engine.ask(prompt(1) + prompt(2), 1)
        await engine.ask(prompt(3), 1)
        await until(lambda: engine.told == keys(prompt(3)))
        assert engine.engine._events._translator.num_left_out > 0


async def test_garbage_between_events_is_passed_over_or_forgets_but_never_ends_the_following():
    async with attached() as (server, engine):
        rank = server.ranks[0]
        await engine.ask(prompt(1), 1)
        await until(lambda: engine.told == keys(prompt(1)))
        rank.pub.send_multipart([b"kv@w0", b"no number", b"x"])
        rank.pub.send_multipart([b"kv@w0"])
        rank.send(1, b"\xc1 no batch")
        rank.sent.append(b"\xc1 no batch")
        await until(lambda: engine.told == set())
        await engine.ask(prompt(2), 1)
        await until(lambda: engine.told == keys(prompt(2)))
        assert engine.deaths == []


async def test_other_topics_are_not_heard():
    server = await FakeVllm().start()
    (attached_server,) = parse_servers((f"{server.attach},topic=kv@other",))
    engine = await start_attached(server, server=replace(attached_server, replay=None), **QUIET)
    await engine.ask(prompt(1), 1)
    assert await engine.engine.resident() == set()
    await engine.engine.close()
    await server.stop()


async def test_endpoint_where_nobody_publishes_is_told_by_name():
    server = await FakeVllm(FakeOptions(has_events=False)).start()
    (attached_server,) = parse_servers((f"{server.attach},events=tcp://127.0.0.1:9",))
    with pytest.raises(EngineError, match=r"--attach http://.*: events=tcp://127.0.0.1:9: nobody publishes there"):
        await start_attached(server, server=attached_server, events_timeout_s=0.1)
    await server.stop()


async def test_blocks_of_another_size_are_found_with_the_first_event_and_end_cache_awareness(
    caplog: pytest.LogCaptureFixture,
):
    async with attached(FakeOptions(event_block_size=64)) as (_, engine):
        await engine.ask(prompt(1), 1)
        await until(lambda: not engine.engine.stats().is_cache_aware)
        assert (engine.told, await engine.engine.resident()) == (set(), set())
        assert (await engine.ask(prompt(2), 1)).finish is FinishReason.LENGTH
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        f"{engine.engine._server.worker} is not cache-aware, only hints count: "
        "engine's blocks have 64 tokens, announced were 32"
    ]


async def test_blocks_of_another_size_than_the_other_servers_are_found_at_the_start(caplog: pytest.LogCaptureFixture):
    server = await FakeVllm(FakeOptions(block_size=16)).start()
    (attached_server,) = parse_servers((server.attach,))
    engine = await start_attached(server, server=attached_server, scheme=SCHEME, **QUIET)
    assert engine.info is not None
    assert not engine.info.is_cache_aware
    assert "the engine's blocks have 16 tokens, those of the others 32" in caplog.text
    await engine.engine.close()
    await server.stop()


async def test_blocks_of_16_tokens():
    async with attached(FakeOptions(block_size=16, num_blocks=128)) as (_, engine):
        await engine.ask(prompt(1), 1)
        assert await engine.engine.resident() == keys(prompt(1), scheme=CacheScheme("tiny", 16))
        assert (await engine.ask(prompt(1), 1)).cached_tokens == 96


async def test_a_server_without_events_is_used_with_hints_alone(caplog: pytest.LogCaptureFixture):
    async with attached(FakeOptions(has_events=False)) as (_, engine):
        assert engine.info is not None
        assert (engine.info.tells_blocks, engine.info.is_cache_aware) == (False, True)
        assert (await engine.ask(prompt(1), 1)).cached_tokens == 0
        assert await engine.engine.resident() == set()
    assert caplog.text.count("publishes no KV events: only hints tell what it holds") == 1


async def test_adapters_have_blocks_of_their_own():
    async with attached(FakeOptions(adapters=("poet",))) as (server, engine):
        await engine.ask(prompt(1), 1, adapter="poet", salt="a")
        assert await engine.engine.resident() == keys(prompt(1), adapter="poet", salt="a")
        assert (await engine.ask(prompt(1), 1)).cached_tokens == 0
        server.options = replace(server.options, adapters=("poet", "bard"))
        assert (await engine.ask(prompt(1), 1, adapter="bard")).finish is FinishReason.LENGTH
        with pytest.raises(InvalidRequest, match="no adapter 'nobody'"):
            await engine.ask(prompt(1), 1, adapter="nobody")


async def test_ranks_are_apart_from_each_other():
    server = await FakeVllm(FakeOptions(num_ranks=2)).start()
    first, second = parse_servers((f"{server.attach},ranks=2",))
    engines = [await start_attached(server, server=one, **QUIET) for one in (first, second)]
    await engines[1].ask(prompt(1), 1)
    assert [await engine.engine.resident() for engine in engines] == [set(), keys(prompt(1))]
    assert (await engines[0].ask(prompt(1), 1)).cached_tokens == 0
    assert (await engines[1].ask(prompt(1), 1)).cached_tokens == 3 * BLOCK_SIZE
    assert [headers["X-data-parallel-rank"] for headers in server.headers] == ["1", "0", "1"]
    for engine in engines:
        await engine.engine.close()
    await server.stop()


# Other processes.


async def test_a_process_that_came_in_between_is_noticed_by_its_events():
    server = await FakeVllm().start()
    engine = await start_attached(server, **QUIET)
    look_away(engine)
    await engine.ask(prompt(1), 1)
    await until(lambda: engine.told == keys(prompt(1)))
    server = await server.restarted()
    await until(lambda: engine.deaths)
    (death,) = engine.deaths
    assert "another process publishes its events" in death
    assert engine.told == set()
    with pytest.raises(EngineError, match="another process"):
        await engine.ask(prompt(1), 1)
    await engine.engine.close()
    await server.stop()


async def test_a_process_that_came_in_between_is_noticed_by_its_metrics():
    server = await FakeVllm(FakeOptions(has_events=False)).start()
    engine = await start_attached(server, poll_s=0.01)
    server.num_failing_metrics = 3
    await until(lambda: server.num_failing_metrics == 0)
    server.started_at_s += 1.0
    await until(lambda: engine.deaths)
    assert engine.deaths[0].endswith("another process answers: it began at another time")
    await engine.engine.close()
    await server.stop()


async def test_without_replay_a_broken_connection_makes_all_forgotten():
    server = await FakeVllm(FakeOptions(has_replay=False)).start()
    engine = await start_attached(server, **QUIET)
    look_away(engine)
    await engine.ask(prompt(1), 1)
    await until(lambda: engine.told == keys(prompt(1)))
    server = await server.restarted()
    await until(lambda: engine.told == set())
    await engine.engine.close()
    await server.stop()


async def test_a_server_that_vanishes_under_a_request_fails_it_and_is_lost():
    server = await FakeVllm().start()
    engine = await start_attached(server, **QUIET)
    stream = engine.engine.generate(engine.request(prompt(1), 900))
    await anext(stream)
    await server.stop()
    with pytest.raises(EngineError, match="broke"):
        async for _ in stream:
            pass
    await until(lambda: engine.deaths)
    await engine.engine.close()


async def test_a_server_whose_engine_is_dead_is_lost():
    async with attached(poll_s=0.01) as (server, engine):
        server.is_healthy = False
        await until(lambda: engine.deaths)
        assert engine.deaths == [f"server {engine.engine._server.worker}: the server says that its engine is dead"]


async def test_a_server_that_hangs_is_lost_after_some_looks_and_its_requests_fail():
    async with attached(poll_s=0.01, timeout_s=0.1) as (server, engine):
        stream = engine.engine.generate(engine.request(prompt(1), 900))
        await anext(stream)
        server.is_hanging = True
        await until(lambda: engine.deaths)
        assert "3 looks in a row found no answer" in engine.deaths[0]
        with pytest.raises(EngineError):
            async for _ in stream:
                pass
        server.is_hanging = False


async def test_a_server_that_hangs_is_out_of_touch_until_it_answers_again():
    async with attached() as (server, engine):
        await until(lambda: engine.engine.stats().is_in_touch)
        server.is_hanging = True
        await until(lambda: not engine.engine.stats().is_in_touch)
        server.is_hanging = False
        await until(lambda: engine.engine.stats().is_in_touch)
        assert engine.deaths == []


async def test_load_of_others_is_told_apart():
    async with attached(poll_s=0.01) as (server, engine):
        server.num_foreign_running = 5
        await until(lambda: engine.engine.stats().num_foreign == 5)
        stats = engine.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        server.num_foreign_running = 0
        await until(lambda: engine.engine.stats().num_foreign == 0)


# Lives.


@asynccontextmanager
async def attachment(server: FakeVllm, **more: Any) -> AsyncIterator[tuple[Attachment, MemoryDirectory]]:
    directory = MemoryDirectory(SCHEME, asyncio.get_running_loop().time)
    (attached_server,) = parse_servers((server.attach,))
    options = AttachmentOptions(b"secret", b"fingerprint", lease_s=5.0, heartbeat_s=1.0, seed=0)
    worker = Attachment(AttachedOptions(attached_server, SCHEME, "tiny", **more), options, directory)
    try:
        yield worker, directory
    finally:
        await worker.close()


async def test_a_server_that_comes_back_is_another_life_of_its_worker_and_holds_nothing():
    server = await FakeVllm().start()
    async with attachment(server) as (worker, directory):
        first = await worker.start()
        assert first is not None
        engine = worker._life.host._engine
        async for _ in engine.generate(EngineUnderTest().request(prompt(1), 1)):
            pass
        async with asyncio.timeout(60.0):
            while await directory.resident(worker.worker) != keys(prompt(1)):
                await asyncio.sleep(0.01)
        (before,) = await directory.workers()
        await server.stop()
        await until(lambda: worker.info is None)
        # The life is over before all that belonged to it is put away.
        async with asyncio.timeout(60.0):
            while await directory.workers():
                await asyncio.sleep(0.01)
        assert await directory.workers() == []
        with pytest.raises(ConnectionRefusedError):
            await worker.open_channel(first.instance)
        server = await FakeVllm(server.options, server.port, server.event_ports, 2.0).start()
        await until(lambda: worker.info is not None)
        (after,) = await directory.workers()
        assert after.info.instance != before.info.instance
        assert after.epoch != before.epoch
        assert await directory.resident(worker.worker) == set()
        assert worker.num_lives == 2
    await server.stop()


async def test_a_server_that_is_not_up_yet_joins_when_it_is():
    server = await FakeVllm().start()
    await server.stop()
    async with attachment(server) as (worker, directory):
        assert await worker.start() is None
        assert await directory.workers() == []
        server = await FakeVllm(server.options, server.port, server.event_ports).start()
        await until(lambda: worker.info is not None)
        (record,) = await directory.workers()
        assert record.info.worker == f"127.0.0.1:{server.port}"
    await server.stop()


async def test_a_server_with_another_model_or_tokenizer_is_refused_by_name():
    server = await FakeVllm().start()
    async with attachment(server, probe=ParityProbe("abc", (1, 2))) as (worker, _):
        with pytest.raises(ConfigError, match='--tokenizer: not the server\'s own: of "abc" it makes 3 tokens'):
            await worker.start()
    with pytest.raises(ConfigError, match="it serves tiny, and not llama"):
        await start_attached(server, model="llama")
    await server.stop()


# Answers.


async def _broken(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'data: {"choices":[{"token_ids":[1],"finish_reason":null}]}\n\n')
    assert request.transport is not None
    request.transport.abort()
    return response


def _plain(status: int, text: str, **headers: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(
            status=status, text=text, headers={name.replace("_", "-"): v for name, v in headers.items()}
        )

    return answer


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (_plain(200, "<html>It works!</html>"), EngineError, "no stream of events: <html>It works"),
        (_plain(200, ""), EngineError, "ended the answer without a reason"),
        (_plain(200, "data: [DONE]\n\n"), EngineError, "ended the answer without a reason"),
        (_plain(200, 'data: {"choices":[{"token_ids":[7]}]}\n\n'), EngineError, "without a reason"),
        (_plain(500, "<html>oops</html>"), EngineError, r"failed on this request \(500\)"),
        (_plain(401, '{"error":"Unauthorized"}'), EngineError, "refuses our API key"),
        (_plain(429, '{"error":{"message":"slow"}}', Retry_After="3"), Overloaded, r"busy \(429\): slow"),
        (_plain(503, ""), Overloaded, r"busy \(503\)"),
        (_plain(307, "", Location="http://127.0.0.1:9/elsewhere"), EngineError, r"\(307\)"),
        (_broken, EngineError, "the connection to http://.* broke"),
    ],
)
async def test_answers_that_are_none_fail_the_request_and_not_the_server(
    answer: Any, error: type[KvrouteError], said: str
):
    async with attached() as (server, engine):
        server.answer_with = answer
        with pytest.raises(error, match=said) as failed:
            await engine.ask(prompt(1), 4)
        assert getattr(failed.value, "retry_after_s", None) == (3.0 if "slow" in said else None)
        server.answer_with = None
        assert (await engine.ask(prompt(1), 4)).finish is FinishReason.LENGTH
        assert engine.deaths == []
        assert engine.engine.stats().num_waiting == 0


async def test_a_cancelled_request_is_freed_on_the_server_before_and_after_its_first_token():
    async with attached(FakeOptions(max_num_seqs=1)) as (server, engine):
        running, waiting = engine.request(prompt(1), 900), engine.request(prompt(2), 900)
        first, second = engine.engine.generate(running), engine.engine.generate(waiting)
        await anext(first)
        reading = asyncio.create_task(anext(second))
        await until(lambda: server.num_open == 2)
        await engine.engine.cancel(waiting.request)
        assert (await reading).finish is FinishReason.ABORT
        await until(lambda: server.num_open == 1)
        await engine.engine.cancel(running.request)
        assert [delta.finish async for delta in first][-1] is FinishReason.ABORT
        await until(lambda: server.num_open == 0)
        stats = server.ranks[0].engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)


async def test_a_server_that_does_not_tell_what_its_cache_gave_is_told_of_once(caplog: pytest.LogCaptureFixture):
    async with attached(FakeOptions(has_prompt_tokens_details=False)) as (_, engine):
        for _ in range(2):
            deltas = [delta async for delta in engine.engine.generate(engine.request(prompt(1), 4))]
            assert (deltas[-1].finish, {delta.cached_tokens for delta in deltas}) == (FinishReason.LENGTH, {None})
    assert caplog.text.count("--enable-prompt-tokens-details") == 1


async def test_a_server_without_metrics_or_reset_is_served_with_what_it_has():
    async with attached(FakeOptions(has_metrics=False, is_dev_mode=False)) as (_, engine):
        assert engine.info is not None
        assert engine.info.num_blocks == 8 * 1024 // BLOCK_SIZE
        with pytest.raises(EngineError, match="lets nobody reset its cache"):
            await engine.engine.reset_cache()


async def test_key_is_sent_and_shows_nowhere(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    server = await FakeVllm(FakeOptions(api_key="sk-right", has_events=False)).start()
    (right,), (wrong,) = (parse_servers((server.attach,), key) for key in ("sk-right", "sk-wrong"))
    engine = await start_attached(server, server=right, **QUIET)
    await engine.ask(prompt(1), 1)
    with pytest.raises(EngineError, match=r"refuses our API key \(401\)") as refused:
        await start_attached(server, server=wrong, **QUIET)
    await engine.engine.close()
    await server.stop()
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer sk-right"]
    assert "sk-" not in caplog.text + str(refused.value)
