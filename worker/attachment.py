"""One worker for one engine of an attached server, through all the lives of that server. Knows nothing of Ray.

Owns the parts of the current life: engine, host and publisher. Each life is another worker process to everybody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from dataclasses import dataclass

from shared.directory.base import Directory
from shared.errors import ConfigError, EngineError, KvrouteError
from shared.transport.base import Channel
from shared.types import Instance, WorkerInfo
from worker.announcement import announced
from worker.engines.attached import AttachedEngine
from worker.engines.attached_options import AttachedOptions
from worker.engines.base import BlockChange
from worker.host import WorkerHost
from worker.publisher import Publisher

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 5.0
_ADDRESS = "local:"
"""Nobody outside this process can reach the host."""


@dataclass(frozen=True, slots=True)
class AttachmentOptions:
    """What all attached workers of one router have in common."""

    secret: bytes
    tokenizer_fingerprint: bytes
    lease_s: float
    heartbeat_s: float
    seed: int


@dataclass(slots=True)
class _Life:
    """One life of a server, from its first answer on."""

    info: WorkerInfo
    host: WorkerHost
    exit: contextlib.AsyncExitStack


class Attachment:
    """Keeps one worker up while its server is, and brings it back, with another epoch, when the server comes back."""

    def __init__(self, engine: AttachedOptions, options: AttachmentOptions, directory: Directory) -> None:
        self.worker = engine.server.worker
        self._engine_options = engine
        self._options = options
        self._directory = directory
        self._rng = random.Random(f"{options.seed}:{self.worker}")
        self._life: _Life | None = None
        self._death: asyncio.Future[str] | None = None
        self._task: asyncio.Task[None] | None = None
        self.num_lives = 0

    @property
    def info(self) -> WorkerInfo | None:
        """What the worker announces in its current life; None while its server is away."""
        return self._life.info if self._life is not None else None

    async def start(self) -> WorkerInfo | None:
        """Begin the first life, and from then on each one that follows; None where the server does not answer yet.

        Raises `ConfigError` for a server that can never be used as it is asked for.
        """
        try:
            self._life = await self._begin()
        except EngineError as error:
            logger.warning("%s: it is tried again until it answers", error)
        self._task = asyncio.create_task(self._keep(), name=f"attachment-{self.worker}")
        return self.info

    async def close(self) -> None:
        """Leave the directory and end the requests under way. The server goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end()

    async def open_channel(self, instance: Instance) -> Channel:
        """A router's end of a new connection to one life. Raises `ConnectionRefusedError` where that has ended."""
        life = self._life
        if life is None or life.info.instance != instance:
            raise ConnectionRefusedError(f"this life of {self.worker} has ended")
        return await life.host.open_local()

    async def _keep(self) -> None:
        while True:
            if self._life is None:
                self._life = await self._come_back()
            assert self._death is not None
            reason = await asyncio.shield(self._death)
            try:
                # Routers hear of it first, so that requests go on elsewhere while the rest is put away.
                self._life.host.engine_died(reason)
                await self._life.host.wait_closed()
                await self._end()
            except Exception:
                # What is left of a life must not keep the next one from beginning.
                logger.exception("putting away a life of %s failed", self.worker)

    async def _come_back(self) -> _Life:
        """Try until the server answers."""
        pause_s, told = _FIRST_PAUSE_S, ""
        while True:
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            try:
                life = await self._begin()
            except KvrouteError as error:
                # A server that comes back as something else may be put right while we run.
                level = logging.ERROR if isinstance(error, ConfigError) and str(error) != told else logging.DEBUG
                logger.log(level, "%s", error)
                pause_s, told = min(2 * pause_s, _MAX_PAUSE_S), str(error)
            except Exception:
                logger.exception("attaching to %s failed", self.worker)
                pause_s = _MAX_PAUSE_S
            else:
                logger.warning("server %s answers: life %d of its worker begins", self.worker, self.num_lives)
                return life

    async def _begin(self) -> _Life:
        death = self._death = asyncio.get_running_loop().create_future()
        publishers: list[Publisher] = []

        def on_blocks(change: BlockChange) -> None:
            if publishers:
                publishers[0].on_blocks(change)
            else:
                early.append(change)

        def on_death(reason: str) -> None:
            if not death.done():
                death.set_result(reason)

        early: list[BlockChange] = []
        """Told before there is a publisher."""
        async with contextlib.AsyncExitStack() as stack:
            engine = AttachedEngine(self._engine_options, on_blocks, on_death)
            engine_info = await engine.start()
            stack.push_async_callback(engine.close)
            instance = Instance(secrets.token_hex(16))
            host = WorkerHost(
                engine,
                engine_info,
                worker=self.worker,
                instance=instance,
                secret=self._options.secret,
                count_resident_blocks=lambda: len(publishers[0].resident) if publishers else 0,
            )
            stack.push_async_callback(host.close)
            info = announced(
                engine_info,
                worker=self.worker,
                instance=instance,
                address=_ADDRESS,
                scheme=self._engine_options.scheme,
                tokenizer_fingerprint=self._options.tokenizer_fingerprint,
            )
            publisher = Publisher(
                self._directory,
                info,
                rng=self._rng,
                lease_s=self._options.lease_s,
                heartbeat_s=self._options.heartbeat_s,
                on_evicted=on_death,
            )
            for change in early:
                publisher.on_blocks(change)
            publishers.append(publisher)
            await publisher.start()
            stack.push_async_callback(publisher.stop)
            self.num_lives += 1
            return _Life(info, host, stack.pop_all())

    async def _end(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            await life.exit.aclose()
