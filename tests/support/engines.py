"""Engines to test with: started once for a whole session, since a start takes many seconds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shared.types import BlockKey, CacheScheme, FinishReason, RequestId, Sampling
from tests.support.fake_vllm import FakeOptions, FakeVllm
from worker.engines.attached import AttachedEngine
from worker.engines.attached_options import AttachedOptions, parse_servers
from worker.engines.base import BlockChange, Engine, EngineInfo, EngineRequest
from worker.engines.profiles import LatencyProfile
from worker.engines.simulator import SimulatorEngine
from worker.engines.simulator_options import SimulatorOptions

BLOCK_SIZE = 32
NUM_BLOCKS = 64
CONTEXT_TOKENS = 1024
SCHEME = CacheScheme("tiny", BLOCK_SIZE)
ATTACHED = {
    "attached": FakeOptions(),
    "attached-0.20": FakeOptions(is_array_encoded=True, has_byte_hashes=True),
}
"""Servers as they are now, and as they speak before vLLM 0.26."""
VLLM_EVICTIONS = ("adaptive", "stock")
"""Our pool and vLLM's own. The rules of ours differ in their victims only, which walks and floods tell apart."""
ON_VLLM = pytest.mark.parametrize("any_engine", VLLM_EVICTIONS, indirect=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """All that one request got."""

    token_ids: list[int]
    finish: FinishReason
    cached_tokens: int
    num_deltas: int
    ttft_s: float
    """Until its first token."""


@dataclass
class EngineUnderTest:
    """An engine with what it told its owner."""

    engine: Any = None
    info: EngineInfo | None = None
    eviction: str = "stock"
    """The rule that its pool was asked to follow."""
    told: set[BlockKey] = field(default_factory=set)
    num_resets: int = 0
    deaths: list[str] = field(default_factory=list)
    num_requests: int = 0

    def on_blocks(self, change: BlockChange) -> None:
        """Apply a change as a strict owner does: nothing is stored twice or removed without being there."""
        if change.is_reset:
            self.told.clear()
            self.num_resets += 1
        assert not self.told & set(change.stored)
        assert set(change.removed) <= self.told
        self.told = (self.told | set(change.stored)) - set(change.removed)

    def request(self, token_ids: list[int], max_tokens: int = 16, **more: Any) -> EngineRequest:
        """A greedy request that does not stop early."""
        self.num_requests += 1
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return EngineRequest(RequestId(f"request-{self.num_requests}"), token_ids, sampling, **more)

    async def ask(self, token_ids: list[int], max_tokens: int = 16, **more: Any) -> Answer:
        return await self.finish(self.request(token_ids, max_tokens, **more))

    async def finish(self, request: EngineRequest) -> Answer:
        """Read the request to its end, checking the form of its deltas."""
        loop = asyncio.get_running_loop()
        asked_at_s, ttft_s = loop.time(), None
        deltas = []
        async for delta in self.engine.generate(request):
            ttft_s = loop.time() - asked_at_s if ttft_s is None else ttft_s
            deltas.append(delta)
        assert ttft_s is not None
        assert all(delta.finish is None for delta in deltas[:-1])
        told = [delta.cached_tokens for delta in (deltas[0], deltas[-1]) if delta.cached_tokens is not None]
        assert len([delta for delta in deltas if delta.cached_tokens is not None]) == 1
        assert deltas[-1].finish is not None
        token_ids = [token for delta in deltas for token in delta.token_ids]
        return Answer(token_ids, deltas[-1].finish, told[0], len(deltas), ttft_s)

    async def flood(self, num_blocks: int, seed: int) -> None:
        """Ask once for so many blocks' worth of prompts that nobody asks for again, one after another."""
        rng = random.Random(seed)
        for _ in range(num_blocks // 8):
            await self.ask([rng.randrange(5, 250) for _ in range(8 * BLOCK_SIZE - 1)], max_tokens=1)


async def start_vllm(cache_dir: Path, eviction: str = "shared_first", **more: Any) -> EngineUnderTest:
    """The tiny model in float32, where equal requests get equal answers whatever runs beside them."""
    pytest.importorskip("vllm")
    from worker.engines.demo_model import prepare_model
    from worker.engines.vllm import VllmEngine
    from worker.engines.vllm_options import VllmOptions

    under_test = EngineUnderTest()
    options = VllmOptions(
        prepare_model("tiny", cache_dir),
        SCHEME,
        max_model_len=CONTEXT_TOKENS,
        kv_cache_blocks=NUM_BLOCKS,
        dtype="float32",
        eviction=eviction,
    )
    under_test.eviction = eviction
    engine: Engine = VllmEngine(replace(options, **more), under_test.on_blocks, under_test.deaths.append)
    under_test.engine = engine
    under_test.info = await engine.start()
    return under_test


SIMULATED_PROFILE = LatencyProfile("fast", 2e-4, 1e-6, 1e-10, 1e-6, 1e-9)


async def start_simulator(**more: Any) -> EngineUnderTest:
    """A simulated engine of the same sizes, some thousand steps a second."""
    under_test = EngineUnderTest()
    options = SimulatorOptions(
        SIMULATED_PROFILE,
        SCHEME,
        num_blocks=NUM_BLOCKS,
        max_model_len_tokens=CONTEXT_TOKENS,
        max_num_seqs=8,
        vocabulary_size=256,
    )
    under_test.eviction = options.eviction
    under_test.engine = SimulatorEngine(replace(options, **more), under_test.on_blocks, under_test.deaths.append)
    under_test.info = await under_test.engine.start()
    return under_test


async def start_attached(running: FakeVllm, /, **more: Any) -> EngineUnderTest:
    """An engine in front of a server that runs."""
    under_test = EngineUnderTest()
    (attached,) = parse_servers((running.attach,))
    options = AttachedOptions(attached, CacheScheme("tiny", running.options.block_size), "tiny")
    under_test.engine = AttachedEngine(replace(options, **more), under_test.on_blocks, under_test.deaths.append)
    under_test.info = await under_test.engine.start()
    return under_test


@asynccontextmanager
async def _any_engine(kind: str, cache_dir: Path) -> AsyncIterator[EngineUnderTest]:
    if kind == "simulator":
        yield await start_simulator()
    elif kind in ATTACHED:
        server = await FakeVllm(ATTACHED[kind]).start()
        yield await start_attached(server)
        await server.stop()
    else:
        yield await start_vllm(cache_dir, kind)


@pytest_asyncio.fixture(
    scope="session",
    loop_scope="session",
    params=[
        "simulator",
        *ATTACHED,
        *(pytest.param(rule, marks=(pytest.mark.vllm, pytest.mark.slow)) for rule in VLLM_EVICTIONS),
    ],
)
async def any_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineUnderTest]:
    """Every kind of engine, one at a time; vLLM with either pool. Those of `ON_VLLM` tests are vLLM's alone."""
    async with _any_engine(request.param, tmp_path_factory.mktemp("models")) as under_test:
        yield under_test
        await under_test.engine.close()
        assert under_test.deaths == []


async def assert_empty(engine: EngineUnderTest) -> None:
    """After the next request everything that was freed shows as free."""
    rng = random.Random(99)
    await engine.ask([rng.randrange(5, 250) for _ in range(5)], max_tokens=1)
    stats = engine.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)
