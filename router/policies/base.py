"""The policy protocol: pure costs of workers for requests, in arrays with a row for each request and a column for each
worker.

A policy gets snapshots, which nobody writes to, and returns the cost of every pairing, so that fall-back is the next
cheapest column and needs no second call. It keeps no state, reads no clock and draws randomness only from the generator
that it is given (the rule of NVIDIA Dynamo's scheduling folder: "selectors should be side-effect free").
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.types import Instance, WorkerId

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Flags = NDArray[np.bool_]

_NOTHING_UNDER_WAY: Ints = np.zeros((1, 3), dtype=np.int64)
UNLIMITED_BLOCKS = np.iinfo(np.int64).max // 2
"""More blocks than there are; far from where differences overflow."""
_DERIVED: Any = np.empty(0)
"""Stands for what follows from other fields."""


@dataclass(slots=True, eq=False)
class Loads:
    """Every worker that may be sent to, at one moment: its last status, and own sends that the status cannot know yet.

    One entry for each worker in every field, by worker id. Nobody writes to the arrays. What follows from others is
    worked out where it is not given.
    """

    workers: tuple[WorkerId, ...]
    instances: tuple[Instance, ...]
    hashes: Hashes
    """Of the worker's id: for ties and consistent hashing."""
    is_cache_aware: Flags
    """Whether the worker computes our block keys; if not, nothing is ever matched on it."""
    is_home: Flags
    """Whether this router goes to the worker rather than its peers do; all are, of a router that is alone."""
    num_requests: Ints
    """Running, waiting, and sent but not yet accounted for by the worker."""
    num_waiting: Ints
    """Those of them that do not run yet."""
    max_num_seqs: Ints
    queued_prefill_tokens: Ints
    """Uncached prompt tokens that the worker has accepted or been sent and has no first token for."""
    kv_used_blocks: Ints
    """Held by running requests, or needed by those to come as far as there are any."""
    kv_demand_blocks: Ints
    """The same without a limit: more than there are where requests will wait for them."""
    kv_total_blocks: Ints
    num_resident_blocks: Ints
    """Blocks with reusable content, in use or not."""
    step_budget_tokens: Ints
    prefill_s_per_token: Floats
    step_s: Floats
    decode_s_per_seq: Floats
    round_trip_s: Floats
    """From this router to the worker and back."""
    status_age_s: Floats
    queued_prefill_s: Floats = field(default_factory=lambda: _DERIVED)
    """Time until a request sent now would start its own prefill."""
    step_budget_s: Floats = field(default_factory=lambda: _DERIVED)
    """Time of one engine step that is full of prefill."""
    decode_s: Floats = field(default_factory=lambda: _DERIVED)
    """What the worker's requests add to each of its steps."""
    busy_step_s: Floats = field(default_factory=lambda: _DERIVED)
    """What one of its steps takes with them."""
    fullness: Floats = field(default_factory=lambda: _DERIVED)
    """Share of the blocks or of the slots that is in use, whichever is larger."""
    free_blocks: Ints = field(default_factory=lambda: _DERIVED)
    """What a request sent now may take. Of one that runs nothing, anything: what it cannot hold it refuses by name; no
    wait would mend that."""
    has_free_slot: Flags = field(default_factory=lambda: _DERIVED)
    blind_s: Floats = field(init=False)
    """Until a worker's word on what it is sent now could be here: a step full of prefill, a status and a round trip."""
    num_over_mean: Floats = field(init=False)
    """Requests that it has more than its share of all."""
    total_queued_s: float = field(init=False)
    mean_prefill_s_per_token: float = field(init=False)
    mean_busy_step_s: float = field(init=False)
    """What a router needs at every decision is worked out once for all that see the same loads."""

    def __post_init__(self) -> None:
        if self.queued_prefill_s is _DERIVED:
            self.queued_prefill_s = self.queued_prefill_tokens * self.prefill_s_per_token
        if self.step_budget_s is _DERIVED:
            self.step_budget_s = self.step_s + self.step_budget_tokens * self.prefill_s_per_token
        if self.decode_s is _DERIVED:
            self.decode_s = self.decode_s_per_seq * self.num_requests
        if self.busy_step_s is _DERIVED:
            self.busy_step_s = self.step_s + self.decode_s
        if self.fullness is _DERIVED:
            blocks, slots = self.kv_used_blocks / self.kv_total_blocks, self.num_requests / self.max_num_seqs
            self.fullness = np.maximum(blocks, slots)
        if self.free_blocks is _DERIVED:
            unused_blocks = self.kv_total_blocks - self.kv_used_blocks
            self.free_blocks = np.where(self.num_requests, unused_blocks, UNLIMITED_BLOCKS)
        if self.has_free_slot is _DERIVED:
            self.has_free_slot = self.num_requests < self.max_num_seqs
        num_workers = len(self.workers) or 1
        self.blind_s = self.step_budget_s + self.status_age_s + self.round_trip_s
        self.num_over_mean = np.maximum(self.num_requests - np.add.reduce(self.num_requests) / num_workers, 0.0)
        self.total_queued_s = float(np.add.reduce(self.queued_prefill_s))
        self.mean_prefill_s_per_token = float(np.add.reduce(self.prefill_s_per_token)) / num_workers
        self.mean_busy_step_s = float(np.add.reduce(self.busy_step_s)) / num_workers

    def __len__(self) -> int:
        return len(self.workers)


