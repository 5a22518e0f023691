"""What a router does for each second of late: rates and percentiles over sliding windows of its metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shared.telemetry import Metrics

_INTERVAL_S = 1.0
_KEPT_S = 300.0


@dataclass(frozen=True, slots=True)
class Window:
    """Rates and percentiles of some seconds. `None` where nothing was counted that it could be told of."""

    ends_at_s: float
    """Seconds since the router began."""
    requests_per_s: float
    failures_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    cached_share: float | None
    """Of prompt tokens: what engines say that their caches gave."""
    matched_share: float | None
    """What the directory expected."""
    possible_share: float | None
    """What a cache of endless size would have given."""


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    num_ended: int
    num_failed: int
    num_output_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_matched_tokens: int
    num_possible_tokens: int
    ttft_counts: tuple[int, ...]
    itl_counts: tuple[int, ...]


class Rates:
    """Samples a router's counters about once a second, as they are counted up anyway; owns the samples of five minutes.

    There is no timer: whoever counts something calls `tick`, and so does whoever looks. Rates are over the exact times
    of the samples, so that it does not matter when these are taken.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self.began_at_s = clock()
        self._samples: deque[_Sample] = deque([self._sample(self.began_at_s)])

    def tick(self) -> None:
        """Take a sample where one is due. Modifies; costs next to nothing otherwise."""
        now = self._clock()
        if now - self._samples[-1].at_s >= _INTERVAL_S:
            self._samples.append(self._sample(now))
            while now - self._samples[0].at_s > _KEPT_S:
                self._samples.popleft()

    def window(self, length_s: float) -> Window:
        """The last seconds until now, or all there is if that is less."""
        now = self._sample(self._clock())
        first = self._samples[0]
        for sample in reversed(self._samples):
            first = sample
            if now.at_s - sample.at_s >= length_s:
                break
        return self._between(first, now)

    def history(self, length_s: float) -> list[Window]:
        """One window of `length_s` for each sample of the last five minutes, oldest first."""
        self.tick()
        samples = list(self._samples)
        windows, start = [], 0
        for end in range(1, len(samples)):
            while start + 1 < end and samples[end].at_s - samples[start + 1].at_s >= length_s:
                start += 1
            windows.append(self._between(samples[start], samples[end]))
        return windows

    def _sample(self, now_s: float) -> _Sample:
        metrics = self._metrics
        return _Sample(
            at_s=now_s,
            num_ended=metrics.num_ended,
            num_failed=metrics.failures.total(),
            num_output_tokens=metrics.num_output_tokens,
            num_prompt_tokens=metrics.num_prompt_tokens,
            num_cached_tokens=metrics.num_cached_tokens,
            num_matched_tokens=metrics.num_matched_tokens,
            num_possible_tokens=metrics.num_possible_tokens,
            ttft_counts=tuple(metrics.ttft_s.counts),
            itl_counts=tuple(metrics.itl_s.counts),
        )

    def _between(self, first: _Sample, last: _Sample) -> Window:
        length_s = max(last.at_s - first.at_s, 1e-9)
        num_prompt_tokens = last.num_prompt_tokens - first.num_prompt_tokens
        ttft = [after - before for before, after in zip(first.ttft_counts, last.ttft_counts, strict=True)]
        itl = [after - before for before, after in zip(first.itl_counts, last.itl_counts, strict=True)]

        def share(num_tokens: int) -> float | None:
            return num_tokens / num_prompt_tokens if num_prompt_tokens else None

        return Window(
            ends_at_s=last.at_s - self.began_at_s,
            requests_per_s=(last.num_ended - first.num_ended) / length_s,
            failures_per_s=(last.num_failed - first.num_failed) / length_s,
            output_tokens_per_s=(last.num_output_tokens - first.num_output_tokens) / length_s,
            prompt_tokens_per_s=num_prompt_tokens / length_s,
            ttft_p50_s=self._metrics.ttft_s.quantile(0.5, ttft),
            ttft_p95_s=self._metrics.ttft_s.quantile(0.95, ttft),
            itl_p50_s=self._metrics.itl_s.quantile(0.5, itl),
            itl_p95_s=self._metrics.itl_s.quantile(0.95, itl),
            cached_share=share(last.num_cached_tokens - first.num_cached_tokens),
            matched_share=share(last.num_matched_tokens - first.num_matched_tokens),
            possible_share=share(last.num_possible_tokens - first.num_possible_tokens),
        )
