"""Traces by OpenTelemetry: a span per request, and within it decoding, the queue and the network.

Without an address to send them to, nothing of OpenTelemetry is imported.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

NAME = "bitgraft"


def otlp_exporter(endpoint: str) -> "SpanExporter":
    """Sends spans to a collector, by OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")  # type: ignore[no-any-return,unused-ignore]


class Tracing:
    """The spans of one worker; with no exporter it does nothing."""

    def __init__(self, exporter: "SpanExporter | None" = None) -> None:
        self._provider: Any = None
        if exporter is not None:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            self._provider = TracerProvider(resource=Resource.create({"service.name": NAME}))
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
            self._tracer = self._provider.get_tracer(NAME)

    @contextmanager
    def request(self, method: str, headers: dict[str, str]) -> Iterator[dict[str, Any]]:
        """The span of a request, part of the client's trace if it sent one; what the block puts in are attributes."""
        attributes: dict[str, Any] = {"http.request.method": method}
        if self._provider is None:
            yield attributes
            return
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        with self._tracer.start_as_current_span(method, context=parent, kind=SpanKind.SERVER) as span:
            try:
                yield attributes
            finally:
                span.update_name(f"{method} {attributes.get('http.route', '')}".strip())
                span.set_attributes(attributes)
                if attributes.get("http.response.status_code", 500) >= 500:
                    span.set_status(StatusCode.ERROR)

    def step(self, name: str, began: float, ended: float, **attributes: Any) -> None:
        """A finished part of the current request; times are of `time.perf_counter`."""
        if self._provider is not None:
            zero = time.time() - time.perf_counter()
            span = self._tracer.start_span(name, start_time=int(1e9 * (zero + began)), attributes=attributes)
            span.end(int(1e9 * (zero + ended)))

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()
