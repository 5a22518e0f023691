"""The request log: what a router has answered can be replayed, and nothing of it read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router import request_log
from router.policies import make_policy
from router.request_log import RequestLog, check_request_log
from router.requests import GenerateRequest, RequestTrace, ServiceClass
from router.simulation import FleetSpec, simulate
from router.traces import TraceRequest, read_trace
from router.workload import Workload, arrival_times_s, select
from shared.errors import ConfigError
from shared.hashing import block_keys, pack_tokens, root_key
from shared.telemetry import Metrics
from shared.types import RequestId, Sampling
from tests.support.rack import SCHEME, ask, prompt, rack

WALL_S = 1_700_000_000.0


def opened(path: Path) -> RequestLog:
    clock = asyncio.get_running_loop().time
    # As if the loop's clock had begun then.
    return RequestLog(path, block_size_tokens=SCHEME.block_size_tokens, wall_clock=lambda: WALL_S + clock())


def note(log: RequestLog, tail: int = 0, *, at_s: float = 0.0, **fields: Any) -> None:
    """Log a request whose first two blocks all share and that came at a time of the loop's clock."""
    packed = pack_tokens(prompt(1, 32, tail))
    log.note(
        GenerateRequest(RequestId("r"), packed, Sampling(max_tokens=9), **fields),
        block_keys(packed, SCHEME.block_size_tokens, root_key(SCHEME)),
        RequestTrace(received_at_s=at_s, num_output_tokens=7),
    )


def blocks(request: TraceRequest) -> list[bytes]:
    packed, size_bytes = request.token_ids(), 4 * SCHEME.block_size_tokens
    return [packed[at : at + size_bytes] for at in range(0, len(packed) - size_bytes + 1, size_bytes)]


async def test_what_a_router_has_answered_is_read_back_with_the_prefixes_that_it_shared(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    async with opened(path) as log, rack(2) as workers, workers.router(request_log=log) as router:
        prompts = [prompt(1, 160, 0), prompt(1, 160, 1), prompt(2, 160, 2, num_tail_tokens=37), prompt(9, 0, 3, 5)]
        for index, token_ids in enumerate(prompts):
            await ask(router, f"r{index}", token_ids, 3 + index, tenant=f"t{index}", priority=index - 2)
    read = list(read_trace(path))
    assert [(one.num_prompt_tokens, one.num_output_tokens, one.tenant, one.priority) for one in read] == [
        (180, 3, "t0", -2),
        (180, 4, "t1", -1),
        (197, 5, "t2", 0),
        (5, 6, "t3", 1),
    ]
    first, second, third, short = map(blocks, read)
    assert [one == other for one, other in zip(first, second, strict=True)] == [True] * 10 + [False]
    assert not set(first) & set(third)
    assert short == []


def test_log_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    async def write() -> None:
        async with opened(path) as log:
            for index in range(20):
                note(log, index, at_s=index)

    asyncio.run(write())
    requests = select(read_trace(path), str(path), num_blocks=100, block_size_tokens=16)
    workload = Workload(requests, arrival_times_s(requests, rate_per_s=None, is_spread=False, rng=None))  # type: ignore[arg-type]
    result = simulate(FleetSpec(2, "13b-a100", block_size_tokens=16, num_blocks=100), make_policy("cost"), workload)
    assert [outcome.num_output_tokens for outcome in result.outcomes] == [7] * 20
    assert [round(outcome.arrived_at_s) for outcome in result.outcomes] == list(range(20))
    assert [outcome.cached_tokens for outcome in result.outcomes] == [0] + [32] * 19


@pytest.mark.parametrize(
    ("path", "number", "name"),
    [
        ("x/log.jsonl", 0, "x/log.jsonl"),
        ("x/log.jsonl", 1, "x/log.1.jsonl"),
        ("x/a.log.jsonl", 12, "x/a.log.12.jsonl"),
        ("log", 2, "log.2"),
    ],
)
def test_each_of_several_processes_has_a_log_of_its_own(path: str, number: int, name: str) -> None:
    assert request_log.log_of_process(Path(path), number) == Path(name)


async def test_times_are_those_of_arrival_and_lines_are_read_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    async with opened(path) as log:
        note(log, 1, at_s=30.0)
        note(log, 2, at_s=0.5, service_class=ServiceClass.BATCH)
    written = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["timestamp_s"] for line in written] == pytest.approx([WALL_S + 30.0, WALL_S + 0.5])
    read = list(read_trace(path))
    assert [one.service_class for one in read] == [ServiceClass.BATCH, ServiceClass.INTERACTIVE]
    assert [one.line for one in read] == [2, 1]


