"""Any operations on the free blocks of a pool: they go in the order that the words of the rule name."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.machines import walk
from worker.eviction import FreeBlocks
from worker.free_list import BlockClass
from worker.head_start import MAX_HEAD_START, STEP_POOL_SIZES

INDEX = st.integers(0, 9)
"""Names one of what is there, modulo how many there are."""
KEYS = st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h"])
REQUESTS = st.sampled_from(["r1", "r2", "r3"])


class Model:
    """The rule as its words say it, slowly: what each block holds and since when it is free."""

    def __init__(self, eviction: str, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.head_start = {"lru": 0.0, "shared_first": math.inf, "adaptive": 1.0}[eviction]
        self.is_adaptive = eviction == "adaptive"
        self.num_allocations = 0
        self.num_events = 0
        self.unhashed = list(reversed(range(num_blocks)))
        """Free blocks that hold nothing, next to go first."""
        self.free_since: dict[int, tuple[int, int]] = {}
        """The other free ones: allocations and events by then."""
        self.favoured: set[int] = set()
        self.key_of: dict[int, str] = {}
        self.users: dict[str, list[str]] = {}
        self.low: set[str] = set()
        self.ghosts: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
        """Key and first request of what went while private and while shared."""

    @property
    def free(self) -> set[int]:
        return {*self.unhashed, *self.free_since}

    def is_shared(self, block: int) -> bool:
        return block in self.key_of and len(set(self.users[self.key_of[block]])) > 1

    def rank(self, block: int) -> tuple[float, ...]:
        """Of a free block that is not unhashed; the lowest goes first."""
        allocations, event = self.free_since[block]
        if self.is_shared(block):
            return (1, allocations + self.head_start * self.num_blocks, 1, event)
        return (0 if self.key_of.get(block) in self.low else 1, allocations, 0, event)

    def order(self) -> list[int]:
        return self.unhashed + sorted(self.free_since, key=self.rank)

    def stamp(self, block: int) -> None:
        self.num_events += 1
        self.free_since[block] = (self.num_allocations, self.num_events)

    def take(self, block: int) -> None:
        self.favoured.discard(block)
        if block in self.unhashed:
            self.unhashed.remove(block)
        else:
            del self.free_since[block]

    def use(self, key: str, request: str) -> None:
        copies = [block for block in self.key_of if self.key_of[block] == key]
        was_shared = self.is_shared(copies[0])
        self.users[key].append(request)
        if self.is_shared(copies[0]) and not was_shared:
            self.low.discard(key)
            for block in copies:
                if block in self.free:
                    self.take(block)
                    self.stamp(block)

    def cache(self, block: int, key: str, request: str, parent: int | None, is_low_priority: bool) -> None:
        if key in self.users:
            self.use(key, request)
        else:
            is_known = self.miss(key, request)
            self.users[key] = [request]
            if is_known and (parent is None or self.is_shared(parent)):
                self.users[key].append("one that is remembered")
            elif is_low_priority or (parent is not None and self.key_of.get(parent) in self.low):
                self.low.add(key)
        self.key_of[block] = key

    def miss(self, key: str, request: str) -> bool:
        """Whether two requests are known to have used the key."""
        is_known = False
        for was_shared, ghosts in self.ghosts.items():
            for ghost in [ghost for ghost in ghosts if ghost[0] == key]:
                is_known = was_shared or ghost[1] != request
                if ghost[1] != request:
                    step = max(1.0, len(self.ghosts[not was_shared]) / len(ghosts)) * STEP_POOL_SIZES / self.num_blocks
                    self.head_start = min(MAX_HEAD_START, max(0.0, self.head_start + (step if was_shared else -step)))
                ghosts.remove(ghost)
        return is_known

    def forget(self, block: int) -> None:
        """The block holds its key no longer."""
        key = self.key_of.pop(block, None)
        if key is not None and key not in self.key_of.values():
            del self.users[key]
            self.low.discard(key)

    def pop(self, block: int) -> None:
        self.take(block)
        self.num_allocations += 1
        key, is_shared = self.key_of.get(block), self.is_shared(block)
        is_last = list(self.key_of.values()).count(key or "") == 1
        if key is not None and is_last and self.is_adaptive and key not in self.low:
            remembered = [*self.ghosts[is_shared], (key, self.users[key][0])]
            self.ghosts[is_shared] = remembered[-(self.num_blocks // 2) :]
        self.forget(block)

    def refresh(self, blocks: list[int]) -> None:
        spared: list[int] = []
        for block in blocks:
            if block not in self.free:
                continue
            if block not in self.favoured and len(self.favoured) >= self.num_blocks // 2:
                break
            self.favoured.add(block)
            spared.append(block)
        for block in reversed(spared):
            self.stamp(block)


class EvictionMachine(RuleBasedStateMachine):
    """`FreeBlocks` and its model, side by side."""

    def __init__(self, eviction: str, seen: Counter[str]) -> None:
        super().__init__()
        self.eviction = eviction
        self.seen = seen

    @initialize(num_blocks=st.integers(3, 10))
    def make(self, num_blocks: int) -> None:
        self.free: FreeBlocks[str] = FreeBlocks(self.eviction, num_blocks)
        self.free.push_unhashed(reversed(range(num_blocks)))
        self.model = Model(self.eviction, num_blocks)
        self.num_evicted = [0] * len(BlockClass)

    def used(self) -> list[int]:
        return sorted(set(range(self.model.num_blocks)) - self.model.free)

    def pick(self, index: int, among: list[int]) -> int:
        return among[index % len(among)]

    @precondition(lambda self: self.model.free)
    @rule(key=KEYS, request=REQUESTS, behind=st.none() | INDEX, is_low_priority=st.booleans(), stays=st.booleans())
    def compute(self, key: str, request: str, behind: int | None, is_low_priority: bool, stays: bool) -> None:
        """A block for a key, as most are: it goes back at once, or the request goes on."""
        self.pop()
        block = next(block for block in self.used() if block not in self.model.key_of)
        is_first = behind is None or not self.model.key_of
        parent = None if is_first else self.pick(behind, sorted(self.model.key_of))
        is_new = key not in self.model.users
        assert self.free.cache(block, key, request, parent=parent, is_low_priority=is_low_priority) == is_new
        self.model.cache(block, key, request, parent, is_low_priority)
        self.seen["shared as remembered"] += is_new and self.model.is_shared(block)
        self.seen["low behind low"] += is_new and not is_low_priority and key in self.model.low
        if not stays:
            self.free.push([block])
            self.model.stamp(block)

    @precondition(lambda self: self.model.free)
    @rule()
    def pop(self) -> None:
        expected = self.model.order()[0]
        is_shared = self.model.is_shared(expected)
        if expected in self.model.key_of:
            self.num_evicted[self.free.class_of(expected)] += 1
        assert self.free.pop() == expected
        self.seen["shared evicted"] += is_shared
        if is_shared and self.eviction == "shared_first":
            assert all(map(self.model.is_shared, self.model.free)), "a shared block went while others were left"
        self.model.pop(expected)

    @precondition(lambda self: self.used())
    @rule(index=INDEX, is_lost=st.booleans())
    def push(self, index: int, is_lost: bool) -> None:
        block = self.pick(index, self.used())
        if is_lost and block not in self.model.key_of:
            self.free.push_unhashed([block])
            self.model.unhashed.insert(0, block)
        else:
            self.free.push([block])
            self.model.stamp(block)

    @precondition(lambda self: self.model.key_of)
    @rule(index=INDEX, request=REQUESTS, is_served=st.booleans())
    def use(self, index: int, request: str, is_served: bool) -> None:
        block = self.pick(index, sorted(self.model.key_of))
        was_free = block in self.model.free
        if is_served:
            self.free.serve([block], request)
        else:
            self.free.use(self.model.key_of[block], request)
            if was_free:
                self.free.remove(block)
        if was_free:
            self.model.take(block)
        self.model.use(self.model.key_of[block], request)
        with pytest.raises(KeyError, match="not free"):
            self.free.remove(block)

    @precondition(lambda self: self.model.key_of)
    @rule(indices=st.lists(INDEX, min_size=1, max_size=4))
    def refresh(self, indices: list[int]) -> None:
        blocks = list(dict.fromkeys(self.pick(index, sorted(self.model.key_of)) for index in indices))
        self.free.refresh(blocks)
        self.model.refresh(blocks)
        self.seen["refused to favour"] += len(self.model.favoured) == self.model.num_blocks // 2

    @rule(index=INDEX)
    def uncache(self, index: int) -> None:
        block = index % self.model.num_blocks
        self.free.uncache(block)
        self.model.forget(block)
        if block in self.model.free:
            self.model.take(block)
            self.model.unhashed.append(block)

    @precondition(lambda self: len(self.model.key_of) > 2)
    @rule()
    def clear_keys(self) -> None:
        self.free.clear_keys()
        model = self.model
        model.unhashed, model.free_since = model.order(), {}
        model.favoured.clear()
        model.key_of.clear()
        model.users.clear()
        model.low.clear()
        model.ghosts = {False: [], True: []}

    @invariant()
    def blocks_go_in_the_order_of_the_model(self) -> None:
        assert self.free.in_order() == self.model.order()
        assert len(self.free) == len(self.model.free)
        assert [block in self.free for block in range(self.model.num_blocks)] == [
            block in self.model.free for block in range(self.model.num_blocks)
        ]

    @invariant()
    def at_most_half_the_pool_is_favoured(self) -> None:
        assert self.free._refreshed == self.model.favoured
        assert len(self.model.favoured) <= self.model.num_blocks // 2

    @invariant()
    def keys_copies_and_figures_are_those_of_the_model(self) -> None:
        model = self.model
        assert self.free.num_keys == len(model.users) == len(set(model.key_of.values()))
        for block in range(model.num_blocks):
            assert self.free.key_of(block) == model.key_of.get(block)
            assert (self.free.class_of(block) is BlockClass.SHARED) == model.is_shared(block)
        for key in model.users:
            found = self.free.find(key)
            assert found is not None
            assert model.key_of[found] == key
        assert self.free.head_start == pytest.approx(model.head_start)
        assert self.free.num_evicted == self.num_evicted
        if self.free.adaptive is not None:
            assert self.free.adaptive.num_ghosts == (len(model.ghosts[False]), len(model.ghosts[True]))
            self.seen["head start moved"] += sum(self.free.adaptive.num_ghost_hits) > 0


@pytest.mark.parametrize("eviction", ["lru", "shared_first", "adaptive"])
def test_blocks_go_as_the_words_of_the_rule_say(eviction: str) -> None:
    seen: Counter[str] = Counter()
    walk(lambda: EvictionMachine(eviction, seen), num_examples=150, num_steps=50)
    wanted = {"shared evicted", "refused to favour", "low behind low"}
    wanted |= {"head start moved", "shared as remembered"} if eviction == "adaptive" else set()
    assert wanted <= {what for what, number in seen.items() if number}, "the walks did not meet what they are for"
