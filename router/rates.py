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
    """Of prompt tokens: what engines say that their caches gave; those of engines that do not tell are left out."""
    matched_share: float | None
    """What the directory expected."""
    possible_share: float | None
    """What a cache of endless size would have given."""


@dataclass(frozen=True, slots=True)
class Span:
    """What one router counted between two moments."""

    ends_at_s: float
    """On the loop's clock, which is the same for all processes of a machine."""
    length_s: float
    num_ended: int
    num_failed: int
    num_output_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_told_tokens: int
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
        self._samples: deque[Span] = deque([self._sample(self.began_at_s)])
        """Each from the beginning to its own moment."""

    def tick(self) -> None:
        """Take a sample where one is due. Modifies; costs next to nothing otherwise."""
        now = self._clock()
        if now - self._samples[-1].ends_at_s >= _INTERVAL_S:
            self._samples.append(self._sample(now))
            while now - self._samples[0].ends_at_s > _KEPT_S:
                self._samples.popleft()

    def span(self, length_s: float) -> Span:
        """The last seconds until now, or all there is if that is less."""
        now = self._sample(self._clock())
        first = self._samples[0]
        for sample in reversed(self._samples):
            first = sample
            if now.ends_at_s - sample.ends_at_s >= length_s:
                break
        return _between(first, now)

    def spans(self, length_s: float) -> list[Span]:
        """One span of `length_s` for each sample of the last five minutes, oldest first."""
        self.tick()
        samples = list(self._samples)
        spans, start = [], 0
        for end in range(1, len(samples)):
            while start + 1 < end and samples[end].ends_at_s - samples[start + 1].ends_at_s >= length_s:
                start += 1
            spans.append(_between(samples[start], samples[end]))
        return spans

    def window(self, *spans: Span) -> Window:
        """The rates and percentiles of one span, or of those of several routers together, which end about together."""
        num_prompt_tokens = sum(span.num_prompt_tokens for span in spans)
        ttft = [sum(counts) for counts in zip(*(span.ttft_counts for span in spans), strict=True)]
        itl = [sum(counts) for counts in zip(*(span.itl_counts for span in spans), strict=True)]

        def rate(read: Callable[[Span], int]) -> float:
            return sum(read(span) / span.length_s for span in spans)

        def share(num_tokens: int, num_of: int) -> float | None:
            return num_tokens / num_of if num_of else None

        return Window(
            ends_at_s=spans[0].ends_at_s - self.began_at_s,
            requests_per_s=rate(lambda span: span.num_ended),
            failures_per_s=rate(lambda span: span.num_failed),
            output_tokens_per_s=rate(lambda span: span.num_output_tokens),
            prompt_tokens_per_s=rate(lambda span: span.num_prompt_tokens),
            ttft_p50_s=self._metrics.ttft_s.quantile(0.5, ttft),
            ttft_p95_s=self._metrics.ttft_s.quantile(0.95, ttft),
            itl_p50_s=self._metrics.itl_s.quantile(0.5, itl),
            itl_p95_s=self._metrics.itl_s.quantile(0.95, itl),
            cached_share=share(
                sum(span.num_cached_tokens for span in spans), sum(span.num_told_tokens for span in spans)
            ),
            matched_share=share(sum(span.num_matched_tokens for span in spans), num_prompt_tokens),
            possible_share=share(sum(span.num_possible_tokens for span in spans), num_prompt_tokens),
        )

    def _sample(self, now_s: float) -> Span:
        """All that has been counted from the beginning until now."""
        metrics = self._metrics
        return Span(
            ends_at_s=now_s,
            length_s=now_s - self.began_at_s,
            num_ended=metrics.num_ended,
            num_failed=metrics.failures.total(),
            num_output_tokens=metrics.num_output_tokens,
            num_prompt_tokens=metrics.num_prompt_tokens,
            num_cached_tokens=metrics.num_cached_tokens,
            num_told_tokens=metrics.num_told_tokens,
            num_matched_tokens=metrics.num_matched_tokens,
            num_possible_tokens=metrics.num_possible_tokens,
            ttft_counts=tuple(metrics.ttft_s.counts),
            itl_counts=tuple(metrics.itl_s.counts),
        )


def _between(first: Span, last: Span) -> Span:
    """What the longer of two spans that begin together has more."""
    return Span(
        ends_at_s=last.ends_at_s,
        length_s=max(last.ends_at_s - first.ends_at_s, 1e-9),
        num_ended=last.num_ended - first.num_ended,
        num_failed=last.num_failed - first.num_failed,
        num_output_tokens=last.num_output_tokens - first.num_output_tokens,
        num_prompt_tokens=last.num_prompt_tokens - first.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens - first.num_cached_tokens,
        num_told_tokens=last.num_told_tokens - first.num_told_tokens,
        num_matched_tokens=last.num_matched_tokens - first.num_matched_tokens,
        num_possible_tokens=last.num_possible_tokens - first.num_possible_tokens,
        ttft_counts=_difference(first.ttft_counts, last.ttft_counts),
        itl_counts=_difference(first.itl_counts, last.itl_counts),
    )


def _difference(first: tuple[int, ...], last: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([after - before for before, after in zip(first, last, strict=True)])
