"""A whole deployment in one process: fake engines behind real hosts, publishers, connections and a real router."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from router.policies import make_policy
from router.requests import GenerateRequest, RequestTrace
from router.service import Router
from shared.directory.base import Directory, WorkerRecord
from shared.directory.memory import MemoryDirectory
from shared.directory.mirrored import MirroredDirectory
from shared.hashing import pack_tokens, parity_key
from shared.telemetry import Metrics
from shared.transport.base import Channel, OnChange, WorkerClient
from shared.transport.client import ChannelClient, connect_worker
from shared.types import CacheScheme, Instance, RequestId, RouterId, Sampling, WorkerId, WorkerInfo
from tests.support.fakes import FakeEngine
from tests.support.memory_store import MemoryFeed, MemoryStore
from worker.host import WorkerHost
from worker.publisher import Publisher

SCHEME = CacheScheme("fake", 16)
PARITY_KEY = parity_key(SCHEME, b"fingerprint")
SECRET = b"rack"
_IN_PROCESS = "unix:/nowhere"
"""What workers of a rack announce; one that announces anything else is a process of its own, and is reached there."""


@dataclass(slots=True)
class Slot:
    """One running worker of a rack."""

    info: WorkerInfo
    engine: FakeEngine
    host: WorkerHost
    publisher: Publisher


@dataclass(slots=True)
class Rack:
    """Workers that share one directory, and how routers reach them."""

    directory: Directory
    make_engine: Callable[..., FakeEngine]
    heartbeat_s: float = 1.0
    lease_s: float = 5.0
    worker_to_slot: dict[WorkerId, Slot] = field(default_factory=dict)
    started: list[Slot] = field(default_factory=list)
    """All there ever were, those that have died included."""
    num_started: int = 0
    num_routers: int = 0
    mirrors: list[MirroredDirectory] = field(default_factory=list)
    """Those of the routers that are open."""

    async def start_worker(self, name: str, *, parity: bytes = PARITY_KEY) -> Slot:
        """Start a worker, or another life of it."""
        self.num_started += 1
        worker, instance = WorkerId(name), Instance(f"{self.num_started:032x}")
        publishers: list[Publisher] = []
        engine = self.make_engine(scheme=SCHEME, on_blocks=lambda change: publishers[0].on_blocks(change))
        engine_info = await engine.start()
        host = WorkerHost(engine, engine_info, worker=worker, instance=instance, secret=SECRET)
        engine.on_death = host.engine_died
        info = WorkerInfo(
            worker=worker,
            instance=instance,
            address=_IN_PROCESS,
            scheme=SCHEME,
            parity_key=parity,
            num_blocks=engine_info.num_blocks,
            max_num_seqs=engine_info.max_num_seqs,
            max_model_len_tokens=engine_info.max_model_len_tokens,
            engine=engine_info.name,
            eviction=engine_info.eviction,
        )
        rng = random.Random(self.num_started)
        publishers.append(Publisher(self.directory, info, rng=rng, lease_s=self.lease_s, heartbeat_s=self.heartbeat_s))
        await publishers[0].start()
        slot = self.worker_to_slot[worker] = Slot(info, engine, host, publishers[0])
        self.started.append(slot)
        return slot

    async def stop_worker(self, name: str) -> None:
        """Stop a worker politely."""
        slot = self.worker_to_slot.pop(WorkerId(name))
        await slot.publisher.stop()
        await slot.host.close()
        await slot.engine.close()

    async def kill_worker(self, name: str) -> None:
        """Let a worker's engine die: routers hear of it, the directory does not, and its lease runs out."""
        slot = self.worker_to_slot.pop(WorkerId(name))
        publishing = slot.publisher._task
        assert publishing is not None
        publishing.cancel()
        slot.engine.die()
        await slot.host.wait_closed()

    @contextlib.asynccontextmanager
    async def router(self, policy: str = "cost", **options: object) -> AsyncIterator[Router]:
        """A router over the rack that is checked for leftovers when it is done with."""
        self.num_routers += 1
        router_id = RouterId(f"router-{self.num_routers}")
        rng = random.Random(5)
        directory = self.directory
        if isinstance(directory, MemoryStore):
            feed = MemoryFeed(directory, rng=random.Random(len(self.mirrors)), longest_delay_s=0.002)
            directory = MirroredDirectory(directory, feed)
            directory.start()
            self.mirrors.append(directory)

        def connect(record: WorkerRecord, on_change: OnChange) -> WorkerClient:
            if record.info.address != _IN_PROCESS:
                return connect_worker(record.info, router_id, SECRET, rng=rng, on_change=on_change)

            async def open_channel() -> Channel:
                slot = self.worker_to_slot.get(record.info.worker)
                if slot is None:
                    raise ConnectionRefusedError("the worker is gone")
                return await slot.host.open_local()

            return ChannelClient(
                record.info.worker,
                record.info.instance,
                router_id,
                SECRET,
                open_channel,
                rng=rng,
                on_change=on_change,
            )

        router = Router(
            router_id,
            directory,
            connect,
            make_policy(policy),
            scheme=SCHEME,
            parity_key=PARITY_KEY,
            metrics=Metrics(),
            rng=rng,
            **options,
        )
        async with router:
            yield router
            if directory in self.mirrors:
                self.mirrors.remove(directory)
            await self.settle()
            async with asyncio.timeout(5.0):
                while router.fleet.loads().num_requests.any():
                    await asyncio.sleep(0.01)
            assert_no_leftovers(router)

    async def settle(self) -> None:
        """Wait until every engine is idle, every publisher has told all, and every mirror has heard it."""
        async with asyncio.timeout(30.0):
            while not all(
                slot.engine.num_live == 0 and slot.host.num_requests == 0 and slot.publisher.is_quiet
                for slot in self.worker_to_slot.values()
            ):
                await asyncio.sleep(0.01)
            for mirror in self.mirrors:
                await mirror.caught_up()

    async def close(self) -> None:
        """Stop all workers."""
        for name in list(self.worker_to_slot):
            await self.stop_worker(name)
        for slot in self.started:
            # A dead process publishes no more; here its tasks are left.
            await slot.publisher.stop()


