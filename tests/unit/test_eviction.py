from __future__ import annotations

from typing import get_args

import pytest

from shared.config import EvictionName
from tests.support.operations import count_operations
from worker.eviction import FreeBlocks
from worker.free_list import BlockClass
from worker.head_start import HEAD_STARTS, MAX_HEAD_START, STEP_POOL_SIZES


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
    assert free.num_evicted == [0, 0, 2, 1]


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
    assert free.num_free == (0, 0, 1, 1)
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
    assert (free.num_keys, free.num_free, drain(free)) == (0, (3, 0, 0, 0), [1, 2, 0])


def test_no_free_block_is_an_error():
    with pytest.raises(IndexError):
        FreeBlocks("lru", 4).pop()


def adaptive_with_ghosts(num_blocks: int = 8) -> FreeBlocks[str]:
    """A full pool out of which `private` went while private and `shared` while shared, both filled by r1."""
    free = full_pool("adaptive", num_blocks)
    free.cache(0, "private", "r1")
    free.cache(1, "shared", "r1")
    free.use("shared", "r2")
    free.push([0, 1])
    assert (free.pop(), free.pop()) == (0, 1)
    return free


def ghosts_and_hits(free: FreeBlocks[str]) -> tuple[tuple[int, int], list[int], float]:
    assert free.adaptive is not None
    return free.adaptive.num_ghosts, free.adaptive.num_ghost_hits, free.head_start


def test_a_missed_key_that_went_while_shared_raises_the_head_start_and_its_ghost_is_gone():
    free = adaptive_with_ghosts()
    free.cache(0, "shared", "r3")
    free.cache(1, "shared", "r4")
    assert ghosts_and_hits(free) == ((1, 0), [0, 1], 1 + STEP_POOL_SIZES / 8)


def test_a_missed_key_that_went_while_private_lowers_the_head_start():
    free = adaptive_with_ghosts()
    free.cache(0, "private", "r3")
    assert ghosts_and_hits(free) == ((0, 1), [1, 0], 1 - STEP_POOL_SIZES / 8)


def test_the_rarer_kind_of_ghost_moves_the_head_start_further():
    free = adaptive_with_ghosts()
    for key in ("p2", "p3"):
        free.cache(0, key, "r1")
        free.push([0])
        free.pop()
    free.cache(1, "shared", "r3")
    assert ghosts_and_hits(free) == ((3, 0), [0, 1], 1 + 3 * STEP_POOL_SIZES / 8)


def test_the_request_that_filled_a_key_moves_nothing_when_it_comes_back():
    free = adaptive_with_ghosts()
    free.cache(0, "private", "r1")
    free.cache(1, "shared", "r1")
    assert ghosts_and_hits(free) == ((0, 0), [0, 0], 1.0)


def test_a_ghost_is_written_when_the_last_copy_goes():
    free = full_pool("adaptive", 8)
    free.cache(0, "a", "r1")
    free.cache(1, "a", "r2")
    free.push([0, 1])
    free.pop()
    assert ghosts_and_hits(free)[0] == (0, 0)
    free.pop()
    assert ghosts_and_hits(free)[0] == (0, 1)


def test_a_block_that_loses_its_key_without_making_room_leaves_no_ghost():
    free = full_pool("adaptive", 8)
    free.cache(0, "a", "r1")
    free.push([0])
    free.uncache(0)
    free.pop()
    assert ghosts_and_hits(free)[0] == (0, 0)


def test_each_list_of_ghosts_holds_half_a_pool_latest_ones():
    free = full_pool("adaptive", 4)
    for number in range(6):
        free.cache(0, f"k{number}", "r1")
        free.push([0])
        free.pop()
    free.cache(0, "k3", "r2")
    assert ghosts_and_hits(free) == ((2, 0), [0, 0], 1.0)
    free.cache(1, "k4", "r2")
    assert ghosts_and_hits(free) == ((1, 0), [1, 0], 1 - STEP_POOL_SIZES / 4)


def test_clearing_keys_clears_ghosts_and_keeps_what_was_learnt():
    free = adaptive_with_ghosts()
    free.cache(0, "shared", "r3")
    free.clear_keys()
    assert ghosts_and_hits(free) == ((0, 0), [0, 1], 1 + STEP_POOL_SIZES / 8)


