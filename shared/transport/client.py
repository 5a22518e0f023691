"""The router's end of the connection to one worker: numbers submits, routes deltas, resumes after a cut."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import secrets
from collections import deque
from collections.abc import Callable, Sequence

from shared.errors import AuthenticationFailed, ConfigError, InvalidRequest, ProtocolError, WorkerLeft, WorkerLost
from shared.messages import Ack, Cancel, Delta, Frame, Refused, Submit, decode, encode
from shared.transport.base import Channel, Connect, OnChange, Timings
from shared.transport.channel import SilenceGuard, open_channel
from shared.transport.handshake import SESSION_BYTES, greet_worker
from shared.transport.pulse import Pulse
from shared.transport.session import RequestKey
from shared.transport.stream import Stream
from shared.types import Instance, RequestId, RouterId, Sampling, WorkerId, WorkerInfo, WorkerStatus
from shared.wire import MAX_MESSAGE_BYTES, decode_record, encode_record

_logger = logging.getLogger(__name__)

GOODBYE = Refused("closed", "the router closes the session")
_MOST_UNACKNOWLEDGED_BYTES = 1 << 20
"""Far under what makes a worker pause."""
_MAX_KNOWN_SAMPLINGS, _MAX_KNOWN_BYTES = 64, 4096
"""Ways of sampling that are known to be read, few being in use at a time, and the longest: a schema may have MiB."""


class ChannelClient:
    """`WorkerClient` over any channel.

    Invariants: `_streams` holds the requests whose last delta has not arrived, left ones included, since the worker
    tells their end too; `_unseen` holds the submits that no frame accounts for, as bytes a worker can read; while a
    session stands, one task reads and one writes, and neither ends without the connection.
    """

    def __init__(
        self,
        worker: WorkerId,
        instance: Instance,
        router: RouterId,
        secret: bytes,
        connect: Connect,
        *,
        rng: random.Random,
        timings: Timings | None = None,
        on_change: OnChange | None = None,
    ) -> None:
        if not secret:
            raise ConfigError("the shared secret is empty")
        self.worker = worker
        self.instance = instance
        self.last_submit = 0
        self.acknowledged_submit = 0
        self.status: WorkerStatus | None = None
        self.is_lost = False
        self.round_trip_s = 0.0
        self.num_reconnects = 0
        self._router = router
        self._secret = secret
        self._connect = connect
        self._timings = timings or Timings()
        self._on_change: Callable[[], None] = on_change or _ignore
        self._status_at_s = -float("inf")
        self._rng = rng
        # Not drawn from `rng`: nobody may guess a session.
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._last_frame = 0
        self._streams: dict[RequestKey, Stream] = {}
        self._unseen: dict[int, tuple[RequestKey, bytes]] = {}
        self._outgoing: deque[bytes] = deque()
        self._is_acknowledgement_due = False
        self._acknowledged_at_s = -float("inf")
        self._unacknowledged_bytes = 0
        self._wake = asyncio.Event()
        self._channel: Channel | None = None
        self._task: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._is_progressing = False
        self._pulse: Pulse | None = None

    @property
    def is_connected(self) -> bool:
        return self._channel is not None

    @property
    def status_age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._status_at_s

    @property
    def num_silences(self) -> int:
        return 0 if self._pulse is None else self._pulse.num_silences

    @property
    def num_open(self) -> int:
        """Requests whose end the worker has not told yet, left ones included."""
        return len(self._streams)

    async def connect(self) -> None:
        async with self._connecting:
            if self.is_lost:
                raise WorkerLost(f"worker {self.worker} is lost to this client")
            if self._task is not None:
                return
            try:
                channel = await self._open()
            except AuthenticationFailed:
                raise
            except (OSError, ProtocolError, ConfigError) as error:
                raise WorkerLost(f"worker {self.worker} cannot be reached: {_told(error)}") from error
            self._task = asyncio.create_task(self._run(channel), name=f"kvroute-client-{self.worker}")

    def submit(
        self,
        request: RequestId,
        attempt: int,
        token_ids: bytes,
        sampling: Sampling,
        *,
        salt: str = "",
        adapter: str = "",
        priority: int = 0,
        matched_tokens: int = 0,
        max_queued_tokens: int | None = None,
        traceparent: str = "",
    ) -> Stream:
        key = (request, attempt)
        if key in self._streams:
            raise ValueError(f"request {request}, attempt {attempt} is already under way")
        number = self.last_submit + 1
        body = (token_ids, sampling, salt, adapter, priority, matched_tokens, max_queued_tokens, traceparent)
        raw = _encoded(Submit(number, request, attempt, *body))
        self.last_submit = number
        stream = Stream(key, number, self._leave)
        if self._task is None:
            stream.fail(WorkerLost(f"worker {self.worker} is not connected"))
            return stream
        self._streams[key] = stream
        self._unseen[number] = key, raw
        self._send(raw)
        return stream

    async def close(self) -> None:
        channel, task = self._channel, self._task
        if channel is not None:
            try:
                async with asyncio.timeout(self._timings.farewell_s):
                    await channel.send(encode(GOODBYE))
            except (ConnectionError, TimeoutError):
                pass
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _leave(self, stream: Stream) -> None:
        """The consumer is gone: have the worker free the request. Its last delta ends the entry."""
        if self._streams.get(stream.key) is stream:
            self._send(encode(Cancel(*stream.key)))

    def _send(self, raw: bytes) -> None:
        # While the worker is away nothing is queued: `_catch_up` works out afresh what it has missed.
        # To wake the writer takes longer than to write.
        if self._channel is not None and (self._outgoing or not self._channel.send_now(raw)):
            self._outgoing.append(raw)
            self._wake.set()

    async def _run(self, channel: Channel | None) -> None:
        """Hold the session over all its connections; when it is lost, so is everything under way."""
        reason: Exception = WorkerLost(f"the client of worker {self.worker} was closed")
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timings.resume_s
        try:
            while channel is not None:
                try:
                    await self._converse(channel)
                except (ConnectionError, ProtocolError) as error:
                    _logger.info("connection to worker %s broke: %s", self.worker, error)
                # A connection that brought no new frame is no progress: a peer that repeats a fault ends here too.
                if self._is_progressing:
                    deadline_s = loop.time() + self._timings.resume_s
                channel = await self._reconnect(deadline_s)
        except (WorkerLost, AuthenticationFailed) as error:
            reason = error
            # Whoever owns this client tells of the loss.
            _logger.info("worker %s is lost: %s", self.worker, error)
        except Exception as error:
            # A fault of our own. Going on could leave requests waiting for ever; so they fail over.
            reason = WorkerLost(f"the connection to worker {self.worker} failed: {type(error).__name__}: {error}")
            _logger.exception("worker %s is lost to a fault of this client", self.worker)
        finally:
            self._task = None
            self.is_lost = True
            self._fail_all(reason)
            self._on_change()

    async def _reconnect(self, deadline_s: float) -> Channel:
        loop = asyncio.get_running_loop()
        wait_s = self._timings.backoff_s
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    channel = await self._open()
                self.num_reconnects += 1
                return channel
            except (ConnectionRefusedError, FileNotFoundError) as error:
                # Nobody listens there, so the process that held the session is gone: waiting cannot help.
                raise WorkerLost(f"worker {self.worker} is gone: {error}") from error
            except AuthenticationFailed:
                raise
            except (OSError, ProtocolError) as error:
                if loop.time() + wait_s >= deadline_s:
                    raise WorkerLost(f"worker {self.worker} could not be reached again: {_told(error)}") from error
            # Spread out, so that the routers of one worker do not come back in step.
            await asyncio.sleep(wait_s * self._rng.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, self._timings.max_backoff_s)

    async def _open(self) -> Channel:
        """A channel on which the session stands. Raises `OSError`, `ProtocolError` or `WorkerLost`."""
        async with asyncio.timeout(self._timings.handshake_s):
            channel = await self._connect()
            try:
                greeted_at_s = asyncio.get_running_loop().time()
                welcome = await greet_worker(channel, self._secret, self._router, self._session, self._last_frame)
                if (welcome.worker, welcome.instance) != (self.worker, self.instance):
                    raise WorkerLost(
                        f"worker {self.worker}, instance {self.instance}, is gone: "
                        f"{welcome.worker}, instance {welcome.instance}, answers in its place"
                    )
                if self._task is not None and not welcome.is_resumed:
                    raise WorkerLost(f"worker {self.worker} has given up this router's session")
                self._catch_up(welcome.last_submit)
            except BaseException:
                channel.close()
                raise
        # The worker speaks first, so that this is up to one and a half of them.
        self.round_trip_s = asyncio.get_running_loop().time() - greeted_at_s
        self._channel = channel
        self._is_progressing = False
        self._on_change()
        return channel

    def _catch_up(self, last_submit: int) -> None:
        """Queue what the worker has missed: submits that it never saw, and cancels, which it may have seen or not."""
        self._outgoing.clear()
        for stream in list(self._streams.values()):
            is_seen = stream.number <= last_submit
            if stream.is_left and is_seen:
                self._outgoing.append(encode(Cancel(*stream.key)))
            elif stream.is_left:
                del self._streams[stream.key]
            elif not is_seen:
                if stream.number not in self._unseen:
                    raise ProtocolError(f"worker {self.worker} forgot submit {stream.number}")
                _, raw = self._unseen[stream.number]
                self._outgoing.append(raw)
        self._note_seen(last_submit)
        for number in [number for number, (key, _) in self._unseen.items() if key not in self._streams]:
            del self._unseen[number]
        self._wake.set()

    async def _converse(self, channel: Channel) -> None:
        """Read and write until the channel breaks."""
        writer = asyncio.create_task(self._write(channel), name=f"kvroute-client-writer-{self.worker}")
        guard = SilenceGuard(channel, self._timings.silence_s)
        self._pulse = Pulse(self._timings.pulse_s, self._on_change)
        try:
            while True:
                raw = await channel.receive()
                message = decode(raw)
                guard.heard()
                if isinstance(message, Frame):
                    self._take_frame(message)
                    self._acknowledge_soon(len(raw))
                elif isinstance(message, Refused):
                    lost = WorkerLeft if message.code == WorkerLeft.code else WorkerLost
                    raise lost(f"worker {self.worker} ends: {message.message}")
                else:
                    raise ProtocolError(f"a worker does not send {type(message).__name__}")
        except ConnectionError:
            if writer.done():
                writer.result()  # raises what ended it, if that was no broken connection
            raise
        finally:
            guard.stop()
            self._pulse.stop()
            self._channel = self._pulse = None
            channel.close()
            writer.cancel()
            self._on_change()

    async def _write(self, channel: Channel) -> None:
        """Write what is queued; the connection ends with this, however it ends."""
        try:
            while True:
                while self._outgoing:
                    await channel.send(self._outgoing.popleft())
                if self._is_acknowledgement_due:
                    self._is_acknowledgement_due = False
                    await channel.send(encode(Ack(self._last_frame)))
                if not self._outgoing and not self._is_acknowledgement_due:
                    self._wake.clear()
                    await self._wake.wait()
        except ConnectionError:
            pass
        finally:
            channel.close()

    def _take_frame(self, frame: Frame) -> None:
        """Route one frame. Raises `ProtocolError` on a hole, which a new connection mends."""
        if frame.instance != self.instance:
            raise WorkerLost(f"worker {self.worker} now is instance {frame.instance}, not {self.instance}")
        if frame.number <= self._last_frame:
            return
        if frame.number != self._last_frame + 1:
            raise ProtocolError(f"frame {frame.number} follows frame {self._last_frame}")
        is_change = False
        streams = self._streams
        deltas: Sequence[Delta] = frame.deltas if not frame.rich_deltas else (*frame.deltas, *frame.rich_deltas)
        for delta in deltas:
            stream = streams.get((delta.request, delta.attempt))
            if stream is not None:
                is_change |= stream.take(delta)
                if stream.is_ended:
                    del streams[stream.key]
                    self._unseen.pop(stream.number, None)
        self._last_frame = frame.number
        self._is_progressing = True
        self._note_seen(frame.last_submit)
        if frame.status is not None:
            self.status = frame.status
            self._status_at_s = asyncio.get_running_loop().time()
            if self._pulse is not None:
                self._pulse.heard()
            self.acknowledged_submit = frame.last_submit
            is_change = True
        if is_change:
            self._on_change()

    def _acknowledge_soon(self, num_bytes: int) -> None:
        """Have frames acknowledged as often as statuses come, which is also this side's sign of life.

        To do so for each frame costs a busy router as much as its submits. Where much has come it is done earlier.
        """
        now_s = asyncio.get_running_loop().time()
        self._unacknowledged_bytes += num_bytes
        # Half of it, since statuses that come a little early are not to go without.
        is_time = now_s - self._acknowledged_at_s >= self._timings.status_interval_s / 2
        if is_time or self._unacknowledged_bytes >= _MOST_UNACKNOWLEDGED_BYTES:
            self._acknowledged_at_s = now_s
            self._unacknowledged_bytes = 0
            self._is_acknowledgement_due = True
            self._wake.set()

    def _note_seen(self, last_submit: int) -> None:
        while self._unseen and (number := next(iter(self._unseen))) <= last_submit:
            del self._unseen[number]

    def _fail_all(self, reason: Exception) -> None:
        streams = list(self._streams.values())
        self._streams.clear()
        self._unseen.clear()
        self._outgoing.clear()
        for stream in streams:
            stream.fail(WorkerLeft(str(reason)) if isinstance(reason, WorkerLeft) else WorkerLost(str(reason)))


def connect_worker(
    info: WorkerInfo,
    router: RouterId,
    secret: bytes,
    *,
    rng: random.Random,
    timings: Timings | None = None,
    on_change: OnChange | None = None,
) -> ChannelClient:
    """A client, not yet connected, of the worker that has announced `info`."""
    connect = functools.partial(open_channel, info.address)
    return ChannelClient(
        info.worker, info.instance, router, secret, connect, rng=rng, timings=timings, on_change=on_change
    )


def _told(error: Exception) -> str:
    return str(error) or "no answer in time"


def _encoded(submit: Submit) -> bytes:
    """The wire form of a submit that the worker will take.

    What cannot be sent or read would cost the connection, and after it the next one, with everything else on them.
    Raises `InvalidRequest`.
    """
    try:
        raw = encode(submit)
        # Beside it there are texts and whole numbers alone, which can be read once they could be written.
        sampling = encode_record(submit.sampling)
        if len(sampling) > _MAX_KNOWN_BYTES:
            decode_record(Sampling, sampling)
        else:
            _check_sampling(sampling)
    except (ProtocolError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error
    if len(raw) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"the request cannot be sent: {len(raw)} bytes are over the limit of {MAX_MESSAGE_BYTES}")
    return raw


@functools.lru_cache(maxsize=_MAX_KNOWN_SAMPLINGS)
def _check_sampling(raw: bytes) -> None:
    """Raises what a worker would raise that reads this. By its bytes, since values may be equal and of other types."""
    decode_record(Sampling, raw)


def _ignore() -> None:
    pass
