"""The input of a batch: rows of one or several files, read line by line, and the check before anything is computed.

The input is never held in memory. Nothing here knows how a row is computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from router import fields, input_files
from router.openai import Endpoint
from router.row_sets import CustomIds
from shared.errors import ConfigError, InvalidRequest

_FINGERPRINT_BYTES = 8
_LINE_BITS = 40

RowKey = int
"""A row's number in the whole input, counted from 1: by this, input and output know it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One input line. Either `endpoint` and `body` are set, or `error` says why they are not."""

    line: int
    """In its file, counted from 1, blank lines included."""
    custom_id: str | None
    """`None` where the line has no usable one."""
    endpoint: Endpoint | None = None
    body: Any = None
    error: InvalidRequest | None = None
    key: RowKey = 0
    file: str | None = None
    """The file that it stands in; `None` where the input is one file."""

    @property
    def place(self) -> str:
        """Where it stands, for people."""
        return f"line {self.line}" if self.file is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Shard:
    """Every `count`th row of an input, beginning with row `number`. The shards of an input share no row."""

    number: int = 1
    count: int = 1

    def __contains__(self, row: RowKey) -> bool:
        return (row - self.number) % self.count == 0

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """A shard as `i/n`, counted from 1. Raises `ConfigError`."""
        number, slash, count = text.partition("/")
        if slash and all(part.isascii() and part.isdecimal() and len(part) < 10 for part in (number, count)):
            shard = cls(int(number), int(count))
            if 1 <= shard.number <= shard.count:
                return shard
        raise ConfigError(f"--shard {text}: not i/n with i from 1 to n, as 2/8")


@dataclass(frozen=True, slots=True)
class BatchInput:
    """What a batch reads: files, whose rows are one logical input in this order, and which of the rows it answers."""

    paths: tuple[Path, ...]
    shard: Shard = Shard()

    @classmethod
    def of(cls, source: Path | BatchInput) -> BatchInput:
        """An input of one file, where it is no input yet."""
        return source if isinstance(source, BatchInput) else cls((source,))

    def __str__(self) -> str:
        if len(self.paths) == 1:
            return f"input file {self.paths[0]}"
        return f"the {len(self.paths)} input files from {self.paths[0]} to {self.paths[-1]}"

    def place(self, file: int, line: int) -> str:
        """A line of one of the files, for people."""
        return f"{self.paths[file]}:{line}"


FileVersion = tuple[int, int, int]
"""Inode, size and time of the last change: what tells whether a file is as it was."""


@dataclass(frozen=True, slots=True)
class InputSummary:
    """What the check pass found."""

    num_rows: int
    """Rows that are to be answered."""
    num_all_rows: int
    """Those of other shards included."""
    fingerprint: str
    """Stands for the content of all rows, in their order, whatever the files are called and however compressed."""
    shard: Shard = Shard()
    versions: tuple[FileVersion, ...] = ()
    """Of the files that were read."""


def read_rows(source: Path | BatchInput, versions: Sequence[FileVersion] = ()) -> Iterator[Row]:
    """The rows that a batch answers, in the input's order, one line in memory at a time; blank lines are skipped.

    With the `versions` that were checked, each file is compared once more as its turn comes, hours later it may be.

    Raises:
        ConfigError: a file cannot be read, is not UTF-8, or has changed; names file and line.
    """
    source = BatchInput.of(source)
    for key, file, line, raw in _raw_rows(source, versions):
        if key in source.shard:
            yield _row(source, key, file, line, raw)


