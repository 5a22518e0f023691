"""The command `kvroute` as its users run it: a process of its own, whose every descendant can be found."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on PATH")

_TAG_VARIABLE = "KVROUTE_TEST_TAG"
"""Inherited by all that a command starts, whatever session or parent it ends up with."""


def tagged_environment(tag: str, **variables: str) -> dict[str, str]:
    """This process's environment without settings of ours, and with a tag that descendants are found by."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVROUTE_", "RAY_"))}
    # The temporary folder of a test has a path too long for the sockets of Ray.
    return {**kept, _TAG_VARIABLE: tag, "PYTHONPATH": os.getcwd(), **variables}


def start_command(
    *arguments: str | Path, environment: Mapping[str, str], module: str = "router.cli"
) -> subprocess.Popen[str]:
    """Start `kvroute ARGUMENTS`, or another module that takes arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_command(
    *arguments: str | Path, environment: Mapping[str, str], module: str = "router.cli", timeout_s: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """Run `kvroute ARGUMENTS`, or another module that takes arguments, to its end."""
    process = start_command(*arguments, environment=environment, module=module)
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"kvroute {arguments} did not end within {timeout_s} s:\n{stderr}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def tagged_processes(tag: str) -> list[psutil.Process]:
    """Everything that lives and was started, by whatever way, under the tag."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_TAG_VARIABLE) == tag:
                found.append(process)
    return found


def assert_no_process_left(tag: str, within_s: float = 60.0) -> None:
    """Wait until nothing of the tag lives any more; what does not end in time is named, and ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        left = tagged_processes(tag)
        if not left:
            return
        psutil.wait_procs(left, timeout=0.5)
    left = tagged_processes(tag)
    names = [" ".join(process.cmdline())[:120] for process in left]
    for process in left:
        process.kill()
    assert not left, names
