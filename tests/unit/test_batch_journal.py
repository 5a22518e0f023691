"""A batch's output as its journal: what it takes back, what it refuses, and what outlives a crash."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from router.batch_file import BatchInput, Shard, check_input, read_rows
from router.batch_journal import Journal, error_record, result_record
from shared.errors import ConfigError, EngineError, InvalidRequest, OutputError, WorkerLost
from tests.support.batches import MODEL, chat_row, read_records, write_rows


class Files:
    """An input of three rows and an output beside it."""

    def __init__(self, folder: Path) -> None:
        self.input = write_rows(folder / "in.jsonl", [chat_row("a"), chat_row("b"), "not json"])
        self.output = folder / "out.jsonl"
        self.rows = list(read_rows(self.input))
        self.fingerprint = check_input(self.input, served_model=MODEL).fingerprint

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
        return result_record(self.rows[row], record_id=self.id(row), request_id=f"q{row}", body={"é": 1})

    def error(self, row: int, error: Exception) -> dict[str, Any]:
        return error_record(self.rows[row], error, record_id=self.id(row))

    def id(self, row: int) -> str:
        return f"batch_req_{self.fingerprint}_{row + 1}"


def finished(journal: Journal) -> list[int]:
    """Numbers of the finished rows of three."""
    rows = [row for row in range(5) if row in journal.finished]
    assert len(rows) == len(journal.finished)
    return rows


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


# --- Records. ---


def test_record_of_an_answered_row(files: Files) -> None:
    assert files.result(0) == {
        "id": f"batch_req_{files.fingerprint}_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "q0", "body": {"é": 1}},
        "error": None,
    }


def test_record_of_a_failed_row(files: Files) -> None:
    assert files.error(1, InvalidRequest("no", param="top_p")) == {
        "id": f"batch_req_{files.fingerprint}_2",
        "custom_id": "b",
        "response": None,
        "error": {"code": "invalid_value", "message": "no", "param": "top_p", "line": 2},
    }


def test_row_without_custom_id_is_known_by_its_number(files: Files) -> None:
    record = files.error(2, InvalidRequest("no"))
    assert (record["id"], record["custom_id"]) == (f"batch_req_{files.fingerprint}_3", None)


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
        assert len(journal.finished) == 0


def test_resume_keeps_results_and_permanent_errors(files: Files) -> None:
    with files.open() as journal:
        journal.append(files.result(1))
        journal.append(files.error(2, InvalidRequest("no")))
    before = files.output.read_bytes()
    with files.open(resume=True) as journal:
        assert finished(journal) == [2, 3]
    assert files.output.read_bytes() == before


@pytest.mark.parametrize("error", [WorkerLost("gone"), EngineError("sick"), RuntimeError("bug")])
def test_resume_drops_errors_that_may_heal(files: Files, error: Exception) -> None:
    with files.open() as journal:
        journal.append(files.error(0, error))
        journal.append(files.result(1))
    files.output.chmod(0o600)
    with files.open(resume=True) as journal:
        assert finished(journal) == [2]
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
            assert finished(journal) == [1, 2][:num_whole]
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
    assert "line 2 is the second one of row 1" in files.refused()


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
        assert finished(journal) == [1]
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
        monkeypatch.setattr("router.record_file.os.write", limited)
        journal.append(files.result(0))
        with pytest.raises(OutputError, match="No space left on device"):
            journal.append(files.result(1))
        monkeypatch.undo()
    assert read_records(files.output) == [files.result(0)]
    with files.open(resume=True) as journal:
        assert finished(journal) == [1]


def test_failed_sync_says_so(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with files.open() as journal:
        journal.append(files.result(0))
        monkeypatch.setattr("router.record_file.os.fsync", fail)
        with pytest.raises(OutputError, match="Input/output error"):
            journal.sync()


# --- The journal knows its input. ---


@pytest.mark.parametrize(
    "rows",
    [
        [chat_row("a"), chat_row("b"), "not json", chat_row("new")],
        [chat_row("a"), chat_row("b")],
        [chat_row("a", "Ho"), chat_row("b"), "not json"],
        [chat_row("a"), chat_row("b", "Ho"), "not json"],
        [chat_row("b"), chat_row("a"), "not json"],
    ],
)
def test_output_of_an_input_that_has_changed_is_refused(files: Files, rows: list[Any]) -> None:
    with files.open() as journal:
        journal.append(files.result(0))
    write_rows(files.input, rows)
    assert "the output is another input's, or the input has changed since" in files.refused()


def test_output_goes_on_with_its_input_under_another_name(files: Files) -> None:
    with files.open() as journal:
        journal.append(files.result(0))
    files.input = files.input.rename(files.input.with_name("moved.jsonl"))
    with files.open(resume=True) as journal:
        assert finished(journal) == [1]


def sharded(files: Files, shard: str, output: Path, *, resume: bool = False) -> Journal:
    source = BatchInput((files.input,), Shard.parse(shard))
    return Journal.open(output, check_input(source, served_model=MODEL), resume=resume)


def test_output_of_another_shard_is_refused(files: Files) -> None:
    with sharded(files, "1/2", files.output) as journal:
        journal.append(files.result(2))
    with pytest.raises(ConfigError, match="line 1 is of row 3, which is not in shard 2/2"):
        sharded(files, "2/2", files.output, resume=True)


def test_outputs_of_shards_one_after_the_other_are_the_output_of_the_whole(files: Files) -> None:
    parts = [files.output.with_name(name) for name in ("1", "2")]
    for part, shard, rows in zip(parts, ("1/2", "2/2"), ([0, 2], [1]), strict=True):
        with sharded(files, shard, part) as journal:
            for row in rows:
                journal.append(files.result(row))
    files.output.write_bytes(b"".join(part.read_bytes() for part in parts))
    with files.open(resume=True) as journal:
        assert finished(journal) == [1, 2, 3]


def test_closing_waits_for_what_is_on_its_way_to_the_disk(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = files.open()
    journal.append(files.result(0))
    is_syncing, gate = threading.Event(), threading.Event()
    order: list[str] = []

    def slow_fsync(fd: int) -> None:
        is_syncing.set()
        assert gate.wait(60.0)
        order.append("synced")

    def close() -> None:
        journal.close()
        order.append("closed")

    monkeypatch.setattr(os, "fsync", slow_fsync)
    syncing, closing = threading.Thread(target=journal.sync), threading.Thread(target=close)
    syncing.start()
    assert is_syncing.wait(60.0)
    closing.start()
    # One that does not wait is through by now, on most machines.
    closing.join(0.2)
    gate.set()
    syncing.join()
    closing.join()
    assert order == ["synced", "closed"]
    journal.sync()


# --- A file of errors. ---


class TwoFiles(Files):
    """With a file for errors beside the output."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.errors = folder / "errors.jsonl"

    def open(self, *, resume: bool = False) -> Journal:
        summary = check_input(self.input, served_model=MODEL)
        return Journal.open(self.output, summary, resume=resume, error_path=self.errors)


