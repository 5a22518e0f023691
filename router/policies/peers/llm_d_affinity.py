"""The rule of llm-d's present guides: stay where nearly all is cached until that is too slow; then the least load."""

from __future__ import annotations

import random
from typing import Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from router.policies.base import Costs, Flags, FleetState, Floats, Loads, Requests
from router.policies.baselines import EarlyBinding
from router.policies.peers.llm_d import resident_share
from router.policies.peers.picks import chosen_first, drawn_ties


@dataclass(frozen=True)
class LlmDAffinityPolicy(EarlyBinding):
    """llm-d's guides "Optimized baseline" and "Precise prefix cache routing" (llm-d/llm-d, 8052f22), and the plugins of
    llm-d-router (066c20e) in them.

    `prefix-cache-affinity-filter` keeps the workers that hold a share of the prompt, unless the fastest of them would
    start so much later than the fastest other; then, and where none holds so much, all are kept. `token-load-scorer`
    takes the one with the fewest uncached tokens in flight, the new request's included; `active-request-scorer`, which
    is advised where decoding is the bottleneck, the one with the fewest requests. Ties are drawn. The guides have the
    throughput of prefill measured for each deployment; here it is, by default, that of each worker.
    """

    name = "llm_d_affinity"
    is_cache_aware = True

    affinity_threshold: float = Field(0.8, ge=0, le=1)
    """Resident share of the prompt from which a worker is kept; at 0 all are."""
    exploration_probability: float = Field(0.0, ge=0, le=1)
    """How often all are kept regardless."""
    max_ttft_penalty_ms: float = Field(18_000.0, ge=0, allow_inf_nan=False)
    """How much later a holder may start; 0 for any time."""
    peak_prefill_throughput: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Tokens per second of every worker; `None` for what each has measured."""
    load_scorer: Literal["token_load", "active_request"] = Field("token_load")
    queue_threshold_tokens: int = Field(4_194_304, ge=1)
    """Tokens in flight from which workers count as equally loaded."""

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """Load of the workers that are kept, in tokens or requests, and more than that for others."""
        has_affinity = resident_share(requests, fleet) >= self.affinity_threshold
        tokens_per_s = self.peak_prefill_throughput or 1.0 / loads.prefill_s_per_token
        start_ms = np.asarray(1e3 * loads.queued_prefill_tokens / tokens_per_s, dtype=np.float64)
        is_too_slow = np.zeros((len(requests), 1), dtype=np.bool_)
        if self.max_ttft_penalty_ms:
            is_too_slow = _least(start_ms, has_affinity) > _least(start_ms, ~has_affinity) + self.max_ttft_penalty_ms
        is_explored = np.array([[rng.random() < self.exploration_probability] for _ in range(len(requests))])
        keeps_all = is_too_slow | is_explored | ~has_affinity.any(axis=1, keepdims=True)
        in_flight = np.minimum(loads.queued_prefill_tokens + requests.own_tokens, float(self.queue_threshold_tokens))
        load = in_flight if self.load_scorer == "token_load" else loads.num_requests.astype(np.float64)
        terms = {"tokens_in_flight": in_flight, "start_ms": start_ms}
        return Costs(chosen_first(has_affinity | keeps_all, load), drawn_ties(requests, rng), terms=terms)


def _least(costs: Floats, is_member: Flags) -> Floats:
    """(requests, 1): the least of the members' costs; infinite where there are none."""
    return np.asarray(np.where(is_member, costs, np.inf).min(axis=1, keepdims=True))
