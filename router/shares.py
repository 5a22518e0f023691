"""Whose turn it is among classes, tenants and priorities: what each has had of the workers, and the order that follows.

Knows nothing of workers, nor what makes a request urgent: that is the policy's word inside a tenant.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.held import Held, HeldTable
from router.policies.base import Flags, Floats, Ints
from router.requests import CLASSES, GenerateRequest, ServiceClass

DEFAULT_WEIGHT = 1.0
_OUTPUT_TOKEN_WEIGHT = 2.0
"""What a token of an answer counts beside a prompt token that had to be computed, as in VTC (see `Shares`)."""
_FLOOR = 1 / 16
"""Part of all service that those get who would have to wait for as long as others come."""
_MAX_LAG_REQUESTS = 4.0
"""A tenant falls behind by so many of the dearest requests at most: who wants nothing but a busy worker saves up no
claim on the others."""
_DEAREST_DECAY = 0.99
_FIRST_CAPACITY = 8


@dataclass(slots=True, eq=False)
class Lane:
    """One tenant's requests of one class."""

    number: int
    tenant: str
    service_class: ServiceClass
    weight: float
    held: dict[Held, None] = field(default_factory=dict)
    """In order of arrival."""
    priority_to_count: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Account:
    """What all lanes of a class have had, in tokens for each unit of weight that waits."""

    now: float = 0.0
    """Virtual time: where a lane stands that has had its share, no more and no less."""
    waiting_weight: float = 0.0
    num_waiting: int = 0
    """Lanes with requests."""
    dearest: float = 0.0
    ahead: list[tuple[float, int, Lane]] = field(default_factory=list)
    """Lanes without requests that have had more than their share, in a heap: forgotten when the others are even."""


