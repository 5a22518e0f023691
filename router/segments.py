"""Token ids of pieces of text that prompts have in common, so that only what is new in a prompt is tokenised.

Owns the pieces' ids and the watch over them; where texts may be cut is not decided here.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from router.cuts import Cuts
from shared.hashing import TOKEN_SIZE_BYTES
from shared.telemetry import Readings

logger = logging.getLogger(__name__)

PackAll = Callable[[Sequence[str]], Sequence[bytes]]
"""Packed token ids of several texts, without the special tokens that a tokenizer puts around one."""

_MAX_BYTES = 64 << 20
"""Some 900 chats of 8,192 tokens."""
_ENTRY_BYTES = 200
"""Of an entry, beside its text and ids: key, table slot and the headers of both."""
_LARGEST_SHARE = 16
"""A piece that would take more than one part in so many is not kept: it would push out what others share."""
_GROUP_CHARS = 16_384
"""Text that is tokenised in one go: a few milliseconds, after which work that nobody waits for ends."""


class GivenUp(Exception):
    """Nobody waits for the token ids any more."""


@dataclass(slots=True)
class Lookup:
    """What is known of one text."""

    pieces: list[str]
    packed: list[bytes | None]
    """Ids of each piece; None where they are not known."""
    salt: str
    missing_chars: int


class Segments:
    """The ids of pieces, least recently used first out. Safe to use from several threads at once.

    Entries are found by salt and text, not by a hash of it: no text can pass for another, and how long a prompt takes
    tells nothing of other tenants' prompts.
    """

    def __init__(
        self,
        pack_all: PackAll,
        cuts: Cuts,
        *,
        pack_whole: PackAll | None = None,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        """`pack_whole` is beyond doubt, where `pack_all` is a faster way."""
        self._pack_all = pack_all
        self._pack_whole = pack_whole or pack_all
        self._cuts = cuts
        self._max_bytes = max_bytes
        self._key_to_packed: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_known_tokens = 0
        """Tokens that were taken from here."""
        self.num_new_tokens = 0
        """Tokens that text was tokenised to."""
        self.num_compared = 0
        self.num_mismatches = 0
        self.why_off = None if cuts.is_any else "; ".join(cuts.doubts) or "the tokenizer has no special tokens"
        """Why texts are not cut; None while they are."""

    @property
    def is_on(self) -> bool:
        """Whether texts are cut at all."""
        return self.why_off is None

    def look_up(self, text: str, salt: str = "", marks: Sequence[int] | None = None) -> Lookup:
        """Cut a text and find what is known of it. Modifies the order of what is thrown out.

        `marks` are where special tokens begin that are cut at, where somebody knows that.
        """
        # Read once: another thread may turn it off meanwhile, which must not keep some pieces and cut others.
        if not self.is_on:
            return Lookup([text], [None], salt, len(text))
        lookup = Lookup(self._cuts.pieces(text, marks), [], salt, 0)
        lookup.packed = [None] * len(lookup.pieces)
        lookup.missing_chars = self._find(lookup, range(len(lookup.pieces)))
        return lookup

    def complete(self, lookup: Lookup, is_given_up: Callable[[], bool] | None = None) -> bytes:
        """Packed token ids of the whole text: tokenises what is not known and keeps it. Modifies.

        Raises `GivenUp` as soon as `is_given_up`, and what the tokenizer raises on text that is not Unicode.
        """
        num_new_tokens = 0
        for group in _groups(lookup):
            if is_given_up is not None and is_given_up():
                raise GivenUp
            # Of several prompts that begin alike and came together the first has brought it meanwhile.
            self._find(lookup, group)
            missing = [index for index in group if lookup.packed[index] is None]
            found = self._pack_all([lookup.pieces[index] for index in missing])
            for index, packed in zip(missing, found, strict=True):
                lookup.packed[index] = packed
                num_new_tokens += len(packed) // TOKEN_SIZE_BYTES
            self._keep(lookup, missing)
        whole = b"".join(packed for packed in lookup.packed if packed is not None)
        with self._lock:
            self.num_new_tokens += num_new_tokens
            self.num_known_tokens += len(whole) // TOKEN_SIZE_BYTES - num_new_tokens
        return whole

    def whole(self, text: str) -> bytes:
        """Packed token ids of a text that is tokenised in one piece, whatever is known of it."""
        return self._pack_whole([text])[0]

    def compare(self, text: str, packed: bytes) -> None:
        """Tokenise a text as a whole and turn this off, loudly, where `packed` is something else. Modifies."""
        self.num_compared += 1
        if self.whole(text) == packed:
            return
        self.num_mismatches += 1
        if self.is_on:
            logger.error(
                "a prompt of %d characters has other token ids in pieces than as a whole: prompts are tokenised as a "
                "whole from now on",
                len(text),
            )
            self._turn_off("a prompt had other token ids in pieces than as a whole")

    def _turn_off(self, why: str) -> None:
        """Cut no text any more, take no faster way, and forget all pieces."""
        with self._lock:
            self.why_off = why
            self._pack_all = self._pack_whole
            self._key_to_packed.clear()
            self.num_bytes = 0

    def expose(self, readings: Readings) -> None:
        """Have what is counted here told as metrics."""
        readings.add_counters(
            "kvroute_tokenised_tokens",
            "Prompt tokens by whether their text was tokenised (new) or known from earlier prompts.",
            "source",
            lambda: {"known": self.num_known_tokens, "new": self.num_new_tokens},
        )
        readings.add_gauge(
            "kvroute_segment_cache_on",
            "1 while prompts are tokenised in pieces; 0 where their tokenizer forbids it or a comparison failed.",
            lambda: self.is_on,
        )
        readings.add_gauge(
            "kvroute_segment_cache_bytes", "Memory that known pieces of prompts take.", lambda: self.num_bytes
        )
        readings.add_counter(
            "kvroute_segment_cache_compared",
            "Prompts whose token ids were compared with those of the whole text.",
            lambda: self.num_compared,
        )
        readings.add_counter(
            "kvroute_segment_cache_mismatches",
            "Compared prompts whose token ids were not those of the whole text.",
            lambda: self.num_mismatches,
        )

    def _find(self, lookup: Lookup, indices: Iterable[int]) -> int:
        """Look some pieces up; how many characters those have that are not known."""
        table, salt, pieces, packed = self._key_to_packed, lookup.salt, lookup.pieces, lookup.packed
        missing_chars = 0
        with self._lock:
            for index in indices:
                key = (salt, pieces[index])
                known = table.get(key)
                if known is not None:
                    table.move_to_end(key)
                    packed[index] = known
                else:
                    missing_chars += len(pieces[index])
        return missing_chars

    def _keep(self, lookup: Lookup, indices: Sequence[int]) -> None:
        with self._lock:
            if not self.is_on:
                return
            for index in indices:
                key, packed = (lookup.salt, lookup.pieces[index]), lookup.packed[index]
                if packed is None or key in self._key_to_packed:
                    continue
                num_bytes = _num_bytes(key, packed)
                if num_bytes <= self._max_bytes // _LARGEST_SHARE:
                    self._key_to_packed[key] = packed
                    self.num_bytes += num_bytes
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _num_bytes(*self._key_to_packed.popitem(last=False))


def _num_bytes(key: tuple[str, str], packed: bytes) -> int:
    return sys.getsizeof(key[1]) + len(packed) + _ENTRY_BYTES


def _groups(lookup: Lookup) -> list[list[int]]:
    """The pieces that are not known, a bounded amount of text at a time."""
    groups: list[list[int]] = []
    room_chars = 0
    for index, packed in enumerate(lookup.packed):
        if packed is not None:
            continue
        if room_chars <= 0:
            groups.append([])
            room_chars = _GROUP_CHARS
        groups[-1].append(index)
        room_chars -= len(lookup.pieces[index])
    return groups
