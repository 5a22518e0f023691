"""The input's check, row by row, and the output as a journal."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from router import batch_file
from router.batch_file import Journal, Row, check_input, error_record, read_rows, result_record
from shared.errors import ConfigError, EngineError, InvalidRequest, OutputError, WorkerLost
from tests.support.batches import MODEL, chat_row, read_records, write_rows


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


class Files:
    """An input of three rows and an output beside it."""

    def __init__(self, folder: Path) -> None:
        self.input = write_rows(folder / "in.jsonl", [chat_row("a"), chat_row("b"), "not json"])
        self.output = folder / "out.jsonl"
        self.rows = list(read_rows(self.input))

    def open(self, *, resume: bool = False) -> Journal:
        return Journal.open(self.output, check_input(self.input, served_model=MODEL), resume=resume)

    def refused(self, *, resume: bool = True) -> str:
        before = self.output.read_bytes() if self.output.is_file() else None
        with pytest.raises(ConfigError) as caught:
            self.open(resume=resume)
        assert (self.output.read_bytes() if self.output.is_file() else None) == before
        assert str(self.output) in str(caught.value)
        return str(caught.value)

    def result(self, row: int) -> dict[str, Any]:
        return result_record(self.rows[row], record_id=f"r{row}", request_id=f"q{row}", body={"é": 1})

    def error(self, row: int, error: Exception) -> dict[str, Any]:
        return error_record(self.rows[row], error, record_id=f"r{row}")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


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
    assert "line 2 is not UTF-8" in refused(write_rows(tmp_path / "in.jsonl", [chat_row("a"), b'{"custom_id":"\xff"}']))


def test_duplicate_custom_id_names_both_lines(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [chat_row("a"), "", chat_row("b"), chat_row("a")])
    assert "lines 1 and 4 have the same custom_id 'a'" in refused(path)


def test_input_all_for_an_unknown_model_names_the_field(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", ["[]", chat_row("a", model="x"), chat_row("b", model="y")])
    assert refused(path).endswith("no row asks for the model that is served, 'm'; body.model on line 2 is 'x'")


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
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 300)
    monkeypatch.setattr(batch_file, "_READ_BYTES", 64)
    rows = rows_of(tmp_path, chat_row("a"), chat_row("b", "x" * 1000), chat_row("c"))
    assert [(row.line, row.custom_id, row.error and str(row.error)) for row in rows] == [
        (1, "a", None),
        (2, None, "the line is longer than 300 bytes"),
        (3, "c", None),
    ]


# --- Records. ---


def test_record_of_an_answered_row(files: Files) -> None:
    assert files.result(0) == {
        "id": "r0",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "q0", "body": {"é": 1}},
        "error": None,
    }


def test_record_of_a_failed_row(files: Files) -> None:
    assert files.error(1, InvalidRequest("no", param="top_p")) == {
        "id": "r1",
        "custom_id": "b",
        "response": None,
        "error": {"code": "invalid_value", "message": "no", "param": "top_p", "line": 2},
    }


def test_row_without_custom_id_is_known_by_its_line(files: Files) -> None:
    record = files.error(2, InvalidRequest("no"))
    assert (record["id"], record["custom_id"]) == ("line-3", None)


def test_internal_error_tells_its_type_alone(files: Files) -> None:
    assert files.error(0, RuntimeError("secret"))["error"] == {
        "code": "internal_error",
        "message": "internal error: RuntimeError",
        "param": None,
        "line": 1,
    }


# --- The journal. ---


def test_new_output_holds_what_is_appended(files: Files) -> None:
    with files.open() as journal:
        journal.append(files.result(0))
        assert read_records(files.output) == [files.result(0)]


def test_existing_output_is_refused_without_resume(files: Files) -> None:
    files.output.write_text("precious")
    assert "exists already" in files.refused(resume=False)


def test_output_in_a_missing_folder_is_refused(files: Files) -> None:
    files.output = files.output.parent / "none" / "out.jsonl"
    assert "No such file" in files.refused(resume=False)


def test_folder_as_output_is_refused(files: Files) -> None:
    files.output.mkdir()
    assert "directory" in files.refused()


def test_second_run_on_the_same_output_is_refused(files: Files) -> None:
    with files.open():
        assert "another run is writing to it" in files.refused()


def test_resume_without_an_output_starts_one(files: Files) -> None:
    with files.open(resume=True) as journal:
        assert journal.finished == set()


def test_resume_keeps_results_and_permanent_errors(files: Files) -> None:
    with files.open() as journal:
        journal.append(files.result(1))
        journal.append(files.error(2, InvalidRequest("no")))
    before = files.output.read_bytes()
    with files.open(resume=True) as journal:
        assert journal.finished == {files.rows[1].key, files.rows[2].key}
    assert files.output.read_bytes() == before


@pytest.mark.parametrize("error", [WorkerLost("gone"), EngineError("sick"), RuntimeError("bug")])
def test_resume_drops_errors_that_may_heal(files: Files, error: Exception) -> None:
    with files.open() as journal:
        journal.append(files.error(0, error))
        journal.append(files.result(1))
    files.output.chmod(0o600)
    with files.open(resume=True) as journal:
        assert journal.finished == {files.rows[1].key}
        journal.append(files.result(0))
        assert "another run is writing to it" in files.refused()
    assert read_records(files.output) == [files.result(1), files.result(0)]
    assert files.output.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in files.output.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_resume_cuts_a_torn_last_line(files: Files) -> None:
    with files.open() as journal:
        journal.append(files.result(0))
        journal.append(files.result(1))
    whole = files.output.read_bytes()
    for size in range(len(whole)):
        files.output.write_bytes(whole[:size])
        with files.open(resume=True) as journal:
            num_whole = whole[:size].count(b"\n")
            assert journal.finished == {row.key for row in files.rows[:num_whole]}
        assert read_records(files.output) == [files.result(0)][:num_whole]


@pytest.mark.parametrize(
    "line",
    [
        "garbage",
        "[]",
        "{}",
        '{"id":"r","custom_id":"a","response":null,"error":null}',
        '{"id":"r","custom_id":null,"response":null,"error":{"code":"x"}}',
        '{"id":"r","custom_id":"a","response":null,"error":"x"}',
    ],
)
def test_corrupt_line_is_named_and_nothing_is_touched(files: Files, line: str) -> None:
    with files.open() as journal:
        journal.append(files.result(0))
    with files.output.open("a") as file:
        file.write(line + "\n" + '{"torn')
    assert "line 2 is not a result of a batch" in files.refused()


def test_output_of_another_input_is_refused(files: Files) -> None:
    with files.open() as journal:
        journal.append(files.result(0))
    write_rows(files.input, [chat_row("other")])
    assert "line 1 belongs to no row of the input" in files.refused()


def test_output_with_a_row_twice_is_refused(files: Files) -> None:
    with files.open() as journal:
        journal.append(files.result(0))
        journal.append(files.result(0))
    assert "lines 1 and 2 belong to the same row" in files.refused()


def test_input_as_output_is_refused(files: Files) -> None:
    files.output = files.input
    assert "line 1 is not a result of a batch" in files.refused()


@pytest.mark.parametrize("content", ['{"custom_id": "a"', "precious", "{", "\n", '{"id":"r0"}\nx'])
def test_other_file_without_a_last_line_end_is_not_taken_for_a_torn_output(files: Files, content: str) -> None:
    files.output.write_text(content)
    if '{"id":"'.startswith(content):
        files.open(resume=True).close()
    else:
        assert "is not a result of a batch" in files.refused()


def test_zeros_after_a_power_cut_are_cut_as_a_torn_line_is(files: Files) -> None:
    with files.open() as journal:
        journal.append(files.result(0))
    with files.output.open("ab") as file:
        file.write(b'{"i' + bytes(100))
    with files.open(resume=True) as journal:
        assert journal.finished == {files.rows[0].key}
    assert read_records(files.output) == [files.result(0)]


def test_pipe_and_device_as_output_are_refused(files: Files) -> None:
    os.mkfifo(files.output)
    assert "is no regular file" in files.refused()
    files.output = Path("/dev/full")
    assert "is no regular file" in files.refused()


def test_new_output_without_a_line_is_removed_again(files: Files) -> None:
    with files.open():
        assert files.output.exists()
    assert not files.output.exists()
    files.output.touch()
    files.open(resume=True).close()
    assert files.output.exists()


def test_half_a_surrogate_pair_in_a_message_is_written_as_json_can(files: Files) -> None:
    with files.open() as journal:
        journal.append(files.error(0, InvalidRequest("no '\ud800é'", param="\ud800")))
    assert read_records(files.output)[0]["error"]["message"] == "no '\ud800é'"


def test_full_disk_leaves_whole_lines_and_says_so(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    room = [200]
    write = os.write

    def limited(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    with files.open() as journal:
        monkeypatch.setattr("router.batch_file.os.write", limited)
        journal.append(files.result(0))
        with pytest.raises(OutputError, match="No space left on device"):
            journal.append(files.result(1))
        monkeypatch.undo()
    assert read_records(files.output) == [files.result(0)]
    with files.open(resume=True) as journal:
        assert journal.finished == {files.rows[0].key}


def test_failed_sync_says_so(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with files.open() as journal:
        journal.append(files.result(0))
        monkeypatch.setattr("router.batch_file.os.fsync", fail)
        with pytest.raises(OutputError, match="Input/output error"):
            journal.sync()
