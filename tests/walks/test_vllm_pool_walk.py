"""vLLM's own KV cache manager on our pool, driven by random requests, without an engine or a model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme
from worker.engines.vllm_keys import chain_keys
from worker.eviction import BlockClass

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

BLOCK_SIZE = 4
SCHEME = CacheScheme("walk", BLOCK_SIZE)


@dataclass
class Pool:
    """A KV cache manager with a pool under our rule, and the set that its events describe."""

    manager: Any
    hasher: Any
    stored: dict[Any, BlockKey] = field(default_factory=dict)
    live: dict[str, Any] = field(default_factory=dict)

    def request(self, name: str, token_ids: list[int], salt: str | None = None, priority: int = 0) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=name,
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(max_tokens=8),
            pooling_params=None,
            block_hasher=self.hasher,
            cache_salt=salt,
            priority=priority,
        )

    def start(self, request: Any) -> int | None:
        """Blocks for the whole prompt; the number of cached tokens, None if there is no room."""
        computed, num_cached, _ = self.manager.get_computed_blocks(request)
        blocks = self.manager.allocate_slots(request, request.num_tokens - num_cached, num_cached, computed)
        if blocks is None:
            return None
        request.num_computed_tokens = request.num_tokens
        self.live[request.request_id] = request
        return num_cached

    def end(self, name: str) -> None:
        self.manager.free(self.live.pop(name))

    def take_events(self) -> None:
        """Apply events strictly: nothing is stored twice or removed without being stored."""
        for event in self.manager.take_events():
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.stored.clear()
            elif kind == "BlockRemoved":
                for block_hash in event.block_hashes:
                    del self.stored[block_hash]
            else:
                keys = chain_keys(
                    SCHEME,
                    self.stored.get(event.parent_block_hash),
                    is_first=event.parent_block_hash is None,
                    token_ids=event.token_ids,
                    extra_keys=event.extra_keys,
                    adapter=event.lora_name,
                )
                assert not self.stored.keys() & set(event.block_hashes), "stored twice"
                self.stored.update(zip(event.block_hashes, keys, strict=True))

    def classes(self) -> dict[int, BlockClass]:
        pool = self.manager.block_pool
        return {block.block_id: pool._free.class_of(block.block_id) for block in pool.blocks}


def make_pool(num_blocks: int, rule: str | None = "shared_first") -> Pool:
    import torch
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from worker.engines.vllm_pool import KeyedBlockPool

    init_none_hash(sha256_cbor)
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l0"], spec)]),
        max_model_len=4096,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=True,
        enable_kv_cache_events=True,
    )
    if rule is not None:
        KeyedBlockPool.adopt(manager, rule, SCHEME)
    return Pool(manager, get_request_block_hasher(BLOCK_SIZE, sha256_cbor))


def our_keys(token_ids: list[int], salt: str = "") -> list[BlockKey]:
    return block_keys(pack_tokens(token_ids), BLOCK_SIZE, root_key(SCHEME, salt=salt))


def test_this_vllm_is_known():
    from worker.engines.vllm_scheduler import check_surface

    assert check_surface() is None


def test_an_unknown_vllm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    from worker.engines import vllm_scheduler

    monkeypatch.setattr(vllm_scheduler.vllm, "__version__", "0.99.1")
    assert vllm_scheduler.check_surface() == "vLLM 0.99.1 is not one of 0.32.x"


def test_a_changed_signature_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    from worker.engines import vllm_scheduler

    monkeypatch.setattr(vllm_scheduler.BlockPool, "touch", lambda self, blocks_of_all_groups: None)
    assert vllm_scheduler.check_surface() == (
        "BlockPool.touch takes (blocks_of_all_groups), expected was (blocks, ...)"
    )


def test_preempted_request_that_returns_to_its_blocks_shares_with_nobody():
    pool = make_pool(20)
    request = pool.request("a", list(range(10)))
    pool.start(request)
    pool.end("a")
    request.num_computed_tokens = 0
    assert pool.start(request) == 8
    assert BlockClass.SHARED not in pool.classes().values()


def test_two_requests_that_fill_equal_blocks_share_them_and_report_them_once():
    pool = make_pool(20)
    pool.start(pool.request("a", list(range(8))))
    pool.start(pool.request("b", list(range(8))))  # block-aligned: its last block is computed again
    pool.take_events()
    snapshot = pool.manager.block_pool.snapshot()
    assert set(snapshot[1]) == set(our_keys(list(range(8))))
    assert list(pool.classes().values()).count(BlockClass.SHARED) == 3
    pool.end("a")
    pool.end("b")
    pool.manager.block_pool.evict_all_free()
    pool.take_events()
    assert pool.stored == {}


def test_salt_and_prompt_give_the_keys_that_a_router_computes():
    pool = make_pool(20)
    pool.start(pool.request("a", list(range(9)), salt="tenant"))
    pool.take_events()
    assert list(pool.stored.values()) == our_keys(list(range(9)), salt="tenant")


def test_evicting_all_free_spares_what_a_request_holds():
    pool = make_pool(20)
    pool.start(pool.request("a", list(range(8))))
    pool.start(pool.request("b", list(range(100, 108))))
    pool.end("b")
    pool.manager.block_pool.evict_all_free()
    pool.take_events()
    assert list(pool.stored.values()) == our_keys(list(range(8)))


def test_blocks_that_a_queued_request_will_find_count_as_just_used():
    pool = make_pool(1 + 4, "lru")
    old, new = list(range(8)), list(range(100, 108))
    for name, token_ids in (("old", old), ("new", new)):
        pool.start(pool.request(name, token_ids))
        pool.end(name)
    pool.manager.block_pool.expect(pool.request("queued", [*old, 1]))
    pool.start(pool.request("other", list(range(200, 208))))
    pool.take_events()
    assert set(pool.stored.values()) == set(our_keys(old) + our_keys(list(range(200, 208))))


def test_blocks_of_a_request_that_runs_later_go_first():
    pool = make_pool(1 + 4, "lru")
    urgent, later = list(range(8)), list(range(100, 108))
    for name, token_ids, priority in (("urgent", urgent, 0), ("later", later, 1)):
        pool.start(pool.request(name, token_ids, priority=priority))
        pool.end(name)
    pool.start(pool.request("other", list(range(200, 208))))
    pool.take_events()
    assert set(pool.stored.values()) == set(our_keys(urgent) + our_keys(list(range(200, 208))))


def test_a_shared_prefix_that_is_missed_raises_the_head_start_and_is_counted_once():
    pool = make_pool(1 + 4, "adaptive")
    prefix = list(range(8))
    for name in ("a", "b"):
        pool.start(pool.request(name, [*prefix, 1]))
        pool.end(name)
    for name in range(4):
        pool.start(pool.request(f"one-off {name}", [1000 + 20 * name + number for number in range(16)]))
        pool.end(f"one-off {name}")
    free = pool.manager.block_pool._free
    assert free.adaptive.num_ghosts == (2, 2)
    request = pool.request("c", [*prefix, 1])
    for _ in range(3):  # a queued request is looked up again at each step
        pool.manager.get_computed_blocks(request)
    pool.start(request)
    assert (free.adaptive.num_ghost_hits, free.adaptive.num_ghosts[1]) == ([0, 2], 0)
    assert free.head_start > 1


def test_a_preempted_request_that_lost_its_blocks_moves_nothing():
    pool = make_pool(1 + 4, "adaptive")
    request = pool.request("a", list(range(10)))
    pool.start(request)
    pool.end("a")
    request.num_computed_tokens = 0
    pool.start(pool.request("b", list(range(100, 116))))
    pool.end("b")
    assert pool.start(request) == 0
    free = pool.manager.block_pool._free
    assert (free.adaptive.num_ghost_hits, free.head_start) == ([0, 0], 1.0)


@pytest.mark.parametrize("rule", ["lru", "shared_first", "adaptive"])
@pytest.mark.parametrize("seed", range(15))
def test_walk(rule: str, seed: int):
    rng = random.Random(seed)
    pool = make_pool(rng.randrange(20, 60), rule)
    block_pool = pool.manager.block_pool
    free = block_pool._free
    parent_of: dict[BlockKey, BlockKey | None] = {}
    prefixes = [[rng.randrange(100) for _ in range(BLOCK_SIZE * rng.randrange(1, 6))] for _ in range(4)]
    for step in range(120):
        if pool.live and (rng.random() < 0.45 or len(pool.live) > 4):
            pool.end(rng.choice(list(pool.live)))
        elif rng.random() < 0.02 and not pool.live:
            assert pool.manager.reset_prefix_cache()
        else:
            start = rng.choice(prefixes) if rng.random() < 0.6 else []
            token_ids = start + [rng.randrange(100) for _ in range(rng.randrange(1, BLOCK_SIZE * 5))]
            keys = our_keys(token_ids)
            parent_of.update(zip(keys, [None, *keys], strict=False))
            num_shared_evicted = free.num_evicted[BlockClass.SHARED]
            request = pool.request(f"{step}", token_ids, priority=rng.choice([-1, 0, 1]))
            if rng.random() < 0.3:
                block_pool.expect(request)
            pool.start(request)
            if rule == "shared_first" and free.num_evicted[BlockClass.SHARED] > num_shared_evicted:
                assert free.num_free[:2] == (0, 0), f"step {step}: shared evicted while others were left"
        pool.take_events()
        content = {block.block_hash[:-4] for block in block_pool.blocks if block.block_hash is not None}
        hashes, keys_in_pool = block_pool.snapshot()
        assert dict(zip(hashes, keys_in_pool, strict=True)) == pool.stored, f"step {step}: events are not the content"
        assert len(pool.stored) == len(content) == free.num_keys
        resident = set(keys_in_pool)
        assert all(parent_of[key] is None or parent_of[key] in resident for key in resident), "child without parent"
        num_used = sum(block.ref_cnt > 0 for block in block_pool.blocks if not block.is_null)
        assert num_used + len(free) == len(block_pool.blocks) - 1
        assert block_pool.get_num_free_blocks() == len(free)
        assert all((block.ref_cnt == 0) == (block.block_id in free) for block in block_pool.blocks if not block.is_null)
