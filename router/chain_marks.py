"""The few blocks of a prompt's chain by which prompts with a common beginning find each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.types import BlockKey


def chain_marks(keys: Sequence[BlockKey]) -> Iterator[BlockKey]:
    """Keys at depth 0 and at all powers of two: few even of the longest prompt."""
    depth = 0
    while depth < len(keys):
        yield keys[depth]
        depth = depth * 2 or 1


def last_mark_within(keys: Sequence[BlockKey], depth: int) -> BlockKey:
    """The deepest of them that is no deeper than `depth`."""
    return keys[last_mark_depth(depth + 1)]


def last_mark_depth(num_blocks: int) -> int:
    """The depth of the last mark of a chain of so many blocks; 0 of an empty one."""
    return 1 << (num_blocks - 1).bit_length() - 1 if num_blocks > 1 else 0
