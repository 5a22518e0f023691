"""What a batch run adds up to: counts, times, and how much of its prompts a cache could have served at best."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from router.openai import Usage
from router.requests import RequestTrace
from shared.types import BlockKey, WorkerId

_MAX_SAMPLE = 1 << 16
_MAX_BLOCKS = 1 << 20
"""Distinct blocks that are counted one by one, at some 150 bytes each."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What a run did. Tokens and times are of rows answered in this run; those of earlier runs are `num_skipped`."""

    num_rows: int
    num_ok: int
    num_failed: int
    num_skipped: int
    """Rows that an earlier run had finished."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """As the engines counted them."""
    possible_cached_tokens: int
    """Most prompt tokens that any order of these prompts on one endless cache could have served from it."""
    wall_s: float
    ttft_p50_s: float | None
    """From the moment that the router had the request; `None` if no row gave a token."""
    ttft_p90_s: float | None
    bound_ttft_p50_s: float | None
    """From the moment that the request was sent to the worker that answered it."""
    bound_ttft_p90_s: float | None
    num_requests_by_worker: Mapping[WorkerId, int]
    is_interrupted: bool
    is_stopped_by_errors: bool = False
    """As many rows have failed as may."""

    @property
    def tokens_per_s(self) -> float:
        """Prompt and completion tokens over the run's time."""
        return (self.prompt_tokens + self.completion_tokens) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def rows_per_s(self) -> float:
        """Rows answered or failed over the run's time."""
        return (self.num_ok + self.num_failed) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that came from caches."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def status(self) -> str:
        """How the run ended: `completed`, `interrupted` or `too_many_errors`."""
        if self.is_interrupted:
            return "interrupted"
        return "too_many_errors" if self.is_stopped_by_errors else "completed"

    def as_summary(self) -> dict[str, Any]:
        """All of it for other programs."""
        figures = asdict(self)
        del figures["is_interrupted"], figures["is_stopped_by_errors"]
        rates = {name: getattr(self, name) for name in ("tokens_per_s", "rows_per_s", "cached_share")}
        return {"status": self.status, **figures, **rates}


class Tally:
    """Running sums of one run. What they take is bounded, whatever the number of rows and of distinct blocks."""

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._num_ok = 0
        self.num_failed = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._ttft_s = _Sample()
        self._bound_ttft_s = _Sample()
        self._num_requests_by_worker: Counter[WorkerId] = Counter()
        self._possible = PossibleHits()

    def answered(self, usage: Usage, trace: RequestTrace, keys: Sequence[BlockKey], num_usable: int) -> None:
        """Count one answer to a prompt of these block keys, of which a cache can serve the first `num_usable`."""
        self._num_ok += 1
        self._prompt_tokens += usage.prompt_tokens
        self._completion_tokens += usage.completion_tokens
        self._cached_tokens += usage.cached_tokens
        self._possible.add(keys, num_usable)
        if trace.worker is not None:
            self._num_requests_by_worker[trace.worker] += 1
        if trace.first_token_at_s is not None:
            self._ttft_s.add(trace.first_token_at_s - trace.received_at_s)
            if trace.bound_at_s is not None:
                self._bound_ttft_s.add(trace.first_token_at_s - trace.bound_at_s)

    def failed(self) -> None:
        """Count one row that ended in an error."""
        self.num_failed += 1

    def report(
        self,
        *,
        num_rows: int,
        num_skipped: int,
        wall_s: float,
        is_interrupted: bool = False,
        is_stopped_by_errors: bool = False,
    ) -> BatchReport:
        """The sums so far. Does not modify anything."""
        return BatchReport(
            num_rows=num_rows,
            num_ok=self._num_ok,
            num_failed=self.num_failed,
            num_skipped=num_skipped,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
            possible_cached_tokens=self._possible.num_blocks * self._block_size_tokens,
            wall_s=wall_s,
            ttft_p50_s=quantile(self._ttft_s.values, 0.5),
            ttft_p90_s=quantile(self._ttft_s.values, 0.9),
            bound_ttft_p50_s=quantile(self._bound_ttft_s.values, 0.5),
            bound_ttft_p90_s=quantile(self._bound_ttft_s.values, 0.9),
            num_requests_by_worker=dict(self._num_requests_by_worker),
            is_interrupted=is_interrupted,
            is_stopped_by_errors=is_stopped_by_errors,
        )


class _Sample:
    """Values that stand for many: all of them while they are few, then every second, every fourth and so on."""

    def __init__(self) -> None:
        self.values = array("d")
        self._stride = 1
        self._num_seen = 0

    def add(self, value: float) -> None:
        if self._num_seen % self._stride == 0:
            self.values.append(value)
            if len(self.values) > _MAX_SAMPLE:
                del self.values[1::2]
                self._stride *= 2
        self._num_seen += 1


class PossibleHits:
    """The most block hits that a set of prompts allows, over every order and with a cache that forgets nothing.

    A block that u prompts can use hits u times if some other prompt stores it without being able to use it (its last
    full block, where the prompt ends on a block boundary), else u - 1 times: the first has to compute it. Prompts
    taken shortest first reach this for all blocks at once. Blocks of answers are not counted.

    Over `max_blocks` distinct blocks the count is an estimate, from every second of them, every fourth and so on.
    """

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        # Twice the number of prompts that can use a block, plus one if some prompt only stores it.
        self._uses: dict[BlockKey, int] = {}
        # Keys are hashes: those whose last bits are zero are as good a choice as any.
        self._num_zero_bits = 0

    def add(self, keys: Sequence[BlockKey], num_usable: int) -> None:
        """Count one prompt: it stores all of `keys` and can use the first `num_usable`. Modifies the counts."""
        usable, stored = keys[:num_usable], keys[num_usable:]
        if self._num_zero_bits:
            usable, stored = list(filter(self._is_counted, usable)), list(filter(self._is_counted, stored))
        for key in usable:
            self._uses[key] = self._uses.get(key, 0) + 2
        for key in stored:
            self._uses[key] = self._uses.get(key, 0) | 1
        while len(self._uses) > self._max_blocks:
            self._num_zero_bits += 1
            self._uses = {key: uses for key, uses in self._uses.items() if self._is_counted(key)}

    def _is_counted(self, key: BlockKey) -> bool:
        return not int.from_bytes(key[-4:]) & (1 << self._num_zero_bits) - 1

    @property
    def num_blocks(self) -> int:
        """The bound so far, in blocks. Linear in distinct blocks."""
        return sum(max(0, uses // 2 - 1 + uses % 2) for uses in self._uses.values()) << self._num_zero_bits


def quantile(values: Iterable[float], share: float) -> float | None:
    """The least value that at least `share` of all values do not exceed; `None` without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
