"""Batch files for tests."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

MODEL = "m"


def chat_row(custom_id: Any, content: str = "Hi", **fields: Any) -> dict[str, Any]:
    """One input row; `fields` go into its body."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 32, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def token_row(custom_id: str, token_ids: list[int], **fields: Any) -> dict[str, Any]:
    """One input row whose prompt is token ids."""
    body = {"model": MODEL, "prompt": token_ids, "max_tokens": 4, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write an input; rows that are strings or bytes go in as they are."""
    lines = []
    for row in rows:
        if isinstance(row, bytes):
            lines.append(row)
        else:
            lines.append((row if isinstance(row, str) else json.dumps(row)).encode())
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of an output, each of which must be a whole line."""
    raw = path.read_bytes()
    assert raw == b"" or raw.endswith(b"\n")
    return [json.loads(line) for line in raw.splitlines()]


def wait_for_rows(path: Path, num_rows: int, process: subprocess.Popen[str], *, within_s: float = 200.0) -> None:
    """Wait until the output of a process that runs holds that many whole rows. Blocks."""
    deadline_s = time.monotonic() + within_s
    while not path.exists() or path.read_bytes().count(b"\n") < num_rows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, f"no {num_rows} rows in {path}"
        # Another process writes them, and nothing tells when.
        time.sleep(0.01)
