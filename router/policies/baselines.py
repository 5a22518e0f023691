"""The policies to compare with. All bind early: a request is sent at once, to whatever queue its worker has."""

from __future__ import annotations

import random

import numpy as np

from router.policies.base import Costs, Flags, FleetState, Floats, Loads, Requests, rendezvous


class EarlyBinding:
    """What the baselines share: send at once, never reorder, know nothing of caches."""

    is_cache_aware = False
    is_late_binding = False

    def is_ready(self, loads: Loads, fleet: FleetState, age_s: Floats) -> Flags:
        """Always."""
        return np.ones(len(loads), dtype=np.bool_)

    def urgency(self, age_s: Floats, own_s: Floats, work_s: Floats, fleet: FleetState) -> Floats:
        """First come, first served."""
        return age_s


class RandomPolicy(EarlyBinding):
    """Any worker."""

    name = "random"

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """A draw for each."""
        return Costs(draw(requests, loads, rng))


class RoundRobinPolicy(EarlyBinding):
    """Each worker in turn, by id."""

    name = "round_robin"

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """How many turns away it is."""
        turns = (np.arange(len(loads)) - requests.ordinals[:, None]) % len(loads)
        return Costs(turns.astype(np.float64))


class LeastLoadPolicy(EarlyBinding):
    """The worker with the fewest requests."""

    name = "least_load"

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """Number of requests, ties drawn."""
        return Costs(loads.num_requests + draw(requests, loads, rng))


class PowerOfTwoPolicy(EarlyBinding):
    """The less loaded of two drawn workers (Mitzenmacher, 2001)."""

    name = "power_of_two"

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """Number of requests, ties drawn; who was not drawn comes after the two."""
        draws = draw(requests, loads, rng)
        is_drawn = draws <= np.partition(draws, 1, axis=1)[:, 1:2] if len(loads) > 2 else np.True_
        # Reversed, since what chose the two must not choose between them as well.
        by_load = loads.num_requests + (1.0 - draws)
        return Costs(np.where(is_drawn, by_load, by_load + by_load.max() + 1.0))


class PrefixHashPolicy(EarlyBinding):
    """Consistent hashing of the prompt's beginning with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018)."""

    name = "prefix_hash"
    load_bound = 1.25
    """A worker over this multiple of the mean load is passed over; the paper's 1 + c with c = 0.25."""

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """Rendezvous weights, workers over the bound last."""
        bound = np.ceil(self.load_bound * (loads.num_requests.sum() + 1) / len(loads))
        weights = rendezvous(requests.prefix_hashes[:, None], loads.hashes) / 2.0**64
        return Costs(weights + (loads.num_requests >= bound))


def draw(requests: Requests, loads: Loads, rng: random.Random) -> Floats:
    """(requests, workers): numbers in [0, 1) that depend on the generator alone."""
    num_draws = len(requests) * len(loads)
    return np.array([rng.random() for _ in range(num_draws)]).reshape(len(requests), len(loads))
