"""The benchmarks by name, and the form of their results. What is measured lives in the room that it measures."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

Measure = Callable[[Callable[[str], None]], Coroutine[Any, Any, dict[str, float | str]]]
"""Takes a place for talk and gives figures by name, seed and number of rounds among them, and words about them."""

BENCHMARKS: Mapping[str, str] = MappingProxyType(
    {
        "batch": "router.batch_bench",
        "blocks": "worker.bench",
        "decision": "router.decision_bench",
        "directory": "shared.directory.bench",
        "http": "router.http_bench",
        "planner": "router.planner_bench",
        "streams": "router.streams_bench",
        "tokenise": "router.tokenise_bench",
        "transport": "worker.transport_bench",
    }
)
"""Name to the module whose coroutine `measure` it is. Imported when it runs, since some need an engine."""


async def run_benchmark(name: str, say: Callable[[str], None]) -> dict[str, float | str]:
    """The figures of one benchmark. `say` takes what is told on the way."""
    measure: Measure = import_module(BENCHMARKS[name]).measure
    return await measure(say)


def figures_json(name: str, figures: Mapping[str, float | str]) -> str:
    """All figures as one JSON line that says how to get them again."""
    rounded = {key: _round(figure) for key, figure in figures.items()}
    return json.dumps({"bench": name, "command": f"kvroute bench {name} --json", **rounded})


def figures_text(figures: Mapping[str, float | str]) -> str:
    """All figures as a table."""
    width = max(map(len, figures))
    return "\n".join(f"{key:<{width}} {_round(figure):>12}" for key, figure in figures.items())


def _round(figure: float | str) -> float | str:
    """Three digits behind the point for what is small, as ratios are; one for what is large. Words stay."""
    if isinstance(figure, str):
        return figure
    return round(figure, 3 if abs(figure) < 10 else 1)
