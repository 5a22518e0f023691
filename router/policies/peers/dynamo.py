"""The rule of NVIDIA Dynamo's KV router: prefill still to do plus blocks in use, the least sum wins."""

from __future__ import annotations

import random
from typing import Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from router.policies.base import Costs, Flags, FleetState, Floats, Loads, Requests
from router.policies.baselines import draw
from router.policies.peers.picks import drawn_ties


@dataclass(frozen=True)
class DynamoPolicy:
    """Dynamo's docs/components/router/router-concepts.md (03037af) and router-configuration.md (057096c), and the
    selector, queue and policy in its lib/kv-router/src/scheduling (01690d4).

        cost = prefill_load_scale * max(0, prefill blocks - credit * overlap blocks) + decode blocks

    Prefill blocks are those of all prompts on the worker that have no first token, with the whole of the new one;
    decode blocks are those that its requests will hold, with the new one. Ties are drawn. Left out are the knobs for
    caches outside the GPU, for prefill on other workers, and for workers that tell nothing of their caches.

    Dynamo knows which of a prompt's blocks live requests hold; here all resident ones count as held. It counts no
    blocks of answers; here their expected length counts.
    """

    name = "dynamo"
    is_cache_aware = True

    overlap_score_credit: float = Field(1.0, ge=0, allow_inf_nan=False)
    """What a resident block takes off the prefill."""
    overlap_score_credit_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """How fast the credit falls with prefill that is queued beyond that of the least loaded worker."""
    prefill_load_scale: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Weight of prefill against decode; called `overlap_score_weight` before."""
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Of a softmax over costs that are scaled to 0..1; at 0 the least cost wins."""
    decode_active_request_weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Blocks that each request on a worker counts for besides its own."""
    track_prefill_tokens: bool = Field(True)
    """Whether prefill counts at all."""
    assume_kv_reuse: bool = Field(True)
    """Whether blocks that several requests hold count once among decode blocks."""
    selection_policy: Literal["linear", "lmetric"] = Field("linear")
    """`lmetric` multiplies prefill and decode blocks in place of adding them."""
    queue_threshold: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Requests are held while all workers have more prefill queued than this many steps take; `None`: never."""
    queue_policy: Literal["fcfs", "wspt"] = Field("fcfs")
    """Order of held requests: the oldest first, or that with the least to compute."""

    @property
    def is_late_binding(self) -> bool:
        """Only with a threshold."""
        return self.queue_threshold is not None

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """Costs in blocks, for `lmetric` in blocks squared; with a temperature, places in a draw."""
        prefill_blocks, decode_blocks = self._blocks(requests, loads, fleet)
        if self.selection_policy == "lmetric":
            cost = prefill_blocks * (decode_blocks + 1.0)
        else:
            per_request = self.decode_active_request_weight * loads.num_requests
            cost = self.prefill_load_scale * prefill_blocks + decode_blocks + per_request
        terms = {"blocks": cost, "prefill_blocks": prefill_blocks, "decode_blocks": decode_blocks}
        can_send = np.broadcast_to(self.is_ready(loads, fleet, requests.age_s[:, None]), cost.shape)
        if self.temperature == 0.0:
            return Costs(cost, drawn_ties(requests, rng), can_send, terms=terms)
        least, most = cost.min(axis=1, keepdims=True), cost.max(axis=1, keepdims=True)
        scaled = (cost - least) / np.where(most > least, most - least, 1.0)
        # The least of these is a draw from the softmax, the next one a draw from the rest, and so on (Gumbel, 1954).
        gumbel = -np.log(-np.log(np.maximum(draw(requests, loads, rng), np.finfo(np.float64).tiny)))
        return Costs(scaled / self.temperature - gumbel, can_send=can_send, terms=terms)

    def is_ready(self, loads: Loads, fleet: FleetState, age_s: Floats) -> Flags:
        """All at once: a request that leaves the queue goes wherever it costs least."""
        threshold = np.inf if self.queue_threshold is None else self.queue_threshold
        is_below = loads.queued_prefill_tokens <= threshold * np.maximum(1, loads.step_budget_tokens)
        return np.full(len(loads), is_below.any())

    def urgency(self, age_s: Floats, own_s: Floats, work_s: Floats, fleet: FleetState) -> Floats:
        """As `queue_policy` says."""
        return age_s if self.queue_policy == "fcfs" else 1.0 / own_s

    def _blocks(self, requests: Requests, loads: Loads, fleet: FleetState) -> tuple[Floats, Floats]:
        """(requests, workers): prefill less what the cache is credited for, and what would be held with the request."""
        prompt_blocks = requests.num_prompt_tokens[:, None] / fleet.block_size_tokens
        overlap_blocks = requests.matched_tokens / fleet.block_size_tokens
        queued_blocks = loads.queued_prefill_tokens / fleet.block_size_tokens
        excess = (queued_blocks - queued_blocks.min()) / np.ceil(prompt_blocks)
        credit = self.overlap_score_credit / (1.0 + self.overlap_score_credit_decay * excess)
        raw_prefill_blocks = (queued_blocks + prompt_blocks) * self.track_prefill_tokens
        new_blocks = prompt_blocks - overlap_blocks * self.assume_kv_reuse
        return np.maximum(0.0, raw_prefill_blocks - credit * overlap_blocks), loads.kv_demand_blocks + new_blocks
