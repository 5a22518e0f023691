"""The table of held requests: a row for each, in columns, so that all of them are weighed at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.beginnings import NOBODY_ELSE, Beginnings
from router.chain_marks import last_mark_depth
from router.credit import NOTHING_UNDER_WAY, Credited, UnderWay
from router.policies.base import Flags, Floats, Hashes, Ints, Requests
from router.requests import GenerateRequest
from shared.directory.base import Match
from shared.types import BlockKey, WorkerId

_FIRST_CAPACITY = 16


@dataclass(slots=True, eq=False)
class Held:
    """One request that wants a worker."""

    request: GenerateRequest
    keys: Sequence[BlockKey]
    ordinal: int
    """Count of requests that this router took before."""
    prefix_hash: int
    demand_blocks: int
    arrived_at_s: float
    excluded: frozenset[WorkerId]
    """Workers that have failed it."""
    placed: asyncio.Future[Any]
    worker_to_match: Mapping[WorkerId, Match] = field(default_factory=dict)
    matched_at_s: float = 0.0
    """When the directory had answered for the first time."""
    row: int | None = None
    """Its place in the table, if it is there."""
    lane: int = 0
    """Number of its tenant's lane."""
    expected_output_tokens: int = 0
    may_give_way: bool = True
    """Whether it may be refused; who has had a worker before may not."""
    has_place: bool = False
    """Told to the admission, which counts it."""

    @property
    def is_choosy(self) -> bool:
        """Whether some workers may be barred from it."""
        return bool(self.excluded) or self.request.worker is not None


