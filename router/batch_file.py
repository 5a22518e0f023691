"""The two files of a batch: the input, read line by line, and the output, which is also the journal of what is done.

Neither file is ever held in memory. Nothing here knows how a row is computed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from router import fields
from router.openai import Endpoint
from shared.errors import ConfigError, InvalidRequest, KvrouteError, OutputError, TransientError

MAX_LINE_BYTES = 64 << 20
"""Longest input line; a prompt of a million tokens takes some 5 MB of text."""
_READ_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_RECORD_START = b'{"id":"'
"""How every output line begins: by this a torn line is told from a file of something else."""

RowKey = bytes
"""16 bytes that stand for one input row, in memory and for comparing input and output."""


@dataclass(frozen=True, slots=True)
class Row:
    """One input line. Either `endpoint` and `body` are set, or `error` says why they are not."""

    line: int
    """Counted from 1, blank lines included."""
    custom_id: str | None
    """`None` where the line has no usable one."""
    endpoint: Endpoint | None = None
    body: Any = None
    error: InvalidRequest | None = None

    @property
    def key(self) -> RowKey:
        return _row_key(self.custom_id, self.line)


@dataclass(frozen=True, slots=True)
class InputSummary:
    """What the check pass found."""

    num_rows: int
    keys: Mapping[RowKey, int]
    """Line of each row."""


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a batch's input in file order, one line in memory at a time; blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8; names file and line.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"input file {path}: is no regular file; a batch reads its input twice")
            for number, raw in _lines(file):
                yield _row(path, number, raw)
    except OSError as error:
        raise ConfigError(f"input file {path}: cannot read it: {error.strerror}") from None


def check_input(path: Path, *, served_model: str) -> InputSummary:
    """Read the whole input once before anything is computed. Costs some 200 bytes of memory for each row.

    Raises:
        ConfigError: what would spoil the whole run: the file is missing, unreadable, empty or not UTF-8, two rows
            share a custom_id, or all rows ask for a model that is not served.
    """
    keys: dict[RowKey, int] = {}
    is_served = False
    other_model: tuple[int, str] | None = None
    for row in read_rows(path):
        if (first := keys.setdefault(row.key, row.line)) != row.line:
            raise ConfigError(
                f"input file {path}: lines {first} and {row.line} have the same custom_id {fields.brief(row.custom_id)}"
            )
        model = row.body.get("model") if isinstance(row.body, dict) else None
        if model == served_model:
            is_served = True
        elif isinstance(model, str) and other_model is None:
            other_model = (row.line, model)
    if not keys:
        raise ConfigError(f"input file {path}: has no rows")
    if other_model is not None and not is_served:
        line, model = other_model
        raise ConfigError(
            f"input file {path}: no row asks for the model that is served, {served_model!r}; "
            f"body.model on line {line} is {fields.brief(model)}"
        )
    return InputSummary(num_rows=len(keys), keys=keys)


class Journal:
    """The output file of one run: locked, appended to, and read back when a run goes on.

    The file holds whole lines only, at most one for each input row. `finished` are the rows that need not run again:
    results, and errors that would come again.
    """

    def __init__(self, path: Path, fd: int, finished: set[RowKey], size_bytes: int, *, is_new: bool) -> None:
        self._path = path
        self._is_new = is_new
        self._fd = fd
        self._size_bytes = size_bytes
        self._is_dirty = False
        self._is_closed = False
        self.finished = finished

    @classmethod
    def open(cls, path: Path, summary: InputSummary, *, resume: bool) -> Journal:
        """Create the output, or with `resume` go on with the one that is there.

        A torn last line is cut, and rows with errors that may heal are dropped, so that they can run again.

        Raises:
            ConfigError: the file exists and `resume` is not set, another run holds it, it cannot be written, or it is
                not the output of a run on this input. The file is then as it was.
        """
        path = Path(os.path.realpath(path))
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (0 if resume else os.O_EXCL)
        try:
            fd = os.open(path, flags, 0o644)
        except FileExistsError:
            raise ConfigError(
                f"output file {path}: exists already; go on with it by --resume, or name another"
            ) from None
        except OSError as error:
            raise ConfigError(f"output file {path}: cannot write it: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"output file {path}: is no regular file; results are read back when a run goes on")
            _lock(fd, path)
            _sync_folder(path.parent)
            finished, kept_bytes, has_dropped = _read_back(fd, path, summary)
            if has_dropped:
                fd = _rewrite(fd, path, summary)
                kept_bytes = os.fstat(fd).st_size
            else:
                os.ftruncate(fd, kept_bytes)
            return cls(path, fd, finished, kept_bytes, is_new=not resume)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"output file {path}: cannot resume it: {error.strerror}") from None
        except BaseException:
            os.close(fd)
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one row's record as one line. It is with the kernel when this returns, so a killed process keeps it.

        Raises:
            OutputError: the disk is full or broken; the file ends with the line before.
        """
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        # Half of a surrogate pair, quoted from a faulty row, has no UTF-8 form, but this is its form in JSON.
        line = text.encode(errors="backslashreplace") + b"\n"
        try:
            written = 0
            # The kernel takes a line in one piece unless the disk fills up or a signal comes between.
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size_bytes)
            raise self._failed(error) from None
        self._size_bytes += len(line)
        self._is_dirty = True

    def sync(self) -> None:
        """Put everything on the disk. Blocks; belongs into a thread. Raises `OutputError`."""
        if not self._is_dirty:
            return
        self._is_dirty = False
        try:
            os.fsync(self._fd)
        except OSError as error:
            # Pipes and some network file systems cannot sync; that is not a loss of data.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise self._failed(error) from None

    def close(self) -> None:
        """Sync and give the file free; once is enough. A new file without a line is removed. Raises `OutputError`."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.sync()
            if self._is_new and not self._size_bytes:
                # The run did not get to its first row: once that is mended, the same command works.
                self._path.unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(error) from None
        finally:
            os.close(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _failed(self, error: OSError) -> OutputError:
        return OutputError(
            f"output file {self._path}: cannot write: {error.strerror}. "
            "All results up to here are in it; make room and resume the run"
        )


def result_record(row: Row, *, record_id: str, request_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The output line of a row that was answered."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": record_id, "custom_id": row.custom_id, "response": response, "error": None}


def error_record(row: Row, error: BaseException, *, record_id: str) -> dict[str, Any]:
    """The output line of a row that failed: no response, and an error with code, message, field and line.

    A row without a usable custom_id is known by `line-<n>` instead of `record_id`.
    """
    is_ours = isinstance(error, KvrouteError)
    return {
        "id": record_id if row.custom_id is not None else f"line-{row.line}",
        "custom_id": row.custom_id,
        "response": None,
        "error": {
            "code": error.code if isinstance(error, KvrouteError) else KvrouteError.code,
            "message": str(error) if is_ours else f"internal error: {type(error).__name__}",
            "param": getattr(error, "param", None) if is_ours else None,
            "line": row.line,
        },
    }


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines without blank ones; `None` for a line over the limit, which is skipped over in pieces."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            raw = raw.removeprefix(_BOM)
        if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            while (rest := file.readline(_READ_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif raw.strip():
            yield number, raw


def _open_at_once(path: str, flags: int) -> int:
    """An opener for files that may turn out to be pipes: without a writer an `open` would wait for one."""
    return os.open(path, flags | os.O_NONBLOCK)


def _row(path: Path, line: int, raw: bytes | None) -> Row:
    if raw is None:
        return Row(line, None, error=InvalidRequest(f"the line is longer than {MAX_LINE_BYTES} bytes"))
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"input file {path}: line {line} is not UTF-8 (byte {error.start + 1} of the line)") from None
    try:
        fields_of_row = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return Row(line, None, error=InvalidRequest(f"the line is not JSON: {error}"))
    if not isinstance(fields_of_row, dict):
        problem = f"the line must be a JSON object, not {fields.kind_of(fields_of_row)}"
        return Row(line, None, error=InvalidRequest(problem))
    custom_id: str | None = None
    body = fields_of_row.get("body")
    try:
        custom_id = fields.text(fields.required(fields_of_row, "custom_id"), "custom_id")
        if not custom_id:
            custom_id = None
            raise InvalidRequest("Invalid 'custom_id': must not be empty.", param="custom_id")
        method = fields.text(fields.required(fields_of_row, "method"), "method")
        if method != "POST":
            raise InvalidRequest(f"'method' {fields.brief(method)} is not supported; only 'POST' is.", param="method")
        url = fields.text(fields.required(fields_of_row, "url"), "url")
        if url not in list(Endpoint):
            choices = ", ".join(repr(str(endpoint)) for endpoint in Endpoint)
            raise InvalidRequest(f"'url' {fields.brief(url)} is not supported; only {choices} are.", param="url")
        fields.mapping(fields.required(fields_of_row, "body"), "body")
    except InvalidRequest as error:
        return Row(line, custom_id, body=body, error=error)
    return Row(line, custom_id, Endpoint(url), body)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _row_key(custom_id: str | None, line: int) -> RowKey:
    named = f"line {line}" if custom_id is None else f"id {custom_id}"
    return blake2b(named.encode(), digest_size=16).digest()


def _lock(fd: int, path: Path) -> None:
    """Hold the file until it is closed. Raises `ConfigError` if another run holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"output file {path}: another run is writing to it") from None
    # A run that ended meanwhile may have put another file in place of the one that was opened here.
    if not os.path.samestat(os.fstat(fd), path.stat()):
        raise ConfigError(f"output file {path}: another run was writing to it; try again")


