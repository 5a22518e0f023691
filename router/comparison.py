"""Where engine, store and mirror disagree on what one worker holds. Pure data: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Set

from shared.types import BlockKey


class Comparison:
    """What differs at *every* look.

    The three are read one after another while blocks come and go, so that what differs at one look may be on its way.
    """

    def __init__(self) -> None:
        self.num_looks = 0
        self._phantom: set[BlockKey] = set()
        self._missing: set[BlockKey] = set()
        self._not_mirrored: set[BlockKey] = set()
        self._mirrored_alone: set[BlockKey] = set()
        self._seen: set[BlockKey] = set()

    def add(self, engine: Set[BlockKey], store: Set[BlockKey], mirror: Set[BlockKey] | None) -> None:
        """Take one look into account; without a mirror, store and engine alone are compared. Modifies."""
        copy = store if mirror is None else mirror
        differences = (
            (self._phantom, store - engine),
            (self._missing, engine - store),
            (self._not_mirrored, store - copy),
            (self._mirrored_alone, copy - store),
        )
        for lasting, found in differences:
            self._seen |= found
            if self.num_looks:
                lasting &= found
            else:
                lasting |= found
        self.num_looks += 1

    @property
    def is_clean(self) -> bool:
        """Whether nothing differs that has differed at every look."""
        return not (self._phantom or self._missing or self._not_mirrored or self._mirrored_alone)

    @property
    def num_phantom(self) -> int:
        """Blocks that the store shows and the engine does not hold."""
        return len(self._phantom)

    @property
    def num_missing(self) -> int:
        """Blocks that the engine holds and the store does not show."""
        return len(self._missing)

    @property
    def num_mismatched(self) -> int:
        """Blocks that store and mirror tell differently."""
        return len(self._not_mirrored) + len(self._mirrored_alone)

    @property
    def num_moving(self) -> int:
        """Blocks that differed at some look and no longer do: they were on their way."""
        lasting = self._phantom | self._missing | self._not_mirrored | self._mirrored_alone
        return len(self._seen - lasting)
