"""Puts the rows of a batch into groups that share a beginning, and divides a group where a helper ends it sooner.

Owns what a plan knows of rows. Knows no worker, no clock and no file.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from router.policies.base import Floats, Ints
from shared.hashing import KEY_SIZE_BYTES
from shared.types import BlockKey

Item = TypeVar("Item")
Quantity = TypeVar("Quantity", float, Floats)
"""One number, or one for each of several."""

_LINK_BYTES = 4
"""What a chain keeps of each key: keys name all blocks before them, so that two of one chain's length rarely meet, and
where they do a beginning is computed once more."""
_GROUPS_PER_SEAT = 16
"""Rows that share little are dealt in so many portions: few enough to be cheap, small enough to end together."""
_CHEAP_SHARE = 0.02
"""What a worker may spend, of the work of a portion, to compute once more what another one holds."""

Urgency = tuple[int, int]
"""Priority, then how soon it is due: lower goes first, whatever it shares with others."""

_NO_DEADLINE = 1 << 10


def urgency_of(priority: int, deadline_s: float | None) -> Urgency:
    """Rows that are due at about the same time go together, so that they are computed together if they share much."""
    return priority, _NO_DEADLINE if deadline_s is None else math.frexp(deadline_s)[1]


@dataclass(frozen=True, slots=True)
class Pace:
    """What rows take of a worker's time, by the fleet's means. Without measurements only the ratio counts."""

    prefill_s_per_token: float = 1.0
    answer_s: float = 0.0
    """Of one answer, beside which others are made."""
    answer_tokens: float = 0.0
    answer_s_per_prompt_token: float = 0.0
    """What an answer takes more for each token of its prompt, since every step reads all of them."""

    def __post_init__(self) -> None:
        if self.prefill_s_per_token <= 0.0:
            # A fleet that has computed nothing tells nothing: rows weigh by their tokens.
            object.__setattr__(self, "prefill_s_per_token", 1.0)
            object.__setattr__(self, "answer_s", 0.0)
            object.__setattr__(self, "answer_s_per_prompt_token", 0.0)

    def work_s(self, own_tokens: Quantity, num_rows: Quantity, prompt_tokens: Quantity) -> Quantity:
        """Of rows that compute so many tokens of their own and see so many."""
        return (
            own_tokens * self.prefill_s_per_token
            + num_rows * self.answer_s
            + prompt_tokens * self.answer_s_per_prompt_token
        )


def chain_of(keys: Sequence[BlockKey]) -> bytes:
    """A prompt's blocks in short: prompts of one beginning have chains of one beginning."""
    return np.frombuffer(b"".join(keys), "<u4")[:: KEY_SIZE_BYTES // _LINK_BYTES].tobytes()


def beginning(chain: bytes, num_blocks: int) -> bytes:
    """The chain of a prompt's first blocks."""
    return chain[: num_blocks * _LINK_BYTES]


def num_shared_blocks(chain: bytes, other: bytes) -> int:
    """How many leading blocks two prompts share."""
    most = min(len(chain), len(other)) // _LINK_BYTES
    if chain[: most * _LINK_BYTES] == other[: most * _LINK_BYTES]:
        return most
    # The first `low` are equal, the first `most` are not.
    low = 0
    while most - low > 1:
        middle = (low + most) // 2
        if chain[low * _LINK_BYTES : middle * _LINK_BYTES] == other[low * _LINK_BYTES : middle * _LINK_BYTES]:
            low = middle
        else:
            most = middle
    return low


def best_cut(left_s: Floats, copy_s: Floats) -> int | None:
    """Where to divide what is left of a group between its worker and a helper; `None` where that ends nothing sooner.

    `left_s[i]` is the work of the rows from `i` on, zero behind the last; `copy_s[i]` is what a helper that begins with
    row `i` computes although the group's worker holds it. Both end at the same time at best, and the copy is work that
    somebody else's rows wait for: a cut is worth it if the later end and the copy together come before the end of the
    group as it is.
    """
    if len(copy_s) < 2:
        return None
    whole_s = left_s[0]
    ends_s = np.maximum(whole_s - left_s[1:-1], left_s[1:-1] + copy_s[1:]) + copy_s[1:]
    cut = int(ends_s.argmin())
    return cut + 1 if ends_s[cut] < whole_s else None


def group_starts(num_shared: Ints, left_s: Floats, *, grain_s: float, block_s: float) -> list[int]:
    """Where groups begin among rows in an order that keeps those of one beginning together.

    `num_shared[i]` is what row `i` shares with the row before it, and `left_s` is as in `best_cut`. Rows are kept
    together as long as their work is small; more are divided where they share least, and only if what they share is
    cheap to compute on another worker: the rest is divided on demand.
    """
    starts: list[int] = []
    todo = [(0, len(num_shared))]
    while todo:
        start, end = todo.pop()
        inner = num_shared[start + 1 : end]
        if not len(inner) or left_s[start] - left_s[end] <= grain_s:
            starts.append(start)
            continue
        depth = inner.min()
        if depth * block_s > _CHEAP_SHARE * grain_s:
            starts.append(start)
            continue
        borders = [start, *(start + 1 + (inner == depth).nonzero()[0]).tolist(), end]
        todo += reversed(list(_portions(borders, left_s, grain_s)))
    return starts


def _portions(borders: Sequence[int], left_s: Floats, grain_s: float) -> Iterator[tuple[int, int]]:
    """Neighbours together as long as they are small together."""
    left = left_s[borders].tolist()
    start = 0
    for index in range(1, len(borders) - 1):
        if left[start] - left[index + 1] > grain_s:
            yield borders[start], borders[index]
            start = index
    yield borders[start], borders[-1]


class Draft(Generic[Item]):
    """Rows that are gathered to be planned together."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.chains: list[bytes] = []
        self.urgencies: list[Urgency] = []
        self.num_tokens = array("q")

    def __len__(self) -> int:
        return len(self.items)

    def add(self, item: Item, chain: bytes, num_tokens: int, urgency: Urgency = (0, 0)) -> None:
        """Gather a row with so many prompt tokens. Modifies."""
        self.items.append(item)
        self.chains.append(chain)
        self.num_tokens.append(num_tokens)
        self.urgencies.append(urgency)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan(Generic[Item]):
    """Rows in their planned order. Nobody writes to it."""

    items: Sequence[Item]
    chains: Sequence[bytes]
    num_shared: Ints
    """Blocks that each row shares with the row before it."""
    left_tokens: Ints
    """Prompt tokens of each row and all after it, those left out that it shares with the row before it."""
    left_context_tokens: Ints
    """The same, with none left out."""
    block_size_tokens: int

    def left_s(self, start: int, end: int, pace: Pace) -> Floats:
        """Work of these rows, from each to the end."""
        rows: Floats = np.arange(end - start, -1, -1).astype(float)
        return pace.work_s(_sums(self.left_tokens, start, end), rows, _sums(self.left_context_tokens, start, end))


def _sums(left: Ints, start: int, end: int) -> Floats:
    """Of what `left` counts, from each place to the end."""
    sums: Floats = (left[start : end + 1] - left[end]).astype(float)
    return sums


@dataclass(slots=True, eq=False)
class Group(Generic[Item]):
    """Rows that one worker is to have one after the other: what is left of them."""

    plan: _Plan[Item]
    start: int
    end: int
    urgency: Urgency

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def chain(self) -> bytes:
        """Of the row that comes next."""
        return self.plan.chains[self.start]

    @property
    def num_tokens(self) -> int:
        """Of prompts, those left out that a row shares with the one before it."""
        return int(self.plan.left_tokens[self.start] - self.plan.left_tokens[self.end])

    @property
    def num_context_tokens(self) -> int:
        """Of prompts, with none left out."""
        return int(self.plan.left_context_tokens[self.start] - self.plan.left_context_tokens[self.end])

    def work_s(self, pace: Pace) -> float:
        return pace.work_s(float(self.num_tokens), float(len(self)), float(self.num_context_tokens))

    def next_blocks(self, pace: Pace) -> int:
        """Blocks that the next row needs beside those that it shares with the row before it."""
        tokens = int(self.plan.left_tokens[self.start] - self.plan.left_tokens[self.start + 1])
        return -(-round(tokens + pace.answer_tokens) // self.plan.block_size_tokens)

    def divided(self, pace: Pace) -> Group[Item] | None:
        """Take the end off for a helper, if that ends the group sooner. Modifies."""
        plan = self.plan
        block_s = plan.block_size_tokens * pace.prefill_s_per_token
        copy_s: Floats = np.multiply(plan.num_shared[self.start : self.end], block_s)
        cut = best_cut(plan.left_s(self.start, self.end, pace), copy_s)
        if cut is None:
            return None
        rest = Group(plan, self.start + cut, self.end, self.urgency)
        self.end = rest.start
        return rest


def planned(draft: Draft[Item], *, block_size_tokens: int, num_seats: int, pace: Pace) -> list[Group[Item]]:
    """The rows of a draft in groups. Linear but for a sort; some 5 us a row, so it belongs into a thread."""
    if not draft:
        return []
    chains, urgencies = draft.chains, draft.urgencies
    classes = sorted(set(urgencies))
    groups: list[Group[Item]] = []
    order = sorted(range(len(draft)), key=chains.__getitem__)
    if len(classes) > 1:
        order.sort(key=urgencies.__getitem__)
    plan = _in_order(draft, order, block_size_tokens)
    left_s = plan.left_s(0, len(order), pace)
    grain_s = left_s[0] / (_GROUPS_PER_SEAT * num_seats)
    start = 0
    while start < len(order):
        urgency = urgencies[order[start]]
        end = len(order)
        if urgency != classes[-1]:
            end = next(index for index in range(start, end) if urgencies[order[index]] != urgency)
        starts = group_starts(
            plan.num_shared[start:end],
            left_s[start : end + 1],
            grain_s=grain_s,
            block_s=block_size_tokens * pace.prefill_s_per_token,
        )
        bounds = [start + each for each in starts] + [end]
        groups += [Group(plan, *pair, urgency) for pair in pairwise(bounds)]
        start = end
    return groups


def _in_order(draft: Draft[Item], order: Sequence[int], block_size_tokens: int) -> _Plan[Item]:
    chains = [draft.chains[index] for index in order]
    num_shared = np.fromiter(map(num_shared_blocks, chains, [b"", *chains[:-1]]), np.int64, len(chains))
    num_tokens = np.array(draft.num_tokens)[order]
    own_tokens = np.maximum(num_tokens - num_shared * block_size_tokens, 1)
    items = [draft.items[index] for index in order]
    return _Plan(items, chains, num_shared, _left(own_tokens), _left(num_tokens), block_size_tokens)


def _left(counts: Ints) -> Ints:
    """The sums of each and all behind it, and zero behind the last."""
    return np.append(np.cumsum(counts[::-1])[::-1], 0)
