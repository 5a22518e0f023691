"""Two real vLLM workers in Ray actors behind a real store: routing, caches and answers, in float32."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from router import cluster, launch
from router.batch import BatchLimits, prepare_batch, run_prepared
from router.requests import RequestTrace
from router.serving import Serving
from shared.config import Settings
from shared.errors import TransientError
from shared.hashing import block_keys, num_usable_blocks, pack_tokens, root_key
from shared.types import WorkerId
from tests.support.batches import chat_row, read_records, write_rows
from tests.support.rack import ask

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]

SETTINGS = Settings(
    model="tiny",
    workers=2,
    dtype="float32",
    max_num_seqs=4,
    kv_cache_blocks=200,
    max_model_len=2048,
    lease_s=10.0,  # no stall of a busy machine is as long
    heartbeat_s=0.5,
)
ANSWER_TOKENS = 48


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving() -> AsyncIterator[Serving]:
    async with launch.launched(SETTINGS, lambda line: None) as serving:
        yield serving


def prompt(prefix: int, tail: int, num_prefix_tokens: int = 640) -> list[int]:
    """Token ids of the tiny model's bytes: a beginning shared by all of the same `prefix`, and an end of its own."""
    shared, own = random.Random(prefix), random.Random(f"{prefix}:{tail}")
    return [shared.randrange(3, 259) for _ in range(num_prefix_tokens)] + [own.randrange(3, 259) for _ in range(40)]


async def cold_answer(serving: Serving, name: str, token_ids: list[int]) -> tuple[int, ...]:
    """The answer of an engine that has never seen the prompt: under a salt of its own no block is shared."""
    answer, trace = await ask(serving.router, name, token_ids, ANSWER_TOKENS, salt=f"cold-{name}")
    assert trace.cached_tokens == 0
    return answer


async def directory_holds(serving: Serving, worker: WorkerId, token_ids: list[int]) -> int:
    """Wait until the directory shows every full block of the prompt on the worker; how many of them it can serve."""
    keys = block_keys(pack_tokens(token_ids), SETTINGS.block_size, root_key(serving.scheme))
    directory = serving.router.directory
    async with asyncio.timeout(120.0):
        while True:
            match = (await directory.match(keys, [worker])).get(worker)
            if match is not None and match.num_blocks == len(keys):
                return num_usable_blocks(len(token_ids), SETTINGS.block_size)
            await asyncio.sleep(0.02)


async def forget_hints(serving: Serving) -> None:
    """Leave only the directory to tell who holds what."""
    for worker in serving.router.fleet.worker_to_instance:
        serving.router.hints.forget(worker)


@pytest.mark.parametrize("tails", [(1, 2), (2, 1)], ids=["forwards", "backwards"])
async def test_second_request_with_a_prefix_goes_to_its_holder(serving: Serving, tails: tuple[int, int]) -> None:
    prefix = 100 + tails[0]
    first, second = (prompt(prefix, tail) for tail in tails)
    expected = [
        await cold_answer(serving, f"cold-{prefix}-{tail}", ids)
        for tail, ids in zip(tails, (first, second), strict=True)
    ]

    first_answer, first_trace = await ask(serving.router, f"{prefix}-first", first, ANSWER_TOKENS)
    assert first_trace.worker is not None
    await directory_holds(serving, first_trace.worker, first)
    await forget_hints(serving)
    second_answer, trace = await ask(serving.router, f"{prefix}-second", second, ANSWER_TOKENS)

    assert trace.worker == first_trace.worker
    assert (trace.matched_tokens, trace.cached_tokens) == (640, 640)
    assert [first_answer, second_answer] == expected
    assert len(set(second_answer)) >= 16, "a model that repeats itself proves nothing"
    assert expected[0] != expected[1]


