"""The policy protocol: a pure, synchronous ranking of workers for one request.

A policy gets a frozen snapshot and returns the whole order with its costs, so that fall-back is the next item of the
answer and needs no second call. It keeps no state, reads no clock and draws randomness only from the generator that it
is given (the rule of NVIDIA Dynamo's scheduling folder: "selectors should be side-effect free").
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.types import Instance, WorkerId


@dataclass(frozen=True, slots=True)
class Load:
    """One live worker's load at one moment: its last status, and own sends that the status cannot know yet."""

    worker: WorkerId
    instance: Instance
    is_cache_aware: bool
    """Whether the worker computes our block keys; if not, nothing is ever matched on it."""
    num_requests: int
    """Running, waiting, and sent but not yet accounted for by the worker."""
    max_num_seqs: int
    queued_prefill_tokens: int
    """Uncached prompt tokens that the worker has accepted or been sent and has no first token for."""
    kv_used_blocks: int
    kv_total_blocks: int
    prefill_s_per_token: float
    step_s: float
    decode_s_per_seq: float
    step_budget_tokens: int
    status_age_s: float

    @property
    def queued_prefill_s(self) -> float:
        """Time until a request sent now would start its own prefill."""
        return self.queued_prefill_tokens * self.prefill_s_per_token

    @property
    def step_budget_s(self) -> float:
        """Time of one engine step that is full of prefill."""
        return self.step_s + self.step_budget_tokens * self.prefill_s_per_token

    @property
    def has_free_slot(self) -> bool:
        return self.num_requests < self.max_num_seqs


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that a request may go to."""

    load: Load
    matched_tokens: int
    """Leading prompt tokens resident on the worker or promised to it by a hint."""
    num_ahead: int = 0
    """More urgent requests that the router holds for this worker."""

    @property
    def worker(self) -> WorkerId:
        return self.load.worker


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What a policy may know of one request."""

    ordinal: int
    """Count of requests that this router took before this one."""
    num_prompt_tokens: int
    prefix_hash: bytes
    """Key of the prompt's first block, or of its tail where it has no full block: equal for equal beginnings."""
    demand_blocks: int
    """KV blocks that the request will need: its prompt and the running mean of output lengths."""


@dataclass(frozen=True, slots=True)
class FleetState:
    """Running means over the router's recent requests, and its own backlog. Times as this fleet measures them."""

    prefill_s_per_token: float = 0.0
    """Mean over the workers."""
    mean_full_s: float = 0.0
    """Prefill time of a whole prompt."""
    mean_own_s: float = 0.0
    """Prefill time of what no cache gave."""
    backlog_s: float = 0.0
    """Uncached prefill time of the requests that this router holds."""
    mean_output_tokens: float = 0.0
    """Length of an answer."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One worker's place in a ranking."""

    worker: WorkerId
    cost: float
    """Lower is better. Seconds for `cost`; the unit of a baseline is its own."""
    matched_tokens: int
    terms: Mapping[str, float] = field(default_factory=dict)
    """The numbers that make up `cost`, by name, for people."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """All candidates, best first."""

    order: tuple[Scored, ...]
    can_send: bool = True
    """Whether the best may be sent to now; if not, the request waits *for it* and is not sent elsewhere."""
    lacks_blocks: bool = False
    """Whether it waits only because the best has too few free blocks for it."""

    def explain(self) -> str:
        """The decision in one line, best worker first. Rendered only when somebody looks."""
        return "; ".join(
            f"{scored.worker}={scored.cost:.4g}"
            + "".join(f" {name}={value:.4g}" for name, value in scored.terms.items())
            + f" matched={scored.matched_tokens}"
            for scored in self.order
        )


class Policy(Protocol):
    """Ranks workers for a request."""

    name: str
    is_cache_aware: bool
    """Whether `matched_tokens` decides anything; if not, the directory is not asked."""
    is_late_binding: bool
    """Whether held requests are reordered by `urgency` and may wait for their worker."""

    def rank(
        self, request: RankRequest, candidates: Sequence[Candidate], fleet: FleetState, rng: random.Random
    ) -> Ranking:
        """A permutation of `candidates`, best first; equal for equal arguments, unaffected by their order but in ties.

        Does not modify anything. `candidates` is not empty.
        """
        ...

    def urgency(self, age_s: float, own_s: float, fleet: FleetState) -> float:
        """Which held request is looked at first: the highest. Early-binding policies never hold and are not asked.

        `own_s` is the time to prefill what the best worker does not hold, positive.
        """
        ...
