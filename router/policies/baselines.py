"""The policies to compare with. All bind early: a request is sent at once, to whatever queue its worker has."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from router.policies.base import Candidate, FleetState, Ranking, RankRequest, Scored


class _EarlyBinding:
    """What the baselines share: send at once, never reorder, know nothing of caches."""

    is_cache_aware = False
    is_late_binding = False

    def urgency(self, age_s: float, own_s: float, fleet: FleetState) -> float:
        """First come, first served."""
        return age_s


class RandomPolicy(_EarlyBinding):
    """Any worker."""

    name = "random"

    def rank(
        self, request: RankRequest, candidates: Sequence[Candidate], fleet: FleetState, rng: random.Random
    ) -> Ranking:
        """A shuffle."""
        return _by_cost(_shuffled(candidates, rng), range(len(candidates)))


class RoundRobinPolicy(_EarlyBinding):
    """Each worker in turn, by id."""

    name = "round_robin"

    def rank(
        self, request: RankRequest, candidates: Sequence[Candidate], fleet: FleetState, rng: random.Random
    ) -> Ranking:
        """The cycle, from this request's turn on."""
        turn_of = {worker: turn for turn, worker in enumerate(sorted(candidate.worker for candidate in candidates))}
        turns = [(turn_of[candidate.worker] - request.ordinal) % len(candidates) for candidate in candidates]
        return _by_cost(candidates, turns)


class LeastLoadPolicy(_EarlyBinding):
    """The worker with the fewest requests."""

    name = "least_load"

    def rank(
        self, request: RankRequest, candidates: Sequence[Candidate], fleet: FleetState, rng: random.Random
    ) -> Ranking:
        """By number of requests, ties drawn."""
        return _by_cost(_shuffled(candidates, rng), None)


class PowerOfTwoPolicy(_EarlyBinding):
    """The less loaded of two drawn workers (Mitzenmacher, 2001)."""

    name = "power_of_two"

    def rank(
        self, request: RankRequest, candidates: Sequence[Candidate], fleet: FleetState, rng: random.Random
    ) -> Ranking:
        """The two drawn by load, then the rest by load."""
        shuffled = _shuffled(candidates, rng)
        drawn, rest = shuffled[:2], shuffled[2:]
        return Ranking(_by_cost(drawn, None).order + (_by_cost(rest, None).order if rest else ()))


class PrefixHashPolicy(_EarlyBinding):
    """Consistent hashing of the prompt's beginning with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018)."""

    name = "prefix_hash"
    load_bound = 1.25
    """A worker over this multiple of the mean load is passed over; the paper's 1 + c with c = 0.25."""

    def rank(
        self, request: RankRequest, candidates: Sequence[Candidate], fleet: FleetState, rng: random.Random
    ) -> Ranking:
        """By rendezvous weight, workers over the bound last."""
        num_requests = sum(candidate.load.num_requests for candidate in candidates) + 1
        bound = math.ceil(self.load_bound * num_requests / len(candidates))
        weights = [
            xxh3_64_intdigest(request.prefix_hash + candidate.worker.encode()) / 2**64
            + (candidate.load.num_requests >= bound)
            for candidate in candidates
        ]
        return _by_cost(candidates, weights)


def _shuffled(candidates: Sequence[Candidate], rng: random.Random) -> list[Candidate]:
    """Candidates in drawn order that does not depend on the order given."""
    ordered = sorted(candidates, key=lambda candidate: candidate.worker)
    rng.shuffle(ordered)
    return ordered


def _by_cost(candidates: Sequence[Candidate], costs: Sequence[float] | None) -> Ranking:
    """Candidates by cost, by number of requests where none is given; equal costs keep their order."""
    if costs is None:
        costs = [candidate.load.num_requests for candidate in candidates]
    scored = [
        Scored(candidate.worker, cost, candidate.matched_tokens)
        for candidate, cost in zip(candidates, costs, strict=True)
    ]
    return Ranking(tuple(sorted(scored, key=lambda one: one.cost)))
