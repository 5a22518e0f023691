"""A router's own copy of who holds which block, built to be matched fast. Pure data: no clock, no I/O."""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.directory.base import Match
from shared.types import BlockKey, Instance, WorkerId

_NUM_SHARDS = 256
_MAX_REMEMBERED_MATCHES = 64
_ROOMY_BYTES_PER_KEY = 256
"""A table that has just grown takes at most half of this for each key."""
_SHARDS_PER_COMPACTION = 8
_MISSING: Any = object()
_FIRST_PART, _LATER_PART = 32, 256
"""Keys of a chain that are looked up at once: few at first, since most chains end early."""

Keys = tuple[BlockKey, ...]


def in_parts(stored: Keys, removed: Keys, most_keys: int) -> Iterator[tuple[Keys, Keys]]:
    """The same changes in the same order, at most so many at once: most batches as they are."""
    if len(stored) + len(removed) <= most_keys:
        yield stored, removed
        return
    for start in range(0, len(stored), most_keys):
        yield stored[start : start + most_keys], ()
    for start in range(0, len(removed), most_keys):
        yield (), removed[start : start + most_keys]


@dataclass(slots=True, eq=False)
class Copy:
    """One generation of a slot: what is known of one worker since one load of it.

    A worker that is loaded again gets another copy in another slot; the old slot is free again only after the last of
    its bits is gone, so that a bit never speaks for a later generation.
    """

    worker: WorkerId
    instance: Instance
    slot: int
    bit: int
    resident: dict[BlockKey, None] = field(default_factory=dict)
    """An ordered set; unlike a `set` of atoms, such a dictionary costs the garbage collector nothing."""
    is_dropped: bool = False


