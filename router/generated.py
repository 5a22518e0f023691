"""Traces that are made up, in Mooncake's format and from a seed: chats, system prompts, a flood of one-off prompts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType

from router.traces import MOONCAKE_TOKENS_PER_ID

RATE_PER_S = 3.0
"""Requests come as a Poisson process of this rate, about that of Mooncake's chats."""
_NUM_CHATS = 300
_MEAN_TURNS = 4
_NUM_SYSTEM_PROMPTS = 20
_FLOOD_SHARE = 0.1
"""Share of a flood's requests that begin with the one prompt that returns."""


@dataclass(slots=True)
class _Draws:
    """What a generator draws from, and the ids that it has not given yet."""

    rng: random.Random
    ids: Iterator[int] = field(default_factory=count)

    def fresh(self, number: int) -> list[int]:
        return [next(self.ids) for _ in range(number)]

    def tokens(self, median: int, sigma: float, longest: int) -> int:
        """A log-normal length."""
        return max(1, min(longest, round(median * math.exp(self.rng.gauss(0.0, sigma)))))


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request of a generated trace."""

    num_prompt_tokens: int
    ids: list[int]


def conversations(draws: _Draws) -> Iterator[_Asked]:
    """Chats whose turns repeat all that was said, after a system prompt that all of them share.

    Three hundred chats are open at a time, any of which goes on next; an ended one makes room for a new one. A chat
    starts with some 2,000 tokens of its own and gets some 900 more with each turn.
    """
    system_ids = draws.fresh(1)
    histories = [list(system_ids) for _ in range(_NUM_CHATS)]
    while True:
        chat = draws.rng.randrange(_NUM_CHATS)
        history = histories[chat]
        if len(history) > 1 and draws.rng.random() < 1 / _MEAN_TURNS:
            history = list(system_ids)
        is_new = len(history) == 1
        num_more_tokens = draws.tokens(2000, 1.0, 12_000) if is_new else draws.tokens(900, 0.7, 4000)
        num_prompt_tokens = len(history) * MOONCAKE_TOKENS_PER_ID + num_more_tokens
        if num_prompt_tokens > 16_000:
            histories[chat] = list(system_ids)
            continue
        ids = history + draws.fresh(-(-num_more_tokens // MOONCAKE_TOKENS_PER_ID))
        # What the next turn appends also fills up the last block, whose id is then another one.
        histories[chat] = ids[: num_prompt_tokens // MOONCAKE_TOKENS_PER_ID]
        yield _Asked(num_prompt_tokens, ids)


def system_prompts(draws: _Draws) -> Iterator[_Asked]:
    """Twenty system prompts of 1,024 to 2,048 tokens with Zipf popularity, each request with a tail of its own."""
    prompts = [draws.fresh(2 + place % 3) for place in range(_NUM_SYSTEM_PROMPTS)]
    weights = [1 / (rank + 1) for rank in range(_NUM_SYSTEM_PROMPTS)]
    while True:
        (prompt,) = draws.rng.choices(prompts, weights)
        yield _with_tail(draws, prompt, draws.tokens(500, 0.6, 2000))


def flood(draws: _Draws) -> Iterator[_Asked]:
    """One-off prompts of some 4,000 tokens, among which one prompt of 4,096 tokens returns in one of ten requests."""
    returning = draws.fresh(8)
    while True:
        is_returning = draws.rng.random() < _FLOOD_SHARE
        yield _with_tail(
            draws, returning if is_returning else [], draws.tokens(500 if is_returning else 4000, 0.5, 12_000)
        )


GENERATORS: Mapping[str, Callable[[_Draws], Iterator[_Asked]]] = MappingProxyType(
    {"conversations": conversations, "system_prompts": system_prompts, "flood": flood}
)
"""Name to what makes up its requests. All of them are endless."""


def generated_lines(name: str, seed: int) -> Iterator[bytes]:
    """The lines of a made-up trace, without end; equal for equal name and seed."""
    draws = _Draws(random.Random(seed))
    at_ms = 0.0
    for asked in GENERATORS[name](draws):
        at_ms += 1e3 * draws.rng.expovariate(RATE_PER_S)
        line = {
            "timestamp": round(at_ms),
            "input_length": asked.num_prompt_tokens,
            "output_length": draws.tokens(200, 0.8, 1500),
            "hash_ids": asked.ids,
        }
        yield json.dumps(line).encode() + b"\n"


def _with_tail(draws: _Draws, ids: list[int], num_tail_tokens: int) -> _Asked:
    num_prompt_tokens = len(ids) * MOONCAKE_TOKENS_PER_ID + num_tail_tokens
    return _Asked(num_prompt_tokens, ids + draws.fresh(-(-num_tail_tokens // MOONCAKE_TOKENS_PER_ID)))