@pytest.mark.parametrize(("kind", "end"), [("shared", MAX_HEAD_START), ("private", 0.0)])
def test_the_head_start_stays_within_its_bounds(kind: str, end: float):
    free = full_pool("adaptive", 2)
    for number in range(40):
        key = f"k{number}"
        free.cache(0, key, "r1")
        if kind == "shared":
            free.use(key, "another")
        free.push([0])
        free.pop()
        free.cache(0, key, "r2")  # missed
        free.uncache(0)
    assert free.head_start == end


def test_a_learnt_head_start_decides_the_next_victim():
    free = full_pool("adaptive", 4)
    free.cache(0, "history", "r1")
    free.push([0])
    free.pop()
    free.cache(0, "history", "r2")  # a private key that went is missed: the head start falls to 0
    free.uncache(0)
    free.cache(0, "system prompt", "r1")
    free.use("system prompt", "r2")
    free.push([0])
    free.push_unhashed([3])
    free.pop()  # one allocation later
    free.cache(1, "other history", "r3")
    free.push([1])
    assert (free.head_start, drain(free)) == (0.0, [0, 1])


def test_a_missed_key_that_several_requests_have_used_comes_back_as_shared():
    free = adaptive_with_ghosts()
    free.cache(0, "shared", "r3")
    free.cache(1, "private", "r3", parent=0)
    assert (free.class_of(0), free.class_of(1)) == (BlockClass.SHARED, BlockClass.SHARED)


def test_a_missed_key_that_only_its_own_request_has_used_comes_back_as_private():
    free = adaptive_with_ghosts()
    free.cache(0, "shared", "r1")
    free.cache(1, "private", "r1", parent=0)
    assert (free.class_of(0), free.class_of(1)) == (BlockClass.SHARED, BlockClass.PRIVATE)


def test_a_missed_key_comes_back_as_private_behind_a_private_parent_so_that_it_goes_first():
    free = adaptive_with_ghosts()
    free.cache(0, "new parent", "r3")
    free.cache(1, "shared", "r3", parent=0)
    free.push([1, 0])
    assert (free.num_free, drain(free)) == ((0, 0, 2, 0), [1, 0])


def test_a_missed_key_that_comes_back_for_a_request_of_low_priority_is_shared_all_the_same():
    free = adaptive_with_ghosts()
    free.cache(0, "shared", "r3", is_low_priority=True)
    free.cache(1, "new", "r3", parent=0, is_low_priority=True)
    assert (free.class_of(0), free.class_of(1)) == (BlockClass.SHARED, BlockClass.LOW_PRIORITY)


def test_a_shared_prompt_that_returns_once_in_three_turnovers_of_a_flood_is_lost_once():
    free = full_pool("adaptive", 8)
    free.push_unhashed(range(8))
    hits = []
    for number in range(12):
        for user in ("first", "second"):
            block = free.find("system prompt")
            if user == "first":
                hits.append(block is not None)
            if block is None:
                block = free.pop()
                free.cache(block, "system prompt", f"{user} {number}")
            else:
                free.serve([block], f"{user} {number}")
            free.push([block])
            if number:
                break  # two requests at once are seen in the beginning only
        for one_off in range(3 * 8):
            block = free.pop()
            free.cache(block, f"one-off {number} {one_off}", f"flood {number} {one_off}")
            free.push([block])
    assert hits == [False, False] + 10 * [True]


def test_private_blocks_of_low_priority_go_first_and_leave_no_ghost():
    free = full_pool("adaptive", 4)
    free.cache(0, "old", "r1")
    free.push([0])
    free.cache(1, "batch row", "r2", is_low_priority=True)
    free.cache(2, "batch prompt", "r2", is_low_priority=True)
    free.use("batch prompt", "r3")
    free.push([1, 2])
    assert (free.num_free, drain(free)) == ((0, 1, 1, 1), [1, 0, 2])
    assert ghosts_and_hits(free)[0] == (1, 1)


def test_a_key_behind_one_of_low_priority_is_of_low_priority_too():
    free = full_pool("lru", 3)
    free.cache(0, "parent", "r1", is_low_priority=True)
    free.cache(1, "child", "r1", parent=0)
    free.cache(2, "other", "r1")
    free.push([2, 1, 0])
    assert drain(free) == [1, 0, 2]


def test_blocks_of_a_queued_request_count_as_just_used_last_block_first():
    free = full_pool("lru", 6)
    for block, key in enumerate("abcdef"):
        free.cache(block, key, "r1")
    free.push([2, 1, 0, 3, 4, 5])
    free.refresh([0, 1, 2])
    assert drain(free) == [3, 4, 5, 2, 1, 0]


