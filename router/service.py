"""The router: takes tokenised requests, finds each one a worker and carries its tokens back.

A library object; batch runs, HTTP fronts and tests hold one each, and any number of them work side by side.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from router.fleet import Connect, Fleet
from router.hints import Hints
from router.policies.base import Policy
from router.queue import HoldQueue, Placement
from router.requests import Generated, GenerateRequest, RequestTrace
from shared.directory.base import Directory, Match
from shared.directory.mirrored import MirroredDirectory
from shared.errors import DirectoryUnavailable, EngineError, Overloaded, WorkerLost
from shared.hashing import block_keys, root_key
from shared.telemetry import Metrics
from shared.types import BlockKey, CacheScheme, RouterId, WorkerId

logger = logging.getLogger(__name__)


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
        only: frozenset[WorkerId] | None = None,
        refresh_s: float = 1.0,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.router = router
        self.metrics = metrics
        self._clock = clock
        self.directory = directory
        self._scheme = scheme
        self._policy = policy
        self._max_attempts = max_attempts
        self.hints = Hints(clock)
        self.fleet = Fleet(
            directory,
            connect,
            parity_key=parity_key,
            clock=clock,
            on_change=lambda: self.queue.poke(),
            on_leave=self.hints.forget,
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
        )

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

        Fills `trace` as it goes. Before the first token a lost worker costs another attempt elsewhere; after it the
        error is raised, since what was already handed out cannot be taken back.

        Raises `ClientError` for a request that no worker can serve, `TransientError` for one that failed this time.
        """
        trace.received_at_s = self._clock()
        root = root_key(self._scheme, salt=request.salt, adapter=request.adapter)
        keys = block_keys(request.token_ids, self._scheme.block_size_tokens, root)
        outcome = "failed"
        try:
            async with aclosing(self._attempts(request, keys, trace)) as generated:
                async for item in generated:
                    yield item
            outcome = "ok"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        finally:
            trace.finished_at_s = self._clock()
            self.metrics.note_request(self._policy.name, outcome, request.num_prompt_tokens, trace)

    async def _attempts(
        self, request: GenerateRequest, keys: Sequence[BlockKey], trace: RequestTrace
    ) -> AsyncGenerator[Generated, None]:
        """One worker after the other until one answers."""
        failed: frozenset[WorkerId] = frozenset()
        while True:
            placement = await self.queue.place(request, keys, failed, trace.received_at_s)
            worker = placement.booking.worker
            trace.num_attempts += 1
            try:
                async with aclosing(self._on_worker(request, placement, trace)) as generated:
                    async for item in generated:
                        yield item
                return
            except (WorkerLost, EngineError, Overloaded) as error:
                if isinstance(error, Overloaded):
                    self.fleet.rest(worker, error.retry_after_s)
                else:
                    self.fleet.note_failure(placement.booking, error)
                failed |= {worker}
                trace.failed_workers.append(worker)
                is_started = trace.first_token_at_s is not None
                self.metrics.note_failover("stream" if is_started else "before_first_token")
                if is_started or trace.num_attempts >= self._max_attempts:
                    raise
                logger.info("request %s: %s failed (%s), trying elsewhere", request.request, worker, error)

    async def _on_worker(
        self, request: GenerateRequest, placement: Placement, trace: RequestTrace
    ) -> AsyncGenerator[Generated, None]:
        """The request's tokens from the worker that it is bound to. Claims end with this, however it ends."""
        booking = placement.booking
        trace.worker = booking.worker
        trace.bound_at_s = self._clock()
        trace.matched_tokens = placement.matched_tokens
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s to %s: %s", request.request, booking.worker, placement.ranking.explain())
        trace.explain = placement.ranking.explain
        num_output_tokens = 0
        try:
            deltas = booking.client.submit(
                request.request,
                trace.num_attempts,
                request.token_ids,
                request.sampling,
                salt=request.salt,
                adapter=request.adapter,
                priority=request.priority,
                matched_tokens=placement.matched_tokens,
            )
            booking.submit = booking.client.last_submit
            async with aclosing(deltas):
                async for delta in deltas:
                    if delta.cached_tokens is not None:
                        trace.cached_tokens = delta.cached_tokens
                    if not booking.has_first_token:
                        self.fleet.note_first_token(booking)
                        trace.first_token_at_s = self._clock()
                        self.hints.settle(placement.promise)
                    num_output_tokens += len(delta.token_ids)
                    yield Generated(delta.token_ids, delta.finish)
            self.queue.note_finished(num_output_tokens)
            self.fleet.note_finished(booking)
        finally:
            if not booking.has_first_token:
                self.hints.withdraw(placement.promise)
            self.fleet.release(booking)

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
        self.metrics.note_workers(self.fleet.state_to_count())
        if isinstance(self.directory, MirroredDirectory):
            self.metrics.note_mirror(self.directory.num_entries, self.directory.num_batches_behind)
        return self.metrics.render()
