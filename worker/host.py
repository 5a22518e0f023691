"""A worker's host: takes requests from any number of routers, runs them on the engine, and frees them in time.

It owns the routers' sessions and connections. It never looks into the engine's pool nor talks to the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.errors import (
    ConfigError,
    EngineDied,
    EngineError,
    KvrouteError,
    Overloaded,
    ProtocolError,
    WorkerLeft,
    WorkerLost,
)
from shared.messages import Ack, AskTokenizer, Cancel, Inspect, Refused, Submit, TokenizerFile, decode, encode
from shared.transport.base import Channel, Timings
from shared.transport.channel import SilenceGuard, local_pair
from shared.transport.faults import fault_of
from shared.transport.handshake import Greeting, receive_hello, refuse, send_welcome
from shared.transport.listener import Listener
from shared.transport.session import MAX_UNACKNOWLEDGED_BYTES, Session
from shared.transport.tokenizer_files import read_tokenizer, send_tokenizer
from shared.types import Instance, RouterId, WorkerId, WorkerStatus
from worker.announcement import status_of
from worker.engines.base import Engine, EngineInfo
from worker.inspector import Inspections, Inspector
from worker.requests import EngineRequests

_logger = logging.getLogger(__name__)

SessionKey = tuple[RouterId, bytes]


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What one host takes on. Beyond it, a peer is told `Overloaded`."""

    max_sessions: int = 256
    max_strangers: int = 64
    """Connections that have not proved themselves yet; more are closed unheard."""
    max_requests_per_session: int = 1024
    max_unacknowledged_bytes: int = MAX_UNACKNOWLEDGED_BYTES
    """Kept for each router that is slow or away before its requests pause."""
    retry_after_s: float = 1.0
    """What a refused router is told to wait."""


@dataclass(slots=True)
class HostCounts:
    """What has happened since the host started."""

    num_sessions: int = 0
    num_resumed: int = 0
    num_expired: int = 0
    """Sessions whose router did not come back in time."""
    num_rejected: int = 0
    """Connections that ended before they had proved themselves."""
    num_protocol_errors: int = 0
    """Proved connections that were closed for what they sent."""