async def test_block_aligned_repeat_recomputes_its_last_block(serving: Serving) -> None:
    aligned = prompt(7, 1)[:640]
    _, first = await ask(serving.router, "aligned-1", aligned, ANSWER_TOKENS)
    assert first.worker is not None
    num_usable = await directory_holds(serving, first.worker, aligned)
    await forget_hints(serving)
    _, trace = await ask(serving.router, "aligned-2", aligned, ANSWER_TOKENS)
    assert num_usable == 9
    assert (trace.matched_tokens, trace.cached_tokens) == (9 * 64, 9 * 64)


async def test_restarted_worker_is_never_matched_with_what_it_held_before(serving: Serving) -> None:
    ids, other = prompt(20, 1), prompt(20, 2)
    expected = await cold_answer(serving, "cold-20-2", other)
    _, before = await ask(serving.router, "before", ids, ANSWER_TOKENS)
    assert before.worker is not None
    await directory_holds(serving, before.worker, ids)
    old_instance = serving.router.fleet.worker_to_instance[before.worker]

    pid = await cluster.call(serving.actors[before.worker].pid, timeout_s=240.0, what="pid")
    engine = psutil.Process(pid).children(recursive=True)
    assert engine
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(600.0):
        while serving.router.fleet.worker_to_instance.get(before.worker) in (old_instance, None):
            # Requests go on meanwhile, on whoever lives.
            _, during = await ask(serving.router, f"during-{random.random()}", prompt(21, 1), 4)
            assert during.cached_tokens in (0, 640)
            await asyncio.sleep(0.2)

    assert not [one for one in engine if one.is_running() and one.status() != psutil.STATUS_ZOMBIE], "it holds memory"

    keys = block_keys(pack_tokens(ids), SETTINGS.block_size, root_key(serving.scheme))
    assert before.worker not in await serving.router.directory.match(keys, [before.worker])
    answer, trace = await ask(serving.router, "after", other, ANSWER_TOKENS)
    assert (trace.matched_tokens, trace.cached_tokens) == (0, 0)
    assert answer == expected


async def test_killed_engine_process_is_replaced_and_no_request_is_lost(serving: Serving) -> None:
    pid = await cluster.call(serving.actors[WorkerId("w0")].pid, timeout_s=240.0, what="pid")
    children = psutil.Process(pid).children(recursive=True)
    engine = next(
        child
        for child in children
        if "EngineCore" in " ".join(child.cmdline()) or "spawn_main" in " ".join(child.cmdline())
    )
    asking = [asyncio.create_task(ask(serving.router, f"kill-{tail}", prompt(30 + tail, 1), 4)) for tail in range(6)]
    engine.kill()
    for task in asking:
        # Nobody is left waiting: an answer, or one clear error where the worker died in mid-stream.
        with contextlib.suppress(TransientError):
            answer, _ = await task
            assert len(answer) == 4
    instance = serving.router.fleet.worker_to_instance.get(WorkerId("w0"))
    async with asyncio.timeout(600.0):
        while serving.router.fleet.worker_to_instance.get(WorkerId("w0")) in (None, instance):
            await asyncio.sleep(0.2)


async def test_batch_completes_when_the_store_is_killed_in_the_middle(serving: Serving, tmp_path: Path) -> None:
    beginning = "a shared beginning " * 20
    rows = [chat_row(f"row-{index}", f"{beginning} {index % 5}", model="tiny", max_tokens=4) for index in range(60)]
    input_path, output_path = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    num_answered = 0

    def on_row(row: object, text: str | None, trace: RequestTrace) -> None:
        nonlocal num_answered
        num_answered += 1
        if num_answered == 15:
            assert serving.store is not None
            assert serving.store.pid is not None
            os.kill(serving.store.pid, signal.SIGKILL)

    with prepare_batch(input_path, output_path, served_model="tiny", resume=False) as prepared:
        report = await run_prepared(
            prepared,
            generate=serving.router.generate,
            tokenizer=serving.tokenizer,
            scheme=serving.scheme,
            max_model_len_tokens=serving.max_model_len_tokens,
            rng=random.Random(1),
            limits=BatchLimits(max_in_flight=8),
            on_row=on_row,
        )
    assert (report.num_ok, report.num_failed) == (60, 0)
    assert len(read_records(output_path)) == 60
