"""Whether a front has any worker to wait for: tells loudly once when it has none, and counts who is refused then."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from shared.errors import NoWorker

logger = logging.getLogger(__name__)

_RETRY_S = 2.0
_COMING_STATES = ("ready", "silent", "resting", "away")
_CONNECTED_STATES = ("ready", "silent", "resting", "draining")
_STATE_S = 0.1
"""How long a look at the workers' states is good for: to take one costs as much as a small request."""


class Readiness:
    """Owns since when there has been no worker, and how many requests were refused since then."""

    def __init__(
        self,
        state_to_count: Callable[[], Mapping[str, int]],
        note_failure: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`note_failure` counts a refusal by its error's code."""
        self._state_to_count = state_to_count
        self._note_failure = note_failure
        self._clock = clock
        self._good_until_s = 0.0
        self._without_since_s: float | None = None
        self._num_refused = 0

    def check(self) -> None:
        """Raise `NoWorker` where there is nobody to wait for; workers that rest, reconnect or hang are. Modifies."""
        now_s = self._clock()
        if now_s < self._good_until_s:
            return
        state_to_count = self._state_to_count()
        if not any(state_to_count[state] for state in _COMING_STATES):
            self._refuse(now_s)
        self._good_until_s = now_s + _STATE_S
        if self._without_since_s is not None:
            lasted_s = now_s - self._without_since_s
            logger.error("there are workers again after %.1f s; %s requests were refused", lasted_s, self._num_refused)
            self._without_since_s = None
            self._num_refused = 0

    def is_connected(self) -> bool:
        """Whether there is a worker that may finish what it has."""
        state_to_count = self._state_to_count()
        return any(state_to_count[state] for state in _CONNECTED_STATES)

    def _refuse(self, now_s: float) -> None:
        if self._without_since_s is None:
            self._without_since_s = now_s
            logger.error("no worker is ready: requests are refused with status 503 until one is")
        self._num_refused += 1
        error = NoWorker("no worker is ready", retry_after_s=_RETRY_S)
        self._note_failure(error.code)
        raise error
