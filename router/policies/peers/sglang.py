"""The `cache_aware` rule of SGLang's and vLLM's routers: the best match where loads are even, else the least load."""

from __future__ import annotations

import random

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from router.policies.base import Costs, FleetState, Loads, Requests
from router.policies.baselines import EarlyBinding
from router.policies.peers.picks import chosen_first, drawn_ties


@dataclass(frozen=True)
class SglangPolicy(EarlyBinding):
    """SGLang's sgl-model-gateway/src/policies/cache_aware.rs (b93974f), and the like in vllm-project/router (16917f4).

    Loads are uneven when both balance thresholds are exceeded; then the fewest requests win. Otherwise the worker with
    the longest match wins, or, where that is too small a share of the prompt, again the fewest requests (the smallest
    tree, in the older sgl-router). Defaults are those of the command line.

    The routers guess what is cached from their own tree of past requests, and take any of several equal matches; here
    the directory knows it, and of equal matches the one with the fewest requests wins.
    """

    name = "sglang"
    is_cache_aware = True

    cache_threshold: float = Field(0.3, ge=0, le=1)
    """Share of the prompt that a match must exceed."""
    balance_abs_threshold: int = Field(64, ge=0)
    """What the most requests of a worker exceed the fewest by when loads are uneven."""
    balance_rel_threshold: float = Field(1.5, ge=1, allow_inf_nan=False)
    """Multiple of the fewest that the most exceed as well."""

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """Requests on the workers to choose from, and more than any of those on others."""
        num_requests = loads.num_requests.astype(np.float64)
        fewest, most = num_requests.min(), num_requests.max()
        is_uneven = most - fewest > self.balance_abs_threshold and most > self.balance_rel_threshold * fewest
        longest = requests.matched_tokens.max(axis=1, keepdims=True)
        is_matched = (longest > self.cache_threshold * requests.num_prompt_tokens[:, None]) & (not is_uneven)
        is_choice = (requests.matched_tokens == longest) | ~is_matched
        return Costs(chosen_first(is_choice, num_requests), drawn_ties(requests, rng))
