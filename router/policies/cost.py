"""The default policy: send a request where it will start soonest, and wait for that worker if it is busy.

Every term is a time measured on the worker itself, so a fleet ten times faster or slower decides the same. Peers push
each request at once into some worker's first-come queue; holding it until its best worker is about to have room is
what keeps caches warm under load, more than any refinement of the score.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from router.policies.base import Candidate, FleetState, Ranking, RankRequest, Scored

_OWN_PREFILL_WEIGHT = 1.5
"""Own prefill counts more than waiting, since it also delays whoever comes after."""
_FULLNESS_WEIGHT = 0.5
"""A worker full of sequences or blocks costs half a mean prompt: it decodes slower and evicts what others will want."""


class CostPolicy:
    """Least expected time to first token, with late binding."""

    name = "cost"
    is_cache_aware = True
    is_late_binding = True

    def rank(
        self, request: RankRequest, candidates: Sequence[Candidate], fleet: FleetState, rng: random.Random
    ) -> Ranking:
        """Workers by cost; ties by rendezvous hash, so that equal prompts agree on a worker before any holds them."""
        mean_queued_s = sum(candidate.load.queued_prefill_s for candidate in candidates) / len(candidates)
        pressure = (mean_queued_s + fleet.backlog_s / len(candidates)) / fleet.mean_full_s if fleet.mean_full_s else 0.0
        mean_requests = sum(candidate.load.num_requests for candidate in candidates) / len(candidates)
        ranked = sorted(
            ((self._score(request, candidate, fleet, pressure, mean_requests), candidate) for candidate in candidates),
            key=lambda pair: (pair[0].cost, _rendezvous(request.prefix_hash, pair[1])),
        )
        best = ranked[0][1].load
        # A worker that runs nothing takes anything: what it cannot hold it refuses by name; no wait would mend that.
        fits = best.num_requests == 0 or best.kv_used_blocks + request.demand_blocks <= best.kv_total_blocks
        # It would have nothing to prefill before another word from it could reach this router.
        runs_dry_soon = best.has_free_slot and best.queued_prefill_s < best.step_budget_s + best.status_age_s
        return Ranking(
            tuple(scored for scored, _ in ranked),
            can_send=runs_dry_soon and fits,
            lacks_blocks=runs_dry_soon and not fits,
        )

    def urgency(self, age_s: float, own_s: float, fleet: FleetState) -> float:
        """A response ratio with squared age: short or cached prompts first, nobody for ever."""
        return (age_s + fleet.mean_own_s) ** 2 / own_s

    def _score(
        self, request: RankRequest, candidate: Candidate, fleet: FleetState, pressure: float, mean_requests: float
    ) -> Scored:
        load = candidate.load
        fullness = max(load.kv_used_blocks / load.kv_total_blocks, load.num_requests / load.max_num_seqs)
        step_s = load.step_s + load.decode_s_per_seq * load.num_requests
        # More than its share makes every step longer, and a place of its own is left empty elsewhere.
        terms = {
            "queue_s": load.queued_prefill_s / (1.0 + pressure),
            "own_s": _OWN_PREFILL_WEIGHT * _own_prefill_s(request, candidate),
            "fullness_s": _FULLNESS_WEIGHT * fleet.mean_full_s * fullness,
            "decode_s": load.decode_s_per_seq * load.num_requests,
            "crowd_s": step_s * max(0.0, load.num_requests - mean_requests),
            "slot_s": _slot_s(candidate, fleet) / (1.0 + pressure),
        }
        return Scored(candidate.worker, sum(terms.values()), candidate.matched_tokens, terms)


def _own_prefill_s(request: RankRequest, candidate: Candidate) -> float:
    """Time to prefill what the candidate does not hold: at least one token, as in every engine."""
    num_tokens = max(1, request.num_prompt_tokens - candidate.matched_tokens)
    return num_tokens * candidate.load.prefill_s_per_token


def _slot_s(candidate: Candidate, fleet: FleetState) -> float:
    """Time until enough answers have ended on the candidate for this request to have a slot, those ahead of it first.

    Without it a request waits for the slots of a worker full of long answers while others stand idle.
    """
    load = candidate.load
    num_to_end = load.num_requests + candidate.num_ahead + 1 - load.max_num_seqs
    if num_to_end <= 0:
        return 0.0
    answer_s = fleet.mean_output_tokens * (load.step_s + load.decode_s_per_seq * load.max_num_seqs)
    return num_to_end * answer_s / load.max_num_seqs


def _rendezvous(prefix_hash: bytes, candidate: Candidate) -> int:
    """Highest-random-weight hashing (Thaler and Ravishankar, 1998), lowest first."""
    return xxh3_64_intdigest(prefix_hash + candidate.worker.encode())
