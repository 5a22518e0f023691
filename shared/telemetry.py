"""What kvroute tells of itself: log lines in vLLM's form, and metrics under `kvroute_`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Literal, Protocol, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_ROOMS = ("router", "worker", "shared")
_TEXT_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"

# Equal to vLLM's (`vllm/v1/metrics/buckets.py`), so that panels of both can be laid one on the other.
TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
QUEUE_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0,
    30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
PREDICTION_ERROR_BUCKETS_TOKENS = (
    -16384, -4096, -1024, -256, -64, -1, 0, 64, 256, 1024, 4096, 16384,
)  # fmt: skip
"""From a cache that held far more than the directory knew to one that held far less; exact answers fall in `le="0"`
and not in `le="-1"`. The sum is that of the matched less that of the cached tokens; Prometheus has none of its own for
a histogram with negative bounds."""


def set_up_logging(
    level: str, log_format: Literal["text", "json"] = "text", *, stream: TextIO | None = None
) -> logging.Handler:
    """Send all rooms' log lines of at least `level` to `stream` (default: stderr).

    Modifies the rooms' loggers only, so that an engine's own logging in the same process stays as it is. A second call
    takes the place of the first.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter(_TEXT_FORMAT, _DATE_FORMAT))
    for room in _ROOMS:
        logger = logging.getLogger(room)
        for old in logger.handlers[:]:
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.setLevel(level.upper())
        logger.propagate = False
    return handler


class _TextFormatter(logging.Formatter):
    """Puts the prefix before each line of a message, so that a line found by itself tells when and where."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).split("\n")
        first = record.getMessage().split("\n", 1)[0]
        prefix = lines[0].removesuffix(first)
        return "\n".join([lines[0], *(prefix + line for line in lines[1:])])


class _JsonFormatter(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "source": f"{record.filename}:{record.lineno}",
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


class Trace(Protocol):
    """What is counted of one request; the router's `RequestTrace` has it."""

    received_at_s: float
    bound_at_s: float | None
    first_token_at_s: float | None
    matched_tokens: int
    cached_tokens: int


class Readings(Collector):
    """Metrics of numbers that their owners keep as plain ones: read when somebody asks, so that counting stays cheap.

    Each owner has a method `expose`, which names what it counts. All are in one registry, so that several routers or
    workers live in one process.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._name_to_reading: dict[str, Callable[[], Metric]] = {}

    def add_counter(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Tell a number that only grows, as `name` with `_total` behind it. Modifies."""
        self._add(name, lambda: CounterMetricFamily(name, text, read()))

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Tell a number that goes up and down. Modifies."""
        self._add(name, lambda: GaugeMetricFamily(name, text, read()))

    def add_counters(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Tell numbers that only grow, one for each value of a label. Modifies."""

        def reading() -> Metric:
            family = CounterMetricFamily(name, text, labels=[label])
            for value, count in read().items():
                family.add_metric([value], count)
            return family

        self._add(name, reading)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        for reading in self._name_to_reading.values():
            yield reading()

    def render(self) -> bytes:
        """The text that a Prometheus server reads."""
        return generate_latest(self.registry)

    def _add(self, name: str, reading: Callable[[], Metric]) -> None:
        if name in self._name_to_reading:
            raise ValueError(f"{name} is told by somebody already")
        self._name_to_reading[name] = reading


class Metrics(Readings):
    """All metrics of one router."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        self._requests = Counter(
            "kvroute_requests", "Requests that ended, by policy and how.", ["policy", "outcome"], registry=registry
        )
        self._ttft_seconds = Histogram(
            "kvroute_ttft_seconds",
            "Time from a request's arrival to its first token.",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self._queue_seconds = Histogram(
            "kvroute_queue_seconds",
            "Time that a request was held before it was sent to a worker.",
            buckets=QUEUE_BUCKETS_S,
            registry=registry,
        )
        self._matched_tokens = Counter(
            "kvroute_matched_tokens", "Prompt tokens that the directory expected in a cache.", registry=registry
        )
        self._prompt_tokens = Counter(
            "kvroute_prompt_tokens", "Prompt tokens of requests that workers answered.", registry=registry
        )
        self._cached_tokens = Counter(
            "kvroute_cached_tokens", "Prompt tokens that engines say their cache gave.", registry=registry
        )
        self._prediction_error_tokens = Histogram(
            "kvroute_prediction_error_tokens",
            "Matched less cached tokens of a request: whether the directory tells the truth.",
            buckets=PREDICTION_ERROR_BUCKETS_TOKENS,
            registry=registry,
        )
        self._directory_degraded = Counter(
            "kvroute_directory_degraded", "Requests routed while the directory did not answer.", registry=registry
        )
        self._failovers = Counter(
            "kvroute_failovers", "Attempts that a worker failed, by how far they were.", ["stage"], registry=registry
        )
        self._workers = Gauge("kvroute_workers", "Workers by state.", ["state"], registry=registry)
        self._cache_unaware = Gauge(
            "kvroute_worker_cache_unaware",
            "1 for each worker that is used, but not for its cache, since its blocks are not what block keys describe.",
            ["worker"],
            registry=registry,
        )

        self._hints_only = Gauge(
            "kvroute_worker_hints_only",
            "1 for each worker that publishes nothing of what it holds, so that only the router's own hints count.",
            ["worker"],
            registry=registry,
        )

    def note_request(self, policy: str, outcome: str, num_prompt_tokens: int, trace: Trace) -> None:
        """Count one request that has ended. Tokens count only where a worker has begun to answer."""
        self._requests.labels(policy, outcome).inc()
        if trace.bound_at_s is not None:
            self._queue_seconds.observe(trace.bound_at_s - trace.received_at_s)
        if trace.first_token_at_s is not None:
            self._ttft_seconds.observe(trace.first_token_at_s - trace.received_at_s)
            self._prompt_tokens.inc(num_prompt_tokens)
            self._matched_tokens.inc(trace.matched_tokens)
            self._cached_tokens.inc(trace.cached_tokens)
            self._prediction_error_tokens.observe(trace.matched_tokens - trace.cached_tokens)

    def note_failover(self, stage: str) -> None:
        """Count one attempt that its worker failed."""
        self._failovers.labels(stage).inc()

    def note_directory_degraded(self) -> None:
        """Count one request that was routed without the directory."""
        self._directory_degraded.inc()

    def note_workers(
        self,
        state_to_count: Mapping[str, int],
        cache_unaware: Iterable[str] = (),
        hints_only: Iterable[str] = (),
    ) -> None:
        """Set how many workers are in each state, whose cache is of no use, and whose is known by hints only; what is
        left out has none.
        """
        self._workers.clear()
        for state, count in state_to_count.items():
            self._workers.labels(state).set(count)
        for gauge, workers in ((self._cache_unaware, cache_unaware), (self._hints_only, hints_only)):
            gauge.clear()
            for worker in workers:
                gauge.labels(worker).set(1)
