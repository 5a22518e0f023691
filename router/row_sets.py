"""Sets of a batch's rows that stay small: which are finished, and which custom_ids have been seen."""

from __future__ import annotations

import sqlite3
from hashlib import blake2b

from shared.errors import ConfigError

_MAX_RECENT = 1 << 17
"""Custom_ids that are kept in memory, at some 200 bytes each; more of them go to disk."""
_PAGE_CACHE_KIB = 64 << 10
"""What the part on disk may use of memory."""


class RowSet:
    """Numbers of rows, counted from 1, of an input of a known size. Takes one bit for each row of the input."""

    def __init__(self, num_rows: int) -> None:
        self._bits = bytearray(num_rows // 8 + 1)
        self._num_rows = num_rows
        self._size = 0

    def add(self, row: int) -> bool:
        """Put one row in; whether it was not there. Modifies."""
        is_new = row not in self
        self._bits[row >> 3] |= 1 << (row & 7)
        self._size += is_new
        return is_new

    def __contains__(self, row: int) -> bool:
        return 1 <= row <= self._num_rows and bool(self._bits[row >> 3] >> (row & 7) & 1)

    def __len__(self) -> int:
        return self._size


class CustomIds:
    """The custom_ids of an input, each with the place where it stands. Use as `with`.

    A bounded number is in memory; the others are in a database on disk, which has no name and goes with this.
    """

    def __init__(self, *, max_recent: int = _MAX_RECENT) -> None:
        self._max_recent = max_recent
        self._recent: dict[bytes, int] = {}
        self._on_disk: sqlite3.Connection | None = None

    def __enter__(self) -> CustomIds:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._on_disk is not None:
            self._on_disk.close()

    def add(self, custom_id: str, place: int) -> tuple[int, int] | None:
        """Put one in; the first and second place of a custom_id that stands twice, if one is found. Modifies.

        That is this one, or another that went to disk with it. Raises `ConfigError` where the disk fails.
        """
        key = blake2b(custom_id.encode(), digest_size=16).digest()
        if (first := self._recent.setdefault(key, place)) != place:
            return first, place
        return self.flush() if len(self._recent) >= self._max_recent else None

    def flush(self) -> tuple[int, int] | None:
        """Compare what is in memory with what is on disk, and put it there; as `add`. Called once more at the end."""
        if self._on_disk is None and len(self._recent) < self._max_recent:
            return None
        try:
            twice = self._to_disk()
        except sqlite3.Error as error:
            raise ConfigError(
                f"the input has too many custom_ids for memory, and the folder for temporary files takes none: {error}"
            ) from None
        self._recent.clear()
        return twice

    def _to_disk(self) -> tuple[int, int] | None:
        if self._on_disk is None:
            # A database without a name is a file that only this process knows, and that its end removes.
            self._on_disk = sqlite3.connect("", isolation_level=None)
            for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_PAGE_CACHE_KIB}"):
                self._on_disk.execute(f"PRAGMA {pragma}")
            self._on_disk.execute("CREATE TABLE ids (key BLOB PRIMARY KEY, place INTEGER) WITHOUT ROWID")
        before = self._on_disk.total_changes
        self._on_disk.execute("BEGIN")
        # In their order, neighbours go onto the same pages.
        self._on_disk.executemany("INSERT OR IGNORE INTO ids VALUES (?, ?)", sorted(self._recent.items()))
        self._on_disk.execute("COMMIT")
        if self._on_disk.total_changes - before == len(self._recent):
            return None
        for key, place in self._recent.items():
            ((first,),) = self._on_disk.execute("SELECT place FROM ids WHERE key = ?", (key,))
            if first != place:
                return first, place
        raise AssertionError("what is not new is there")
