"""One worker: an engine, its host, the publisher of what its pool holds, and its pins. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config import Settings
from shared.directory import connect_directory, open_pin_board
from shared.directory.base import Directory
from shared.directory.survey import StoreSurvey
from shared.errors import ConfigError, DirectoryUnavailable, WorkerIdTaken
from shared.hashing import tokenizer_fingerprint
from shared.telemetry import Readings
from shared.types import CacheScheme, Instance, WorkerId, WorkerInfo
from worker.announcement import announced
from worker.auditor import AuditCounts, Auditor
from worker.engines.base import BlockChange, Engine, EngineInfo, OnBlocks, OnDeath
from worker.engines.demo_model import prepare_model
from worker.engines.profiles import load_profile
from worker.host import WorkerHost
from worker.inspector import PoolInspector
from worker.metrics import expose_audits, expose_pinner, expose_publisher
from worker.pinner import Pinner
from worker.publisher import Publisher

logger = logging.getLogger(__name__)

_STORE_PATIENCE_S = 5.0
"""How long a node may take to reach the store for the first time."""
_STORE_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker is told by whoever starts it."""

    worker: WorkerId
    settings: Settings
    redis_url: str
    secret: bytes
    is_local: bool
    """Whether routers are on the same host, so that a Unix socket reaches them."""

    def to_wire(self) -> dict[str, Any]:
        """Plain values, which every version of every serialiser understands."""
        return {
            "worker": self.worker,
            "settings": self.settings.model_dump(mode="json", exclude_unset=True),
            "redis_url": self.redis_url,
            "secret": self.secret,
            "is_local": self.is_local,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> WorkerOptions:
        """The inverse of `to_wire`."""
        return cls(**{**wire, "settings": Settings(**wire["settings"])})


class Worker:
    """Starts and ends the parts of one worker in their order. One `start`, one `stop`."""

    def __init__(
        self,
        options: WorkerOptions,
        on_death: OnDeath,
        node_address: str = "127.0.0.1",
        *,
        must_reach_store: bool = False,
    ) -> None:
        """With `must_reach_store`, a store that does not answer at the start fails it."""
        self._must_reach_store = must_reach_store
        self._options = options
        self._node_address = node_address
        self._on_death = on_death
        self._exit = contextlib.AsyncExitStack()
        self._ending: asyncio.Task[None] | None = None
        self._host: WorkerHost | None = None
        self._publisher: Publisher | None = None
        self._pinner: Pinner | None = None
        self.metrics = Readings()
        """All that this worker counts, once it has started."""

    async def start(self) -> WorkerInfo:
        """Load the model, listen, register, and serve.

        Raises `EngineError` or `ConfigError` when the engine cannot start, `WorkerIdTaken` when another process goes on
        holding the id.
        """
        try:
            return await self._start()
        except BaseException:
            await self._exit.aclose()
            raise

    async def stop(self) -> None:
        """Leave the directory, end all requests and the engine. Idempotent."""
        await self._exit.aclose()

    async def drain(self, timeout_s: float) -> int:
        """Take no new requests, finish those under way within `timeout_s`, and stop; how many were cut off.

        Routers go on elsewhere with those that are.
        """
        num_cut_off = 0
        if self._host is not None and self._publisher is not None:
            self._publisher.set_draining(True)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._host.drain()
            except TimeoutError:
                num_cut_off = self._host.num_requests
        await self.stop()
        return num_cut_off

    async def _start(self) -> WorkerInfo:
        options, settings = self._options, self._options.settings
        folder = await asyncio.to_thread(prepare_model, settings.model, settings.model_cache_dir)
        scheme = CacheScheme(settings.model_name, settings.block_size)
        if self._must_reach_store:
            await self._check_store(scheme)
        engine = make_engine(settings, scheme, folder, self._on_blocks, self._engine_died)
        self._exit.push_async_callback(engine.close)
        engine_info = await engine.start()
        # A store that is away is the publisher's business: it registers when the store is back.
        directory = await connect_directory(options.redis_url, scheme, must_answer=False)
        self._exit.push_async_callback(directory.close)
        directory.expose(self.metrics)
        instance = Instance(secrets.token_hex(16))
        audits = AuditCounts()
        host = self._host = WorkerHost(
            engine,
            engine_info,
            worker=options.worker,
            instance=instance,
            secret=options.secret,
            count_resident_blocks=self._count_resident_blocks,
            inspector=PoolInspector(engine, lambda: self._publisher, audits),
            model_folder=folder,
        )
        self._exit.push_async_callback(host.close)
        info = announced(
            engine_info,
            worker=options.worker,
            instance=instance,
            address=await host.listen(self._listen_address()),
            scheme=scheme,
            tokenizer_fingerprint=tokenizer_fingerprint(folder),
        )
        self._publisher = self._make_publisher(directory, engine, info)
        self._exit.push_async_callback(self._publisher.stop)
        expose_publisher(self._publisher, self.metrics)
        await self._register(self._publisher)
        self._start_audits(engine, self._publisher, info, audits)
        self._follow_pins(engine, engine_info, info)
        return info

    async def _check_store(self, scheme: CacheScheme) -> None:
        """Raises `ConfigError` that names this node where the store is not to be reached from it.

        Such a worker would serve, and no router would ever hear of it.
        """
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + _STORE_PATIENCE_S
        while True:
            try:
                await (await connect_directory(self._options.redis_url, scheme)).close()
                return
            except DirectoryUnavailable as error:
                if loop.time() >= give_up_at_s:
                    raise ConfigError(
                        f"--redis-url: worker {self._options.worker} on node {socket.gethostname()} "
                        f"({self._node_address}) cannot reach the store at {_place(self._options.redis_url)}: {error}"
                    ) from None
            await asyncio.sleep(_STORE_PAUSE_S)

    async def _register(self, publisher: Publisher) -> None:
        """Take the id; a life before this one may hold it until its lease runs out."""
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + 2 * self._options.settings.lease_s
        while True:
            try:
                await publisher.start()
                return
            except WorkerIdTaken:
                if loop.time() >= give_up_at_s:
                    raise
                await asyncio.sleep(self._options.settings.heartbeat_s)

    def _follow_pins(self, engine: Engine, engine_info: EngineInfo, info: WorkerInfo) -> None:
        """Keep what is wanted, from now on. The id is this worker's by now, and reports go by it."""
        options, settings = self._options, self._options.settings
        board = open_pin_board(options.redis_url, info.scheme)
        self._exit.push_async_callback(board.close)
        board.expose(self.metrics)
        self._pinner = Pinner(
            board,
            engine,
            info,
            budget_blocks=engine_info.pin_budget_blocks,
            rng=random.Random(f"{settings.seed}:{info.worker}:pins"),
            lease_s=settings.lease_s,
            heartbeat_s=settings.heartbeat_s,
        )
        self._exit.push_async_callback(self._pinner.stop)
        expose_pinner(self._pinner, self.metrics)
        self._pinner.start()

    def _start_audits(self, engine: Engine, publisher: Publisher, info: WorkerInfo, audits: AuditCounts) -> None:
        survey = StoreSurvey(self._options.redis_url, info.scheme)
        self._exit.push_async_callback(survey.close)
        expose_audits(audits, self.metrics)
        rng = random.Random(f"{self._options.settings.seed}:{info.worker}:audits")
        auditor = Auditor(
            info.worker, engine, publisher, survey, rng=rng, counts=audits, audit_s=self._options.settings.audit_s
        )
        self._exit.push_async_callback(auditor.stop)
        auditor.start()

    def _make_publisher(self, directory: Directory, engine: Engine, info: WorkerInfo) -> Publisher:
        settings = self._options.settings
        return Publisher(
            directory,
            info,
            rng=random.Random(f"{settings.seed}:{info.worker}"),
            lease_s=settings.lease_s,
            heartbeat_s=settings.heartbeat_s,
            on_evicted=self._die,
        )

    def _listen_address(self) -> str:
        if not self._options.is_local:
            return f"tcp://{self._node_address}:0"
        folder = tempfile.mkdtemp(prefix="kvroute-")
        self._exit.callback(shutil.rmtree, folder, ignore_errors=True)
        return f"unix:{folder}/{self._options.worker}.sock"

    def _on_blocks(self, change: BlockChange) -> None:
        if self._publisher is not None:
            self._publisher.on_blocks(change)
        if self._pinner is not None and change.is_reset:
            self._pinner.engine_was_reset()

    def _count_resident_blocks(self) -> int:
        return len(self._publisher.resident) if self._publisher is not None else 0

    def _engine_died(self, reason: str) -> None:
        """Routers hear of it before the process ends, so that they need not wait for a silence."""
        if self._host is None:
            self._die(reason)
            return
        self._host.engine_died(reason)
        self._ending = asyncio.create_task(self._end_after_host(reason), name="worker-end")

    async def _end_after_host(self, reason: str) -> None:
        if self._host is not None:
            await self._host.wait_closed()
        self._die(reason)

    def _die(self, reason: str) -> None:
        logger.error("worker %s ends: %s", self._options.worker, reason)
        self._on_death(reason)


def _place(url: str) -> str:
    """Where a store is, without its password."""
    return url.partition("://")[2].rpartition("@")[2]


def _make_vllm(settings: Settings, scheme: CacheScheme, folder: Path, on_blocks: OnBlocks, on_death: OnDeath) -> Engine:
    from worker.engines.vllm import VllmEngine
    from worker.engines.vllm_options import VllmOptions

    options = VllmOptions(
        model_dir=folder,
        scheme=scheme,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_blocks=settings.kv_cache_blocks,
        kv_cache_bytes=settings.kv_cache_bytes,
        pin_budget_blocks=settings.pin_budget_blocks,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        dtype=settings.dtype,
        eviction=settings.eviction,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
        engine_args=settings.engine_args,
        seed=settings.seed,
        start_timeout_s=settings.start_timeout_s,
        log_level=settings.log_level,
    )
    return VllmEngine(options, on_blocks, on_death)


def _make_simulator(
    settings: Settings, scheme: CacheScheme, folder: Path, on_blocks: OnBlocks, on_death: OnDeath
) -> Engine:
    from worker.engines.simulator import SimulatorEngine
    from worker.engines.simulator_options import simulator_options

    return SimulatorEngine(simulator_options(settings, scheme, folder), on_blocks, on_death)


_ENGINES: Mapping[str, Callable[[Settings, CacheScheme, Path, OnBlocks, OnDeath], Engine]] = {
    "vllm": _make_vllm,
    "simulator": _make_simulator,
}


def make_engine(
    settings: Settings, scheme: CacheScheme, folder: Path, on_blocks: OnBlocks, on_death: OnDeath
) -> Engine:
    """The engine that settings name, not yet started."""
    return _ENGINES[settings.engine](settings, scheme, folder, on_blocks, on_death)


def check_engine(settings: Settings) -> None:
    """Find out what is wrong with an engine's settings before anything is started. Raises `ConfigError`."""
    if settings.engine == "simulator":
        load_profile(settings.profile)
