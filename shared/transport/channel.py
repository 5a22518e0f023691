"""Channels: whole messages over a Unix or TCP socket, or between two ends in one process."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from pathlib import Path
from urllib.parse import urlsplit

from shared.errors import ConfigError, ProtocolError
from shared.transport.base import Channel

_logger = logging.getLogger(__name__)

STRANGER_LIMIT_BYTES = 4096
"""Longest message taken from a peer that has not proved itself."""
_PREFIX_BYTES = 4
_LOCAL_CAPACITY_BYTES = 256 << 10
_FLUSH_S = 1.0
_SLACK_S = 1e-4
"""Timers may fire a moment early."""


class SocketChannel:
    """A channel over an asyncio stream; each message follows its length as 4 bytes, big-endian."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.receive_limit_bytes = STRANGER_LIMIT_BYTES

    async def send(self, raw: bytes) -> None:
        if self._writer.is_closing():
            raise ConnectionError("the connection is closed")
        self._write(raw)
        try:
            await self._writer.drain()
        except OSError as error:
            raise _as_connection_error(error) from error

    def send_now(self, raw: bytes) -> bool:
        if self._writer.is_closing() or self._writer.transport.get_write_buffer_size():
            return False
        self._write(raw)
        return True

    def _write(self, raw: bytes) -> None:
        self._writer.write(len(raw).to_bytes(_PREFIX_BYTES, "big") + raw)

    async def receive(self) -> bytes:
        try:
            num_bytes = int.from_bytes(await self._reader.readexactly(_PREFIX_BYTES), "big")
            if num_bytes > self.receive_limit_bytes:
                raise ProtocolError(f"message of {num_bytes} bytes is over the limit of {self.receive_limit_bytes}")
            return await self._reader.readexactly(num_bytes)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the peer closed the connection") from error
        except OSError as error:
            raise _as_connection_error(error) from error

    def close(self) -> None:
        self._writer.close()
        transport = self._writer.transport
        if transport.get_write_buffer_size():
            # A peer that no longer reads must not hold the socket and its buffer for ever.
            asyncio.get_running_loop().call_later(_FLUSH_S, transport.abort)


class LocalChannel:
    """One end of an in-process channel that carries the same bytes; bounded as a socket's buffers are."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self.receive_limit_bytes = STRANGER_LIMIT_BYTES

    async def send(self, raw: bytes) -> None:
        await self._outgoing.put(raw)

    def send_now(self, raw: bytes) -> bool:
        return False

    async def receive(self) -> bytes:
        raw = await self._incoming.get()
        if len(raw) > self.receive_limit_bytes:
            raise ProtocolError(f"message of {len(raw)} bytes is over the limit of {self.receive_limit_bytes}")
        return raw

    def close(self) -> None:
        self._incoming.close(is_drained=False)
        self._outgoing.close(is_drained=True)


class _Pipe:
    """One direction of a local channel. Over its capacity it takes a message only when it is empty."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._messages: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()

    async def put(self, raw: bytes) -> None:
        while not self._is_closed and self._messages and self._num_bytes + len(raw) > self._capacity_bytes:
            self._writable.clear()
            await self._writable.wait()
        if self._is_closed:
            raise ConnectionError("the connection is closed")
        self._messages.append(raw)
        self._num_bytes += len(raw)
        self._readable.set()

    async def get(self) -> bytes:
        while not self._messages:
            if self._is_closed:
                raise ConnectionError("the connection is closed")
            self._readable.clear()
            await self._readable.wait()
        raw = self._messages.popleft()
        self._num_bytes -= len(raw)
        self._writable.set()
        return raw

    def close(self, *, is_drained: bool) -> None:
        """Take nothing more. What is inside is still given out if `is_drained`."""
        self._is_closed = True
        if not is_drained:
            self._messages.clear()
            self._num_bytes = 0
        self._readable.set()
        self._writable.set()


class SilenceGuard:
    """Closes a channel that has brought nothing for too long: a machine that is lost closes no socket."""

    def __init__(self, channel: Channel, silence_s: float) -> None:
        self._channel = channel
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._heard_at_s = self._loop.time()
        self._timer = self._loop.call_later(silence_s, self._look)

    def heard(self) -> None:
        """Note a sign of life. Costs no timer."""
        self._heard_at_s = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left_s = self._heard_at_s + self._silence_s - self._loop.time()
        if left_s <= _SLACK_S:
            _logger.info("a peer was silent for %s s and is cut off", self._silence_s)
            self._channel.close()
        else:
            self._timer = self._loop.call_later(left_s, self._look)


def local_pair(capacity_bytes: int = _LOCAL_CAPACITY_BYTES) -> tuple[LocalChannel, LocalChannel]:
    """The two ends of an in-process channel."""
    there, back = _Pipe(capacity_bytes), _Pipe(capacity_bytes)
    return LocalChannel(back, there), LocalChannel(there, back)


async def open_channel(address: str) -> Channel:
    """Connect to `unix:/path` or `tcp://host:port`. Raises `OSError`, or `ConfigError` for another form of address."""
    target = parse_address(address)
    try:
        if isinstance(target, Path):
            return SocketChannel(*await asyncio.open_unix_connection(target))
        # asyncio sets TCP_NODELAY on every TCP stream: small frames are not held back.
        return SocketChannel(*await asyncio.open_connection(*target))
    except ValueError as error:
        # Zeros in a path, host names that are none.
        raise ConfigError(f"address {address!r}: {error}") from error


def parse_address(address: str) -> Path | tuple[str, int]:
    """The path of `unix:/path`, or host and port of `tcp://host:port`; a missing host is loopback.

    Raises:
        ConfigError: the address has another form.
    """
    parts = urlsplit(address)
    try:
        if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
            return Path(parts.path)
        if parts.scheme == "tcp" and parts.port is not None and parts.path in ("", "/"):
            return parts.hostname or "127.0.0.1", parts.port
    except ValueError as error:
        raise ConfigError(f"address {address!r}: {error}") from error
    raise ConfigError(f"address {address!r} is neither unix:/path nor tcp://host:port")


def _as_connection_error(error: OSError) -> ConnectionError:
    return error if isinstance(error, ConnectionError) else ConnectionError(str(error))
