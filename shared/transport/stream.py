"""One request's deltas on their way from the connection's reader to whoever waits for them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable

from shared.errors import KvrouteError, ProtocolError
from shared.messages import Delta
from shared.transport.faults import error_of
from shared.transport.session import RequestKey


class Stream:
    """`DeltaStream` of one submit.

    Holds at most the deltas of one answer: a consumer that is slow keeps no other request waiting. What arrived before
    an error is given out before it.
    """

    def __init__(self, key: RequestKey, number: int, on_leave: Callable[[Stream], None]) -> None:
        self.key = key
        self.number = number
        self.is_ended = False
        """Whether nothing more will arrive."""
        self.is_left = False
        """Whether nobody reads any more."""
        self._on_leave = on_leave
        self._num_tokens = 0
        self._deltas: deque[Delta] = deque()
        self._error: KvrouteError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self.is_left or self.is_ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("two tasks read one stream")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.leave()
                raise
            finally:
                self._waiter = None
        return self._deltas.popleft()

    async def aclose(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Nobody reads any more: forget what is here and cancel the request unless it has ended."""
        self._error = None
        if self.is_left:
            return
        self.is_left = True
        self._deltas.clear()
        self._wake()
        if not self.is_ended:
            self._on_leave(self)

    def give_up(self, error: KvrouteError) -> None:
        if not self.is_left and not self.is_ended:
            self.leave()
            self._error = error

    def take(self, delta: Delta) -> bool:
        """Add a delta; whether it is the first or the last one. A repeat is dropped, a hole is a `ProtocolError`."""
        if delta.offset != self._num_tokens:
            if delta.offset + len(delta.token_ids) <= self._num_tokens:
                return False
            raise ProtocolError(f"request {delta.request}: token {delta.offset} follows token {self._num_tokens - 1}")
        is_change = self._num_tokens == 0
        self._num_tokens += len(delta.token_ids)
        if delta.finish is not None or delta.fault is not None:
            self.is_ended = is_change = True
        if delta.fault is not None:
            if not self.is_left:
                self._error = error_of(delta.fault)
            delta = dataclasses.replace(delta, fault=None)
        if not self.is_left and (delta.token_ids or delta.finish is not None or delta.cached_tokens is not None):
            self._deltas.append(delta)
        if self._waiter is not None:
            self._wake()
        return is_change

    def fail(self, error: KvrouteError) -> None:
        """End the stream with `error`, after what has arrived."""
        self.is_ended = True
        if not self.is_left:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
