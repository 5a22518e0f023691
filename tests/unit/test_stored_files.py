"""What killed processes leave half written in the folder of files, and who removes it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from router.batch_book import BatchBook
from router.openai import Endpoint
from router.stored_files import FileStore

LONG_AGO_S = 2 * 3600


class Killed(BaseException):
    """Stands for a signal that lets nobody tidy up."""


def start(folder: Path) -> tuple[FileStore, BatchBook]:
    """As a server does with its folder."""
    return FileStore(folder / "files"), BatchBook(folder / "batches")


def leave_half_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be killed in the middle of an upload, of taking in another, and of writing the record of a batch."""

    def die(*_: object) -> None:
        raise Killed

    store, book = start(folder)
    store.new_path().write_bytes(b"the first half")
    whole = store.new_path()
    whole.write_bytes(b"all of it")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", die)
        with pytest.raises(Killed):
            store.keep(whole, tenant="", filename="in.jsonl", purpose="batch")
        with pytest.raises(Killed):
            book.create("", Endpoint.CHAT, "file-0", None)


def everything(folder: Path) -> set[Path]:
    return set(folder.glob("*/*"))


def make_old(paths: set[Path]) -> None:
    for path in paths:
        os.utime(path, (time.time() - LONG_AGO_S,) * 2)


def test_what_a_killed_process_has_left_half_written_is_removed_at_the_next_start_once_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_half_written(tmp_path, monkeypatch)
    left = everything(tmp_path)
    assert len(left) == 4
    # An upload of another process that shares the folder looks the same, but for its age.
    start(tmp_path)
    assert everything(tmp_path) == left
    make_old(left)
    start(tmp_path)
    assert everything(tmp_path) == set()


def test_what_is_whole_or_somebody_elses_stays_however_old(tmp_path: Path) -> None:
    store, book = start(tmp_path)
    written = store.new_path()
    written.write_bytes(b"x")
    stored = store.keep(written, tenant="", filename="in.jsonl", purpose="batch")
    record = book.create("", Endpoint.CHAT, stored.id, None)
    book.cancel(record.id, "")
    book.results(record.id).write_bytes(b"{}\n")
    for name in ("movie.part", ".hidden", ".file-of-mine", "notes.txt"):
        (tmp_path / "files" / name).write_bytes(b"x")
    before = everything(tmp_path)
    make_old(before)
    start(tmp_path)
    assert everything(tmp_path) == before
    assert store.content(stored.id, "").read_bytes() == b"x"
