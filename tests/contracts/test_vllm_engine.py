"""What holds for a real vLLM engine alone: its death, its start, its stock pool, and what it preempts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import ConfigError, EngineError, PinRefused, UnknownPin
from tests.contracts.test_engine import keys, prompt
from tests.support.engines import (
    BLOCK_SIZE,
    CONTEXT_TOKENS,
    ON_VLLM,
    SCHEME,
    EngineUnderTest,
    assert_empty,
    start_vllm,
)
from tests.support.transport import until
from worker.engines.base import EngineDelta

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@ON_VLLM
async def test_a_full_reset_takes_pins_along_and_one_that_vllm_refuses_leaves_them(any_engine: EngineUnderTest):
    engine = any_engine
    if engine.info is not None and engine.info.pin_budget_blocks == 0:
        pytest.skip("a stock pool keeps no pins")
    llm = engine.engine._llm
    pinned = await engine.engine.pin("a", prompt(46, 2 * BLOCK_SIZE))
    request = engine.request(prompt(46, 2 * BLOCK_SIZE), max_tokens=900)
    async with aclosing(engine.engine.generate(request)) as deltas:
        await anext(deltas)
        assert not await llm.reset_prefix_cache()
        assert await engine.engine.pins() == [pinned]
        assert keys(prompt(46, 2 * BLOCK_SIZE)) <= await engine.engine.resident()
    await engine.engine.cancel(request.request)
    await engine.ask(prompt(99, 5), max_tokens=1)
    num_resets = engine.num_resets
    assert await llm.reset_prefix_cache()
    await until(lambda: engine.num_resets == num_resets + 1)
    assert (await engine.engine.pins(), engine.told, await engine.engine.resident()) == ([], set(), set())


@ON_VLLM
async def test_a_stock_pool_keeps_no_pins_and_says_why(any_engine: EngineUnderTest):
    engine = any_engine
    if engine.info is not None and engine.info.eviction != "stock":
        pytest.skip("this pool keeps pins")
    why = "since its eviction is stock"
    with pytest.raises(PinRefused, match=f"pin 'a': this engine's pool keeps no pins, {why}"):
        await engine.engine.pin("a", prompt(49, BLOCK_SIZE))
    with pytest.raises(UnknownPin, match=f"no pin 'a'; this engine's pool keeps none, {why}"):
        await engine.engine.unpin("a")
    assert await engine.engine.pins() == []


async def exhaust(deltas: AsyncIterator[EngineDelta]) -> None:
    async for _ in deltas:
        pass


async def test_a_killed_engine_is_told_once_and_fails_its_requests_before_vllm_does(tmp_path: Path):
    engine = await start_vllm(tmp_path, max_num_seqs=1)
    try:
        (process,) = engine.engine._llm.engine_core.resources.engine_manager.processes
        deltas = engine.engine.generate(engine.request(prompt(14, 50), max_tokens=900))
        await anext(deltas)
        pin = asyncio.create_task(engine.engine.pin("a", prompt(14, 2 * BLOCK_SIZE)))
        await until(lambda: engine.engine.stats().num_waiting == 1)
        os.kill(process.pid, signal.SIGKILL)
        # These words are those of our own watch. vLLM's notice, which can take seconds longer, would have come first to
        # a request that ends without them.
        with pytest.raises(EngineError, match="the engine's process ended with SIGKILL"):
            await exhaust(deltas)
        with pytest.raises(EngineError, match="the engine's process ended with SIGKILL"):
            await pin
        assert engine.deaths == ["the engine's process ended with SIGKILL"]
        for dead_call in (
            engine.engine.resident,
            engine.engine.reset_cache,
            engine.engine.pins,
            lambda: engine.engine.pin("a", prompt(14, BLOCK_SIZE)),
            lambda: engine.engine.unpin("a"),
            lambda: engine.ask([5, 6]),
        ):
            with pytest.raises(EngineError, match="SIGKILL"):
                await dead_call()
        await engine.engine.cancel("request-1")
    finally:
        await engine.engine.close()
    assert len(engine.deaths) == 1


async def test_an_engine_that_hangs_is_killed(tmp_path: Path):
    engine = await start_vllm(tmp_path)
    try:
        (process,) = engine.engine._llm.engine_core.resources.engine_manager.processes
        deltas = engine.engine.generate(engine.request(prompt(15, 50), max_tokens=900))
        await anext(deltas)
        os.kill(process.pid, signal.SIGSTOP)
        # Impatient only now: a machine may be slow enough to make an honest step look like this one.
        engine.engine._progress.cancel()
        engine.engine._options = replace(engine.engine._options, step_timeout_s=0.5)
        engine.engine._progress = asyncio.create_task(engine.engine._watch_progress())
        with pytest.raises(EngineError, match="the engine's process ended with SIGKILL"):
            async with asyncio.timeout(120.0):
                await exhaust(deltas)
        assert len(engine.deaths) == 1
    finally:
        await engine.engine.close()


async def test_a_failed_start_names_the_cause(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "llama"}')
    from worker.engines.vllm import VllmEngine
    from worker.engines.vllm_options import VllmOptions

    engine = VllmEngine(VllmOptions(tmp_path, SCHEME), lambda change: None, lambda reason: None)
    with pytest.raises(EngineError, match="NoSuchModel"):
        await engine.start()


async def test_a_start_that_fails_in_the_engines_process_names_the_cause_too(tmp_path: Path):
    with pytest.raises(EngineError, match="vLLM did not start: ValueError: Available memory on node"):
        await start_vllm(tmp_path, kv_cache_blocks=None, kv_cache_bytes=1 << 50)


async def test_a_pool_too_small_for_the_context_is_refused_before_the_start(tmp_path: Path):
    with pytest.raises(ConfigError, match="--kv-cache-blocks: 4 blocks of 32 tokens hold 128 tokens, less than one"):
        await start_vllm(tmp_path, kv_cache_blocks=4)


async def test_a_budget_for_pins_without_room_for_a_request_is_refused_before_the_start(tmp_path: Path):
    with pytest.raises(ConfigError, match="--pin-budget-blocks: 33 of 64 blocks leave no room for one request"):
        await start_vllm(tmp_path, pin_budget_blocks=33)


async def test_a_budget_for_pins_is_checked_against_the_blocks_that_bytes_make(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--pin-budget-blocks: 32 of \d+ blocks leave no room for one request"):
        await start_vllm(tmp_path, kv_cache_blocks=None, kv_cache_bytes=1 << 20, pin_budget_blocks=32)


BLOCK_BYTES = BLOCK_SIZE * 512
"""Of the tiny model in float32."""
NUM_LONGEST_BLOCKS = CONTEXT_TOKENS // BLOCK_SIZE


async def test_bytes_too_few_for_the_context_are_refused_before_the_start(tmp_path: Path):
    message = (
        f"--kv-cache-bytes: {NUM_LONGEST_BLOCKS * BLOCK_BYTES} bytes hold 31 blocks of 32 tokens, 992 tokens, "
        f"less than one request of --max-model-len 1024; {(NUM_LONGEST_BLOCKS + 1) * BLOCK_BYTES} bytes"
    )
    with pytest.raises(ConfigError, match=message):
        await start_vllm(tmp_path, kv_cache_blocks=None, kv_cache_bytes=NUM_LONGEST_BLOCKS * BLOCK_BYTES)


async def test_a_context_over_the_models_own_is_refused_before_the_start(tmp_path: Path):
    message = "--max-model-len: 99999 tokens are more than the model's own context, 4096$"
    with pytest.raises(ConfigError, match=message):
        await start_vllm(tmp_path, max_model_len=99_999, kv_cache_blocks=4000)


async def test_an_engine_that_runs_out_of_blocks_preempts_and_loses_no_request(tmp_path: Path):
    # The fewest bytes that are taken: what the model has of blocks is one longest request.
    engine = await start_vllm(tmp_path, kv_cache_blocks=None, kv_cache_bytes=(NUM_LONGEST_BLOCKS + 1) * BLOCK_BYTES)
    try:
        assert engine.info is not None
        assert engine.info.num_blocks == NUM_LONGEST_BLOCKS
        # Five prompts of six blocks fit at once, and their answers of three blocks more do not.
        prompts = [prompt(3200 + number, 6 * BLOCK_SIZE - 5) for number in range(8)]
        alone = [(await engine.ask(token_ids, max_tokens=90)).token_ids for token_ids in prompts]
        assert all(len(set(token_ids)) >= 16 for token_ids in alone), "a model that repeats itself proves nothing"
        await engine.engine.reset_cache()
        together = await asyncio.gather(
            *(engine.ask(token_ids, max_tokens=90) for token_ids in prompts),
            engine.ask(prompt(3300, CONTEXT_TOKENS - 1), max_tokens=5),
        )
        assert [answer.token_ids for answer in together[:-1]] == alone
        assert len(together[-1].token_ids) == 1
        await assert_empty(engine)
        assert engine.told == await engine.engine.resident()
    finally:
        await engine.engine.close()


async def test_an_unknown_vllm_is_told_of_where_the_rule_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from worker.engines import vllm_scheduler
    from worker.engines.demo_model import prepare_model
    from worker.engines.vllm_launch import prepare_launch
    from worker.engines.vllm_options import VllmOptions

    monkeypatch.setattr(vllm_scheduler, "check_surface", lambda: "this vLLM is too new")
    options = VllmOptions(prepare_model("tiny", tmp_path), SCHEME, max_model_len=CONTEXT_TOKENS)
    prepared = await asyncio.to_thread(prepare_launch, options, tmp_path)
    assert (prepared.has_plugin, prepared.eviction) == (False, "stock (this vLLM is too new)")


async def test_a_model_with_a_sliding_window_is_declared_by_name_and_tells_of_no_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from worker.engines.demo_model import prepare_model

    folder = shutil.copytree(prepare_model("tiny", tmp_path), tmp_path / "windowed")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 2 * BLOCK_SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    engine = await start_vllm(tmp_path, model_dir=folder)
    try:
        assert engine.info is not None
        assert not engine.info.is_cache_aware
        await engine.ask(prompt(31, 6 * BLOCK_SIZE))
        assert (await engine.engine.resident(), engine.told) == (set(), set())
    finally:
        await engine.engine.close()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("worker")] == [
        f"model {SCHEME.model} is not cache-aware: its cache is not one group of full attention but sliding_window"
    ]