@dataclass(slots=True, eq=False)
class Requests:
    """Requests that want a worker, most urgent first. One entry for each in every field.

    Early-binding policies are asked for one request at a time, since each send changes what is known.
    """

    ordinals: Ints
    """Count of requests that this router took before."""
    num_prompt_tokens: Ints
    prefix_hashes: Hashes
    """Of the prompt's first block, or of its tail where it has no full block: equal for equal beginnings."""
    next_hashes: Hashes
    """Of the first block that no worker holds: equal for prompts that would fill the same hole."""
    demand_blocks: Ints
    """KV blocks that the request will need: its prompt and the running mean of output lengths."""
    age_s: Floats
    matched_tokens: Ints
    """(requests, workers): leading prompt tokens resident on the worker or promised to it by a hint."""
    under_way: Ints = field(default_factory=lambda: _NOTHING_UNDER_WAY)
    """(requests, 3): a worker's column, what it holds of the prompt, and what it was sent to compute up to, in tokens:
    the longest such. Where nothing is under way the last two are zero."""

    def __len__(self) -> int:
        return len(self.ordinals)

    @property
    def own_tokens(self) -> Ints:
        """(requests, workers): prompt tokens that the worker would compute: at least one, as in every engine."""
        own_tokens: Ints = np.maximum(self.num_prompt_tokens[:, None] - self.matched_tokens, 1)
        return own_tokens

    def new_blocks(self, block_size_tokens: int) -> Ints:
        """(requests, workers): blocks of the demand that the worker does not hold. Those that it holds but no running
        request shares leave the free ones as well; who knows which these are is the worker alone."""
        new_blocks: Ints = self.demand_blocks[:, None] - self.matched_tokens // block_size_tokens
        return new_blocks


@dataclass(slots=True)
class FleetState:
    """Running means over the router's recent requests, and its own backlog. Times as this fleet measures them."""

    prefill_s_per_token: float = 0.0
    """Mean over the workers."""
    mean_full_s: float = 0.0
    """Prefill time of a whole prompt."""
    mean_own_s: float = 0.0
    """Prefill time of what no cache gave."""
    backlog_s: float = 0.0
    """Uncached prefill time of the requests that this router holds."""
    mean_output_tokens: float = 0.0
    """Length of an answer."""
    token_s: float = 0.0
    """Time that each token of an answer takes, as busy as workers are now."""
    num_workers: int = 1
    num_routers: int = 1
    """Live routers of the same workers, this one among them."""
    block_size_tokens: int = 64

    @property
    def answer_s(self) -> float:
        """Time of a mean answer."""
        return self.mean_output_tokens * self.token_s


@dataclass(slots=True, eq=False)
class Costs:
    """What each pairing of a request and a worker would cost."""

    total: Floats
    """(requests, workers). Lower is better. Seconds for `cost`; the unit of a baseline is its own."""
    tie_hashes: Hashes | None = None
    """One for each request: among equal totals the worker decides whose hash weighs least with this one, the same on
    all routers. `None`: the first by id."""
    can_send: Flags | None = None
    """(requests, workers): whether it may be sent there now; if not, the request waits *for that worker* and is not
    sent elsewhere. `None`: always."""
    lacks_blocks: Flags | None = None
    """(requests, workers): whether it waits only because the worker has too few free blocks. `None`: never."""
    max_queued_s: Floats | None = None
    """(requests, workers): the worker is to take the request only if there is no more than this to prefill before it,
    for another router may have been faster; a refusal costs a round trip. `None`: whatever there is."""
    terms: Mapping[str, Floats] = field(default_factory=dict)
    """Parts of `total` by name, for people: (requests, workers), or (workers,) where equal for all requests."""

    def after(self, row: int) -> Costs:
        """The same for the requests behind that row alone."""
        rest = slice(row + 1, None)
        return Costs(
            total=self.total[rest],
            tie_hashes=None if self.tie_hashes is None else self.tie_hashes[rest],
            can_send=None if self.can_send is None else self.can_send[rest],
            lacks_blocks=None if self.lacks_blocks is None else self.lacks_blocks[rest],
            max_queued_s=None if self.max_queued_s is None else self.max_queued_s[rest],
            terms={name: term if term.ndim == 1 else term[rest] for name, term in self.terms.items()},
        )

    def best(self, loads: Loads) -> Ints:
        """The column of the best worker for each request, ties broken."""
        best: Ints = self.total.argmin(axis=1)
        if self.tie_hashes is None:
            return best
        if len(best) == 1:
            (columns,) = (self.total[0] == self.total[0, best[0]]).nonzero()
            if len(columns) > 1:
                best[0] = columns[rendezvous(self.tie_hashes, loads.hashes[columns]).argmin()]
            return best
        lowest = self.total[np.arange(len(best)), best]
        (pairs,) = (self.total == lowest[:, None]).ravel().nonzero()
        if len(pairs) > len(best):
            rows, columns = np.divmod(pairs, len(loads))
            order = np.lexsort((rendezvous(self.tie_hashes[rows], loads.hashes[columns]), rows))
            best = columns[order[rows.searchsorted(np.arange(len(best)))]]
        return best


