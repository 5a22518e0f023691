"""The eviction rule: which free block of a pool goes next. Knows block ids and keys, never what lies in a block.

One rule with one number. Blocks that hold nothing go first. Then two lists compete, each ordered by age: blocks whose
key only one request has used (private) and blocks whose key several requests have used (shared). The head that looks
older goes, where a shared block looks `head_start` times the pool's size younger than it is:

    lru            head start 0: plain age decides
    shared_first   head start infinite: a shared block goes only when no private one is left

Age counts allocations of the pool, not seconds, so that the rule does not depend on how fast the engine is.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

HEAD_STARTS = MappingProxyType({"lru": 0.0, "shared_first": math.inf})
"""Rule name to head start, in pool sizes."""


class BlockClass(IntEnum):
    """What a free block is worth, least first."""

    UNHASHED = 0
    """Holds nothing that a request could find."""
    PRIVATE = 1
    SHARED = 2
    """Its key has been used by two different requests, at once or one after the other."""


@dataclass(slots=True)
class _KeyRecord:
    """One cached key: who used it first, whether anyone else did, and the blocks that hold a copy of it."""

    first_request: str
    is_shared: bool = False
    blocks: set[int] = field(default_factory=set)


class FreeBlocks(Generic[Key]):
    """The free blocks of one pool in the order in which they go, and the class of every cached key.

    Invariants: a block is in at most one list; lists are ordered by the allocation count at which a block became free;
    a block's class is that of its key, the same for all copies. Since a request that uses a block uses all blocks
    before it in the prompt, classes never fall along a prompt towards its start, and since requests free their last
    block first, a block always goes before its parent. Every operation takes constant time for each block.
    """

    def __init__(self, rule: str, num_blocks: int) -> None:
        self._head_start_allocations = HEAD_STARTS[rule] * num_blocks
        self._num_allocations = 0
        self._lists: tuple[OrderedDict[int, int], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        self._list_of: dict[int, OrderedDict[int, int]] = {}
        self._key_to_record: dict[Key, _KeyRecord] = {}
        self._block_to_key: dict[int, Key] = {}
        self.num_evicted = [0, 0, 0]
        """Keys that lost a copy to an allocation, by class."""

    def __len__(self) -> int:
        return len(self._list_of)

    def __contains__(self, block: int) -> bool:
        return block in self._list_of

    @property
    def num_free(self) -> tuple[int, int, int]:
        """Free blocks by class."""
        unhashed, private, shared = self._lists
        return len(unhashed), len(private), len(shared)

    @property
    def num_keys(self) -> int:
        """Cached keys, free or in use."""
        return len(self._key_to_record)

    def class_of(self, block: int) -> BlockClass:
        """What the block is worth now, free or not. Does not modify."""
        key = self._block_to_key.get(block)
        if key is None:
            return BlockClass.UNHASHED
        return BlockClass.SHARED if self._key_to_record[key].is_shared else BlockClass.PRIVATE

    # Keys: what the pool tells about its cache.

    def cache(self, block: int, key: Key, request: str) -> None:
        """The block now holds `key`, computed for `request`. Counts as a use of the key."""
        self._block_to_key[block] = key
        record = self._key_to_record.get(key)
        if record is None:
            record = self._key_to_record[key] = _KeyRecord(request)
        else:
            self.use(key, request)
        record.blocks.add(block)

    def use(self, key: Key, request: str) -> None:
        """A request was served from `key`. Unknown keys are ignored.

        A request that returns to blocks that it filled itself, as after a preemption, shares with nobody. When a key
        becomes shared, its free copies move: they count as just used.
        """
        record = self._key_to_record.get(key)
        if record is None or record.is_shared or record.first_request == request:
            return
        record.is_shared = True
        for block in record.blocks:
            if block in self._list_of:
                self.remove(block)
                self._append(block, BlockClass.SHARED)

    def uncache(self, block: int) -> None:
        """The block no longer holds its key; the key is forgotten with its last copy. A free block becomes unhashed."""
        key = self._block_to_key.pop(block, None)
        if key is not None:
            record = self._key_to_record[key]
            record.blocks.remove(block)
            if not record.blocks:
                del self._key_to_record[key]
        if block in self._list_of:
            self.remove(block)
            self._append(block, BlockClass.UNHASHED)

    def clear_keys(self) -> None:
        """Forget every key: all free blocks become unhashed, in the order in which they would have gone."""
        self._key_to_record.clear()
        self._block_to_key.clear()
        for block in self.in_order():
            self.remove(block)
            self._append(block, BlockClass.UNHASHED)

    # Blocks: what the pool takes and gives back.

    def push(self, blocks: Iterable[int]) -> None:
        """Add blocks that just became free; the first of them goes first. Blocks without a key count as private."""
        for block in blocks:
            self._append(block, max(self.class_of(block), BlockClass.PRIVATE))

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
        del self._list_of.pop(block)[block]

    def pop(self) -> int:
        """Take the block that goes next. Its key, if it has one, stays until `uncache`.

        Raises:
            IndexError: no block is free.
        """
        victim = self._next_list()
        block, _ = victim.popitem(last=False)
        del self._list_of[block]
        self._num_allocations += 1
        if block in self._block_to_key:
            self.num_evicted[self.class_of(block)] += 1
        return block

    def in_order(self) -> list[int]:
        """All free blocks, next to go first, if nothing else happened. Linear; does not modify."""
        unhashed, private, shared = (list(blocks.items()) for blocks in self._lists)
        order = [block for block, _ in unhashed]
        i = j = 0
        while i < len(private) or j < len(shared):
            if j == len(shared) or (i < len(private) and self._goes_first(private[i][1], shared[j][1])):
                order.append(private[i][0])
                i += 1
            else:
                order.append(shared[j][0])
                j += 1
        return order

    def _append(self, block: int, block_class: BlockClass) -> None:
        blocks = self._lists[block_class]
        blocks[block] = self._num_allocations
        self._list_of[block] = blocks

    def _next_list(self) -> OrderedDict[int, int]:
        unhashed, private, shared = self._lists
        if unhashed:
            return unhashed
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
