"""Values in the store that are none of ours: counted, and each key told of once, by its name."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_MAX_KEYS_TOLD = 32
"""Keys told of loudly by one reader: whoever fills the store with nonsense is not to fill the log, too."""
_MAX_REASON_CHARS = 200


class Refusals:
    """What one reader of the store has refused. `num_malformed` only grows."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self.num_malformed = 0

    def note(self, key: str, reason: object, *, num_values: int = 1) -> None:
        """Count values of one key. Logs the first ones of each key, without what they hold. Modifies."""
        self.num_malformed += num_values
        is_news = key not in self._told and len(self._told) < _MAX_KEYS_TOLD
        if is_news:
            self._told.add(key)
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(level, "%s in the store holds what is not ours and is refused: %s", key, _short(reason))
        if is_news and len(self._told) == _MAX_KEYS_TOLD:
            logger.warning("further keys in the store that hold what is not ours are only counted")


def _short(reason: object) -> str:
    """A reason in printable characters, of bounded length: it may quote what a stranger wrote."""
    text = str(reason)[:_MAX_REASON_CHARS]
    return "".join(char if char.isprintable() else "?" for char in text)
