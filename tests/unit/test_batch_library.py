"""Batches from Python and by the command, on servers that run already: files, rows, errors, shards and figures."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from router import commands
from router.batch import BatchReport, run_batch
from router.batch_report import PossibleHits, Tally
from router.cli import EXIT_FAILED_ROWS, EXIT_OK, EXIT_TOO_MANY_ERRORS
from router.openai import Usage
from router.requests import RequestTrace
from shared.config import Settings
from shared.errors import ConfigError
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import CacheScheme
from tests.support.batches import read_records, token_row, write_rows
from tests.support.fake_vllm import FakeOptions, FakeVllm
from tests.support.tokenizers import write_model_folder


def row(number: int, **fields: Any) -> dict[str, Any]:
    return token_row(f"row-{number}", [5 + number, *range(6, 60)], **{"model": "tiny", **fields})


def bad_row(number: int) -> dict[str, Any]:
    return row(number, n=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def server() -> AsyncIterator[FakeVllm]:
    running = await FakeVllm(FakeOptions()).start()
    yield running
    await running.stop()


@pytest.fixture
def settings(server: FakeVllm, folder: Path, tmp_path: Path) -> Settings:
    return Settings(attach=(server.attach,), tokenizer=str(folder), run_dir=tmp_path)


def ids(path: Path) -> list[str]:
    return sorted(record["custom_id"] for record in read_records(path))


# --- From Python. ---


async def test_rows_in_memory_are_answered_and_the_same_rows_go_on(
    settings: Settings, server: FakeVllm, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    report = await run_batch((row(number) for number in range(6)), output, settings)
    assert (report.num_ok, report.num_failed, report.status) == (6, 0, "completed")
    assert ids(output) == [f"row-{number}" for number in range(6)]
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:4]))
    report = await run_batch([row(number) for number in range(6)], output, settings, resume=True)
    assert (report.num_ok, report.num_skipped, server.num_asked) == (2, 4, 8)
    with pytest.raises(ConfigError, match="the input has changed since"):
        await run_batch([row(number) for number in range(7)], output, settings, resume=True)


async def test_rows_of_one_beginning_come_together_to_servers_that_run_already(
    server: FakeVllm, folder: Path, tmp_path: Path
) -> None:
    other = await FakeVllm(FakeOptions()).start()
    settings = Settings(attach=(server.attach, other.attach), tokenizer=str(folder), run_dir=tmp_path)
    num_rows, num_beginnings = 96, 8
    numbers = random.Random(3).sample(range(num_rows), num_rows)
    rows = [
        token_row(f"row-{number}", [5 + number % num_beginnings] * 64 + [100 + number], model="tiny")
        for number in numbers
    ]
    report = await run_batch(rows, tmp_path / "out.jsonl", settings)
    await other.stop()
    assert (report.num_ok, set(report.num_requests_by_worker.values()) & {0}) == (num_rows, set())
    beginnings = [[body["prompt"][0] for body in one.bodies if "prompt" in body] for one in (server, other)]
    assert sum(map(len, beginnings)) == num_rows
    # In the order of the input it would be about seven of eight.
    num_changes = sum(one != next_one for asked in beginnings for one, next_one in pairwise(asked))
    assert num_changes <= num_rows // 3


async def test_files_of_a_pattern_are_answered_in_shards(settings: Settings, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [row(number) for number in range(3)])
    path = write_rows(tmp_path / "b.jsonl.gz", [row(number) for number in range(3, 5)])
    path.write_bytes(gzip.compress(path.read_bytes()))
    for shard in ("1/2", "2/2"):
        report = await run_batch(f"{tmp_path}/?.jsonl*", tmp_path / f"out{shard[0]}", settings, shard=shard)
        assert report.num_ok == report.num_rows
    assert ids(tmp_path / "out1") == ["row-0", "row-2", "row-4"]
    assert ids(tmp_path / "out2") == ["row-1", "row-3"]


async def test_errors_stop_a_run_and_a_resumed_one_goes_on(settings: Settings, tmp_path: Path) -> None:
    settings = settings.model_copy(update={"max_in_flight": 1})
    rows = [bad_row(0), row(1), bad_row(2), row(3), bad_row(4), row(5)]
    files = [write_rows(tmp_path / "in.jsonl", rows[:1]), write_rows(tmp_path / "more.jsonl", rows[1:])]
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"

    async def run(**options: Any) -> BatchReport:
        return await run_batch(files, output, settings, error_file=errors, max_errors=2, **options)

    first = await run()
    assert (first.num_failed, first.status) == (2, "too_many_errors")
    report = await run(resume=True)
    assert (report.num_failed, report.num_skipped, report.status) == (1, first.num_ok + 2, "completed")
    assert report.num_ok + first.num_ok == 3
    assert ids(output) == ["row-1", "row-3", "row-5"]
    assert ids(errors) == ["row-0", "row-2", "row-4"]
    places = {(record["error"]["file"], record["error"]["line"]) for record in read_records(errors)}
    assert places == {(str(files[0]), 1), (str(files[1]), 2), (str(files[1]), 4)}


async def test_row_that_has_no_form_in_json_is_named(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row 2 of the batch has no form in JSON"):
        await run_batch([row(0), {"custom_id": object()}], tmp_path / "out.jsonl", settings)
    assert not (tmp_path / "out.jsonl").exists()


async def test_no_input_is_refused(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs an input"):
        await run_batch([], tmp_path / "out.jsonl", settings)


async def test_row_that_no_worker_can_hold_is_an_error_at_once(settings: Settings, tmp_path: Path) -> None:
    rows = [token_row("long", [7] * 100_000, model="tiny"), row(1)]
    report = await run_batch(rows, tmp_path / "out.jsonl", settings)
    assert (report.num_ok, report.num_failed) == (1, 1)
    records = {record["custom_id"]: record for record in read_records(tmp_path / "out.jsonl")}
    assert records["long"]["error"]["code"] == "context_length_exceeded"


# --- By the command. ---


async def command(settings: Settings, folder: Path, *names: str, **own: Any) -> tuple[int, list[str]]:
    said: list[str] = []
    arguments = dict.fromkeys(("error_file", "max_errors", "shard", "summary"))
    arguments |= {"resume": False, "strict": False, "progress": False, "output": folder / "out.jsonl", **own}
    arguments["input"] = [folder / name for name in names]
    code = await commands._batch(commands.Invocation(settings, arguments, said.append, said.append))
    return code, said


async def test_summary_has_the_figures_of_the_run(settings: Settings, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [row(0), row(1), bad_row(2)])
    summary = tmp_path / "summary.json"
    summary.write_text("of an earlier run")
    code, _ = await command(settings, tmp_path, "in.jsonl", summary=summary, strict=True)
    figures = json.loads(summary.read_text())
    assert code == EXIT_FAILED_ROWS
    assert {name: figures[name] for name in ("status", "num_rows", "num_ok", "num_failed", "num_skipped")} == {
        "status": "completed",
        "num_rows": 3,
        "num_ok": 2,
        "num_failed": 1,
        "num_skipped": 0,
    }
    assert figures["prompt_tokens"] == 110
    assert figures["cached_share"] == figures["cached_tokens"] / 110
    assert figures["rows_per_s"] == pytest.approx(3 / figures["wall_s"])
    assert sum(figures["num_requests_by_worker"].values()) == 2


async def test_too_many_errors_have_an_exit_code_and_a_hint(settings: Settings, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [bad_row(0), row(1)])
    settings = settings.model_copy(update={"max_in_flight": 1})
    code, said = await command(settings, tmp_path, "in.jsonl", max_errors="1")
    assert code == EXIT_TOO_MANY_ERRORS
    assert said[-1].startswith("stopped after 1 failed rows (--max-errors): the same command with --resume")
    assert (await command(settings, tmp_path, "in.jsonl", max_errors="1", resume=True))[0] == EXIT_OK


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"shard": "3/2"}, "--shard 3/2"),
        ({"max_errors": "0"}, "--max-errors 0"),
        ({"output": Path("-")}, "output -"),
        ({"error_file": Path("-")}, "error_file -"),
        ({"output": Path("same"), "summary": Path("same")}, "--output, --summary: must not be one file"),
        ({"output": Path("same"), "error_file": Path("./same")}, "must not be one file"),
        ({"summary": Path("none/summary.json")}, "--summary none/summary.json: there is no such folder"),
    ],
)
async def test_bad_argument_is_named_before_anything_is_started(
    settings: Settings, tmp_path: Path, own: dict[str, Any], message: str
) -> None:
    write_rows(tmp_path / "in.jsonl", [row(0)])
    with pytest.raises(ConfigError) as caught:
        await command(settings, tmp_path, "in.jsonl", **own)
    assert message in str(caught.value)


async def test_summary_may_not_take_the_place_of_the_input(settings: Settings, tmp_path: Path) -> None:
    before = write_rows(tmp_path / "in.jsonl", [row(0)]).read_bytes()
    with pytest.raises(ConfigError, match=r"--summary \S*/in\.jsonl: is an input file"):
        await command(settings, tmp_path, "in.jsonl", summary=tmp_path / "in.jsonl")
    assert (tmp_path / "in.jsonl").read_bytes() == before


async def test_file_with_too_long_a_name_is_named(settings: Settings, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [row(0)])
    with pytest.raises(ConfigError, match=r"input file .*: cannot read it: File name too long"):
        await command(settings, tmp_path, "x" * 300)
    with pytest.raises(ConfigError, match=r"error file .*: cannot write it: File name too long"):
        await command(settings, tmp_path, "in.jsonl", error_file=tmp_path / ("x" * 300))
    assert not (tmp_path / "out.jsonl").exists()


# --- What a run adds up takes bounded memory. ---


def test_possible_hits_over_the_bound_are_estimated() -> None:
    root = root_key(CacheScheme("m", 16), salt="", adapter="")
    exact, bounded = PossibleHits(), PossibleHits(max_blocks=1000)
    for number in range(4000):
        keys = block_keys(pack_tokens([number % 2000, *range(31)]), 16, root)
        for hits in (exact, bounded):
            hits.add(keys, 2)
            assert len(bounded._uses) <= 1000
    assert exact.num_blocks == 4000
    assert bounded.num_blocks == pytest.approx(exact.num_blocks, rel=0.2)


def test_times_of_many_rows_are_sampled() -> None:
    tally = Tally(16)
    trace = RequestTrace()
    for number in range(200_001):
        trace.received_at_s, trace.first_token_at_s = 0.0, number / 200_000
        tally.answered(Usage(1, 1, 0), trace, [], 0)
    assert len(tally._ttft_s.values) <= 1 << 16
    report = tally.report(num_rows=200_001, num_skipped=0, wall_s=1.0)
    assert report.ttft_p50_s == pytest.approx(0.5, abs=1e-4)
    assert report.ttft_p90_s == pytest.approx(0.9, abs=1e-4)
