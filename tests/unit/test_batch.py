"""A batch run from file to file, with a stand-in for the router."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.batch import BatchLimits, BatchReport, PreparedBatch, prepare_batch, run_prepared
from router.batch_file import BatchInput, check_input
from router.batch_journal import Journal
from router.batch_report import PossibleHits, quantile
from router.openai import Usage
from router.planned_run import FleetMeans, FleetView, no_fleet
from router.planner import Room
from router.progress import PLAIN_INTERVAL_S, Progress
from router.requests import Generated, GenerateRequest, RequestTrace, ServiceClass
from router.row_groups import Pace
from router.tokenizer import Tokenizer
from shared.errors import (
    AttemptsExhausted,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    NoWorker,
    OutputError,
    Overloaded,
    QueueFull,
    WorkerLost,
)
from shared.hashing import block_keys, num_usable_blocks, pack_tokens, root_key, unpack_tokens
from shared.types import CacheScheme, FinishReason, WorkerId
from tests.support.batches import MODEL, chat_row, read_records, token_row, write_rows
from tests.support.fake_generate import FakeGenerate
from tests.support.tokenizers import EOS_TOKEN_ID, write_model_folder

SCHEME = CacheScheme(MODEL, 16)
CONTEXT_TOKENS = 256
FAST = BatchLimits(max_in_flight=4, max_attempts=3, backoff_s=0.001, max_backoff_s=0.002)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


class Bench:
    """An input, an output, and what runs one into the other."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.tokenizer = tokenizer
        self.texts: dict[str | None, str | None] = {}
        self.progress = io.StringIO()

    def echo(self, prompt: list[int]) -> list[int]:
        """An answer that repeats the last message of a rendered chat."""
        text = self.tokenizer.decode(prompt).removesuffix("\nassistant\n").rsplit("user\n", 1)[-1]
        return [*self.tokenizer.encode(text), EOS_TOKEN_ID]

    def fake(self, **options: Any) -> FakeGenerate:
        return FakeGenerate(self.echo, **options)

    def prepare(self, rows: list[Any], *, resume: bool = False) -> PreparedBatch:
        write_rows(self.input, rows)
        return prepare_batch(self.input, self.output, served_model=MODEL, resume=resume)

    async def run(
        self,
        rows: list[Any],
        generate: Any,
        *,
        resume: bool = False,
        limits: BatchLimits = FAST,
        service_class: ServiceClass = ServiceClass.INTERACTIVE,
        fleet: FleetView | None = no_fleet,
    ) -> BatchReport:
        with self.prepare(rows, resume=resume) as prepared:
            return await run_prepared(
                prepared,
                generate=generate,
                tokenizer=self.tokenizer,
                scheme=SCHEME,
                max_model_len_tokens=CONTEXT_TOKENS,
                rng=random.Random(0),
                limits=limits,
                service_class=service_class,
                on_row=lambda row, text, trace: self.texts.update({row.custom_id: text}),
                progress_stream=self.progress,
                fleet=fleet,
            )

    def records(self) -> dict[str, dict[str, Any]]:
        """Output by custom_id, or by line where there is none; every row at most once."""
        records = read_records(self.output)
        by_id = {record["custom_id"] or f"line {record['error']['line']}": record for record in records}
        assert len(by_id) == len(records)
        return by_id

    def error(self, custom_id: str) -> tuple[str, str | None]:
        record = self.records()[custom_id]
        assert record["response"] is None
        return record["error"]["code"], record["error"]["param"]


@pytest.fixture
def bench(tmp_path: Path, tokenizer: Tokenizer) -> Bench:
    return Bench(tmp_path, tokenizer)


async def test_rows_are_answered_and_counted(bench: Bench) -> None:
    fake = bench.fake()
    report = await bench.run([chat_row(f"r{number}", f"text é{number}") for number in range(10)], fake)
    assert bench.texts == {f"r{number}": f"text é{number}" for number in range(10)}
    prompts = [request.num_prompt_tokens for request in fake.requests]
    num_answer_tokens = len(bench.tokenizer.encode("text é0")) + 1
    assert (report.num_rows, report.num_ok, report.num_failed, report.num_skipped) == (10, 10, 0, 0)
    assert (report.prompt_tokens, report.completion_tokens) == (sum(prompts), 10 * num_answer_tokens)
    assert (dict(report.num_requests_by_worker), report.is_interrupted) == ({"w0": 5, "w1": 5}, False)
    assert report.ttft_p50_s is not None
    assert report.bound_ttft_p90_s is not None
    assert fake.num_live == 0


