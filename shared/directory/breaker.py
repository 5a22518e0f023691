"""A breaker: spares callers the wait for a store that has just missed several deadlines in a row."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

NUM_MISSES_TO_OPEN = 3
"""Two misses happen by themselves when a machine is busy; a third in a row costs every request its deadline."""


class Breaker:
    """Closed while calls succeed; open for a rest after misses in a row; then one call probes.

    Knows no clock: callers say what time it is. Logs one line when it opens and one when it closes.
    """

    def __init__(self, rest_s: float, *, subject: str = "the directory's store") -> None:
        self._rest_s = rest_s
        self._subject = subject
        self._num_misses_in_a_row = 0
        self._opened_at_s: float | None = None
        self._rests_until_s = 0.0
        self._is_probing = False
        self.num_openings = 0

    @property
    def is_open(self) -> bool:
        return self._opened_at_s is not None

    def admit(self, now_s: float) -> bool:
        """Whether a call may go out. Modifies: an admitted call must end in `succeed`, `miss` or `abandon`."""
        if self._opened_at_s is None:
            return True
        if self._is_probing or now_s < self._rests_until_s:
            return False
        self._is_probing = True
        return True

    def succeed(self, now_s: float) -> None:
        """The store answered an admitted call. Modifies."""
        if self._opened_at_s is not None:
            logger.error("%s answers again after %.1f s", self._subject, now_s - self._opened_at_s)
        self._num_misses_in_a_row = 0
        self._opened_at_s = None
        self._is_probing = False

    def miss(self, now_s: float, reason: str) -> None:
        """An admitted call got no answer. Modifies."""
        self._is_probing = False
        self._num_misses_in_a_row += 1
        if self._num_misses_in_a_row < NUM_MISSES_TO_OPEN:
            return
        self._rests_until_s = now_s + self._rest_s
        if self._opened_at_s is None:
            self._opened_at_s = now_s
            self.num_openings += 1
            logger.error(
                "%s misses (%s); it is asked again every %.2g s, and routing goes on without it",
                self._subject,
                reason,
                self._rest_s,
            )

    def abandon(self) -> None:
        """An admitted call ended without telling anything about the store. Modifies."""
        self._is_probing = False
