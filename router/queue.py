"""Held requests: each one's way from its arrival to its worker, or out of the queue.

Requests are bound late, when their best worker is about to have room and caches and loads are known best; policies that
bind early pass straight through.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

from router.admission import Admission
from router.answer_lengths import AnswerLengths
from router.binder import Binder, MatchAll, Placement
from router.credit import prefix_hash
from router.fleet import Fleet
from router.held import Held
from router.hints import Hints
from router.means import Means
from router.policies.base import FleetState, Loads, Policy
from router.requests import GenerateRequest
from router.shares import Shares
from shared.errors import ContextTooLong, KvrouteError, NoWorker, Overloaded, QueueFull
from shared.types import BlockKey, WorkerId

__all__ = ["HoldQueue", "Placement"]


class HoldQueue:
    """Owns the waiting: who is let in, who leaves, and when the binder looks again."""

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet,
        hints: Hints,
        match: MatchAll,
        *,
        block_size_tokens: int,
        max_held: int,
        timeout_s: float,
        min_prefix_tokens: int,
        rng: random.Random,
        clock: Callable[[], float],
        tenant_to_weight: Mapping[str, float] | None = None,
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._hints = hints
        self._match = match
        self._block_size_tokens = block_size_tokens
        self._timeout_s = timeout_s
        self._shares = Shares(tenant_to_weight or {})
        self._admission = Admission(max_held, self._shares, clock)
        self._means = Means()
        self._answer_lengths = AnswerLengths()
        self._binder = Binder(
            policy,
            fleet,
            hints,
            match,
            self._shares,
            self._means,
            block_size_tokens=block_size_tokens,
            min_prefix_tokens=min_prefix_tokens,
            on_bound=self._admission.note_bound,
            on_change=self.poke,
            rng=rng,
            clock=clock,
        )
        self._num_taken = 0
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """None before the start and after the end: nobody looks then."""

    def __len__(self) -> int:
        return len(self._admission)

    @property
    def num_lanes(self) -> int:
        """Tenants that are remembered, once for each class: none where nothing is held."""
        return len(self._shares)

    def start(self) -> None:
        """Begin to bind requests."""
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._binder.look)

    async def close(self) -> None:
        """Stop; whoever still waits, or comes later, gets `NoWorker`."""
        self._is_closed = True
        self._loop = None
        # First, so that a look that is due finds nobody while the end of what is asked is waited for.
        self._binder.fail_all(NoWorker("the router is closing"))
        await self._binder.close()

    def poke(self) -> None:
        """Something that decisions depend on has changed. Cheap, callable from anywhere on the loop."""
        # In the loop's next turn, so that all that changes in one is looked at once.
        if self._binder.note_change() and self._loop is not None:
            self._loop.call_soon(self._binder.look)

    def check_context(self, request: GenerateRequest) -> None:
        """Raise `ContextTooLong` for a prompt that no worker could ever hold.

        To find that out otherwise a worker would have to be emptied for it.
        """
        longest_tokens = self._fleet.max_model_len_tokens
        if longest_tokens is not None and request.num_prompt_tokens >= longest_tokens:
            raise ContextTooLong(
                f"a prompt of {request.num_prompt_tokens} tokens leaves no room for an answer: "
                f"no worker's context is longer than {longest_tokens} tokens"
            )

    async def place(
        self,
        request: GenerateRequest,
        keys: Sequence[BlockKey],
        excluded: frozenset[WorkerId],
        arrived_at_s: float,
        *,
        is_again: bool = False,
    ) -> Placement:
        """Wait until the request is bound and booked; `is_again` if it was before. Cancelling leaves nothing behind.

        Who was bound before, and met a worker that failed or that others reached first, is not refused a place and
        gives none up.

        Raises `QueueFull` when the queue is full or a more urgent request got its place, `Overloaded` when all workers
        were busy for the whole timeout, `NoWorker` when there is none at its end, `ContextTooLong` for a prompt that no
        worker could ever hold.
        """
        if self._is_closed:
            raise NoWorker("the router is closing")
        self.check_context(request)
        expected_output_tokens = self._expected_output_tokens(request, keys)
        num_tokens = request.num_prompt_tokens + expected_output_tokens
        held = Held(
            request,
            keys,
            ordinal=self._num_taken,
            prefix_hash=prefix_hash(request, keys),
            demand_blocks=-(-num_tokens // self._block_size_tokens),
            arrived_at_s=arrived_at_s,
            excluded=excluded,
            placed=asyncio.get_running_loop().create_future(),
            expected_output_tokens=expected_output_tokens,
            may_give_way=not is_again,
        )
        self._enter(held)
        self._num_taken += 1
        try:
            if self._policy.is_cache_aware:
                held.worker_to_match = await self._match(keys)
            held.matched_at_s = asyncio.get_running_loop().time()
            if self._is_closed:
                raise NoWorker("the router is closing")
            if not held.placed.done():
                self._binder.take(held)
            if not held.placed.done():
                # A cancel must not end what a pass may still decide about before this goes on.
                await asyncio.wait([held.placed], timeout=self._timeout_s)
            if not held.placed.done():
                raise self._not_placed(request)
            placement: Placement = held.placed.result()
            return placement
        except asyncio.CancelledError:
            if _is_bound(held.placed):
                # The decision came in the very moment of the cancel: its claims must not outlive it.
                late: Placement = held.placed.result()
                self._hints.withdraw(late.promise)
                self._fleet.release(late.booking)
                self.note_refused(late)
            raise
        finally:
            self._admission.leave(held)
            self._binder.drop(held)

    def note_finished(self, placement: Placement, num_output_tokens: int) -> None:
        """Let a finished request's length count: in the demand of later ones, and in what its tenant has had."""
        self._means.note_finished(num_output_tokens)
        self._answer_lengths.note(placement.promise.keys, num_output_tokens)
        self._shares.correct(placement.request, placement.expected_output_tokens, num_output_tokens)

    def note_refused(self, placement: Placement) -> None:
        """A worker did not take a request that is to be placed again: its tenant has not had anything. Modifies."""
        own_tokens = placement.request.num_prompt_tokens - placement.matched_tokens
        self._shares.refund(placement.request, own_tokens, placement.expected_output_tokens)

    def fleet_state(self, loads: Loads) -> FleetState:
        """What decisions know of requests in general, in this fleet's seconds."""
        return self._binder.fleet_state(loads)

    def _enter(self, held: Held) -> None:
        """Give a request its place in the queue. Raises `QueueFull`."""
        loser = self._admission.enter(held)
        if loser is not None:
            self._binder.drop(loser)
            retry_after_s = self._admission.retry_after_s(loser.request)
            loser.placed.set_exception(
                QueueFull("the queue is full, and the request gave way to another", retry_after_s=retry_after_s)
            )
            # If its own task is being cancelled, nobody else will look.
            loser.placed.exception()

    def _not_placed(self, request: GenerateRequest) -> KvrouteError:
        """What a request ends with that has waited for the whole timeout."""
        if not self._fleet.worker_to_instance:
            return NoWorker(f"there is no worker, and none came within {self._timeout_s:g} s")
        return Overloaded(
            f"no worker took the request within {self._timeout_s:g} s",
            retry_after_s=self._admission.retry_after_s(request),
        )

    def _expected_output_tokens(self, request: GenerateRequest, keys: Sequence[BlockKey]) -> int:
        likely_tokens = self._answer_lengths.expected_tokens(keys, self._means.output_tokens)
        return min(request.sampling.max_tokens, max(1, round(likely_tokens)))


def _is_bound(placed: asyncio.Future[Placement]) -> bool:
    return placed.done() and placed.exception() is None
