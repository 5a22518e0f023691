"""What a publisher has on its way to the store: changes, a snapshot that is only to be committed, and since when.

Knows no clock: callers say what time it is, on the one clock of their machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from shared.types import BlockKey, Epoch


class Pending(dict[BlockKey, bool]):
    """Key -> whether it is resident, for changes that no batch carries yet, oldest first."""

    def take(self, most: int) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """The oldest changes, at most so many: keys stored, and keys removed. Modifies."""
        states = self if len(self) <= most else dict(islice(self.items(), most))
        stored = tuple([key for key, is_resident in states.items() if is_resident])
        removed = tuple([key for key, is_resident in states.items() if not is_resident])
        if states is self:
            self.clear()
        else:
            for key in states:
                del self[key]
        return stored, removed


@dataclass(frozen=True, slots=True)
class Commit:
    """A fully staged snapshot. Repeated until the store answers, since only that tells which epoch is current."""

    snapshot: Epoch
    num_keys: int
    cause: str


class Backlog:
    """Since when changes wait: those that are gathered, and those that a batch or a snapshot is bringing to the store.

    What is left behind or overtaken counts as old as what it was with, so that no change counts as younger than it is.
    """

    def __init__(self) -> None:
        self._gathered_at_s: float | None = None
        self._sent_at_s: float | None = None
        """When the oldest change under way was gathered."""

    def gather(self, now_s: float) -> None:
        """There are changes to be told. Modifies."""
        if self._gathered_at_s is None:
            self._gathered_at_s = now_s

    def send(self, now_s: float, *, is_all: bool = True) -> None:
        """What is gathered goes, with what was under way if that has not arrived. Modifies."""
        if self._sent_at_s is None:
            self._sent_at_s = now_s if self._gathered_at_s is None else self._gathered_at_s
        if is_all:
            self._gathered_at_s = None

    def arrive(self, *, is_all: bool = True) -> None:
        """The store has what was under way; all of it, unless a snapshot was planned meanwhile. Modifies."""
        if is_all:
            self._sent_at_s = None

    def lag_s(self, now_s: float) -> float:
        """Age of the oldest change that has not arrived; 0 without one."""
        oldest_s = self._gathered_at_s if self._sent_at_s is None else self._sent_at_s
        return 0.0 if oldest_s is None else max(0.0, now_s - oldest_s)
