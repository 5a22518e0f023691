"""ZMQ events lost between a real vLLM engine and its worker: no request fails, the directory heals, one alarm.

What a request waits for is never the events: the router matches from its mirror, whatever that has been told.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from router.policies import make_policy
from router.service import Router
from shared.config import Settings
from shared.directory import connect_directory
from shared.directory.base import WorkerRecord
from shared.directory.mirrored import MirroredDirectory
from shared.hashing import block_keys, num_usable_blocks, pack_tokens, root_key
from shared.telemetry import Metrics
from shared.transport.base import OnChange, WorkerClient
from shared.transport.client import connect_worker
from shared.types import BlockKey, CacheScheme, RouterId, WorkerId
from tests.support.deployment import told
from tests.support.rack import ask
from tests.support.stores import PATIENT_S, embedded_store, wait_until
from worker.process import Worker, WorkerOptions

__all__ = ["embedded_store"]
pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

W0 = WorkerId("w0")
SECRET = b"the secret of this test"
SCHEME = CacheScheme("tiny", 64)
SETTINGS = Settings(
    model="tiny",
    dtype="float32",
    kv_cache_blocks=200,  # more than all prompts here fill
    max_model_len=1024,
    lease_s=600.0,
    audit_s=3600.0,  # an audit would heal, too
)
_NEVER_S = 3600.0


@dataclass
class Lossy:
    """Stands between the socket and whoever reads it, and loses what comes while it is told to."""

    next_batch: Callable[[Any], Any]
    is_losing: bool = False
    num_lost: int = 0

    async def __call__(self, subscriber: Any) -> tuple[int, bytes]:
        seq, payload = await self.next_batch(subscriber)
        if not self.is_losing:
            return seq, payload
        self.num_lost += 1
        return -1, b""  # no number of a batch: it is passed over


@dataclass
class Serving:
    """A worker on a real engine, a router with a mirror, and what the engine must hold by now."""

    worker: Worker
    router: Router
    directory: MirroredDirectory
    stream: Any
    computed: set[BlockKey] = field(default_factory=set)
    num_prompts: int = 0

    async def compute(self) -> set[BlockKey]:
        """Ask for a new prompt of ten blocks and a half; the keys of what the engine holds of it since."""
        self.num_prompts += 1
        rng = random.Random(self.num_prompts)
        token_ids = [rng.randrange(5, 250) for _ in range(10 * SCHEME.block_size_tokens + 32)]
        answer, trace = await ask(self.router, f"prompt-{self.num_prompts}", token_ids, max_tokens=1)
        assert (len(answer), trace.failed_workers) == (1, [])
        keys = set(self.keys(token_ids))
        self.computed |= keys
        return keys

    async def wait_for(self, expected: set[BlockKey]) -> None:
        """Until the store and the router's mirror hold exactly these."""
        async with asyncio.timeout(PATIENT_S):
            while not expected == await self.directory.resident(W0) == self.directory.mirrored(W0):
                await asyncio.sleep(0.02)

    async def ask_again(self) -> None:
        """Each prompt once more: the router expects of the cache what the engine then gives."""
        self.router.hints.forget(W0)
        for number in range(1, self.num_prompts + 1):
            rng = random.Random(number)
            token_ids = [rng.randrange(5, 250) for _ in range(10 * SCHEME.block_size_tokens + 32)]
            held = next((n for n, key in enumerate(self.keys(token_ids)) if key not in self.computed), 10)
            _, trace = await ask(self.router, f"again-{number}-{self.num_prompts}", token_ids, max_tokens=1)
            num_tokens = min(held, num_usable_blocks(len(token_ids), 64)) * SCHEME.block_size_tokens
            assert (trace.matched_tokens, trace.cached_tokens) == (num_tokens, 640)

    def keys(self, token_ids: list[int]) -> list[BlockKey]:
        return block_keys(pack_tokens(token_ids), SCHEME.block_size_tokens, root_key(SCHEME))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["adaptive", "stock"])
