"""A dashboard over a simulated fleet in real time, with load: for browser tests, screenshots and a look by hand.

python -m tests.support.dashboard_rig [--port N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from router.dashboard import dashboard_app
from router.joined_view import joined, own_share
from router.overview import BatchJob, Overview, Viewpoint
from router.policies import make_policy
from router.requests import GenerateRequest, RequestTrace
from router.service import Router
from shared.directory.base import WorkerRecord
from shared.directory.mirrored import MirroredDirectory
from shared.errors import KvrouteError
from shared.hashing import pack_tokens, parity_key
from shared.telemetry import Metrics
from shared.transport.base import Channel, OnChange, WorkerClient
from shared.transport.client import ChannelClient
from shared.types import CacheScheme, Instance, RequestId, RouterId, Sampling, WorkerId, WorkerInfo
from tests.support.memory_store import MemoryFeed, MemoryStore
from worker.engines.base import BlockChange
from worker.engines.profiles import load_profile
from worker.engines.simulator import SimulatorEngine
from worker.engines.simulator_options import SimulatorOptions
from worker.host import WorkerHost
from worker.publisher import Publisher

SCHEME = CacheScheme("llama-2-13b-chat", 64)
PARITY_KEY = parity_key(SCHEME, b"rig")
_SECRET = b"rig"
_NUM_BLOCKS = 400


@dataclass(slots=True)
class _Slot:
    engine: SimulatorEngine
    host: WorkerHost
    publisher: Publisher


class _Server(uvicorn.Server):
    """A server whose signals are its owner's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class Rig:
    """Simulated workers behind real hosts, routers, one dashboard."""

    store: MemoryStore
    worker_to_slot: dict[WorkerId, _Slot] = field(default_factory=dict)
    routers: list[Router] = field(default_factory=list)
    app: Any = None
    """The dashboard alone, for those who mount it elsewhere."""
    url: str = ""
    server: uvicorn.Server | None = None
    num_started: int = 0
    num_requests: int = 0
    began_at: float = field(default_factory=time.time)

    async def start_worker(self, name: str, *, tells_blocks: bool = True) -> None:
        """Start a worker, or another life of it."""
        self.num_started += 1
        worker, instance = WorkerId(name), Instance(f"{self.num_started:032x}")

        def on_blocks(change: BlockChange) -> None:
            publisher.on_blocks(change)

        options = SimulatorOptions(
            load_profile("13b-a100"),
            SCHEME,
            num_blocks=_NUM_BLOCKS,
            max_model_len_tokens=4096,
            max_num_seqs=16,
            is_warm=True,
        )
        engine = SimulatorEngine(options, on_blocks, lambda reason: None)
        info = await engine.start()
        host = WorkerHost(engine, info, worker=worker, instance=instance, secret=_SECRET)
        record = WorkerInfo(
            worker=worker,
            instance=instance,
            address="unix:/nowhere",
            scheme=SCHEME,
            parity_key=PARITY_KEY,
            num_blocks=info.num_blocks,
            max_num_seqs=info.max_num_seqs,
            max_model_len_tokens=info.max_model_len_tokens,
            engine=info.name,
            eviction=info.eviction,
            tells_blocks=tells_blocks,
        )
        publisher = Publisher(self.store, record, rng=random.Random(self.num_started), lease_s=1.0, heartbeat_s=0.2)
        await publisher.start()
        self.worker_to_slot[worker] = _Slot(engine, host, publisher)

    async def stop_worker(self, name: str) -> None:
        """End a worker under its requests, as a crash would: its lease runs out by itself."""
        slot = self.worker_to_slot.pop(WorkerId(name))
        await slot.publisher.stop()
        await slot.host.close()
        await slot.engine.close()

    def stop_server(self) -> None:
        """End all connections, those that stream included."""
        assert self.server is not None
        self.server.should_exit = self.server.force_exit = True
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    async def jobs(self) -> list[BatchJob]:
        """Two made-up ones, which the page is to show."""
        share = (time.time() - self.began_at) % 120 / 120
        return [
            BatchJob("batch_8d1f0c", "in_progress", 2400, int(2400 * share), 3, self.began_at - 40),
            BatchJob("batch_41aa97", "completed", 512, 512, 0, self.began_at - 900),
        ]

    async def offer_load(self, rate_per_s: float, rng: random.Random) -> None:
        """Requests of a few assistants, some chats and some one-off prompts, until cancelled."""
        assistants = [[rng.randrange(30_000) for _ in range(length)] for length in (1600, 1200, 900, 700, 500, 400)]
        chats: list[list[int]] = []
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(rng.expovariate(rate_per_s))
                if chats and rng.random() < 0.35:
                    prompt = chats.pop(rng.randrange(len(chats)))
                elif rng.random() < 0.9:
                    prompt = list(rng.choices(assistants, weights=[8, 5, 4, 3, 2, 1])[0])
                else:
                    prompt = []
                prompt += [rng.randrange(30_000) for _ in range(rng.randrange(60, 400))]
                if len(prompt) < 2600:
                    chats = [*chats[-30:], prompt]
                group.create_task(self._ask(prompt, rng.randrange(20, 120)))

    async def _ask(self, token_ids: list[int], num_tokens: int) -> None:
        assert self.routers
        self.num_requests += 1
        request = GenerateRequest(
            RequestId(f"chatcmpl-{self.num_requests:06d}"),
            pack_tokens(token_ids),
            Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        )
        with contextlib.suppress(KvrouteError):
            async for _ in self.routers[self.num_requests % len(self.routers)].generate(request, RequestTrace()):
                pass