class Mirror:
    """Block key -> bitmap of the slots that hold it, and for each slot the keys that it holds.

    Invariants: a bit of a copy that is not dropped is set exactly for the keys in its `resident`; a bit of a dropped
    copy is set for no others. What is dropped is cleared piece by piece in `clean`, and matched no more from the start.
    Keys are spread over many small tables by their first byte, since one large table holds up everybody whenever it
    grows.
    """

    def __init__(self) -> None:
        self._shards: list[dict[BlockKey, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._slots: list[Copy | None] = []
        self._free_slots: list[int] = []
        """A heap: low slots first keeps bitmaps short."""
        self._worker_to_copy: dict[WorkerId, Copy] = {}
        """Copies that are matched."""
        self._shown_bits = 0
        """Theirs."""
        self._dropped: deque[Copy] = deque()
        self._num_shards_to_compact = 0
        self._matches: dict[tuple[int, int], dict[WorkerId, Match]] = {}
        """By bits and depth, as long as slots stand for the same copies."""

    @property
    def num_keys(self) -> int:
        """Distinct keys, those that wait to be cleaned included."""
        return sum(map(len, self._shards))

    @property
    def num_entries(self) -> int:
        """Pairs of a worker that is matched and a key that it holds."""
        return sum(len(copy.resident) for copy in self._worker_to_copy.values())

    @property
    def num_slots(self) -> int:
        """Slots in use, those that wait to be cleaned included."""
        return len(self._slots) - len(self._free_slots)

    @property
    def has_dropped(self) -> bool:
        """Whether `clean` has something to do."""
        return bool(self._dropped or self._num_shards_to_compact)

    @property
    def shown(self) -> KeysView[WorkerId]:
        """Workers that are matched."""
        return self._worker_to_copy.keys()

    def resident(self, worker: WorkerId) -> set[BlockKey] | None:
        """Every key that a worker holds; `None` if it is not matched. Linear in its blocks."""
        copy = self._worker_to_copy.get(worker)
        return None if copy is None else set(copy.resident)

    def begin(self, worker: WorkerId, instance: Instance) -> Copy:
        """An empty copy, which is not matched before it is shown. Modifies."""
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
        else:
            slot = len(self._slots)
            self._slots.append(None)
        self._matches.clear()
        copy = self._slots[slot] = Copy(worker, instance, slot, 1 << slot)
        return copy

    def show(self, copy: Copy) -> None:
        """Match this copy from now on, in place of any other of its worker. Modifies."""
        if copy.is_dropped:
            return
        shown = self._worker_to_copy.get(copy.worker)
        if shown is not None and shown is not copy:
            self.drop(shown)
        self._worker_to_copy[copy.worker] = copy
        self._shown_bits |= copy.bit

    def drop(self, copy: Copy) -> None:
        """Match this copy no more and take nothing more into it. Modifies, in constant time; `clean` does the rest."""
        if copy.is_dropped:
            return
        copy.is_dropped = True
        if self._worker_to_copy.get(copy.worker) is copy:
            del self._worker_to_copy[copy.worker]
            self._shown_bits ^= copy.bit
        self._dropped.append(copy)

    def apply(self, copy: Copy, stored: Collection[BlockKey], removed: Iterable[BlockKey] = ()) -> None:
        """Take one batch in, `removed` after `stored`. Modifies, at once; a dropped copy takes nothing."""
        if copy.is_dropped:
            return
        shards, bit, resident = self._shards, copy.bit, copy.resident
        resident.update(dict.fromkeys(stored))
        for key in stored:
            # Most keys have one holder: they share one object for its bit, and are looked up once.
            held = shards[key[0]].setdefault(key, bit)
            if held is not bit:
                shards[key[0]][key] = held | bit
        self._clear([key for key in removed if resident.pop(key, _MISSING) is None], bit)

    def clean(self, max_keys: int) -> None:
        """Clear up to `max_keys` bits of what was dropped. Modifies; call it until `has_dropped` is false."""
        if self._dropped:
            copy = self._dropped[0]
            resident, bit = copy.resident, copy.bit
            self._clear([resident.popitem()[0] for _ in range(min(max_keys, len(resident)))], bit)
            if not resident:
                self._dropped.popleft()
                self._slots[copy.slot] = None
                heapq.heappush(self._free_slots, copy.slot)
                self._num_shards_to_compact = _NUM_SHARDS
            return
        for _ in range(min(_SHARDS_PER_COMPACTION, self._num_shards_to_compact)):
            self._num_shards_to_compact -= 1
            shard = self._shards[self._num_shards_to_compact]
            # A dictionary keeps the table of its largest days.
            if sys.getsizeof(shard) > _ROOMY_BYTES_PER_KEY * (len(shard) + 1):
                self._shards[self._num_shards_to_compact] = dict(shard)

    def match(self, keys: Sequence[BlockKey], workers: Iterable[WorkerId]) -> dict[WorkerId, Match]:
        """The longest resident prefix of `keys` on each of `workers`; who holds no first block is absent.

        Does not modify. One look-up for each key until nobody holds it; nothing is inferred from keys further on.
        """
        asked = workers.keys() if isinstance(workers, Mapping) else set(workers)
        candidates = self._shown_bits
        if not asked >= self._worker_to_copy.keys():
            candidates = sum(copy.bit for worker, copy in self._worker_to_copy.items() if worker in asked)
        found: dict[WorkerId, Match] = {}
        shards = self._shards
        num_blocks = 0
        if candidates & (candidates - 1):
            for num_blocks, key in enumerate(keys):
                try:
                    held = shards[key[0]][key]
                except KeyError:
                    held = 0
                if held == candidates:
                    continue
                held &= candidates
                if held == candidates:
                    continue
                if num_blocks:
                    gone = candidates ^ held
                    # Few go on, and are noted anew further on: that all came to here is likelier to be remembered.
                    self._collect(candidates if gone.bit_count() > held.bit_count() else gone, num_blocks, found)
                candidates = held
                if not held & (held - 1):
                    break  # one is left, or nobody
            else:
                num_blocks = len(keys)
        if candidates:
            if not candidates & (candidates - 1):
                num_blocks += self._num_leading(keys, num_blocks, candidates)
            if num_blocks:
                self._collect(candidates, num_blocks, found)
        return found

    def _num_leading(self, keys: Sequence[BlockKey], start: int, bit: int) -> int:
        """How many keys from `start` on the one slot of `bit` holds, looked up in its own table."""
        copy = self._slots[bit.bit_length() - 1]
        assert copy is not None, "a bit of a match is that of a copy"
        resident = copy.resident
        at, length = start, _FIRST_PART
        while at < len(keys):
            part = keys[at : at + length]
            # Most look-ups wait for memory. A loop inside the interpreter lets many of them wait at once.
            missing = set(part).difference(resident)
            if missing:
                return at - start + next(index for index, key in enumerate(part) if key in missing)
            at += len(part)
            length = _LATER_PART
        return at - start

    def _collect(self, bits: int, num_blocks: int, found: dict[WorkerId, Match]) -> None:
        """Note the depth of every slot in `bits`. Groups are remembered: many prompts begin with what all hold."""
        matches = self._matches.get((bits, num_blocks))
        if matches is None:
            group, matches = bits, {}
            while group:
                copy = self._slots[group.bit_length() - 1]
                assert copy is not None, "a bit of a match is that of a copy"
                group ^= copy.bit
                matches[copy.worker] = Match(copy.instance, num_blocks)
            if len(matches) > 1:
                if len(self._matches) >= _MAX_REMEMBERED_MATCHES:
                    self._matches.clear()
                self._matches[bits, num_blocks] = matches
        found.update(matches)

    def _clear(self, keys: Iterable[BlockKey], bit: int) -> None:
        shards = self._shards
        for key in keys:
            shard = shards[key[0]]
            held = shard.pop(key)
            if held != bit:
                shard[key] = held ^ bit