async def test_output_row_is_openais(bench: Bench) -> None:
    fake = bench.fake()
    await bench.run([chat_row("r", "Hi")], fake)
    record = bench.records()["r"]
    name = fake.requests[0].request.removeprefix("batch-").removesuffix("-1")
    body = record["response"]["body"]
    assert record == {
        "id": f"batch_req_{check_input(bench.input, served_model=MODEL).fingerprint}_1",
        "custom_id": "r",
        "response": {"status_code": 200, "request_id": f"batch-{name}-1", "body": body},
        "error": None,
    }
    assert body == {
        "id": f"chatcmpl-{name}-1",
        "object": "chat.completion",
        "created": body["created"],
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": fake.requests[0].num_prompt_tokens,
            "completion_tokens": 3,
            "total_tokens": fake.requests[0].num_prompt_tokens + 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_request_carries_salt_priority_and_sampling(bench: Bench) -> None:
    fake = bench.fake()
    await bench.run([token_row("r", [5, 6, 7], cache_salt="s", priority=3, temperature=0, max_tokens=2)], fake)
    (request,) = fake.requests
    assert (unpack_tokens(request.token_ids), request.salt, request.priority) == ([5, 6, 7], "s", 3)
    assert (request.sampling.max_tokens, request.sampling.is_greedy) == (2, True)


async def test_faulty_rows_become_records_and_the_rest_runs_on(bench: Bench) -> None:
    rows = [
        "{",
        {"method": "POST"},
        chat_row("ok1"),
        {**chat_row("method"), "method": "GET"},
        {**chat_row("url"), "url": "/v1/other"},
        {**chat_row("body"), "body": 5},
        chat_row("model", model="other"),
        chat_row("tools", tools=[]),
        chat_row("n", n=2),
        chat_row("stream", stream=True),
        chat_row("long", "x" * CONTEXT_TOKENS),
        chat_row("too_much", max_tokens=CONTEXT_TOKENS),
        {**chat_row("template"), "body": {"model": MODEL, "messages": [{"role": "tool", "content": "x"}]}},
        token_row("vocabulary", [5, 100_000]),
        chat_row("ok2"),
    ]
    report = await bench.run(rows, bench.fake())
    assert (report.num_ok, report.num_failed) == (2, 13)
    expected = {
        "line 1": ("invalid_value", None),
        "line 2": ("invalid_value", "custom_id"),
        "method": ("invalid_value", "method"),
        "url": ("invalid_value", "url"),
        "body": ("invalid_value", "body"),
        "model": ("model_not_found", "model"),
        "tools": ("invalid_value", "tools"),
        "n": ("invalid_value", "n"),
        "stream": ("invalid_value", "stream"),
        "long": ("context_length_exceeded", "messages"),
        "too_much": ("context_length_exceeded", "messages"),
        "template": ("invalid_value", "messages"),
        "vocabulary": ("invalid_value", "prompt[1]"),
    }
    assert {custom_id: bench.error(custom_id) for custom_id in expected} == expected
    assert bench.records()["long"]["error"]["line"] == 11


async def test_missing_max_tokens_is_what_the_context_leaves(bench: Bench) -> None:
    fake = bench.fake()
    await bench.run([chat_row("r", max_tokens=None)], fake)
    (request,) = fake.requests
    assert request.sampling.max_tokens == CONTEXT_TOKENS - request.num_prompt_tokens


async def test_stop_string_ends_the_request_and_frees_it(bench: Bench) -> None:
    fake = bench.fake()
    await bench.run([chat_row("r", "go on STOP never", stop="STOP")], fake)
    (choice,) = bench.records()["r"]["response"]["body"]["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], fake.num_live) == ("go on ", "stop", 0)
    assert bench.records()["r"]["response"]["body"]["usage"]["completion_tokens"] == len("go on STOP")


async def test_answer_cut_by_max_tokens_says_length(bench: Bench) -> None:
    await bench.run([chat_row("r", "abcdef", max_tokens=3)], bench.fake())
    (choice,) = bench.records()["r"]["response"]["body"]["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")


async def test_no_more_rows_are_under_way_than_allowed(bench: Bench) -> None:
    fake = bench.fake()
    await bench.run([chat_row(f"r{number}") for number in range(30)], fake)
    assert fake.max_live == FAST.max_in_flight


async def test_rows_of_one_beginning_go_to_one_worker(bench: Bench) -> None:
    fake = bench.fake()
    rows = [chat_row(f"r{number}", "ab"[number % 2] * 64) for number in range(20)]
    workers = {WorkerId("w0"): Room(2), WorkerId("w1"): Room(2)}
    await bench.run(rows, fake, fleet=lambda: FleetMeans(workers, Pace()))
    prompt_to_workers: dict[bytes, set[str | None]] = {}
    for request in fake.requests[:16]:
        prompt_to_workers.setdefault(request.token_ids, set()).add(request.worker)
    assert sorted(map(sorted, prompt_to_workers.values())) == [["w0"], ["w1"]]


async def test_rows_run_in_their_order_on_any_worker_where_no_plan_is_asked_for(bench: Bench) -> None:
    fake = bench.fake()
    rows = [chat_row(f"r{number}", "ab"[number % 2] * (64 + number)) for number in range(20)]
    report = await bench.run(rows, fake, fleet=None)
    assert (report.num_ok, fake.max_live) == (20, FAST.max_in_flight)
    lengths = [len(request.token_ids) for request in fake.requests]
    assert lengths == sorted(lengths)
    assert {request.worker for request in fake.requests} == {None}


async def test_rows_of_lower_priority_go_first_and_then_those_that_are_due(bench: Bench) -> None:
    fake = bench.fake()
    fields: list[dict[str, Any]] = [{}, {"deadline_s": 900}, {"priority": -1}, {"deadline_s": 5}]
    began_at_s = asyncio.get_running_loop().time()
    await bench.run([chat_row(f"r{number}", "x" * number, **each) for number, each in enumerate(fields)], fake)
    assert [request.priority for request in fake.requests] == [-1, 0, 0, 0]
    due_s = [request.deadline_at_s for request in fake.requests]
    assert (due_s[0], due_s[3]) == (None, None)
    assert due_s[1] is not None
    assert due_s[2] is not None
    assert due_s[1] - began_at_s >= 5
    assert due_s[2] - due_s[1] == pytest.approx(895)


async def test_a_row_whose_deadline_has_passed_is_not_tried_again(bench: Bench) -> None:
    fake = bench.fake(faults=[DeadlineExceeded("late")])
    report = await bench.run([chat_row("r", deadline_s=1)], fake)
    assert (report.num_failed, len(fake.requests)) == (1, 1)
    assert bench.error("r") == ("deadline_exceeded", None)


async def test_transient_errors_are_tried_again(bench: Bench) -> None:
    fake = bench.fake(faults=[WorkerLost("gone"), EngineError("sick")])
    report = await bench.run([chat_row("r", "Hi")], fake, limits=FAST)
    assert (report.num_ok, bench.texts) == (1, {"r": "Hi"})
    assert len({request.request for request in fake.requests}) == 3


async def test_row_that_kills_its_workers_is_given_no_more_of_them_until_a_resume(bench: Bench) -> None:
    fake = bench.fake(faults=[AttemptsExhausted("failed on 3 workers")])
    await bench.run([chat_row("r", "Hi")], fake, limits=FAST)
    assert (len(fake.requests), bench.error("r")[0]) == (1, "attempts_exhausted")
    report = await bench.run([chat_row("r", "Hi")], bench.fake(), resume=True)
    assert (report.num_ok, bench.texts) == (1, {"r": "Hi"})


async def test_run_without_workers_ends_and_is_resumed(bench: Bench) -> None:
    rows = [chat_row(f"r{number}", "Hi") for number in range(20)]
    fake = bench.fake(faults=[NoWorker("none came")])
    with pytest.raises(NoWorker, match="none came"):
        await bench.run(rows, fake)
    assert fake.num_live == 0
    assert all(record["error"] is None for record in bench.records().values())
    assert len(bench.records()) < 20
    await bench.run(rows, bench.fake(), resume=True)
    assert len(bench.records()) == 20


async def test_wait_for_a_retry_is_the_servers(bench: Bench) -> None:
    clock = asyncio.get_running_loop().time
    fake = bench.fake(faults=[Overloaded("full", retry_after_s=0.2)])
    started_at_s = clock()
    await bench.run([chat_row("r")], fake)
    assert clock() - started_at_s >= 0.2


async def test_row_waits_for_as_long_as_the_queue_is_full(bench: Bench) -> None:
    faults: list[Exception] = [QueueFull("3 are held", retry_after_s=0.001) for _ in range(5 * FAST.max_attempts)]
    report = await bench.run([chat_row("r")], bench.fake(faults=faults))
    assert (report.num_ok, report.num_failed) == (1, 0)


async def test_full_queue_between_failures_does_not_renew_the_attempts(bench: Bench) -> None:
    faults = [WorkerLost("gone"), QueueFull("3 are held", retry_after_s=0.001)] * FAST.max_attempts
    await bench.run([chat_row("r")], bench.fake(faults=faults))
    assert bench.error("r")[0] == "worker_lost"


@pytest.mark.parametrize("service_class", list(ServiceClass))
async def test_rows_are_of_the_class_that_the_run_is_given(bench: Bench, service_class: ServiceClass) -> None:
    fake = bench.fake()
    await bench.run([chat_row("r")], fake, service_class=service_class)
    assert [request.service_class for request in fake.requests] == [service_class]


async def test_transient_error_that_lasts_becomes_the_result_and_runs_again_on_resume(bench: Bench) -> None:
    rows = [chat_row("a", "A"), chat_row("b", "B", tools=[])]
    report = await bench.run(rows, bench.fake(faults=[WorkerLost("gone")] * FAST.max_attempts))
    assert (report.num_ok, report.num_failed, bench.error("a")[0]) == (0, 2, "worker_lost")
    fake = bench.fake()
    report = await bench.run(rows, fake, resume=True)
    assert (report.num_ok, report.num_failed, report.num_skipped) == (1, 0, 1)
    assert (sorted(bench.records()), bench.texts["a"], bench.error("b")[1]) == (["a", "b"], "A", "tools")


async def test_clients_fault_told_by_the_worker_is_not_tried_again(bench: Bench) -> None:
    fake = bench.fake(faults=[InvalidRequest("no such token", param="stop_token_ids")])
    await bench.run([chat_row("r")], fake)
    assert (len(fake.requests), bench.error("r")) == (1, ("invalid_value", "stop_token_ids"))


async def test_unexpected_error_is_that_rows_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    report = await bench.run([chat_row("a"), chat_row("b")], bench.fake(faults=[RuntimeError("bug")]))
    assert (report.num_ok, report.num_failed) == (1, 1)
    assert "RuntimeError: bug" in caplog.text


async def test_answer_without_an_end_is_an_engine_error(bench: Bench) -> None:
    async def endless(request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
        yield Generated((5,))

    await bench.run([chat_row("r")], endless)
    assert bench.error("r")[0] == "engine_error"


async def test_aborted_answer_is_an_engine_error(bench: Bench) -> None:
    async def aborted(request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
        yield Generated((5,), FinishReason.ABORT)

    await bench.run([chat_row("r")], aborted)
    assert bench.error("r")[0] == "engine_error"


async def test_cancellation_out_of_the_router_loses_no_row(bench: Bench) -> None:
    async def cancelled(request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
        yield Generated((5,))
        raise asyncio.CancelledError

    report = await bench.run([chat_row(f"r{number}") for number in range(9)], cancelled)
    assert (report.num_failed, report.is_interrupted, bench.error("r8")[0]) == (9, False, "engine_error")


async def test_cancel_stops_cleanly_and_resume_goes_on(bench: Bench) -> None:
    rows = [chat_row(f"r{number}", f"t{number}") for number in range(12)]
    gate = asyncio.Event()
    first = bench.fake(gate=gate)
    run = asyncio.create_task(bench.run(rows, first))
    await first.is_busy.wait()
    run.cancel()
    report = await run
    assert (report.is_interrupted, report.num_ok, first.num_live) == (True, 0, 0)
    second = bench.fake()
    report = await bench.run(rows, second, resume=True)
    assert (report.is_interrupted, report.num_ok, len(bench.records())) == (False, 12, 12)


async def test_resume_of_a_finished_run_computes_nothing(bench: Bench) -> None:
    rows = [chat_row("a"), "{", chat_row("b")]
    await bench.run(rows, bench.fake())
    before = bench.output.read_bytes()
    fake = bench.fake()
    report = await bench.run(rows, fake, resume=True)
    assert (report.num_skipped, report.num_ok, fake.requests, bench.output.read_bytes()) == (3, 0, [], before)


async def test_full_disk_ends_the_run_with_one_error_and_frees_all(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat_row(f"r{number}") for number in range(12)]
    fake = bench.fake()
    write, num_writes = os.write, itertools.count()

    def limited(fd: int, data: bytes) -> int:
        if next(num_writes) >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr("router.record_file.os.write", limited)
    with pytest.raises(OutputError, match="No space left"):
        await bench.run(rows, fake)
    monkeypatch.undo()
    assert (len(bench.records()), fake.num_live) == (3, 0)
    assert (await bench.run(rows, bench.fake(), resume=True)).num_ok == 9


async def test_input_that_changes_between_check_and_run_is_refused(bench: Bench) -> None:
    with bench.prepare([chat_row("a"), chat_row("b")]) as prepared:
        write_rows(bench.input, [chat_row("b"), chat_row("a"), chat_row("c")])
        with pytest.raises(ConfigError, match=r"in\.jsonl: has changed since it was checked"):
            list(prepared.read_rows())
    assert not bench.output.exists()


def test_file_that_changes_before_its_turn_comes_is_refused(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / f"{name}.jsonl", [chat_row(name)]) for name in "ab"]
    with prepare_batch(BatchInput(tuple(paths)), tmp_path / "out.jsonl", served_model=MODEL, resume=False) as prepared:
        rows = prepared.read_rows()
        assert next(rows).custom_id == "a"
        write_rows(paths[1], [chat_row("other")])
        with pytest.raises(ConfigError, match=r"b\.jsonl: has changed since it was checked"):
            next(rows)


async def test_no_room_for_rows_that_are_read_ahead_ends_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("router.planned_run._Store.put", fail)
    with pytest.raises(OutputError, match="temporary files: No space left on device"):
        await bench.run([chat_row(f"r{number}") for number in range(4)], bench.fake())
    monkeypatch.undo()
    assert (await bench.run([chat_row(f"r{number}") for number in range(4)], bench.fake(), resume=True)).num_ok == 4


async def test_failing_sync_ends_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(journal: Journal) -> None:
        raise OutputError("disk is broken")

    monkeypatch.setattr("router.batch.SYNC_INTERVAL_S", 0.0)
    monkeypatch.setattr(Journal, "sync", fail)
    fake = bench.fake(gate=asyncio.Event())
    with pytest.raises(OutputError, match="disk is broken"):
        await bench.run([chat_row("r")], fake)
    assert fake.num_live == 0


def test_unusable_input_leaves_no_output_behind(bench: Bench) -> None:
    with pytest.raises(ConfigError):
        bench.prepare([chat_row("a"), chat_row("a")])
    assert not bench.output.exists()


# --- The bound on cached tokens. ---


def hits_in_order(prompts: list[list[int]]) -> int:
    """Block hits of these prompts one after the other on a cache that forgets nothing."""
    stored: set[bytes] = set()
    num_hits = 0
    for prompt in prompts:
        keys = block_keys(pack_tokens(prompt), 2, root_key(SCHEME))
        usable = keys[: num_usable_blocks(len(prompt), 2)]
        num_hits += next((index for index, key in enumerate(usable) if key not in stored), len(usable))
        stored.update(keys)
    return num_hits


def test_bound_is_the_best_of_all_orders() -> None:
    rng = random.Random(4)
    for _ in range(150):
        prompts = [[rng.randint(0, 1) for _ in range(rng.randint(1, 7))] for _ in range(rng.randint(1, 5))]
        hits = PossibleHits()
        for prompt in prompts:
            keys = block_keys(pack_tokens(prompt), 2, root_key(SCHEME))
            hits.add(keys, num_usable_blocks(len(prompt), 2))
        assert hits.num_blocks == max(hits_in_order(list(order)) for order in itertools.permutations(prompts))


async def test_report_bounds_cached_tokens_within_each_salt(bench: Bench) -> None:
    prompt = list(range(3, 40))
    rows = [token_row(f"r{number}", prompt, cache_salt=salt) for number, salt in enumerate(["a", "a", "a", "b"])]
    report = await bench.run(rows, FakeGenerate(lambda prompt: [5]))
    assert report.possible_cached_tokens == 2 * 32


def test_quantiles_are_values_that_occurred() -> None:
    assert [quantile([], 0.5), quantile([3.0], 0.9), quantile([4.0, 1.0, 3.0, 2.0], 0.5)] == [None, 3.0, 2.0]
    assert quantile([float(value) for value in range(1, 11)], 0.9) == 9.0


# --- Progress. ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar() -> None:
    stream = Terminal()
    progress = Progress(stream, num_rows=2, num_done=0, clock=lambda: 0.0)
    progress.answered(Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=5))
    progress.failed()
    progress.close()
    assert "Running batch: 100%" in stream.getvalue()
    assert "2/2" in stream.getvalue()
    assert "hit=50% tok/s=0 failed=1" in stream.getvalue()


def test_progress_elsewhere_is_silent() -> None:
    stream = io.StringIO()
    progress = Progress(stream, num_rows=2, num_done=0, clock=lambda: 0.0)
    progress.answered(Usage(10, 2, 5))
    progress.close()
    assert stream.getvalue() == ""


def test_progress_elsewhere_is_a_line_now_and_then_where_asked_for() -> None:
    stream = io.StringIO()
    now_s = 0.0
    progress = Progress(stream, num_rows=5, num_done=1, clock=lambda: now_s, wanted=True)
    for _ in range(2):
        progress.answered(Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=5))
        now_s += PLAIN_INTERVAL_S * 0.6
        progress.tick()
    progress.close()
    assert stream.getvalue() == (2 * "Running batch: 3/5 req, 0.17 req/s, hit=50% tok/s=2 failed=0, 00:12 left\n")


def test_progress_is_silent_on_a_terminal_where_asked_for() -> None:
    stream = Terminal()
    Progress(stream, num_rows=2, num_done=0, clock=lambda: 0.0, wanted=False).close()
    assert stream.getvalue() == ""


class ClosedTerminal(Terminal):
    """A terminal that goes away after some writes."""

    num_writes_left = 0

    def write(self, text: str) -> int:
        if not self.num_writes_left:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.num_writes_left -= 1
        return super().write(text)


@pytest.mark.parametrize("num_writes", [0, 2, 5])
async def test_row_has_one_line_and_the_run_goes_on_where_progress_cannot_be_shown(
    bench: Bench, num_writes: int
) -> None:
    bench.progress = ClosedTerminal()
    bench.progress.num_writes_left = num_writes
    report = await bench.run([chat_row(f"r{number}") for number in range(5)], bench.fake())
    assert (report.num_ok, report.num_failed) == (5, 0)
    assert len(bench.records()) == 5


async def test_places_are_no_more_than_rows(bench: Bench) -> None:
    limits = BatchLimits(max_in_flight=10**12)
    report = await bench.run([chat_row("a"), chat_row("b")], bench.fake(), limits=limits)
    assert report.num_ok == 2


async def test_name_that_is_not_unicode_spoils_its_row_alone(bench: Bench) -> None:
    report = await bench.run([chat_row("a", **{"\ud800": 1}), chat_row("b")], bench.fake())
    assert (report.num_ok, report.num_failed) == (1, 1)
    assert bench.error("a") == ("invalid_value", "\ud800")
