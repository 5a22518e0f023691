"""Held requests: their order, their admission, and when each is bound to a worker.

Requests are bound late, when their best worker is about to have room and caches and loads are known best; policies that
bind early pass straight through.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from router.bookings import Booking
from router.credit import Credit, prefix_hash
from router.fleet import Fleet
from router.held import Held, HeldTable
from router.hints import Hints, Promise
from router.policies.base import Costs, Flags, FleetState, Floats, Ints, Loads, Policy, Ranking
from router.requests import GenerateRequest
from shared.directory.base import Match
from shared.errors import KvrouteError, NoWorker, Overloaded
from shared.types import BlockKey, WorkerId

logger = logging.getLogger(__name__)

_LOOKED_AT = 128
"""Most held requests that one pass weighs: bounds the cost of an event, and the rest are younger or longer anyway."""
_MAX_MATCHING = 8
"""Matches that are asked for again side by side: few, so that new requests' own do not queue behind them."""
_PASSES_PER_QUESTION = 4
_PASSES_PER_MATCH = 8
"""Passes that an answer of the directory about a held request is good for. One is asked about in every fourth pass."""
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
    matched_at_s: float
    weighed_at_s: float
    """When the directory had first answered, and when the deciding began that led to this."""


class HoldQueue:
    """Owns the held requests and the running means that decisions use.

    A request that arrives is weighed alone, since those that wait have been weighed against the same loads. When
    something has changed all are weighed again, in one pass.
    """

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
        self._credit = Credit(hints, block_size_tokens=block_size_tokens, min_prefix_tokens=min_prefix_tokens)
        self._block_size_tokens = block_size_tokens
        self._max_held = max_held
        self._timeout_s = timeout_s
        self._rng = rng
        self._clock = clock
        self._num_held = 0
        """Those whose first match is awaited included, which are in no table yet."""
        self._table = HeldTable()
        self._workers: tuple[WorkerId, ...] = ()
        """Whose columns the table has; another tuple means other columns."""
        self._column_to_reserved: dict[int, Held] = {}
        """Workers that are kept free for a large request, as of the last pass."""
        self._num_taken = 0
        self._num_sent = 0
        self._num_finished = 0
        self._num_passes = 0
        self._weighed_at_s = 0.0
        self._mean_full_tokens = 0.0
        self._mean_own_tokens = 0.0
        self._mean_output_tokens = float(_NOMINAL_OUTPUT_TOKENS)
        self._is_pass_due = False
        self._has_unseen = False
        """Whether the last pass left out requests that do not wait for a worker that it has found busy."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._matching: set[asyncio.Task[None]] = set()
        self._is_closed = False
        hints.on_change = self._take_hint

    def __len__(self) -> int:
        return self._num_held

    def start(self) -> None:
        """Begin to bind requests."""
        self._task = asyncio.create_task(self._run(), name="hold-queue")

    async def close(self) -> None:
        """Stop; whoever still waits, or comes later, gets `NoWorker`."""
        self._is_closed = True
        tasks = [*self._matching, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_all(NoWorker("the router is closing"))

    def poke(self) -> None:
        """Something that decisions depend on has changed. Cheap, callable from anywhere on the loop."""
        self._is_pass_due = True
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
        if not excluded and self._num_held >= self._max_held:
            raise Overloaded(f"{self._num_held} requests are held already", retry_after_s=1.0)
        num_tokens = request.num_prompt_tokens + self._expected_output_tokens(request)
        held = Held(
            request,
            keys,
            ordinal=self._num_taken,
            prefix_hash=prefix_hash(request, keys),
            demand_blocks=-(-num_tokens // self._block_size_tokens),
            arrived_at_s=arrived_at_s,
            excluded=excluded,
            placed=asyncio.get_running_loop().create_future(),
        )
        self._num_taken += 1
        self._num_held += 1
        try:
            if self._policy.is_cache_aware:
                held.worker_to_match = await self._match(keys)
            held.matched_at_s = self._clock()
            self._arrive(held)
            if not held.placed.done():
                async with asyncio.timeout(self._timeout_s):
                    await held.placed
            placement: Placement = held.placed.result()
            return placement
        except TimeoutError:
            if _is_bound(held.placed):
                bound: Placement = held.placed.result()
                return bound
            if not self._fleet.worker_to_instance:
                raise NoWorker(f"there is no worker, and none came within {self._timeout_s:g} s") from None
            raise Overloaded(f"no worker took the request within {self._timeout_s:g} s", retry_after_s=1.0) from None
        except asyncio.CancelledError:
            if _is_bound(held.placed):
                # The decision came in the very moment of the cancel: its claims must not outlive it.
                late: Placement = held.placed.result()
                self._hints.withdraw(late.promise)
                self._fleet.release(late.booking)
            raise
        finally:
            self._num_held -= 1
            self._table.remove(held)
            if held in self._column_to_reserved.values():
                self.poke()

    def note_finished(self, num_output_tokens: int) -> None:
        """Let a finished request's length count in the demand of later ones. Modifies the running mean."""
        self._num_finished += 1
        weight = max(_MEAN_WEIGHT, 1.0 / self._num_finished)
        self._mean_output_tokens += weight * (num_output_tokens - self._mean_output_tokens)

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._is_pass_due:
                self._decide()

    def _arrive(self, held: Held) -> None:
        """Put a request, once it is matched, before the workers."""
        if self._is_closed:
            raise NoWorker("the router is closing")
        self._sync_workers(self._fleet.loads())
        self._table.add(held, self._credit.row(held.request, held.keys, held.worker_to_match), self._num_passes)
        self._decide(None if self._is_pass_due or self._has_unseen else held)

    def _decide(self, newcomer: Held | None = None) -> None:
        """Bind whoever can be bound now, most urgent first; with a newcomer only that one: nothing else is new."""
        self._weighed_at_s = self._clock()
        try:
            self._hints.expire()
            loads = self._fleet.loads()
            self._sync_workers(loads)
            if newcomer is None:
                self._is_pass_due = False
                self._num_passes += 1
                self._column_to_reserved.clear()
            if not len(loads) or not len(self._table):
                return
            if newcomer is not None:
                # Who comes first waits for nobody; behind others there may be no worker that is worth a look.
                if len(self._table) == 1 or self._is_ready(loads, self.fleet_state(loads), self._clock()).any():
                    self._weigh_one(loads, newcomer)
            elif self._policy.is_late_binding:
                self._weigh_all(loads)
            else:
                for held in sorted(self._table, key=lambda held: held.ordinal):
                    self._weigh_one(self._fleet.loads(), held)
        except Exception as error:
            # A fault in a policy must reach whoever waits for it, not end the queue in silence.
            logger.exception("deciding failed")
            self._fail_all(KvrouteError(f"routing failed: {error}"))

    def _weigh_one(self, loads: Loads, held: Held) -> None:
        """Bind one request if its best worker may be sent to now."""
        assert held.row is not None, "what is weighed is in the table"
        rows = slice(held.row, held.row + 1)
        requests = self._table.requests(rows, self._clock())
        costs = self._policy.costs(requests, loads, self.fleet_state(loads), self._rng)
        if self._column_to_reserved or held.excluded:
            costs = self._barred(costs, np.array([held.row]))
        column = int(costs.best(loads)[0])
        self._table.waits_for[rows] = column
        if costs.total[0, column] < math.inf and (costs.can_send is None or costs.can_send[0, column]):
            self._bind(held, loads.workers[column], Ranking.of_row(costs, loads, requests, 0, column))
            self._table.remove(held)

    def _weigh_all(self, loads: Loads) -> None:
        """Bind all requests that may be sent now, the most urgent first, as far as one pass looks."""
        now_s = self._clock()
        fleet = self.fleet_state(loads)
        is_ready = self._is_ready(loads, fleet, now_s)
        if not is_ready.any():
            self._ask_again(np.arange(len(self._table)))
            return
        rows = self._in_order(fleet, is_ready, now_s)
        self._ask_again(rows)
        bound: list[Held] = []
        while len(rows) and is_ready.any():
            requests = self._table.requests(rows, now_s)
            costs = self._policy.costs(requests, loads, fleet, self._rng)
            if self._column_to_reserved or self._table.num_excluding:
                costs = self._barred(costs, rows)
            best = costs.best(loads)
            pairs = np.arange(len(rows)), best
            can_send = costs.total[pairs] < math.inf
            if costs.can_send is not None:
                can_send &= costs.can_send[pairs]
            is_decided = can_send
            if costs.lacks_blocks is not None:
                # Else small requests would take every block that comes free, and the large one would wait for ever.
                is_out_of_patience = requests.age_s > _PATIENCE_PREFILLS * fleet.mean_full_s
                is_decided = can_send | (costs.lacks_blocks[pairs] & is_out_of_patience)
            at = int(is_decided.argmax())
            if not is_decided[at]:
                self._table.waits_for[rows] = best
                break
            self._table.waits_for[rows[: at + 1]] = best[: at + 1]
            held, column = self._table[rows[at]], int(best[at])
            if can_send[at]:
                self._bind(held, loads.workers[column], Ranking.of_row(costs, loads, requests, at, column))
                bound.append(held)
                loads = self._fleet.loads()
                fleet = self.fleet_state(loads)
                is_ready = self._is_ready(loads, fleet, now_s)
            else:
                self._column_to_reserved[column] = held
                is_ready[column] = False
            rows = rows[at + 1 :]
        for held in bound:
            self._table.remove(held)

    def _is_ready(self, loads: Loads, fleet: FleetState, now_s: float) -> Flags:
        """Which workers could be sent anything: the cheap question before the dear ones."""
        is_ready = self._policy.is_ready(loads, fleet, now_s - self._table.arrived_at_s.min()).copy()
        for column in self._column_to_reserved:
            is_ready[column] = False
        return is_ready

    def _in_order(self, fleet: FleetState, is_ready: Flags, now_s: float) -> Ints:
        """The rows to look at. Who waits for a busy worker must not keep others from being looked at."""
        table = self._table
        own_s: Floats = np.multiply(table.own_tokens, fleet.prefill_s_per_token)
        urgency = self._policy.urgency(now_s - table.arrived_at_s, own_s, fleet)
        is_parked = ~np.append(is_ready, True)[table.waits_for]
        self._has_unseen = len(table) - int(is_parked.sum()) > _LOOKED_AT
        return table.to_weigh(urgency, is_parked, _LOOKED_AT, self._num_passes)

    def _barred(self, costs: Costs, rows: Ints) -> Costs:
        """Infinite where a worker is reserved, or has failed a request that has others left."""
        total = costs.total.copy()
        total[:, list(self._column_to_reserved)] = math.inf
        for index, row in enumerate(rows.tolist()):
            excluded = self._table[row].excluded
            if excluded:
                others = total[index].copy()
                others[[column for column, worker in enumerate(self._workers) if worker in excluded]] = math.inf
                if others.min() < math.inf:
                    total[index] = others
        return replace(costs, total=total)

    def _bind(self, held: Held, worker: WorkerId, ranking: Ranking) -> None:
        num_prompt_tokens = held.request.num_prompt_tokens
        matched_tokens = int(ranking.matched_tokens[ranking.best])
        booking = self._fleet.book(
            worker,
            held.request.request,
            uncached_tokens=num_prompt_tokens - matched_tokens,
            # Cached blocks count too: those that nobody holds leave the free ones when the request takes them.
            demand_blocks=held.demand_blocks,
        )
        self._table.settle(held)
        self._note_sent(num_prompt_tokens, num_prompt_tokens - matched_tokens)
        promise = self._hints.promise(worker, held.keys)
        held.placed.set_result(
            Placement(booking, promise, matched_tokens, ranking, held.matched_at_s, self._weighed_at_s)
        )

    def _fail_all(self, error: KvrouteError) -> None:
        for held in list(self._table):
            self._table.remove(held)
            if not held.placed.done():
                held.placed.set_exception(error)

    # What the table shows of the world.

    def _sync_workers(self, loads: Loads) -> None:
        """Where the workers have changed, all rows are credited anew."""
        if loads.workers is not self._workers:
            self._workers = loads.workers
            self._column_to_reserved.clear()
            self._credit.relay(loads)
            self._table.relay(len(loads))
            for held in self._table:
                self._renew_credit(held)

    def _take_hint(self, worker: WorkerId, keys: Sequence[BlockKey], depth: int) -> None:
        """Blocks have become promised, or are no more: whoever shares the first of them is credited anew."""
        for held in self._table.sharing(keys, depth):
            self._renew_credit(held)

    def _renew_credit(self, held: Held) -> None:
        self._table.credit(held, self._credit.row(held.request, held.keys, held.worker_to_match))

    def _ask_again(self, rows: Ints) -> None:
        """Ask the directory about one of these requests, whose answer is the oldest: it may hold no longer.

        Paced by passes, not by a clock: where nothing happens nothing is decided, and a busy fleet is asked more often.
        """
        if self._num_passes % _PASSES_PER_QUESTION:
            return
        asked_at = self._table.asked_at[rows]
        held = self._table[rows[asked_at.argmin()]]
        is_old = self._num_passes - int(asked_at.min()) >= _PASSES_PER_MATCH
        if is_old and self._policy.is_cache_aware and len(self._matching) < _MAX_MATCHING:
            self._table.asked_at[held.row] = self._num_passes
            task = asyncio.create_task(self._match_again(held), name="hold-queue-match")
            self._matching.add(task)
            task.add_done_callback(self._matching.discard)

    async def _match_again(self, held: Held) -> None:
        worker_to_match = await self._match(held.keys)
        if held.row is not None and worker_to_match != held.worker_to_match:
            held.worker_to_match = worker_to_match
            self._renew_credit(held)
            self.poke()

    # Means.

    def fleet_state(self, loads: Loads) -> FleetState:
        """The means of now, kept in tokens and given in this fleet's seconds: they hold when speeds become known."""
        prefill_s_per_token = float(loads.prefill_s_per_token.sum()) / len(loads)
        return FleetState(
            prefill_s_per_token=prefill_s_per_token,
            mean_full_s=self._mean_full_tokens * prefill_s_per_token,
            mean_own_s=self._mean_own_tokens * prefill_s_per_token,
            backlog_s=self._table.total_own_tokens * prefill_s_per_token,
            mean_output_tokens=self._mean_output_tokens,
            num_routers=self._fleet.num_routers,
            block_size_tokens=self._block_size_tokens,
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
