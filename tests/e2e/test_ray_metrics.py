"""Our metrics where Ray's own exporter tells them."""

from __future__ import annotations

import asyncio
import urllib.request

import pytest

from router import cluster
from shared.telemetry import Readings
from shared.telemetry_ray import keep_in_ray

ray = pytest.importorskip("ray", reason="needs Ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow]
DEADLINE_S = 120.0


def _read(url: str) -> list[str]:
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        return [line for line in answer.read().decode().splitlines() if line.startswith("ray_kvroute_")]


async def test_rays_exporter_tells_our_metrics_with_their_names_and_whose_they_are() -> None:
    cluster.connect_ray("", num_local_cpus=1, environment={})
    readings = Readings()
    readings.add_counter("kvroute_things", "Things.", lambda: 3)
    keeping = asyncio.create_task(keep_in_ray(readings, {"router": "r0"}))
    try:
        (node,) = ray.nodes()
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        lines: list[str] = []
        async with asyncio.timeout(DEADLINE_S):
            while not lines:
                await asyncio.sleep(1.0)
                lines = await asyncio.to_thread(_read, url)
        (line,) = lines
        assert line.startswith("ray_kvroute_things_total{")
        assert 'router="r0"' in line
        assert line.endswith(" 3.0")
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        cluster.leave_ray()
