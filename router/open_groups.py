"""Groups of rows that are not at their end: those that nobody has, by what suits whom, and those that seats have.

Owns the order in which groups are found, so that no search looks at all of them. Knows no worker.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

import numpy as np

from router.policies.base import Floats
from router.row_groups import Group, Pace, Urgency, beginning, num_shared_blocks

Item = TypeVar("Item")

_MOST_STALE = 16
"""Groups that are done and still remembered, beside as many as are not."""


class _Shelf(Generic[Item]):
    """Groups of one urgency in the order of their chains, in which those that share much are neighbours.

    To find one takes two looks for each chain that is held, and the work of those that share most; to take it moves
    what lies behind. Groups that are put in are sorted in together, when one is asked for.
    """

    def __init__(self) -> None:
        self._added: list[Group[Item]] = []
        self._groups: list[Group[Item]] = []
        self._chains: list[bytes] = []
        self._work: Floats = np.zeros((3, 0))
        """Tokens, rows and tokens seen of each group, as `Pace.work_s` takes them."""

    def __len__(self) -> int:
        return len(self._groups) + len(self._added)

    def add(self, group: Group[Item]) -> None:
        self._added.append(group)

    def pop_nearest(self, held: Sequence[bytes], pace: Pace) -> Group[Item]:
        """The group that shares most with one of these chains; the most work of several, then the first. Modifies."""
        if len(self) == 1:
            # Every row may have an urgency of its own: there is nothing to sort.
            return (self._added or self._groups).pop()
        self._sort_in()
        found = max(
            (self._most_work(start, end, pace) for start, end in self._nearest(held)),
            key=lambda index: (self._groups[index].work_s(pace), -index),
        )
        del self._chains[found]
        self._work = np.delete(self._work, found, axis=1)
        return self._groups.pop(found)

    def _sort_in(self) -> None:
        if not self._added:
            return
        self._groups = sorted([*self._groups, *self._added], key=lambda group: group.chain)
        self._added.clear()
        self._chains = [group.chain for group in self._groups]
        work = [(group.num_tokens, len(group), group.num_context_tokens) for group in self._groups]
        self._work = np.array(work, float).T

    def _nearest(self, held: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        """Where the groups stand that share most with any of the chains; all of them where none shares a block."""
        chain_to_depth = {chain: self._most_shared(chain) for chain in held}
        depth = max(chain_to_depth.values(), default=0)
        for shared in {beginning(chain, depth) for chain, most in chain_to_depth.items() if most == depth} or {b""}:
            start = bisect_left(self._chains, shared)
            yield start, bisect_right(self._chains, shared, lo=start, key=lambda chain: beginning(chain, depth))

    def _most_shared(self, chain: bytes) -> int:
        """Blocks that the nearest group shares with a chain: one of its neighbours, were it among them."""
        place = bisect_left(self._chains, chain)
        return max(num_shared_blocks(chain, near) for near in self._chains[max(0, place - 1) : place + 1])

    def _most_work(self, start: int, end: int, pace: Pace) -> int:
        return start + int(pace.work_s(*self._work[:, start:end]).argmax())


class WaitingGroups(Generic[Item]):
    """Groups that nobody has."""

    def __init__(self) -> None:
        self._urgency_to_shelf: dict[Urgency, _Shelf[Item]] = {}
        self._urgencies: list[Urgency] = []
        """Each once, as a heap: every row may have one of its own."""

    @property
    def first_urgency(self) -> Urgency | None:
        """That of the most urgent ones; `None` where there are none."""
        return self._urgencies[0] if self._urgencies else None

    def add(self, group: Group[Item]) -> None:
        """Put in a group. Modifies."""
        if group.urgency not in self._urgency_to_shelf:
            self._urgency_to_shelf[group.urgency] = _Shelf()
            heappush(self._urgencies, group.urgency)
        self._urgency_to_shelf[group.urgency].add(group)

    def pop_nearest(self, held: Sequence[bytes], pace: Pace) -> Group[Item]:
        """Of the most urgent groups, of which there must be one, that which shares most with what is held. Modifies."""
        shelf = self._urgency_to_shelf[self._urgencies[0]]
        group = shelf.pop_nearest(held, pace)
        if not len(shelf):
            del self._urgency_to_shelf[heappop(self._urgencies)]
        return group


class TakenGroups(Generic[Item]):
    """Groups that somebody has.

    At one pace a group only shrinks, so that what it once was bounds what it is: only those that seem to be the largest
    are weighed anew.
    """

    def __init__(self) -> None:
        self._taken: set[Group[Item]] = set()
        self._heap: list[tuple[Urgency, float, int, Group[Item]]] = []
        """The most urgent, then the largest first, by what they once were."""
        self._num_added = 0
        self._pace = Pace()
        self._whole: Group[Item] | None = None
        """Was not worth dividing, and is still less so now."""

    def add(self, group: Group[Item]) -> None:
        """Somebody takes a group. Modifies."""
        if len(self._heap) > 2 * len(self._taken) + _MOST_STALE:
            # As long as groups wait nobody asks for the largest, and those that are done would be kept.
            self._heap = [entry for entry in self._heap if entry[-1] in self._taken]
            heapify(self._heap)
        self._taken.add(group)
        self._num_added += 1
        heappush(self._heap, self._entry(self._num_added, group))

    def remove(self, group: Group[Item]) -> None:
        """Whoever had a group has it no longer. Modifies."""
        self._taken.discard(group)
        if self._whole is group:
            self._whole = None

    def part_of_largest(self, pace: Pace) -> Group[Item] | None:
        """A part of the largest of the most urgent groups; `None` where that would not end it sooner. Modifies."""
        if pace != self._pace:
            self._pace, self._whole = pace, None
            self._heap = [self._entry(number, group) for _, _, number, group in self._heap]
            heapify(self._heap)
        largest = self._largest()
        if largest is None or largest is self._whole:
            return None
        part = largest.divided(pace)
        if part is None:
            self._whole = largest
        return part

    def _largest(self) -> Group[Item] | None:
        heap = self._heap
        while heap:
            group = heap[0][-1]
            entry = self._entry(heap[0][2], group)
            if not group or group not in self._taken:
                self._taken.discard(group)
                heappop(heap)
            elif entry == heap[0]:
                return group
            else:
                heapreplace(heap, entry)
        return None

    def _entry(self, number: int, group: Group[Item]) -> tuple[Urgency, float, int, Group[Item]]:
        return group.urgency, -group.work_s(self._pace), number, group
