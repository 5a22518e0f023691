"""Runs the server of an embedded store, and starts it again when it crashes or is killed. A program of its own.

`embedded` starts it, as `store_keeper.py PARENT LOG SERVER ARGUMENT...`. It needs nothing but the standard library, so
that it is there within milliseconds and takes little memory. What it has to tell goes to its standard error. While it
lives it holds a lock on the file that is its standard output; the server dies with it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

MAX_RESTARTS = 5
"""Within `WINDOW_S`. A server that dies more often than that has a reason that another start does not mend."""
WINDOW_S = 600.0
_LONGEST_PAUSE_S = 8.0
_PR_SET_PDEATHSIG = 1


class Restarts:
    """When what has died was started again, as far as that counts."""

    def __init__(self) -> None:
        self._times_s: list[float] = []

    def next_pause_s(self, now_s: float) -> float | None:
        """How long to wait before the next start; `None` when there have been too many. Modifies: it is counted."""
        self._times_s = [at_s for at_s in self._times_s if now_s - at_s < WINDOW_S]
        if len(self._times_s) >= MAX_RESTARTS:
            return None
        # The first time at once, and then after pauses that grow.
        pause_s = min(_LONGEST_PAUSE_S, 2.0 ** (len(self._times_s) - 1)) if self._times_s else 0.0
        self._times_s.append(now_s)
        return pause_s

    def __str__(self) -> str:
        return f"{len(self._times_s)} of at most {MAX_RESTARTS} times within {WINDOW_S / 60:g} minutes"


TOO_OFTEN = f"is not started again: it was {MAX_RESTARTS} times within {WINDOW_S / 60:g} minutes"


def keep(
    command: Sequence[str],
    log_path: Path,
    *,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Run a server until it ends by itself, or has died too often; its exit code.

    One that ends by itself was told to, or cannot start: it says why in its log.
    """
    own_pid = os.getpid()
    restarts = Restarts()
    has_died = False
    while True:
        with log_path.open("ab") as log:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Nothing runs beside this, so that code between fork and exec is safe.
                preexec_fn=lambda: die_with(own_pid),
            )
        code = server.wait()
        if code >= 0:
            if code and has_died:
                tell(f"the store's server cannot be started again: it ended with code {code}; its log tells why")
            return code
        has_died = True
        how = f"the store's server has died by signal {-code}"
        pause_s = restarts.next_pause_s(clock())
        if pause_s is None:
            tell(f"{how}, and {TOO_OFTEN}")
            return 1
        pause(pause_s)
        tell(f"{how} and is started again, empty: workers fill it ({restarts})")


def die_with(parent: int) -> None:
    """Have the kernel kill this process with the thread that has started it; at once, if that is over."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def main() -> NoReturn:
    parent, log_path, *command = sys.argv[1:]
    if int(parent):
        die_with(int(parent))
    fcntl.flock(sys.stdout, fcntl.LOCK_EX)
    sys.exit(keep(command, Path(log_path), tell=_tell))


def _tell(line: str) -> None:
    try:
        sys.stderr.write(f"kvroute: {line}\n")
        sys.stderr.flush()
    except OSError:
        pass  # nobody listens any more, and the store is needed all the same


if __name__ == "__main__":
    main()
