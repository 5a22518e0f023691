"""Binding: weighs the requests that wait against the workers as they are now, and gives each its worker.

Knows nothing of who is let in, how long anybody may wait, or what comes after the decision.
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
from router.credit import Credit, Credited
from router.fleet import Fleet
from router.held import Held, HeldTable
from router.hints import Hints, Promise
from router.means import Means
from router.policies.base import Costs, Flags, FleetState, Floats, Ints, Loads, Policy, Ranking, Requests
from router.requests import GenerateRequest
from router.shares import Shares
from shared.directory.base import Match
from shared.errors import KvrouteError
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

MatchAll = Callable[[Sequence[BlockKey]], Awaitable[Mapping[WorkerId, Match]]]


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision: the worker that a request is bound to, and what was known when it was made."""

    request: GenerateRequest
    booking: Booking
    promise: Promise
    matched_tokens: int
    expected_output_tokens: int
    ranking: Ranking
    matched_at_s: float
    weighed_at_s: float
    """When the directory had first answered, and when the deciding began that led to this."""


class Binder:
    """Owns the table of the requests that wait, and which workers are kept free for large ones.

    A request that arrives is weighed alone, since those that wait have been weighed against the same loads. When
    something has changed all are weighed again, in one pass.
    """

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet,
        hints: Hints,
        match: MatchAll,
        shares: Shares,
        means: Means,
        *,
        block_size_tokens: int,
        min_prefix_tokens: int,
        on_bound: Callable[[], None],
        on_change: Callable[[], None],
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._hints = hints
        self._match = match
        self._shares = shares
        self._means = means
        self._credit = Credit(hints, block_size_tokens=block_size_tokens, min_prefix_tokens=min_prefix_tokens)
        self._block_size_tokens = block_size_tokens
        self._on_bound = on_bound
        self._on_change = on_change
        """Called when a decision may be another one now."""
        self._rng = rng
        self._clock = clock
        self._table = HeldTable(block_size_tokens)
        self._workers: tuple[WorkerId, ...] = ()
        """Whose columns the table has; another tuple means other columns."""
        self._columns: dict[WorkerId | None, int] = {}
        """Where each of them stands."""
        self._column_to_reserved: dict[int, Held] = {}
        """Workers that are kept free for a large request, as of the last pass."""
        self._num_passes = 0
        self._is_pass_due = False
        self._has_unseen = False
        """Whether the last pass left out requests that do not wait for a worker that it has found busy."""
        self._weighed_at_s = 0.0
        self._is_loading_ahead = False
        """Whether a request has come since loads were last taken for the next one."""
        self._matching: set[asyncio.Task[None]] = set()
        hints.on_change = self._take_hint

    async def close(self) -> None:
        """Stop asking the directory."""
        tasks = list(self._matching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def note_change(self) -> bool:
        """Something that decisions depend on is another now: the next `look` weighs all. Tells if it is news."""
        is_news = not self._is_pass_due
        self._is_pass_due = True
        return is_news

    def look(self) -> None:
        """Bind whoever can be bound, if anything has changed. Modifies."""
        if self._is_pass_due:
            self._decide()

    def take(self, held: Held) -> None:
        """Put a request, once it is matched, before the workers. Modifies."""
        self._is_loading_ahead = True
        loads = self._fleet.loads()
        self._sync_workers(loads)
        self._table.add(held, self._credited(held), self._num_passes)
        self._decide(loads, None if self._is_pass_due or self._has_unseen else held)

    def drop(self, held: Held) -> None:
        """Take a request out, if it is there. Modifies."""
        self._table.remove(held)
        if held in self._column_to_reserved.values():
            self._on_change()

    def fail_all(self, error: KvrouteError) -> None:
        """End the waiting of all. Modifies."""
        for held in list(self._table):
            self._table.remove(held)
            if not held.placed.done():
                held.placed.set_exception(error)

    def _decide(self, loads: Loads | None = None, newcomer: Held | None = None) -> None:
        """Bind whoever can be bound now, most urgent first; with a newcomer only that one: nothing else is new.

        `loads` are those of this moment, where they have been taken already.
        """
        try:
            self._hints.expire()
            if newcomer is None:
                self._is_pass_due = False
                self._num_passes += 1
                self._column_to_reserved.clear()
            if not len(self._table):
                if self._is_loading_ahead:
                    # Whoever comes next finds the loads taken; not at every news, since nobody may come for long.
                    self._is_loading_ahead = False
                    self._fleet.loads()
                return
            self._weighed_at_s = self._clock()
            if loads is None:
                loads = self._fleet.loads()
                self._sync_workers(loads)
            if not len(loads):
                return
            if newcomer is not None:
                # Who comes first waits for nobody; behind others there may be no worker that is worth a look.
                fleet = self.fleet_state(loads)
                if len(self._table) == 1 or np.count_nonzero(self._is_ready(loads, fleet, self._clock())):
                    self._weigh_one(loads, fleet, newcomer)
            elif self._policy.is_late_binding:
                self._weigh_all(loads)
            else:
                for held in self._in_turn():
                    loads = self._fleet.loads()
                    self._weigh_one(loads, self.fleet_state(loads), held)
        except Exception as error:
            # A fault in a policy must reach whoever waits for it, not end the queue in silence.
            logger.exception("deciding failed")
            self.fail_all(KvrouteError(f"routing failed: {error}"))

    def _weigh_one(self, loads: Loads, fleet: FleetState, held: Held) -> None:
        """Bind one request if its best worker may be sent to now."""
        assert held.row is not None, "what is weighed is in the table"
        rows = slice(held.row, held.row + 1)
        requests = self._table.requests(rows, self._clock())
        costs = self._policy.costs(requests, loads, fleet, self._rng)
        if self._column_to_reserved or held.is_choosy:
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
        if not np.count_nonzero(is_ready):
            self._ask_again(np.arange(len(self._table)))
            return
        if len(self._table) == 1 and self._shares.is_even and self._table.waits_for[0] == len(loads):
            # Nobody to be put in order with, and mostly this is enough. Who has been looked at before waits for long.
            self._has_unseen = False
            held = self._table[0]
            self._weigh_one(loads, fleet, held)
            if held.row is None:
                return
        rows, may_reserve = self._in_order(loads, fleet, is_ready, now_s)
        self._ask_again(rows)
        bound: list[Held] = []
        weighed: Costs | None = None
        while len(rows) and np.count_nonzero(is_ready):
            requests = self._table.requests(rows, now_s)
            if weighed is None:
                weighed = self._policy.costs(self._ranked(requests), loads, fleet, self._rng)
            costs = weighed
            if self._column_to_reserved or self._table.num_choosy:
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
                is_decided = can_send | (costs.lacks_blocks[pairs] & is_out_of_patience & may_reserve[rows])
            at = int(is_decided.argmax())
            if not is_decided[at]:
                self._table.waits_for[rows] = best
                break
            self._table.waits_for[rows[: at + 1]] = best[: at + 1]
            held, column = self._table[rows[at]], int(best[at])
            if can_send[at]:
                self._bind(held, loads.workers[column], Ranking.of_row(costs, loads, requests, at, column))
                bound.append(held)
                if at + 1 == len(rows):
                    break
                loads = self._fleet.loads()
                fleet = self.fleet_state(loads)
                is_ready = self._is_ready(loads, fleet, now_s)
                weighed = None
            else:
                self._column_to_reserved[column] = held
                is_ready[column] = False
                # Loads are as they were, and so is what the others cost.
                weighed = weighed.after(at)
            rows = rows[at + 1 :]
        for held in bound:
            self._table.remove(held)

    def _is_ready(self, loads: Loads, fleet: FleetState, now_s: float) -> Flags:
        """Which workers could be sent anything: the cheap question before the dear ones."""
        is_ready = self._policy.is_ready(loads, fleet, now_s - self._table.arrived_at_s.min()).copy()
        for column in self._column_to_reserved:
            is_ready[column] = False
        return is_ready

    def _in_order(self, loads: Loads, fleet: FleetState, is_ready: Flags, now_s: float) -> tuple[Ints, Flags]:
        """The rows to look at, and which of all rows may keep a worker free for themselves.

        Who waits for a busy worker must not keep others from being looked at.
        """
        table = self._table
        own_s: Floats = np.multiply(table.own_tokens, fleet.prefill_s_per_token)
        occupancy_s = table.demand_blocks * table.output_tokens * (fleet.token_s / loads.kv_total_blocks.mean())
        work_s: Floats = table.shared_own_tokens() * fleet.prefill_s_per_token + occupancy_s
        urgency = self._policy.urgency(now_s - table.arrived_at_s, own_s, work_s, fleet)
        is_parked = ~np.append(is_ready, True)[table.waits_for]
        self._has_unseen = len(table) - int(np.count_nonzero(is_parked)) > _LOOKED_AT
        may_reserve: Flags = np.ones(len(table), dtype=np.bool_)
        if not self._shares.is_even:
            urgency, is_passed_over = self._shares.precedence(table, urgency, is_parked)
            may_reserve = ~is_passed_over
        return table.to_weigh(urgency, is_parked, _LOOKED_AT, self._num_passes), may_reserve

    def _ranked(self, requests: Requests) -> Requests:
        """The requests as old as those that they go before.

        Of several routers the one whose request has waited longer gets ahead, and that place is the turn's: else a
        tenant that floods one router would hold up the others' requests at all routers by its age.
        """
        if self._shares.is_even:
            return requests
        return replace(requests, age_s=np.maximum.accumulate(requests.age_s[::-1])[::-1])

    def _in_turn(self) -> list[Held]:
        """All requests in the order in which an early-binding policy is asked about them."""
        table = self._table
        precedence: Floats = np.negative(table.ordinals, dtype=np.float64)
        if not self._shares.is_even:
            precedence, _ = self._shares.precedence(table, precedence, np.zeros(len(table), dtype=np.bool_))
        return [table[row] for row in np.argsort(-precedence).tolist()]

    def _barred(self, costs: Costs, rows: Ints) -> Costs:
        """Infinite where a worker is reserved, has failed a request that has others left, or is not the one that it is
        for and that is there."""
        total = costs.total.copy()
        total[:, list(self._column_to_reserved)] = math.inf
        for index, row in enumerate(rows.tolist()):
            held = self._table[row]
            excluded = held.excluded
            if held.request.worker in self._columns and held.request.worker not in excluded:
                column = self._columns[held.request.worker]
                own_total = total[index, column]
                total[index] = math.inf
                total[index, column] = own_total
            elif excluded:
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
            demand_blocks=held.demand_blocks - matched_tokens // self._block_size_tokens,
        )
        self._table.settle(held)
        self._means.note_sent(num_prompt_tokens, num_prompt_tokens - matched_tokens)
        self._shares.charge(held, num_prompt_tokens - matched_tokens)
        self._on_bound()
        promise = self._hints.promise(worker, held.keys)
        held.placed.set_result(
            Placement(
                held.request,
                booking,
                promise,
                matched_tokens,
                held.expected_output_tokens,
                ranking,
                held.matched_at_s,
                self._weighed_at_s,
            )
        )

    # What the table shows of the world.

    def _sync_workers(self, loads: Loads) -> None:
        """Where the workers have changed, all rows are credited anew."""
        self._credit.note_loads(loads, len(self._table), self._fleet.num_routers)
        if loads.workers is not self._workers:
            self._workers = loads.workers
            self._columns = {worker: column for column, worker in enumerate(loads.workers)}
            self._column_to_reserved.clear()
            self._credit.relay(loads)
            self._table.relay(len(loads))
            for held in self._table:
                self._renew_credit(held)

    def _take_hint(self, worker: WorkerId, keys: Sequence[BlockKey], depth: int) -> None:
        """Blocks have become promised, or are no more: whoever shares the first of them is credited anew."""
        sharing = sorted(self._table.sharing(keys, depth), key=lambda held: held.ordinal)
        for place, held in enumerate(sharing):
            self._renew_credit(held, place)

    def _renew_credit(self, held: Held, place: int | None = None) -> None:
        self._table.credit(held, self._credited(held, place))

    def _credited(self, held: Held, place: int | None = None) -> Credited:
        """What counts as held of a request, whose place among those that wait for the same blocks may be known."""

        def num_before(depth: int) -> int:
            if place is not None:
                return place
            return sum(other.ordinal < held.ordinal for other in self._table.sharing(held.keys, depth))

        # Policies that never hold anybody spread a burst as they like, and so does whoever names the worker.
        is_limited = self._policy.is_late_binding and held.request.worker is None
        return self._credit.row(held.request, held.keys, held.worker_to_match, num_before if is_limited else None)

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
            self._on_change()

    def fleet_state(self, loads: Loads) -> FleetState:
        """The running means, in the seconds of these workers."""
        return self._means.fleet_state(
            loads,
            backlog_tokens=self._table.total_own_tokens,
            num_routers=self._fleet.num_routers,
            block_size_tokens=self._block_size_tokens,
        )
