"""The rule of llm-d's inference scheduler with weighted scorers: the highest sum of scores wins."""

from __future__ import annotations

import random

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from router.policies.base import Costs, FleetState, Floats, Loads, Requests
from router.policies.baselines import EarlyBinding
from router.policies.peers.picks import drawn_ties


@dataclass(frozen=True)
class LlmDPolicy(EarlyBinding):
    """llm-d's guide "Precise prefix cache routing" (llm-d/llm-d, 076e65d), and the scorers of llm-d-router in it.

    Each scorer gives 0 to 1: the resident share of the prompt; the waiting requests, the fewest of all workers 1 and
    the most 0; the share of the KV cache that is free. `load_aware` and `active_request` are further scorers of the
    router, which the guide does not weigh: one half less waiting requests over twice a threshold; and requests, none
    of them 1 and the most 0. Ties are drawn. Left out is the guide's `no-hit-lru-scorer`, which keeps a history.
    """

    name = "llm_d"
    is_cache_aware = True

    prefix_weight: float = Field(3.0, ge=0, allow_inf_nan=False)
    queue_weight: float = Field(2.0, ge=0, allow_inf_nan=False)
    kv_utilization_weight: float = Field(2.0, ge=0, allow_inf_nan=False)
    load_aware_weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    load_aware_threshold: int = Field(128, ge=1)
    """Waiting requests from which a worker scores 0."""
    active_request_weight: float = Field(0.0, ge=0, allow_inf_nan=False)

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """The negated weighted sum of scores."""
        waiting = loads.num_waiting.astype(np.float64)
        most_waiting, range_waiting = waiting.max(), np.ptp(waiting)
        most_requests = loads.num_requests.max()
        queue = (most_waiting - waiting) / range_waiting if range_waiting else np.ones(len(loads))
        active = (most_requests - loads.num_requests) / most_requests if most_requests else np.ones(len(loads))
        load_aware = 0.5 * (1.0 - np.minimum(1.0, waiting / self.load_aware_threshold))
        scores = {
            "prefix": self.prefix_weight * resident_share(requests, fleet),
            "queue": self.queue_weight * queue,
            "kv_utilization": self.kv_utilization_weight * (1.0 - loads.kv_used_blocks / loads.kv_total_blocks),
            "load_aware": self.load_aware_weight * load_aware,
            "active_request": self.active_request_weight * active,
        }
        total = np.zeros(requests.matched_tokens.shape)
        for score in scores.values():
            total -= score
        return Costs(total, drawn_ties(requests, rng), terms=scores)


def resident_share(requests: Requests, fleet: FleetState) -> Floats:
    """(requests, workers): resident blocks of each prompt's full ones; 0 for a prompt that has none."""
    full_blocks = (requests.num_prompt_tokens // fleet.block_size_tokens)[:, None]
    return np.asarray(requests.matched_tokens / fleet.block_size_tokens / np.maximum(1, full_blocks), dtype=np.float64)
