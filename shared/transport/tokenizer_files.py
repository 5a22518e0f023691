"""Both ends of one question to a worker: the files of its tokenizer, for a router that has none it can use."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from shared.errors import KvrouteError, ProtocolError, WorkerLost
from shared.messages import Ack, AskTokenizer, Frame, Refused, TokenizerFile, decode, encode
from shared.transport.base import Channel, Connect
from shared.transport.faults import error_of
from shared.transport.handshake import SESSION_BYTES, greet_worker
from shared.types import Instance, RouterId, WorkerId

FILE_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
)
"""What a tokenizer and its chat template are made of. No other name is sent or taken."""
_MAX_FILE_BYTES = 48 << 20
_GOODBYE = Refused("closed", "the files have come")
_NUMBER = 1


async def send_tokenizer(channel: Channel, asked: AskTokenizer, name_to_content: Mapping[str, bytes]) -> None:
    """Answer such a question. Raises `ConnectionError`."""
    num_left = len(name_to_content)
    for name, content in name_to_content.items():
        num_left -= 1
        await channel.send(encode(TokenizerFile(asked.number, name, content, num_left)))


def read_tokenizer(folder: Path) -> dict[str, bytes]:
    """The files in a model's folder, by name. Blocks. Raises `OSError`."""
    paths = [folder / name for name in FILE_NAMES]
    return {path.name: path.read_bytes() for path in paths if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES}


async def fetch_tokenizer(
    connect: Connect, worker: WorkerId, instance: Instance, router: RouterId, secret: bytes
) -> dict[str, bytes]:
    """The files of a worker's tokenizer, by name, over a connection of its own.

    Waits as long as it takes; put a deadline around it. Raises `OSError` where nobody listens, `WorkerLost` where the
    worker is another one or ends, the error that it tells, `ProtocolError`, and `AuthenticationFailed`.
    """
    channel = await connect()
    try:
        welcome = await greet_worker(channel, secret, router, secrets.token_bytes(SESSION_BYTES), 0)
        if (welcome.worker, welcome.instance) != (worker, instance):
            raise WorkerLost(f"{welcome.worker}, instance {welcome.instance}, answers in place of worker {worker}")
        await channel.send(encode(AskTokenizer(_NUMBER)))
        found: dict[str, bytes] = {}
        is_whole = False
        while not is_whole:
            is_whole = await _hear(channel, found)
        await channel.send(encode(_GOODBYE))
        return found
    finally:
        channel.close()


async def _hear(channel: Channel, found: dict[str, bytes]) -> bool:
    """Take one message; whether it brought the last file. Modifies `found`."""
    message = decode(await channel.receive())
    if isinstance(message, Frame):
        # Status goes on meanwhile; the acknowledgement is also our sign of life.
        await channel.send(encode(Ack(message.number)))
        return False
    if isinstance(message, Refused):
        raise WorkerLost(f"the worker ends: {message.message}")
    if not isinstance(message, TokenizerFile) or message.number != _NUMBER:
        raise ProtocolError(f"a worker does not send {type(message).__name__} among a tokenizer's files")
    if message.fault is not None:
        error: KvrouteError = error_of(message.fault)
        raise error
    if message.name not in FILE_NAMES or message.name in found:
        raise ProtocolError(f"a worker sends {message.name[:64]!r} among a tokenizer's files")
    found[message.name] = message.content
    return message.num_left == 0
