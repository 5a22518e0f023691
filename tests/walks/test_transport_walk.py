"""Random submits, cancels, cuts, stalls and doubled messages: every request ends once, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shared.errors import EngineError, KvrouteError, WorkerLost
from shared.messages import Delta
from shared.transport.base import DeltaStream, Timings
from shared.transport.client import ChannelClient
from shared.types import FinishReason
from shared.vtime import run_virtual
from tests.support.channels import FaultyConnect
from tests.support.fakes import FakeEngine, fake_tokens
from tests.support.transport import Rig, running, submit, tokens_of, until
from worker.host import HostLimits

NUM_STEPS = 150
NUM_ROUTERS = 3
ENDLESS = 1_000_000


@dataclass(eq=False)
class _Asked:
    """One request as the walk remembers it."""

    client: ChannelClient
    prompt: list[int]
    num_tokens: int
    stream: DeltaStream
    deltas: list[Delta] = field(default_factory=list)
    ends: list[FinishReason | KvrouteError | None] = field(default_factory=list)
    """How it ended; `None` for a request that the walk left."""
    is_left: bool = False

    async def read(self, pause_s: float) -> None:
        try:
            async for delta in self.stream:
                self.deltas.append(delta)
                await asyncio.sleep(pause_s)
            self.ends.append(self.deltas[-1].finish if not self.is_left else None)
        except KvrouteError as error:
            self.ends.append(error)

    def check(self) -> None:
        token_ids = tokens_of(self.deltas)
        assert len(self.ends) == 1
        (end,) = self.ends
        assert token_ids == fake_tokens(self.prompt, len(token_ids))
        if end is FinishReason.LENGTH:
            assert len(token_ids) == self.num_tokens
        elif isinstance(end, WorkerLost):
            assert self.client.is_lost
        else:
            assert isinstance(end, EngineError) or (end is None and self.is_left)


class _Walk:
    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self._rig = rig
        self._rng = rng
        self._routers: list[tuple[ChannelClient, FaultyConnect]] = []
        self._asked: list[_Asked] = []
        self._readers: list[asyncio.Task[None]] = []
        self.num_lost_clients = 0

    async def run(self) -> None:
        for _ in range(NUM_ROUTERS):
            self._routers.append(await self._rig.connected(router=f"r{len(self._routers)}"))
        for _ in range(NUM_STEPS):
            action = self._rng.choice(
                (self._ask, self._ask, self._ask, self._leave, self._cut, self._double, self._stall, self._lose)
            )
            await action()
            await asyncio.sleep(self._rng.choice((0.0, 0.001, 0.01, 0.1)))
        for _, connect in self._routers:
            connect.unblock()
            connect.channel.flow()
        for asked in self._asked:
            if asked.num_tokens == ENDLESS:
                await self._leave_request(asked)
        await asyncio.gather(*self._readers)
        for asked in self._asked:
            asked.check()
        # All that is left now is what the worker has still to tell of requests that were left.
        await until(lambda: not any(client.num_open for client, _ in self._routers))

    async def _ask(self) -> None:
        client, _ = self._rng.choice(self._routers)
        number = len(self._asked)
        prompt = [self._rng.randrange(1000) for _ in range(self._rng.randint(1, 50))]
        num_tokens = self._rng.choice((1, 10, 300, ENDLESS))
        asked = _Asked(client, prompt, num_tokens, submit(client, f"q{number}", prompt, num_tokens))
        self._asked.append(asked)
        pause_s = self._rng.choice((0.0, 0.0, 0.05))
        self._readers.append(asyncio.create_task(asked.read(pause_s)))

    async def _leave(self) -> None:
        open_requests = [asked for asked in self._asked if not asked.ends]
        if open_requests:
            await self._leave_request(self._rng.choice(open_requests))

    async def _leave_request(self, asked: _Asked) -> None:
        asked.is_left = True
        await asked.stream.aclose()

    async def _cut(self) -> None:
        client, connect = self._rng.choice(self._routers)
        connect.num_refusals = self._rng.choice((0, 0, 2))
        connect.cut()
        if self._rng.random() < 0.2:
            connect.block()
            away_s = self._rng.choice((0.3, 2.0))
            asyncio.get_running_loop().call_later(away_s, connect.unblock)
        if client.is_lost:
            self.num_lost_clients += 1
            index = self._routers.index((client, connect))
            connect.unblock()
            self._routers[index] = await self._rig.connected(router=f"r{index}")

    async def _double(self) -> None:
        self._rng.choice(self._routers)[1].channel.is_doubling ^= True

    async def _stall(self) -> None:
        channel = self._rng.choice(self._routers)[1].channel
        channel.stall()
        asyncio.get_running_loop().call_later(self._rng.choice((0.05, 0.5)), channel.flow)

    async def _lose(self) -> None:
        self._rng.choice(self._routers)[1].channel.num_to_lose = self._rng.randint(1, 3)


async def _walk(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    engine = FakeEngine(
        token_s=0.001,
        prefill_s_per_token=0.0005,
        tokens_per_delta=rng.choice((1, 4)),
        mode=rng.choice(("healthy", "flaky")),
        fault_rate=0.1,
        max_num_seqs=rng.choice((2, 64)),
        rng=random.Random(seed),
    )
    timings = Timings(resume_s=1.0)
    limits = HostLimits(max_unacknowledged_bytes=rng.choice((500, 8 << 20)))
    async with running("local", folder, engine=engine, timings=timings, limits=limits) as rig:
        await _Walk(rig, rng).run()


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_once_with_its_tokens_and_nothing_is_left(seed: int, tmp_path: Path) -> None:
    run_virtual(_walk(seed, tmp_path))