async def test_nothing_of_a_prompt_is_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    async with opened(path) as log:
        note(log)
    (line,) = map(json.loads, path.read_bytes().splitlines())
    assert set(line) == {
        "timestamp_s",
        "prompt_tokens",
        "output_tokens",
        "max_tokens",
        "block_size",
        "block_hashes",
        "tenant",
        "priority",
        "service_class",
    }
    assert [len(one) for one in line["block_hashes"]] == [16, 16, 16]
    assert path.stat().st_mode & 0o077 == 0


async def test_log_is_gone_on_with_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    async with opened(path) as log:
        note(log, 1)
        note(log, 2)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:-30])
    async with opened(path) as log:
        note(log, 3)
    assert path.read_bytes().startswith(first)
    assert len(list(read_trace(path))) == 2


async def test_log_of_one_torn_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"timestamp_s":1.0,"prom')
    async with opened(path) as log:
        note(log)
    assert len(list(read_trace(path))) == 1


@pytest.mark.parametrize("content", [b"Dear diary", b"[1, 2]\n", b"\x00\x01"])
async def test_file_that_is_something_else_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "diary.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--request-log: .*diary.txt is no request log"):
        await opened(path).__aenter__()
    assert path.read_bytes() == content


async def test_file_that_cannot_be_written_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--request-log: cannot write .*: No such file or directory"):
        await opened(tmp_path / "nowhere" / "log.jsonl").__aenter__()
    path = tmp_path / "log.jsonl"
    async with opened(path):
        with pytest.raises(ConfigError, match="another process writes it"):
            await opened(path).__aenter__()


@contextlib.contextmanager
def full_disk(room_bytes: int) -> Iterator[None]:
    """The kernel takes no byte more in any file than these."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_disk_that_takes_nothing_is_found_at_the_start_and_the_log_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    async with opened(path) as log:
        note(log)
    before = path.read_bytes()
    with (
        full_disk(len(before) + 100),
        pytest.raises(ConfigError, match=r"--request-log: cannot write .*: File too large"),
    ):
        await check_request_log(path)
    assert path.read_bytes() == before
    await check_request_log(path)
    assert path.read_bytes() == before


async def test_device_that_takes_all_and_keeps_nothing_is_fine() -> None:
    await check_request_log(Path("/dev/null"))


async def test_disk_that_fills_up_costs_lines_and_no_answers_and_is_told_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.jsonl"
    metrics = Metrics()
    async with opened(path) as log, rack(1) as workers, workers.router(request_log=log) as router:
        log.expose(metrics)
        await ask(router, "before", prompt(1, 160, 0))
        await log._write()
        with full_disk(path.stat().st_size + 10):
            for number in range(3):
                await ask(router, f"full-{number}", prompt(1, 160, number))
                await log._write()
        await ask(router, "after", prompt(1, 160, 9))
    assert len(list(read_trace(path))) == 2
    assert "kvroute_request_log_left_out_total 3" in metrics.render().decode()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"request log {path}: requests are left out: File too large"
    ]


async def test_lines_that_wait_for_a_slow_disk_are_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "_MAX_WAITING_BYTES", 1000)
    async with opened(tmp_path / "log.jsonl") as log:
        for index in range(50):
            note(log, index)
        assert log.num_left_out > 40
    assert "is written too slowly" in caplog.text
    assert len(list(read_trace(tmp_path / "log.jsonl"))) == 50 - log.num_left_out


async def test_requests_without_an_answer_are_not_logged_and_those_cut_short_are(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    async with (
        opened(path) as log,
        rack(1, token_s=0.005) as workers,
        workers.router(request_log=log, queue_timeout_s=0.01) as router,
    ):
        cut = GenerateRequest(RequestId("cut"), pack_tokens(prompt(1, 64, 0)), Sampling(max_tokens=1000))
        stream = router.generate(cut, trace := RequestTrace())
        async for _ in stream:
            break
        await stream.aclose()
        await workers.stop_worker("w0")
        with pytest.raises(Exception, match="no worker"):
            await ask(router, "unanswered", prompt(1, 64, 1))
    (line,) = read_trace(path)
    assert line.num_output_tokens == trace.num_output_tokens >= 1
