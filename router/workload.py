"""What a replay asks of a fleet: which requests of a trace, cut to what length, arriving when.

Owns the arrivals' times and the bound on what any cache could serve of them. Simulates nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise

from router.batch_report import PossibleHits
from router.simulation import Arrival
from router.traces import TraceRequest
from shared.errors import ConfigError
from shared.hashing import block_keys, num_usable_blocks, root_key
from shared.types import CacheScheme


class Workload:
    """Requests with the times at which they arrive. Can be gone through any number of times; does not change.

    Prompts are unfolded one at a time: a trace of hashes takes little memory, however long its prompts are.
    """

    def __init__(self, requests: Sequence[TraceRequest], times_s: Sequence[float]) -> None:
        self._requests = requests
        self._times_s = times_s

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Arrival]:
        for request, at_s in zip(self._requests, self._times_s, strict=True):
            yield Arrival(
                at_s=at_s,
                token_ids=request.token_ids(),
                num_output_tokens=request.num_output_tokens,
                max_tokens=request.max_tokens,
                tenant=request.tenant,
                priority=request.priority,
                service_class=request.service_class,
            )

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self._requests)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self._times_s[-1] - self._times_s[0]

    @property
    def rate_per_s(self) -> float | None:
        """Mean rate of arrivals; None where all come at one time."""
        return _rate_per_s(self._times_s)

    def at_once(self, num_requests: int) -> Workload:
        """The first so many requests, all of them there at the beginning."""
        requests = self._requests[:num_requests]
        return Workload(requests, [0.0] * len(requests))

    def possible_cached_tokens(self, block_size_tokens: int) -> int:
        """Most prompt tokens that any order of these requests on one endless cache could be served from it.

        One pass; hashes every prompt. Blocks of answers are not counted.
        """
        root, possible = root_key(CacheScheme("replay", block_size_tokens)), PossibleHits()
        for request in self._requests:
            keys = block_keys(request.token_ids(), block_size_tokens, root)
            possible.add(keys, num_usable_blocks(request.num_prompt_tokens, block_size_tokens))
        return possible.num_blocks * block_size_tokens


def select(
    requests: Iterable[TraceRequest],
    name: str,
    *,
    num_blocks: int,
    block_size_tokens: int,
    skip: int = 0,
    limit: int | None = None,
    max_prompt_tokens: int | None = None,
) -> list[TraceRequest]:
    """Those of a trace that are replayed, with prompts cut to the longest that is asked for.

    Nothing after the last of them is read.

    Raises:
        ConfigError: none is left, or one needs more KV blocks than a worker has; `name` is the trace's.
    """
    chosen = []
    for request in islice(requests, skip, None if limit is None else skip + limit):
        if max_prompt_tokens is not None and request.num_prompt_tokens > max_prompt_tokens:
            request = replace(request, num_prompt_tokens=max_prompt_tokens)
        num_needed = -(-(request.num_prompt_tokens + request.num_output_tokens) // block_size_tokens)
        if num_needed > num_blocks:
            raise ConfigError(
                f"trace {name}: line {request.line}: {request.num_prompt_tokens} prompt tokens and "
                f"{request.num_output_tokens} of output need {num_needed} KV blocks of {block_size_tokens} tokens, but "
                f"no worker has more than {num_blocks}; --max-prompt-tokens cuts prompts, --cache-blocks gives room"
            )
        chosen.append(request)
    if not chosen:
        raise ConfigError(f"trace {name}: --skip {skip}: leaves no requests")
    return chosen


def arrival_times_s(
    requests: Sequence[TraceRequest], *, rate_per_s: float | None, is_spread: bool, rng: random.Random
) -> list[float]:
    """When each arrives, the first at 0 or soon after; `rng` is drawn from as the trace needs it.

    With a rate, the trace's times are stretched to it, and requests that all came at one time arrive at random (as a
    Poisson process). `is_spread` undoes rounding: requests of one time are drawn over the time until the next.
    """
    times_s = [request.at_s - requests[0].at_s for request in requests]
    if is_spread:
        times_s = _spread(times_s, rng)
    if rate_per_s is None:
        return times_s
    own_rate_per_s = _rate_per_s(times_s)
    if own_rate_per_s is None:
        at_s = 0.0
        return [at_s := at_s + rng.expovariate(rate_per_s) for _ in times_s]
    return [at_s * own_rate_per_s / rate_per_s for at_s in times_s]


def _rate_per_s(times_s: Sequence[float]) -> float | None:
    span_s = times_s[-1] - times_s[0]
    return (len(times_s) - 1) / span_s if span_s > 0 else None


def _spread(times_s: Sequence[float], rng: random.Random) -> list[float]:
    """The order stays, so that no turn of a chat comes before the one that it answers."""
    ticks_s = sorted(set(times_s))
    widths_s = [later - earlier for earlier, later in pairwise(ticks_s)]
    # After the last time nothing tells how long it stood for.
    widths_s.append(widths_s[-1] if widths_s else 0.0)
    spread_s: list[float] = []
    start = 0
    for tick_s, width_s in zip(ticks_s, widths_s, strict=True):
        end = start
        while end < len(times_s) and times_s[end] == tick_s:
            end += 1
        spread_s += sorted(tick_s + rng.random() * width_s for _ in range(start, end))
        start = end
    return spread_s
