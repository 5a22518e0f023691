"""Listening for channels on a Unix or TCP socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

from shared.transport.channel import SocketChannel, parse_address

OnChannel = Callable[[SocketChannel], None]


class Listener:
    """One listening socket. Gives each new connection away and keeps none."""

    def __init__(self, address: str, server: asyncio.Server, path: Path | None) -> None:
        self.address = address
        """Where to connect to: as asked for, with the port that was found."""
        self._server = server
        self._path = path

    @classmethod
    async def open(cls, address: str, on_channel: OnChannel) -> Listener:
        """Listen at `unix:/path` or `tcp://host:port`. Raises `OSError`, or `ConfigError` for another form.

        A Unix socket is for its owner alone, as is its folder where that is made here. A missing TCP host is loopback,
        port 0 is any free port.
        """

        def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            on_channel(SocketChannel(reader, writer))

        target = parse_address(address)
        if isinstance(target, Path):
            server = await asyncio.start_unix_server(on_connection, sock=_private_socket(target))
            return cls(f"unix:{target}", server, target)
        host, port = target
        server = await asyncio.start_server(on_connection, host, port)
        actual_port = server.sockets[0].getsockname()[1]
        return cls(f"tcp://[{host}]:{actual_port}" if ":" in host else f"tcp://{host}:{actual_port}", server, None)

    async def close(self) -> None:
        """Take no more connections. Those given away live on."""
        self._server.close()
        await self._server.wait_closed()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _private_socket(path: Path) -> socket.socket:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_socket():
        path.unlink()  # left behind by a process that was killed; a live one has a path of its own
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Linux gives the file the mode of the unbound socket, so there is no moment in which others may connect.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(str(path))
        path.chmod(0o600)
    except BaseException:
        sock.close()
        raise
    return sock
