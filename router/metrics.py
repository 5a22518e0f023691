"""Names what one router knows of its fleet, queue and hints as metrics. Counts nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from router.fleet import Fleet
from router.hints import Hints
from router.members import Member
from router.queue import HoldQueue
from router.watch import Watch
from shared.telemetry import Labelled, Metrics
from shared.types import WorkerStatus


def expose_router(fleet: Fleet, queue: HoldQueue, hints: Hints, watch: Watch, metrics: Metrics) -> None:
    """Tell all of it. Modifies `metrics`, as all do here."""
    metrics.add_gauge("kvroute_held_requests", "Requests that wait for a worker at this router.", lambda: len(queue))
    metrics.add_gauge("kvroute_bookings", "Requests of this router that are with a worker.", lambda: fleet.num_bookings)
    metrics.add_gauge(
        "kvroute_routers", "Live routers of the same workers, this one among them.", lambda: fleet.num_routers
    )
    metrics.add_counter(
        "kvroute_decisions", "Times that a request was bound to a worker.", lambda: watch.decisions.num_decisions
    )
    metrics.add_gauge("kvroute_hints", "Prefixes that this router has promised to a worker now.", lambda: len(hints))
    metrics.add_counter(
        "kvroute_hint_promises", "Prefixes that became promised to a worker.", lambda: hints.num_promised
    )
    metrics.add_counter(
        "kvroute_hint_withdrawals", "Promises that ended: kept, cancelled or failed.", lambda: hints.num_withdrawn
    )
    metrics.add_gauges("kvroute_workers", "Workers by state.", "state", fleet.state_to_count)
    for name, text, read in _MEMBER_GAUGES:
        _expose_members(fleet, name, text, read, metrics)
    for name, text, read_status in _STATUS_GAUGES:
        _expose_members(fleet, name, text, _from_status(read_status), metrics)
    metrics.add_labelled(
        GaugeMetricFamily,
        "kvroute_worker_kv_blocks",
        "KV blocks by what they are good for: pinned, held by requests, cached of several requests or of one, free.",
        ("worker", "kind"),
        lambda: _kv_blocks(fleet),
    )
    for name, text, field in _TALLIES:
        _expose_tallies(fleet, watch, name, text, field, metrics)


_MEMBER_GAUGES: tuple[tuple[str, str, Callable[[Member], float | None]], ...] = (
    (
        "kvroute_worker_cache_unaware",
        "1 for each worker that is used, but not for its cache, since its blocks are not what block keys describe.",
        lambda member: None if member.is_cache_aware else 1.0,
    ),
    (
        "kvroute_worker_hints_only",
        "1 for each worker that publishes nothing of what it holds, so that only the router's own hints count.",
        lambda member: None if member.info.tells_blocks else 1.0,
    ),
    (
        "kvroute_worker_bookings",
        "Requests of this router that are with the worker.",
        lambda member: member.num_bookings,
    ),
    (
        "kvroute_worker_status_age_seconds",
        "Time since the worker told of its load.",
        lambda member: None if member.status is None else member.status_age_s,
    ),
    (
        "kvroute_worker_round_trip_seconds",
        "Time to the worker and back when the last connection was made.",
        lambda member: member.round_trip_s,
    ),
)
"""Told of each worker that is a member now, so that there are never more series than workers."""

_STATUS_GAUGES: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
    ("kvroute_worker_running", "Sequences that the worker runs.", lambda status: status.num_running),
    ("kvroute_worker_waiting", "Requests that wait at the worker.", lambda status: status.num_waiting),
    (
        "kvroute_worker_queued_prefill_tokens",
        "Prompt tokens that the worker has still to compute.",
        lambda status: status.queued_prefill_tokens,
    ),
)

_TALLIES = (
    ("kvroute_worker_requests", "Requests of this router that the worker began to answer.", "num_requests"),
    ("kvroute_worker_prompt_tokens", "Prompt tokens of these requests.", "num_prompt_tokens"),
    (
        "kvroute_worker_cache_told_tokens",
        "Prompt tokens of those of these requests of which the engine told what its cache gave.",
        "num_told_tokens",
    ),
    ("kvroute_worker_cached_tokens", "What of them the engine says its cache gave.", "num_cached_tokens"),
)


def _expose_members(
    fleet: Fleet, name: str, text: str, read: Callable[[Member], float | None], metrics: Metrics
) -> None:
    def figures() -> Mapping[str, float]:
        told = {member.info.worker: read(member) for member in fleet.members()}
        return {worker: value for worker, value in told.items() if value is not None}

    metrics.add_gauges(name, text, "worker", figures)


def _from_status(read: Callable[[WorkerStatus], float]) -> Callable[[Member], float | None]:
    return lambda member: None if member.status is None else read(member.status)


def _expose_tallies(fleet: Fleet, watch: Watch, name: str, text: str, field: str, metrics: Metrics) -> None:
    def counts() -> Labelled:
        watch.keep_only(fleet.worker_to_instance.keys())
        for worker, tally in watch.worker_to_tally.items():
            yield (worker,), getattr(tally, field)

    metrics.add_labelled(CounterMetricFamily, name, text, ("worker",), counts)


def _kv_blocks(fleet: Fleet) -> Labelled:
    for member in fleet.members():
        if member.kv_blocks is not None:
            for kind, count in asdict(member.kv_blocks).items():
                yield (member.info.worker, kind), count
