from __future__ import annotations

import random

import pytest

from worker.eviction import BlockClass, FreeBlocks


def full_pool(rule: str, num_blocks: int) -> FreeBlocks[str]:
    """A pool with every block handed out."""
    free: FreeBlocks[str] = FreeBlocks(rule, num_blocks)
    free.push_unhashed(range(num_blocks))
    for _ in range(num_blocks):
        free.pop()
    return free


def drain(free: FreeBlocks[str]) -> list[int]:
    return [free.pop() for _ in range(len(free))]


def test_unhashed_go_first_latest_freed_first():
    free = full_pool("shared_first", 5)
    free.cache(0, "a", "r1")
    free.push([0])
    free.push_unhashed([1, 2])
    free.push_unhashed([3, 4])
    assert drain(free) == [3, 4, 1, 2, 0]


def test_shared_first_spares_an_older_shared_block():
    free = full_pool("shared_first", 3)
    free.cache(0, "system prompt", "r1")
    free.use("system prompt", "r2")
    free.push([0])
    free.cache(1, "one-off", "r3")
    free.cache(2, "another", "r4")
    free.push([2, 1])
    assert free.in_order() == [2, 1, 0]
    assert drain(free) == [2, 1, 0]
    assert free.num_evicted == [0, 2, 1]


def test_lru_lets_age_decide_whatever_the_class():
    free = full_pool("lru", 4)
    free.push_unhashed([3])
    free.cache(0, "system prompt", "r1")
    free.use("system prompt", "r2")
    free.push([0])
    free.pop()  # one allocation later
    free.cache(1, "one-off", "r3")
    free.push([1])
    assert drain(free) == [0, 1]


def test_of_equally_old_blocks_the_private_one_goes_since_it_is_later_in_the_prompt():
    free = full_pool("lru", 2)
    free.cache(0, "root", "r1")
    free.use("root", "r2")
    free.cache(1, "tail", "r2")
    free.push([1, 0])
    assert drain(free) == [1, 0]


def test_a_request_that_returns_to_its_own_blocks_shares_with_nobody():
    free = full_pool("shared_first", 1)
    free.cache(0, "a", "r1")
    free.use("a", "r1")
    assert free.class_of(0) is BlockClass.PRIVATE
    free.use("a", "r2")
    assert free.class_of(0) is BlockClass.SHARED


def test_a_second_copy_by_another_request_shares_the_key_and_moves_the_free_copy():
    free = full_pool("shared_first", 3)
    free.cache(0, "a", "r1")
    free.cache(1, "b", "r1")
    free.push([0, 1])
    free.cache(2, "a", "r2")
    assert free.num_free == (0, 1, 1)
    free.push([2])
    assert drain(free) == [1, 0, 2]


def test_the_class_outlives_one_of_two_copies_and_goes_with_the_last():
    free = full_pool("shared_first", 2)
    free.cache(0, "a", "r1")
    free.cache(1, "a", "r2")
    free.uncache(0)
    assert free.class_of(1) is BlockClass.SHARED
    free.uncache(1)
    free.cache(1, "a", "r3")
    assert free.class_of(1) is BlockClass.PRIVATE


def test_losing_its_key_makes_a_free_block_the_next_to_go():
    free = full_pool("shared_first", 2)
    free.cache(0, "a", "r1")
    free.cache(1, "b", "r1")
    free.push([0, 1])
    free.uncache(1)
    assert drain(free) == [1, 0]


def test_clearing_keys_keeps_the_order_and_forgets_the_classes():
    free = full_pool("shared_first", 3)
    for block, key in enumerate("abc"):
        free.cache(block, key, "r1")
    free.use("a", "r2")
    free.push([0, 1, 2])
    free.clear_keys()
    assert (free.num_keys, free.num_free, drain(free)) == (0, (3, 0, 0), [1, 2, 0])


def test_no_free_block_is_an_error():
    with pytest.raises(IndexError):
        FreeBlocks("lru", 4).pop()


@pytest.mark.parametrize("rule", ["lru", "shared_first"])
@pytest.mark.parametrize("seed", range(20))
def test_walk_conserves_blocks_and_pops_what_in_order_promises(rule: str, seed: int):
    rng = random.Random(seed)
    num_blocks = rng.randrange(4, 30)
    free = full_pool(rule, num_blocks)
    used = set(range(num_blocks))
    key_of: dict[int, str] = {}
    for step in range(400):
        action = rng.random()
        if action < 0.35 and used:
            block = rng.choice(sorted(used))
            if block not in key_of:
                key_of[block] = f"k{rng.randrange(num_blocks)}"
                free.cache(block, key_of[block], f"r{rng.randrange(4)}")
        elif action < 0.6 and used:
            block = rng.choice(sorted(used))
            used.remove(block)
            if block in key_of:
                free.push([block])
            else:
                free.push_unhashed([block])
        elif action < 0.75 and key_of:
            block = rng.choice(sorted(key_of))
            free.use(key_of[block], f"r{rng.randrange(4)}")
            if block in free:
                free.remove(block)
                used.add(block)
        elif len(free):
            expected = free.in_order()[0]
            num_unhashed, num_private, _ = free.num_free
            block = free.pop()
            assert block == expected
            if rule == "shared_first" and free.class_of(block) is BlockClass.SHARED:
                assert (num_unhashed, num_private) == (0, 0), f"step {step}: shared block while others were left"
            free.uncache(block)
            key_of.pop(block, None)
            used.add(block)
        assert len(free) + len(used) == num_blocks
        assert sum(free.num_free) == len(free)
        assert sorted(free.in_order()) == sorted(set(range(num_blocks)) - used)
        assert free.num_keys == len(set(key_of.values()))
