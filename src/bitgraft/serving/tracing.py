"""OpenTelemetry traces: one span per request, with child spans for decoding, the queue and the network.

Without a collector, OpenTelemetry is not imported.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

NAME = "bitgraft"


class Tracing:
    """The spans of one worker. Without an exporter its methods do nothing."""

    def __init__(self, exporter: "SpanExporter | None" = None) -> None:
        self._provider: Any = None
        if exporter is not None:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            self._provider = TracerProvider(resource=Resource.create({"service.name": NAME}))
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
            self._tracer = self._provider.get_tracer(NAME)

    @classmethod
    def to_collector(cls, address: str) -> "Tracing":
        """Send spans to a collector, by OTLP over HTTP; to none if the address is empty."""
        if not address:
            return cls()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=f"{address.rstrip('/')}/v1/traces"))

    @contextmanager
    def request(self, method: str, headers: dict[str, str]) -> Iterator[dict[str, Any]]:
        """Open a request's span, within the client's trace if there is one. Yield the dict of its attributes."""
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

    def step(self, name: str, start: float, end: float, **attributes: Any) -> None:
        """Record a finished step of the current request. Times are those of `time.perf_counter`."""
        if self._provider is not None:
            offset = time.time() - time.perf_counter()
            span = self._tracer.start_span(name, start_time=int(1e9 * (offset + start)), attributes=attributes)
            span.end(int(1e9 * (offset + end)))

    def close(self) -> None:
        """Send the remaining spans."""
        if self._provider is not None:
            self._provider.shutdown()