@contextlib.asynccontextmanager
async def rig(
    num_workers: int = 4, *, num_routers: int = 1, port: int = 0, rate_per_s: float = 8.0, seed: int = 1
) -> AsyncIterator[Rig]:
    """A running rig; everything of it ends with the block."""
    rng = random.Random(seed)
    store = MemoryStore(SCHEME, asyncio.get_running_loop().time)
    built = Rig(store)

    def make_router(number: int) -> Router:
        name = RouterId(f"router-{number}")
        feed = MemoryFeed(store, rng=random.Random(f"{seed}:{number}"), longest_delay_s=0.002)
        directory = MirroredDirectory(store, feed)
        directory.start()

        def connect(record: WorkerRecord, on_change: OnChange) -> WorkerClient:
            async def open_channel() -> Channel:
                slot = built.worker_to_slot.get(record.info.worker)
                if slot is None:
                    raise ConnectionRefusedError("the worker is gone")
                return await slot.host.open_local()

            info = record.info
            return ChannelClient(info.worker, info.instance, name, _SECRET, open_channel, rng=rng, on_change=on_change)

        return Router(
            name,
            directory,
            connect,
            make_policy("cost"),
            scheme=SCHEME,
            parity_key=PARITY_KEY,
            metrics=Metrics(),
            rng=rng,
            refresh_s=0.2,
        )

    async with contextlib.AsyncExitStack() as stack:
        for number in range(num_workers):
            await built.start_worker(f"w{number}")
        for number in range(num_routers):
            built.routers.append(await stack.enter_async_context(make_router(number)))
        viewpoints = [Viewpoint(router, built.jobs) for router in built.routers]

        async def take(with_history: bool) -> Overview:
            if num_routers == 1:
                return await viewpoints[0].take(with_history=with_history)
            shares = [await own_share(viewpoint, with_history=with_history) for viewpoint in viewpoints]
            return joined(shares, built.routers[0].watch.rates)

        built.app = app = dashboard_app(take)
        listening = socket.create_server(("127.0.0.1", port))
        server = _Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve([listening]))
        load = asyncio.create_task(built.offer_load(rate_per_s, rng))
        built.url = f"http://127.0.0.1:{listening.getsockname()[1]}/dashboard"
        built.server = server
        try:
            yield built
        finally:
            load.cancel()
            built.stop_server()
            await asyncio.gather(load, serving, return_exceptions=True)
    for name in list(built.worker_to_slot):
        await built.stop_worker(name)


async def _main(port: int, num_routers: int) -> None:
    async with rig(port=port, num_routers=num_routers) as running:
        sys.stdout.write(f"{running.url}\n")
        sys.stdout.flush()
        while True:
            await asyncio.sleep(60.0)
            await running.stop_worker("w3")
            await asyncio.sleep(10.0)
            await running.start_worker("w3")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--routers", type=int, default=1)
    with contextlib.suppress(KeyboardInterrupt):
        arguments = parser.parse_args()
        asyncio.run(_main(arguments.port, arguments.routers))
