from __future__ import annotations

import random
from typing import get_args

import pytest

from shared.config import EvictionName
from tests.support.operations import count_operations
from worker.eviction import HEAD_STARTS, BlockClass, FreeBlocks


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
    assert ghosts_and_hits(free) == ((1, 0), [0, 1], 1 + 1 / 8)


def test_a_missed_key_that_went_while_private_lowers_the_head_start():
    free = adaptive_with_ghosts()
    free.cache(0, "private", "r3")
    assert ghosts_and_hits(free) == ((0, 1), [1, 0], 1 - 1 / 8)


def test_the_rarer_kind_of_ghost_moves_the_head_start_further():
    free = adaptive_with_ghosts()
    for key in ("p2", "p3"):
        free.cache(0, key, "r1")
        free.push([0])
        free.pop()
    free.cache(1, "shared", "r3")
    assert ghosts_and_hits(free) == ((3, 0), [0, 1], 1 + 3 / 8)


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
    assert ghosts_and_hits(free) == ((1, 0), [1, 0], 0.75)


def test_clearing_keys_clears_ghosts_and_keeps_what_was_learnt():
    free = adaptive_with_ghosts()
    free.cache(0, "shared", "r3")
    free.clear_keys()
    assert ghosts_and_hits(free) == ((0, 0), [0, 1], 1 + 1 / 8)


@pytest.mark.parametrize(("kind", "end"), [("shared", 8.0), ("private", 0.0)])
def test_the_head_start_stays_within_its_bounds(kind: str, end: float):
    free = full_pool("adaptive", 2)
    for number in range(40):
        free.cache(0, kind, f"r{number}")
        if kind == "shared":
            free.use(kind, "another")
        free.push([0])
        free.pop()
    assert free.head_start == end


def test_a_learnt_head_start_decides_the_next_victim():
    free = full_pool("adaptive", 4)
    for number in range(4):  # every private key that goes is missed at once: the head start falls to 0
        free.cache(0, "one-off", f"r{number}")
        free.push([0])
        free.pop()
    free.cache(0, "system prompt", "r1")
    free.use("system prompt", "r2")
    free.push([0])
    free.push_unhashed([3])
    free.pop()
    free.cache(1, "history", "r3")
    free.push([1])
    assert free.head_start == 0.25
    assert drain(free) == [1, 0]
    free.cache(1, "one-off", "r9")
    assert free.head_start == 0.0


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


class Model:
    """The rule as its words say it, slowly: what each block holds and since when it is free."""

    def __init__(self, rule: str, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.head_start = {"lru": 0.0, "shared_first": float("inf"), "adaptive": 1.0}[rule]
        self.is_adaptive = rule == "adaptive"
        self.now = 0
        self.num_events = 0
        self.free_since: dict[int, tuple[int, int]] = {}
        self.key_of: dict[int, str] = {}
        self.users: dict[str, list[str]] = {}
        self.low: set[str] = set()
        self.ghosts: dict[bool, list[tuple[str, str]]] = {False: [], True: []}

    def is_shared(self, key: str) -> bool:
        return len(set(self.users[key])) > 1

    def stamp(self, block: int) -> None:
        self.num_events += 1
        self.free_since[block] = (self.now, self.num_events)

    def use(self, key: str, request: str) -> None:
        was_shared = self.is_shared(key)
        self.users[key].append(request)
        if self.is_shared(key) and not was_shared:
            for block in [block for block in self.key_of if self.key_of[block] == key and block in self.free_since]:
                self.stamp(block)

    def cache(self, block: int, key: str, request: str, is_low_priority: bool) -> None:
        if key in self.users:
            self.use(key, request)
        else:
            self.users[key] = [request]
            self.low |= {key} if is_low_priority else set()
            self.miss(key, request)
        self.key_of[block] = key

    def miss(self, key: str, request: str) -> None:
        for kind, ghosts in self.ghosts.items():
            for ghost in [ghost for ghost in ghosts if ghost[0] == key]:
                if ghost[1] != request:
                    step = max(1.0, len(self.ghosts[not kind]) / len(ghosts)) / self.num_blocks
                    self.head_start = min(8.0, max(0.0, self.head_start + (step if kind else -step)))
                ghosts.remove(ghost)

    def victim(self) -> int:
        def rank(block: int) -> tuple[float, ...]:
            allocations, event = self.free_since[block]
            key = self.key_of.get(block)
            if key is None:
                return (0, 0, 0, -event)
            if self.is_shared(key):
                return (2, allocations + self.head_start * self.num_blocks, 1, event)
            return (1 if key in self.low else 2, allocations, 0, event)

        return min(self.free_since, key=rank)

    def pop(self, block: int) -> None:
        del self.free_since[block]
        self.now += 1
        key = self.key_of.pop(block, None)
        if key is not None and key not in self.key_of.values():
            first, shared = self.users[key][0], self.is_shared(key)
            if self.is_adaptive and (shared or key not in self.low):
                self.ghosts[shared] = [*self.ghosts[shared], (key, first)][-(self.num_blocks // 2) :]
            del self.users[key]
            self.low.discard(key)


@pytest.mark.parametrize("rule", ["lru", "shared_first", "adaptive"])
@pytest.mark.parametrize("seed", range(20))
def test_walk_gives_up_the_block_that_the_words_of_the_rule_name(rule: str, seed: int):
    rng = random.Random(seed)
    num_blocks = rng.randrange(4, 30)
    free = full_pool(rule, num_blocks)
    model = Model(rule, num_blocks)
    model.now = num_blocks
    used = set(range(num_blocks))
    for step in range(500):
        action = rng.random()
        if action < 0.35 and used:
            block = rng.choice(sorted(used))
            if block not in model.key_of:
                content = f"k{rng.randrange(num_blocks * 2)}", f"r{rng.randrange(4)}", rng.random() < 0.2
                free.cache(block, *content[:2], is_low_priority=content[2])
                model.cache(block, *content)
        elif action < 0.6 and used:
            block = rng.choice(sorted(used))
            used.remove(block)
            if block in model.key_of:
                free.push([block])
            else:
                free.push_unhashed([block])
            model.stamp(block)
        elif action < 0.75 and model.key_of:
            block = rng.choice(sorted(model.key_of))
            request = f"r{rng.randrange(4)}"
            free.use(model.key_of[block], request)
            model.use(model.key_of[block], request)
            if block in free:
                free.remove(block)
                del model.free_since[block]
                used.add(block)
        elif len(free):
            victim = model.victim()
            is_shared = free.class_of(victim) is BlockClass.SHARED
            num_unshared = sum(free.num_free[: BlockClass.SHARED])
            assert free.in_order()[0] == victim, f"step {step}"
            assert free.pop() == victim
            model.pop(victim)
            used.add(victim)
            assert not (rule == "shared_first" and is_shared and num_unshared), f"step {step}: others were left"
        assert free.head_start == pytest.approx(model.head_start)
        assert len(free) + len(used) == num_blocks
        assert sorted(free.in_order()) == sorted(model.free_since)
        assert free.num_keys == len(model.users) == len(set(model.key_of.values()))


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
