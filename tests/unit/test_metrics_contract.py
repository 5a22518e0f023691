"""The metrics that routers and workers have, all of them, and what is made from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import pytest

from shared.types import WorkerId
from shared.vtime import run_virtual
from tests.support.rack import ask, mirrored_rack, prompt

BOUNDED_LABELS = {
    "code": "codes of our own errors",
    "kind": "uses of a block",
    "le": "buckets",
    "outcome": "ok, failed or cancelled",
    "policy": "the one in force",
    "stage": "before the first token or after it",
    "state": "states of workers",
    "worker": "workers that are members now",
}
"""Every label, and why it has few values. What a client sends is none."""
STORE_ONLY = {
    "kvroute_store_malformed_total",
    "kvroute_store_misses_total",
    "kvroute_store_spared_matches_total",
    "kvroute_store_breaker_openings_total",
}
"""Told by a directory over a real store; `test_worker_metrics` sees them there."""


def _told(names: Mapping[str, set[str]]) -> set[str]:
    return set(names) | STORE_ONLY


def _samples(text: str) -> dict[str, set[str]]:
    """Names of all samples, with their labels' names."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line).groups()  # type: ignore[union-attr]
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels or ""))
    return found


def _render_after_traffic(num_requests: int) -> str:
    """What a router tells after requests, one of which failed over, and while a worker is not cache-aware."""

    async def scenario() -> str:
        async with mirrored_rack(2, token_s=0.001) as workers:
            await workers.start_worker("odd", parity=b"another")
            async with workers.router() as router:
                await workers.settle()
                for number in range(num_requests):
                    await ask(router, f"request-{number}", prompt(1, 64, tail=number))
                router.metrics.note_failover("stream")
                router.metrics.note_failure("rate_limit_exceeded")
                return router.render_metrics().decode()

    text: str = run_virtual(scenario())
    return text


@pytest.fixture(scope="module")
def rendered() -> str:
    return _render_after_traffic(3)


def test_every_label_has_few_values(rendered: str) -> None:
    labels = set().union(*_samples(rendered).values())
    assert labels == set(BOUNDED_LABELS)


def test_more_traffic_makes_no_more_series(rendered: str) -> None:
    assert _series(_render_after_traffic(30)) == _series(rendered)


def _series(text: str) -> set[str]:
    return {line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}


def test_worker_that_has_left_has_no_series() -> None:
    async def scenario() -> None:
        async with mirrored_rack(2) as workers, workers.router() as router:
            await ask(router, "a", prompt(1, 64, tail=1))
            await workers.stop_worker("w0")
            await workers.stop_worker("w1")
            await workers.start_worker("w2")
            while set(router.fleet.worker_to_instance) != {WorkerId("w2")}:
                await router.fleet.refresh()
            assert 'worker="w0"' not in (text := router.render_metrics().decode())
            assert 'kvroute_worker_kv_blocks{kind="free",worker="w2"}' in text

    run_virtual(scenario())


def test_every_metric_says_what_it_is(rendered: str) -> None:
    helped = dict(re.findall(r"# HELP (\S+) (.*)", rendered))
    assert all(text.endswith(".") for text in helped.values())
    assert all(name.startswith("kvroute_") for name in helped)


# Grafana.


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    raw = (resources.files("router") / "static" / "grafana.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(raw)
    return loaded


def _panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (panel for panel in dashboard["panels"] if panel["type"] != "row")


def _expressions(dashboard: Mapping[str, Any]) -> Iterator[str]:
    yield from (target["expr"] for panel in _panels(dashboard) for target in panel["targets"])


def _selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Metrics of an expression, with the labels that it selects by."""
    plain = expression.replace("${exporter}", "")
    return [
        (name, set(re.findall(r"(\w+)=~?", labels or "")))
        for name, labels in re.findall(r"\b(kvroute_\w+)(?:\{([^}]*)\})?", plain)
    ]


def test_every_metric_of_the_grafana_dashboard_exists_with_its_labels(dashboard: dict[str, Any], rendered: str) -> None:
    name_to_labels = _samples(rendered)
    unknown = []
    for expression in _expressions(dashboard):
        grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(",")}
        selectors = _selectors(expression)
        assert selectors, f"no metric of ours in {expression}"
        for name, labels in selectors:
            # A job is what Prometheus adds to all that it scrapes.
            missing = ((labels | grouped) - {"job"}) - name_to_labels.get(name, set())
            if name not in _told(name_to_labels) or missing:
                unknown.append((name, sorted(missing)))
    assert unknown == []


def test_counters_are_read_as_rates_and_gauges_are_not(dashboard: dict[str, Any], rendered: str) -> None:
    kinds = dict(re.findall(r"# TYPE (\S+) (\S+)", rendered)) | dict.fromkeys(STORE_ONLY, "counter")
    wrong = []
    for expression in _expressions(dashboard):
        for name, _ in _selectors(expression):
            kind = kinds.get(re.sub(r"_(bucket|sum|count)$", "", name), kinds.get(name))
            is_rate = f"rate(${{exporter}}{name}" in expression
            if is_rate != (kind in ("counter", "histogram")):
                wrong.append((name, kind, expression))
    assert wrong == []


def test_legends_name_labels_that_are_left(dashboard: dict[str, Any]) -> None:
    wrong = []
    for panel in _panels(dashboard):
        for target in panel["targets"]:
            kept = {
                label.strip() for labels in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in labels.split(",")
            }
            wrong += [name for name in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]) if name not in kept]
    assert wrong == []


def test_grafana_dashboard_takes_any_data_source_and_has_ids_of_its_own(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert {panel["datasource"]["uid"] for panel in _panels(dashboard)} == {"${datasource}"}
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {
        "datasource",
        "exporter",
        "job",
        "worker",
    }
    assert all(panel["description"].endswith(".") for panel in _panels(dashboard))


def test_parentheses_of_every_expression_close(dashboard: dict[str, Any]) -> None:
    for expression in _expressions(dashboard):
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression
