"""How values are spread: counts by size, fine enough for percentiles, and the buckets that Prometheus is told."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence

_GROWTH = 1.15
"""Of the finer bounds between buckets: a percentile is off by a seventh at most."""
_BELOW = 100.0
"""How far the finer bounds go below the lowest bucket: a fast engine's tokens are all in that one."""


class Distribution:
    """Counts values; to count one takes a search among some hundred bounds and keeps nothing of the value.

    `buckets` are exact, as their readers expect. `is_fine` puts a geometric grid between positive ones, from which
    percentiles are read.
    """

    def __init__(self, buckets: Sequence[float], *, is_fine: bool = True) -> None:
        self.buckets = tuple(buckets)
        grid = _grid(self.buckets[0] / _BELOW, self.buckets[-1]) if is_fine else []
        self.bounds = tuple(sorted({*self.buckets, *grid}))
        self.counts = [0] * (len(self.bounds) + 1)
        """By bound that a value is not over; the last one's are over all."""
        self.total = 0.0

    def note(self, value: float, times: int = 1) -> None:
        """Count a value. Modifies."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Bucket and number of values up to it, as a Prometheus histogram has them."""
        sums = list(itertools.accumulate(self.counts))
        places = [bisect_left(self.bounds, bucket) for bucket in self.buckets]
        told = [(str(float(bucket)), float(sums[place])) for bucket, place in zip(self.buckets, places, strict=True)]
        return [*told, ("+Inf", float(sums[-1]))]

    def quantile(self, share: float, counts: Sequence[int]) -> float | None:
        """The value that `share` of `counts` are not over, interpolated; `None` where nothing is counted.

        `counts` are as those of this distribution, or the difference between those of two moments. What is over all
        bounds counts as the last of them.
        """
        num_values = sum(counts)
        if not num_values:
            return None
        rank, num_below = share * num_values, 0
        for place, count in enumerate(counts):
            if count and num_below + count >= rank:
                if place == len(self.bounds):
                    break
                upper = self.bounds[place]
                lower = self.bounds[place - 1] if place else min(0.0, upper)
                return lower + (upper - lower) * max(rank - num_below, 0.0) / count
            num_below += count
        return self.bounds[-1]


def _grid(lowest: float, highest: float) -> list[float]:
    if lowest <= 0.0:
        raise ValueError(f"a fine grid needs positive buckets, and the lowest is {lowest}")
    return [lowest * _GROWTH**step for step in range(1, int(math.log(highest / lowest) / math.log(_GROWTH)) + 1)]
