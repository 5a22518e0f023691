"""The default policy: send a request where it will start soonest, and wait for that worker if it is busy.

Every term is a time measured on the worker itself, so a fleet ten times faster or slower decides the same. Peers push
each request at once into some worker's first-come queue; holding it until its best worker is about to have room is
what keeps caches warm under load, more than any refinement of the score.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from router.policies.base import Costs, Flags, FleetState, Floats, Ints, Loads, Requests


@dataclass(frozen=True, slots=True)
class CostWeights:
    """What each part counts. Pure numbers, none of them a time; found by simulation, and the same for every fleet."""

    own_prefill: float = 1.0
    """As much as waiting. It delays whoever comes after, but what a worker computes others will find on it."""
    again: float = 1.0
    """What a worker is computing right now counts as much again where another would compute it for itself, as long as
    that would save next to no time. So equal prompts that come at once wait for the worker that has the first."""
    fullness: float = 0.5
    """A worker full of sequences or blocks costs half a mean prompt: it decodes slower and evicts what others want."""
    decode: float = 1.0
    away_from_home: float = 0.2
    """With several routers each has workers of its own that it goes to at about equal cost, so that they do not collide
    where workers are busy; where none is, all agree on one worker for each prompt that nobody holds."""
    crowd: float = 0.35
    """More requests than its share make every step longer, and leave a place empty elsewhere."""
    room: float = 1.0
    """Time until answers have ended that leave a slot and the blocks. Without it a request waits for the slots of a
    worker full of long answers while others stand idle, and a large one for blocks that are free elsewhere."""
    patience: float = 0.03
    """Of several routers, the one whose request has waited longer gets ahead by this share of its age."""
    longest_wait: float = 2.1
    """Short requests overtake others until these have waited so many times as long as all that is held takes."""


class CostPolicy:
    """Least expected time to first token, with late binding."""

    name = "cost"
    is_cache_aware = True
    is_late_binding = True

    def __init__(self, weights: CostWeights | None = None) -> None:
        self._weights = weights or CostWeights()

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """Seconds; ties by the first block that nobody holds, so that equal prompts agree on who is to compute it."""
        weights = self._weights
        queued_s, has_free_slot = loads.queued_prefill_s, loads.has_free_slot
        pressure = _pressure(loads, fleet)
        prefill_s_per_token: Floats = weights.own_prefill * loads.prefill_s_per_token
        own_s: Floats = np.multiply(requests.own_tokens, _row(prefill_s_per_token))
        missing_blocks = requests.new_blocks(fleet.block_size_tokens) - _row(loads.free_blocks)
        fits = missing_blocks <= 0
        terms: dict[str, Floats] = {
            "queue_s": queued_s / (1.0 + pressure),
            "fullness_s": weights.fullness * fleet.mean_full_s * loads.fullness,
            "decode_s": weights.decode * loads.decode_s,
        }
        if fleet.num_routers > 1:
            terms["home_s"] = np.where(loads.is_home, 0.0, weights.away_from_home * _crowding_s(queued_s, fleet))
        if weights.again and np.count_nonzero(requests.under_way[:, 2]):
            terms["again_s"] = weights.again * _again_s(requests, loads)
        if weights.crowd:
            terms["crowd_s"] = weights.crowd * (loads.busy_step_s * loads.num_over_mean)
        if weights.room and not (_are_all(fits) and _are_all(has_free_slot)):
            terms["room_s"] = weights.room * _room_s(missing_blocks, loads, fleet) / (1.0 + pressure)
        bound_s = self._bound_s(loads, fleet, requests.age_s[:, None])
        is_ready = _row(has_free_slot & (queued_s < bound_s))
        can_send = is_ready & fits
        return Costs(
            total=own_s + _row(functools.reduce(np.add, terms.values())),
            tie_hashes=requests.next_hashes,
            can_send=can_send,
            lacks_blocks=is_ready ^ can_send,
            max_queued_s=self._max_queued_s(loads, requests) if fleet.num_routers > 1 else None,
            terms={"own_s": own_s, **terms},
        )

    def is_ready(self, loads: Loads, fleet: FleetState, age_s: Floats) -> Flags:
        """Whether a worker would have nothing to prefill before another word from it could reach this router."""
        return loads.has_free_slot & (loads.queued_prefill_s < self._bound_s(loads, fleet, age_s))

    def _max_queued_s(self, loads: Loads, requests: Requests) -> Floats:
        """What the worker may have to prefill when the request is there: a step, which it would not break off, or what
        takes no longer than to ask elsewhere."""
        worth_waiting_s = np.maximum(loads.step_budget_s, loads.round_trip_s)
        return worth_waiting_s + self._weights.patience * requests.age_s[:, None]

    def _bound_s(self, loads: Loads, fleet: FleetState, age_s: Floats) -> Floats:
        """A worker that has less than this to prefill would have nothing left before another request could come."""
        if fleet.num_routers > 1:
            return loads.blind_s + self._weights.patience * age_s
        return loads.blind_s

    def urgency(self, age_s: Floats, own_s: Floats, work_s: Floats, fleet: FleetState) -> Floats:
        """The shortest first, by the time of a worker that each takes up; before them, the oldest of those that have
        waited for too long.

        Short ones first is least mean wait (Smith, 1956), and of jobs that have a part in common the group counts
        (Sidney, 1975). Besides its prefill a request takes up its share of a worker's blocks while its answer lasts: at
        most as long as it asks for, else as long as answers are. A bounded queue bounds every wait.
        """
        drain_s = fleet.mean_own_s + work_s.sum() * fleet.num_routers / fleet.num_workers
        overdue = age_s / (self._weights.longest_wait * drain_s)
        return np.where(overdue > 1.0, overdue, work_s.min() / work_s)


_WORTH_WAITING = 1.5
"""To compute a prefix again pays where the worker that has it under way is busy for longer than so many times that."""
Entry = TypeVar("Entry", bound=np.generic)


def _row(array: NDArray[Entry]) -> NDArray[Entry]:
    """What is of workers, with a row for all requests: numpy is twice as fast where shapes are equal."""
    return array[None] if array.ndim == 1 else array


def _are_all(flags: Flags) -> bool:
    """As `flags.all()`, which takes five times as long for a few."""
    return bool(np.count_nonzero(flags) == flags.size)


def _pressure(loads: Loads, fleet: FleetState) -> float:
    """How many mean prompts wait for each worker, there or here."""
    if not fleet.mean_full_s:
        return 0.0
    return (loads.total_queued_s + fleet.backlog_s) / (len(loads) * fleet.mean_full_s)


def _crowding_s(queued_s: Floats, fleet: FleetState) -> float:
    """A mean prompt, or what waits at the median worker if that is less: one that is swamped makes no crowded fleet."""
    return min(fleet.mean_full_s, float(np.sort(queued_s)[(len(queued_s) - 1) // 2]))


def _again_s(requests: Requests, loads: Loads) -> Floats:
    """Time to compute what another worker has under way, where that one will be done not much later."""
    column, held_tokens, promised_tokens = requests.under_way.T[:, :, None]
    again_tokens = np.maximum(promised_tokens - np.maximum(requests.matched_tokens, held_tokens), 0)
    again_s: Floats = again_tokens * loads.prefill_s_per_token
    return np.where(loads.queued_prefill_s[column] <= _WORTH_WAITING * again_s, again_s, 0.0)


def _room_s(missing_blocks: Ints, loads: Loads, fleet: FleetState) -> Floats:
    """Time until enough answers have ended for one more request to have a slot and its blocks."""
    missing_slots = np.maximum(loads.num_requests + 1 - loads.max_num_seqs, 0) / loads.max_num_seqs
    missing = np.maximum(missing_slots, missing_blocks / loads.kv_total_blocks)
    room_s: Floats = missing * (fleet.mean_output_tokens * loads.busy_step_s)
    return room_s