class WorkerHost:
    """Serves one engine to many routers over authenticated connections.

    Invariants: a session is in `_sessions` from its first welcome until its router leaves, stays away too long, or the
    host ends; a session without a connection has an expiry timer.
    """

    def __init__(
        self,
        engine: Engine,
        engine_info: EngineInfo,
        *,
        worker: WorkerId,
        instance: Instance,
        secret: bytes,
        limits: HostLimits | None = None,
        timings: Timings | None = None,
        count_resident_blocks: Callable[[], int] | None = None,
        inspector: Inspector | None = None,
        model_folder: Path | None = None,
    ) -> None:
        """`model_folder` has the tokenizer for routers that lack it."""
        if not secret:
            raise ConfigError("the shared secret is empty")
        self.counts = HostCounts()
        self._engine = engine
        self._engine_info = engine_info
        self._worker = worker
        self._instance = instance
        self._secret = secret
        self._limits = limits or HostLimits()
        self._timings = timings or Timings()
        self._count_resident_blocks = count_resident_blocks
        self._inspector = inspector
        self._model_folder = model_folder
        self._requests = EngineRequests(engine, engine_info.max_model_len_tokens)
        self._sessions: dict[SessionKey, Session] = {}
        self._expiries: dict[SessionKey, asyncio.TimerHandle] = {}
        self._num_strangers = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._listeners: list[Listener] = []
        self._is_draining = False
        self._ending: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return self._requests.num_live

    @property
    def num_sessions(self) -> int:
        """Sessions that stand, those whose router is away included."""
        return len(self._sessions)

    @property
    def paused_routers(self) -> list[RouterId]:
        """Routers that are so far behind that their requests wait."""
        return [session.router for session in self._sessions.values() if session.is_full]

    async def listen(self, address: str) -> str:
        """Serve at `unix:/path` or `tcp://host:port`; the address that routers connect to.

        A Unix socket is for its owner alone; TCP is loopback where no host is named, and port 0 is any free one.
        """
        listener = await Listener.open(address, self._start_serving)
        self._listeners.append(listener)
        return listener.address

    async def open_local(self) -> Channel:
        """The router's end of a new connection within this process. Raises `ConnectionRefusedError` once ended."""
        if self._ending is not None:
            raise ConnectionRefusedError("the worker has ended")
        ours, theirs = local_pair()
        self._start_serving(ours)
        return theirs

    async def serve(self, channel: Channel) -> None:
        """Serve one connection until it ends. Whatever the peer sends, only this connection is closed for it."""
        greeting = await self._greet(channel)
        if greeting is not None:
            await self._converse(channel, greeting)

    async def drain(self) -> None:
        """Refuse new requests, wait until those under way have ended, and until every router knows both.

        A router that is away is not waited for.
        """
        self._is_draining = True
        await self._tell_routers()
        await self._requests.wait_idle()
        await self._tell_routers()

    def engine_died(self, reason: str) -> None:
        """Tell every router that this worker is lost, and end. For the engine's `on_death`."""
        _logger.error("engine of worker %s died: %s", self._worker, reason)
        self._start_ending(EngineDied(f"the engine of worker {self._worker} died: {reason}"))

    async def close(self) -> None:
        """Stop listening, end every request, tell the routers. The engine itself stays as it is."""
        self._start_ending(WorkerLeft(f"worker {self._worker} closes"))
        await self._ended.wait()

    async def wait_closed(self) -> None:
        """Wait until the host has ended, for whatever reason it does."""
        await self._ended.wait()

    def status(self) -> WorkerStatus | None:
        """The load now; `None` while the engine is out of touch, so that routers take the worker for silent."""
        stats = self._engine.stats()
        if not stats.is_in_touch:
            return None
        return status_of(
            stats,
            self._engine_info,
            num_unended=self._requests.num_unended,
            queued_prefill_tokens=self._requests.queued_prefill_tokens,
            num_resident_blocks=0 if self._count_resident_blocks is None else self._count_resident_blocks(),
            is_draining=self._is_draining,
        )

    async def _tell_routers(self) -> None:
        await asyncio.gather(*(session.told() for session in self._sessions.values()))

    def _start_serving(self, channel: Channel) -> None:
        task = asyncio.create_task(self.serve(channel), name=f"kvroute-connection-{self._worker}")
        self._connections.add(task)
        task.add_done_callback(self._connection_ended)

    def _connection_ended(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _logger.error("serving a connection failed", exc_info=task.exception())

    async def _greet(self, channel: Channel) -> Greeting | None:
        """A peer that has proved itself; `None` for one that was turned away."""
        try:
            if self._num_strangers >= self._limits.max_strangers or self._ending is not None:
                raise ConnectionError("too many strangers, or the worker ends")
            self._num_strangers += 1
            try:
                async with asyncio.timeout(self._timings.handshake_s):
                    return await receive_hello(channel, self._secret)
            finally:
                self._num_strangers -= 1
        except ProtocolError as error:
            await self._turn_away(channel, error)
        except OSError as error:
            self._count_rejected(error)
            channel.close()
        return None

    async def _turn_away(self, channel: Channel, error: KvrouteError) -> None:
        self._count_rejected(error)
        try:
            async with asyncio.timeout(self._timings.farewell_s):
                await refuse(channel, error.code, str(error))
        except TimeoutError:
            pass

    def _count_rejected(self, error: Exception) -> None:
        self.counts.num_rejected += 1
        level = logging.WARNING if self.counts.num_rejected == 1 else logging.DEBUG
        _logger.log(level, "worker %s turned a connection away: %s", self._worker, error)

    async def _converse(self, channel: Channel, greeting: Greeting) -> None:
        """Attach the connection to its session and hear what the router says, until the connection ends."""
        key = (greeting.hello.router, greeting.hello.session)
        try:
            session, is_resumed = self._attach(key, channel, greeting.hello.last_frame)
        except KvrouteError as error:
            await self._turn_away(channel, error)
            return
        guard = SilenceGuard(channel, self._timings.silence_s)
        inspections = Inspections(channel, self._inspector)
        sender: asyncio.Task[None] | None = None
        try:
            await send_welcome(
                channel,
                self._secret,
                greeting,
                self._worker,
                self._instance,
                is_resumed=is_resumed,
                last_submit=session.last_submit,
            )
            sender = asyncio.create_task(session.send_frames(channel), name=f"kvroute-sender-{session.router}")
            sender.add_done_callback(functools.partial(self._sender_ended, key, session))
            while True:
                message = decode(await channel.receive())
                guard.heard()
                if isinstance(message, Ack):
                    session.acknowledge(message.frame)
                elif isinstance(message, Submit):
                    self._submit(session, message)
                elif isinstance(message, Cancel):
                    self._requests.cancel(session, (message.request, message.attempt))
                elif isinstance(message, Inspect):
                    inspections.start(message)
                elif isinstance(message, AskTokenizer):
                    await self._send_tokenizer(channel, message)
                elif isinstance(message, Refused):
                    self._drop(key)
                    return
                else:
                    raise ProtocolError(f"a router does not send {type(message).__name__}")
        except ConnectionError as error:
            _logger.debug("connection of router %s ended: %s", session.router, error)
        except ProtocolError as error:
            self.counts.num_protocol_errors += 1
            _logger.warning("connection of router %s is closed: %s", session.router, error)
        finally:
            guard.stop()
            channel.close()
            inspections.cancel()
            if sender is not None:
                sender.cancel()
            if session.detach(channel) and self._sessions.get(key) is session:
                loop = asyncio.get_running_loop()
                self._expiries[key] = loop.call_later(self._timings.resume_s, self._expire, key)

    async def _send_tokenizer(self, channel: Channel, asked: AskTokenizer) -> None:
        found: dict[str, bytes] = {}
        if self._model_folder is not None:
            with contextlib.suppress(OSError):
                found = await asyncio.to_thread(read_tokenizer, self._model_folder)
        if found:
            await send_tokenizer(channel, asked, found)
        else:
            fault = fault_of(EngineError("this worker has no files of a tokenizer"))
            await channel.send(encode(TokenizerFile(asked.number, "", b"", 0, fault)))

    def _sender_ended(self, key: SessionKey, session: Session, task: asyncio.Task[None]) -> None:
        """A session that cannot send keeps its router waiting for ever: end it, so that its requests fail over."""
        if task.cancelled() or task.exception() is None:
            return
        _logger.error("sending to router %s failed, its session ends", session.router, exc_info=task.exception())
        if self._sessions.get(key) is session:
            self._drop(key)

    def _attach(self, key: SessionKey, channel: Channel, last_frame: int) -> tuple[Session, bool]:
        """The session that the connection belongs to from now on, and whether it stood before."""
        session = self._sessions.get(key)
        if session is not None:
            session.attach(channel, last_frame)
            expiry = self._expiries.pop(key, None)
            if expiry is not None:
                expiry.cancel()
            self.counts.num_resumed += 1
            return session, True
        if len(self._sessions) >= self._limits.max_sessions:
            raise Overloaded(f"the worker serves {len(self._sessions)} sessions already")
        session = Session(key[0], self._instance, self.status, self._timings, self._limits.max_unacknowledged_bytes)
        session.attach(channel, 0)
        self._sessions[key] = session
        self.counts.num_sessions += 1
        return session, False

    def _submit(self, session: Session, submit: Submit) -> None:
        if session.is_overrun:
            raise ProtocolError("the router submits without acknowledging what it is sent")
        if not session.accept(submit.number):
            return
        try:
            self._check_room(session)
            self._requests.start(session, submit)
        except KvrouteError as error:
            session.push((submit.request, submit.attempt), 0, fault=fault_of(error))
        except Exception:
            # The number is accepted, so nobody would send it again or ever hear of it.
            _logger.exception("request %s could not be started", submit.request)
            failure = EngineError("the worker failed to start this request; its log says why")
            session.push((submit.request, submit.attempt), 0, fault=fault_of(failure))

    def _check_room(self, session: Session) -> None:
        retry_after_s = self._limits.retry_after_s
        if self._ending is not None:
            raise WorkerLeft("the worker ends")
        if self._is_draining:
            raise Overloaded("the worker is draining", retry_after_s=retry_after_s)
        if self._requests.num_live_of(session) >= self._limits.max_requests_per_session:
            raise Overloaded(
                f"{self._limits.max_requests_per_session} requests of this router are under way already",
                retry_after_s=retry_after_s,
            )

    def _expire(self, key: SessionKey) -> None:
        self.counts.num_expired += 1
        _logger.info("router %s did not come back; its requests are freed", key[0])
        self._drop(key)

    def _drop(self, key: SessionKey) -> None:
        """End a session whose router is gone: at once, its requests are freed."""
        session = self._sessions.pop(key)
        expiry = self._expiries.pop(key, None)
        if expiry is not None:
            expiry.cancel()
        session.close()
        self._requests.cancel_all(session)

    def _start_ending(self, error: WorkerLost) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(error), name=f"kvroute-ending-{self._worker}")

    async def _end(self, error: WorkerLost) -> None:
        for listener in self._listeners:
            listener.close()
        try:
            # A dead engine may not answer to being told to free its requests.
            async with asyncio.timeout(self._timings.farewell_s):
                await self._requests.fail_all(error)
        except TimeoutError:
            _logger.warning("worker %s ends with %s requests not freed", self._worker, self._requests.num_live)
        for session in self._sessions.values():
            session.close(Refused(error.code, str(error)))
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=self._timings.farewell_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for key in list(self._sessions):
            self._drop(key)
        self._ended.set()
