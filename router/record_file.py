"""A file of JSON records, one a line, that one process at a time appends to and that survives its death.

What is written is with the kernel at once and on the disk when it is synced; a line is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, OutputError

_RECORD_START = b'{"id":"'
"""How every line begins: by this a torn line is told from a file of something else."""


class RecordFile:
    """One locked file. `size_bytes` are its whole lines; what is behind them is cut before the first is appended."""

    def __init__(self, path: Path, what: str, fd: int, *, is_new: bool) -> None:
        self._path = path
        self._what = what
        self._fd = fd
        self._is_new = is_new
        self._is_dirty = False
        self.size_bytes = 0

    @classmethod
    def open(cls, path: Path, what: str, *, may_exist: bool) -> RecordFile:
        """Create and lock it, or lock the one that is there where that is allowed. `what` it is goes into messages.

        Raises `ConfigError`.
        """
        path = Path(os.path.realpath(path))
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        is_new = False
        try:
            try:
                fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
                is_new = True
            except FileExistsError:
                if not may_exist:
                    raise ConfigError(
                        f"{what} {path}: exists already; go on with it by --resume, or name another"
                    ) from None
                fd = os.open(path, flags)
        except OSError as error:
            raise ConfigError(f"{what} {path}: cannot write it: {error.strerror}") from None
        file = cls(path, what, fd, is_new=is_new)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{file}: is no regular file; results are read back when a run goes on")
            file._lock()
            _sync_folder(path.parent)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"{file}: cannot write it: {error.strerror}") from None
        except BaseException:
            os.close(fd)
            raise
        return file

    def __str__(self) -> str:
        return f"{self._what} {self._path}"

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Numbered whole lines from the beginning; a last one without its end is left out. Counts `size_bytes`.

        Raises `ConfigError`.
        """
        self.size_bytes = 0
        try:
            for number, raw in _whole_lines(self._fd):
                self.size_bytes += len(raw)
                yield number, raw
        except OSError as error:
            raise ConfigError(f"{self}: cannot read it: {error.strerror}") from None

    def check_torn(self) -> None:
        """Raises `ConfigError` if what is behind the whole lines is not the beginning of one."""
        # After a power cut the rest of a torn line may be zeros.
        torn = os.pread(self._fd, len(_RECORD_START), self.size_bytes).rstrip(b"\0")
        if not _RECORD_START.startswith(torn):
            raise self.not_a_record(1 + sum(1 for _ in _whole_lines(self._fd)))

    def cut_torn(self) -> None:
        """Cut what is behind the whole lines. Raises `ConfigError`."""
        try:
            os.ftruncate(self._fd, self.size_bytes)
        except OSError as error:
            raise ConfigError(f"{self}: cannot resume it: {error.strerror}") from None

    def keep(self, is_kept: Callable[[bytes], bool]) -> None:
        """Drop all other lines. Raises `ConfigError`; the file is then as it was.

        The change is one rename, so that a crash leaves either the old file or the new one.
        """
        draft = self._path.with_name(f".{self._path.name}.resume")
        try:
            draft_fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(draft_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.fchmod(draft_fd, os.fstat(self._fd).st_mode & 0o777)
                with os.fdopen(os.dup(draft_fd), "wb") as file:
                    for _, raw in _whole_lines(self._fd):
                        if is_kept(raw):
                            file.write(raw)
                os.fsync(draft_fd)
                os.rename(draft, self._path)
                _sync_folder(self._path.parent)
            except BaseException:
                os.close(draft_fd)
                with contextlib.suppress(OSError):
                    draft.unlink()
                raise
        except OSError as error:
            raise ConfigError(f"{self}: cannot resume it: {error.strerror}") from None
        os.close(self._fd)
        self._fd = draft_fd
        self.size_bytes = os.fstat(draft_fd).st_size

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record as one line. Raises `OutputError`; the file then ends with the line before."""
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
                os.ftruncate(self._fd, self.size_bytes)
            raise self._failed(error) from None
        self.size_bytes += len(line)
        self._is_dirty = True

    def sync(self) -> None:
        """Put everything on the disk. Blocks. Raises `OutputError`."""
        if not self._is_dirty:
            return
        self._is_dirty = False
        try:
            os.fsync(self._fd)
        except OSError as error:
            # Pipes and some network file systems cannot sync; that is not a loss of data.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise self._failed(error) from None

    def close(self, *, is_wanted: bool = False) -> None:
        """Sync and give the file free. One that was created here and holds nothing is removed, unless it is wanted.

        Raises `OutputError`.
        """
        try:
            self.sync()
            if self._is_new and not self.size_bytes and not is_wanted:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(error) from None
        finally:
            os.close(self._fd)

    def not_a_record(self, number: int) -> ConfigError:
        """What there is to say of a line that is no record."""
        return ConfigError(f"{self}: line {number} is not a result of a batch; nothing was changed in the file")

    def _lock(self) -> None:
        """Hold the file until it is closed. Raises `ConfigError` if another run holds it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self}: another run is writing to it") from None
        # A run that ended meanwhile may have put another file in place of the one that was opened here, or removed it.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._fd), self._path.stat()):
                return
        raise ConfigError(f"{self}: another run was writing to it; try again")

    def _failed(self, error: OSError) -> OutputError:
        return OutputError(
            f"{self}: cannot write: {error.strerror}. All results up to here are in it; make room and resume the run"
        )


def _whole_lines(fd: int) -> Iterator[tuple[int, bytes]]:
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        for number, raw in enumerate(file, start=1):
            if raw.endswith(b"\n"):
                yield number, raw


def _sync_folder(folder: Path) -> None:
    """Make a rename or a new name in `folder` last."""
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)
