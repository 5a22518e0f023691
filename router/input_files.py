"""Files of lines that a command reads: named one by one or by a pattern, compressed or not, never held in memory."""

from __future__ import annotations

import contextlib
import glob
import gzip
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from backports import zstd

from shared.errors import ConfigError

MAX_LINE_BYTES = 64 << 20
"""Longest input line; a prompt of a million tokens takes some 5 MB of text."""
_READ_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_GZIP_START = b"\x1f\x8b"
_ZSTD_START = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPED_START = b"\x2a\x4d\x18"
"""Of a frame without content, after one byte from 0x50 to 0x5f; parallel compressors begin with one."""


def find_files(names: Sequence[Path]) -> tuple[Path, ...]:
    """The files that are named, in the order in which they are; what no file is called is a pattern as in a shell.

    Files of one pattern come in the order of their names; `**` goes through folders.

    Raises:
        ConfigError: a pattern fits no file, or a file is named twice.
    """
    paths: list[Path] = []
    for name in names:
        # Unlike `Path.exists`, which raises where a name is too long or a folder is closed to us.
        if os.path.exists(name) or not glob.has_magic(str(name)):
            paths.append(name)
            continue
        found = sorted(path for path in glob.glob(str(name), recursive=True) if not os.path.isdir(path))
        if not found:
            raise ConfigError(f"input file {name}: no file fits the pattern")
        paths += map(Path, found)
    seen: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise ConfigError(f"input file {path}: is named twice")
        seen.add(real)
    return tuple(paths)


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """The file's lines without blank ones, which count; `None` for a line over the limit, which is skipped in pieces.

    A gzip or zstd file is known by its first bytes, whatever its name.

    Raises:
        ConfigError: the file cannot be read, or is damaged; names file and line.
    """
    number = 0
    try:
        with _opened(path) as file:
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
    except (EOFError, zlib.error, zstd.ZstdError, gzip.BadGzipFile) as error:
        raise ConfigError(f"input file {path}: compressed data is damaged after line {number}: {error}") from None
    except OSError as error:
        raise ConfigError(f"input file {path}: cannot read it: {error.strerror}") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's content, as it was before it was compressed."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"input file {path}: is no regular file; a batch reads its input twice")
        start = file.peek(len(_ZSTD_START))[: len(_ZSTD_START)]
        if start.startswith(_GZIP_START):
            with gzip.open(file) as unpacked:
                yield cast("IO[bytes]", unpacked)
        elif start == _ZSTD_START or (start[1:] == _ZSTD_SKIPPED_START and 0x50 <= start[0] <= 0x5F):
            with zstd.open(file) as decompressed:
                yield cast("IO[bytes]", decompressed)
        else:
            yield file


def _open_at_once(path: str, flags: int) -> int:
    """An opener for files that may turn out to be pipes: without a writer an `open` would wait for one."""
    return os.open(path, flags | os.O_NONBLOCK)
