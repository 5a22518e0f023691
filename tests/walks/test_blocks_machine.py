"""Any operations on our own pool, against a slow model of it: which text each sequence, pin and block must hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.errors import ConfigError, OutOfBlocks, PinRefused, UnknownPin
from shared.hashing import block_keys, num_usable_blocks, pack_tokens
from shared.types import BlockKey
from tests.support.blocks import BLOCK_SIZE, OTHER_ROOT, ROOT, make_pool, state, weak_chain
from tests.support.machines import walk
from worker.blocks import HashChain
from worker.sequences import Sequence

Tokens = tuple[int, ...]
Beginning = tuple[BlockKey, Tokens]
"""Root and all tokens up to a place: what keys and values that are computed there depend on."""
Answer = TypeVar("Answer")

INDEX = st.integers(0, 5)
"""Names one of what is there, modulo how many there are."""
REQUESTS = st.sampled_from(["r1", "r2", "r3"])
GROUPS = st.sampled_from([None, "g1", "g2"])
PINS = st.sampled_from(["p1", "p2"])
ROOTS = st.sampled_from([ROOT, ROOT, ROOT, OTHER_ROOT])
# Few texts of equal blocks, so that beginnings are often shared.
TEXTS = st.builds(
    lambda blocks, num_tail: tuple(token for letter in blocks for token in [letter] * BLOCK_SIZE) + (7,) * num_tail,
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
    st.sampled_from([1, 5, BLOCK_SIZE]),
)
NUM_TOKENS = st.sampled_from([1, 5, BLOCK_SIZE, 3 * BLOCK_SIZE])


@dataclass
class Live:
    """One sequence as the model knows it."""

    root: BlockKey
    tokens: Tokens

    def beginnings(self) -> list[Beginning]:
        """Of its full blocks, first one first."""
        return beginnings(self.root, self.tokens)


@dataclass
class Kept:
    """One pin as the model knows it."""

    blocks: list[int]
    beginnings: list[Beginning]
    expires_at_s: float | None


def beginnings(root: BlockKey, tokens: Tokens) -> list[Beginning]:
    return [(root, tokens[:end]) for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)]


class PoolMachine(RuleBasedStateMachine):
    """The model knows texts alone: it computes no key and keeps no order."""

    def __init__(self, eviction: str, hash_chain: HashChain, seen: Counter[str]) -> None:
        super().__init__()
        self.eviction = eviction
        self.hash_chain = hash_chain
        self.seen = seen
        self.live: dict[Sequence, Live] = {}
        self.kept: dict[str, Kept] = {}
        self.memory: dict[int, Beginning] = {}
        """What an engine has computed into each block, copies included; also of blocks that are free again."""
        self.users: dict[Beginning, set[str]] = {}
        """Requests that used what can be found, since it can."""
        self.now_s = 0.0

    @initialize(num_blocks=st.integers(4, 14), longest=st.integers(4, 8))
    def make(self, num_blocks: int, longest: int) -> None:
        self.num_blocks = num_blocks
        self.longest_blocks = min(longest, num_blocks)
        self.budget_blocks = min(num_blocks // 2, num_blocks - self.longest_blocks)
        self.pool = make_pool(
            num_blocks, self.eviction, hash_chain=self.hash_chain, max_sequence_tokens=self.longest_blocks * BLOCK_SIZE
        )

    # What the model says.

    def pick(self, index: int) -> Sequence:
        return list(self.live)[index % len(self.live)]

    def holders(self) -> Counter[int]:
        held = Counter(block for sequence in self.live for block in sequence.blocks)
        held.update(block for pin in self.kept.values() for block in pin.blocks)
        return held

    def findable(self) -> dict[int, Beginning]:
        """Blocks that a request could find, and what lies in them."""
        free = self.pool._store.free
        return {block: self.memory[block] for block in range(self.num_blocks) if free.key_of(block) is not None}

    def num_found(self, root: BlockKey, tokens: Tokens) -> int:
        """Leading blocks that a prompt must find; its last token is computed in any case."""
        there = set(self.findable().values())
        usable = beginnings(root, tokens)[: num_usable_blocks(len(tokens), BLOCK_SIZE)]
        return next((number for number, beginning in enumerate(usable) if beginning not in there), len(usable))

    def unless_refused(self, call: Callable[[], Answer], refusal: type[Exception] | None) -> Answer | None:
        """The answer; or None after a refusal, which must be the one that the model expects and change nothing."""
        if refusal is None:
            return call()
        before = state(self.pool)
        with pytest.raises(refusal):
            call()
        assert state(self.pool) == before, "a refused call has changed something"
        self.seen[refusal.__name__] += 1
        return None

    def compute(self, sequence: Sequence, num_before: int) -> None:
        """Write what a sequence has gained, as an engine does."""
        held = self.holders()
        for number in range(num_before // BLOCK_SIZE, len(sequence.blocks)):
            block = sequence.blocks[number]
            assert held[block] == 1, "a block that others hold is written"
            self.memory[block] = (self.live[sequence].root, self.live[sequence].tokens[: (number + 1) * BLOCK_SIZE])

    def check_victims(self, before: dict[int, Beginning], taken: list[int]) -> None:
        """No shared block goes while one is left that is not."""
        shared = {block for block, beginning in before.items() if len(self.users[beginning]) > 1}
        if not shared & set(taken):
            return
        self.seen["shared block evicted"] += 1
        if self.eviction == "shared_first":
            left = set(range(self.num_blocks)) - set(self.holders())
            assert left <= shared, "a shared block went while others were left"

    # Operations.

    @rule(request=REQUESTS, root=ROOTS, tokens=TEXTS, is_low=st.booleans())
    def serve(self, request: str, root: BlockKey, tokens: Tokens, is_low: bool) -> None:
        """A whole request, as most are: nothing of it is left but what can be found."""
        sequence = self.allocate(request, root, tokens, None, is_low, False)
        if sequence is not None:
            self.commit(len(self.live) - 1, len(tokens))
            self.release(len(self.live) - 1)

    @rule(
        request=REQUESTS, root=ROOTS, tokens=TEXTS, group=GROUPS, is_computed=st.booleans(), is_expected=st.booleans()
    )
    def start(
        self, request: str, root: BlockKey, tokens: Tokens, group: str | None, is_computed: bool, is_expected: bool
    ) -> None:
        if self.allocate(request, root, tokens, group, False, is_expected) is not None and is_computed:
            self.commit(len(self.live) - 1, len(tokens))

    @rule(requests=st.permutations(["r1", "r2", "r3"]), root=ROOTS, tokens=TEXTS)
    def race(self, requests: list[str], root: BlockKey, tokens: Tokens) -> None:
        """Two requests compute the same text at once: neither finds what the other has not computed yet."""
        for request in requests[:2]:
            self.allocate(request, root, tokens, None, False, False)
        for index in range(len(self.live)):
            self.commit(index, len(tokens))

    def allocate(
        self, request: str, root: BlockKey, tokens: Tokens, group: str | None, is_low: bool, is_expected: bool
    ) -> Sequence | None:
        packed = pack_tokens(tokens)
        num_found = self.num_found(root, tokens)
        assert self.pool.num_cached_tokens(packed, root) == num_found * BLOCK_SIZE
        if is_expected:
            self.pool.expect(packed, root)
        there, held = self.findable(), self.holders()
        found = beginnings(root, tokens)[:num_found]
        # Of several copies the oldest one serves, which may be a free block or one that is held.
        serving = self.pool._find(packed, root, None)
        assert [there[block] for block in serving] == found, "a block of another text would be shared"
        num_free = self.num_blocks - len(held | Counter(serving))
        refusal: type[Exception] | None = None
        if len(tokens) > self.longest_blocks * BLOCK_SIZE:
            refusal = ValueError
        elif -(-len(tokens) // BLOCK_SIZE) - num_found > num_free:
            refusal = OutOfBlocks
        sequence = self.unless_refused(
            lambda: self.pool.allocate(request, packed, root, group=group, is_low_priority=is_low), refusal
        )
        if sequence is None:
            return None
        assert sequence.num_cached_tokens == num_found * BLOCK_SIZE
        self.seen["cached block"] += num_found
        for beginning in found:
            self.users[beginning].add(request)
        assert not set(sequence.blocks[num_found:]) & set(held), "a block in use has been handed out"
        self.live[sequence] = Live(root, tokens)
        self.check_victims(there, sequence.blocks[num_found:])
        self.compute(sequence, num_found * BLOCK_SIZE)
        return sequence

    @precondition(lambda self: self.live)
    @rule(index=INDEX, num_more=NUM_TOKENS)
    def commit(self, index: int, num_more: int) -> None:
        sequence = self.pick(index)
        there = set(self.findable().values())
        num_before = sequence.num_committed_blocks
        num_computed = min(sequence.num_tokens, sequence.num_computed_tokens + num_more)
        num_collisions = self.pool.statistics().num_collisions
        self.pool.commit(sequence, num_computed)
        for beginning in self.live[sequence].beginnings()[num_before : sequence.num_committed_blocks]:
            self.users.setdefault(beginning, set()).add(sequence.request)
            self.seen["second copy"] += beginning in there
        is_hidden = self.pool.statistics().num_collisions > num_collisions
        assert not is_hidden or self.hash_chain is weak_chain
        self.seen["collision"] += is_hidden

    @precondition(lambda self: self.live)
    @rule(index=INDEX, letter=st.integers(0, 1), num_tokens=NUM_TOKENS)
    def append(self, index: int, letter: int, num_tokens: int) -> None:
        tokens = (letter,) * num_tokens
        sequence = self.pick(index)
        model = self.live[sequence]
        num_before = len(model.tokens)
        num_in_last = num_before % BLOCK_SIZE
        held, there = self.holders(), self.findable()
        last = sequence.blocks[-1]
        must_copy = num_in_last > 0 and (held[last] > 1 or last in there)
        num_needed = -(-(num_before + len(tokens)) // BLOCK_SIZE) - len(sequence.blocks) + must_copy
        refusal: type[Exception] | None = None
        if num_before + len(tokens) > self.longest_blocks * BLOCK_SIZE:
            refusal = ValueError
        elif num_needed > self.num_blocks - len(held):
            refusal = OutOfBlocks
        answer = self.unless_refused(lambda: (self.pool.append(sequence, pack_tokens(tokens)),), refusal)
        if answer is None:
            return
        (copy,) = answer
        assert (copy is not None) == must_copy
        if copy is not None:
            self.seen["copy on write"] += 1
            assert (copy.source, copy.num_tokens) == (last, num_in_last)
            assert copy.target == sequence.blocks[num_before // BLOCK_SIZE]
        taken = sequence.blocks[len(sequence.blocks) - num_needed :]
        assert not set(taken) & set(held), "a block in use has been handed out"
        model.tokens += tokens
        self.check_victims(there, taken)
        self.compute(sequence, num_before)

    @precondition(lambda self: self.live)
    @rule(index=INDEX, num_tokens=NUM_TOKENS)
    def sample_twice(self, index: int, num_tokens: int) -> None:
        """Two answers to one prompt: they part with the first token."""
        self.fork(index, 0)
        for which, letter in ((index, 0), (len(self.live) - 1, 1)):
            self.append(which, letter, num_tokens)

    @precondition(lambda self: self.live)
    @rule(index=INDEX, num_fewer=st.sampled_from([0, 0, 3, BLOCK_SIZE + 3]))
    def fork(self, index: int, num_fewer: int) -> None:
        parent = self.pick(index)
        num_tokens = max(1, parent.num_tokens - num_fewer)
        child = self.pool.fork(parent, num_tokens=num_tokens)
        self.live[child] = Live(self.live[parent].root, self.live[parent].tokens[:num_tokens])
        assert child.blocks == parent.blocks[: len(child.blocks)]

    @precondition(lambda self: self.live)
    @rule(index=INDEX)
    def end(self, index: int) -> None:
        """A release, and then every use of a sequence that is no longer the pool's, or never was."""
        sequence = self.release(index)
        for stranger in (sequence, make_pool(4).allocate("r1", pack_tokens((1,)), ROOT)):
            uses: list[Callable[[], Any]] = [
                lambda: self.pool.release(stranger),  # noqa: B023
                lambda: self.pool.commit(stranger, stranger.num_computed_tokens),  # noqa: B023
                lambda: self.pool.append(stranger, pack_tokens((1,))),  # noqa: B023
                lambda: self.pool.fork(stranger),  # noqa: B023
                lambda: self.pool.pin("p1", stranger, now_s=self.now_s),  # noqa: B023
                lambda: self.pool.tokens_of(stranger),  # noqa: B023
            ]
            for use in uses:
                self.unless_refused(use, ValueError)

    def release(self, index: int) -> Sequence:
        sequence = self.pick(index)
        self.pool.release(sequence)
        del self.live[sequence]
        return sequence

    @precondition(lambda self: self.live)
    @rule(index=INDEX)
    def release_group(self, index: int) -> None:
        group = self.pick(index).group
        members = [sequence for sequence in self.live if sequence.group == group]
        assert self.pool.release_group(group) == len(members)
        for sequence in members:
            del self.live[sequence]

    @precondition(lambda self: any(sequence.num_committed_blocks for sequence in self.live))
    @rule(index=INDEX, name=PINS, ttl_s=st.sampled_from([None, 1.0, 5.0]))
    def pin(self, index: int, name: str, ttl_s: float | None) -> None:
        sequence = self.pick(index)
        blocks = sequence.blocks[: sequence.num_committed_blocks]
        others = {block for other, pin in self.kept.items() if other != name for block in pin.blocks}
        refusal: type[Exception] | None = None
        if not blocks:
            refusal = ConfigError
        elif len(others | set(blocks)) > self.budget_blocks:
            refusal = PinRefused
        answer = self.unless_refused(lambda: self.pool.pin(name, sequence, now_s=self.now_s, ttl_s=ttl_s), refusal)
        if answer is None:
            return
        assert answer == len(blocks)
        expires_at_s = None if ttl_s is None else self.now_s + ttl_s
        self.kept[name] = Kept(list(blocks), self.live[sequence].beginnings()[: len(blocks)], expires_at_s)
        self.seen["pin"] += 1

    @precondition(lambda self: self.kept)
    @rule(name=PINS)
    def unpin(self, name: str) -> None:
        kept = self.kept.pop(name, None)
        answer = self.unless_refused(lambda: self.pool.unpin(name), UnknownPin if kept is None else None)
        assert answer == (None if kept is None else len(kept.blocks))

    @precondition(lambda self: self.kept)
    @rule(seconds=st.sampled_from([1, 5]))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds
        over = [name for name, pin in self.kept.items() if (pin.expires_at_s or self.now_s + 1) <= self.now_s]
        assert sorted(self.pool.expire_pins(self.now_s)) == sorted(over)
        for name in over:
            del self.kept[name]
        self.seen["pin expired"] += len(over)

    @precondition(lambda self: len(self.live) < 2)
    @rule()
    def reset(self) -> None:
        before = state(self.pool)
        assert self.pool.reset() == (not self.live)
        if self.live:
            assert state(self.pool) == before
        else:
            self.kept.clear()
            assert self.findable() == {}

    # What always holds.

    @invariant()
    def every_block_is_held_or_free(self) -> None:
        self.pool.check()
        held, figures = self.holders(), self.pool.statistics()
        assert (figures.num_used, sum(figures.num_free)) == (len(held), self.num_blocks - len(held))
        assert figures.num_shared == sum(number > 1 for number in held.values())
        assert set(self.pool._store.free.in_order()) == set(range(self.num_blocks)) - set(held)

    @invariant()
    def every_sequence_and_pin_reads_what_was_written(self) -> None:
        for sequence, model in self.live.items():
            assert self.pool.tokens_of(sequence) == pack_tokens(model.tokens)
            full = model.beginnings()
            assert [self.memory[block] for block in sequence.blocks[: len(full)]] == full
            if tail := len(model.tokens) % BLOCK_SIZE:
                root, tokens = self.memory[sequence.blocks[-1]]
                num_tokens = len(model.tokens)
                assert (root, tokens[:num_tokens]) == (model.root, model.tokens), f"a tail of {tail} tokens is lost"
        assert {pin.name: list(pin.blocks) for pin in self.pool.pins()} == {
            name: pin.blocks for name, pin in self.kept.items()
        }
        for pin in self.kept.values():
            assert [self.memory[block] for block in pin.blocks] == pin.beginnings
        assert len({block for pin in self.kept.values() for block in pin.blocks}) <= self.budget_blocks

    @invariant()
    def whatever_can_be_found_has_its_parent_findable_too(self) -> None:
        there = set(self.findable().values())
        assert self.pool._store.free.num_keys == len(there)
        assert all(len(tokens) == BLOCK_SIZE or (root, tokens[:-BLOCK_SIZE]) in there for root, tokens in there)
        self.users = {beginning: users for beginning, users in self.users.items() if beginning in there}

    def teardown(self) -> None:
        for sequence in self.live:
            self.pool.release(sequence)
        for pin in self.pool.pins() if self.live or self.kept else []:
            self.pool.unpin(pin.name)
        if self.memory:
            self.pool.check()
            assert self.pool.statistics().num_used == 0


@pytest.mark.parametrize(
    ("eviction", "hash_chain"),
    [("lru", block_keys), ("shared_first", block_keys), ("shared_first", weak_chain), ("adaptive", weak_chain)],
    ids=["lru", "shared_first", "shared_first-collisions", "adaptive-collisions"],
)
def test_pool_does_what_its_model_says(eviction: str, hash_chain: HashChain) -> None:
    seen: Counter[str] = Counter()
    walk(lambda: PoolMachine(eviction, hash_chain, seen), num_examples=100, num_steps=40)
    wanted = {"cached block", "copy on write", "second copy", "shared block evicted", "pin", "pin expired"}
    wanted |= {"OutOfBlocks", "PinRefused", "ValueError"}
    wanted |= {"collision"} if hash_chain is weak_chain else set()
    assert wanted <= {what for what, number in seen.items() if number}, "the walks did not meet what they are for"
