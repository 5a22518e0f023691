"""Our own pool of fixed-size KV blocks: sharing of prefixes, copy-on-write, pins. Holds tokens, never keys or values.

Who computes reads block numbers here and does what `append` says about copies. The way of a sequence: `allocate` finds
the cached part of a prompt and takes blocks for the rest; `commit` says how far it has been computed, which makes full
blocks findable; `append` makes room for generated tokens; `release` gives everything back, and what is findable stays
so until the eviction rule gives it up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Rows

from shared.config import MAX_BLOCK_SIZE_TOKENS, MIN_BLOCK_SIZE_TOKENS
from shared.errors import ConfigError, OutOfBlocks
from shared.hashing import TOKEN_SIZE_BYTES, block_keys, num_usable_blocks
from shared.types import BlockKey
from worker.block_store import BlockStore
from worker.pins import Pin, Pins, default_budget_blocks
from worker.sequences import BlockCopy, PoolStatistics, ResidentChanges, Sequence

HashChain = Callable[[bytes, int, BlockKey], list[BlockKey]]
"""Keys of the full blocks in packed tokens, after a parent: `shared.hashing.block_keys`."""


class BlockPool:
    """A pool of blocks under the eviction rule.

    Invariants, proved by `check`: a block is free or held, by as many as its count says; a block that others hold or
    can find is never written; every key stands for one text, its block's and all before it; what can be found has its
    parent findable too. Whatever cannot be done raises before anything has changed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        rule: str,
        *,
        max_sequence_tokens: int,
        bytes_per_token: int = 0,
        pin_budget_blocks: int | None = None,
        hash_chain: HashChain = block_keys,
        changes: ResidentChanges | None = None,
    ) -> None:
        """A pool of free blocks. What becomes findable, or ceases to be, is noted in `changes`.

        Raises:
            ConfigError: a size is out of range, or one longest sequence does not fit.
        """
        if not MIN_BLOCK_SIZE_TOKENS <= block_size_tokens <= MAX_BLOCK_SIZE_TOKENS:
            raise ConfigError(
                f"block size {block_size_tokens}: must be {MIN_BLOCK_SIZE_TOKENS} to {MAX_BLOCK_SIZE_TOKENS} tokens"
            )
        if num_blocks * block_size_tokens < max_sequence_tokens:
            raise ConfigError(
                f"{num_blocks} blocks of {block_size_tokens} tokens hold {num_blocks * block_size_tokens} tokens, "
                f"less than one longest sequence of {max_sequence_tokens}"
            )
        self.block_size_tokens = block_size_tokens
        self._stride = block_size_tokens * TOKEN_SIZE_BYTES
        self._max_sequence_tokens = max_sequence_tokens
        self._bytes_per_token = bytes_per_token
        self._hash_chain = hash_chain
        self._store = BlockStore(num_blocks, self._stride, rule, changes)
        self._sequences: dict[Sequence, None] = {}
        self._group_to_sequences: dict[str, dict[Sequence, None]] = {}
        longest = self._blocks_for(max_sequence_tokens)
        budget = default_budget_blocks(num_blocks, longest) if pin_budget_blocks is None else pin_budget_blocks
        self._pins = Pins(budget)
        self._num_prompt_tokens = self._num_cached_tokens = self._num_copies = self._num_collisions = 0

    # The way of a sequence.

    def allocate(
        self,
        request: str,
        packed_tokens: bytes,
        root: BlockKey,
        *,
        keys: Rows[BlockKey] | None = None,
        group: str | None = None,
        is_low_priority: bool = False,
    ) -> Sequence:
        """Blocks for a whole prompt: shared ones for its cached prefix, new ones for the rest.

        `keys` are those of its full blocks where the caller knows them. Sequences of one `group`, by default those of
        one request, can be released at once.

        Raises:
            OutOfBlocks: there is not enough room. Nothing has changed.
            ValueError: the prompt is empty or too long.
        """
        num_tokens = self._check_length(0, packed_tokens)
        keys = self._keys_of(packed_tokens, root) if keys is None else keys
        cached = self._find(packed_tokens, root, keys)
        num_new = self._blocks_for(num_tokens) - len(cached)
        self._check_room(num_new, cached)
        sequence = Sequence(request, request if group is None else group, root, is_low_priority=is_low_priority)
        self._store.serve(cached, request)
        sequence.blocks = cached + self._store.take(num_new)
        self._store.write(sequence.blocks[len(cached) :], packed_tokens[len(cached) * self._stride :])
        sequence.keys = list(keys)
        sequence.num_tokens = num_tokens
        sequence.num_committed_blocks = len(cached)
        sequence.num_computed_tokens = sequence.num_cached_tokens = len(cached) * self.block_size_tokens
        self._num_prompt_tokens += num_tokens
        self._num_cached_tokens += sequence.num_cached_tokens
        self._enter(sequence)
        return sequence

    def commit(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """The first tokens have been computed: full blocks of them can be found from now on.

        A block whose key stands for other tokens already, and all behind it, stays hidden for good.
        """
        self._check_live(sequence)
        if not sequence.num_computed_tokens <= num_computed_tokens <= sequence.num_tokens:
            raise ValueError(
                f"{num_computed_tokens} tokens computed: must be {sequence.num_computed_tokens} "
                f"to {sequence.num_tokens}"
            )
        sequence.num_computed_tokens = num_computed_tokens
        if not sequence.is_findable:
            return
        start, end = sequence.num_committed_blocks, num_computed_tokens // self.block_size_tokens
        num_published = self._store.publish(
            sequence.blocks, sequence.keys, sequence.root, start, end, sequence.request, sequence.is_low_priority
        )
        sequence.num_committed_blocks += num_published
        if num_published < end - start:
            sequence.is_findable = False
            self._num_collisions += 1

    def append(
        self, sequence: Sequence, packed_tokens: bytes, *, keys: Rows[BlockKey] | None = None
    ) -> BlockCopy | None:
        """Room for more tokens at the end. Tells the copy to make first where the last block may not be written.

        `keys` are those of the blocks that these tokens fill, where the caller knows them.

        Raises:
            OutOfBlocks: there is not enough room. Nothing has changed.
            ValueError: there are no tokens, or too many.
        """
        self._check_live(sequence)
        num_tokens = self._check_length(sequence.num_tokens, packed_tokens)
        num_in_last = sequence.num_tokens % self.block_size_tokens
        is_copied = num_in_last > 0 and not self._store.is_writable(sequence.blocks[-1])
        num_new = self._blocks_for(num_tokens) - len(sequence.blocks) + is_copied
        self._check_room(num_new)
        copy = None
        new_blocks = self._store.take(num_new)
        if num_in_last:
            last = sequence.blocks.pop()
            packed_tokens = self._store.tokens[last][: num_in_last * TOKEN_SIZE_BYTES] + packed_tokens
            if is_copied:
                copy = BlockCopy(last, new_blocks[0], num_in_last)
                self._store.drop([last])
                self._num_copies += 1
            else:
                new_blocks.insert(0, last)
        self._store.write(new_blocks, packed_tokens)
        if keys is None:
            keys = self._keys_of(packed_tokens, sequence.keys[-1] if sequence.keys else sequence.root)
        sequence.keys += keys
        sequence.blocks += new_blocks
        sequence.num_tokens = num_tokens
        return copy

    def fork(self, parent: Sequence, *, num_tokens: int | None = None) -> Sequence:
        """One more sequence of the same request and group that begins with the parent's tokens, all by default.

        Takes no block: the first of the two that writes into a shared last block copies it. Since both serve one
        request, their blocks do not count as used by two.

        Raises:
            ValueError: the parent has no such number of tokens.
        """
        self._check_live(parent)
        length = parent.num_tokens if num_tokens is None else num_tokens
        if not 0 < length <= parent.num_tokens:
            raise ValueError(f"fork at {length} tokens: must be 1 to {parent.num_tokens}")
        num_full = length // self.block_size_tokens
        child = Sequence(parent.request, parent.group, parent.root, is_low_priority=parent.is_low_priority)
        child.blocks = parent.blocks[: self._blocks_for(length)]
        child.keys = parent.keys[:num_full]
        child.num_tokens = length
        child.num_computed_tokens = min(parent.num_computed_tokens, length)
        child.num_committed_blocks = min(parent.num_committed_blocks, num_full)
        child.is_findable = parent.is_findable or num_full <= parent.num_committed_blocks
        self._store.hold(child.blocks)
        self._enter(child)
        return child

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back, the last one first; what can be found stays so until the rule gives it up.

        Raises:
            ValueError: the sequence has been released already, or is another pool's.
        """
        self._check_live(sequence)
        del self._sequences[sequence]
        group = self._group_to_sequences[sequence.group]
        del group[sequence]
        if not group:
            del self._group_to_sequences[sequence.group]
        self._store.drop(reversed(sequence.blocks))

    def release_group(self, group: str) -> int:
        """Release all sequences of a group, the latest first; tells how many.

        Raises:
            ValueError: there is no such group.
        """
        if group not in self._group_to_sequences:
            raise ValueError(f"no group {group!r} in this pool")
        sequences = list(self._group_to_sequences[group])
        for sequence in reversed(sequences):
            self.release(sequence)
        return len(sequences)

    # What is there.

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by sequences or pins. Constant time."""
        return self._store.num_blocks - len(self._store.free)

    @property
    def num_pinned_blocks(self) -> int:
        return self._pins.num_blocks

    @property
    def num_free(self) -> Rows[int]:
        """Free blocks by class, least worth first. Constant time."""
        return self._store.free.num_free

    def resident(self) -> set[BlockKey]:
        """Every key that can be found. Linear in blocks; does not modify."""
        return self._store.free.keys()

    def room_after(self, packed_tokens: bytes, root: BlockKey, *, keys: Rows[BlockKey]) -> tuple[int, int]:
        """How much of a prompt `allocate` would find now, in tokens, and how many free blocks it would leave.

        Those are negative where there is not enough room. Does not modify.
        """
        cached = self._find(packed_tokens, root, keys)
        free = self._store.free
        num_new = self._blocks_for(len(packed_tokens) // TOKEN_SIZE_BYTES) - len(cached)
        return len(cached) * self.block_size_tokens, len(free) - sum(block in free for block in cached) - num_new

    def num_cached_tokens(self, packed_tokens: bytes, root: BlockKey, *, keys: Rows[BlockKey] | None = None) -> int:
        """How much of a prompt `allocate` would find now. Does not modify."""
        return len(self._find(packed_tokens, root, keys)) * self.block_size_tokens

    def expect(self, packed_tokens: bytes, root: BlockKey, *, keys: Rows[BlockKey] | None = None) -> None:
        """A request waits for room: what it will find counts as just used."""
        self._store.free.refresh(self._find(packed_tokens, root, keys))

    def tokens_of(self, sequence: Sequence) -> bytes:
        """All tokens of a live sequence, packed, as its blocks hold them. Linear; does not modify."""
        self._check_live(sequence)
        return b"".join(self._store.tokens[block] for block in sequence.blocks)[
            : sequence.num_tokens * TOKEN_SIZE_BYTES
        ]

    def statistics(self) -> PoolStatistics:
        """Figures of now. Linear in sequences and pinned blocks; does not modify."""
        store, free = self._store, self._store.free
        num_used = store.num_blocks - len(free)
        tails = {sequence.blocks[-1] for sequence in self._sequences}
        num_unused_slots = sum(self._stride - len(store.tokens[block]) for block in tails) // TOKEN_SIZE_BYTES
        num_only_pinned = sum(
            store.num_holders[block] == self._pins.num_pins_of(block) for block in self._pins.blocks()
        )
        num_in_sequences = num_used - num_only_pinned
        num_without_sharing = sum(len(sequence.blocks) for sequence in self._sequences)
        block_bytes = self._bytes_per_token * self.block_size_tokens
        static_bytes = len(self._sequences) * self._max_sequence_tokens * self._bytes_per_token
        return PoolStatistics(
            num_blocks=store.num_blocks,
            num_used=num_used,
            num_shared=store.num_shared,
            num_pinned=self._pins.num_blocks,
            num_free=free.num_free,
            num_cached=free.num_keys,
            num_evicted=tuple(free.num_evicted),
            num_sequences=len(self._sequences),
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_copies=self._num_copies,
            num_collisions=self._num_collisions,
            fragmentation=num_unused_slots / (num_used * self.block_size_tokens) if num_used else 0.0,
            total_bytes=store.num_blocks * block_bytes,
            used_bytes=num_used * block_bytes,
            bytes_saved_by_sharing=(num_without_sharing - num_in_sequences) * block_bytes,
            bytes_saved_against_static=static_bytes - num_in_sequences * block_bytes,
        )

    # Pins and the whole pool.

    def pin(self, name: str, sequence: Sequence, *, now_s: float, ttl_s: float | None = None) -> int:
        """Keep the findable blocks of a live sequence under `name`, in place of what it kept; tells how many.

        They outlive the sequence, until the name is unpinned or its time is over.

        Raises:
            ConfigError: there is no such block, or the time to live is not positive.
            PinRefused: the budget does not suffice. Nothing has changed.
        """
        self._check_live(sequence)
        blocks = sequence.blocks[: sequence.num_committed_blocks]
        former = self._pins.put(name, blocks, now_s=now_s, ttl_s=ttl_s)
        self._store.hold(blocks)
        self._store.drop(reversed(former))
        return len(blocks)

    def check_pin(self, name: str, packed_tokens: bytes, root: BlockKey) -> None:
        """Refuse what `pin` would, before a prompt is computed. Raises `PinRefused`; does not modify."""
        keys = self._keys_of(packed_tokens, root)
        self._pins.check(name, len(keys), self._store.find(keys, packed_tokens, root))

    def unpin(self, name: str) -> int:
        """Give up a pin; its blocks stay findable until the rule gives them up. Tells how many they were.

        Raises:
            UnknownPin: nothing is kept under that name.
        """
        blocks = self._pins.remove(name)
        self._store.drop(reversed(blocks))
        return len(blocks)

    def expire_pins(self, now_s: float) -> list[str]:
        """Unpin what has been kept for long enough; tells the names."""
        names = self._pins.expired(now_s)
        for name in names:
            self.unpin(name)
        return names

    def pins(self) -> list[Pin]:
        """All pins, oldest first. Does not modify."""
        return self._pins.all()

    def reset(self) -> bool:
        """Forget all that can be found, and the pins. False, and no change, while a sequence lives."""
        if self._sequences:
            return False
        for pin in self.pins():
            self.unpin(pin.name)
        self._store.free.clear_keys()
        return True

    def forget_free(self) -> None:
        """Forget all that can be found and that no sequence or pin holds. Linear."""
        self._store.forget_free()

    def check(self) -> None:
        """Prove the invariants, or raise `AssertionError` with the first that is broken. Linear; does not modify."""
        holders: Counter[int] = Counter()
        for sequence in self._sequences:
            holders.update(sequence.blocks)
            text = self.tokens_of(sequence)
            _require(len(text) == sequence.num_tokens * TOKEN_SIZE_BYTES, "a sequence has lost tokens")
            _require(len(sequence.blocks) == self._blocks_for(sequence.num_tokens), "a sequence has spare blocks")
            _require(sequence.keys == self._keys_of(text, sequence.root), "a key is not that of its tokens")
            for number in range(sequence.num_committed_blocks):
                block, key = sequence.blocks[number], sequence.keys[number]
                _require(self._store.free.key_of(block) == key, f"block {block} cannot be found by its key")
        for pin in self.pins():
            holders.update(pin.blocks)
            _require(all(self._store.free.key_of(block) is not None for block in pin.blocks), "a pin keeps nothing")
        _require(self._pins.num_blocks <= self._pins.budget_blocks, "pins are over budget")
        members = [sequence for group in self._group_to_sequences.values() for sequence in group]
        _require(len(members) == len(self._sequences) == len({*members, *self._sequences}), "groups miss sequences")
        self._store.check(holders)

    def _find(self, packed_tokens: bytes, root: BlockKey, keys: Rows[BlockKey] | None) -> list[int]:
        keys = self._keys_of(packed_tokens, root) if keys is None else keys
        num_tokens = len(packed_tokens) // TOKEN_SIZE_BYTES
        return self._store.find(keys[: num_usable_blocks(num_tokens, self.block_size_tokens)], packed_tokens, root)

    def _keys_of(self, packed_tokens: bytes, parent: BlockKey) -> list[BlockKey]:
        return self._hash_chain(packed_tokens, self.block_size_tokens, parent)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size_tokens)

    def _enter(self, sequence: Sequence) -> None:
        self._sequences[sequence] = None
        self._group_to_sequences.setdefault(sequence.group, {})[sequence] = None

    def _check_live(self, sequence: Sequence) -> None:
        if sequence not in self._sequences:
            raise ValueError(f"a sequence of {sequence.request!r} is not this pool's, or has been released")

    def _check_length(self, num_before: int, packed_tokens: bytes) -> int:
        num_more, rest = divmod(len(packed_tokens), TOKEN_SIZE_BYTES)
        if rest or not num_more:
            raise ValueError(f"{len(packed_tokens)} bytes: not one or more packed tokens")
        if num_before + num_more > self._max_sequence_tokens:
            raise ValueError(f"{num_before + num_more} tokens: at most {self._max_sequence_tokens} in a sequence")
        return num_before + num_more

    def _check_room(self, num_new: int, cached: Rows[int] = ()) -> None:
        free = self._store.free
        if num_new <= len(free) - len(cached):
            return
        num_available = len(free) - sum(block in free for block in cached)
        if num_new > num_available:
            raise OutOfBlocks(
                f"{num_new} blocks needed, {num_available} of {self._store.num_blocks} can be had, "
                f"{self._pins.num_blocks} are pinned"
            )


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(otherwise)
