"""Random work on our own pool, compared after every step with a plain record of who wrote what.

Walks with fixed seeds and not hypothesis' state machines, which are not among the locked dependencies.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from shared.errors import OutOfBlocks, PinRefused
from shared.hashing import block_keys, pack_tokens
from shared.types import BlockKey
from tests.support.blocks import BLOCK_SIZE, OTHER_ROOT, ROOT, STRIDE_BYTES, make_pool, state, weak_chain
from worker.blocks import BlockPool
from worker.eviction import BlockClass
from worker.sequences import BlockCopy, Sequence

NUM_STEPS = 150


@dataclass
class Walker:
    """A pool, and what its blocks must hold. `memory` is written as an engine writes, copies included."""

    pool: BlockPool
    rule: str
    rng: random.Random
    memory: dict[int, tuple[BlockKey, bytes]] = field(default_factory=dict)
    """Root and whole beginning up to the end of what lies in a block: what its keys and values depend on."""
    text_of: dict[Sequence, bytes] = field(default_factory=dict)
    num_refused: int = 0
    num_copied: int = 0

    def fill(self, sequence: Sequence, num_before: int) -> None:
        """Compute every token of a sequence that is not yet computed, into its blocks."""
        packed = self.text_of[sequence]
        for number in range(num_before // BLOCK_SIZE, len(sequence.blocks)):
            block = sequence.blocks[number]
            others = [other for other in self.text_of if other is not sequence and block in other.blocks]
            assert others == [], "a block that others hold is written"
            self.memory[block] = (sequence.root, packed[: (number + 1) * STRIDE_BYTES])

    def allocate(self, packed: bytes, root: BlockKey) -> None:
        request = f"r{self.rng.randrange(1000)}"
        if self.rng.random() < 0.2:
            self.pool.expect(packed, root)
        free = self.pool._store.free
        num_shared_evicted = free.num_evicted[BlockClass.SHARED]
        sequence = self.refusing(
            lambda: self.pool.allocate(
                request, packed, root, group=f"g{self.rng.randrange(4)}", is_low_priority=self.rng.random() < 0.2
            )
        )
        if sequence is None:
            return
        if self.rule == "shared_first" and free.num_evicted[BlockClass.SHARED] > num_shared_evicted:
            assert sum(free.num_free[: BlockClass.SHARED]) == 0, "a shared block went while others were left"
        for number in range(sequence.num_cached_tokens // BLOCK_SIZE):
            expected = (root, packed[: (number + 1) * STRIDE_BYTES])
            assert self.memory[sequence.blocks[number]] == expected, "a block of another text is shared"
        self.text_of[sequence] = packed
        self.fill(sequence, sequence.num_cached_tokens)
        self.pool.commit(sequence, self.rng.randint(sequence.num_computed_tokens, sequence.num_tokens))

    def append(self, sequence: Sequence) -> None:
        more = self.tokens(self.rng.choice([1, 1, 1, 7, BLOCK_SIZE, 2 * BLOCK_SIZE + 3]))
        num_before = sequence.num_tokens
        copy: Any = self.refusing(lambda: (self.pool.append(sequence, more),))
        if copy is None:
            return
        if isinstance(copy[0], BlockCopy):
            self.num_copied += 1
            assert copy[0].num_tokens == num_before % BLOCK_SIZE
        self.text_of[sequence] += more
        self.fill(sequence, num_before)
        if self.rng.random() < 0.7:
            self.pool.commit(sequence, self.rng.randint(sequence.num_computed_tokens, sequence.num_tokens))

    def fork(self, parent: Sequence) -> None:
        num_tokens = self.rng.choice([parent.num_tokens, self.rng.randint(1, parent.num_tokens)])
        child = self.pool.fork(parent, num_tokens=num_tokens)
        self.text_of[child] = self.text_of[parent][: num_tokens * 4]

    def refusing(self, call: Any) -> Any:
        """What the call gives; None where it was refused, which must not have changed anything."""
        before = state(self.pool)
        try:
            return call()
        except (OutOfBlocks, PinRefused):
            self.num_refused += 1
            assert state(self.pool) == before, "a refused call changed something"
            return None
        except ValueError:  # longer than the longest
            assert state(self.pool) == before
            return None

    def tokens(self, num_tokens: int) -> bytes:
        return pack_tokens(self.rng.choices(range(5), k=num_tokens))

    def step(self, prefixes: list[bytes], now_s: float) -> None:
        live = list(self.text_of)
        action = self.rng.random()
        if live and action < 0.25:
            sequence = self.rng.choice(live)
            self.pool.release(sequence)
            del self.text_of[sequence]
        elif live and action < 0.3:
            group = self.rng.choice(live).group
            members = [sequence for sequence in live if sequence.group == group]
            assert self.pool.release_group(group) == len(members)
            for sequence in members:
                del self.text_of[sequence]
        elif live and action < 0.4:
            self.fork(self.rng.choice(live))
        elif live and action < 0.6:
            self.append(self.rng.choice(live))
        elif live and action < 0.65:
            sequence = self.rng.choice(live)
            if sequence.num_committed_blocks:
                name = f"p{self.rng.randrange(3)}"
                self.refusing(lambda: self.pool.pin(name, sequence, now_s=now_s, ttl_s=self.rng.choice([None, 9.0])))
        elif action < 0.68:
            self.pool.expire_pins(now_s)
        elif action < 0.7:
            assert self.pool.reset() == (not live)
        else:
            begin = self.rng.choice(prefixes) if self.rng.random() < 0.7 else b""
            packed = begin + self.tokens(self.rng.randrange(1, 3 * BLOCK_SIZE))
            self.allocate(packed, self.rng.choice([ROOT, ROOT, OTHER_ROOT]))


@pytest.mark.parametrize("rule", ["lru", "shared_first", "adaptive"])
@pytest.mark.parametrize("hash_chain", [block_keys, weak_chain], ids=["hash", "collisions"])
@pytest.mark.parametrize("seed", range(12))
def test_walk(rule: str, hash_chain: Any, seed: int):
    rng = random.Random(seed)
    num_blocks = rng.randrange(8, 40)
    pool = make_pool(num_blocks, rule, hash_chain=hash_chain, max_sequence_tokens=8 * BLOCK_SIZE, bytes_per_token=4)
    walker = Walker(pool, rule, rng)
    prefixes = [walker.tokens(BLOCK_SIZE * rng.randrange(1, 5)) for _ in range(4)]
    for step in range(NUM_STEPS):
        walker.step(prefixes, float(step))
        pool.check()
        for sequence, packed in walker.text_of.items():
            assert pool.tokens_of(sequence) == packed, f"step {step}: a sequence reads other tokens than it wrote"
            for number in range(sequence.num_tokens // BLOCK_SIZE):
                root, begin = walker.memory[sequence.blocks[number]]
                assert (root, begin) == (sequence.root, packed[: (number + 1) * STRIDE_BYTES]), f"step {step}"
    for sequence in list(walker.text_of):
        pool.release(sequence)
    for pin in pool.pins():
        pool.unpin(pin.name)
    pool.check()
    assert pool.statistics().num_used == 0


def test_the_walks_meet_what_they_are_for():
    """Copies, refusals, evictions, pins and collisions do happen in them."""
    seen: dict[str, int] = dict.fromkeys(("copies", "refused", "shared evicted", "cached", "collisions"), 0)
    for seed in range(12):
        rng = random.Random(seed)
        pool = make_pool(rng.randrange(8, 40), "adaptive", hash_chain=weak_chain, max_sequence_tokens=8 * BLOCK_SIZE)
        walker = Walker(pool, "adaptive", rng)
        prefixes = [walker.tokens(BLOCK_SIZE * rng.randrange(1, 5)) for _ in range(4)]
        for step in range(NUM_STEPS):
            walker.step(prefixes, float(step))
        figures = pool.statistics()
        seen["copies"] += walker.num_copied
        seen["refused"] += walker.num_refused
        seen["shared evicted"] += figures.num_evicted[BlockClass.SHARED]
        seen["cached"] += figures.num_cached_tokens
        seen["collisions"] += figures.num_collisions
    assert {name: number for name, number in seen.items() if number < 10} == {}
