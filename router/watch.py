"""What a router remembers of its recent past, for people: decisions, hot prefixes, rates, and who served what.

Hears of requests and decides nothing; everything that it keeps is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from router.decisions import DecisionLog
from router.policies.base import Ranking
from router.prefix_groups import PrefixGroups, SeenPrefixes
from router.rates import Rates
from router.requests import GenerateRequest, RequestTrace
from shared.hashing import num_usable_blocks
from shared.telemetry import Metrics
from shared.types import BlockKey, WorkerId

_MEMORY_S = 60.0
"""Of a worker's hit rate: what is older counts for less than a third."""


@dataclass(slots=True)
class WorkerTally:
    """What one worker has served of this router's requests."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_told_tokens: int = 0
    """Prompt tokens of those requests of which it has told what its cache gave."""
    num_cached_tokens: int = 0
    num_answered: int = 0
    """Of these requests, those that it answered to their end."""
    _late_prompt_tokens: float = 0.0
    _late_cached_tokens: float = 0.0
    _faded_at_s: float = 0.0

    def note(self, num_prompt_tokens: int) -> None:
        """Count a request that it has begun to answer. Modifies."""
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens

    def note_cache(self, num_prompt_tokens: int, num_cached_tokens: int, now_s: float) -> None:
        """Count what its cache gave of a request, once it has told that. Modifies."""
        kept = math.exp((self._faded_at_s - now_s) / _MEMORY_S)
        self.num_told_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens
        self._late_prompt_tokens = self._late_prompt_tokens * kept + num_prompt_tokens
        self._late_cached_tokens = self._late_cached_tokens * kept + num_cached_tokens
        self._faded_at_s = now_s

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that its cache gave of late; `None` before it has told of any."""
        return self._late_cached_tokens / self._late_prompt_tokens if self._late_prompt_tokens else None

    @property
    def recent_tokens(self) -> float:
        """The prompt tokens that the hit rate is of, those of long ago counting less."""
        return self._late_prompt_tokens


class Watch:
    """Takes note of every request of one router."""

    def __init__(
        self, router: str, metrics: Metrics, policy: str, clock: Callable[[], float], *, block_size_tokens: int
    ) -> None:
        self.metrics = metrics
        self.decisions = DecisionLog(router, policy)
        self.groups = PrefixGroups(clock)
        self.rates = Rates(metrics, clock)
        self.worker_to_tally: dict[WorkerId, WorkerTally] = {}
        self._seen = SeenPrefixes()
        self._policy = policy
        self._clock = clock
        self._block_size_tokens = block_size_tokens

    def note_decision(
        self, request: GenerateRequest, keys: Sequence[BlockKey], ranking: Ranking, trace: RequestTrace
    ) -> None:
        """A request is bound to a worker. Modifies this and what the trace tells of the possible."""
        # A refused submit is no attempt, and what it was weighed with has been seen by then.
        if len(trace.attempts) == 1:
            num_known = self._seen.add(keys)
            num_usable = num_usable_blocks(request.num_prompt_tokens, self._block_size_tokens)
            trace.possible_tokens = min(num_known, num_usable) * self._block_size_tokens
            self.groups.add(keys, num_known)
        self.decisions.add(request.request, request.num_prompt_tokens, ranking, trace, self._clock())

    def note_tokens(self, request: GenerateRequest, trace: RequestTrace, num_tokens: int) -> None:
        """Tokens of an answer are handed out. Modifies."""
        if not num_tokens:
            return
        now_s = self._clock()
        self.metrics.num_output_tokens += num_tokens
        if trace.last_token_at_s is not None:
            self.metrics.note_next_tokens(num_tokens, now_s - trace.last_token_at_s)
        elif trace.first_token_at_s is not None:
            self.metrics.note_first_token(request.num_prompt_tokens, trace)
            if trace.worker is not None:
                self.worker_to_tally.setdefault(trace.worker, WorkerTally()).note(request.num_prompt_tokens)
            self._note_cache(request, trace, now_s)
        trace.last_token_at_s = now_s
        self.rates.tick()

    def note_end(self, request: GenerateRequest, trace: RequestTrace, outcome: str) -> None:
        """A request has ended. Modifies."""
        self._note_cache(request, trace, self._clock())
        if trace.worker in self.worker_to_tally:
            self.worker_to_tally[trace.worker].num_answered += outcome == "ok"
        self.metrics.note_request(self._policy, outcome, trace)
        self.rates.tick()

    def _note_cache(self, request: GenerateRequest, trace: RequestTrace, now_s: float) -> None:
        """Count what the cache gave, as soon as that is told: with the first token, or with the last."""
        if trace.cached_tokens is None or trace.first_token_at_s is None or trace.is_cache_counted:
            return
        trace.is_cache_counted = True
        self.metrics.note_cache(request.num_prompt_tokens, trace.matched_tokens, trace.cached_tokens)
        if trace.worker is not None:
            tally = self.worker_to_tally.setdefault(trace.worker, WorkerTally())
            tally.note_cache(request.num_prompt_tokens, trace.cached_tokens, now_s)

    def keep_only(self, workers: Collection[WorkerId]) -> None:
        """Forget who is not among them. Modifies."""
        for worker in self.worker_to_tally.keys() - workers:
            del self.worker_to_tally[worker]
