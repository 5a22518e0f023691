"""How much work a call is, counted and not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_operations(work: Callable[[], object]) -> int:
    """Bytecodes that run and functions in C that are called while `work` runs: every turn of a loop counts.

    What such a function does inside counts as one, so a scan of a list within `list.remove` is not seen.
    """
    counted = 0

    def on_opcode(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        frame.f_trace_opcodes = True
        counted += event == "opcode"
        return on_opcode

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event == "c_call"

    tracer = sys.gettrace()
    sys.settrace(on_opcode)
    sys.setprofile(on_call)
    try:
        work()
    finally:
        sys.setprofile(None)
        sys.settrace(tracer)
    return counted
