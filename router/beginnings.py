"""Which of the requests that wait begin alike, by a few blocks of each one's chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from router.chain_marks import chain_marks, last_mark_within
from router.policies.base import Ints
from shared.types import BlockKey

NOBODY_ELSE = 0
"""Number of what is shared with nobody."""
_FIRST_CAPACITY = 64


class _Keyed(Protocol):
    @property
    def keys(self) -> Sequence[BlockKey]:
        """The chain of the prompt's blocks."""
        ...


Member = TypeVar("Member", bound=_Keyed)


@dataclass(slots=True)
class _Beginning(Generic[Member]):
    """All up to one block of a chain."""

    number: int
    members: set[Member] = field(default_factory=set)


class Beginnings(Generic[Member]):
    """Owns who has which beginnings, as far as they end at depths 0, 1, 2, 4, 8 and so on of a chain.

    Each has a number while anybody has it, so that how many have it is looked up for all requests at once.
    """

    def __init__(self) -> None:
        self._key_to_beginning: dict[BlockKey, _Beginning[Member]] = {}
        self._free_numbers: list[int] = []
        self._num_members: Ints = np.ones(_FIRST_CAPACITY, dtype=np.int64)
        """By number. Nobody else has what has no number."""

    def __len__(self) -> int:
        return len(self._key_to_beginning)

    def add(self, member: Member) -> int:
        """Enter a request. Returns the number of its longest beginning. Modifies."""
        number = NOBODY_ELSE
        for key in chain_marks(member.keys):
            beginning = self._key_to_beginning.get(key)
            if beginning is None:
                beginning = self._key_to_beginning[key] = _Beginning(self._take_number())
            beginning.members.add(member)
            number = beginning.number
            self._num_members[number] = len(beginning.members)
        return number

    def remove(self, member: Member) -> None:
        """Take out a request that is in. Modifies."""
        for key in chain_marks(member.keys):
            beginning = self._key_to_beginning[key]
            beginning.members.discard(member)
            self._num_members[beginning.number] = len(beginning.members)
            if not beginning.members:
                del self._key_to_beginning[key]
                self._free_numbers.append(beginning.number)

    def sharing(self, keys: Sequence[BlockKey], depth: int) -> Iterator[Member]:
        """Who has the chain's block at `depth`, hence all before it, too."""
        beginning = self._key_to_beginning.get(last_mark_within(keys, depth))
        if beginning is not None:
            key = keys[depth]
            for member in beginning.members:
                if len(member.keys) > depth and member.keys[depth] == key:
                    yield member

    def num_members(self, numbers: Ints) -> Ints:
        """How many have the beginnings of these numbers."""
        return self._num_members[numbers]

    def _take_number(self) -> int:
        if self._free_numbers:
            return self._free_numbers.pop()
        # All that have been given out are in use.
        number = NOBODY_ELSE + 1 + len(self._key_to_beginning)
        if number == len(self._num_members):
            self._num_members = np.concatenate((self._num_members, np.ones_like(self._num_members)))
        return number