def test_queued_requests_are_favoured_for_half_the_pool_until_their_blocks_are_used():
    free = full_pool("lru", 6)
    for block, key in enumerate("abcdef"):
        free.cache(block, key, "r1")
    free.push([0, 1, 2, 3, 4, 5])
    free.refresh([1, 0])
    free.refresh([3, 2])
    assert free.in_order() == [2, 4, 5, 0, 1, 3]
    free.remove(1)
    free.refresh([2])
    assert drain(free) == [4, 5, 0, 3, 2]


def test_a_favoured_block_that_goes_makes_room_for_another():
    free = full_pool("lru", 2)
    free.cache(0, "a", "r1")
    free.push([0])
    free.refresh([0])
    assert free.pop() == 0
    free.cache(0, "b", "r2")
    free.cache(1, "c", "r2")
    free.push([1, 0])
    free.refresh([1])
    assert drain(free) == [0, 1]


def test_a_class_change_while_a_request_is_queued_moves_the_blocks_once_more():
    free = full_pool("shared_first", 3)
    for block, key in enumerate("abc"):
        free.cache(block, key, "r1")
    free.push([2, 1, 0])
    free.refresh([0])
    free.use("a", "r2")
    assert free.num_free == (0, 0, 2, 1)
    free.uncache(1)
    assert drain(free) == [1, 2, 0]


def test_every_rule_that_a_user_may_name_is_one_of_ours_or_stock():
    assert set(get_args(EvictionName)) == {*HEAD_STARTS, "stock"}


def test_the_cost_of_an_eviction_does_not_depend_on_the_size_of_the_pool():
    def operations(num_blocks: int) -> int:
        free = full_pool("adaptive", num_blocks)
        for block in range(num_blocks):
            free.cache(block, f"k{block}", "r1")
            if block % 3 == 0:
                free.use(f"k{block}", "r2")
        free.push(range(num_blocks))

        def evictions() -> None:
            for _ in range(50):
                free.push_unhashed([free.pop()])
                free.push([free.pop()])

        return count_operations(evictions)

    assert operations(100) == operations(20_000)


@pytest.mark.parametrize("operation", ["serve and release", "refresh", "share", "uncache"])
def test_the_cost_of_what_a_block_goes_through_does_not_depend_on_the_size_of_the_pool(operation: str):
    def operations(num_blocks: int) -> int:
        free = full_pool("adaptive", num_blocks)
        for block in range(num_blocks):
            free.cache(block, f"k{block}", "r1")
        free.release(range(num_blocks))
        middle = range(num_blocks // 2, num_blocks // 2 + 20)

        def work() -> None:
            if operation == "serve and release":
                free.serve(free.find_all(f"k{block}" for block in middle), "r2")
                free.release(middle)
            elif operation == "refresh":
                free.refresh(middle)
            for block in middle:
                if operation == "share":
                    free.use(f"k{block}", "r2")
                elif operation == "uncache":
                    free.uncache(block)

        return count_operations(work)

    assert operations(100) == operations(20_000) > 20


def test_released_blocks_go_where_pushed_ones_would():
    free = full_pool("shared_first", 6)
    for block, key in ((1, "a"), (3, "b"), (4, "c")):
        free.cache(block, key, "r1", is_low_priority=block == 4)
    free.use("b", "r2")
    free.release([0, 1, 2, 3, 4, 5])
    assert (free.num_free, free.in_order()) == ((3, 1, 1, 1), [0, 2, 5, 4, 1, 3])


def test_keys_are_found_up_to_the_first_that_no_block_holds():
    free = full_pool("lru", 4)
    for block, key in enumerate("abac"):
        free.cache(block, key, "r1")
    assert free.find_all("abc") == [0, 1, 3]
    assert free.find_all("axb") == [0]
    assert [free.cache(block, key, "r1") for block, key in ((0, "a"), (1, "b"), (3, "c"))] == [False] * 3


def test_several_blocks_are_popped_in_order_or_not_at_all():
    free = full_pool("lru", 4)
    free.cache(0, "a", "r1")
    free.push([0])
    free.push_unhashed([1, 2])
    with pytest.raises(IndexError, match="3 blocks are free, not 4"):
        free.pop_n(4)
    assert free.in_order() == [1, 2, 0]
    assert free.pop_n(3) == [1, 2, 0]
    with pytest.raises(IndexError, match="no block is free"):
        free.pop()
