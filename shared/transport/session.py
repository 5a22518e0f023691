"""The worker's end of one router's session: numbers, gathers, keeps and repeats the frames that go to that router.

It knows nothing of engines; the requests behind the deltas belong to the worker's host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.errors import ProtocolError
from shared.messages import Delta, Fault, Frame, MessagePart, Refused, RichDelta, TokenLogprobs, encode
from shared.transport.base import Channel, Timings
from shared.types import FinishReason, Instance, RequestId, RouterId, WorkerStatus
from shared.wire import fields_of

RequestKey = tuple[RequestId, int]
"""Request and attempt: what a delta is addressed to."""

MAX_UNACKNOWLEDGED_BYTES = 8 << 20
_TOKEN_BYTES = 5
"""Most bytes of one token id in a frame."""
_SLACK_S = 1e-4
"""What is due this soon is due now: timers may fire a moment early, and then must not be set again and again."""
_DELTA_BYTES = 64
"""About what a delta costs beside its tokens."""
_LOGPROB_BYTES = 16
"""The same of one log-probability and whose it is."""


class Session:
    """Frames for one router. Outlives its connections.

    Invariants: frames are numbered from 1 without holes; `_outbox` holds exactly the frames that are built and not
    acknowledged, in order; at most one channel is current; once closed, nothing is taken or sent any more.
    """

    def __init__(
        self,
        router: RouterId,
        instance: Instance,
        read_status: Callable[[], WorkerStatus | None],
        timings: Timings,
        max_unacknowledged_bytes: int = MAX_UNACKNOWLEDGED_BYTES,
    ) -> None:
        self.router = router
        self.last_submit = 0
        self._instance = instance
        self._read_status = read_status
        self._timings = timings
        self._max_unacknowledged_bytes = max_unacknowledged_bytes
        self._channel: Channel | None = None
        self._pending: dict[RequestKey, Delta] = {}
        """Each request's news since the last frame; they change until they are in one."""
        self._has_rich = False
        """Whether more than tokens is among them."""
        self._pending_bytes = 0
        self._outbox: dict[int, bytes] = {}
        self._outbox_bytes = 0
        self._last_frame = 0
        self._acknowledged = 0
        self._frame_at_s = -float("inf")
        self._status_at_s = -float("inf")
        self._is_urgent = False
        self._farewell: Refused | None = None
        self._is_closed = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()

    @property
    def channel(self) -> Channel | None:
        """The current connection; `None` while the router is away."""
        return self._channel

    @property
    def unacknowledged_bytes(self) -> int:
        """About what is kept for the router: frames not acknowledged, and deltas not yet in a frame."""
        return self._outbox_bytes + self._pending_bytes

    @property
    def is_full(self) -> bool:
        """Whether the router's requests are to pause."""
        # Asked for each token: spelt out, since one property inside another takes twice the time.
        return self._outbox_bytes + self._pending_bytes >= self._max_unacknowledged_bytes and not self._is_closed

    @property
    def is_overrun(self) -> bool:
        """Whether the router makes the worker keep far more than pausing its requests can explain."""
        return self.unacknowledged_bytes >= 2 * self._max_unacknowledged_bytes

    async def room(self) -> None:
        """Wait until the session is not full, or closed. Does not modify."""
        while self.is_full:
            self._room.clear()
            await self._room.wait()

    async def told(self) -> None:
        """Wait until the router has acknowledged all that was pushed and a frame begun after that, or is away.

        Whatever it had sent before it heard of this has then arrived, too. Does not modify.
        """
        frame = self._last_frame + 1
        while self._channel is not None and not self._is_closed and (self._pending or self._acknowledged < frame):
            self._room.clear()
            await self._room.wait()

    def accept(self, number: int) -> bool:
        """Note the submit `number`; whether it is new. Numbers only grow: what a router gave up is not sent again."""
        if number <= self.last_submit:
            return False
        self.last_submit = number
        return True

    def push(
        self,
        key: RequestKey,
        offset: int,
        token_ids: tuple[int, ...] = (),
        *,
        finish: FinishReason | None = None,
        cached_tokens: int | None = None,
        fault: Fault | None = None,
    ) -> None:
        """Add one request's news to the next frame. Modifies; never waits, so that callers look at `is_full` before."""
        if self._is_closed:
            return
        gathered = self._pending.get(key)
        if gathered is None:
            if not self._pending:
                self._wake.set()
            self._pending[key] = Delta(*key, offset, token_ids, finish, cached_tokens, fault)
            self._pending_bytes += _DELTA_BYTES
        else:
            gathered.token_ids += token_ids
            if cached_tokens is not None:
                gathered.cached_tokens = cached_tokens
            gathered.finish = finish
            gathered.fault = fault
        self._pending_bytes += _TOKEN_BYTES * len(token_ids)
        if not self._is_urgent and (offset == 0 or finish is not None or fault is not None):
            self._is_urgent = True
            self._wake.set()

    def add_more(self, key: RequestKey, logprobs: tuple[TokenLogprobs, ...], parts: tuple[MessagePart, ...]) -> None:
        """Add what belongs to the tokens that were pushed just now, for the same frame. Modifies; never waits."""
        gathered = self._pending.get(key)
        if gathered is None:
            return  # closed
        if not isinstance(gathered, RichDelta):
            gathered = self._pending[key] = RichDelta(*fields_of(gathered))
            self._has_rich = True
        gathered.logprobs += logprobs
        gathered.parts += parts
        self._pending_bytes += sum(_LOGPROB_BYTES * (1 + len(one.top_logprobs)) for one in logprobs)
        self._pending_bytes += sum(_DELTA_BYTES * (1 + len(part.tool_calls)) + _num_chars(part) for part in parts)

    def acknowledge(self, frame: int) -> None:
        """Forget the frames up to `frame`. Raises `ProtocolError` for a frame that was never built."""
        if frame > self._last_frame:
            raise ProtocolError(f"frame {frame} is acknowledged, the last one built is {self._last_frame}")
        while self._acknowledged < frame:
            self._acknowledged += 1
            self._outbox_bytes -= len(self._outbox.pop(self._acknowledged))
        if not self.is_full:
            self._room.set()

    def attach(self, channel: Channel, last_frame: int) -> None:
        """Make `channel` the current connection, whose peer has all frames up to `last_frame`; close the one before.

        Raises `ProtocolError` when the session does not have the frame after `last_frame`.
        """
        if last_frame < self._acknowledged:
            raise ProtocolError(f"frame {last_frame + 1} is asked for again after it was acknowledged")
        self.acknowledge(last_frame)
        if self._channel is not None:
            self._channel.close()
        self._channel = channel
        # The router knows the load and that the connection works as soon as it stands.
        self._status_at_s = -float("inf")

    def detach(self, channel: Channel) -> bool:
        """Note that `channel` is gone; whether it was the current one."""
        if self._channel is not channel:
            return False
        self._channel = None
        self._room.set()
        return True

    def close(self, farewell: Refused | None = None) -> None:
        """Take nothing more and let go of all who wait. With `farewell`, what is kept is still sent, and that last."""
        self._is_closed = True
        self._farewell = farewell
        if farewell is None:
            self._pending.clear()
            self._outbox.clear()
            self._pending_bytes = self._outbox_bytes = 0
            if self._channel is not None:
                self._channel.close()
        self._wake.set()
        self._room.set()

    async def send_frames(self, channel: Channel) -> None:
        """Send what is unacknowledged and then each new frame, until `channel` is closed or not current any more.

        Whatever else this raises is a fault of our own, after which the session is of no use.
        """
        sent = self._acknowledged
        try:
            while self._channel is channel:
                while sent < self._last_frame:
                    sent = max(sent, self._acknowledged) + 1
                    raw = self._outbox.get(sent)
                    if raw is not None:
                        await channel.send(raw)
                if self._is_closed and not self._pending:
                    if self._farewell is None:
                        channel.close()
                    else:
                        # The router closes: closed from here, with bytes of its own on their way, these could be lost.
                        await channel.send(encode(self._farewell))
                    return
                await self._until_due()
                if self._channel is channel:
                    self._build_frame()
        except ConnectionError:
            channel.close()

    async def _until_due(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_closed:
            due_s = self._status_at_s + self._timings.status_interval_s
            if self._pending:
                # First tokens and ends are what routers decide by and callers wait for; there are few of them.
                interval_s = self._timings.urgent_interval_s if self._is_urgent else self._timings.frame_interval_s
                due_s = min(due_s, self._frame_at_s + interval_s)
            if due_s <= loop.time() + _SLACK_S:
                return
            self._wake.clear()
            timer = loop.call_at(due_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()

    def _build_frame(self) -> None:
        now_s = asyncio.get_running_loop().time()
        # First tokens and ends change the load: the news of them and of the load belong together.
        is_due = self._is_urgent or now_s + _SLACK_S >= self._status_at_s + self._timings.status_interval_s
        is_status_due = is_due and not self._is_closed
        if not self._pending and not is_status_due:
            return
        if self._pending:
            self._frame_at_s = now_s
        if is_status_due:
            self._status_at_s = now_s
        self._last_frame += 1
        deltas = tuple(self._pending.values())
        rich_deltas: tuple[RichDelta, ...] = ()
        if self._has_rich:
            rich_deltas = tuple([delta for delta in deltas if isinstance(delta, RichDelta)])
            deltas = tuple([delta for delta in deltas if not isinstance(delta, RichDelta)])
        raw = encode(
            Frame(
                self._instance,
                self._last_frame,
                self.last_submit,
                deltas,
                self._read_status() if is_status_due else None,
                rich_deltas,
            )
        )
        self._has_rich = False
        self._pending.clear()
        self._pending_bytes = 0
        self._is_urgent = False
        self._outbox[self._last_frame] = raw
        self._outbox_bytes += len(raw)
        if not self.is_full:
            self._room.set()


def _num_chars(part: MessagePart) -> int:
    return len(part.content) + len(part.reasoning) + sum(len(call.arguments) for call in part.tool_calls)
