"""The last decisions of a router, in words and numbers when somebody looks."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

from router.policies.base import Ranking
from router.requests import RequestTrace
from shared.types import RequestId

_MAX_DECISIONS = 256
_MAX_COSTS = 1 << 15
"""Costs of workers in all decisions that are kept: of a large fleet fewer decisions are."""
_SHOWN_CANDIDATES = 12


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one worker would have cost, as the policy counts it."""

    worker: str
    total: float | None
    """`None` where the worker was out of the question."""
    matched_tokens: int
    terms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision as people see it."""

    router: str
    number: int
    """Counts the decisions of one router."""
    decided_at: float
    """Wall clock, in seconds of the epoch."""
    request: str
    policy: str
    worker: str
    num_prompt_tokens: int
    matched_tokens: int
    cached_tokens: int | None
    """`None` before the first token, and where the engine does not tell."""
    is_cache_untold: bool
    """Whether the engine has ended the answer without telling."""
    possible_tokens: int
    waited_s: float
    ttft_s: float | None
    attempt: int
    why: str
    candidates: tuple[Candidate, ...]
    """The chosen one first, the others by cost."""
    num_more: int
    """Candidates that are left out here."""


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    decided_at: float
    request: RequestId
    num_prompt_tokens: int
    ranking: Ranking
    trace: RequestTrace
    attempt: int
    waited_s: float


class DecisionLog:
    """Owns a bounded ring of rankings and of what became of them. Renders none of them before somebody looks."""

    def __init__(self, router: str, policy: str) -> None:
        self._router = router
        self._policy = policy
        self._entries: deque[_Entry] = deque()
        self._num_costs = 0
        self.num_decisions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self, request: RequestId, num_prompt_tokens: int, ranking: Ranking, trace: RequestTrace, now_s: float
    ) -> None:
        """Keep a decision, and let the oldest go. Modifies."""
        self.num_decisions += 1
        self._num_costs += len(ranking.workers)
        self._entries.append(
            _Entry(
                self.num_decisions,
                time.time(),
                request,
                num_prompt_tokens,
                ranking,
                trace,
                trace.num_attempts,
                now_s - trace.received_at_s,
            )
        )
        while len(self._entries) > _MAX_DECISIONS or (self._num_costs > _MAX_COSTS and len(self._entries) > 1):
            self._num_costs -= len(self._entries.popleft().ranking.workers)

    def last(self, most: int) -> list[Decision]:
        """The newest ones, the newest first. Does not modify."""
        return [self._render(entry) for entry in islice(reversed(self._entries), most)]

    def _render(self, entry: _Entry) -> Decision:
        trace, ranking = entry.trace, entry.ranking
        candidates = candidates_of(ranking)
        return Decision(
            router=self._router,
            number=entry.number,
            decided_at=entry.decided_at,
            request=entry.request,
            policy=self._policy,
            worker=ranking.workers[ranking.best],
            num_prompt_tokens=entry.num_prompt_tokens,
            matched_tokens=int(ranking.matched_tokens[ranking.best]),
            cached_tokens=trace.cached_tokens if trace.first_token_at_s is not None else None,
            is_cache_untold=trace.cached_tokens is None and trace.finished_at_s is not None,
            possible_tokens=trace.possible_tokens,
            waited_s=entry.waited_s,
            ttft_s=trace.first_token_at_s - trace.received_at_s if trace.first_token_at_s is not None else None,
            attempt=entry.attempt,
            why=reason_of(candidates),
            candidates=candidates[:_SHOWN_CANDIDATES],
            num_more=max(0, len(candidates) - _SHOWN_CANDIDATES),
        )


def candidates_of(ranking: Ranking) -> tuple[Candidate, ...]:
    """All workers of a decision with their costs, the chosen one first."""
    return tuple(
        Candidate(
            worker=ranking.workers[column],
            total=_finite(float(ranking.total[column])),
            matched_tokens=int(ranking.matched_tokens[column]),
            terms={name: value for name, term in ranking.terms.items() if math.isfinite(value := float(term[column]))},
        )
        for column in ranking.columns
    )


def reason_of(candidates: tuple[Candidate, ...]) -> str:
    """Why the first of them won, against the second one."""
    best, *others = candidates
    rival = next((candidate for candidate in others if candidate.total is not None), None)
    if rival is None or best.total is None or rival.total is None:
        return f"{best.worker} was the only worker that could take it"
    margin = rival.total - best.total
    if margin <= 0.0:
        return f"{best.worker} and {rival.worker} cost the same: the tie was broken the same way as on every router"
    differences = {
        name: rival.terms.get(name, 0.0) - best.terms.get(name, 0.0) for name in {**best.terms, **rival.terms}
    }
    if not differences:
        return f"{best.worker} costs {margin:.3g} less than {rival.worker}"
    name = max(differences, key=lambda name: (differences[name], name))
    return (
        f"{best.worker} costs {margin:.3g} less than {rival.worker}, most of all by {name} ({differences[name]:+.3g})"
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
