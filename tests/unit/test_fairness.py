"""Tenants and classes before a whole simulated fleet: who is not slowed down by whom."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean

import pytest

from router.policies import make_policy
from router.simulation import Arrival, FleetSpec, simulate
from shared.hashing import pack_tokens
from worker.engines.profiles import LatencyProfile

PROFILE = LatencyProfile(
    "small", 0.01, 1e-4, 1e-9, 1e-5, 1e-8, step_budget_tokens=512, max_num_seqs=16, kv_capacity_tokens=16384
)
SPEC = FleetSpec(num_workers=4, profile=PROFILE)


def requests(tenant: str, count: int, every_s: float, seed: int) -> Iterator[Arrival]:
    rng = random.Random(seed)
    for number in range(count):
        tokens = [rng.randrange(30_000) for _ in range(1000)]
        yield Arrival(number * every_s, pack_tokens(tokens), num_output_tokens=20, tenant=tenant)


def ttfts_s(spec: FleetSpec, policy: str, *streams: Iterator[Arrival]) -> dict[str, list[float]]:
    """Times to first token by tenant."""
    arrivals = sorted((arrival for stream in streams for arrival in stream), key=lambda arrival: arrival.at_s)
    result = simulate(spec, make_policy(policy), arrivals)
    assert {outcome.error for outcome in result.outcomes} == {None}
    found: dict[str, list[float]] = {}
    for arrival, outcome in zip(arrivals, result.outcomes, strict=True):
        assert outcome.first_token_at_s is not None
        found.setdefault(arrival.tenant, []).append(outcome.first_token_at_s - outcome.arrived_at_s)
    return found


@pytest.mark.parametrize("num_routers", [1, 3])
def test_flood_of_one_tenant_does_not_hold_up_another(num_routers: int) -> None:
    spec = replace(SPEC, num_routers=num_routers)
    alone = ttfts_s(spec, "cost", requests("small", 12, 0.5, seed=1))["small"]
    shared = ttfts_s(spec, "cost", requests("flood", 300, 0.0, seed=2), requests("small", 12, 0.5, seed=1))
    unnamed = ttfts_s(spec, "cost", requests("small", 300, 0.0, seed=2), requests("small", 12, 0.5, seed=1))["small"]
    # One prefill that has begun at each worker, and whoever else's turn it is there; of several routers, those of the
    # other routers as well.
    assert mean(shared["small"]) < (2.5 if num_routers == 1 else 10.0) * mean(alone)
    # What its tenant's name spares it.
    assert mean(shared["small"]) < (0.15 if num_routers == 1 else 0.3) * mean(unnamed)
    assert mean(shared["flood"]) < 1.1 * mean(unnamed)


@pytest.mark.parametrize("num_routers", [1, 3])
def test_tenants_that_flood_alike_are_served_alike(num_routers: int) -> None:
    # Each router shares out what it sends; they agree as far as each gets as much of every tenant as the others do.
    spec = replace(SPEC, num_routers=num_routers)
    shared = ttfts_s(spec, "cost", *(requests(name, 150, 0.0, seed) for seed, name in enumerate("abc")))
    means_s = [mean(waits_s) for waits_s in shared.values()]
    assert max(means_s) < 1.1 * min(means_s)


def test_names_of_tenants_change_nothing_where_there_is_one() -> None:
    spec = replace(SPEC, num_routers=2, lag_s=0.003)
    one, other = (
        simulate(spec, make_policy("cost"), list(requests(name, 200, 0.005, seed=3))) for name in ("", "somebody")
    )
    assert one == other