async def serving(request: pytest.FixtureRequest, embedded_store: Any) -> AsyncIterator[Serving]:
    pytest.importorskip("vllm")
    settings = SETTINGS.model_copy(update={"eviction": request.param})
    deaths: list[str] = []
    worker = Worker(WorkerOptions(W0, settings, embedded_store.url, SECRET, is_local=True), deaths.append)
    info = await worker.start()
    directory = await connect_directory(embedded_store.url, SCHEME, publish_deadline_s=PATIENT_S, reader="router")
    assert isinstance(directory, MirroredDirectory)
    rng = random.Random(1)

    def connect(record: WorkerRecord, on_change: OnChange) -> WorkerClient:
        return connect_worker(record.info, RouterId("router"), SECRET, rng=rng, on_change=on_change)

    router = Router(
        RouterId("router"),
        directory,
        connect,
        make_policy("cost"),
        scheme=SCHEME,
        parity_key=info.parity_key,
        metrics=Metrics(),
        rng=rng,
    )
    try:
        async with router:
            assert worker._host is not None
            engine: Any = worker._host._engine
            yield Serving(worker, router, directory, engine._events)
    finally:
        await worker.stop()
    assert deaths == []


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> Lossy:
    from worker.engines import vllm_stream

    opened = Lossy(vllm_stream._next_batch)
    monkeypatch.setattr(vllm_stream, "_next_batch", opened)
    return opened


async def lose_all_of_a_prompt(serving: Serving, lossy: Lossy) -> None:
    lossy.is_losing = True
    await serving.compute()
    await wait_until(lambda: lossy.num_lost > 0)


async def test_hole_between_events_is_filled_by_a_replay(
    serving: Serving, lossy: Lossy, caplog: pytest.LogCaptureFixture
) -> None:
    serving.stream._quiet_s = _NEVER_S
    await serving.compute()
    await serving.wait_for(serving.computed)
    await lose_all_of_a_prompt(serving, lossy)
    lossy.is_losing = False
    await serving.compute()
    await serving.wait_for(serving.computed)
    await serving.ask_again()
    (line,) = told(caplog).elements()
    assert line.endswith("were lost on their way and are made up for")


async def test_last_events_before_a_quiet_time_are_asked_for(
    serving: Serving, lossy: Lossy, caplog: pytest.LogCaptureFixture
) -> None:
    await serving.compute()  # ends the wait that has begun
    await serving.wait_for(serving.computed)
    serving.stream._quiet_s = 0.2
    await serving.compute()
    await serving.wait_for(serving.computed)
    await lose_all_of_a_prompt(serving, lossy)
    await serving.wait_for(serving.computed)
    await wait_until(lambda: bool(told(caplog)))
    lossy.is_losing = False
    serving.stream._quiet_s = _NEVER_S
    await serving.ask_again()
    (line,) = told(caplog).elements()
    assert line.endswith("were lost on their way and are made up for")


async def test_hole_past_replaying_is_made_up_for_by_the_pool_where_that_can_be_asked(
    serving: Serving, lossy: Lossy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serving.compute()
    await serving.wait_for(serving.computed)
    await lose_all_of_a_prompt(serving, lossy)
    lossy.is_losing = False
    monkeypatch.setattr(serving.stream, "_replay_endpoint", f"{serving.stream._replay_endpoint}-of-nobody")
    last = await serving.compute()
    if serving.stream._fetch_snapshot is None:
        # A stock pool tells of nobody but by its events: what is known again is never more than it holds.
        serving.computed = last
    await serving.wait_for(serving.computed)
    await serving.ask_again()
    (line,) = told(caplog).elements()
    assert line.startswith(
        "KV events: forgetting the resident set: batches"
        if serving.stream._fetch_snapshot is None
        else "KV events: the resident set is the pool's own account now: batches"
    )
