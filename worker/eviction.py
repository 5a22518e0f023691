"""The eviction rule: which free block of a pool goes next. Knows block ids and keys, never what lies in a block.

One rule with one number. Blocks that hold nothing go first, then those that only a request of low priority used. Then
two lists compete, each ordered by age: blocks whose key only one request has used (private) and blocks whose key
several requests have used (shared). The head that looks older goes, where a shared block looks `head_start` times the
pool's size younger than it is:

    lru            head start 0: plain age decides
    shared_first   head start infinite: a shared block goes only when no private one is left
    adaptive       head start between 0 and 8, moved by what turns out to have been a mistake

Age counts allocations of the pool, not seconds, so that the rule does not depend on how fast the engine is.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

ADAPTIVE = "adaptive"
HEAD_STARTS = MappingProxyType({"lru": 0.0, "shared_first": math.inf, ADAPTIVE: 1.0})
"""Rule name to head start, in pool sizes; that of `adaptive` is where it begins."""
MAX_HEAD_START = 8.0


class BlockClass(IntEnum):
    """What a free block is worth, least first."""

    UNHASHED = 0
    """Holds nothing that a request could find."""
    LOW_PRIORITY = 1
    """Private to a request of low priority."""
    PRIVATE = 2
    SHARED = 3
    """Its key has been used by two different requests, at once or one after the other."""


class _KeyRecord(Generic[Key]):
    """One cached key: who used it first, what it is worth, and the blocks that hold a copy of it, oldest first."""

    __slots__ = ("block_class", "blocks", "first_request", "key")

    def __init__(self, key: Key, first_request: str, block_class: BlockClass) -> None:
        self.key = key
        self.first_request = first_request
        self.block_class = block_class
        self.blocks: dict[int, None] = {}


class AdaptiveHeadStart(Generic[Key]):
    """A head start that moves as in ARC (Megiddo and Modha, FAST '03): by the keys that were missed after they went.

    A miss on a key that went while shared says that shared blocks go too soon and raises the head start; one on a key
    that went while private lowers it. The rarer kind of the two remembered moves it further. Each list of such ghosts
    holds half a pool. Every operation takes constant time.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool_sizes = HEAD_STARTS[ADAPTIVE]
        self.num_ghost_hits = [0, 0]
        """Misses on keys that went while private and while shared."""
        self._num_blocks = num_blocks
        self._private: OrderedDict[Key, str] = OrderedDict()
        self._shared: OrderedDict[Key, str] = OrderedDict()

    @property
    def num_ghosts(self) -> tuple[int, int]:
        """Keys remembered that went while private and while shared."""
        return len(self._private), len(self._shared)

    def remember(self, key: Key, block_class: BlockClass, first_request: str) -> None:
        """The last copy of a key has gone to make room."""
        ghosts = self._shared if block_class is BlockClass.SHARED else self._private
        ghosts[key] = first_request
        if len(ghosts) > self._num_blocks // 2:
            ghosts.popitem(last=False)

    def recompute(self, key: Key, request: str) -> None:
        """A key that was not cached has been computed for `request`. Its ghost, if there is one, is deleted.

        A ghost moves the head start once, and never for the request that had filled the key itself: one that comes
        back after a preemption says nothing about what other requests will ask for.
        """
        was_shared = key in self._shared
        first_request = (self._shared if was_shared else self._private).pop(key, None)
        if first_request is None or first_request == request:
            return
        self.num_ghost_hits[was_shared] += 1
        # The ghost that was hit counts still, so neither divisor is zero.
        num_same, num_other = len(self._private) + (not was_shared), len(self._shared) + was_shared
        if was_shared:
            num_same, num_other = num_other, num_same
        step = max(1.0, num_other / num_same) / self._num_blocks
        moved = self.pool_sizes + step if was_shared else self.pool_sizes - step
        self.pool_sizes = min(MAX_HEAD_START, max(0.0, moved))

    def forget_ghosts(self) -> None:
        """Keys of before mean nothing any more. What has been learnt stays."""
        self._private.clear()
        self._shared.clear()


class FreeBlocks(Generic[Key]):
    """The free blocks of one pool in the order in which they go, and the class and copies of every cached key.

    Invariants: a block is in at most one list; lists are ordered by the allocation count at which a block became free
    or was refreshed; a block's class is that of its key, the same for all copies. Since a request that uses a block
    uses all blocks before it in the prompt, classes never fall along a prompt towards its start, and since requests
    free their last block first, a block always goes before its parent. Every operation takes constant time for each
    block.
    """

    def __init__(self, rule: str, num_blocks: int) -> None:
        self.num_evicted = [0] * len(BlockClass)
        """Keys that lost a copy to an allocation, by class."""
        self._num_blocks = num_blocks
        self._head_start_allocations = HEAD_STARTS[rule] * num_blocks
        self._adaptive: AdaptiveHeadStart[Key] | None = AdaptiveHeadStart(num_blocks) if rule == ADAPTIVE else None
        self._num_allocations = 0
        self._lists: tuple[OrderedDict[int, int], ...] = tuple(OrderedDict() for _ in BlockClass)
        self._list_of: list[OrderedDict[int, int] | None] = [None] * num_blocks
        self._record_of: list[_KeyRecord[Key] | None] = [None] * num_blocks
        self._key_to_record: dict[Key, _KeyRecord[Key]] = {}
        self._refreshed: set[int] = set()

    def __len__(self) -> int:
        return sum(map(len, self._lists))

    def __contains__(self, block: int) -> bool:
        return self._list_of[block] is not None

    @property
    def num_free(self) -> tuple[int, ...]:
        """Free blocks by class."""
        return tuple(map(len, self._lists))

    @property
    def num_keys(self) -> int:
        """Cached keys, free or in use."""
        return len(self._key_to_record)

    @property
    def head_start(self) -> float:
        """How many pool sizes younger a shared block looks, now."""
        return self._head_start_allocations / self._num_blocks

    @property
    def adaptive(self) -> AdaptiveHeadStart[Key] | None:
        """What moves the head start; None if nothing does."""
        return self._adaptive

    def class_of(self, block: int) -> BlockClass:
        """What the block is worth now, free or not. Does not modify."""
        record = self._record_of[block]
        return BlockClass.UNHASHED if record is None else record.block_class

    # Keys: what the pool tells about its cache.

    def find(self, key: Key) -> int | None:
        """The oldest block that holds `key`; None if none does. Does not modify."""
        record = self._key_to_record.get(key)
        return None if record is None else next(iter(record.blocks))

    def key_of(self, block: int) -> Key | None:
        """What the block holds; None if nothing that a request could find. Does not modify."""
        record = self._record_of[block]
        return None if record is None else record.key

    def cache(
        self, block: int, key: Key, request: str, *, parent: int | None = None, is_low_priority: bool = False
    ) -> None:
        """The block now holds `key`, computed for `request`. Counts as a use of the key.

        `parent` holds the key before it in the prompt; None for a first one. What stands behind blocks of low priority
        goes with them, also if the request has come back with another priority: never a parent before its child.
        """
        record = self._key_to_record.get(key)
        if record is None:
            is_behind_low = parent is not None and self.class_of(parent) is BlockClass.LOW_PRIORITY
            block_class = BlockClass.LOW_PRIORITY if is_low_priority or is_behind_low else BlockClass.PRIVATE
            record = self._key_to_record[key] = _KeyRecord(key, request, block_class)
            if self._adaptive is not None:
                self._adaptive.recompute(key, request)
                self._head_start_allocations = self._adaptive.pool_sizes * self._num_blocks
        else:
            self._use(record, request)
        record.blocks[block] = None
        self._record_of[block] = record

    def use(self, key: Key, request: str) -> None:
        """A request was served from `key`. Unknown keys are ignored.

        A request that returns to blocks that it filled itself, as after a preemption, shares with nobody. When a key
        becomes shared, its free copies move: they count as just used.
        """
        record = self._key_to_record.get(key)
        if record is not None:
            self._use(record, request)

    def uncache(self, block: int) -> None:
        """The block no longer holds its key; the key is forgotten with its last copy. A free block becomes unhashed.

        Nothing is learnt from it, since the block did not go to make room.
        """
        self._drop(block)
        if block in self:
            self.remove(block)
            self._append(block, BlockClass.UNHASHED)

    def clear_keys(self) -> None:
        """Forget every key, those that went included: all free blocks become unhashed, in the order of before."""
        for block in self.in_order():
            self.remove(block)
            self._append(block, BlockClass.UNHASHED)
        self._key_to_record.clear()
        self._record_of = [None] * self._num_blocks
        if self._adaptive is not None:
            self._adaptive.forget_ghosts()

    # Blocks: what the pool takes and gives back.

    def push(self, blocks: Iterable[int]) -> None:
        """Add blocks that just became free; the first of them goes first. Blocks without a key count as private."""
        for block in blocks:
            self._append(block, self.class_of(block) or BlockClass.PRIVATE)

    def push_unhashed(self, blocks: Iterable[int]) -> None:
        """Add blocks that hold nothing; they go before all others, the first of them first."""
        unhashed = self._lists[BlockClass.UNHASHED]
        for block in reversed(list(blocks)):
            self._append(block, BlockClass.UNHASHED)
            unhashed.move_to_end(block, last=False)

    def remove(self, block: int) -> None:
        """Take a certain block out, as when a request is served from it.

        Raises:
            KeyError: the block is not free.
        """
        blocks = self._list_of[block]
        if blocks is None:
            raise KeyError(f"block {block} is not free")
        del blocks[block]
        self._list_of[block] = None
        self._refreshed.discard(block)

    def serve(self, blocks: Iterable[int], request: str) -> None:
        """A request is served from these blocks: a use of their keys, and the free ones are taken out."""
        for block in blocks:
            free_blocks = self._list_of[block]
            if free_blocks is not None:
                del free_blocks[block]
                self._list_of[block] = None
                self._refreshed.discard(block)
            record = self._record_of[block]
            if record is not None:
                self._use(record, request)

    def refresh(self, blocks: Sequence[int]) -> None:
        """Let the free ones of these count as just used: a queued request will use them. First block of a prompt first.

        At most half the pool is favoured like this at any time, so that a long queue cannot turn the order of all
        blocks into that of arrival; a block counts until it is used or goes. Of a prompt's blocks the first ones are
        taken, as many as fit.
        """
        favoured: list[int] = []
        for block in blocks:
            if block not in self:
                continue
            if block not in self._refreshed and len(self._refreshed) >= self._num_blocks // 2:
                break
            self._refreshed.add(block)
            favoured.append(block)
        for block in reversed(favoured):
            free_blocks = self._list_of[block]
            assert free_blocks is not None
            free_blocks[block] = self._num_allocations
            free_blocks.move_to_end(block)

    def pop(self) -> int:
        """Take the block that goes next, without what it held.

        Raises:
            IndexError: no block is free.
        """
        block, _ = self._next_list().popitem(last=False)
        self._list_of[block] = None
        self._refreshed.discard(block)
        self._num_allocations += 1
        record = self._record_of[block]
        if record is not None:
            self.num_evicted[record.block_class] += 1
            self._drop(block)
            # A block of low priority goes whatever the head start is: its loss teaches nothing.
            if self._adaptive is not None and not record.blocks and record.block_class is not BlockClass.LOW_PRIORITY:
                self._adaptive.remember(record.key, record.block_class, record.first_request)
        return block

    def in_order(self) -> list[int]:
        """All free blocks, next to go first, if nothing else happened. Linear; does not modify."""
        unhashed, low_priority, private, shared = (list(blocks.items()) for blocks in self._lists)
        order = [block for block, _ in unhashed + low_priority]
        i = j = 0
        while i < len(private) or j < len(shared):
            if j == len(shared) or (i < len(private) and self._goes_first(private[i][1], shared[j][1])):
                order.append(private[i][0])
                i += 1
            else:
                order.append(shared[j][0])
                j += 1
        return order

    def _use(self, record: _KeyRecord[Key], request: str) -> None:
        if record.block_class is BlockClass.SHARED or record.first_request == request:
            return
        record.block_class = BlockClass.SHARED
        for block in record.blocks:
            if block in self:
                self.remove(block)
                self._append(block, BlockClass.SHARED)

    def _drop(self, block: int) -> None:
        record = self._record_of[block]
        if record is not None:
            self._record_of[block] = None
            del record.blocks[block]
            if not record.blocks:
                del self._key_to_record[record.key]

    def _append(self, block: int, block_class: BlockClass) -> None:
        blocks = self._lists[block_class]
        blocks[block] = self._num_allocations
        self._list_of[block] = blocks

    def _next_list(self) -> OrderedDict[int, int]:
        unhashed, low_priority, private, shared = self._lists
        if unhashed or low_priority:
            return unhashed or low_priority
        if not private or not shared:
            if not private and not shared:
                raise IndexError("no block is free")
            return private or shared
        oldest_private = next(iter(private.values()))
        oldest_shared = next(iter(shared.values()))
        return private if self._goes_first(oldest_private, oldest_shared) else shared

    def _goes_first(self, private_freed_at: int, shared_freed_at: int) -> bool:
        """Whether the private of two heads goes; of equally old ones it does, since it is the later in the prompt."""
        return private_freed_at <= shared_freed_at + self._head_start_allocations
