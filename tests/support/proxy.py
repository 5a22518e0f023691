"""A TCP proxy in front of a store that cuts connections where a test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Literal
from urllib.parse import urlsplit

Direction = Literal["to the store", "from the store"]


class Proxy:
    """Passes bytes on, until one direction has passed as many as it may: then it cuts every connection, once."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._target = (address.hostname, address.port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._direction: Direction = "to the store"
        self._num_left: int | None = None
        self.num_cuts = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut_after(self, num_bytes: int, direction: Direction) -> None:
        """Let so many more bytes pass that way, over all connections, and cut them in the middle of what follows."""
        self._direction, self._num_left = direction, num_bytes

    def cut(self) -> None:
        self.num_cuts += 1
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        store_reader, store_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, store_writer}
        for source, target, direction in (
            (reader, store_writer, "to the store"),
            (store_reader, writer, "from the store"),
        ):
            task = asyncio.create_task(self._pass_on(source, target, direction))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, direction: str) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if self._num_left is not None and direction == self._direction:
                    data, is_over = data[: self._num_left], len(data) > self._num_left
                    self._num_left -= len(data)
                    target.write(data)
                    await target.drain()
                    if is_over:
                        self._num_left = None
                        self.cut()
                    continue
                target.write(data)
                await target.drain()
        target.transport.abort()
        self._writers.discard(target)


@contextlib.asynccontextmanager
async def proxy(url: str) -> AsyncIterator[Proxy]:
    """A proxy to the store at `url`, on a port of its own."""
    opened = Proxy(url)
    opened._server = await asyncio.start_server(opened._serve, "127.0.0.1", 0)
    try:
        yield opened
    finally:
        opened._server.close()
        opened.cut()
        await opened._server.wait_closed()
        await asyncio.gather(*opened._tasks, return_exceptions=True)