@pytest.fixture
def two(tmp_path: Path) -> TwoFiles:
    return TwoFiles(tmp_path)


def test_errors_go_to_the_error_file_and_both_are_the_journal(two: TwoFiles) -> None:
    with two.open() as journal:
        journal.append(two.result(0))
        journal.append(two.error(1, InvalidRequest("no")))
        journal.append(two.error(2, WorkerLost("gone")))
    assert read_records(two.output) == [two.result(0)]
    assert len(read_records(two.errors)) == 2
    with two.open(resume=True) as journal:
        assert finished(journal) == [1, 2]
        journal.append(two.result(2))
    assert read_records(two.output) == [two.result(0), two.result(2)]
    assert read_records(two.errors) == [two.error(1, InvalidRequest("no"))]


def test_torn_lines_of_both_files_are_cut(two: TwoFiles) -> None:
    with two.open() as journal:
        journal.append(two.result(0))
        journal.append(two.error(1, InvalidRequest("no")))
    for path in (two.output, two.errors):
        with path.open("ab") as file:
            file.write(b'{"id":"batch_')
    with two.open(resume=True) as journal:
        assert finished(journal) == [1, 2]
    assert len(read_records(two.output)) == len(read_records(two.errors)) == 1


def test_row_in_both_files_is_refused(two: TwoFiles) -> None:
    with two.open() as journal:
        journal.append(two.result(0))
    two.errors.write_bytes(two.output.read_bytes())
    with pytest.raises(ConfigError, match=r"errors\.jsonl: line 1 is the second one of row 1"):
        two.open(resume=True)


def test_error_file_that_cannot_be_used_leaves_no_new_output(two: TwoFiles) -> None:
    two.errors.touch()
    with pytest.raises(ConfigError, match=r"errors\.jsonl: exists already"):
        two.open()
    two.errors = two.output
    with pytest.raises(ConfigError, match="is the output file, too"):
        two.open()
    assert not two.output.exists()


def test_new_files_stay_both_if_one_has_a_line(two: TwoFiles) -> None:
    with two.open():
        assert two.errors.exists()
    assert not two.output.exists()
    assert not two.errors.exists()
    with two.open() as journal:
        journal.append(two.result(0))
    assert two.errors.read_bytes() == b""


def test_two_runs_may_not_share_an_error_file(two: TwoFiles) -> None:
    with two.open():
        two.output = two.output.with_name("other.jsonl")
        with pytest.raises(ConfigError, match=r"errors\.jsonl: another run is writing to it"):
            two.open(resume=True)
