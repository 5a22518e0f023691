"""The rule of Ray Serve LLM's PrefixCacheAffinityRouter: the best match, the smallest tree, or the power of two."""

from __future__ import annotations

import random

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from router.policies.base import Costs, FleetState, Loads, Requests
from router.policies.baselines import EarlyBinding, draw
from router.policies.peers.picks import chosen_first, drawn_ties


@dataclass(frozen=True)
class RayPrefixPolicy(EarlyBinding):
    """Ray 2.60, ray/llm/_internal/serve/routing_policies/prefix_aware/prefix_aware_router.py.

    Where queues differ by more than a threshold, two workers are drawn; otherwise the choice is among those with the
    longest match, or, where that is too small a share of the prompt, among those with the smallest tree. The shortest
    queue of the choice wins, ties are drawn.

    Ray's tree holds all prompts that it ever sent to a worker, unless eviction is turned on; here the directory knows
    the match, and a worker's resident blocks are its tree.
    """

    name = "ray_prefix"
    is_cache_aware = True

    imbalanced_threshold: float = Field(float("inf"), ge=0)
    """Requests that the longest queue may exceed the shortest by before the cache is disregarded."""
    match_rate_threshold: float = Field(0.1, ge=0, le=1)
    """Share of the prompt that a match must reach."""

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """Requests on the workers to choose from, and more than any of those on others."""
        num_requests = loads.num_requests.astype(np.float64)
        if np.ptp(num_requests) > self.imbalanced_threshold:
            draws = draw(requests, loads, rng)
            is_choice = draws <= np.sort(draws, axis=1)[:, :2].max(axis=1, keepdims=True)
        else:
            longest = requests.matched_tokens.max(axis=1, keepdims=True)
            is_matched = longest >= self.match_rate_threshold * requests.num_prompt_tokens[:, None]
            is_smallest = loads.num_resident_blocks == loads.num_resident_blocks.min()
            is_choice = np.where(is_matched, requests.matched_tokens == longest, is_smallest)
        return Costs(chosen_first(is_choice, num_requests), drawn_ties(requests, rng))
