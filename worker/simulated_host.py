"""Both ends of a router-worker connection without the bytes in between: what simulations of whole fleets need.

A submit, a delta or a status is handed over as an object, one way's time later. Nothing is encoded, numbered in frames
or acknowledged, and no connection ever breaks; everything that routing depends on is as with `WorkerHost` and
`ChannelClient`: when a status goes out, what it counts, and which submits it accounts for.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

from shared.errors import KvrouteError, Outpaced
from shared.messages import Delta
from shared.transport.base import OnChange
from shared.types import FinishReason, Instance, RequestId, Sampling, WorkerId, WorkerStatus
from worker.announcement import status_of
from worker.engines.base import EngineDelta, EngineInfo
from worker.engines.simulated import Simulated
from worker.engines.simulator import SimulatorEngine
from worker.prefill_backlog import PrefillBacklog, Prompt


class SimulatedHost:
    """One simulated engine and the routers that use it.

    A router gets a status every `status_interval_s`, and beside each first token and end of its own requests. One that
    tells nothing new is not handed over; it counts in the age of the last one all the same.
    """

    def __init__(
        self,
        engine: SimulatorEngine,
        engine_info: EngineInfo,
        *,
        worker: WorkerId,
        instance: Instance,
        rng: random.Random,
        lag_s: float,
        status_interval_s: float,
        count_resident_blocks: Callable[[], int],
        num_answer_tokens: Callable[[RequestId], int],
    ) -> None:
        self.worker = worker
        self.instance = instance
        self.lag_s = lag_s
        self.num_submitted = 0
        self.num_outpaced = 0
        """Submits that were refused since others came first; not among the submitted."""
        self._engine = engine
        self._engine_info = engine_info
        self._status_interval_s = status_interval_s
        self._phase_s = rng.uniform(0.0, status_interval_s)
        """Statuses go out at this time, and whole intervals later."""
        self._count_resident_blocks = count_resident_blocks
        self._num_answer_tokens = num_answer_tokens
        self._clients: list[SimulatedClient] = []
        self._backlog = PrefillBacklog()
        self._num_live = 0
        self._news: dict[SimulatedClient, list[tuple[SimulatedStream, Delta, float]]] = {}
        """By router, what the step that has just ended brought."""
        self._timer: asyncio.TimerHandle | None = None
        self._status: WorkerStatus | None = None
        """The load now; None where it has changed since it was last read."""
        engine.on_change = self._engine_changed

    def connect(self, on_change: OnChange) -> SimulatedClient:
        """A router's end of a new connection."""
        return SimulatedClient(self, on_change)

    def close(self) -> None:
        """Tell nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def status(self) -> WorkerStatus:
        """The load now, as `WorkerHost` tells it; the same object while nothing has changed."""
        if self._status is None:
            self._status = self._read_status()
        return self._status

    def told_at_s(self, now_s: float) -> float:
        """When the last regular status before `now_s` went out."""
        return self._phase_s + math.floor((now_s - self._phase_s) / self._status_interval_s) * self._status_interval_s

    def _engine_changed(self) -> None:
        self._status = None
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self.told_at_s(loop.time()) + self._status_interval_s, self._tell_all)

    def _read_status(self) -> WorkerStatus:
        return status_of(
            self._engine.stats(),
            self._engine_info,
            num_unended=self._num_live,
            queued_prefill_tokens=self._backlog.num_tokens(self._engine.num_prefilled_tokens),
            num_resident_blocks=self._count_resident_blocks(),
        )

    # The worker's end: what routers send.

    def attach(self, client: SimulatedClient) -> None:
        """A router has connected: it knows the load at once."""
        self._clients.append(client)
        client.take_status(self.status(), 0, asyncio.get_running_loop().time())

    def detach(self, client: SimulatedClient) -> None:
        if client in self._clients:
            self._clients.remove(client)

    def submit(self, stream: SimulatedStream, token_ids: bytes, sampling: Sampling, salt: str, adapter: str) -> None:
        """A submit has arrived."""
        client = stream.client
        client.num_arrived = stream.number
        prompt = Prompt(token_ids, salt, adapter)
        num_prefilled = self._engine.num_prefilled_tokens
        try:
            num_shared_tokens = self._backlog.admit(prompt, stream.max_queued_tokens, num_prefilled)
        except Outpaced as error:
            self.num_outpaced += 1
            self._later(client.take_refusal, stream, error, self.status(), client.num_arrived)
            return
        self.num_submitted += 1
        try:
            stream.sequence = self._engine.submit(
                # Routers choose request ids, and two may choose the same: the number makes them differ.
                RequestId(f"{stream.request}#{self.num_submitted}"),
                token_ids,
                # Where a model would come to its end.
                replace(sampling, max_tokens=min(sampling.max_tokens, self._num_answer_tokens(stream.request))),
                stream,
                salt=salt,
                adapter=adapter,
                priority=stream.priority,
            )
        except KvrouteError as error:
            self._later(stream.fail, error)
            return
        self._num_live += 1
        self._backlog.add(stream, prompt, max(stream.matched_tokens, num_shared_tokens), num_prefilled)

    def cancel(self, stream: SimulatedStream) -> None:
        """A cancel has arrived."""
        if stream.sequence is not None:
            self._engine.abort(stream.sequence)

    def note(self, stream: SimulatedStream, delta: EngineDelta, longest_gap_s: float) -> None:
        """The engine has something to tell. What one step brings a router goes out together."""
        sequence = stream.sequence
        if delta.token_ids and sequence is not None:
            self._backlog.note_prefilled(stream, sequence.num_prompt_tokens - (sequence.cached_tokens or 0))
        else:
            self._backlog.drop(stream, self._engine.num_prefilled_tokens)
        if delta.finish is not None:
            self._num_live -= 1
        told = Delta(
            stream.request, stream.attempt, stream.num_told, delta.token_ids, delta.finish, delta.cached_tokens
        )
        stream.num_told += len(delta.token_ids)
        if not self._news:
            # The engine begins its next step first, so that the load told beside this is that of then.
            asyncio.get_running_loop().call_soon(self._tell_news)
        self._news.setdefault(stream.client, []).append((stream, told, longest_gap_s))

    def _tell_news(self) -> None:
        news, self._news = self._news, {}
        status = self.status()
        for client, deltas in news.items():
            is_urgent = any(delta.offset == 0 or delta.finish is not None for _, delta, _ in deltas)
            self._later(client.take, deltas, status if is_urgent else None, client.num_arrived)

    def _tell_all(self) -> None:
        self._timer = None
        client_to_arrived = {client: client.num_arrived for client in self._clients}
        self._later(_take_status, self.status(), client_to_arrived)

    def _later(self, deliver: Callable[..., None], *arguments: object) -> None:
        """The way back to a router."""
        if self.lag_s:
            asyncio.get_running_loop().call_later(self.lag_s, deliver, *arguments)
        else:
            deliver(*arguments)


class SimulatedStream:
    """One submitted sequence, both its ends: `DeltaStream` for the router, listener of the engine."""

    def __init__(
        self,
        client: SimulatedClient,
        number: int,
        request: RequestId,
        attempt: int,
        priority: int,
        matched_tokens: int,
        max_queued_tokens: int | None,
    ) -> None:
        self.client = client
        self.number = number
        self.request = request
        self.attempt = attempt
        self.priority = priority
        self.matched_tokens = matched_tokens
        self.max_queued_tokens = max_queued_tokens
        self.num_told = 0
        self.sequence: Simulated | None = None
        self._deltas: deque[Delta] = deque()
        self._error: KvrouteError | None = None
        self._is_over = False
        """Whether the last delta, or an error, has come to the router's end, or nobody waits there any more."""
        self._waiter: asyncio.Future[None] | None = None

    # The engine's end.

    def push(self, delta: EngineDelta, longest_gap_s: float) -> None:
        self.client.host.note(self, delta, longest_gap_s)

    def fail(self, error: KvrouteError) -> None:
        self._error = error
        self._wake()

    # The router's end.

    def take(self, delta: Delta) -> None:
        """A delta has arrived."""
        if self._is_over:
            return
        self._deltas.append(delta)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._is_over:
            if self._deltas:
                delta = self._deltas.popleft()
                self._is_over = delta.finish is not None
                return delta
            if self._error is not None:
                self._is_over = True
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        raise StopAsyncIteration

    def give_up(self, error: KvrouteError) -> None:
        if not self._is_over:
            self.client.send(self.client.host.cancel, self)
            self._deltas.clear()
            self.fail(error)

    async def aclose(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.client.send(self.client.host.cancel, self)


class SimulatedClient:
    """`WorkerClient` of a simulated worker."""

    is_connected = True
    is_lost = False
    num_silences = 0

    def __init__(self, host: SimulatedHost, on_change: OnChange) -> None:
        self.host = host
        self.worker = host.worker
        self.instance = host.instance
        self.status: WorkerStatus | None = None
        self.acknowledged_submit = 0
        self.last_submit = 0
        self.num_arrived = 0
        """Number of the last submit that has reached the worker."""
        self.request_to_longest_gap_s: dict[RequestId, float] = {}
        """Of requests that have ended; whoever wants to know takes it out."""
        self._on_change = on_change
        self._status_at_s = 0.0

    @property
    def status_age_s(self) -> float:
        if self.status is None:
            return float("inf")
        now_s, lag_s = asyncio.get_running_loop().time(), self.host.lag_s
        return now_s - max(self._status_at_s, self.host.told_at_s(now_s - lag_s) + lag_s)

    @property
    def round_trip_s(self) -> float:
        """To the worker and back."""
        return 2 * self.host.lag_s

    async def connect(self) -> None:
        self.host.attach(self)

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
    ) -> SimulatedStream:
        self.last_submit += 1
        stream = SimulatedStream(self, self.last_submit, request, attempt, priority, matched_tokens, max_queued_tokens)
        self.send(self.host.submit, stream, token_ids, sampling, salt, adapter)
        return stream

    def send(self, deliver: Callable[..., None], *arguments: object) -> None:
        """The way to the worker."""
        if self.host.lag_s:
            asyncio.get_running_loop().call_later(self.host.lag_s, deliver, *arguments)
        else:
            deliver(*arguments)

    def take(
        self, deltas: list[tuple[SimulatedStream, Delta, float]], status: WorkerStatus | None, last_submit: int
    ) -> None:
        """News of the worker have arrived."""
        for stream, delta, longest_gap_s in deltas:
            if delta.finish not in (None, FinishReason.ABORT):
                self.request_to_longest_gap_s[stream.request] = longest_gap_s
            stream.take(delta)
        if status is not None:
            self.take_status(status, last_submit, asyncio.get_running_loop().time())

    def take_status(self, status: WorkerStatus, last_submit: int, now_s: float) -> None:
        """A status has arrived."""
        is_change = status is not self.status or last_submit != self.acknowledged_submit
        self.status = status
        self._status_at_s = now_s
        self.acknowledged_submit = last_submit
        if is_change:
            self._on_change()

    def take_refusal(self, stream: SimulatedStream, error: Outpaced, status: WorkerStatus, last_submit: int) -> None:
        """The worker did not take a request; its load tells why."""
        stream.fail(error)
        self.take_status(status, last_submit, asyncio.get_running_loop().time())

    async def close(self) -> None:
        self.host.detach(self)


def _take_status(status: WorkerStatus, client_to_arrived: Mapping[SimulatedClient, int]) -> None:
    """A regular status has come to all routers."""
    now_s = asyncio.get_running_loop().time()
    for client, num_arrived in client_to_arrived.items():
        client.take_status(status, num_arrived, now_s)
