"""A batch's input: its check, and its rows one by one."""

from __future__ import annotations

import gzip
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from router import input_files
from router.batch_file import BatchInput, InputSummary, Row, Shard, check_input, read_rows
from router.input_files import find_files
from router.row_sets import CustomIds, RowSet
from shared.errors import ConfigError, InvalidRequest
from tests.support.batches import MODEL, chat_row, write_rows


def check(path: Path) -> int:
    return check_input(path, served_model=MODEL).num_rows


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def rows_of(tmp_path: Path, *lines: Any) -> list[Row]:
    return list(read_rows(write_rows(tmp_path / "in.jsonl", list(lines))))


def fault(tmp_path: Path, line: Any) -> InvalidRequest:
    (row,) = rows_of(tmp_path, line)
    assert row.error is not None
    return row.error


# --- What stops a run before its first request. ---


def test_missing_input(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.jsonl")


def test_pipe_as_input_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.jsonl")
    assert "is no regular file" in refused(tmp_path / "in.jsonl")


def test_folder_as_input(tmp_path: Path) -> None:
    assert "directory" in refused(tmp_path)


def test_pipe_as_input(tmp_path: Path) -> None:
    assert "no regular file" in refused(Path("/dev/null"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_input(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [chat_row("a")])
    path.chmod(0)
    assert "Permission denied" in refused(path)


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
def test_empty_input(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    assert "has no rows" in refused(path)


def test_input_that_is_not_utf8_names_the_line(tmp_path: Path) -> None:
    assert "in.jsonl:2: is not UTF-8" in refused(
        write_rows(tmp_path / "in.jsonl", [chat_row("a"), b'{"custom_id":"\xff"}'])
    )


def test_duplicate_custom_id_names_both_lines(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [chat_row("a"), "", chat_row("b"), chat_row("a")])
    assert refused(path) == f"input file {path}:4: has the same custom_id as {path}:1"


def test_input_all_for_an_unknown_model_names_the_field(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", ["[]", chat_row("a", model="x"), chat_row("b", model="y")])
    assert refused(path).endswith(f"no row asks for the model that is served, 'm'; body.model at {path}:2 is 'x'")


def test_one_row_for_the_served_model_is_enough_to_run(tmp_path: Path) -> None:
    assert check(write_rows(tmp_path / "in.jsonl", [chat_row("a", model="x"), chat_row("b")])) == 2


# --- What becomes a row's error. ---


def test_good_rows_with_blank_lines_byte_order_mark_and_no_last_newline(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [chat_row("a"), "  ", chat_row("b")])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().removesuffix(b"\n"))
    assert [(row.line, row.custom_id, row.error) for row in read_rows(path)] == [(1, "a", None), (3, "b", None)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"custom_id": NaN}', "NaN is not a JSON value"),
        ("[]", "must be a JSON object, not an array"),
        ("5", "must be a JSON object, not an integer"),
    ],
)
def test_line_that_is_no_json_object(tmp_path: Path, line: str, message: str) -> None:
    assert message in str(fault(tmp_path, line))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"custom_id": None}, "custom_id"),
        ({"custom_id": 5}, "custom_id"),
        ({"custom_id": ""}, "custom_id"),
        ({"custom_id": "\ud800"}, "custom_id"),
        ({"method": None}, "method"),
        ({"method": "GET"}, "method"),
        ({"url": 5}, "url"),
        ({"url": "/v1/embeddings"}, "url"),
        ({"body": None}, "body"),
        ({"body": "Hi"}, "body"),
    ],
)
def test_bad_field_of_a_row_is_named(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    error = fault(tmp_path, {**chat_row("a"), **change})
    assert error.param == param
    assert param in str(error)


@pytest.mark.parametrize("field", ["custom_id", "method", "url", "body"])
def test_missing_field_of_a_row_is_named(tmp_path: Path, field: str) -> None:
    row = chat_row("a")
    del row[field]
    assert str(fault(tmp_path, row)) == f"Missing required parameter: '{field}'."


def test_line_over_the_limit_is_an_error_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "MAX_LINE_BYTES", 300)
    monkeypatch.setattr(input_files, "_READ_BYTES", 64)
    rows = rows_of(tmp_path, chat_row("a"), chat_row("b", "x" * 1000), chat_row("c"))
    assert [(row.line, row.custom_id, row.error and str(row.error)) for row in rows] == [
        (1, "a", None),
        (2, None, "the line is longer than 300 bytes"),
        (3, "c", None),
    ]


# --- Several files, compressed ones, and shards. ---

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "zst": zstd.compress}


def summary(*paths: Path) -> InputSummary:
    return check_input(BatchInput(paths), served_model=MODEL)


