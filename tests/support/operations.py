"""Counts what a call does, for claims on its cost that hold on every machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def count_operations(call: Callable[[], object]) -> int:
    """Bytecode instructions that the interpreter executes for a call, whatever it calls included.

    So a loop counts by its rounds even where it calls nothing. What a function written in C does counts as one.
    """
    num_operations = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal num_operations
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num_operations += event == "opcode"
        return trace

    former = sys.gettrace()
    was_collecting = gc.isenabled()
    # A collection may come at any allocation, and finalizers of what others left would count as the call's own.
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(former)
        if was_collecting:
            gc.enable()
    return num_operations
