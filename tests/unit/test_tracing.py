"""Spans of requests: one tree for each, recorded in memory."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from router.attach import attached_router, find_servers
from router.requests import GenerateRequest, RequestTrace
from router.serve import make_front
from router.tracing import Tracing
from shared.config import Settings
from shared.errors import ConfigError
from shared.hashing import pack_tokens
from shared.types import RequestId, Sampling
from shared.vtime import run_virtual
from tests.support.fake_vllm import FakeVllm
from tests.support.http_front import ask as asked_of
from tests.support.rack import ask, prompt, rack
from tests.support.tokenizers import write_model_folder

pytest.importorskip("opentelemetry.sdk", reason="needs OpenTelemetry")

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
SLOW = {"token_s": 0.01, "prefill_s_per_token": 0.001}


class Recorded:
    """A tracing whose spans stay here."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)

    @property
    def spans(self) -> list[Any]:
        return list(self.exporter.get_finished_spans())

    def tree(self) -> dict[str, list[str]]:
        """Names of the spans below each, by name, in order of their beginnings."""
        by_id = {span.context.span_id: span for span in self.spans}
        found: dict[str, list[str]] = {}
        # Of those that begin together, the one that ends first is the first.
        for span in sorted(self.spans, key=lambda span: (span.start_time, span.end_time)):
            parent = by_id.get(span.parent.span_id) if span.parent is not None else None
            found.setdefault(parent.name if parent is not None else "", []).append(span.name)
        return found

    def one(self, name: str) -> Any:
        (span,) = [span for span in self.spans if span.name == name]
        return span


def duration_s(span: Any) -> float:
    seconds: float = (span.end_time - span.start_time) / 1e9
    return seconds


def test_request_is_one_tree_below_its_caller() -> None:
    async def scenario() -> None:
        recorded = Recorded()
        async with rack(2, **SLOW) as workers, workers.router(tracing=recorded.tracing) as router:
            trace = RequestTrace(accepted_at_s=asyncio.get_running_loop().time())
            await asyncio.sleep(0.5)
            request = GenerateRequest(
                RequestId("a"), pack_tokens(prompt(1, 320, tail=1)), Sampling(max_tokens=8), traceparent=CALLER
            )
            async with aclosing(router.generate(request, trace)) as generated:
                async for _ in generated:
                    pass
        assert recorded.tree() == {
            "": ["request"],
            "request": ["tokenise", "match", "queue", "rank", "prefill", "decode"],
        }
        root = recorded.one("request")
        assert f"{root.context.trace_id:032x}" == TRACE_ID
        assert f"{root.parent.span_id:016x}" == "00f067aa0ba902b7"
        assert {span.context.trace_id for span in recorded.spans} == {root.context.trace_id}
        assert root.attributes["kvroute.worker"] == trace.worker
        assert (root.attributes["kvroute.outcome"], root.attributes["gen_ai.usage.input_tokens"]) == ("ok", 340)
        assert duration_s(recorded.one("tokenise")) == pytest.approx(0.5, abs=0.1)
        assert all(root.start_time <= span.start_time <= span.end_time for span in recorded.spans)

    run_virtual(scenario())


def test_failover_stands_below_the_request_and_says_what_failed() -> None:
    async def scenario() -> None:
        recorded = Recorded()
        async with rack(2, **SLOW) as workers, workers.router(tracing=recorded.tracing) as router:
            asked = asyncio.create_task(ask(router, "a", prompt(1, 320, tail=1), max_tokens=50))
            while not router.fleet.num_bookings:
                await asyncio.sleep(0.001)
            (attempt,) = router.watch.decisions.last(1)
            await workers.kill_worker(attempt.worker)
            _, trace = await asked
            assert trace.num_attempts == 2
        tree = recorded.tree()
        assert tree["request"] == ["match", "queue", "rank", "prefill", "failover"]
        assert tree["failover"] == ["match", "queue", "rank", "prefill", "decode"]
        broken, *_ = [span for span in recorded.spans if span.name == "prefill" and not span.status.is_ok]
        assert broken.status.description == "engine_died"
        assert recorded.one("failover").attributes["kvroute.attempt"] == 2

    run_virtual(scenario())


