"""Held requests: their order, their admission, and when each is bound to a worker.

Requests are bound late, when their best worker is about to have room and caches and loads are known best; policies that
bind early pass straight through.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from router.fleet import Booking, Fleet
from router.hints import Hints, Promise
from router.policies.base import Candidate, FleetState, Load, Policy, Ranking, RankRequest
from router.requests import GenerateRequest
from shared.directory.base import Match
from shared.errors import KvrouteError, NoWorker, Overloaded
from shared.hashing import num_usable_blocks
from shared.types import BlockKey, WorkerId

logger = logging.getLogger(__name__)

_LOOKED_AT = 128
"""Most held requests that one pass ranks: bounds the cost of an event, and the rest are younger or longer anyway."""
_REMATCH_S = 0.25
"""The directory is asked again for a request held this long: what its worker holds may have changed."""
_REMATCH_AT_ONCE = 8
"""Matches that are asked for again side by side: few, so that new requests' own do not queue behind them."""
_PATIENCE_PREFILLS = 4.0
"""A request that waits for blocks longer than this many mean prefills is not overtaken on its worker any more."""
_MEAN_WEIGHT = 0.05
"""Weight of the newest request in running means: about the last twenty count, and all alike until there are twenty."""
_NOMINAL_OUTPUT_TOKENS = 64

