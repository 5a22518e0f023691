"""What kvroute tells of itself: log lines in vLLM's form, and metrics under `kvroute_`."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, Protocol, TextIO

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.distribution import Distribution

_ROOMS = ("router", "worker", "shared")
_TEXT_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"

# Equal to vLLM's (`vllm/v1/metrics/buckets.py`), so that panels of both can be laid one on the other.
TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0,
    30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
"""Of whole requests, and of the time that they are held."""
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
    finished_at_s: float | None
    matched_tokens: int
    cached_tokens: int | None
    possible_tokens: int


Labelled = Iterable[tuple[Sequence[str], float]]
"""Values of a metric's labels, and the number that goes with them."""


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
        self.add_labelled(
            CounterMetricFamily, name, text, (label,), lambda: (((value,), n) for value, n in read().items())
        )

    def add_gauges(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Tell numbers that go up and down, one for each value of a label. Modifies."""
        self.add_labelled(
            GaugeMetricFamily, name, text, (label,), lambda: (((value,), n) for value, n in read().items())
        )

    def add_labelled(
        self,
        family_type: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str],
        read: Callable[[], Labelled],
    ) -> None:
        """Tell numbers with several labels. Modifies.

        The values of a label must be few: names of workers that live, codes, kinds; never what a client has sent.
        """

        def reading() -> Metric:
            family = family_type(name, text, labels=labels)
            for values, number in read():
                family.add_metric(values, number)
            return family

        self._add(name, reading)

    def add_distribution(self, name: str, text: str, distribution: Distribution) -> None:
        """Tell how values are spread, as a histogram. Modifies."""

        def reading() -> Metric:
            buckets = distribution.cumulative()
            family = HistogramMetricFamily(name, text, buckets=buckets, sum_value=distribution.total)
            if distribution.buckets[0] < 0.0:
                # Of these the library tells neither sum nor count, and only a sum would mislead.
                family.add_sample(f"{name}_count", {}, buckets[-1][1])
            return family

        self._add(name, reading)

    def value(self, name: str) -> float | None:
        """What is told under `name` now, without labels; `None` where nobody tells it."""
        reading = self._name_to_reading.get(name)
        if reading is None:
            return None
        (sample,) = reading().samples
        return float(sample.value)

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
    """What one router counts of its requests, and the metrics of everything that is told beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.ttft_s = Distribution(TTFT_BUCKETS_S)
        self.itl_s = Distribution(ITL_BUCKETS_S)
        self.request_s = Distribution(REQUEST_BUCKETS_S)
        self.queue_s = Distribution(REQUEST_BUCKETS_S)
        self.prediction_error_tokens = Distribution(PREDICTION_ERROR_BUCKETS_TOKENS, is_fine=False)
        self.num_prompt_tokens = 0
        self.num_possible_tokens = 0
        self.num_matched_tokens = 0
        self.num_cached_tokens = 0
        self.num_told_tokens = 0
        """Prompt tokens of requests whose engine told what its cache gave."""
        self.num_output_tokens = 0
        self.num_directory_degraded = 0
        self.ended: Counter[tuple[str, str]] = Counter()
        """Requests by policy and outcome."""
        self.failures: Counter[str] = Counter()
        """Requests that ended with an error, by its code."""
        self.failovers: Counter[str] = Counter()
        self._expose_requests()
        self._expose_tokens()

    def _expose_requests(self) -> None:
        self.add_labelled(
            CounterMetricFamily,
            "kvroute_requests",
            "Requests that ended, by policy and how.",
            ("policy", "outcome"),
            self.ended.items,
        )
        self.add_counters(
            "kvroute_request_failures",
            "Requests that ended with an error, those included that were not admitted, by the error's code.",
            "code",
            lambda: self.failures,
        )
        self.add_distribution(
            "kvroute_request_duration_seconds", "Time from a request's arrival to its end.", self.request_s
        )
        self.add_distribution("kvroute_ttft_seconds", "Time from a request's arrival to its first token.", self.ttft_s)
        self.add_distribution(
            "kvroute_inter_token_latency_seconds", "Time between two tokens of an answer.", self.itl_s
        )
        self.add_distribution(
            "kvroute_queue_seconds", "Time that a request was held before it was sent to a worker.", self.queue_s
        )
        self.add_counter(
            "kvroute_directory_degraded",
            "Requests routed while the directory did not answer.",
            lambda: self.num_directory_degraded,
        )
        self.add_counters(
            "kvroute_failovers", "Attempts that a worker failed, by how far they were.", "stage", lambda: self.failovers
        )

    def _expose_tokens(self) -> None:
        self.add_counter(
            "kvroute_prompt_tokens",
            "Prompt tokens of requests that workers answered.",
            lambda: self.num_prompt_tokens,
        )
        self.add_counter(
            "kvroute_possible_tokens",
            "Prompt tokens that an earlier prompt had begun with: what a cache of endless size would give.",
            lambda: self.num_possible_tokens,
        )
        self.add_counter(
            "kvroute_matched_tokens",
            "Prompt tokens that the directory expected in a cache.",
            lambda: self.num_matched_tokens,
        )
        self.add_counter(
            "kvroute_cached_tokens",
            "Prompt tokens that engines say their cache gave.",
            lambda: self.num_cached_tokens,
        )
        self.add_counter(
            "kvroute_cache_told_tokens",
            "Prompt tokens of requests whose engine told what its cache gave, which cached tokens are a share of.",
            lambda: self.num_told_tokens,
        )
        self.add_counter(
            "kvroute_generation_tokens", "Tokens of answers that were handed out.", lambda: self.num_output_tokens
        )
        self.add_distribution(
            "kvroute_prediction_error_tokens",
            "Matched less cached tokens of a request: whether the directory tells the truth.",
            self.prediction_error_tokens,
        )

    @property
    def num_ended(self) -> int:
        """Requests that ended, however they did."""
        return self.ended.total()

    def note_first_token(self, num_prompt_tokens: int, trace: Trace) -> None:
        """Count what is known of a request when a worker begins to answer. Modifies, as all of these do."""
        assert trace.first_token_at_s is not None, "there is a first token"
        self.ttft_s.note(trace.first_token_at_s - trace.received_at_s)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_possible_tokens += trace.possible_tokens
        self.num_matched_tokens += trace.matched_tokens

    def note_cache(self, num_prompt_tokens: int, matched_tokens: int, cached_tokens: int) -> None:
        """Count what the engine says its cache gave of a prompt, once it has said so."""
        self.num_told_tokens += num_prompt_tokens
        self.num_cached_tokens += cached_tokens
        self.prediction_error_tokens.note(matched_tokens - cached_tokens)

    def note_next_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Count tokens that came together, each with its share of the time since the tokens before."""
        self.itl_s.note(gap_s / num_tokens, num_tokens)

    def note_request(self, policy: str, outcome: str, trace: Trace) -> None:
        """Count one request that has ended."""
        self.ended[policy, outcome] += 1
        if trace.bound_at_s is not None:
            self.queue_s.note(trace.bound_at_s - trace.received_at_s)
        if trace.finished_at_s is not None and outcome == "ok":
            self.request_s.note(trace.finished_at_s - trace.received_at_s)

    def note_failure(self, code: str) -> None:
        """Count one request that ended with an error of ours."""
        self.failures[code] += 1

    def note_failover(self, stage: str) -> None:
        """Count one attempt that its worker failed."""
        self.failovers[stage] += 1

    def note_directory_degraded(self) -> None:
        """Count one request that was routed without the directory."""
        self.num_directory_degraded += 1
