"""The output of a batch, which is also the journal of what is done: one line for each row, in one file or two.

Every line's id tells the input that it belongs to and the row in it, so that an output knows its input by itself.
Nothing here knows how a row is computed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from router.batch_file import InputSummary, Row, RowKey
from router.record_file import RecordFile
from router.row_sets import RowSet
from shared.errors import ConfigError, KvrouteError, TransientError

_ID = re.compile(r"batch_req_([0-9a-f]{16})_([1-9][0-9]{0,17})")


class Journal:
    """The output files of one run: locked, appended to, and read back when a run goes on.

    Together they hold at most one line for each row that is to be answered. `finished` are the rows that need not run
    again: results, and errors that would come again.
    """

    def __init__(self, summary: InputSummary, output: RecordFile, errors: RecordFile | None) -> None:
        self._summary = summary
        self._output = output
        self._errors = errors
        self._files = [output] if errors is None else [output, errors]
        self._is_closed = False
        self._syncing = threading.Lock()
        """Held while files are put on the disk: whoever closes them waits for that, and learns that it is done."""
        self.finished = RowSet(summary.num_all_rows)

    @classmethod
    def open(cls, path: Path, summary: InputSummary, *, resume: bool, error_path: Path | None = None) -> Journal:
        """Create the output, or with `resume` go on with the one that is there.

        With `error_path`, errors go there. A torn last line is cut, and rows with errors that may heal are dropped, so
        that they can run again.

        Raises:
            ConfigError: a file exists and `resume` is not set, another run holds it, it cannot be written, or it is not
                the output of a run on this very input. The files are then as they were.
        """
        with contextlib.ExitStack() as undo:
            output = undo.enter_context(contextlib.closing(RecordFile.open(path, "output file", may_exist=resume)))
            errors = None
            if error_path is not None:
                if os.path.exists(error_path) and path.samefile(error_path):
                    raise ConfigError(f"error file {error_path}: is the output file, too")
                errors = RecordFile.open(error_path, "error file", may_exist=resume)
                undo.enter_context(contextlib.closing(errors))
            journal = cls(summary, output, errors)
            journal._read_back()
            undo.pop_all()
        return journal

    def record_id(self, row: Row) -> str:
        """The id of the row's line."""
        return f"batch_req_{self._summary.fingerprint}_{row.key}"

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one row's record as one line. It is with the kernel when this returns, so a killed process keeps it.

        Raises:
            OutputError: the disk is full or broken; the file ends with the line before.
        """
        is_error = record["error"] is not None
        (self._errors if is_error and self._errors is not None else self._output).append(record)

    def sync(self) -> None:
        """Put everything on the disk. Blocks; belongs into a thread. Raises `OutputError`."""
        with self._syncing:
            if not self._is_closed:
                for file in self._files:
                    file.sync()

    def close(self) -> None:
        """Sync and give the files free; once is enough. New files are removed if there is no line in any of them.

        Raises `OutputError`.
        """
        with self._syncing, contextlib.ExitStack() as closing:
            if self._is_closed:
                return
            self._is_closed = True
            # The run did not get to its first row: once that is mended, the same command works.
            is_in_vain = not any(file.size_bytes for file in self._files)
            for file in self._files:
                closing.callback(file.close, is_wanted=not is_in_vain)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read_back(self) -> None:
        """Fill `finished`, and then cut and drop what is not to stay. Raises `ConfigError`."""
        seen = RowSet(self._summary.num_all_rows)
        dropping: list[RecordFile] = []
        for file in self._files:
            for number, raw in file.lines():
                key, is_final = self._recognise(file, number, raw)
                if not seen.add(key):
                    raise ConfigError(f"{file}: line {number} is the second one of row {key} of the input")
                if is_final:
                    self.finished.add(key)
                elif file not in dropping:
                    dropping.append(file)
            file.check_torn()
        for file in self._files:
            if file in dropping:
                file.keep(lambda raw: _parse(raw)[2])
            else:
                file.cut_torn()

    def _recognise(self, file: RecordFile, number: int, raw: bytes) -> tuple[RowKey, bool]:
        """The row that a line belongs to, and whether the line is final. Raises `ConfigError`."""
        try:
            fingerprint, key, is_final = _parse(raw)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise file.not_a_record(number) from None
        if fingerprint != self._summary.fingerprint:
            raise ConfigError(
                f"{file}: line {number} belongs to no row of the input: the output is another input's, or the input "
                "has changed since; nothing was changed in the file"
            )
        if key > self._summary.num_all_rows:
            raise file.not_a_record(number)
        if key not in self._summary.shard:
            raise ConfigError(f"{file}: line {number} is of row {key}, which is not in shard {self._summary.shard}")
        return key, is_final


def result_record(row: Row, *, record_id: str, request_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The output line of a row that was answered."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": record_id, "custom_id": row.custom_id, "response": response, "error": None}


def error_record(row: Row, error: BaseException, *, record_id: str) -> dict[str, Any]:
    """The output line of a row that failed: no response, and an error with code, message, field and line.

    Where the input is several files, the error names the row's file as well.
    """
    is_ours = isinstance(error, KvrouteError)
    told = {
        "code": error.code if isinstance(error, KvrouteError) else KvrouteError.code,
        "message": str(error) if is_ours else f"internal error: {type(error).__name__}",
        "param": getattr(error, "param", None) if is_ours else None,
        "line": row.line,
    }
    if row.file is not None:
        told["file"] = row.file
    return {"id": record_id, "custom_id": row.custom_id, "response": None, "error": told}


def _parse(raw: bytes) -> tuple[str, RowKey, bool]:
    """Input and row of an output line, and whether the line is final. Raises all sorts of things if it is none."""
    record = json.loads(raw)
    custom_id, error = record["custom_id"], record["error"]
    found = _ID.fullmatch(record["id"])
    if found is None or not isinstance(custom_id, str | None):
        raise ValueError("not a record")
    if error is None and not isinstance(record["response"], dict):
        raise ValueError("neither a response nor an error")
    return found[1], int(found[2]), error is None or error["code"] not in TRANSIENT_CODES


def _codes_below(kind: type[KvrouteError]) -> frozenset[str]:
    return frozenset({kind.code}).union(*(_codes_below(child) for child in kind.__subclasses__()))


TRANSIENT_CODES = _codes_below(TransientError) | {KvrouteError.code}
"""Codes of errors that may heal: their rows run again on resume. An internal error is no fault of its row."""
