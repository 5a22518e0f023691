"""A host on a fake engine and its clients, over each kind of channel, with a check that nothing is left."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

from shared.hashing import pack_tokens
from shared.messages import Delta
from shared.transport.base import Channel, Connect, DeltaStream, Timings, WorkerClient
from shared.transport.channel import open_channel
from shared.transport.client import ChannelClient
from shared.types import Instance, RequestId, RouterId, Sampling, WorkerId
from tests.support.channels import FaultyConnect
from tests.support.fakes import FakeEngine
from worker.host import HostLimits, WorkerHost

Kind = Literal["local", "unix", "tcp"]
KINDS: tuple[Kind, ...] = ("local", "unix", "tcp")
SECRET = b"the secret of this test"
WORKER = WorkerId("w1")
INSTANCE = Instance("1" * 32)
BRISK = Timings(
    status_interval_s=0.01,
    frame_interval_s=0.001,
    backoff_s=0.001,
    max_backoff_s=0.01,
    # What ends something by its silence is set by the tests that are about it, and never comes by a busy machine.
    handshake_s=600.0,
    resume_s=600.0,
    silence_s=600.0,
)
"""Quick where a test would wait, patient where only a stall of the machine could make a difference."""


class Rig:
    """One worker host and any number of clients."""

    def __init__(self, kind: Kind, folder: Path, engine: FakeEngine, timings: Timings, limits: HostLimits) -> None:
        self.kind = kind
        self.engine = engine
        self.timings = timings
        self.limits = limits
        self._folder = folder
        self._clients: list[ChannelClient] = []
        self.host = self._new_host(INSTANCE)
        self.address = ""

    async def start(self) -> None:
        if self.kind == "unix":
            self.address = await self.host.listen(f"unix:{self._folder}/run/w1.sock")
        elif self.kind == "tcp":
            self.address = await self.host.listen(self.address or "tcp://127.0.0.1:0")

    async def restart_host(self, instance: Instance) -> None:
        """Another life of the worker at the same address."""
        await self.host.close()
        self.engine = FakeEngine()
        self.host = self._new_host(instance)
        await self.start()

    def connect_function(self) -> Connect:
        if self.kind == "local":
            return lambda: self.host.open_local()
        return functools.partial(open_channel, self.address)

    def client(
        self, *, router: str = "r1", secret: bytes = SECRET, on_change: Callable[[], None] | None = None
    ) -> tuple[ChannelClient, FaultyConnect]:
        connect = FaultyConnect(self.connect_function())
        client = ChannelClient(
            WORKER,
            INSTANCE,
            RouterId(router),
            secret,
            connect,
            rng=random.Random(0),
            timings=self.timings,
            on_change=on_change,
        )
        self._clients.append(client)
        return client, connect

    async def connected(self, router: str = "r1") -> tuple[ChannelClient, FaultyConnect]:
        client, connect = self.client(router=router)
        await client.connect()
        return client, connect

    async def close(self) -> None:
        """End everything and check that neither side keeps anything."""
        for client in self._clients:
            await client.close()
            assert client.num_open == 0
        await self.host.close()
        assert (self.host.num_requests, self.host.num_sessions) == (0, 0)
        assert self.host.status().queued_prefill_tokens == 0
        assert self.engine.num_live == 0

    def _new_host(self, instance: Instance) -> WorkerHost:
        host = WorkerHost(
            self.engine,
            self.engine.info,
            worker=WORKER,
            instance=instance,
            secret=SECRET,
            limits=self.limits,
            timings=self.timings,
        )
        self.engine.on_death = host.engine_died
        return host


@asynccontextmanager
async def running(
    kind: Kind,
    folder: Path,
    *,
    engine: FakeEngine | None = None,
    timings: Timings = BRISK,
    limits: HostLimits | None = None,
) -> AsyncIterator[Rig]:
    """A started rig; at the end no task of ours may be left."""
    others = asyncio.all_tasks()
    rig = Rig(kind, folder, engine or FakeEngine(), timings, limits or HostLimits())
    await rig.start()
    try:
        yield rig
    except BaseException:
        with suppress(Exception):
            await rig.close()  # the test's own failure is what is told
        raise
    await rig.close()
    await until(lambda: not {task for task in asyncio.all_tasks() - others if task.get_name().startswith("kvroute")})


def submit(client: WorkerClient, request: str, prompt: list[int], num_tokens: int, attempt: int = 0) -> DeltaStream:
    return client.submit(RequestId(request), attempt, pack_tokens(prompt), Sampling(max_tokens=num_tokens))


async def collect(stream: DeltaStream, into: list[Delta] | None = None) -> list[Delta]:
    """All deltas; `into` keeps those that come before an error."""
    deltas = [] if into is None else into
    async for delta in stream:
        deltas.append(delta)
    return deltas


async def drain_channel(channel: Channel) -> None:
    """Hear until the other side closes. Raises `ConnectionError` then."""
    while True:
        await channel.receive()


def tokens_of(deltas: list[Delta]) -> tuple[int, ...]:
    """The answer, after checking that the deltas are in order and without holes."""
    token_ids: list[int] = []
    for delta in deltas:
        assert delta.offset == len(token_ids)
        token_ids += delta.token_ids
    return tuple(token_ids)


async def until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """Wait for what no event tells; fails after a deadline that no healthy run comes near."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.001)
