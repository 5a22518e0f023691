"""The two ends of a router-worker connection, as their users see them.

Both ends speak `shared.messages` over a `Channel` of whole messages. A channel is a Unix or TCP socket, or a pair of
in-process queues that carry the same bytes, so that tests and virtual time exercise the whole protocol.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from shared.messages import Delta
from shared.types import Instance, RequestId, Sampling, WorkerId, WorkerStatus


class Channel(Protocol):
    """A reliable, ordered pipe of whole messages."""

    async def send(self, raw: bytes) -> None:
        """Hand over one message; waits while the peer is slow. Raises `ConnectionError` once the pipe is closed."""
        ...

    async def receive(self) -> bytes:
        """The next message. Raises `ConnectionError` once the pipe is closed, `ProtocolError` over the size limit."""
        ...

    def close(self) -> None:
        """Close both directions; pending and later calls on either end raise `ConnectionError`."""
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
    def acknowledged_submit(self) -> int:
        """Number of the last own submit that `status` accounts for."""
        ...

    @property
    def last_submit(self) -> int:
        """Number of the last submit made on this client."""
        ...

    async def connect(self) -> None:
        """Connect and authenticate. Raises `WorkerLost`, or `AuthenticationFailed`."""
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
    ) -> AsyncIterator[Delta]:
        """Submit one sequence, at once (the submit is numbered before this returns), and give its deltas.

        The iterator yields each token once and in order and ends after the delta with `finish`. It raises the error
        that the worker reports (`InvalidRequest`, `EngineError`, `Overloaded`), and `WorkerLost` when the worker or
        the connection is gone for good. Closing it early cancels the request at the worker.
        """
        ...

    async def close(self) -> None:
        """Cancel everything under way and disconnect."""
        ...


OnChange = Callable[[], None]
"""Called when something that routing depends on has changed: a status, a first token, a finish, a connection."""
