"""Connections that break on demand, for any kind of channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.transport.base import Channel, Connect


class FaultyChannel:
    """Passes messages on until it is told otherwise."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._may_receive = asyncio.Event()
        self._may_receive.set()
        self._again: list[bytes] = []
        self.is_lossy = False
        """Whether what is sent and received from now on is lost."""
        self.num_to_lose = 0
        """So many received messages are lost from now on."""
        self.is_doubling = False
        """Whether each message arrives twice, at either end."""

    @property
    def receive_limit_bytes(self) -> int:
        return self._channel.receive_limit_bytes

    @receive_limit_bytes.setter
    def receive_limit_bytes(self, limit_bytes: int) -> None:
        self._channel.receive_limit_bytes = limit_bytes

    async def send(self, raw: bytes) -> None:
        if not self.is_lossy:
            await self._channel.send(raw)
            if self.is_doubling:
                await self._channel.send(raw)

    def send_now(self, raw: bytes) -> bool:
        """Leave it to `send`, which knows what is to become of it."""
        return False

    async def receive(self) -> bytes:
        while True:
            await self._may_receive.wait()
            if self._again:
                return self._again.pop()
            raw = await self._channel.receive()
            await self._may_receive.wait()
            if self.is_lossy:
                continue
            if self.num_to_lose:
                self.num_to_lose -= 1
                continue
            if self.is_doubling:
                self._again.append(raw)
            return raw

    def close(self) -> None:
        self._may_receive.set()
        self._channel.close()

    def stall(self) -> None:
        """Receive nothing until `flow`, as a process does that is busy."""
        self._may_receive.clear()

    def flow(self) -> None:
        self._may_receive.set()


class FaultyConnect:
    """A `Connect` whose connections can be broken and whose attempts can be made to fail."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._may_connect = asyncio.Event()
        self._may_connect.set()
        self.channels: list[FaultyChannel] = []
        self.wrap: Callable[[Channel], Channel] = lambda channel: channel
        """Laid around each new connection."""
        self.num_refusals = 0
        """So many attempts from now on fail."""

    async def __call__(self) -> Channel:
        if self.num_refusals:
            self.num_refusals -= 1
            raise ConnectionResetError("refused by the test")
        await self._may_connect.wait()
        channel = FaultyChannel(self.wrap(await self._connect()))
        self.channels.append(channel)
        return channel

    @property
    def channel(self) -> FaultyChannel:
        return self.channels[-1]

    def cut(self) -> None:
        """Break the connection; what is under way may be lost."""
        self.channel.is_lossy = True
        self.channel.close()

    def block(self) -> None:
        """Let no attempt to connect end until `unblock`."""
        self._may_connect.clear()

    def unblock(self) -> None:
        self._may_connect.set()
