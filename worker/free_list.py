"""Blocks as the eviction rule sees them, and lists of free ones. Which list goes first is the rule's business."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from enum import IntEnum
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class BlockClass(IntEnum):
    """What a free block is worth, least first."""

    UNHASHED = 0
    """Holds nothing that a request could find."""
    LOW_PRIORITY = 1
    """Private to a request of low priority."""
    PRIVATE = 2
    SHARED = 3
    """Its key has been used by two different requests, at once or one after the other."""


class Block(Generic[Key]):
    """One block: the key that it holds, what that is worth, and its place among the free ones.

    One object for all of it, since in a large pool each further one is a miss of the processor's cache. What belongs to
    the key is the same in all of its copies.
    """

    __slots__ = ("block_class", "copies", "first_request", "free_list", "freed_at", "key", "next", "number", "previous")

    def __init__(self, number: int) -> None:
        self.number = number
        self.key: Key | None = None
        self.first_request = ""
        """Who used the key first."""
        self.block_class = BlockClass.UNHASHED
        self.copies: dict[Block[Key], None] | None = None
        """All blocks with this key, oldest first; None while this is the only one."""
        self.free_list: FreeList[Key] | None = None
        """None while the block is in use. What follows is its list's, and means nothing then."""
        self.freed_at = 0
        """In allocations of the pool."""
        self.previous: Block[Key] = self
        self.next: Block[Key] = self


class FreeList(Generic[Key]):
    """Free blocks in the order in which they go. Every operation takes constant time for each block.

    A ring: `end` stands behind the last block and before the first one, so that no block misses a neighbour.
    """

    __slots__ = ("end", "size")

    def __init__(self) -> None:
        self.end: Block[Key] = Block(-1)
        self.size = 0

    def __iter__(self) -> Iterator[Block[Key]]:
        block = self.end.next
        while block is not self.end:
            yield block
            block = block.next

    def append(self, blocks: Sequence[Block[Key]], freed_at: int) -> None:
        """Let these go last, the first of them before the others. They must be in no list."""
        self._insert(self.end.previous, blocks, self.end, freed_at)

    def prepend(self, blocks: Sequence[Block[Key]], freed_at: int) -> None:
        """Let these go first, the first of them before the others. They must be in no list."""
        self._insert(self.end, blocks, self.end.next, freed_at)

    def take(self, most: int, freed_until: float = math.inf) -> list[Block[Key]]:
        """Take out the first blocks, at most so many, as long as they became free by then."""
        taken: list[Block[Key]] = []
        block = end = self.end
        while len(taken) < most:
            block = block.next
            if block is end or block.freed_at > freed_until:
                break
            block.free_list = None
            taken.append(block)
        if taken:
            behind = taken[-1].next
            end.next = behind
            behind.previous = end
            self.size -= len(taken)
        return taken

    def remove(self, block: Block[Key]) -> None:
        """Take out a block of this list."""
        before, behind = block.previous, block.next
        before.next = behind
        behind.previous = before
        block.free_list = None
        self.size -= 1

    def _insert(self, before: Block[Key], blocks: Sequence[Block[Key]], behind: Block[Key], freed_at: int) -> None:
        for block in blocks:
            block.free_list = self
            block.freed_at = freed_at
            block.previous = before
            before.next = block
            before = block
        before.next = behind
        behind.previous = before
        self.size += len(blocks)
