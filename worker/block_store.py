"""The blocks of a pool: how many hold each, which tokens lie in it, and by which key it can be found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from shared.types import BlockKey
from worker.eviction import FreeBlocks
from worker.sequences import ResidentChanges


class BlockStore:
    """Blocks with their holders and tokens; the eviction rule owns the free ones and the keys.

    Invariants: a block is free if and only if nobody holds it; all blocks of one key hold the same tokens after the
    same key; what can be found has its parent findable too; a block with a key is never written.
    """

    def __init__(self, num_blocks: int, stride_bytes: int, rule: str, changes: ResidentChanges | None = None) -> None:
        self.num_blocks = num_blocks
        self.free: FreeBlocks[BlockKey] = FreeBlocks(rule, num_blocks)
        self.free.push_unhashed(range(num_blocks))
        self.num_holders = [0] * num_blocks
        self.tokens = [b""] * num_blocks
        """Packed, by block."""
        self.num_shared = 0
        """Blocks held more than once."""
        self._stride_bytes = stride_bytes
        self._changes = changes
        self._parents = [BlockKey(b"")] * num_blocks
        self._is_first = [False] * num_blocks

    def find(self, keys: Sequence[BlockKey], packed_tokens: bytes, root: BlockKey) -> list[int]:
        """Blocks of the longest prefix that can be found, each compared with what its key stands for.

        That are its tokens and the key before it. A key alone proves nothing: another text may have the same one.
        """
        blocks = self.free.find_all(keys)
        tokens = [self.tokens[block] for block in blocks]
        parents = [self._parents[block] for block in blocks]
        expected_parents = [root, *keys][: len(blocks)]
        if parents == expected_parents and packed_tokens.startswith(b"".join(tokens)):
            return blocks
        # Some key stands for another text, which is rare: only now look for the first of them.
        num_same = start = 0
        while parents[num_same] == expected_parents[num_same] and packed_tokens.startswith(tokens[num_same], start):
            num_same += 1
            start += self._stride_bytes
        return blocks[:num_same]

    def serve(self, blocks: Sequence[int], request: str) -> None:
        """Hold findable blocks for a request, which counts as a use of their keys."""
        self.free.serve(blocks, request)
        self.hold(blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each block, none of them free."""
        num_holders = self.num_holders
        for block in blocks:
            num_holders[block] += 1
            if num_holders[block] == 2:
                self.num_shared += 1

    def take(self, num_blocks: int) -> list[int]:
        """Blocks to be written, with one holder each; what was in them is lost. There must be enough."""
        gone: list[BlockKey] | None = None if self._changes is None else []
        blocks = self.free.pop_n(num_blocks, gone)
        if self._changes is not None and gone:
            self._changes.note_removed(gone)
        num_holders = self.num_holders
        for block in blocks:
            num_holders[block] = 1
        return blocks

    def drop(self, blocks: Iterable[int]) -> None:
        """One holder less for each block. Those that nobody holds become free, and go in this order."""
        num_holders = self.num_holders
        freed: list[int] = []
        for block in blocks:
            num_holders[block] -= 1
            if num_holders[block] == 0:
                freed.append(block)
            elif num_holders[block] == 1:
                self.num_shared -= 1
        self.free.release(freed)

    def is_writable(self, block: int) -> bool:
        """Whether nobody else would see a change."""
        return self.num_holders[block] == 1 and self.free.key_of(block) is None

    def write(self, blocks: Iterable[int], packed_tokens: bytes) -> None:
        """Fill writable blocks from their beginning."""
        tokens, stride, start = self.tokens, self._stride_bytes, 0
        for block in blocks:
            tokens[block] = packed_tokens[start : start + stride]
            start += stride

    def publish(
        self,
        blocks: Sequence[int],
        keys: Sequence[BlockKey],
        root: BlockKey,
        start: int,
        end: int,
        request: str,
        is_low_priority: bool = False,
    ) -> int:
        """Let full blocks of one sequence be found by their keys, up to the first whose key stands for another text.

        `blocks` and `keys` are all of the sequence's; those from `start` to before `end` are meant. Tells how many that
        are.
        """
        free = self.free
        stored: list[BlockKey] = []
        number = start
        while number < end:
            block, key = blocks[number], keys[number]
            if free.key_of(block) is not None:
                number += 1
                continue
            parent, before = (keys[number - 1], blocks[number - 1]) if number else (root, None)
            other = free.find(key)
            if other is None:
                num_new = free.cache_new(blocks[number:end], keys[number:end], request, before, is_low_priority)
                new = slice(number, number + num_new)
                self._note_parents(blocks[new], parent, keys[new], is_first=before is None)
                stored += keys[new]
                number += num_new
            elif self._is_same_text(other, self.tokens[block], parent):
                free.cache(block, key, request, before, is_low_priority)
                self._note_parents((block,), parent, (key,), is_first=before is None)
                number += 1
            else:
                break
        if self._changes is not None:
            self._changes.note_stored(stored)
        return number - start

    def _note_parents(
        self, blocks: Sequence[int], parent: BlockKey, keys: Sequence[BlockKey], *, is_first: bool
    ) -> None:
        parents, are_first = self._parents, self._is_first
        for block, key in zip(blocks, keys, strict=True):
            parents[block], are_first[block] = parent, is_first
            parent, is_first = key, False

    def forget_free(self) -> None:
        """Let nothing be found any more that nobody holds. Linear in the free blocks."""
        for block in self.free.in_order():
            key = self.free.key_of(block)
            if key is not None:
                self.free.uncache(block)
                if self._changes is not None and self.free.find(key) is None:
                    self._changes.note_removed([key])

    def _is_same_text(self, block: int, tokens: bytes, parent: BlockKey) -> bool:
        return self.tokens[block] == tokens and self._parents[block] == parent

    def check(self, holders: Counter[int]) -> None:
        """Raise `AssertionError` if the counts are not these, or blocks and keys do not fit each other. Linear."""
        for block, number in enumerate(self.num_holders):
            if number != holders[block]:
                raise AssertionError(f"block {block} counts {number} holders and has {holders[block]}")
            if (number == 0) != (block in self.free):
                raise AssertionError(f"block {block} has {number} holders and is {'' if number else 'not '}free")
            key = self.free.key_of(block)
            if key is not None:
                first = self.free.find(key)
                if first is None or (self.tokens[first], self._parents[first]) != (
                    self.tokens[block],
                    self._parents[block],
                ):
                    raise AssertionError(f"block {block} holds another text than its key says")
                if not self._is_first[block] and self.free.find(self._parents[block]) is None:
                    raise AssertionError(f"block {block} can be found and its parent cannot")
                if len(self.tokens[block]) != self._stride_bytes:
                    raise AssertionError(f"block {block} can be found and is not full")
        if self.num_shared != sum(number > 1 for number in self.num_holders):
            raise AssertionError("shared blocks are miscounted")
