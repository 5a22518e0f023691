"""Traces for tests: lines of each format, and the folder of the trace that is data of others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from router.traces import TraceRequest, parse_trace
from shared.config import TEST_PREFIX, TRACE_DIR_VARIABLE

TRACE_DIR_VARIABLES = (f"{TEST_PREFIX}TRACE_DIR", TRACE_DIR_VARIABLE)
TRACE_NAME = "mooncake_conversation_head6000.jsonl"
_ROOT = Path(__file__).parents[2]


def trace_path() -> Path:
    """Where Mooncake's conversation trace is looked for; nothing says that it is there."""
    named = [os.environ[variable] for variable in TRACE_DIR_VARIABLES if os.environ.get(variable)]
    return Path(named[0] if named else _ROOT.parent / "shared" / "traces") / TRACE_NAME


def require_trace() -> Path:
    """The trace's file; skips the test, by name, where it is not there."""
    path = trace_path()
    if not path.is_file():
        pytest.skip(f"{path} is missing; {TRACE_DIR_VARIABLES[0]} names the folder of {TRACE_NAME}")
    return path


def mooncake(timestamp: Any = 0, input_length: Any = 700, hash_ids: Any = (0, 1), output_length: Any = 8) -> Any:
    """One line of Mooncake's format."""
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hash_ids) if isinstance(hash_ids, tuple) else hash_ids,
    }


def logged(timestamp_s: Any = 0.0, **fields: Any) -> dict[str, Any]:
    """One line of a request log; two full blocks of 64 and a tail unless told."""
    content = {"prompt_tokens": 150, "block_hashes": ["a", "b"]} if "token_ids" not in fields else {}
    return {"timestamp_s": timestamp_s, "output_tokens": 8, **content, **fields}


def lines(*rows: Any) -> list[bytes]:
    """Rows as lines of a file; strings and bytes go in as they are."""
    return [
        (row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()) + b"\n"
        for row in rows
    ]


def parsed(*rows: Any, tokenise: Any = None) -> list[TraceRequest]:
    """All requests of a trace called `t`."""
    return list(parse_trace(lines(*rows), "t", tokenise))
