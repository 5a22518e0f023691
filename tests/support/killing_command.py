"""The command `kvroute` as a process that kills others, and itself, once so many rows are in its output.

Usage: `python -m tests.support.killing_command KILLS ARGUMENTS`, where `KILLS` are a number of rows, a process's id and
a signal each, in JSON, and `null` is this process. A kill comes right behind its row, before anything else can happen,
on a machine of any speed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from router.cli import main
from router.record_file import RecordFile


class KillingFile:
    """Counts what is appended to record files, and kills."""

    def __init__(self, num_rows_to_kill: Mapping[int, tuple[int | None, int]]) -> None:
        self._num_rows_to_kill = num_rows_to_kill
        self._num_rows = 0

    def append(self, file: RecordFile, record: Mapping[str, Any]) -> None:
        _append(file, record)
        self._num_rows += 1
        if self._num_rows in self._num_rows_to_kill:
            pid, sent = self._num_rows_to_kill[self._num_rows]
            os.kill(pid or os.getpid(), sent)


_append = RecordFile.append

if __name__ == "__main__":
    killing = KillingFile({num_rows: (pid, sent) for num_rows, pid, sent in json.loads(sys.argv[1])})
    RecordFile.append = lambda file, record: killing.append(file, record)  # type: ignore[method-assign]
    sys.exit(main(sys.argv[2:]))
