"""Which beginnings of prompts are hot, and how much of each prompt had been seen before.

Owns block keys of recent prompts and a few counters. Never looks at workers: who holds what is asked when somebody
looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shared.hashing import KEY_SIZE_BYTES
from shared.types import BlockKey

_NUM_PLACES = 1 << 18
"""After so many newer blocks a third of the older ones is left: 17 million tokens in blocks of 64, for 2 MiB."""
_MAX_GROUPS = 128
_MAX_DEPTH_BLOCKS = 1024
"""Longer common beginnings count as one of this length, so that a group takes little memory."""
_HALF_LIFE_S = 60.0
_EXPLAINED_SHARE = 0.8
"""A beginning whose traffic is nearly all that of a longer one tells nothing more."""


class SeenPrefixes:
    """Remembers the blocks of recent prompts, to tell what an endless cache would have given.

    A table of fixed size in which every key has one place: a newer key takes it, so that the older ones fade. Since a
    key stands for all blocks before it, the last one that is found tells how far a prompt is known, whichever of the
    others are gone.
    """

    def __init__(self, num_places: int = _NUM_PLACES) -> None:
        self._hashes = np.zeros(num_places, dtype=np.uint64)
        self._num_places = np.array(num_places, dtype=np.uint64)

    def add(self, keys: Sequence[BlockKey]) -> int:
        """Remember a prompt; tells how many of its leading blocks were known before. Modifies."""
        if not keys:
            return 0
        hashes = np.frombuffer(b"".join(keys), dtype=np.uint64)[::2]
        # numpy finds places twice as fast by its own type of index.
        places = (hashes % self._num_places).view(np.int64)
        (known,) = (self._hashes[places] == hashes).nonzero()
        self._hashes[places] = hashes
        return int(known[-1]) + 1 if len(known) else 0


@dataclass(slots=True)
class Group:
    """Prompts with one beginning."""

    chain: bytes
    """Keys of the beginning's blocks, end to end."""
    traffic: float
    """Requests, those of long ago counting less."""

    @property
    def num_blocks(self) -> int:
        return len(self.chain) // KEY_SIZE_BYTES

    @property
    def traffic_per_min(self) -> float:
        """About as many requests each minute would give this traffic in the long run, between two halvings."""
        return self.traffic / 1.5 * 60.0 / _HALF_LIFE_S

    @property
    def name(self) -> str:
        """Short, and tells nothing of the text."""
        return self.chain[-KEY_SIZE_BYTES:][:4].hex()

    @property
    def keys(self) -> list[BlockKey]:
        return [
            BlockKey(self.chain[start : start + KEY_SIZE_BYTES]) for start in range(0, len(self.chain), KEY_SIZE_BYTES)
        ]


class PrefixGroups:
    """Counts traffic of the places where prompts part: the last block that a prompt shares with one before it.

    A prompt counts for every such place on its way, found by their few different depths, so that the cost of a request
    grows neither with workers nor with blocks. The least used place makes room for a new one.
    """

    def __init__(self, clock: Callable[[], float], max_groups: int = _MAX_GROUPS) -> None:
        self._clock = clock
        self._max_groups = max_groups
        self._key_to_group: dict[BlockKey, Group] = {}
        self._depth_to_count: dict[int, int] = {}
        self._halves_at_s = clock() + _HALF_LIFE_S

    def __len__(self) -> int:
        return len(self._key_to_group)

    def add(self, keys: Sequence[BlockKey], num_known_blocks: int) -> None:
        """Count a prompt, of which so many leading blocks were known before. Modifies."""
        self._age()
        for depth in self._depth_to_count:
            if depth <= num_known_blocks and (group := self._key_to_group.get(keys[depth - 1])) is not None:
                group.traffic += 1.0
        depth = min(num_known_blocks, _MAX_DEPTH_BLOCKS)
        if depth and keys[depth - 1] not in self._key_to_group:
            self._open(keys, depth)

    def hottest(self, most: int) -> list[Group]:
        """The beginnings that most computing goes to, or would without a cache; the first is the hottest.

        Modifies the ages only.
        """
        self._age()
        by_weight = sorted(self._key_to_group.values(), key=lambda group: -group.traffic * group.num_blocks)
        chosen: list[Group] = []
        for group in by_weight[: 2 * most]:
            if not any(_is_explained(group, longer) for longer in by_weight[: 2 * most]):
                chosen.append(group)
        return chosen[:most]

    def _open(self, keys: Sequence[BlockKey], depth: int) -> None:
        if len(self._key_to_group) >= self._max_groups:
            least = min(self._key_to_group, key=lambda key: self._key_to_group[key].traffic)
            self._count_depth(self._key_to_group.pop(least).num_blocks, -1)
        # Two requests are known: the one that came before, and this one.
        self._key_to_group[keys[depth - 1]] = Group(b"".join(keys[:depth]), 2.0)
        self._count_depth(depth, 1)

    def _count_depth(self, depth: int, change: int) -> None:
        count = self._depth_to_count.get(depth, 0) + change
        if count:
            self._depth_to_count[depth] = count
        else:
            del self._depth_to_count[depth]

    def _age(self) -> None:
        now = self._clock()
        if now < self._halves_at_s:
            return
        num_halves = 1 + int((now - self._halves_at_s) / _HALF_LIFE_S)
        self._halves_at_s += num_halves * _HALF_LIFE_S
        for group in self._key_to_group.values():
            group.traffic *= 0.5**num_halves

    def __iter__(self) -> Iterator[Group]:
        return iter(self._key_to_group.values())


def _is_explained(group: Group, longer: Group) -> bool:
    return (
        longer.num_blocks > group.num_blocks
        and longer.traffic >= _EXPLAINED_SHARE * group.traffic
        and longer.chain.startswith(group.chain)
    )
