"""The places of a router's queue: who gets one, who gives way, and when it is worth to ask again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from router.held import Held
from router.requests import CLASSES, GenerateRequest
from router.shares import Lane, Shares
from shared.errors import QueueFull

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Sooner is no relief, and later nothing is known any more."""
_RATE_WINDOW_S = 30.0
"""Departures count for about so long in the rate at which the queue drains."""


class Admission:
    """Owns the number of places and the rate at which they come free.

    A full queue is shared out like the workers. For a newcomer of a more urgent class somebody of a less urgent one
    gives way; inside a class, for a newcomer of a tenant that has less than its share of the places, somebody of the
    tenant that has most for its weight, as the longest queue loses in fair queueing (McKenney, 1990). It is always the
    newest, who has waited least; nobody who has had a worker before, since his reader may have tokens already.
    Otherwise the newcomer is refused. A lone tenant may fill the whole queue.
    """

    def __init__(self, max_held: int, shares: Shares, clock: Callable[[], float]) -> None:
        self._max_held = max_held
        self._shares = shares
        self._clock = clock
        self._num_held = 0
        self._departures = 0.0
        """Fading count of requests that have got a worker, and when it was right."""
        self._counted_at_s = self._began_at_s = clock()

    def __len__(self) -> int:
        """Places that are taken."""
        return self._num_held

    def enter(self, held: Held) -> Held | None:
        """Give a request its place; tells who has lost his to it. Modifies. Raises `QueueFull`."""
        loser = None
        # Who was let in once is not refused for having met a worker that failed.
        if self._num_held >= self._max_held and held.may_give_way:
            loser = self._loser(held.request)
            if loser is None:
                raise QueueFull(
                    f"{self._num_held} requests are held already", retry_after_s=self.retry_after_s(held.request)
                )
            self.leave(loser)
        self._shares.join(held)
        held.has_place = True
        self._num_held += 1
        return loser

    def leave(self, held: Held) -> None:
        """Take a request's place back. Modifies; one that has none is no error."""
        if held.has_place:
            held.has_place = False
            self._num_held -= 1
            self._shares.leave(held)

    def note_bound(self) -> None:
        """A request has got a worker. Modifies the rate."""
        now_s = self._clock()
        self._departures = self._departures * math.exp((self._counted_at_s - now_s) / _RATE_WINDOW_S) + 1.0
        self._counted_at_s = now_s

    def retry_after_s(self, request: GenerateRequest) -> float:
        """When all that is held before such a request will have got workers, at the rate of late.

        A lane drains at its tenant's share of the rate, and after the classes before it.
        """
        now_s = self._clock()
        # What was not watched yet does not count as without departures.
        watched = 1.0 - math.exp((self._began_at_s - now_s) / _RATE_WINDOW_S)
        departures = self._departures * math.exp((self._counted_at_s - now_s) / _RATE_WINDOW_S)
        if not departures or not watched:
            return MAX_RETRY_S
        rate_per_s = departures / (_RATE_WINDOW_S * watched)
        lane, shares = self._shares.lane(request), self._shares
        earlier = CLASSES[: CLASSES.index(request.service_class)]
        num_before = float(sum(len(one.held) for service_class in earlier for one in shares.lanes(service_class)))
        if lane is not None and lane.held:
            num_before += len(lane.held) * shares.waiting_weight(request.service_class) / lane.weight
        return min(max(MIN_RETRY_S, num_before / rate_per_s), MAX_RETRY_S)

    def _loser(self, newcomer: GenerateRequest) -> Held | None:
        """Who gives his place to a newcomer; `None` if nobody has to."""
        later = CLASSES[CLASSES.index(newcomer.service_class) + 1 :]
        for service_class in reversed(later):
            for lane in _longest_first(self._shares.lanes(service_class)):
                if (held := _newest(lane)) is not None:
                    return held
        own = self._shares.lane(newcomer)
        num_own = 1 + (len(own.held) if own is not None else 0)
        own_length = num_own / self._shares.weight(newcomer.tenant)
        for lane in _longest_first(self._shares.lanes(newcomer.service_class)):
            if len(lane.held) / lane.weight <= own_length:
                break
            if (held := _newest(lane)) is not None:
                return held
        return None


def _longest_first(lanes: Iterable[Lane]) -> list[Lane]:
    return sorted(lanes, key=lambda lane: len(lane.held) / lane.weight, reverse=True)


def _newest(lane: Lane) -> Held | None:
    """The newest request that waits and has had no worker before."""
    return next((held for held in reversed(lane.held) if held.may_give_way and not held.placed.done()), None)