def _read_back(fd: int, path: Path, summary: InputSummary) -> tuple[set[RowKey], int, bool]:
    """Rows that are finished, the size of the whole lines, and whether some rows are to run again. Changes nothing."""
    finished: set[RowKey] = set()
    seen: dict[RowKey, int] = {}
    kept_bytes, has_dropped = 0, False
    for number, raw in _output_lines(fd):
        key, is_final = _recognise(raw, path, number)
        if key not in summary.keys:
            raise ConfigError(f"output file {path}: line {number} belongs to no row of the input")
        if key in seen:
            raise ConfigError(f"output file {path}: lines {seen[key]} and {number} belong to the same row")
        seen[key] = number
        kept_bytes += len(raw)
        if is_final:
            finished.add(key)
        else:
            has_dropped = True
    # After a power cut the rest of a torn line may be zeros.
    torn = os.pread(fd, len(_RECORD_START), kept_bytes).rstrip(b"\0")
    if not _RECORD_START.startswith(torn):
        raise _not_a_result(path, len(seen) + 1)
    return finished, kept_bytes, has_dropped


def _output_lines(fd: int) -> Iterator[tuple[int, bytes]]:
    """Numbered whole lines of the output from its beginning; a last one without its end is left out."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        for number, raw in enumerate(file, start=1):
            if raw.endswith(b"\n"):
                yield number, raw


def _recognise(raw: bytes, path: Path, number: int) -> tuple[RowKey, bool]:
    """The row that an output line belongs to, and whether it is final. Raises `ConfigError`."""
    try:
        record = json.loads(raw)
        custom_id, error = record["custom_id"], record["error"]
        line = int(record["id"].removeprefix("line-")) if custom_id is None else 0
        is_final = error is None or error["code"] not in TRANSIENT_CODES
        if not isinstance(custom_id, str | None) or (error is None and not isinstance(record["response"], dict)):
            raise ValueError("not a record")
        return _row_key(custom_id, line), is_final
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _not_a_result(path, number) from None


def _not_a_result(path: Path, number: int) -> ConfigError:
    return ConfigError(f"output file {path}: line {number} is not a result of a batch; nothing was changed in the file")


def _rewrite(fd: int, path: Path, summary: InputSummary) -> int:
    """Put a file without the rows that run again in the output's place, and return its locked descriptor.

    The change is one rename, so that a crash leaves either the old file or the new one.
    """
    draft = path.with_name(f".{path.name}.resume")
    draft_fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(draft_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(draft_fd, os.fstat(fd).st_mode & 0o777)
        with os.fdopen(os.dup(draft_fd), "wb") as file:
            for number, raw in _output_lines(fd):
                if _recognise(raw, path, number)[1]:
                    file.write(raw)
        os.fsync(draft_fd)
        os.rename(draft, path)
        _sync_folder(path.parent)
    except BaseException:
        os.close(draft_fd)
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    os.close(fd)
    return draft_fd


def _sync_folder(folder: Path) -> None:
    """Make a rename or a new name in `folder` last."""
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def _codes_below(kind: type[KvrouteError]) -> frozenset[str]:
    return frozenset({kind.code}).union(*(_codes_below(child) for child in kind.__subclasses__()))


TRANSIENT_CODES = _codes_below(TransientError) | {KvrouteError.code}
"""Codes of errors that may heal: their rows run again on resume. An internal error is no fault of its row."""
