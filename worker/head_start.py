"""The one number of the eviction rule: how much younger than it is a shared block looks, and what moves that."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from types import MappingProxyType
from typing import Generic

from worker.free_list import Key

ADAPTIVE = "adaptive"
HEAD_STARTS = MappingProxyType({"lru": 0.0, "shared_first": math.inf, ADAPTIVE: 1.0})
"""Rule name to head start, in pool sizes; that of `adaptive` is where it begins."""
MAX_HEAD_START = 16.0
"""Keeps nine in ten returns of a prompt that comes back at random, every seven turnovers of the pool on average."""
STEP_POOL_SIZES = 4.0
"""How far a pool's worth of ghost hits moves the head start: a fourth of its range, where ARC's moves through all.
Faster is restless, which costs chats; slower loses more of what returns rarely before it is learnt."""


class AdaptiveHeadStart(Generic[Key]):
    """A head start that moves as in ARC (Megiddo and Modha, FAST '03): by the keys that were missed after they went.

    A miss on a key that went while shared says that shared blocks go too soon and raises the head start; one on a key
    that went while private lowers it. The rarer kind of the two remembered moves it further. Each list of such ghosts
    holds half a pool. And as there, a ghost says more than how to move: its key comes back as one that several
    requests have used, or a prompt that returns too rarely would be forgotten as often as it goes and never seen to be
    shared. Every operation takes constant time.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool_sizes = HEAD_STARTS[ADAPTIVE]
        self.num_ghost_hits = [0, 0]
        """Misses on keys that went while private and while shared."""
        self._num_blocks = num_blocks
        self._most_ghosts = num_blocks // 2
        self._private: OrderedDict[Key, str] = OrderedDict()
        self._shared: OrderedDict[Key, str] = OrderedDict()

    @property
    def num_ghosts(self) -> tuple[int, int]:
        """Keys remembered that went while private and while shared."""
        return len(self._private), len(self._shared)

    def remember(self, *, private: Iterable[tuple[Key, str]] = (), shared: Iterable[tuple[Key, str]] = ()) -> None:
        """The last copies of these keys have gone to make room, in this order; each with who had used it first."""
        for ghosts, gone in ((self._private, private), (self._shared, shared)):
            ghosts.update(gone)
            while len(ghosts) > self._most_ghosts:
                ghosts.popitem(last=False)

    def remembers_any(self, keys: Iterable[Key]) -> bool:
        """Whether any of these has a ghost. Does not modify."""
        return not (self._private.keys().isdisjoint(keys) and self._shared.keys().isdisjoint(keys))

    def recompute(self, key: Key, request: str) -> bool:
        """A key that was not cached has been computed for `request`. Tells whether two requests are known to use it.

        Its ghost, if there is one, is deleted. A ghost moves the head start once, and never for the request that had
        filled the key itself: one that comes back after a preemption says nothing about what other requests will ask
        for.
        """
        was_shared = key in self._shared
        if not was_shared and key not in self._private:
            return False
        if (self._shared if was_shared else self._private).pop(key) == request:
            return was_shared
        self.num_ghost_hits[was_shared] += 1
        # The ghost that was hit counts still, so neither divisor is zero.
        num_same, num_other = len(self._private) + (not was_shared), len(self._shared) + was_shared
        if was_shared:
            num_same, num_other = num_other, num_same
        step = max(1.0, num_other / num_same) * STEP_POOL_SIZES / self._num_blocks
        moved = self.pool_sizes + step if was_shared else self.pool_sizes - step
        self.pool_sizes = min(MAX_HEAD_START, max(0.0, moved))
        return True

    def forget_ghosts(self) -> None:
        """Keys of before mean nothing any more. What has been learnt stays."""
        self._private.clear()
        self._shared.clear()