def test_rows_of_several_files_are_one_input_and_know_where_they_stand(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", ["", chat_row("a")])
    two = write_rows(tmp_path / "two.jsonl", [chat_row("b"), "{"])
    rows = list(read_rows(BatchInput((one, two))))
    assert [(row.key, row.place, row.custom_id) for row in rows] == [
        (1, f"{one}:2", "a"),
        (2, f"{two}:1", "b"),
        (3, f"{two}:2", None),
    ]
    assert summary(one, two).num_rows == 3


def test_duplicate_custom_id_in_two_files_names_both_places(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", [chat_row("a")])
    two = write_rows(tmp_path / "two.jsonl", [chat_row("b"), chat_row("a")])
    with pytest.raises(ConfigError) as caught:
        summary(one, two)
    assert str(caught.value) == f"input file {two}:2: has the same custom_id as {one}:1"


def test_unreadable_one_of_several_files_is_named(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", [chat_row("a")])
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot read it: No such file"):
        summary(one, tmp_path / "none.jsonl")


def test_fingerprint_is_that_of_the_rows_whatever_files_hold_them(tmp_path: Path) -> None:
    whole = write_rows(tmp_path / "whole.jsonl", [chat_row("a"), chat_row("b"), chat_row("c")])
    one = write_rows(tmp_path / "one.jsonl", [chat_row("a"), "", chat_row("b")])
    two = write_rows(tmp_path / "two.jsonl", [chat_row("c")])
    two.write_bytes(zstd.compress(two.read_bytes()))
    assert summary(one, two).fingerprint == summary(whole).fingerprint
    changed = [
        write_rows(tmp_path / f"{number}.jsonl", rows)
        for number, rows in enumerate(
            [
                [chat_row("a"), chat_row("b")],
                [chat_row("a"), chat_row("c"), chat_row("b")],
                [chat_row("a"), chat_row("b"), chat_row("c", "Ho")],
                [chat_row("a"), chat_row("b"), chat_row("c"), chat_row("d")],
            ]
        )
    ]
    assert summary(whole).fingerprint not in {summary(path).fingerprint for path in changed}


@pytest.mark.parametrize("name", COMPRESS)
def test_compressed_file_is_read_whatever_its_name_and_in_pieces_one_after_the_other(tmp_path: Path, name: str) -> None:
    path = write_rows(tmp_path / "in.jsonl", [chat_row("a"), chat_row("b")])
    raw = path.read_bytes()
    path.write_bytes(COMPRESS[name](raw[:50]) + COMPRESS[name](raw[50:]))
    assert [row.custom_id for row in read_rows(path)] == ["a", "b"]


def test_zstd_file_of_a_parallel_compressor_is_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [chat_row("a")])
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00size"
    path.write_bytes(skipped + zstd.compress(path.read_bytes()))
    assert [row.custom_id for row in read_rows(path)] == ["a"]


@pytest.mark.parametrize("name", COMPRESS)
@pytest.mark.parametrize("is_cut", [True, False])
def test_damaged_compressed_file_is_named_with_the_last_good_line(tmp_path: Path, name: str, is_cut: bool) -> None:
    rng = random.Random(1)
    path = write_rows(tmp_path / "in.jsonl", [chat_row(f"r{n}", rng.randbytes(400).hex()) for n in range(1000)])
    raw = bytearray(COMPRESS[name](path.read_bytes()))
    if is_cut:
        del raw[-1000:]
    else:
        raw[-1000:-900] = bytes(100)
    path.write_bytes(raw)
    assert "compressed data is damaged after line" in refused(path)


def test_patterns_name_files_in_order_and_plain_names_stay(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "x[1].jsonl", "deep/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [
        path.relative_to(tmp_path).as_posix() for path in find_files([tmp_path / "x[1].jsonl", tmp_path / "?.jsonl"])
    ]
    assert names == ["x[1].jsonl", "a.jsonl", "b.jsonl"]
    assert find_files([tmp_path / "**" / "c.jsonl"]) == (tmp_path / "deep" / "c.jsonl",)
    assert find_files([tmp_path / "none.jsonl"]) == (tmp_path / "none.jsonl",)
    assert find_files([tmp_path / ("x" * 300)]) == (tmp_path / ("x" * 300),)


def test_pattern_that_fits_nothing_and_file_named_twice_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ConfigError, match="no file fits the pattern"):
        find_files([tmp_path / "*.gz"])
    with pytest.raises(ConfigError, match=r"a\.jsonl: is named twice"):
        find_files([tmp_path / "a.jsonl", tmp_path / "*.jsonl"])


def test_shards_share_no_row_and_leave_none_out(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [chat_row(f"r{number}") for number in range(10)])
    shards = [BatchInput((path,), Shard.parse(f"{number}/3")) for number in (1, 2, 3)]
    assert [[row.key for row in read_rows(shard)] for shard in shards] == [[1, 4, 7, 10], [2, 5, 8], [3, 6, 9]]
    found = [check_input(shard, served_model=MODEL) for shard in shards]
    assert [(one.num_rows, one.num_all_rows) for one in found] == [(4, 10), (3, 10), (3, 10)]
    assert len({one.fingerprint for one in found}) == 1


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "1/0", "-1/3", "a/3", "1/3/3", "1/9999999999"])
def test_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--shard .*: not i/n"):
        Shard.parse(text)


# --- What is remembered of rows. ---


@pytest.mark.parametrize("max_recent", [1, 2, 7, 64, 1000])
def test_custom_id_that_stands_twice_is_found_in_memory_and_on_disk(max_recent: int) -> None:
    rng = random.Random(max_recent)
    for _ in range(20):
        ids = [f"id-{number}" for number in range(100)]
        second = rng.randrange(1, 100)
        first = rng.randrange(second)
        ids[second] = ids[first]
        with CustomIds(max_recent=max_recent) as seen:
            found = {seen.add(custom_id, place) for place, custom_id in enumerate(ids)} | {seen.flush()}
        assert found == {None, (first, second)}


def test_custom_ids_that_all_differ_are_all_new() -> None:
    with CustomIds(max_recent=10) as seen:
        assert {seen.add(f"id-{number}", number) for number in range(95)} | {seen.flush()} == {None}


def test_row_set_takes_rows_of_its_input_once() -> None:
    rows = RowSet(9)
    assert [rows.add(row) for row in (9, 1, 9)] == [True, True, False]
    assert [row for row in range(-20, 40) if row in rows] == [1, 9]
    assert len(rows) == 2
