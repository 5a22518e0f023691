"""OpenTelemetry spans of requests, by option: one tree for each, made from its trace when it has ended.

Nothing is recorded while a request runs but the times that its trace has anyway, so that there is no cost where no
tracing is asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from router.requests import Attempt, GenerateRequest, RequestTrace
from shared import __version__
from shared.errors import ConfigError

_SERVICE = "kvroute"
_TRACEPARENT = "traceparent"
_EXPORT_TIMEOUT_S = 10


class Tracing:
    """Records the spans of one router's requests. Close it to have the last ones sent."""

    def __init__(self, provider: Any) -> None:
        try:
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise _missing() from None
        self._provider = provider
        self._tracer = provider.get_tracer(_SERVICE, __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_endpoint(cls, endpoint: str) -> Tracing:
        """Send spans to an OTLP collector by HTTP. Raises `ConfigError` where the libraries are missing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise _missing() from None
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-endpoint: {endpoint!r} is no http:// or https:// URL")
        if not endpoint.rstrip("/").endswith("/v1/traces"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        resource = Resource.create({"service.name": _SERVICE, "service.version": __version__})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S)))
        return cls(provider)

    def begin(self, request: GenerateRequest, trace: RequestTrace) -> GenerateRequest:
        """Open the request's span below its caller's; gives the request as a child of it. Modifies the trace."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        caller = self._propagator.extract({_TRACEPARENT: request.traceparent} if request.traceparent else {})
        began_at_s = trace.received_at_s if trace.accepted_at_s is None else trace.accepted_at_s
        clock = _WallClock()
        span = self._tracer.start_span("request", context=caller, kind=SpanKind.SERVER, start_time=clock.ns(began_at_s))
        trace.span = _Recording(self._tracer, span, clock)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return replace(request, traceparent=carrier.get(_TRACEPARENT, request.traceparent))

    def end(self, request: GenerateRequest, trace: RequestTrace, outcome: str) -> None:
        """Close the request's span, and record what happened in it. Modifies the trace."""
        recording, trace.span = trace.span, None
        if recording is not None:
            recording.end(request, trace, outcome)

    async def close(self) -> None:
        """Send what is left."""
        await asyncio.to_thread(self._provider.shutdown)


class _WallClock:
    """Moments of the loop's clock as nanoseconds of the epoch, the same way for all spans of a request."""

    def __init__(self) -> None:
        self._epoch_ns = time.time_ns() - int(asyncio.get_running_loop().time() * 1e9)

    def ns(self, at_s: float) -> int:
        return self._epoch_ns + int(at_s * 1e9)


class _Recording:
    """The open span of one request."""

    def __init__(self, tracer: Any, span: Any, clock: _WallClock) -> None:
        self._tracer = tracer
        self._span = span
        self._clock = clock

    def end(self, request: GenerateRequest, trace: RequestTrace, outcome: str) -> None:
        """Close it, with those of what happened below it."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        assert trace.finished_at_s is not None, "a request that ends has finished"
        if self._span.is_recording():
            inside = set_span_in_context(self._span)
            if trace.accepted_at_s is not None:
                self._record("tokenise", trace.accepted_at_s, trace.received_at_s, inside)
            number = 1
            for attempt in trace.attempts:
                self._record_attempt(attempt, number, trace.finished_at_s, inside)
                # A worker that did not take it was none of its attempts.
                number += not attempt.is_refused
            if not trace.attempts:
                self._record("queue", trace.received_at_s, trace.finished_at_s, inside)
            self._span.set_attributes(_attributes(request, trace, outcome))
            if trace.error is not None:
                self._span.set_status(Status(StatusCode.ERROR, trace.error))
        self._span.end(self._clock.ns(trace.finished_at_s))

    def _record_attempt(self, attempt: Attempt, number: int, finished_at_s: float, inside: Any) -> None:
        """Spans of one worker's turn; a refused one and those after the first stand below one that says what it is."""
        from opentelemetry.trace import set_span_in_context

        ended_at_s = finished_at_s if attempt.ended_at_s is None else attempt.ended_at_s
        worker = {"kvroute.worker": attempt.worker}
        around = None
        if attempt.is_refused or number > 1:
            around = self._tracer.start_span(
                "refused" if attempt.is_refused else "failover",
                context=inside,
                start_time=self._clock.ns(attempt.asked_at_s),
                attributes={**worker, "kvroute.attempt": number},
            )
            inside = set_span_in_context(around)
        self._record("match", attempt.asked_at_s, attempt.matched_at_s, inside)
        self._record("queue", attempt.matched_at_s, attempt.weighed_at_s, inside)
        self._record("rank", attempt.weighed_at_s, attempt.bound_at_s, inside, worker)
        first_token_at_s = attempt.first_token_at_s
        if attempt.is_refused:
            self._record("submit", attempt.bound_at_s, ended_at_s, inside, worker)
        elif first_token_at_s is None:
            self._record("prefill", attempt.bound_at_s, ended_at_s, inside, worker, attempt.error)
        else:
            self._record("prefill", attempt.bound_at_s, first_token_at_s, inside, worker)
            self._record("decode", first_token_at_s, ended_at_s, inside, worker, attempt.error)
        if around is not None:
            around.end(self._clock.ns(ended_at_s))

    def _record(
        self,
        name: str,
        began_at_s: float,
        ended_at_s: float,
        inside: Any,
        attributes: Mapping[str, str] | None = None,
        error: str | None = None,
    ) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._tracer.start_span(
            name, context=inside, start_time=self._clock.ns(began_at_s), attributes=dict(attributes or {})
        )
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._clock.ns(max(began_at_s, ended_at_s)))


def _attributes(request: GenerateRequest, trace: RequestTrace, outcome: str) -> dict[str, str | int]:
    """Names of OpenTelemetry's conventions for generative AI where there are some."""
    told: dict[str, str | int] = {
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "kvroute.request_id": request.request,
        "kvroute.outcome": outcome,
        "kvroute.attempts": trace.num_attempts,
        "kvroute.matched_tokens": trace.matched_tokens,
        "kvroute.possible_tokens": trace.possible_tokens,
    }
    if trace.cached_tokens is not None:
        told["kvroute.cached_tokens"] = trace.cached_tokens
    if trace.worker is not None:
        told["kvroute.worker"] = trace.worker
    return told


def _missing() -> ConfigError:
    return ConfigError("--otlp-endpoint: needs OpenTelemetry; pip install 'kvroute[otel]'")
