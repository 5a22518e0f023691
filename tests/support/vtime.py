"""Virtual time, where tests look for it."""

from __future__ import annotations

from shared.vtime import VirtualTimeDeadlock, VirtualTimeLoop, run_virtual

__all__ = ["VirtualTimeDeadlock", "VirtualTimeLoop", "run_virtual"]