MatchAll = Callable[[Sequence[BlockKey]], Awaitable[Mapping[WorkerId, Match]]]


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision: the worker that a request is bound to, and what was known when it was made."""

    booking: Booking
    promise: Promise
    matched_tokens: int
    ranking: Ranking


@dataclass(slots=True, eq=False)
class _Held:
    """One request that waits for its worker."""

    request: GenerateRequest
    keys: Sequence[BlockKey]
    rank_request: RankRequest
    arrived_at_s: float
    excluded: frozenset[WorkerId]
    placed: asyncio.Future[Placement]
    worker_to_match: Mapping[WorkerId, Match] = field(default_factory=dict)
    matched_at_s: float | None = None
    """When the directory was last asked; `None` until it has answered for the first time."""
    waits_for: WorkerId | None = None
    """The worker that was best in the last ranking; the next is made when it has room or the directory has spoken."""


class HoldQueue:
    """Owns the held requests and the running means that decisions use. One pass at a time decides."""

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
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._hints = hints
        self._match = match
        self._block_size_tokens = block_size_tokens
        self._max_held = max_held
        self._timeout_s = timeout_s
        self._min_prefix_tokens = min_prefix_tokens
        self._rng = rng
        self._clock = clock
        self._held: dict[_Held, None] = {}
        self._num_taken = 0
        self._num_sent = 0
        self._num_finished = 0
        self._mean_full_tokens = 0.0
        self._mean_own_tokens = 0.0
        self._mean_output_tokens = float(_NOMINAL_OUTPUT_TOKENS)
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closed = False
        self._version = 0
        """Counts changes of the held requests, so that a pass over equal loads and requests is not made twice."""
        self._last_pass: tuple[object, ...] = ()

    def __len__(self) -> int:
        return len(self._held)

    def start(self) -> None:
        """Begin to bind requests."""
        self._tasks = [
            asyncio.create_task(self._run(), name="hold-queue"),
            asyncio.create_task(self._keep_matches_fresh(), name="hold-queue-matches"),
        ]

    async def close(self) -> None:
        """Stop; whoever still waits, or comes later, gets `NoWorker`."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(NoWorker("the router is closing"))

    def poke(self) -> None:
        """Something that decisions depend on has changed. Cheap, callable from anywhere on the loop."""
        self._changed.set()

    async def place(
        self, request: GenerateRequest, keys: Sequence[BlockKey], excluded: frozenset[WorkerId], arrived_at_s: float
    ) -> Placement:
        """Wait until the request is bound and booked. Cancelling leaves nothing behind.

        Raises `Overloaded` when the queue is full or all workers were busy for the whole timeout, `NoWorker` when there
        is none at its end.
        """
        if self._is_closed:
            raise NoWorker("the router is closing")
        # Who was let in once is not refused for having met a worker that failed.
        if not excluded and len(self._held) >= self._max_held:
            raise Overloaded(f"{len(self._held)} requests are held already", retry_after_s=1.0)
        num_blocks = -(-(request.num_prompt_tokens + self._expected_output_tokens(request)) // self._block_size_tokens)
        held = _Held(
            request,
            keys,
            RankRequest(
                ordinal=self._num_taken,
                num_prompt_tokens=request.num_prompt_tokens,
                prefix_hash=keys[0] if keys else request.token_ids,
                demand_blocks=num_blocks,
            ),
            arrived_at_s,
            excluded,
            asyncio.get_running_loop().create_future(),
        )
        self._num_taken += 1
        self._held[held] = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask_directory(held)
                self.poke()
                return await held.placed
        except TimeoutError:
            if _is_bound(held.placed):
                return held.placed.result()
            if not self._fleet.worker_to_instance:
                raise NoWorker(f"there is no worker, and none came within {self._timeout_s:g} s") from None
            raise Overloaded(f"no worker took the request within {self._timeout_s:g} s", retry_after_s=1.0) from None
        except asyncio.CancelledError:
            if _is_bound(held.placed):
                # The decision came in the very moment of the cancel: its claims must not outlive it.
                placement = held.placed.result()
                self._hints.withdraw(placement.promise)
                self._fleet.release(placement.booking)
            raise
        finally:
            self._held.pop(held, None)

    def note_finished(self, num_output_tokens: int) -> None:
        """Let a finished request's length count in the demand of later ones. Modifies the running mean."""
        self._num_finished += 1
        weight = max(_MEAN_WEIGHT, 1.0 / self._num_finished)
        self._mean_output_tokens += weight * (num_output_tokens - self._mean_output_tokens)

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                self._decide()
            except Exception as error:
                # A fault in a policy must reach whoever waits for it, not end the queue in silence.
                logger.exception("deciding failed")
                self._fail_all(KvrouteError(f"routing failed: {error}"))

    async def _keep_matches_fresh(self) -> None:
        """Ask the directory again for those that wait long. Decisions never wait for this."""
        while True:
            await asyncio.sleep(_REMATCH_S)
            oldest_s = self._clock() - _REMATCH_S
            stale = [
                held
                for held in list(self._held)[:_LOOKED_AT]
                if held.matched_at_s is not None and held.matched_at_s <= oldest_s
            ]
            for start in range(0, len(stale), _REMATCH_AT_ONCE):
                await asyncio.gather(*(self._ask_directory(held) for held in stale[start : start + _REMATCH_AT_ONCE]))
            if stale:
                self.poke()

    async def _ask_directory(self, held: _Held) -> None:
        if self._policy.is_cache_aware:
            held.worker_to_match = await self._match(held.keys)
        held.matched_at_s = self._clock()
        held.waits_for = None
        self._version += 1

    def _fail_all(self, error: KvrouteError) -> None:
        for held in self._held:
            if not held.placed.done():
                held.placed.set_exception(error)

    def _decide(self) -> None:
        """Bind whoever can be bound now, most urgent first."""
        if not self._held:
            return
        loads = self._fleet.loads()
        this_pass = (self._version, tuple(map(_load_that_decides, loads)))
        # Loads change with every frame, decisions only with some of them.
        if not self._has_room(loads) or this_pass == self._last_pass:
            return
        self._last_pass = this_pass
        fleet_state = self._fleet_state(loads)
        full = {load.worker for load in loads if not load.has_free_slot}
        # Who waits for a full worker need not be ranked again, and must not keep others from being looked at.
        worker_to_num_ahead: Counter[WorkerId | None] = Counter(
            held.waits_for for held in self._held if held.waits_for in full
        )
        reserved: set[WorkerId] = set()
        has_bound = False
        for held in self._in_order(fleet_state, full):
            if has_bound:
                loads = self._fleet.loads()
                fleet_state = self._fleet_state(loads)
            free = [load for load in loads if load.worker not in reserved]
            if not self._has_room(free):
                return
            ranking = self._decide_one(held, free, fleet_state, worker_to_num_ahead)
            has_bound = ranking.can_send
            if ranking.lacks_blocks and self._is_out_of_patience(held, fleet_state):
                # Else small requests would take every block that comes free, and the large one would wait for ever.
                reserved.add(ranking.order[0].worker)

    def _is_out_of_patience(self, held: _Held, fleet_state: FleetState) -> bool:
        return self._clock() - held.arrived_at_s > _PATIENCE_PREFILLS * fleet_state.mean_full_s

    def _has_room(self, loads: Sequence[Load]) -> bool:
        """Whether anybody could take anything: the cheap question before the dear ones."""
        return any(load.has_free_slot for load in loads) if self._policy.is_late_binding else bool(loads)

    def _in_order(self, fleet_state: FleetState, full: Set[WorkerId]) -> list[_Held]:
        """The held requests to look at."""
        waiting = [
            held
            for held in self._held
            if held.matched_at_s is not None and held.waits_for not in full and not held.placed.done()
        ]
        if self._policy.is_late_binding and len(waiting) > 1:
            now = self._clock()
            waiting.sort(key=lambda held: -self._urgency(held, now, fleet_state))
        return waiting[:_LOOKED_AT]

    def _urgency(self, held: _Held, now_s: float, fleet_state: FleetState) -> float:
        best_match = max((match.num_blocks for match in held.worker_to_match.values()), default=0)
        own_tokens = held.request.num_prompt_tokens - self._usable_tokens(held, best_match)
        own_s = max(1, own_tokens) * fleet_state.prefill_s_per_token
        return self._policy.urgency(now_s - held.arrived_at_s, own_s, fleet_state)

    def _decide_one(
        self,
        held: _Held,
        loads: Sequence[Load],
        fleet_state: FleetState,
        worker_to_num_ahead: Counter[WorkerId | None],
    ) -> Ranking:
        """Rank the workers for one request, and bind it if its best may be sent to."""
        # Who has failed this request is asked again only where nobody else is left.
        allowed = [load for load in loads if load.worker not in held.excluded] or loads
        candidates = [
            Candidate(load, self._matched_tokens(held, load), worker_to_num_ahead[load.worker]) for load in allowed
        ]
        ranking = self._policy.rank(held.rank_request, candidates, fleet_state, self._rng)
        if ranking.can_send:
            best = ranking.order[0]
            load = next(load for load in loads if load.worker == best.worker)
            self._bind(held, load, best.matched_tokens, ranking)
        else:
            held.waits_for = ranking.order[0].worker
            worker_to_num_ahead[held.waits_for] += 1
        return ranking

    def _bind(self, held: _Held, load: Load, matched_tokens: int, ranking: Ranking) -> None:
        own_tokens = held.rank_request.num_prompt_tokens - matched_tokens
        booking = self._fleet.book(
            load,
            held.request.request,
            uncached_tokens=own_tokens,
            # Cached blocks count too: those that nobody holds leave the free ones when the request takes them.
            demand_blocks=held.rank_request.demand_blocks,
        )
        promise = self._hints.promise(load.worker, held.keys)
        self._note_sent(held.rank_request.num_prompt_tokens, own_tokens)
        self._held.pop(held)
        self._version += 1
        held.placed.set_result(Placement(booking, promise, matched_tokens, ranking))

    def _matched_tokens(self, held: _Held, load: Load) -> int:
        """Prompt tokens that the worker will not have to compute, resident or promised."""
        if not load.is_cache_aware or not held.keys:
            return 0
        match = held.worker_to_match.get(load.worker)
        num_resident = match.num_blocks if match is not None and match.instance == load.instance else 0
        # Both are prefixes of one chain, so their union is the longer one.
        num_blocks = max(num_resident, self._hints.num_promised_blocks(load.worker, held.keys))
        return self._usable_tokens(held, num_blocks)

    def _usable_tokens(self, held: _Held, num_blocks: int) -> int:
        """What `num_blocks` cached leading blocks are worth to a request, in tokens."""
        num_usable = num_usable_blocks(held.request.num_prompt_tokens, self._block_size_tokens)
        tokens = min(num_blocks, num_usable) * self._block_size_tokens
        return tokens if tokens >= self._min_prefix_tokens else 0

    def _fleet_state(self, loads: Sequence[Load]) -> FleetState:
        """Means kept in tokens, given in the seconds of this fleet, so that they hold when speeds become known."""
        prefill_s_per_token = sum(load.prefill_s_per_token for load in loads) / len(loads)
        mean_own_s = self._mean_own_tokens * prefill_s_per_token
        return FleetState(
            prefill_s_per_token=prefill_s_per_token,
            mean_full_s=self._mean_full_tokens * prefill_s_per_token,
            mean_own_s=mean_own_s,
            backlog_s=len(self._held) * mean_own_s,
            mean_output_tokens=self._mean_output_tokens,
        )

    def _note_sent(self, full_tokens: int, own_tokens: int) -> None:
        self._num_sent += 1
        weight = max(_MEAN_WEIGHT, 1.0 / self._num_sent)
        self._mean_full_tokens += weight * (full_tokens - self._mean_full_tokens)
        self._mean_own_tokens += weight * (own_tokens - self._mean_own_tokens)

    def _expected_output_tokens(self, request: GenerateRequest) -> int:
        return min(request.sampling.max_tokens, round(self._mean_output_tokens))


def _is_bound(placed: asyncio.Future[Placement]) -> bool:
    return placed.done() and not placed.cancelled() and placed.exception() is None


def _load_that_decides(load: Load) -> tuple[object, ...]:
    """What of a load can change a decision; its fitted times drift with every step and would never compare equal."""
    return load.worker, load.instance, load.num_requests, load.queued_prefill_tokens, load.kv_used_blocks