def check_input(source: Path | BatchInput, *, served_model: str) -> InputSummary:
    """Read the whole input once before anything is computed. Its memory does not grow with the input.

    Raises:
        ConfigError: what would spoil the whole run: a file is missing, unreadable, damaged or not UTF-8, there is no
            row, two rows share a custom_id, or all rows ask for a model that is not served.
    """
    source = BatchInput.of(source)
    versions = tuple(map(_version, source.paths))
    digest = blake2b(digest_size=_FINGERPRINT_BYTES)
    num_all_rows = num_rows = 0
    is_served = False
    other_model: tuple[str, str] | None = None
    with CustomIds() as custom_ids:
        for key, file, line, raw in _raw_rows(source):
            num_all_rows = key
            num_rows += key in source.shard
            digest.update((raw or b"").strip() + b"\n")
            row = _row(source, key, file, line, raw)
            if row.custom_id is not None:
                _refuse_twice(source, custom_ids.add(row.custom_id, file << _LINE_BITS | line))
            model = row.body.get("model") if isinstance(row.body, dict) else None
            if model == served_model:
                is_served = True
            elif isinstance(model, str) and other_model is None:
                other_model = (source.place(file, line), model)
        _refuse_twice(source, custom_ids.flush())
    if not num_all_rows:
        raise ConfigError(f"{source}: has no rows")
    if other_model is not None and not is_served:
        place, model = other_model
        raise ConfigError(
            f"{source}: no row asks for the model that is served, {served_model!r}; "
            f"body.model at {place} is {fields.brief(model)}"
        )
    return InputSummary(num_rows, num_all_rows, digest.hexdigest(), source.shard, versions)


def check_unchanged(source: BatchInput, summary: InputSummary) -> None:
    """Raises `ConfigError` if a file is no longer the one that was checked, by all that it tells of itself."""
    for path, version in zip(source.paths, summary.versions, strict=True):
        _check_version(path, version)


def _check_version(path: Path, version: FileVersion) -> None:
    if _version(path) != version:
        raise ConfigError(f"input file {path}: has changed since it was checked; nothing of it was read again")


def _version(path: Path) -> FileVersion:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"input file {path}: cannot read it: {error.strerror}") from None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _refuse_twice(source: BatchInput, places: tuple[int, int] | None) -> None:
    if places is not None:
        first, second = (source.place(place >> _LINE_BITS, place & (1 << _LINE_BITS) - 1) for place in places)
        raise ConfigError(f"input file {second}: has the same custom_id as {first}")


def _raw_rows(
    source: BatchInput, versions: Sequence[FileVersion] = ()
) -> Iterator[tuple[RowKey, int, int, bytes | None]]:
    """Row, index of its file, line in it, and the line itself."""
    key = 0
    for file, path in enumerate(source.paths):
        if versions:
            _check_version(path, versions[file])
        for line, raw in input_files.numbered_lines(path):
            key += 1
            yield key, file, line, raw


def _row(source: BatchInput, key: RowKey, file: int, line: int, raw: bytes | None) -> Row:
    name = str(source.paths[file]) if len(source.paths) > 1 else None
    custom_id: str | None = None
    body: Any = None
    try:
        content = _content(source, file, line, raw)
        body = content.get("body")
        custom_id = fields.text(fields.required(content, "custom_id"), "custom_id") or None
        if custom_id is None:
            raise InvalidRequest("Invalid 'custom_id': must not be empty.", param="custom_id")
        endpoint = _endpoint(content)
    except InvalidRequest as error:
        return Row(line, custom_id, body=body, error=error, key=key, file=name)
    return Row(line, custom_id, endpoint, body, key=key, file=name)


def _content(source: BatchInput, file: int, line: int, raw: bytes | None) -> dict[str, Any]:
    """The object on the line. Raises `InvalidRequest`, and `ConfigError` for what cannot be text."""
    if raw is None:
        raise InvalidRequest(f"the line is longer than {input_files.MAX_LINE_BYTES} bytes")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        place = source.place(file, line)
        raise ConfigError(f"input file {place}: is not UTF-8 (byte {error.start + 1} of the line)") from None
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the line is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"the line must be a JSON object, not {fields.kind_of(content)}")
    return content


def _endpoint(content: dict[str, Any]) -> Endpoint:
    """The endpoint of a row that has all it needs. Raises `InvalidRequest`."""
    method = fields.text(fields.required(content, "method"), "method")
    if method != "POST":
        raise InvalidRequest(f"'method' {fields.brief(method)} is not supported; only 'POST' is.", param="method")
    url = fields.text(fields.required(content, "url"), "url")
    if url not in list(Endpoint):
        choices = ", ".join(repr(str(endpoint)) for endpoint in Endpoint)
        raise InvalidRequest(f"'url' {fields.brief(url)} is not supported; only {choices} are.", param="url")
    fields.mapping(fields.required(content, "body"), "body")
    return Endpoint(url)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