class HeldTable:
    """Owns the rows of the requests that wait. Rows are dense: the last one moves to where one is taken out.

    Requests with a common beginning are found by their keys at depths 0, 1, 2, 4, 8 and so on, which are few even of
    the longest prompt; a request is written to that index when somebody asks, since most leave at once.

    `matched_tokens` has a column for each worker, and all of it is void when the workers change: `relay` begins anew.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._held: list[Held] = []
        self._num_workers = 0
        self.total_own_tokens = 0
        """Of all requests that are not bound: what `own_tokens` adds up to."""
        self.num_choosy = 0
        """Requests that not every worker may take."""
        self._beginnings: Beginnings[Held] = Beginnings()
        self._unindexed: dict[Held, None] = {}
        self._allocate(_FIRST_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        def grown(name: str, dtype: type[np.generic], *shape: int) -> NDArray[Any]:
            array = np.zeros((capacity, *shape), dtype=dtype)
            if self._held:
                array[: len(self._held)] = getattr(self, name)[: len(self._held)]
            return array

        self._ordinals: Ints = grown("_ordinals", np.int64)
        self._num_prompt_tokens: Ints = grown("_num_prompt_tokens", np.int64)
        self._demand_blocks: Ints = grown("_demand_blocks", np.int64)
        self._own_tokens: Ints = grown("_own_tokens", np.int64)
        self._output_tokens: Ints = grown("_output_tokens", np.int64)
        self._longest_beginnings: Ints = grown("_longest_beginnings", np.int64)
        self._tail_tokens: Ints = grown("_tail_tokens", np.int64)
        self._lanes: Ints = grown("_lanes", np.int64)
        self._priorities: Ints = grown("_priorities", np.int64)
        self._prefix_hashes: Hashes = grown("_prefix_hashes", np.uint64)
        self._next_hashes: Hashes = grown("_next_hashes", np.uint64)
        self._under_way: Ints = grown("_under_way", np.int64, len(UnderWay._fields))
        self._arrived_at_s: Floats = grown("_arrived_at_s", np.float64)
        self._asked_at: Ints = grown("_asked_at", np.int64)
        self._weighed_at: Ints = grown("_weighed_at", np.int64)
        self._waits_for: Ints = grown("_waits_for", np.int64)
        self._matched_tokens: Ints = grown("_matched_tokens", np.int64, self._num_workers)

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held)

    def __getitem__(self, row: int) -> Held:
        return self._held[row]

    @property
    def ordinals(self) -> Ints:
        return self._ordinals[: len(self._held)]

    @property
    def own_tokens(self) -> Ints:
        """Of each, what the worker that holds most of it would have to compute; at least one."""
        return self._own_tokens[: len(self._held)]

    def shared_own_tokens(self) -> Floats:
        """The same, as each one's part where several that wait have yet to have the same blocks computed: the first of
        them does it for all. Modifies the index.

        Who has a request's longest beginning that is looked for is known, and not how much more of it: that half of the
        rest is common errs least.
        """
        self._index()
        own_tokens, tail_tokens = self.own_tokens, self._tail_tokens[: len(self._held)]
        num_sharing = self._beginnings.num_members(self._longest_beginnings[: len(self._held)])
        alone_tokens = np.where(own_tokens >= tail_tokens, 0.5 * tail_tokens, own_tokens)
        parts: Floats = (own_tokens - alone_tokens) / num_sharing + alone_tokens
        return parts

    @property
    def output_tokens(self) -> Ints:
        """Of each, how long its answer is expected to be."""
        return self._output_tokens[: len(self._held)]

    @property
    def lanes(self) -> Ints:
        return self._lanes[: len(self._held)]

    @property
    def priorities(self) -> Ints:
        return self._priorities[: len(self._held)]

    @property
    def demand_blocks(self) -> Ints:
        return self._demand_blocks[: len(self._held)]

    @property
    def arrived_at_s(self) -> Floats:
        return self._arrived_at_s[: len(self._held)]

    @property
    def waits_for(self) -> Ints:
        """The column that was best for each when it was last looked at; the number of workers where none was."""
        return self._waits_for[: len(self._held)]

    @property
    def asked_at(self) -> Ints:
        """The pass in which the directory was last asked about each."""
        return self._asked_at[: len(self._held)]

    def add(self, held: Held, credited: Credited, num_passes: int) -> None:
        """Put a request into the table, of which the directory has just been asked. Modifies."""
        row = held.row = len(self._held)
        if row == len(self._ordinals):
            self._allocate(2 * row)
        self._held.append(held)
        self._unindexed[held] = None
        self.num_choosy += held.is_choosy
        self._ordinals[row] = held.ordinal
        self._num_prompt_tokens[row] = held.request.num_prompt_tokens
        self._demand_blocks[row] = held.demand_blocks
        self._prefix_hashes[row] = held.prefix_hash
        self._arrived_at_s[row] = held.arrived_at_s
        self._asked_at[row] = self._weighed_at[row] = num_passes
        self._own_tokens[row] = 0
        self._longest_beginnings[row] = NOBODY_ELSE
        before_tokens = last_mark_depth(len(held.keys)) * self._block_size_tokens
        self._tail_tokens[row] = held.request.num_prompt_tokens - before_tokens
        self._output_tokens[row] = held.expected_output_tokens
        self._lanes[row] = held.lane
        self._priorities[row] = held.request.priority
        self.credit(held, credited)

    def credit(self, held: Held, credited: Credited) -> None:
        """Write what workers hold of a request in the table; it is to be looked at again. Modifies."""
        row = held.row
        assert row is not None, "only what is in the table has a row"
        self._matched_tokens[row] = credited.tokens
        self._next_hashes[row] = credited.next_hash
        # Mostly nothing is, and to turn a tuple into an array takes longer than all the rest.
        self._under_way[row] = 0 if credited.under_way is NOTHING_UNDER_WAY else credited.under_way
        self._waits_for[row] = self._num_workers
        self._set_own_tokens(row, max(1, held.request.num_prompt_tokens - credited.most_tokens))

    def settle(self, held: Held) -> None:
        """The request is bound: it is no backlog any more. Modifies; it stays in the table until it is removed."""
        assert held.row is not None, "only what is in the table is bound"
        self._set_own_tokens(held.row, 0)
        self._unindex(held)

    def sharing(self, keys: Sequence[BlockKey], depth: int) -> list[Held]:
        """Who has the chain's block at `depth`, hence all before it, too; nobody who is bound. Modifies the index."""
        self._index()
        return list(self._beginnings.sharing(keys, depth))

    def _index(self) -> None:
        for held in self._unindexed:
            assert held.row is not None, "what is not indexed yet is in the table"
            self._longest_beginnings[held.row] = self._beginnings.add(held)
        self._unindexed.clear()

    def _unindex(self, held: Held) -> None:
        if held in self._unindexed:
            del self._unindexed[held]
        else:
            self._beginnings.remove(held)
            self._longest_beginnings[held.row] = NOBODY_ELSE

    def remove(self, held: Held) -> None:
        """Take a request out, if it is there. Modifies, and moves another row."""
        row = held.row
        if row is None:
            return
        if self._own_tokens[row]:
            # Else it is bound, and out of the backlog and the index.
            self._set_own_tokens(row, 0)
            self._unindex(held)
        held.row = None
        self.num_choosy -= held.is_choosy
        last = len(self._held) - 1
        if row != last:
            moved = self._held[row] = self._held[last]
            moved.row = row
            for column in self._columns():
                column[row] = column[last]
        self._held.pop()

    def relay(self, num_workers: int) -> None:
        """Begin anew with other workers: nothing is matched, nobody waits for anybody. Modifies."""
        self._num_workers = num_workers
        self._matched_tokens = np.zeros((len(self._ordinals), num_workers), dtype=np.int64)
        self._waits_for[:] = num_workers

    def requests(self, rows: Ints | slice, now_s: float) -> Requests:
        """What policies may know of these rows, in this order."""
        return Requests(
            ordinals=self._ordinals[rows],
            num_prompt_tokens=self._num_prompt_tokens[rows],
            prefix_hashes=self._prefix_hashes[rows],
            next_hashes=self._next_hashes[rows],
            demand_blocks=self._demand_blocks[rows],
            age_s=now_s - self._arrived_at_s[rows],
            matched_tokens=self._matched_tokens[rows],
            under_way=self._under_way[rows],
        )

    def to_weigh(self, urgency: Floats, is_parked: Flags, limit: int, num_passes: int) -> Ints:
        """At most `limit` rows, the most urgent first; where fewer are not parked, the parked ones have their turn.

        Modifies the turns only.
        """
        (rows,) = (~is_parked).nonzero()
        if len(rows) < limit:
            (parked,) = is_parked.nonzero()
            rows = np.concatenate((rows, _largest(parked, -self._weighed_at[parked], limit - len(rows))))
        else:
            rows = _largest(rows, urgency[rows], limit)
        self._weighed_at[rows] = num_passes
        # Equally urgent ones in the order in which they came.
        ordered: Ints = rows[np.lexsort((self._ordinals[rows], -urgency[rows]))]
        return ordered

    def _set_own_tokens(self, row: int, own_tokens: int) -> None:
        self.total_own_tokens += own_tokens - int(self._own_tokens[row])
        self._own_tokens[row] = own_tokens

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return (
            self._ordinals,
            self._num_prompt_tokens,
            self._demand_blocks,
            self._own_tokens,
            self._output_tokens,
            self._longest_beginnings,
            self._tail_tokens,
            self._lanes,
            self._priorities,
            self._prefix_hashes,
            self._next_hashes,
            self._under_way,
            self._arrived_at_s,
            self._asked_at,
            self._weighed_at,
            self._waits_for,
            self._matched_tokens,
        )


def _largest(rows: Ints, values: Floats | Ints, limit: int) -> Ints:
    if len(rows) <= limit:
        return rows
    return rows[np.argpartition(-values, limit - 1)[:limit]] if limit else rows[:0]
