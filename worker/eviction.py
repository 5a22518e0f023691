"""The eviction rule: which free block of a pool goes next. Knows block ids and keys, never what lies in a block.

One rule with one number. Blocks that hold nothing go first, then those that only a request of low priority used. Then
two lists compete, each ordered by age: blocks whose key only one request has used (private) and blocks whose key
several requests have used (shared). The head that looks older goes, where a shared block looks `head_start` times the
pool's size younger than it is:

    lru            head start 0: plain age decides
    shared_first   head start infinite: a shared block goes only when no private one is left
    adaptive       head start between 0 and 16, moved by what turns out to have been a mistake

Age counts allocations of the pool, not seconds, so that the rule does not depend on how fast the engine is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic

from worker.free_list import Block, BlockClass, FreeList, Key
from worker.head_start import ADAPTIVE, HEAD_STARTS, AdaptiveHeadStart

_UNHASHED, _LOW_PRIORITY, _PRIVATE, _SHARED = BlockClass
"""Python 3.11 calls a function written in Python whenever a member is read from its class, here for every block."""


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
        self._lists: tuple[FreeList[Key], ...] = tuple(FreeList() for _ in BlockClass)
        self._blocks: list[Block[Key]] = [Block(number) for number in range(num_blocks)]
        self._key_to_block: dict[Key, Block[Key]] = {}
        """The oldest copy."""
        self._refreshed: set[int] = set()

    def __len__(self) -> int:
        unhashed, low_priority, private, shared = self._lists
        return unhashed.size + low_priority.size + private.size + shared.size

    def __contains__(self, block: int) -> bool:
        return self._blocks[block].free_list is not None

    @property
    def num_free(self) -> tuple[int, ...]:
        """Free blocks by class."""
        unhashed, low_priority, private, shared = self._lists
        return unhashed.size, low_priority.size, private.size, shared.size

    @property
    def num_keys(self) -> int:
        """Cached keys, free or in use."""
        return len(self._key_to_block)

    @property
    def head_start(self) -> float:
        """How many pool sizes younger a shared block looks, now."""
        return self._head_start_allocations / self._num_blocks

    @property
    def adaptive(self) -> AdaptiveHeadStart[Key] | None:
        """What moves the head start; None if nothing does."""
        return self._adaptive

    def keys(self) -> set[Key]:
        """Every cached key. Linear; does not modify."""
        return set(self._key_to_block)

    def class_of(self, block: int) -> BlockClass:
        """What the block is worth now, free or not. Does not modify."""
        return self._blocks[block].block_class

    # Keys: what the pool tells about its cache.

    def find(self, key: Key) -> int | None:
        """The oldest block that holds `key`; None if none does. Does not modify."""
        block = self._key_to_block.get(key)
        return None if block is None else block.number

    def find_all(self, keys: Iterable[Key]) -> list[int]:
        """The oldest block of each key, up to the first key that no block holds. Does not modify."""
        found: list[int] = []
        for block in map(self._key_to_block.get, keys):
            if block is None:
                break
            found.append(block.number)
        return found

    def key_of(self, block: int) -> Key | None:
        """What the block holds; None if nothing that a request could find. Does not modify."""
        return self._blocks[block].key

    def cache(
        self, block: int, key: Key, request: str, parent: int | None = None, is_low_priority: bool = False
    ) -> bool:
        """The block now holds `key`, computed for `request`. Counts as a use of the key. Tells whether none held it.

        `parent` holds the key before it in the prompt; None for a first one.
        """
        if self.cache_new((block,), (key,), request, parent, is_low_priority):
            return True
        holder, oldest = self._blocks[block], self._key_to_block[key]
        self._use(oldest, request)
        if oldest is not holder:
            if oldest.copies is None:
                oldest.copies = {oldest: None}
            oldest.copies[holder] = None
            holder.copies = oldest.copies
            holder.key, holder.first_request = oldest.key, oldest.first_request
            holder.block_class = oldest.block_class
        return False

    def cache_new(
        self,
        blocks: Sequence[int],
        keys: Sequence[Key],
        request: str,
        parent: int | None = None,
        is_low_priority: bool = False,
    ) -> int:
        """As `cache` for each of these, which follow one another in a prompt, up to the first key that is held.

        Tells how many that are.
        """
        all_blocks, key_to_block = self._blocks, self._key_to_block
        block_class = _SHARED if parent is None else all_blocks[parent].block_class
        has_ghosts = self._adaptive is not None and self._adaptive.remembers_any(keys)
        num_cached = 0
        for number, key in zip(blocks, keys, strict=True):
            if key in key_to_block:
                break
            # Where nothing is remembered all are worth what the first is.
            if has_ghosts or not num_cached:
                block_class = self._class_of_new(key, request, block_class, is_low_priority)
            block = key_to_block[key] = all_blocks[number]
            block.key, block.first_request, block.block_class = key, request, block_class
            num_cached += 1
        return num_cached

    def use(self, key: Key, request: str) -> None:
        """A request was served from `key`. Unknown keys are ignored.

        A request that returns to blocks that it filled itself, as after a preemption, shares with nobody. When a key
        becomes shared, its free copies move: they count as just used.
        """
        block = self._key_to_block.get(key)
        if block is not None:
            self._use(block, request)

    def uncache(self, block: int) -> None:
        """The block no longer holds its key; the key is forgotten with its last copy. A free block becomes unhashed.

        Nothing is learnt from it, since the block did not go to make room.
        """
        former_holder = self._blocks[block]
        self._drop_key(former_holder)
        if former_holder.free_list is not None:
            self.remove(block)
            self._append(former_holder, _UNHASHED)

    def clear_keys(self) -> None:
        """Forget every key, those that went included: all free blocks become unhashed, in the order of before."""
        for number in self.in_order():
            self.remove(number)
            self._append(self._blocks[number], _UNHASHED)
        for block in self._blocks:
            block.key = block.copies = None
            block.block_class = _UNHASHED
        self._key_to_block.clear()
        if self._adaptive is not None:
            self._adaptive.forget_ghosts()

    # Blocks: what the pool takes and gives back.

    def push(self, blocks: Iterable[int]) -> None:
        """Add blocks that just became free; the first of them goes first. Blocks without a key count as private."""
        for free_list, freed in zip(self._lists, self._by_class(blocks, _PRIVATE), strict=True):
            if freed:
                free_list.append(freed, self._num_allocations)

    def push_unhashed(self, blocks: Iterable[int]) -> None:
        """Add blocks that hold nothing; they go before all others, the first of them first."""
        self._lists[_UNHASHED].prepend([self._blocks[number] for number in blocks], self._num_allocations)

    def release(self, blocks: Iterable[int]) -> None:
        """Add blocks that just became free: those with a key as in `push`, those without as in `push_unhashed`."""
        unhashed, *others = self._by_class(blocks, _UNHASHED)
        self._lists[_UNHASHED].prepend(unhashed, self._num_allocations)
        for free_list, freed in zip(self._lists[1:], others, strict=True):
            if freed:
                free_list.append(freed, self._num_allocations)

    def remove(self, block: int) -> None:
        """Take a certain block out, as when a request is served from it.

        Raises:
            KeyError: the block is not free.
        """
        removed = self._blocks[block]
        if removed.free_list is None:
            raise KeyError(f"block {block} is not free")
        removed.free_list.remove(removed)
        self._refreshed.discard(block)

    def serve(self, blocks: Iterable[int], request: str) -> None:
        """A request is served from these blocks: a use of their keys, and the free ones are taken out."""
        all_blocks, refreshed = self._blocks, self._refreshed
        for number in blocks:
            block = all_blocks[number]
            if block.free_list is not None:
                block.free_list.remove(block)
                refreshed.discard(number)
            if block.block_class is not _SHARED and block.first_request != request and block.key is not None:
                if block.copies is None:
                    block.block_class = _SHARED
                else:
                    self._share(block)

    def refresh(self, blocks: Sequence[int]) -> None:
        """Let the free ones of these count as just used: a queued request will use them. First block of a prompt first.

        At most half the pool is favoured like this at any time, so that a long queue cannot turn the order of all
        blocks into that of arrival; a block counts until it is used or goes. Of a prompt's blocks the first ones are
        taken, as many as fit.
        """
        all_blocks, refreshed, most_refreshed = self._blocks, self._refreshed, self._num_blocks // 2
        favoured: list[tuple[FreeList[Key], Block[Key]]] = []
        for number in blocks:
            block = all_blocks[number]
            if block.free_list is None:
                continue
            if number not in refreshed and len(refreshed) >= most_refreshed:
                break
            refreshed.add(number)
            favoured.append((block.free_list, block))
        for free_list, block in reversed(favoured):
            free_list.remove(block)
            free_list.append((block,), self._num_allocations)

    def pop(self) -> int:
        """Take the block that goes next, without what it held.

        Raises:
            IndexError: no block is free.
        """
        return self.pop_n(1)[0]

    def pop_n(self, num_blocks: int, gone: list[Key] | None = None) -> list[int]:
        """Take the blocks that go next, without what they held, in that order.

        Keys whose last copy goes are added to `gone`.

        Raises:
            IndexError: fewer are free. Nothing has changed.
        """
        if num_blocks > len(self):
            raise IndexError("no block is free" if not len(self) else f"{len(self)} blocks are free, not {num_blocks}")
        key_to_block, num_evicted = self._key_to_block, self.num_evicted
        private: list[tuple[Key, str]] = []
        shared: list[tuple[Key, str]] = []
        self._num_allocations += num_blocks
        taken = self._take(num_blocks)
        popped = [block.number for block in taken]
        if self._refreshed:
            self._refreshed.difference_update(popped)
        for block in taken:
            key = block.key
            if key is None:
                continue
            num_evicted[block.block_class] += 1
            if block.copies is not None:
                self._drop_key(block)
                continue
            if block.block_class is _PRIVATE:
                private.append((key, block.first_request))
            elif block.block_class is _SHARED:
                shared.append((key, block.first_request))
            del key_to_block[key]
            block.key = None
            block.block_class = _UNHASHED
            if gone is not None:
                gone.append(key)
        if self._adaptive is not None:
            # A block of low priority goes whatever the head start is: its loss teaches nothing.
            self._adaptive.remember(private=private, shared=shared)
        return popped

    def in_order(self) -> list[int]:
        """All free blocks, next to go first, if nothing else happened. Linear; does not modify."""
        unhashed, low_priority, private, shared = map(list, self._lists)
        order = unhashed + low_priority
        i = j = 0
        while i < len(private) or j < len(shared):
            if j == len(shared) or (i < len(private) and self._goes_first(private[i], shared[j])):
                order.append(private[i])
                i += 1
            else:
                order.append(shared[j])
                j += 1
        return [block.number for block in order]

    def _class_of_new(self, key: Key, request: str, before: BlockClass, is_low_priority: bool) -> BlockClass:
        """What a key is worth that was not cached, so that it never goes after what stands behind it in the prompt.

        `before` is the class of the key before it. It is shared at once if `adaptive` remembers another request, and
        what stands before it is. What stands behind blocks of low priority goes with them, also if the request has come
        back with another priority.
        """
        if self._adaptive is not None and self._adaptive.recompute(key, request):
            self._head_start_allocations = self._adaptive.pool_sizes * self._num_blocks
            if before is _SHARED:
                return _SHARED
        return _LOW_PRIORITY if is_low_priority or before is _LOW_PRIORITY else _PRIVATE

    def _use(self, block: Block[Key], request: str) -> None:
        if block.block_class is not _SHARED and block.first_request != request:
            self._share(block)

    def _share(self, block: Block[Key]) -> None:
        for copy in (block,) if block.copies is None else block.copies:
            copy.block_class = _SHARED
            if copy.free_list is not None:
                self.remove(copy.number)
                self._append(copy, _SHARED)

    def _drop_key(self, block: Block[Key]) -> None:
        if block.key is None:
            return
        if block.copies is None:
            del self._key_to_block[block.key]
        else:
            del block.copies[block]
            oldest = next(iter(block.copies))
            self._key_to_block[block.key] = oldest
            if len(block.copies) == 1:
                oldest.copies = None
        block.key = block.copies = None
        block.block_class = _UNHASHED

    def _by_class(self, blocks: Iterable[int], keyless: BlockClass) -> tuple[list[Block[Key]], ...]:
        all_blocks = self._blocks
        class_to_blocks: tuple[list[Block[Key]], ...] = ([], [], [], [])
        for number in blocks:
            block = all_blocks[number]
            class_to_blocks[block.block_class or keyless].append(block)
        return class_to_blocks

    def _append(self, block: Block[Key], block_class: BlockClass) -> None:
        self._lists[block_class].append((block,), self._num_allocations)

    def _take(self, num_blocks: int) -> list[Block[Key]]:
        """Take out the blocks that go next, in that order. So many must be free."""
        unhashed, low_priority, private, shared = self._lists
        taken = unhashed.take(num_blocks)
        taken += low_priority.take(num_blocks - len(taken))
        while len(taken) < num_blocks:
            num_left = num_blocks - len(taken)
            if not shared.size:
                taken += private.take(num_left)
            elif private.size and self._goes_first(private.end.next, shared.end.next):
                taken += private.take(num_left, shared.end.next.freed_at + self._head_start_allocations)
            else:
                taken += shared.take(1 if private.size else num_left)
        return taken

    def _goes_first(self, private: Block[Key], shared: Block[Key]) -> bool:
        """Whether the private of two heads goes; of equally old ones it does, since it is the later in the prompt."""
        return private.freed_at <= shared.freed_at + self._head_start_allocations
