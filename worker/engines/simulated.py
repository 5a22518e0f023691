"""The sequences that a simulated engine computes, and what it answers. Decides nothing about when."""

from __future__ import annotations

import struct
from collections.abc import Callable
from collections.abc import Sequence as Rows
from enum import Enum
from typing import Protocol

from xxhash import xxh3_128

from shared.errors import EngineError
from shared.hashing import TOKEN_SIZE_BYTES
from shared.types import BlockKey, RequestId
from worker.engines.base import EngineDelta
from worker.sequences import Sequence

_GROUP = struct.Struct("<4I")
"""Tokens that one digest gives."""

NORMAL_PRIORITY = 0
"""Greater numbers run later, as in vLLM, and their private blocks go first."""


class Listener(Protocol):
    """Who waits for a sequence. Called between steps; must neither wait nor raise."""

    def push(self, delta: EngineDelta, longest_gap_s: float) -> None:
        """New tokens. `longest_gap_s` is the longest time between two tokens so far."""
        ...

    def fail(self, error: EngineError) -> None:
        """The engine is dead."""
        ...


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


class Simulated:
    """One sequence. Changed by its batch alone."""

    __slots__ = (
        "cached_tokens",
        "due_step",
        "held",
        "joined_step",
        "keep",
        "keys",
        "last_token_at_s",
        "listener",
        "longest_gap_s",
        "max_output_tokens",
        "num_before_join",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_told_tokens",
        "number",
        "output",
        "packed_output",
        "packed_prompt",
        "priority",
        "request",
        "root",
        "state",
        "stop_token_ids",
    )

    def __init__(
        self,
        request: RequestId,
        packed_prompt: bytes,
        root: BlockKey,
        listener: Listener,
        *,
        max_output_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        priority: int = NORMAL_PRIORITY,
        keep: Callable[[Sequence], None] | None = None,
    ) -> None:
        self.request = request
        self.packed_prompt = packed_prompt
        self.root = root
        self.listener = listener
        self.max_output_tokens = max_output_tokens
        self.stop_token_ids = stop_token_ids
        self.priority = priority
        self.keep = keep
        """Is handed the sequence's blocks before they are given back at its end."""
        self.num_prompt_tokens = len(packed_prompt) // TOKEN_SIZE_BYTES
        self.number = 0
        """Order of arrival."""
        self.state = State.WAITING
        self.held: Sequence | None = None
        self.keys: Rows[BlockKey] = ()
        """Of the full blocks of what is to be prefilled."""
        self.cached_tokens: int | None = None
        """What the first admission found; None until then."""
        self.num_computed_tokens = 0
        """While it prefills."""
        self.output: tuple[int, ...] | None = None
        """The whole answer; None until the first token."""
        self.packed_output = b""
        self.num_before_join = 0
        """Tokens of the answer that were there when it last began to decode."""
        self.joined_step = 0
        """The step that gave the next one."""
        self.due_step = 0
        """After which something will happen to it, while it decodes."""
        self.num_told_tokens = 0
        self.longest_gap_s = 0.0
        self.last_token_at_s: float | None = None
        """When it was preempted, the end of the step that gave its last token."""

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first."""
        return self.priority, self.number

    def prefill(self) -> bytes:
        """All tokens that must be computed before the next one can be sampled."""
        return self.packed_prompt + self.packed_output[: self.num_before_join * TOKEN_SIZE_BYTES]

    def num_generated(self, step: int) -> int:
        """Tokens of the answer after `step`, for one that decodes."""
        return self.num_before_join + step - self.joined_step + 1


def answer(packed_prompt: bytes, max_tokens: int, vocabulary_size: int, stops: frozenset[int]) -> tuple[int, ...]:
    """What a simulated engine says: tokens that follow from those before them, so it can go on on another engine.

    Four at a time, those of one group of places in the whole sequence, follow from all before the group.
    """
    num_before = len(packed_prompt) % _GROUP.size
    state = xxh3_128(packed_prompt[: len(packed_prompt) - num_before])
    # The prompt's part of the first group is what it is.
    group = packed_prompt[len(packed_prompt) - num_before :]
    token_ids: list[int] = []
    unpack, pack, update, digest = _GROUP.unpack, _GROUP.pack, state.update, state.digest
    while len(token_ids) < max_tokens:
        first, second, third, fourth = unpack(digest())
        fresh = [
            first % vocabulary_size,
            second % vocabulary_size,
            third % vocabulary_size,
            fourth % vocabulary_size,
        ]
        packed = pack(*fresh)
        if group:
            packed = group + packed[len(group) :]
            del fresh[: len(group) // TOKEN_SIZE_BYTES]
            group = b""
        if stops:
            for at, token_id in enumerate(fresh):
                if token_id in stops:
                    return tuple(token_ids + fresh[: at + 1])[:max_tokens]
        token_ids += fresh
        update(packed)
    return tuple(token_ids[:max_tokens])
