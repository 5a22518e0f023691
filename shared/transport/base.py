"""The two ends of a router-worker connection, as their users see them.

Both ends speak `shared.messages` over a `Channel` of whole messages. A channel is a Unix or TCP socket, or a pair of
in-process queues that carry the same bytes, so that tests and virtual time exercise the whole protocol.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from shared.errors import KvrouteError
from shared.messages import Delta
from shared.types import Instance, RequestId, Sampling, WorkerId, WorkerStatus


@dataclass(frozen=True, slots=True)
class Timings:
    """How long the two ends wait. Both sides of one deployment use the same."""

    handshake_s: float = 5.0
    """Longest time from the connection to the last word of the handshake."""
    resume_s: float = 5.0
    """How long a session outlives its connection; after that its requests are freed, and lost to the router."""
    frame_interval_s: float = 0.01
    """Least time between two frames of one session while deltas flow: what comes in between shares a frame."""
    urgent_interval_s: float = 0.001
    """The same for a frame with a first token or an end in it."""
    status_interval_s: float = 0.1
    """Time between two statuses, with or without deltas. Also the sign of life of both sides."""
    num_missed_statuses: int = 20
    """So many statuses in a row that do not come are a silence: whatever else may be the matter, sending waits."""
    silence_s: float = 10.0
    """A connection that brings nothing for this long is cut: a lost machine closes no socket."""
    backoff_s: float = 0.01
    """Wait before the second attempt to reconnect; doubles up to `max_backoff_s`."""
    max_backoff_s: float = 0.5
    farewell_s: float = 1.0
    """Longest time that a closing side spends on its last words."""

    @property
    def pulse_s(self) -> float:
        """How long a worker's statuses must stay away for one silence."""
        return self.num_missed_statuses * self.status_interval_s


class Channel(Protocol):
    """A reliable, ordered pipe of whole messages."""

    receive_limit_bytes: int
    """Longest message taken; small until the peer has proved itself."""

    async def send(self, raw: bytes) -> None:
        """Hand over one message; waits while the peer is slow. Raises `ConnectionError` once the pipe is closed."""
        ...

    def send_now(self, raw: bytes) -> bool:
        """Hand over one message where that takes no waiting, behind all before it; else tell so and do nothing."""
        ...

    async def receive(self) -> bytes:
        """The next message. Raises `ConnectionError` once the pipe is closed, `ProtocolError` over the size limit."""
        ...

    def close(self) -> None:
        """Close both directions; pending and later calls on either end raise `ConnectionError`.

        What this end sent before is still given to the other end's `receive`, as far as the pipe holds it.
        """
        ...


Connect = Callable[[], Awaitable[Channel]]
"""Makes a new channel to one worker. Raises `OSError`; `ConnectionRefusedError` when nobody listens there any more."""


class DeltaStream(Protocol):
    """The deltas of one submitted sequence. Whoever leaves it early must close it, or the worker goes on computing."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def __anext__(self) -> Delta: ...

    async def aclose(self) -> None:
        """Cancel the request at the worker unless it has ended. Never waits."""
        ...

    def give_up(self, error: KvrouteError) -> None:
        """Cancel as `aclose` does, and have the reader get `error` next. A stream that has ended is left as it is."""
        ...


class WorkerClient(Protocol):
    """A router's end of the connection to one worker. Reconnects by itself within the resume window."""

    @property
    def worker(self) -> WorkerId: ...

    @property
    def instance(self) -> Instance:
        """The life of the worker that this client is bound to; another life means another client."""
        ...

    @property
    def is_connected(self) -> bool: ...

    @property
    def is_lost(self) -> bool:
        """Whether the worker is gone for good for this client; a client that may yet resume is not lost."""
        ...

    @property
    def status(self) -> WorkerStatus | None:
        """The load told by the last frame; `None` before the first."""
        ...

    @property
    def status_age_s(self) -> float:
        """Seconds since that frame arrived; infinite before the first."""
        ...

    @property
    def num_silences(self) -> int:
        """How many times in a row the worker, though connected, has told no status for `Timings.pulse_s`: it may be
        stuck.
        """
        ...

    @property
    def round_trip_s(self) -> float:
        """To the worker and back, as the last connection was made; 0.0 before the first."""
        ...

    @property
    def acknowledged_submit(self) -> int:
        """Number of the last own submit that `status` accounts for."""
        ...

    @property
    def last_submit(self) -> int:
        """Number of the last submit made on this client."""
        ...

    async def connect(self) -> None:
        """Connect and authenticate. Raises `WorkerLost`, or `AuthenticationFailed`.

        After `WorkerLost` here it may be tried again; a client that was connected and `is_lost` stays so.
        """
        ...

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
    ) -> DeltaStream:
        """Submit one sequence, at once (the submit is numbered before this returns), and give its deltas.

        The iterator yields each token once and in order and ends after the delta with `finish`. It raises the error
        that the worker reports (`InvalidRequest`, `EngineError`, `Overloaded`), and `WorkerLost` when the worker or
        the connection is gone for good. With `max_queued_tokens` a worker that has more uncached prompt tokens before
        it than that, by whichever router, does not take the request: that is `Outpaced`, and `status` is as of then.
        Closing it early, or cancelling the task that waits for it, cancels the request at the worker. `request` and
        `attempt` together are new to this client, or `ValueError`. What no worker could read, since it is too large or
        out of the protocol's range, is an `InvalidRequest` and takes no number.
        """
        ...

    async def close(self) -> None:
        """Cancel everything under way and disconnect."""
        ...


OnChange = Callable[[], None]
"""Called when something that routing depends on has changed: a status, a first token, a finish, a connection, and for
each silence."""
