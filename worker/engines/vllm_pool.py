"""vLLM's own block pool under our eviction rule. Runs inside the engine's process; private to `vllm_scheduler`.

Our pool takes the blocks of the one that vLLM made, and its place wherever vLLM holds it. Everything that is not
eviction order, events and keys stays vLLM's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import repeat
from operator import add
from typing import Any, cast

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from shared.types import BlockKey, CacheScheme
from worker.engines.vllm_keys import LazyKey
from worker.eviction import FreeBlocks
from worker.pins import Pin, Pins

NORMAL_PRIORITY = 0
"""A request's priority if nothing is said. Greater numbers run later (vLLM, `SchedulingPolicy`), and count as low."""

_FIRST_GROUP = make_block_hash_with_group_id(BlockHash(b""), 0)
"""What vLLM appends to the hash of a block in the only group of a cache."""


class FreeQueue:
    """Stands in for vLLM's `FreeKVCacheBlockQueue`: its blocks and methods, our order.

    `num_free_blocks` always equals what the rule counts. It is a field as in vLLM, which reads it for each token.
    """

    def __init__(self, blocks: list[KVCacheBlock], free: FreeBlocks[BlockHashWithGroupId]) -> None:
        self._blocks = blocks
        self._free = free
        self.num_free_blocks = len(free)

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        blocks = [self._blocks[block] for block in self._free.pop_n(n)]
        self.num_free_blocks -= n
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        self._free.remove(block.block_id)
        self.num_free_blocks -= 1

    def serve(self, blocks: Iterable[KVCacheBlock], request: str) -> None:
        """A request is served from these blocks; the free ones are taken out. vLLM's queue knows of no requests."""
        self._free.serve([block.block_id for block in blocks], request)
        self.num_free_blocks = len(self._free)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        if blocks:
            self._free.push([block.block_id for block in blocks])
            self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        if blocks:
            self._free.push_unhashed([block.block_id for block in blocks])
            self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [self._blocks[block] for block in self._free.in_order()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Free blocks that go after `cursor`; linear, and asked for by vLLM's KV offloading only."""
        blocks = iter(self.get_all_free_blocks())
        if cursor is not None:
            for block in blocks:
                if block is cursor:
                    break
        yield from blocks


class KeyedBlockPool(BlockPool):
    """A `BlockPool` that evicts by our rule, reports no event twice, and knows our key of each cached block.

    Invariants: the set of stored less removed hashes in its events is exactly what it holds; `_keys` has an entry for
    no block that is not cached; a pin holds one reference on each of its blocks, which are those that look-ups of their
    hashes return.
    """

    free_block_queue: FreeQueue  # type: ignore[assignment]
    _free: FreeBlocks[BlockHashWithGroupId]
    _scheme: CacheScheme
    _keys: list[LazyKey | None]
    _served_request: str | None
    _single_group: bool
    _pins: Pins

    @classmethod
    def adopt(
        cls, manager: KVCacheManager, rule: str, scheme: CacheScheme, *, pin_budget_blocks: int
    ) -> KeyedBlockPool:
        """Put a pool under our rule in the place of the manager's, all of whose blocks are free.

        Raises:
            TypeError: the pool is not the one that this class extends, it reports no events, or something holds it
                that is not known; the manager must not be used then.
        """
        stock = manager.block_pool
        if type(stock) is not BlockPool or not stock.enable_kv_cache_events:
            raise TypeError(f"the engine's pool is a {type(stock).__name__}, not a BlockPool that reports events")
        free_blocks = stock.free_block_queue.get_all_free_blocks()
        # Not the same object with another class: Python 3.11 reads attributes of such a one the slow way ever after,
        # and vLLM asks the pool for each running sequence in each step.
        pool = cls.__new__(cls)
        for name, value in vars(stock).items():
            setattr(pool, name, value)
        holders: list[Any] = [manager, manager.coordinator, *manager.coordinator.single_type_managers]
        for holder in holders:
            if holder.block_pool is stock:
                holder.block_pool = pool
        for block in pool.blocks:
            block.pool = pool
        left_behind = weakref.ref(stock)
        del stock, holder
        if left_behind() is not None:
            raise TypeError(
                "the engine's pool is held by a part of vLLM that this does not know; --eviction stock leaves it alone"
            )
        pool._free = FreeBlocks(rule, len(pool.blocks))
        pool._free.push_unhashed(block.block_id for block in free_blocks)
        pool._scheme = scheme
        pool._keys = [None] * len(pool.blocks)
        pool._served_request = None
        pool._single_group = manager.num_kv_cache_groups == 1
        pool._pins = Pins(pin_budget_blocks if pool._single_group else 0)
        pool.free_block_queue = FreeQueue(pool.blocks, pool._free)
        pool._watch_allocations_of(manager)
        return pool

    # What vLLM calls.

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """As vLLM's, in one pass, with one event for all that goes."""
        if self.metrics_collector or self._reuse_watchers or self.cached_block_hashes_by_block:
            # Seldom: residency metrics, KV offloading, hashes of parts of blocks. Right too, block by block.
            return super().get_new_blocks(num_blocks)
        if num_blocks > self.free_block_queue.num_free_blocks:
            raise ValueError(f"{num_blocks} blocks wanted, {self.free_block_queue.num_free_blocks} are free")
        cached, keys = self.cached_block_hash_to_block, self._keys
        gone: list[BlockHashWithGroupId] = []
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            block_hash = block.block_hash
            if block_hash is not None:  # the rule has forgotten it already
                cached.pop(block_hash, block.block_id)
                block.reset_hash()
                keys[block.block_id] = None
                if cached.get_one_block(block_hash) is None:
                    gone.append(block_hash)
            block.ref_cnt = 1
        if gone:
            self._report_removed(gone)
        return blocks

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """As vLLM's, and tells the rule. The event names only blocks whose hash was not cached already."""
        if num_cached_blocks >= num_full_blocks:
            return
        super().cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
        )
        new_blocks = blocks[num_cached_blocks:num_full_blocks]
        is_low_priority = request.priority > NORMAL_PRIORITY
        parent = blocks[num_cached_blocks - 1].block_id if num_cached_blocks else None
        cache, request_id = self._free.cache, request.request_id
        num_known = 0
        for number, block in enumerate(new_blocks):
            block_id, block_hash = block.block_id, block.block_hash
            if block_hash is not None and not cache(block_id, block_hash, request_id, parent, is_low_priority):
                # Only those that lead matter.
                num_known += num_known == number
            parent = block_id
        event = self.kv_event_queue[-1]
        assert isinstance(event, BlockStored)
        if kv_cache_group_id == 0 and len(event.block_hashes) == len(new_blocks) and block_size == self.hash_block_size:
            self._set_keys(new_blocks, blocks[num_cached_blocks - 1] if num_cached_blocks else None, event)
            if num_known == len(new_blocks):
                self.kv_event_queue.pop()
            elif num_known:
                _drop_leading(event, num_known)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """As vLLM's, and tells the rule for which request, if there is one."""
        if self._served_request is None:
            super().touch(blocks)
            return
        self.free_block_queue.serve(blocks, self._served_request)
        metrics = self.metrics_collector
        for block in blocks:
            block.ref_cnt += 1
            if metrics:
                metrics.on_block_accessed(block)

    def reset_prefix_cache(self) -> bool:
        """As vLLM's: all, pins included, or, while a request holds a block, nothing."""
        num_held = len(self.blocks) - 1 - len(self._free)  # one is vLLM's placeholder
        if num_held == self._pins.num_blocks and all(
            self.blocks[block].ref_cnt == self._pins.num_pins_of(block) for block in self._pins.blocks()
        ):
            for pin in self._pins.all():
                self.unpin(pin.name)
        is_reset: bool = super().reset_prefix_cache()
        if is_reset:
            self._free.clear_keys()
            self._keys = [None] * len(self.blocks)
        return is_reset

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        removed: list[BlockHashWithGroupId] = super()._remove_cached_block_hashes(block)
        if removed:
            self._free.uncache(block.block_id)
            self._keys[block.block_id] = None
        return removed

    def _emit_block_removed_events(self, block_hashes: list[BlockHashWithGroupId]) -> None:
        """Stock vLLM says removed for each copy, while another one still serves the hash."""
        gone = [each for each in block_hashes if self.cached_block_hash_to_block.get_one_block(each) is None]
        if gone:
            self._report_removed(gone)

    def _report_removed(self, gone: list[BlockHashWithGroupId]) -> None:
        if not self._single_group:
            super()._emit_block_removed_events(gone)  # an event names a group
            return
        hashes = [maybe_convert_block_hash(get_block_hash(each)) for each in gone]
        self.kv_event_queue.append(BlockRemoved(block_hashes=hashes, medium=self.medium, group_idx=0))

    # What the scheduler asks on our behalf.

    def snapshot(self) -> tuple[list[bytes | int], list[BlockKey]]:
        """Hash, as in events, and key of every block that can be served now. Linear; keeps keys that it computes."""
        hash_to_key: dict[bytes | int, BlockKey] = {}
        for block in self.blocks:
            key = self._key_of(block.block_id)
            if key is not None and block.block_hash is not None:
                hash_to_key[maybe_convert_block_hash(get_block_hash(block.block_hash))] = key
        return list(hash_to_key), list(hash_to_key.values())

    def expect(self, request: Request) -> None:
        """A request waits that will use these blocks: spare them. Linear in the cached part of its prompt; modifies."""
        if self._single_group:
            hashes = map(add, request.block_hashes, repeat(_FIRST_GROUP))
            self._free.refresh(self._free.find_all(cast(Iterator[BlockHashWithGroupId], hashes)))

    def evict_all_free(self) -> None:
        """Drop what is cached and neither in use nor pinned. Linear; modifies."""
        for block_id in self._free.in_order():
            self._maybe_evict_cached_block(self.blocks[block_id])

    def statistics(self) -> dict[str, Any]:
        """Blocks free and evicted by class, least worth first, keys cached, blocks pinned, and the head start.

        That one is in pool sizes; None if it is infinite.
        """
        head_start = self._free.head_start
        return {
            "num_free": list(self._free.num_free),
            "num_evicted": list(self._free.num_evicted),
            "num_cached": self._free.num_keys,
            "num_pinned": self._pins.num_blocks,
            "head_start": head_start if math.isfinite(head_start) else None,
        }

    # Pins.

    @property
    def pin_budget_blocks(self) -> int:
        """Most blocks that pins may hold together."""
        return self._pins.budget_blocks

    def check_pin(self, name: str, keys: Collection[BlockKey]) -> None:
        """Whether the full blocks of a prompt, these keys, could be kept under `name` now. Does not modify.

        Raises:
            PinRefused: the budget does not suffice.
        """
        wanted = set(keys)
        self._pins.check(name, len(wanted), [block for block in self._pins.blocks() if self._key_of(block) in wanted])

    def pin(self, name: str, request: Request) -> int | None:
        """Keep the full blocks of a request's prompt under `name`, in place of what was kept there; tells how many.

        None, and no change, where one of them is not cached, as after a preemption; while the request holds its blocks,
        all are.

        Raises:
            PinRefused: the budget does not suffice. Nothing has changed.
        """
        blocks: list[KVCacheBlock] = []
        for block_hash in request.block_hashes[: request.num_prompt_tokens // self.hash_block_size]:
            # Not the request's own block where that is a second copy: so all pins of a hash keep the same one.
            cached = self.get_cached_block(block_hash, [0])
            if cached is None:
                return None
            blocks += cached
        former = self._pins.put(name, [block.block_id for block in blocks], now_s=0.0, ttl_s=None)
        super().touch(blocks)  # the request that computed them has been taken for their use already
        self._release(former)
        return len(blocks)

    def unpin(self, name: str) -> None:
        """Give up a pin; what nobody else holds goes back to the rule, last block first. Modifies.

        Raises:
            UnknownPin: nothing is kept under that name.
        """
        self._release(self._pins.remove(name))

    def pins(self) -> list[Pin]:
        """All pins, oldest first. Does not modify."""
        return self._pins.all()

    def _release(self, blocks: Iterable[int]) -> None:
        self.free_blocks([self.blocks[block] for block in blocks][::-1])

    # Keys and classes.

    def _watch_allocations_of(self, manager: KVCacheManager) -> None:
        """`touch` is not told for whom; the call that leads there is, so remember it for its duration.

        That call comes once for each request that finds cached blocks, and not for each token.
        """
        coordinator = manager.coordinator
        allocate = coordinator.allocate_new_computed_blocks

        def allocate_for(request_id: str, *args: Any, **kwargs: Any) -> None:
            self._served_request = request_id
            try:
                allocate(request_id, *args, **kwargs)
            finally:
                self._served_request = None

        coordinator.allocate_new_computed_blocks = allocate_for  # type: ignore[method-assign]

    def _key_of(self, block: int) -> BlockKey | None:
        lazy_key = self._keys[block]
        return None if lazy_key is None else lazy_key.value(self._scheme)

    def _set_keys(self, blocks: list[KVCacheBlock], parent: KVCacheBlock | None, event: BlockStored) -> None:
        size_tokens = event.block_size
        before = None if parent is None else self._keys[parent.block_id]
        if size_tokens != self._scheme.block_size_tokens or (parent is not None and before is None):
            return
        token_ids, extra_keys, adapter = event.token_ids, event.extra_keys, event.lora_name
        for number, block in enumerate(blocks):
            own_token_ids = tuple(token_ids[number * size_tokens : (number + 1) * size_tokens])
            before = LazyKey(before, own_token_ids, extra_keys[number] if extra_keys else None, adapter)
            self._keys[block.block_id] = before


def _drop_leading(event: BlockStored, num_known: int) -> None:
    """Cut the blocks off an event that were cached before; of a prompt's blocks those always lead."""
    event.parent_block_hash = event.block_hashes[num_known - 1]
    event.block_hashes = event.block_hashes[num_known:]
    event.token_ids = event.token_ids[num_known * event.block_size :]
    if event.extra_keys is not None:
        event.extra_keys = event.extra_keys[num_known:]
