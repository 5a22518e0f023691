"""Names under which blocks are kept, within a budget and for a time. Holds no reference on a block itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.errors import ConfigError, PinRefused, UnknownPin


@dataclass(frozen=True, slots=True)
class Pin:
    """One named prefix."""

    name: str
    blocks: tuple[int, ...]
    """First block of the prefix first."""
    expires_at_s: float | None
    """On the caller's clock; None keeps the pin until it is taken away."""


class Pins:
    """The pins of one pool.

    Invariant: the distinct blocks of all pins are at most `budget_blocks`. Pins may overlap; a block counts once.
    """

    def __init__(self, budget_blocks: int) -> None:
        self.budget_blocks = budget_blocks
        self._name_to_pin: dict[str, Pin] = {}
        self._num_pins_of: Counter[int] = Counter()

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that are pinned."""
        return len(self._num_pins_of)

    def num_pins_of(self, block: int) -> int:
        """How many pins name the block."""
        return self._num_pins_of.get(block, 0)

    def blocks(self) -> list[int]:
        """Distinct blocks that are pinned. Linear; does not modify."""
        return list(self._num_pins_of)

    def all(self) -> list[Pin]:
        """All pins, oldest first. Linear; does not modify."""
        return list(self._name_to_pin.values())

    def check(self, name: str, num_blocks: int, pinned: Iterable[int]) -> None:
        """Whether `name` may keep so many distinct blocks in place of what it keeps now. Does not modify.

        `pinned` are those of them that are pinned already, under whatever name.

        Raises:
            PinRefused: the budget does not suffice.
        """
        staying = self._num_pins_without(name)
        num_needed = len(staying) + num_blocks - sum(block in staying for block in pinned)
        if num_needed > self.budget_blocks:
            raise PinRefused(
                f"pin {name!r}: its {num_blocks} blocks would make {num_needed} pinned blocks, "
                f"the budget is {self.budget_blocks}, {len(staying)} are pinned under other names"
            )

    def put(self, name: str, blocks: Sequence[int], *, now_s: float, ttl_s: float | None) -> tuple[int, ...]:
        """Keep these blocks under `name` in place of what was there, whose blocks are the answer.

        Raises:
            ConfigError: nothing to pin, or the time to live is not positive.
            PinRefused: the budget does not suffice. Nothing has changed.
        """
        if ttl_s is not None and not ttl_s > 0:
            raise ConfigError(f"ttl_s: {ttl_s} keeps nothing; it must be above 0")
        if not blocks:
            raise ConfigError(f"pin {name!r}: not one full block to keep")
        self.check(name, len(blocks), blocks)
        self._num_pins_of = self._num_pins_without(name)
        self._num_pins_of.update(blocks)
        former = self._name_to_pin.pop(name, None)
        self._name_to_pin[name] = Pin(name, tuple(blocks), None if ttl_s is None else now_s + ttl_s)
        return former.blocks if former is not None else ()

    def remove(self, name: str) -> tuple[int, ...]:
        """Forget a pin; its blocks are the answer.

        Raises:
            UnknownPin: nothing is kept under that name.
        """
        pin = self._name_to_pin.pop(name, None)
        if pin is None:
            known = ", ".join(self._name_to_pin) or "none"
            raise UnknownPin(f"no pin {name!r}; pins are: {known}")
        self._num_pins_of -= Counter(pin.blocks)
        return pin.blocks

    def expired(self, now_s: float) -> list[str]:
        """Names whose time is over. Linear in pins; does not modify."""
        return [
            pin.name for pin in self._name_to_pin.values() if pin.expires_at_s is not None and pin.expires_at_s <= now_s
        ]

    def _num_pins_without(self, name: str) -> Counter[int]:
        """How many pins of other names keep each block."""
        pin = self._name_to_pin.get(name)
        return self._num_pins_of - Counter(pin.blocks if pin is not None else ())


def default_budget_blocks(num_blocks: int, blocks_of_longest_request: int) -> int:
    """Half the pool, but never so much that one longest request would wait for ever."""
    return max(0, min(num_blocks // 2, num_blocks - blocks_of_longest_request))