def test_submit_that_came_too_late_is_a_refusal_and_no_failover() -> None:
    async def scenario() -> None:
        recorded = Recorded()
        real = {"token_s": 0.01, "prefill_s_per_token": 0.0002, "step_budget_tokens": 512, "is_contended": True}
        async with (
            rack(1, **real) as workers,
            workers.router() as one,
            workers.router(tracing=recorded.tracing) as other,
        ):
            await asyncio.sleep(1.5)
            answers = await asyncio.gather(
                *(ask(router, "a", prompt(number, 3200, 0)) for number, router in enumerate((one, other)))
            )
            assert answers[1][1].num_refusals == 1
        assert recorded.tree() == {
            "": ["request"],
            "request": ["refused", "match", "queue", "rank", "prefill", "decode"],
            "refused": ["match", "queue", "rank", "submit"],
        }
        assert recorded.one("request").attributes["kvroute.attempts"] == 1
        assert all(span.status.is_ok or span.status.is_unset for span in recorded.spans)

    run_virtual(scenario())


def test_request_that_found_no_worker_ends_with_an_error() -> None:
    async def scenario() -> None:
        recorded = Recorded()
        async with rack(0) as workers, workers.router(tracing=recorded.tracing, queue_timeout_s=1.0) as router:
            with pytest.raises(Exception, match="no worker"):
                await ask(router, "a", prompt(1, 64, tail=1))
        assert recorded.tree() == {"": ["request"], "request": ["queue"]}
        root = recorded.one("request")
        assert (root.status.is_ok, root.attributes["kvroute.outcome"]) == (False, "failed")

    run_virtual(scenario())


def test_callers_span_is_passed_on_as_ours_with_tracing_and_as_it_is_without() -> None:
    async def scenario(tracing: Tracing | None) -> str:
        async with rack(1, **SLOW) as workers, workers.router(tracing=tracing) as router:
            await ask(router, "a", prompt(1, 64, tail=1), traceparent=CALLER)
            (slot,) = workers.worker_to_slot.values()
            (request,) = slot.engine.seen
            return str(request.traceparent)

    assert run_virtual(scenario(None)) == CALLER
    recorded = Recorded()
    passed_on = run_virtual(scenario(recorded.tracing))
    root = recorded.one("request")
    assert passed_on == f"00-{TRACE_ID}-{root.context.span_id:016x}-01"


def test_request_without_a_caller_has_a_trace_of_its_own() -> None:
    async def scenario() -> None:
        recorded = Recorded()
        async with rack(1, **SLOW) as workers, workers.router(tracing=recorded.tracing) as router:
            await ask(router, "a", prompt(1, 64, tail=1), traceparent="nonsense")
        assert recorded.one("request").parent is None

    run_virtual(scenario())


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector that takes what comes to it; gives its address, and the requests so far."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    taken: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            taken.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nobody is told."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", taken
        finally:
            server.shutdown()
            thread.join()


async def test_spans_of_a_served_request_reach_the_collector_that_is_set(tmp_path: Path) -> None:
    server = await FakeVllm().start()
    with collector() as (url, taken):
        settings = Settings(
            attach=(server.attach,), tokenizer=str(write_model_folder(tmp_path / "model")), otlp_endpoint=url
        )
        found = await find_servers(settings, lambda line: None)
        async with attached_router(found, lambda line: None) as serving:
            body = {"model": "tiny", "prompt": "a" * 100, "max_tokens": 4}
            answered = await asked_of(make_front(serving, []), "/v1/completions", body, headers={"traceparent": CALLER})
            assert answered.status == 200
    await server.stop()
    resources = [resource for request in taken for resource in request.resource_spans]
    assert {
        attribute.value.string_value
        for resource in resources
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
    } == {"kvroute"}
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    (root,) = [span for span in spans if span.name == "request"]
    assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    children = [span for span in spans if span.parent_span_id == root.span_id]
    assert {span.name for span in children} == {"tokenise", "match", "queue", "rank", "prefill", "decode"}
    assert len(children) == len(spans) - 1


def test_endpoint_must_be_a_url() -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint: 'collector:4318' is no http"):
        Tracing.to_endpoint("collector:4318")
