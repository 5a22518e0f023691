"""The copy of our metrics that Ray's exporter passes on."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from shared import telemetry_ray
from shared.distribution import Distribution
from shared.telemetry import Readings
from shared.telemetry_ray import RayMirror, keep_in_ray


@dataclass
class FakeGauge:
    """Stands for Ray's: remembers what it was set to."""

    name: str
    description: str = ""
    tag_keys: tuple[str, ...] = ()
    tags_to_value: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        self.tags_to_value[tuple(sorted(tags.items()))] = value


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeGauge]:
    made: dict[str, FakeGauge] = {}

    def make(name: str, **options: object) -> FakeGauge:
        made[name] = FakeGauge(name, **options)  # type: ignore[arg-type]
        return made[name]

    monkeypatch.setattr(telemetry_ray, "Gauge", make)
    return made


def test_every_sample_is_copied_under_its_own_name(gauges: dict[str, FakeGauge]) -> None:
    readings = Readings()
    latency_s = Distribution((0.1, 1.0))
    latency_s.note(0.5)
    readings.add_counter("kvroute_things", "Things.", lambda: 3)
    readings.add_distribution("kvroute_latency_seconds", "Latency.", latency_s)
    RayMirror(readings, {"router": "r0"}).copy()
    own = ("router", "r0")
    assert {name: gauge.tags_to_value for name, gauge in gauges.items()} == {
        "kvroute_things_total": {(own,): 3.0},
        "kvroute_latency_seconds_bucket": {
            (("le", "0.1"), own): 0.0,
            (("le", "1.0"), own): 1.0,
            (("le", "+Inf"), own): 1.0,
        },
        "kvroute_latency_seconds_count": {(own,): 1.0},
        "kvroute_latency_seconds_sum": {(own,): 0.5},
    }


def test_who_has_left_goes_to_zero(gauges: dict[str, FakeGauge]) -> None:
    readings = Readings()
    running = {"w0": 2, "w1": 5}
    readings.add_gauges("kvroute_worker_running", "Running.", "worker", lambda: running)
    mirror = RayMirror(readings, {})
    mirror.copy()
    del running["w1"]
    mirror.copy()
    assert gauges["kvroute_worker_running"].tags_to_value == {(("worker", "w0"),): 2.0, (("worker", "w1"),): 0.0}


async def test_outside_of_a_ray_nothing_is_copied(gauges: dict[str, FakeGauge]) -> None:
    await keep_in_ray(Readings(), {})
    assert gauges == {}
