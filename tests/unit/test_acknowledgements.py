"""How often a router acknowledges what a worker sends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from shared.messages import Ack, Delta, Frame, decode, encode
from shared.transport.base import Channel
from shared.transport.channel import local_pair
from shared.transport.client import ChannelClient
from shared.transport.handshake import receive_hello, send_welcome
from shared.types import Instance, RequestId, RouterId, WorkerId
from shared.vtime import run_virtual

WORKER, INSTANCE, SECRET = WorkerId("w"), Instance("0" * 32), b"secret"


async def acknowledged(frames: Sequence[Frame], gap_s: float) -> list[int]:
    """What a router acknowledges of frames that come one after the other."""
    ours, theirs = local_pair(capacity_bytes=1 << 24)

    async def connect() -> Channel:
        return theirs

    client = ChannelClient(WORKER, INSTANCE, RouterId("r"), SECRET, connect, rng=random.Random(0))
    connecting = asyncio.create_task(client.connect())
    greeting = await receive_hello(ours, SECRET)
    await send_welcome(ours, SECRET, greeting, WORKER, INSTANCE, is_resumed=False, last_submit=0)
    await connecting
    found: list[int] = []

    async def read() -> None:
        while isinstance(message := decode(await ours.receive()), Ack):
            found.append(message.frame)

    reading = asyncio.create_task(read())
    for frame in frames:
        await ours.send(encode(frame))
        await asyncio.sleep(gap_s)
    await client.close()
    await reading
    return found


def test_many_frames_are_acknowledged_together() -> None:
    frames = [Frame(INSTANCE, number, 0) for number in range(1, 181)]
    found = run_virtual(acknowledged(frames, gap_s=0.001))
    assert [round(frame, -1) for frame in found] == [0, 50, 100, 150]


def test_each_status_of_a_quiet_worker_is_acknowledged() -> None:
    frames = [Frame(INSTANCE, number, 0) for number in range(1, 6)]
    assert run_virtual(acknowledged(frames, gap_s=0.099)) == [1, 2, 3, 4, 5]


def test_much_at_once_is_acknowledged_at_once() -> None:
    many = Delta(RequestId("left"), 1, 0, (1 << 30,) * 250_000)
    frames = [Frame(INSTANCE, 1, 0), Frame(INSTANCE, 2, 0), Frame(INSTANCE, 3, 0, (many,)), Frame(INSTANCE, 4, 0)]
    assert run_virtual(acknowledged(frames, gap_s=0.001)) == [1, 3]
