"""Log lines and metrics, as their readers see them."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from router.requests import RequestTrace
from shared.telemetry import ITL_BUCKETS_S, REQUEST_BUCKETS_S, TTFT_BUCKETS_S, Metrics, Readings, set_up_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where log lines go; the rooms' loggers are as before afterwards."""
    rooms = [logging.getLogger(room) for room in ("router", "worker", "shared")]
    before = [(room.handlers[:], room.level, room.propagate) for room in rooms]
    yield io.StringIO()
    for room, (handlers, level, propagate) in zip(rooms, before, strict=True):
        room.handlers[:], room.propagate = handlers, propagate
        room.setLevel(level)


def test_text_lines_are_in_vllms_form(stream: io.StringIO) -> None:
    set_up_logging("info", stream=stream)
    logging.getLogger("router.batch").info("hello %s", "there")
    logging.getLogger("shared.x").debug("too quiet")
    assert re.fullmatch(r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[test_telemetry\.py:\d+\] hello there\n", stream.getvalue())


def test_each_line_of_a_message_has_the_prefix(stream: io.StringIO) -> None:
    set_up_logging("info", stream=stream)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("worker.host").exception("one\ntwo")
    lines = stream.getvalue().splitlines()
    prefix = lines[0].removesuffix("one")
    assert all(line.startswith(prefix) for line in lines)
    assert [lines[1].removeprefix(prefix), lines[-1].removeprefix(prefix)] == ["two", "ValueError: bad"]


def test_json_lines_hold_one_object_each(stream: io.StringIO) -> None:
    set_up_logging("warning", "json", stream=stream)
    logging.getLogger("shared.directory").warning("one\ntwo é")
    told = json.loads(stream.getvalue())
    assert (told["level"], told["logger"], told["message"]) == ("WARNING", "shared.directory", "one\ntwo é")
    assert told["source"].startswith("test_telemetry.py:")
    assert set(told) == {"time", "level", "logger", "source", "message"}


def test_second_set_up_takes_the_place_of_the_first(stream: io.StringIO) -> None:
    set_up_logging("info", stream=io.StringIO())
    set_up_logging("info", stream=stream)
    logging.getLogger("router").info("once")
    assert stream.getvalue().count("once") == 1


def test_other_loggers_are_left_alone(stream: io.StringIO) -> None:
    before = logging.getLogger().handlers[:]
    set_up_logging("debug", stream=stream)
    logging.getLogger("vllm").warning("not ours")
    assert (logging.getLogger().handlers, stream.getvalue()) == (before, "")


def samples(metrics: Readings) -> dict[str, float]:
    """Every sample but buckets and creation times, by the name and labels that a reader sees."""
    found = {}
    for line in metrics.render().decode().splitlines():
        if not line.startswith("#") and "_bucket{" not in line and "_created" not in line:
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def test_metrics_of_answered_failed_and_moved_requests() -> None:
    metrics = Metrics()
    answered = RequestTrace(
        received_at_s=1.0,
        bound_at_s=1.5,
        first_token_at_s=3.0,
        finished_at_s=7.0,
        matched_tokens=64,
        cached_tokens=48,
        possible_tokens=80,
    )
    metrics.note_first_token(100, answered)
    metrics.note_cache(100, 64, 48)
    metrics.note_next_tokens(4, 0.2)
    metrics.note_request("cost", "ok", answered)
    metrics.note_request("cost", "failed", RequestTrace(received_at_s=1.0))
    metrics.note_failure("rate_limit_exceeded")
    metrics.note_failover("stream")
    metrics.note_directory_degraded()
    assert samples(metrics) == {
        'kvroute_requests_total{outcome="ok",policy="cost"}': 1,
        'kvroute_requests_total{outcome="failed",policy="cost"}': 1,
        'kvroute_request_failures_total{code="rate_limit_exceeded"}': 1,
        "kvroute_request_duration_seconds_count": 1,
        "kvroute_request_duration_seconds_sum": 6.0,
        "kvroute_inter_token_latency_seconds_count": 4,
        "kvroute_inter_token_latency_seconds_sum": 0.2,
        "kvroute_ttft_seconds_count": 1,
        "kvroute_ttft_seconds_sum": 2.0,
        "kvroute_queue_seconds_count": 1,
        "kvroute_queue_seconds_sum": 0.5,
        "kvroute_possible_tokens_total": 80,
        "kvroute_matched_tokens_total": 64,
        "kvroute_generation_tokens_total": 0,
        "kvroute_prompt_tokens_total": 100,
        "kvroute_cached_tokens_total": 48,
        "kvroute_cache_told_tokens_total": 100,
        "kvroute_prediction_error_tokens_count": 1,
        "kvroute_directory_degraded_total": 1,
        'kvroute_failovers_total{stage="stream"}': 1,
    }


def test_routers_in_one_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.note_directory_degraded()
    assert samples(other)["kvroute_directory_degraded_total"] == 0


def test_numbers_that_their_owners_keep_are_read_when_somebody_asks() -> None:
    readings = Readings()
    counts = {"a": 1}
    readings.add_counter("kvroute_things", "Things.", lambda: counts["a"])
    readings.add_gauge("kvroute_level", "Level.", lambda: -counts["a"])
    readings.add_counters("kvroute_kinds", "Things by kind.", "kind", lambda: counts)
    counts |= {"a": 2, "b": 5}
    assert readings.render().decode() == (
        "# HELP kvroute_things_total Things.\n# TYPE kvroute_things_total counter\nkvroute_things_total 2.0\n"
        "# HELP kvroute_level Level.\n# TYPE kvroute_level gauge\nkvroute_level -2.0\n"
        "# HELP kvroute_kinds_total Things by kind.\n# TYPE kvroute_kinds_total counter\n"
        'kvroute_kinds_total{kind="a"} 2.0\nkvroute_kinds_total{kind="b"} 5.0\n'
    )


def test_a_name_that_two_tell_is_refused() -> None:
    metrics = Metrics()
    metrics.add_counter("kvroute_things", "Things.", lambda: 1)
    with pytest.raises(ValueError, match="kvroute_things is told by somebody already"):
        metrics.add_gauge("kvroute_things", "Things.", lambda: 1)


def test_metrics_of_a_router_and_what_is_read_for_it_are_one_page() -> None:
    metrics = Metrics()
    metrics.add_counter("kvroute_things", "Things.", lambda: 3)
    metrics.note_failover("stream")
    found = samples(metrics)
    assert (found["kvroute_things_total"], found['kvroute_failovers_total{stage="stream"}']) == (3, 1)


def test_buckets_are_vllms() -> None:
    buckets = pytest.importorskip("vllm.v1.metrics.buckets", reason="needs vLLM")
    assert buckets.TIME_TO_FIRST_TOKEN_BUCKETS == TTFT_BUCKETS_S
    assert buckets.INTER_TOKEN_LATENCY_BUCKETS == ITL_BUCKETS_S
    assert buckets.REQUEST_LATENCY_BUCKETS == REQUEST_BUCKETS_S
