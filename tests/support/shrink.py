"""Finds the shortest list of operations that still fails, so that a person can read what a random walk found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Operation = TypeVar("Operation")


def shortest_failing(
    operations: Sequence[Operation], fails: Callable[[Sequence[Operation]], bool], *, max_tries: int = 400
) -> list[Operation]:
    """A part of `operations`, in order, that fails and of which no smaller piece was found to be dispensable.

    Takes away pieces, halves first and single operations last (Zeller's delta debugging), for at most `max_tries` runs.
    """
    kept = list(operations)
    length = max(1, len(kept) // 2)
    while max_tries > 0:
        has_shrunk = False
        start = 0
        while start < len(kept) and max_tries > 0:
            candidate = kept[:start] + kept[start + length :]
            max_tries -= 1
            if candidate and fails(candidate):
                kept = candidate
                has_shrunk = True
            else:
                start += length
        if length > 1:
            length = max(1, length // 2)
        elif not has_shrunk:
            break
    return kept
