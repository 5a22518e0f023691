"""The same metrics through Ray's own exporter, for who watches a cluster by Ray's dashboards. Counts nothing itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import ray
from ray.util.metrics import Gauge

from shared.telemetry import Readings

logger = logging.getLogger(__name__)

_INTERVAL_S = 5.0
"""Ray's exporter passes on what it has about every ten seconds."""


class RayMirror:
    """Copies every sample of some readings into Ray's metrics, where `ray_` comes before its name.

    All of them are gauges there, buckets of histograms included: a Ray counter takes only increments, and a Ray
    histogram only single values. To PromQL the difference is none: the numbers are the same.
    """

    def __init__(self, readings: Readings, own_labels: Mapping[str, str]) -> None:
        """`own_labels` say of every number whose it is, as Ray's own labels know neither routers nor our workers."""
        self._readings = readings
        self._own_labels = dict(own_labels)
        self._name_to_gauge: dict[str, Gauge] = {}
        self._told: dict[str, set[tuple[tuple[str, str], ...]]] = {}
        """Labels that each name has been told with: those of a worker that has left must not keep their last value."""

    def copy(self) -> None:
        """Tell Ray all numbers as of now."""
        before, self._told = self._told, {}
        for family in self._readings.collect():
            for sample in family.samples:
                self._set(sample.name, family.documentation, {**sample.labels, **self._own_labels}, float(sample.value))
        for name, told in before.items():
            for labels in told - self._told.get(name, set()):
                self._name_to_gauge[name].set(0.0, tags=dict(labels))

    def _set(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        gauge = self._name_to_gauge.get(name)
        if gauge is None:
            gauge = self._name_to_gauge[name] = Gauge(name, description=text, tag_keys=tuple(labels))
        gauge.set(value, tags=labels)
        self._told.setdefault(name, set()).add(tuple(sorted(labels.items())))


async def keep_in_ray(readings: Readings, own_labels: Mapping[str, str]) -> None:
    """Keep Ray's copy fresh until cancelled; ends at once where this process is in no Ray."""
    if not ray.is_initialized():
        return
    mirror = RayMirror(readings, own_labels)
    has_failed = False
    while True:
        try:
            mirror.copy()
        except Exception:
            # Loud once: what Ray shows is a copy, and the service does not depend on it.
            logger.log(logging.DEBUG if has_failed else logging.ERROR, "Ray takes no metrics", exc_info=True)
            has_failed = True
        await asyncio.sleep(_INTERVAL_S)
