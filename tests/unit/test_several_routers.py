"""Several routers of one fleet: what they would all like to do at once, and what one that comes late knows."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.policies import make_policy
from router.simulation import Arrival, FleetResult, FleetSpec, simulate
from shared.hashing import pack_tokens
from shared.vtime import run_virtual
from tests.support.rack import ask, mirrored_rack, prompt

BURST = 32
BURST_AT_S = 3.0
"""By then every router has heard of the others."""


def burst(num_routers: int, lag_s: float, num_prompt_tokens: int) -> FleetResult:
    """Equal prompts that nobody holds, dealt to the routers all at once."""
    rng = random.Random(1)
    token_ids = pack_tokens([rng.randrange(30_000) for _ in range(num_prompt_tokens)])
    spec = FleetSpec(num_workers=16, profile="13b-a100", num_routers=num_routers, num_blocks=860, lag_s=lag_s)
    return simulate(spec, make_policy("cost"), [Arrival(BURST_AT_S, token_ids, 100)] * BURST)


def computing(result: FleetResult) -> set[str | None]:
    """Workers that computed the prompt rather than take it from their cache."""
    return {one.worker for one in result.outcomes if one.cached_tokens < one.num_prompt_tokens // 2}


@pytest.mark.parametrize("num_prompt_tokens", [2048, 4096, 8192])
@pytest.mark.parametrize(("num_routers", "lag_s"), [(1, 0.0), (1, 0.02), (2, 0.001), (4, 0.0), (4, 0.1)])
def test_a_cold_burst_of_one_prompt_is_computed_on_as_few_workers_as_the_load_bound_allows(
    num_routers: int, lag_s: float, num_prompt_tokens: int
) -> None:
    result = burst(num_routers, lag_s, num_prompt_tokens)
    assert {outcome.error for outcome in result.outcomes} == {None}
    # Twice the mean of two. All on one worker would start a fifth later and decode in steps that are four times longer.
    most = 2 * BURST // 16
    assert Counter(outcome.worker for outcome in result.outcomes).most_common(1)[0][1] <= most
    assert len(computing(result)) == BURST // most
    assert {outcome.worker for outcome in result.outcomes} == computing(result)


def test_a_router_that_starts_late_is_right_from_its_first_request() -> None:
    async def scenario() -> None:
        async with mirrored_rack(4, token_s=0.01, prefill_s_per_token=0.0002) as workers, workers.router() as early:
            holders = [(await ask(early, f"warm{number}", prompt(number, 320, 0)))[1].worker for number in range(8)]
            await workers.settle()
            async with workers.router() as late:
                assert late.fleet.num_routers == 2
                assert set(late.fleet.loads().workers) == set(workers.worker_to_slot)
                for number, holder in enumerate(holders):
                    _, trace = await ask(late, f"again{number}", prompt(number, 320, 1))
                    assert (trace.worker, trace.matched_tokens, trace.cached_tokens) == (holder, 320, 320)
                    assert (trace.num_attempts, trace.num_refusals) == (1, 0)

    run_virtual(scenario())