@contextlib.asynccontextmanager
async def rack(
    num_workers: int,
    directory: Directory | None = None,
    *,
    heartbeat_s: float = 1.0,
    lease_s: float = 5.0,
    **engine: object,
) -> AsyncIterator[Rack]:
    """A rack of `num_workers` fake engines with the given properties. Over a `MemoryStore` its routers have mirrors."""

    def make_engine(**wiring: object) -> FakeEngine:
        return FakeEngine(**{**engine, **wiring})

    directory = directory or MemoryDirectory(SCHEME, asyncio.get_running_loop().time)
    built = Rack(directory, make_engine, heartbeat_s, lease_s)
    try:
        for index in range(num_workers):
            await built.start_worker(f"w{index}")
        yield built
    finally:
        await built.close()


def mirrored_rack(num_workers: int, **engine: object) -> AbstractAsyncContextManager[Rack]:
    """A rack whose routers match from mirrors, as they do by default."""
    return rack(num_workers, MemoryStore(SCHEME, asyncio.get_running_loop().time), **engine)


def assert_no_leftovers(router: Router) -> None:
    """Nothing may outlive its request but the promises that settle by themselves."""
    assert len(router.queue) == 0
    assert router.fleet.num_bookings == 0
    assert not router.fleet.loads().num_requests.any()


def prompt(prefix: int, num_prefix_tokens: int, tail: int, num_tail_tokens: int = 20) -> list[int]:
    """A prompt whose beginning is shared by all of the same `prefix` and whose end is its own."""
    own = random.Random(f"{prefix}:{tail}")
    shared = random.Random(prefix)
    return [shared.randrange(30_000) for _ in range(num_prefix_tokens)] + [
        own.randrange(30_000) for _ in range(num_tail_tokens)
    ]


async def ask(
    router: Router, name: str, token_ids: list[int], max_tokens: int = 8, **options: object
) -> tuple[tuple[int, ...], RequestTrace]:
    """One whole answer and what happened to it."""
    trace = RequestTrace()
    request = GenerateRequest(
        RequestId(name), pack_tokens(token_ids), Sampling(max_tokens=max_tokens, temperature=0.0), **options
    )
    answer: tuple[int, ...] = ()
    async for generated in router.generate(request, trace):
        answer += generated.token_ids
    return answer, trace
