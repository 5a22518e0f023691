"""What speaks against workers: whom this router does not send to before a probe has succeeded."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from shared.types import Instance

_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 30.0
MAX_FAILURES = 5
"""Failures in a row that make a worker suspect. One bad request fails a worker only as often as it is attempted."""


@dataclass(slots=True)
class _Suspect:
    """What speaks against one life of a worker; once it has a delay it is open, with probes in place of traffic."""

    num_failures: int = 0
    """Failures since the last request that it finished."""
    delay_s: float = 0.0
    retry_at_s: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.delay_s > 0.0


class Suspicion:
    """Owns the record of every life of a worker that has failed, or could not be reached."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._suspects: dict[Instance, _Suspect] = {}

    def is_open(self, instance: Instance) -> bool:
        """Whether the worker gets probes in place of traffic."""
        suspect = self._suspects.get(instance)
        return suspect is not None and suspect.is_open

    def may_try(self, instance: Instance) -> bool:
        """Whether it is time to connect to the worker, or to probe it."""
        suspect = self._suspects.get(instance)
        return suspect is None or suspect.retry_at_s <= self._clock()

    def note_failure(self, instance: Instance) -> int:
        """Count a failed request; how many in a row that makes, where it has just opened, or else 0. Modifies."""
        suspect = self._suspects.setdefault(instance, _Suspect())
        suspect.num_failures += 1
        if suspect.num_failures < MAX_FAILURES or suspect.is_open:
            return 0
        self._postpone(suspect)
        return suspect.num_failures

    def note_finished(self, instance: Instance) -> None:
        """A request came to its end: what spoke against the worker is void, unless it waits for a probe. Modifies."""
        if not self.is_open(instance):
            self._suspects.pop(instance, None)

    def note_unreached(self, instance: Instance) -> bool:
        """It could not be connected to; whether that is news. Modifies."""
        suspect = self._suspects.setdefault(instance, _Suspect())
        is_news = not suspect.is_open
        self._postpone(suspect)
        return is_news

    def note_reached(self, instance: Instance) -> None:
        """It answers, which ends its silence; the requests that it broke still count. Modifies."""
        suspect = self._suspects.get(instance)
        if suspect is not None and suspect.num_failures < MAX_FAILURES:
            suspect.delay_s = suspect.retry_at_s = 0.0

    def note_probe(self, instance: Instance, is_well: bool) -> None:
        """What a probe has shown. Modifies."""
        if is_well:
            self._suspects.pop(instance, None)
        else:
            self._postpone(self._suspects.setdefault(instance, _Suspect(MAX_FAILURES)))

    def keep(self, known: Collection[Instance]) -> None:
        """Drop the records of all other lives. Modifies."""
        self._suspects = {instance: suspect for instance, suspect in self._suspects.items() if instance in known}

    def _postpone(self, suspect: _Suspect) -> None:
        suspect.delay_s = min(suspect.delay_s * 2, _MAX_DELAY_S) if suspect.is_open else _FIRST_DELAY_S
        suspect.retry_at_s = self._clock() + suspect.delay_s