class Shares:
    """Owns the lanes, and what each has had of the workers.

    The order of two requests, first difference decides:

    1. Class. Batch gets what interactive requests leave.
    2. Tenant. Weighted fair queueing: the tenant that has had least for its weight. A prompt's uncached tokens count
       once and an answer's twice, as in the virtual token counter of Sheng et al. ("Fairness in Serving Large Language
       Models", OSDI 2024); a tenant that was away starts level with the others, as there, and has saved up nothing.
    3. Priority, lower first, as in vLLM (`--scheduling-policy priority`) and in the bands of llm-d's flow control. A
       priority is the client's own word, so it comes after the tenant here: it moves a request before the tenant's own
       others and never before another tenant's. Where nobody names tenants it is what vLLM's users expect.
    4. The policy's urgency.

    Nobody starves: while requests wait behind a more urgent class or priority, a sixteenth of what is served goes to
    the one of them that has waited longest.

    All of this holds for what one router sends. Several routers know nothing of each other's tenants: where their
    requests are dealt out evenly each tenant gets its share of the whole, and one that comes by fewer routers than
    others gets less.

    A lane that holds nothing is gone as soon as the others of its class have had as much, at the latest when none of
    them holds anything.
    """

    def __init__(self, tenant_to_weight: Mapping[str, float]) -> None:
        self._tenant_to_weight = tenant_to_weight
        self._key_to_lane: dict[tuple[ServiceClass, str], Lane] = {}
        self._accounts = {service_class: _Account() for service_class in CLASSES}
        self._free_numbers: list[int] = []
        self._num_kinds = 0
        """Of lanes and priorities together, those that requests wait in."""
        self._owed = 0.0
        """Tokens that those may have who would have to wait for others, as far as they have not had them."""
        self._has_passed_over = False
        self._had: Floats = np.zeros(_FIRST_CAPACITY)
        self._weights: Floats = np.ones(_FIRST_CAPACITY)
        self._class_ranks: Ints = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._first_priorities: Ints = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._num_numbers = 0

    def __len__(self) -> int:
        """Lanes that are remembered."""
        return len(self._key_to_lane)

    @property
    def is_even(self) -> bool:
        """Whether all who wait are of one lane and one priority, so that urgency alone decides."""
        return self._num_kinds <= 1

    def lanes(self, service_class: ServiceClass) -> list[Lane]:
        """Those that hold requests."""
        return [lane for lane in self._key_to_lane.values() if lane.held and lane.service_class is service_class]

    def lane(self, request: GenerateRequest) -> Lane | None:
        """The lane that a request would join, if it is there."""
        return self._key_to_lane.get((request.service_class, request.tenant))

    def weight(self, tenant: str) -> float:
        return self._tenant_to_weight.get(tenant, DEFAULT_WEIGHT)

    def waiting_weight(self, service_class: ServiceClass) -> float:
        """Weights of the lanes that hold requests, added up."""
        return self._accounts[service_class].waiting_weight

    def join(self, held: Held) -> None:
        """Count a request as waiting. Modifies."""
        request = held.request
        account = self._accounts[request.service_class]
        lane = self.lane(request) or self._open(request)
        if not lane.held:
            account.num_waiting += 1
            account.waiting_weight += lane.weight
        lane.held[held] = None
        count = lane.priority_to_count.get(request.priority, 0)
        lane.priority_to_count[request.priority] = count + 1
        if not count:
            self._num_kinds += 1
            self._first_priorities[lane.number] = min(lane.priority_to_count)
        held.lane = lane.number

    def leave(self, held: Held) -> None:
        """Count a request as waiting no more. Modifies; one that has left already is no error."""
        request = held.request
        lane = self.lane(request)
        if lane is None or held not in lane.held:
            return
        del lane.held[held]
        lane.priority_to_count[request.priority] -= 1
        if not lane.priority_to_count[request.priority]:
            del lane.priority_to_count[request.priority]
            self._num_kinds -= 1
            if lane.held:
                self._first_priorities[lane.number] = min(lane.priority_to_count)
        if lane.held:
            return
        account = self._accounts[request.service_class]
        account.num_waiting -= 1
        account.waiting_weight -= lane.weight
        heapq.heappush(account.ahead, (float(self._had[lane.number]), lane.number, lane))
        self._forget_even(account)

    def charge(self, held: Held, own_tokens: int) -> None:
        """Count what a request that has got a worker will take of it. Modifies."""
        tokens = own_tokens + _OUTPUT_TOKEN_WEIGHT * held.expected_output_tokens
        request = held.request
        lane = self.lane(request)
        assert lane is not None, "who gets a worker has waited"
        account, number = self._accounts[request.service_class], lane.number
        self._had[number] = max(self._had[number], self._least(account)) + tokens / lane.weight
        account.dearest = max(tokens / lane.weight, _DEAREST_DECAY * account.dearest)
        account.now += tokens / account.waiting_weight
        self._forget_even(account)
        self._owed += _FLOOR * tokens
        if self._is_passed_over(lane, request.priority):
            # What they get beyond that while others leave room is not held against them.
            self._owed = max(self._owed - tokens, -tokens)
        elif not self._has_passed_over:
            self._owed = min(self._owed, 0.0)

    def correct(self, request: GenerateRequest, expected_output_tokens: int, num_output_tokens: int) -> None:
        """An answer was longer or shorter than was charged for. Modifies; nothing where the lane is forgotten."""
        lane = self.lane(request)
        if lane is not None:
            self._had[lane.number] += _OUTPUT_TOKEN_WEIGHT * (num_output_tokens - expected_output_tokens) / lane.weight

    def refund(self, request: GenerateRequest, own_tokens: int, expected_output_tokens: int) -> None:
        """A worker did not take a request that was charged for. Modifies; nothing where the lane is forgotten."""
        lane, account = self.lane(request), self._accounts[request.service_class]
        tokens = own_tokens + _OUTPUT_TOKEN_WEIGHT * expected_output_tokens
        if lane is not None:
            self._had[lane.number] -= tokens / lane.weight
        if account.num_waiting:
            # Else refusals alone would carry time past all lanes, and none would count as behind another.
            account.now = max(0.0, account.now - tokens / account.waiting_weight)

    def precedence(self, table: HeldTable, urgency: Floats, is_parked: Flags) -> tuple[Floats, Flags]:
        """The order of all rows as numbers, greatest first, and which of them are passed over for others.

        Parked rows do not go now: they come after all others, by urgency alone. Modifies only what is owed.
        """
        lanes, priorities = table.lanes, table.priorities
        is_passed_over = priorities > self._first_priorities[lanes]
        class_ranks = self._class_ranks[lanes]
        first_rank = min(rank for rank, account in enumerate(self._accounts.values()) if account.num_waiting)
        is_passed_over |= class_ranks > first_rank
        self._has_passed_over = bool(is_passed_over.any())
        (rows,) = (~is_parked).nonzero()
        # Each row where its lane will stand when those before it in the lane have had theirs.
        rows = rows[np.lexsort((table.ordinals[rows], -urgency[rows], priorities[rows], lanes[rows]))]
        row_lanes = lanes[rows]
        tokens = table.own_tokens[rows] + _OUTPUT_TOKEN_WEIGHT * table.output_tokens[rows]
        before = np.cumsum(tokens) - tokens
        is_first = np.diff(row_lanes, prepend=-1) != 0
        before -= np.maximum.accumulate(np.where(is_first, before, 0.0))
        least = np.array([self._least(account) for account in self._accounts.values()])
        had = np.maximum(self._had[row_lanes], least[class_ranks[rows]])
        tags = had + before / self._weights[row_lanes]
        order = rows[np.lexsort((-urgency[rows], tags, class_ranks[rows]))]
        # Anything that grows with urgency and stays below those of the others.
        precedence: Floats = urgency / (1.0 + np.abs(urgency)) - len(table) - 1.0
        precedence[order] = -np.arange(len(order), dtype=np.float64)
        if self._owed > 0.0:
            waiting = rows[is_passed_over[rows]]
            if len(waiting):
                first = waiting[np.lexsort((table.ordinals[waiting], table.arrived_at_s[waiting]))[0]]
                precedence[first] = 1.0
                is_passed_over[first] = False
            else:
                # They wait for busy workers, and not for others' sake.
                self._owed = 0.0
        return precedence, is_passed_over

    def _is_passed_over(self, lane: Lane, priority: int) -> bool:
        earlier = CLASSES[: CLASSES.index(lane.service_class)]
        return priority > min(lane.priority_to_count) or any(self._accounts[one].num_waiting for one in earlier)

    @staticmethod
    def _least(account: _Account) -> float:
        """Where a lane stands that has fallen behind as far as may be."""
        return account.now - _MAX_LAG_REQUESTS * account.dearest

    def _open(self, request: GenerateRequest) -> Lane:
        if self._free_numbers:
            number = self._free_numbers.pop()
        else:
            number = self._num_numbers
            self._num_numbers += 1
            if number == len(self._had):
                self._had, self._weights = _doubled(self._had), _doubled(self._weights)
                self._class_ranks, self._first_priorities = map(_doubled, (self._class_ranks, self._first_priorities))
        lane = Lane(number, request.tenant, request.service_class, self.weight(request.tenant))
        self._had[number] = self._accounts[request.service_class].now
        self._weights[number] = lane.weight
        self._class_ranks[number] = CLASSES.index(request.service_class)
        self._key_to_lane[request.service_class, request.tenant] = lane
        return lane

    def _forget_even(self, account: _Account) -> None:
        """Drop lanes without requests that are not ahead of the others any more."""
        ahead = account.ahead
        while ahead and (not account.num_waiting or ahead[0][0] <= account.now):
            _, number, lane = heapq.heappop(ahead)
            key = lane.service_class, lane.tenant
            if lane.held or self._key_to_lane.get(key) is not lane:
                continue  # it is back, or an older entry of it is gone already
            if account.num_waiting and self._had[number] > account.now:
                heapq.heappush(ahead, (float(self._had[number]), number, lane))
                continue
            del self._key_to_lane[key]
            self._free_numbers.append(number)
        if not account.num_waiting:
            account.now = account.waiting_weight = account.dearest = 0.0


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate((array, np.zeros_like(array)))
