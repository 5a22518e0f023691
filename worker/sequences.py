"""What a block pool hands out and tells: sequences, copies to make, figures."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shared.types import BlockKey


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The holder of `target` must copy the first tokens of `source` into it before anything is written."""

    source: int
    target: int
    num_tokens: int


class Sequence:
    """One holder of blocks. Read by anybody, changed by its pool alone."""

    __slots__ = (
        "blocks",
        "group",
        "is_findable",
        "is_low_priority",
        "keys",
        "num_cached_tokens",
        "num_committed_blocks",
        "num_computed_tokens",
        "num_tokens",
        "request",
        "root",
    )

    def __init__(self, request: str, group: str, root: BlockKey, *, is_low_priority: bool) -> None:
        self.request = request
        self.group = group
        self.root = root
        self.is_low_priority = is_low_priority
        self.blocks: list[int] = []
        """First block first; only the last one may be partly filled."""
        self.keys: list[BlockKey] = []
        """Of its full blocks. Each is computed once."""
        self.num_tokens = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        """Tokens that were found and need not be computed."""
        self.num_committed_blocks = 0
        """Leading blocks that others can find."""
        self.is_findable = True
        """False from the first block on whose key stands for other tokens: nothing behind it may be found."""


class ResidentChanges:
    """What became findable in a pool, and what ceased to be, since it was last asked.

    A key that came and went, or went and came back, in between is no change.
    """

    __slots__ = ("_removed", "_stored")

    def __init__(self) -> None:
        # Ordered sets: all values are false.
        self._stored: dict[BlockKey, bool] = {}
        self._removed: dict[BlockKey, bool] = {}

    def note_stored(self, keys: Collection[BlockKey]) -> None:
        """Keys that could not be found can be."""
        _note(keys, self._stored, self._removed)

    def note_removed(self, keys: Collection[BlockKey]) -> None:
        """Keys that could be found cannot any more."""
        _note(keys, self._removed, self._stored)

    def take(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Keys stored and keys removed. Modifies: what was told is told."""
        told = tuple(self._stored), tuple(self._removed)
        self._stored.clear()
        self._removed.clear()
        return told


def _note(keys: Collection[BlockKey], changed: dict[BlockKey, bool], undone: dict[BlockKey, bool]) -> None:
    """Count keys as changed, but for those whose change the other way this takes back."""
    if not undone.keys().isdisjoint(keys):
        keys = [key for key in keys if undone.pop(key, True)]
    changed.update(dict.fromkeys(keys, False))


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A pool at one moment. Bytes are 0 where the bytes for a token are not known."""

    num_blocks: int
    num_used: int
    """Blocks held by sequences or pins."""
    num_shared: int
    """Blocks held more than once."""
    num_pinned: int
    num_free: tuple[int, ...]
    """By class, least worth first."""
    num_cached: int
    """Keys that can be found, free or in use."""
    num_evicted: tuple[int, ...]
    """By class."""
    num_sequences: int
    num_prompt_tokens: int
    """Of all sequences so far."""
    num_cached_tokens: int
    """Those of them that were found."""
    num_copies: int
    num_collisions: int
    """Blocks kept from being found, since their key stood for other tokens already."""
    fragmentation: float
    """Share of the slots in used blocks that hold no token."""
    total_bytes: int
    used_bytes: int
    bytes_saved_by_sharing: int
    """Against sequences that share nothing."""
    bytes_saved_against_static: int
    """Against room for the longest sequence for each."""
