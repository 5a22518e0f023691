"""What the server processes behind one port tell each other, over sockets in a folder of their user alone.

One asks with a name in one line and gets the answer as bytes; who asks knows what they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""How long a process may take to answer; one that does not is left out."""
_LENGTH_BYTES = 8
_MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A process's own place among all of them."""

    folder: Path
    """In which each has its socket; of this user alone."""
    number: int
    num_processes: int

    def listen(self) -> socket.socket:
        """The socket at which this process is asked."""
        path = _socket_path(self.folder, self.number)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        return listener

    async def ask_others(self, name: str) -> dict[int, bytes | None]:
        """What each other process tells under a name, by its number.

        `None` where one does not answer in time, which the log says.
        """
        numbers = [number for number in range(self.num_processes) if number != self.number]
        told = await asyncio.gather(*(_ask(_socket_path(self.folder, number), name) for number in numbers))
        return dict(zip(numbers, told, strict=True))


@contextlib.asynccontextmanager
async def telling_siblings(
    listener: socket.socket, name_to_tell: Mapping[str, Callable[[], Awaitable[bytes]]]
) -> AsyncIterator[None]:
    """Answer whoever asks, by name, until this ends."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                told = await name_to_tell[(await reader.readline()).decode().strip()]()
                writer.write(len(told).to_bytes(_LENGTH_BYTES) + told)
                await writer.drain()
        except (OSError, TimeoutError, ValueError, KeyError) as error:
            logger.debug("a sibling gets no answer: %r", error)
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, sock=listener)
    try:
        yield
    finally:
        server.close()


async def _ask(path: Path, name: str) -> bytes | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(f"{name}\n".encode())
                length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
                return await reader.readexactly(min(length, _MAX_ANSWER_BYTES))
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        logger.warning("the process at %s does not tell its %s: %s", path.name, name, error or "no answer in time")
        return None


def _socket_path(folder: Path, number: int) -> Path:
    return folder / f"router-{number}.sock"