# As arrays: numpy takes longer over its own scalars.
_FIRST_FACTOR, _SHIFT, _SECOND_FACTOR = (
    np.array(number, dtype=np.uint64) for number in (0xBF58476D1CE4E5B9, 32, 0x94D049BB133111EB)
)


def rendezvous(hashes: Hashes, worker_hashes: Hashes) -> Hashes:
    """Weights of workers for a hash: highest-random-weight hashing (Thaler and Ravishankar, 1998), lowest first.

    The arrays are broadcast. Both are hashes already, so that a part of the finaliser of splitmix64 (Steele, Lea and
    Flood, 2014) is enough to mix them.
    """
    mixed = (hashes ^ worker_hashes) * _FIRST_FACTOR
    return (mixed ^ (mixed >> _SHIFT)) * _SECOND_FACTOR


_ANY_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """What one decision knew: the cost of every worker for one request."""

    workers: tuple[WorkerId, ...]
    best: int
    """The column that was chosen."""
    total: Floats
    matched_tokens: Ints
    terms: Mapping[str, Floats]
    max_queued_tokens: int | None = None
    """Most that the chosen worker may have to prefill before the request. `None`: any."""

    @classmethod
    def of_row(cls, costs: Costs, loads: Loads, requests: Requests, row: int, best: int) -> Ranking:
        """The ranking of one request. One among several is copied, so that it does not keep the others alive."""
        max_queued_tokens = None
        if costs.max_queued_s is not None:
            # More than any queue, and still a number that can be sent, where a worker has measured next to no time.
            max_queued_tokens = int(min(costs.max_queued_s[row, best] / loads.prefill_s_per_token[best], _ANY_TOKENS))
        total, terms = costs.total[row], {n: term if term.ndim == 1 else term[row] for n, term in costs.terms.items()}
        if len(requests) > 1:
            total, terms = total.copy(), {name: term.copy() for name, term in terms.items()}
        return cls(loads.workers, best, total, requests.matched_tokens[row].copy(), terms, max_queued_tokens)

    @property
    def columns(self) -> list[int]:
        """Those of all workers, the chosen one first, the others by cost."""
        columns = np.argsort(self.total, kind="stable").tolist()
        columns.remove(self.best)
        return [self.best, *columns]

    @property
    def order(self) -> list[WorkerId]:
        """All workers, the chosen one first, the others by cost."""
        return [self.workers[column] for column in self.columns]

    def explain(self) -> str:
        """The decision in one line, best worker first. Rendered only when somebody looks."""
        return "; ".join(
            f"{self.workers[column]}={self.total[column]:.4g}"
            + "".join(f" {name}={term[column]:.4g}" for name, term in self.terms.items())
            + f" matched={self.matched_tokens[column]}"
            for column in self.columns
        )


class Policy(Protocol):
    """Says what sending each request to each worker would cost."""

    name: str
    is_cache_aware: bool
    """Whether `matched_tokens` decides anything; if not, the directory is not asked."""
    is_late_binding: bool
    """Whether held requests are reordered by `urgency` and may wait for their worker."""

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """The cost of every pairing; equal for equal arguments. Does not modify anything.

        There is at least one request and one worker.
        """
        ...

    def is_ready(self, loads: Loads, fleet: FleetState, age_s: Floats) -> Flags:
        """Whether a worker might be sent some request of that age now; where it is false, `can_send` is.

        The cheap question before the dear one. `age_s` is broadcast against the workers.
        """
        ...

    def urgency(self, age_s: Floats, own_s: Floats, work_s: Floats, fleet: FleetState) -> Floats:
        """Which held requests are looked at first: the highest. Early-binding policies never hold and are not asked.

        All held requests are given. `own_s` is the time to prefill what the best worker does not hold, positive;
        `work_s` is what each takes up of a worker: its part of that, where several of them have it in common, and the
        time of its expected answer, times the share of a mean worker's blocks that it needs.
        """
        ...
