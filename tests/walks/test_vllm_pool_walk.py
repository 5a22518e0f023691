"""vLLM's own KV cache manager on our pool, driven by random requests, without an engine or a model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from shared.errors import PinRefused, UnknownPin
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme
from worker.engines.vllm_keys import chain_keys
from worker.free_list import BlockClass

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

BLOCK_SIZE = 4
BUDGET_BLOCKS = 6
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

    def pin(self, name: str, token_ids: list[int]) -> int:
        """As in the engine: a request of its own, whose prompt is kept before its blocks are free."""
        self.start(self.request(f"pin {name}", token_ids))
        try:
            return self.manager.block_pool.pin(name, self.live[f"pin {name}"])
        finally:
            self.end(f"pin {name}")

    def flood(self) -> None:
        """Fill everything that is free with prompts that are used once."""
        for number in range(self.manager.block_pool.get_num_free_blocks()):
            self.start(self.request(f"one-off {number}", [10_000 + BLOCK_SIZE * number + i for i in range(BLOCK_SIZE)]))
        for name in [name for name in self.live if name.startswith("one-off")]:
            self.end(name)

    def resident(self) -> set[BlockKey]:
        return set(self.manager.block_pool.snapshot()[1])

    def held(self) -> Counter[int]:
        """How many requests and pins hold each block, as their owners tell it."""
        held = Counter(block for pin in self.manager.block_pool.pins() for block in pin.blocks)
        for name in self.live:
            held.update(self.manager.get_block_ids(name)[0])
        return held

    def state(self) -> tuple[Any, ...]:
        """All that a refused operation must leave alone."""
        block_pool = self.manager.block_pool
        references = [block.ref_cnt for block in block_pool.blocks]
        return block_pool.pins(), references, block_pool._free.in_order(), self.resident()

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


def make_pool(num_blocks: int, rule: str = "shared_first", budget_blocks: int = BUDGET_BLOCKS) -> Pool:
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    from worker.engines.vllm_pool import KeyedBlockPool

    init_none_hash(sha256_cbor)
    manager = make_manager(num_blocks)
    KeyedBlockPool.adopt(manager, rule, SCHEME, pin_budget_blocks=budget_blocks)
    return Pool(manager, get_request_block_hasher(BLOCK_SIZE, sha256_cbor))


def make_manager(num_blocks: int) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l0"], spec)]),
        max_model_len=4096,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=True,
        enable_kv_cache_events=True,
    )


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


def test_a_missing_field_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    from worker.engines import vllm_scheduler

    class Output:
        __struct_fields__ = ("request_id",)

    monkeypatch.setattr(vllm_scheduler, "EngineCoreOutput", Output)
    assert vllm_scheduler.check_surface() == "Output has no kv_transfer_params"


def test_an_attribute_that_is_not_assigned_any_more_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    from worker.engines import vllm_scheduler

    class Core:
        def __init__(self, scheduler: object) -> None:
            self.its_scheduler = scheduler

    monkeypatch.setattr(vllm_scheduler, "_ASSIGNED", [(Core, ("its_scheduler",)), (Core, ("scheduler",))])
    assert vllm_scheduler.check_surface() == "Core.__init__ does not assign scheduler"


def test_a_vllm_without_its_source_is_refused(monkeypatch: pytest.MonkeyPatch):
    from worker.engines import vllm_scheduler

    without_source: dict[str, type] = {}
    exec("class Queue:\n def __init__(self): self.num_free_blocks = 0", without_source)
    monkeypatch.setattr(vllm_scheduler, "_ASSIGNED", [(without_source["Queue"], ("num_free_blocks",))])
    assert vllm_scheduler.check_surface() == "Queue.__init__ does not assign num_free_blocks"


def test_a_pool_that_something_unknown_holds_is_not_replaced():
    from worker.engines.vllm_pool import KeyedBlockPool

    manager = make_manager(20)
    holder = [manager.block_pool]
    with pytest.raises(TypeError, match="held by a part of vLLM that this does not know"):
        KeyedBlockPool.adopt(manager, "lru", SCHEME, pin_budget_blocks=0)
    assert len(holder) == 1


def test_all_that_an_allocation_evicts_is_reported_in_one_event_and_no_copy_twice():
    pool = make_pool(1 + 5)
    for name in ("a", "b"):  # at once and block-aligned: the second one computes the last block again
        pool.start(pool.request(name, list(range(8))))
    for name in ("a", "b"):
        pool.end(name)
    pool.manager.take_events()
    pool.start(pool.request("other", list(range(100, 120))))
    removed, stored = pool.manager.take_events()
    assert (type(removed).__name__, len(removed.block_hashes), len(stored.block_hashes)) == ("BlockRemoved", 2, 5)
    assert len(set(removed.block_hashes)) == 2


def test_an_allocation_that_vllm_measures_evicts_and_reports_the_same():
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

    pool = make_pool(1 + 5)
    pool.manager.block_pool.metrics_collector = KVCacheMetricsCollector(sample_rate=1.0)
    for name in ("a", "b"):
        pool.start(pool.request(name, list(range(8))))
    for name in ("a", "b"):
        pool.end(name)
    pool.start(pool.request("other", list(range(100, 120))))
    pool.take_events()
    assert list(pool.stored.values()) == our_keys(list(range(100, 120)))
    assert pool.resident() == set(pool.stored.values())


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


def test_a_class_change_while_a_request_is_queued_moves_its_free_blocks():
    pool = make_pool(1 + 6)
    first, second = list(range(8)), list(range(100, 108))
    for name, token_ids in (("first", first), ("second", second)):
        pool.start(pool.request(name, token_ids))
        pool.end(name)
    pool.manager.block_pool.expect(pool.request("queued", [*second, 1]))
    pool.start(pool.request("sharing", [*first, 1]))  # overtakes it, and makes the first text shared
    pool.end("sharing")
    pool.start(pool.request("other", list(range(200, 216))))
    pool.take_events()
    assert set(pool.stored.values()) == set(our_keys(first) + our_keys(list(range(200, 216))))


def test_a_request_is_counted_when_it_is_served_and_not_at_each_look_up():
    pool = make_pool(20)
    pool.start(pool.request("a", list(range(10))))
    queued = pool.request("b", list(range(10)))
    for _ in range(3):
        pool.manager.get_computed_blocks(queued)
    assert BlockClass.SHARED not in pool.classes().values()
    pool.start(queued)
    assert list(pool.classes().values()).count(BlockClass.SHARED) == 2


def test_what_stands_behind_blocks_of_low_priority_goes_with_them_whatever_its_request_wants_later():
    pool = make_pool(1 + 4, "lru")
    pool.start(pool.request("a", list(range(5)), priority=1))
    pool.end("a")
    pool.start(pool.request("a", list(range(9))))  # the same request has come back with another priority
    pool.end("a")
    pool.start(pool.request("other", list(range(100, 112))))
    pool.take_events()
    assert set(pool.stored.values()) == set(our_keys(list(range(4))) + our_keys(list(range(100, 112))))


def test_blocks_of_a_request_that_runs_later_go_first():
    pool = make_pool(1 + 4, "lru")
    urgent, later = list(range(8)), list(range(100, 108))
    for name, token_ids, priority in (("urgent", urgent, 0), ("later", later, 1)):
        pool.start(pool.request(name, token_ids, priority=priority))
        pool.end(name)
    pool.start(pool.request("other", list(range(200, 208))))
    pool.take_events()
    assert set(pool.stored.values()) == set(our_keys(urgent) + our_keys(list(range(200, 208))))


def test_a_shared_prefix_that_is_missed_raises_the_head_start_is_counted_once_and_comes_back_as_shared():
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
    pool.end("c")
    assert free.num_free[BlockClass.SHARED] == 2


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
def test_a_pinned_prefix_outlives_a_flood_and_goes_last_block_first_when_given_up(rule: str):
    pool = make_pool(1 + 10, rule)
    prefix = list(range(12))
    assert pool.pin("a", [*prefix, 1]) == 3
    (pin,) = pool.manager.block_pool.pins()
    pool.flood()
    assert set(our_keys(prefix)) <= pool.resident()
    assert pool.manager.block_pool.statistics()["num_pinned"] == 3
    assert pool.start(pool.request("b", [*prefix, 2])) == 12
    pool.end("b")
    pool.manager.block_pool.unpin("a")
    assert pool.manager.block_pool.pins() == []
    order = pool.manager.block_pool._free.in_order()
    assert [block for block in order if block in pin.blocks] == list(reversed(pin.blocks))


def test_unpinning_what_is_not_pinned_names_what_is():
    pool = make_pool(20)
    pool.pin("a", list(range(8)))
    with pytest.raises(UnknownPin, match="no pin 'b'; pins are: a"):
        pool.manager.block_pool.unpin("b")


def test_a_replaced_pin_gives_back_what_it_no_longer_keeps():
    pool = make_pool(20)
    pool.pin("a", list(range(16)))
    pool.pin("b", list(range(100, 104)))
    pool.pin("a", [*range(8), *range(50, 54)])
    block_pool = pool.manager.block_pool
    assert [(pin.name, len(pin.blocks)) for pin in block_pool.pins()] == [("b", 1), ("a", 3)]
    pool.manager.block_pool.evict_all_free()
    kept = {*our_keys([*range(8), *range(50, 54)]), *our_keys(list(range(100, 104)))}
    assert (pool.resident(), block_pool.get_num_free_blocks()) == (kept, 19 - 4)


def test_overlapping_pins_count_a_block_once_and_keep_it_until_the_last_is_gone():
    pool = make_pool(20)
    common = list(range(16))
    pool.pin("a", [*common, *range(50, 54)])
    pool.pin("b", [*common, *range(60, 64)])
    block_pool = pool.manager.block_pool
    assert block_pool.statistics()["num_pinned"] == BUDGET_BLOCKS == 4 + 1 + 1
    block_pool.unpin("a")
    block_pool.evict_all_free()
    assert pool.resident() == set(our_keys([*common, *range(60, 64)]))
    block_pool.unpin("b")
    block_pool.evict_all_free()
    assert (pool.resident(), block_pool.get_num_free_blocks()) == (set(), 19)


def test_a_pin_over_budget_is_refused_with_the_figures_and_changes_nothing():
    pool = make_pool(20)
    block_pool = pool.manager.block_pool
    pool.pin("a", list(range(16)))
    request = pool.request("b", [*range(8), *range(50, 66)])
    pool.start(request)
    before = pool.state()
    refusal = "pin 'b': its 6 blocks would make 8 pinned blocks, the budget is 6, 4 are pinned under other names"
    for attempt in (
        lambda: block_pool.check_pin("b", our_keys([*range(8), *range(50, 66)])),
        lambda: block_pool.pin("b", request),
    ):
        with pytest.raises(PinRefused) as refused:
            attempt()
        assert (str(refused.value), pool.state()) == (refusal, before)
    block_pool.check_pin("a", our_keys([*range(8), *range(50, 66)]))  # in place of what is there it fits


def test_a_prompt_that_ends_on_a_block_boundary_is_pinned_again_in_the_same_blocks():
    pool = make_pool(20)
    pool.pin("a", list(range(8)))
    (first,) = pool.manager.block_pool.pins()
    pool.pin("a", list(range(8)))  # its last block is computed again, into a second copy
    pool.pin("b", list(range(8)))
    assert [pin.blocks for pin in pool.manager.block_pool.pins()] == [first.blocks] * 2


def test_a_second_copy_of_a_pinned_block_goes_without_a_word():
    pool = make_pool(1 + 6, budget_blocks=2)
    pool.pin("a", list(range(8)))
    pool.start(pool.request("b", list(range(8))))
    assert sum(block.block_hash is not None for block in pool.manager.block_pool.blocks) == 3
    pool.end("b")
    pool.flood()
    pool.take_events()
    assert set(our_keys(list(range(8)))) <= set(pool.stored.values()) == pool.resident()


def test_a_reset_takes_pins_along_and_says_so():
    pool = make_pool(20)
    pool.pin("a", list(range(8)))
    pool.pin("b", list(range(12)))
    pool.start(pool.request("c", list(range(100, 108))))
    pool.end("c")
    assert pool.manager.reset_prefix_cache()
    pool.take_events()
    block_pool = pool.manager.block_pool
    assert (pool.stored, pool.resident(), block_pool.pins()) == ({}, set(), [])
    assert block_pool.get_num_free_blocks() == 19
    assert pool.pin("a", list(range(8))) == 2


@pytest.mark.parametrize("prompt", [list(range(100, 108)), list(range(8))], ids=["own blocks", "pinned blocks"])
def test_a_reset_that_is_refused_for_a_request_leaves_pins_alone(prompt: list[int]):
    pool = make_pool(20)
    pool.pin("a", list(range(12)))
    request = pool.request("b", prompt)
    assert pool.start(request) is not None
    before = pool.state()
    assert not pool.manager.reset_prefix_cache()
    assert pool.state() == before
    pool.end("b")
    assert pool.manager.reset_prefix_cache()
    assert pool.manager.block_pool.pins() == []


def test_a_request_that_holds_only_pinned_blocks_keeps_them_from_a_reset():
    pool = make_pool(20)
    pool.pin("a", list(range(12)))
    held = pool.request("b", list(range(9)))
    computed, num_cached, _ = pool.manager.get_computed_blocks(held)
    pool.manager.block_pool.touch(computed.blocks[0])
    before = pool.state()
    assert (num_cached, pool.manager.reset_prefix_cache()) == (8, False)
    assert pool.state() == before


def test_a_preempted_request_finds_pinned_blocks_again_and_cannot_pin_what_it_lost():
    pool = make_pool(1 + 8)
    pool.pin("a", list(range(8)))
    request = pool.request("b", list(range(16)))
    assert pool.start(request) == 8
    pool.end("b")
    request.num_computed_tokens = 0
    pool.flood()
    before = pool.state()
    assert pool.manager.block_pool.pin("b", request) is None
    assert pool.state() == before
    assert pool.start(request) == 8
    assert pool.manager.block_pool.pin("b", request) == 4


@pytest.mark.parametrize("rule", ["lru", "shared_first", "adaptive"])
@pytest.mark.parametrize("seed", range(15))
def test_walk(rule: str, seed: int):
    rng = random.Random(seed)
    pool = make_pool(rng.randrange(20, 60), rule, budget_blocks=rng.randrange(2, 9))
    block_pool = pool.manager.block_pool
    kept: dict[str, list[BlockKey]] = {}
    free = block_pool._free
    parent_of: dict[BlockKey, BlockKey | None] = {}
    prefixes = [[rng.randrange(100) for _ in range(BLOCK_SIZE * rng.randrange(1, 6))] for _ in range(4)]
    for step in range(120):
        if pool.live and (rng.random() < 0.45 or len(pool.live) > 4):
            ending = rng.choice(list(pool.live))
            if rng.random() < 0.3:
                pin_as_foretold(pool, rng.choice("abc"), pool.live[ending], kept)
            pool.end(ending)
        elif kept and rng.random() < 0.08:
            name = rng.choice(list(kept))
            del kept[name]
            block_pool.unpin(name)
        elif rng.random() < 0.04:
            before = pool.state()
            if pool.manager.reset_prefix_cache():
                assert not pool.live
                kept.clear()
            else:
                assert pool.live
                assert pool.state() == before
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
        assert {pin.name: len(pin.blocks) for pin in block_pool.pins()} == {
            name: len(keys) for name, keys in kept.items()
        }
        assert {key for keys in kept.values() for key in keys} <= resident, f"step {step}: a pinned block has gone"
        assert block_pool.statistics()["num_pinned"] <= block_pool.pin_budget_blocks
        assert pool.held() == Counter(
            {block.block_id: block.ref_cnt for block in block_pool.blocks if block.ref_cnt and not block.is_null}
        )
        assert all(parent_of[key] is None or parent_of[key] in resident for key in resident), "child without parent"
        num_used = sum(block.ref_cnt > 0 for block in block_pool.blocks if not block.is_null)
        assert num_used + len(free) == len(block_pool.blocks) - 1
        assert block_pool.get_num_free_blocks() == len(free)
        assert all((block.ref_cnt == 0) == (block.block_id in free) for block in block_pool.blocks if not block.is_null)


def pin_as_foretold(pool: Pool, name: str, request: Any, kept: dict[str, list[BlockKey]]) -> None:
    """Pin a finished request's prompt; what `check_pin` says before holds, and a refusal changes nothing."""
    keys = our_keys(request.prompt_token_ids)
    if not keys:
        return
    before = pool.state()
    refusal = refusal_of(lambda: pool.manager.block_pool.check_pin(name, keys))
    assert refusal_of(lambda: pool.manager.block_pool.pin(name, request)) == refusal
    if refusal is None:
        kept[name] = keys
    else:
        assert pool.state() == before


def refusal_of(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except PinRefused as refused:
        return str(refused)
    return None
