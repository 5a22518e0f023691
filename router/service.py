"""The router: takes tokenised requests, finds each one a worker and carries its tokens back.

A library object; batch runs, HTTP fronts and tests hold one each, and any number of them work side by side.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Container, Mapping, Sequence
from contextlib import aclosing

from router.bookings import Booking
from router.continuation import continued, finish_at_border, reasons_against_continuing
from router.deadline import UntilDeadline, least_prefill_s
from router.fleet import Connect, Fleet
from router.hints import Hints
from router.known_keys import KnownKeys
from router.metrics import expose_router
from router.policies.base import Policy
from router.queue import HoldQueue, Placement
from router.request_log import RequestLog
from router.requests import Attempt, Generated, GenerateRequest, RequestTrace, RichGenerated
from router.tracing import Tracing
from router.watch import Watch
from shared.directory.base import Directory, Match
from shared.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    DirectoryUnavailable,
    EngineError,
    KvrouteError,
    Outpaced,
    Overloaded,
    StreamBroken,
    WorkerLeft,
    WorkerLost,
    WorkerSilent,
)
from shared.messages import Delta, RichDelta
from shared.telemetry import Metrics
from shared.transport.base import DeltaStream
from shared.types import BlockKey, CacheScheme, FinishReason, RouterId, WorkerId

logger = logging.getLogger(__name__)

MAX_REFUSALS = 8
"""Times that a request may come to a worker too late; then the next takes it, whatever waits there before it."""
_LENIENCE = 0.5
"""Each of those times has cost a round trip, so that by this share more may be before it the next time."""


class Router:
    """Owns fleet, hints and queue of one router. Use as `async with`."""

    def __init__(
        self,
        router: RouterId,
        directory: Directory,
        connect: Connect,
        policy: Policy,
        *,
        scheme: CacheScheme,
        parity_key: bytes,
        metrics: Metrics,
        rng: random.Random,
        max_attempts: int = 3,
        max_held: int = 4096,
        queue_timeout_s: float = 600.0,
        min_prefix_tokens: int = 0,
        tenant_to_weight: Mapping[str, float] | None = None,
        request_log: RequestLog | None = None,
        only: Container[WorkerId] | None = None,
        refresh_s: float = 1.0,
        is_observer: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        """An observer sends nothing, so other routers need not know of it."""
        clock = asyncio.get_running_loop().time
        self.router = router
        self.metrics = metrics
        self._clock = clock
        self.directory = directory
        directory.expose(metrics)
        self._request_log = request_log
        self.scheme = scheme
        self._known_keys = KnownKeys(scheme)
        self.min_prefix_tokens = min_prefix_tokens
        self.policy = policy
        self.watch = Watch(router, metrics, policy.name, clock, block_size_tokens=scheme.block_size_tokens)
        self._tracing = tracing
        self._max_attempts = max_attempts
        self._queue_timeout_s = queue_timeout_s
        self.num_outpaced = 0
        """Submits that workers did not take, since requests of others had come first."""
        metrics.add_counter("kvroute_outpaced", "Submits that came to a worker too late.", lambda: self.num_outpaced)
        self.hints = Hints(clock)
        self.fleet = Fleet(
            directory,
            connect,
            parity_key=parity_key,
            clock=clock,
            on_change=lambda: self.queue.poke(),
            on_leave=self.hints.forget,
            router=None if is_observer else router,
            only=only,
            refresh_s=refresh_s,
        )
        self.queue = HoldQueue(
            policy,
            self.fleet,
            self.hints,
            self._match,
            block_size_tokens=scheme.block_size_tokens,
            max_held=max_held,
            timeout_s=queue_timeout_s,
            min_prefix_tokens=min_prefix_tokens,
            rng=rng,
            clock=clock,
            tenant_to_weight=tenant_to_weight,
        )
        expose_router(self.fleet, self.queue, self.hints, self.watch, metrics)

    async def __aenter__(self) -> Router:
        try:
            await self.fleet.start()
        except BaseException:
            await self.__aexit__()
            raise
        self.queue.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.queue.close()
        await self.fleet.close()
        await self.directory.close()

    async def generate(self, request: GenerateRequest, trace: RequestTrace) -> AsyncGenerator[Generated, None]:
        """The request's tokens, each once and in order; the last item has `finish`. Closing it early cancels.

        Fills `trace` as it goes. A lost worker costs another attempt elsewhere, which goes on from the tokens that were
        handed out; attempts of one request never overlap.

        Raises `ClientError` for a request that no worker can serve, `TransientError` for one that failed this time:
        `StreamBroken` where the answer cannot go on elsewhere, `AttemptsExhausted` where workers keep failing under it.
        """
        trace.received_at_s = self._clock()
        outcome = "failed"
        if self._tracing is not None:
            request = self._tracing.begin(request, trace)
        try:
            async with aclosing(self._attempts(request, trace)) as generated:
                async for item in generated:
                    trace.num_output_tokens += len(item.token_ids)
                    self.watch.note_tokens(request, trace, len(item.token_ids))
                    yield item
            outcome = "ok"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except KvrouteError as error:
            trace.error = error.code
            self.metrics.note_failure(error.code)
            raise
        finally:
            trace.finished_at_s = self._clock()
            self.watch.note_end(request, trace, outcome)
            if self._tracing is not None:
                self._tracing.end(request, trace, outcome)
            if self._request_log is not None and trace.num_output_tokens:
                self._request_log.note(request, self.keys(request), trace)

    async def _attempts(self, request: GenerateRequest, trace: RequestTrace) -> AsyncGenerator[Generated, None]:
        """One worker after the other, each from where the one before broke off, until the answer is whole."""
        sent: list[int] = []
        failures: list[str] = []
        left, keys = request, self.keys(request)
        await self._check_deadline(request, keys)
        deadline_at_s = request.deadline_at_s
        finish: FinishReason | None = None
        while finish is None:
            if sent:
                left = continued(request, sent)
                keys = self.keys(left)
            asked_at_s = self._clock()
            placement = await self._place(left, keys, trace)
            is_continued = bool(sent)
            trace.num_attempts += 1
            trace.num_continuations += is_continued
            self._note_attempt(left, placement, trace, asked_at_s)
            try:
                try:
                    deltas = self._submit(left, placement, trace, is_continued=is_continued)
                    async with aclosing(deltas):
                        async for delta in deltas if deadline_at_s is None else UntilDeadline(deltas, deadline_at_s):
                            item = self._take(left, placement, trace, delta, is_continued=is_continued)
                            sent += item.token_ids
                            finish = item.finish
                            yield item
                            if delta.finish is FinishReason.ABORT:
                                break
                    if finish is None:
                        raise EngineError("the engine gave the request up")
                finally:
                    self._end_attempt(placement, trace)
                self.fleet.note_finished(placement.booking)
            except Outpaced:
                # As if it had not been sent: the worker has told its load, so that it is weighed by that now.
                trace.num_attempts -= 1
                trace.num_continuations -= is_continued
                trace.num_refusals += 1
                trace.attempts[-1].is_refused = True
                self.num_outpaced += 1
                self.queue.note_refused(placement)
            except (WorkerLost, EngineError, Overloaded) as error:
                trace.attempts[-1].error = error.code
                trace.failed_workers.append(placement.booking.worker)
                self.metrics.note_failover("stream" if sent else "before_first_token")
                if self._is_failure(placement.booking, error):
                    failures.append(f"{placement.booking.worker} ({error})")
                finish = finish_at_border(request.sampling, sent)
                if finish is not None:
                    # Told all but the end.
                    yield Generated((), finish)
                else:
                    self._check_may_go_on(request, trace, sent, failures, error)
        self.queue.note_finished(placement, len(sent))

    def keys(self, request: GenerateRequest) -> Sequence[BlockKey]:
        """Keys of the full blocks of a request's prompt."""
        return self._known_keys.of(request.token_ids, salt=request.salt, adapter=request.adapter)

    async def _check_deadline(self, request: GenerateRequest, keys: Sequence[BlockKey]) -> None:
        """Raises `DeadlineExceeded` for a request that nobody could answer in time."""
        if request.deadline_at_s is None:
            return
        left_s = request.deadline_at_s - self._clock()
        if left_s <= 0.0:
            raise DeadlineExceeded("the request's deadline had passed when it arrived")
        worker_to_match = await self._match(keys)
        promised = self.hints.promised(keys)
        loads = self.fleet.loads()
        num_cached_blocks = [
            max(
                worker_to_match[worker].num_blocks if worker in worker_to_match else 0,
                promised.get(worker, 0),
            )
            for worker in loads.workers
        ]
        block_size_tokens = self.scheme.block_size_tokens
        uncached_tokens = [
            request.num_prompt_tokens - num_blocks * block_size_tokens for num_blocks in num_cached_blocks
        ]
        least_s = least_prefill_s(loads, uncached_tokens)
        if least_s > left_s:
            raise DeadlineExceeded(
                f"the request's deadline is {left_s:.3g} s away, and its prompt alone takes {least_s:.3g} s"
            )

    async def _place(self, request: GenerateRequest, keys: Sequence[BlockKey], trace: RequestTrace) -> Placement:
        """Wait for a worker, for as long as the request's deadline leaves."""
        placing = self.queue.place(
            request,
            keys,
            frozenset(trace.failed_workers),
            trace.received_at_s,
            is_again=trace.num_attempts + trace.num_refusals > 0,
        )
        if request.deadline_at_s is None:
            return await placing
        try:
            async with asyncio.timeout_at(request.deadline_at_s):
                return await placing
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while it waited for a worker") from None

    def _is_failure(self, booking: Booking, error: WorkerLost | EngineError | Overloaded) -> bool:
        """Hold an attempt's end against its worker, and tell whether it may speak against the request. Modifies."""
        if isinstance(error, Overloaded):
            self.fleet.rest(booking.worker, error.retry_after_s)
        elif isinstance(error, WorkerSilent):
            # Its next word ends this: there is nothing to probe.
            return True
        elif not isinstance(error, WorkerLeft):
            self.fleet.note_failure(booking, error)
            return True
        return False

    def _check_may_go_on(
        self,
        request: GenerateRequest,
        trace: RequestTrace,
        sent: Sequence[int],
        failures: Sequence[str],
        error: Exception,
    ) -> None:
        """Raises what a request ends with that is not to be tried on another worker."""
        reasons = reasons_against_continuing(request.sampling)
        if sent and reasons:
            raise StreamBroken(
                f"the answer broke off after {len(sent)} tokens ({error}), "
                f"and cannot go on elsewhere since it sets {', '.join(reasons)}"
            ) from error
        if len(failures) >= self._max_attempts:
            if len(failures) == 1:
                raise error
            raise AttemptsExhausted(f"failed on {len(failures)} workers: {', '.join(failures)}") from error
        if isinstance(error, Overloaded) and self._clock() - trace.received_at_s >= self._queue_timeout_s:
            raise error
        logger.info("request %s: %s failed (%s), trying elsewhere", request.request, trace.worker, error)

    def _note_attempt(
        self, request: GenerateRequest, placement: Placement, trace: RequestTrace, asked_at_s: float
    ) -> None:
        """Tell whoever watches of a decision, before its worker is sent anything. Modifies."""
        trace.attempts.append(
            Attempt(placement.booking.worker, asked_at_s, placement.matched_at_s, placement.weighed_at_s, self._clock())
        )
        self.watch.note_decision(request, placement.promise.keys, placement.ranking, trace)

    def _submit(
        self, request: GenerateRequest, placement: Placement, trace: RequestTrace, *, is_continued: bool
    ) -> DeltaStream:
        """Send a request to the worker that it is bound to. Claims end with `_end_attempt`, whatever comes of it."""
        booking = placement.booking
        trace.worker = booking.worker
        if not is_continued:
            trace.bound_at_s = self._clock()
            trace.matched_tokens = placement.matched_tokens
            trace.cached_tokens = None
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s to %s: %s", request.request, booking.worker, placement.ranking.explain())
        trace.explain = placement.ranking.explain
        deltas = booking.client.submit(
            request.request,
            trace.num_attempts + trace.num_refusals,
            request.token_ids,
            request.sampling,
            salt=request.salt,
            adapter=request.adapter,
            priority=request.worker_priority,
            matched_tokens=placement.matched_tokens,
            max_queued_tokens=_max_queued_tokens(placement, trace.num_refusals),
            traceparent=request.traceparent,
        )
        booking.submit = booking.client.last_submit
        booking.movable = deltas
        return deltas

    def _take(
        self, request: GenerateRequest, placement: Placement, trace: RequestTrace, delta: Delta, *, is_continued: bool
    ) -> Generated:
        """What a worker's delta gives its reader. Modifies what is known of the request."""
        booking = placement.booking
        if delta.cached_tokens is not None and not is_continued:
            trace.cached_tokens = delta.cached_tokens
        if not booking.has_first_token:
            trace.attempts[-1].first_token_at_s = self._clock()
            self.fleet.note_first_token(booking)
            if reasons_against_continuing(request.sampling):
                booking.movable = None
            self.hints.settle(placement.promise)
        if trace.first_token_at_s is None and delta.token_ids:
            trace.first_token_at_s = self._clock()
        if delta.finish is FinishReason.ABORT:
            # Nobody here has cancelled it, or nobody would read this.
            return Generated(delta.token_ids)
        if isinstance(delta, RichDelta):
            return RichGenerated(delta.token_ids, delta.finish, delta.logprobs, delta.parts)
        return Generated(delta.token_ids, delta.finish)

    def _end_attempt(self, placement: Placement, trace: RequestTrace) -> None:
        """End an attempt's claims. Modifies."""
        trace.attempts[-1].ended_at_s = self._clock()
        if not placement.booking.has_first_token:
            self.hints.withdraw(placement.promise)
        self.fleet.release(placement.booking)

    async def _match(self, keys: Sequence[BlockKey]) -> Mapping[WorkerId, Match]:
        """What the directory knows of a prompt; nothing where it cannot be asked, since routing must go on.

        The outage itself is the directory's to tell, once; here each request that met it is counted, those included
        that a mirror answered from memory.
        """
        if not keys:
            return {}
        try:
            found = await self.directory.match(keys, self.fleet.worker_to_instance)
            if self.directory.is_resting:
                self.metrics.note_directory_degraded()
            return found
        except DirectoryUnavailable:
            self.metrics.note_directory_degraded()
            return {}

    def render_metrics(self) -> bytes:
        """All metrics as of now, as a Prometheus server reads them."""
        return self.metrics.render()


def _max_queued_tokens(placement: Placement, num_refusals: int) -> int | None:
    """What may be before the request at the worker that it is bound to; `None` for whatever there is."""
    max_queued_tokens = placement.ranking.max_queued_tokens
    if max_queued_tokens is None or num_refusals >= MAX_REFUSALS:
        return None
    return round(max_queued_tokens * (1.0 + _LENIENCE * num_refusals))
