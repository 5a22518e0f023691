"""The request log: one JSON line for each request that was answered, as `kvroute replay` reads it.

Tells which prompts began alike, and nothing of what was in them: blocks are hashes here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from router.requests import GenerateRequest, RequestTrace
from shared.errors import ConfigError
from shared.telemetry import Metrics
from shared.types import BlockKey

logger = logging.getLogger(__name__)

_WRITE_INTERVAL_S = 1.0
_MAX_WAITING_BYTES = 64 << 20
"""Lines that may wait for a slow disk. What comes beyond is left out, told once and counted."""
_HASH_BYTES = 8
"""Of a block's key, what is logged: among a hundred million blocks two are alike once in three thousand logs."""
_BEGIN = b'{"timestamp_s":'
_CHUNK_BYTES = 1 << 16
_PROBE_BYTES = 1 << 12
"""What a disk must have room for at the start: less than that would not last for long."""


def log_of_process(path: Path, number: int) -> Path:
    """The file of one of several processes that serve together: `log.jsonl`, and beside it `log.1.jsonl` and so on.

    Each has one of its own, since a file has one writer. Put one after the other they are one log again: whoever
    replays it goes by the times.
    """
    return path if number == 0 else path.with_name(f"{path.stem}.{number}{path.suffix}")


async def check_request_log(path: Path) -> None:
    """Find out about a file that cannot be written before anything is started. Raises `ConfigError`."""
    os.close(await asyncio.to_thread(_open, path))


class RequestLog:
    """Owns one file, locked and appended to. Use as `async with`.

    Lines gather in memory, and a thread writes them once a second: the disk holds up nobody. Lines are in order of the
    requests' ends, and their times are those of arrival.
    """

    def __init__(self, path: Path, *, block_size_tokens: int, wall_clock: Callable[[], float]) -> None:
        self._path = path
        self._block_size_tokens = block_size_tokens
        self._wall_clock = wall_clock
        self._fd: int | None = None
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self.num_left_out = 0
        """Requests that are not in the file, since it could not be written or not fast enough."""
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RequestLog:
        """Raises `ConfigError` where the file cannot be written to, or somebody else does."""
        self._fd = await asyncio.to_thread(_open, self._path)
        self._task = asyncio.create_task(self._keep_writing(), name="request-log")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        # After the one that may be under way.
        await self._write()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def expose(self, metrics: Metrics) -> None:
        """Tell how many lines are missing. Modifies."""
        metrics.add_counter(
            "kvroute_request_log_left_out",
            "Answered requests that are not in the request log, since it could not be written.",
            lambda: self.num_left_out,
        )

    def note(self, request: GenerateRequest, keys: Sequence[BlockKey], trace: RequestTrace) -> None:
        """Have a request's line written that has got tokens; `keys` are those of its prompt's full blocks. Modifies."""
        ago_s = asyncio.get_running_loop().time() - trace.received_at_s
        line = {
            "timestamp_s": round(self._wall_clock() - ago_s, 3),
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": trace.num_output_tokens,
            "max_tokens": request.sampling.max_tokens,
            "block_size": self._block_size_tokens,
            "block_hashes": [key[:_HASH_BYTES].hex() for key in keys],
            "tenant": request.tenant,
            "priority": request.priority,
            "service_class": request.service_class,
        }
        packed = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if self._waiting_bytes + len(packed) > _MAX_WAITING_BYTES:
            self._leave_out(1, "it is written too slowly")
            return
        self._waiting.append(packed)
        self._waiting_bytes += len(packed)

    async def _keep_writing(self) -> None:
        while True:
            await asyncio.sleep(_WRITE_INTERVAL_S)
            # A write that is under way is not interrupted, or its lines would be written twice or not at all.
            await asyncio.shield(asyncio.ensure_future(self._write()))

    async def _write(self) -> None:
        async with self._turn:
            if not self._waiting or self._fd is None:
                return
            lines, self._waiting, self._waiting_bytes = self._waiting, [], 0
            try:
                await asyncio.to_thread(_append, self._fd, b"".join(lines))
            except OSError as error:
                self._leave_out(len(lines), error.strerror or str(error))

    def _leave_out(self, num_requests: int, reason: str) -> None:
        if not self.num_left_out:
            logger.warning("request log %s: requests are left out: %s", self._path, reason)
        self.num_left_out += num_requests


def _open(path: Path) -> int:
    """The file, locked, without a line that a crash has torn. Raises `ConfigError`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise ConfigError(f"--request-log: cannot write {path}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _cut_torn_line(fd, path)
        _check_room(fd)
    except OSError as error:
        os.close(fd)
        reason = "another process writes it" if isinstance(error, BlockingIOError) else error.strerror
        raise ConfigError(f"--request-log: cannot write {path}: {reason}") from None
    except ConfigError:
        os.close(fd)
        raise
    return fd


def _cut_torn_line(fd: int, path: Path) -> None:
    """Take away what a crash has left of a line. Raises `ConfigError` for a file that is something else."""
    size = end = os.fstat(fd).st_size
    if not _BEGIN.startswith(os.pread(fd, len(_BEGIN), 0)):
        raise ConfigError(f"--request-log: {path} is no request log: it is left as it is")
    cut = 0
    while end:
        begin = max(0, end - _CHUNK_BYTES)
        newline = os.pread(fd, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            cut = begin + newline + 1
            break
        end = begin
    if cut < size:
        os.ftruncate(fd, cut)


def _check_room(fd: int) -> None:
    """Raise `OSError` where the disk takes nothing: a file can be opened on a full one, too."""
    found = os.fstat(fd)
    _append(fd, b" " * _PROBE_BYTES)
    # A device, as `/dev/null`, keeps nothing.
    if stat.S_ISREG(found.st_mode):
        os.ftruncate(fd, found.st_size)


def _append(fd: int, packed: bytes) -> None:
    """All of it or nothing."""
    size = os.fstat(fd).st_size
    left = memoryview(packed)
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise
