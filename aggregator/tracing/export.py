"""Exports rounds as traces to an OpenTelemetry collector, over HTTP. Shell.

Spans are made and sent by threads of their own. A collector that is slow or away costs traces, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aggregator.tracing.round_spans import Span
from broker.process import logs
from broker.process.release import install
from broker.wire.errors import ConfigError
from broker.wire.masking import shown

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OpenSpan

log = logs.get(__name__)

#: Rounds that may wait to be made into spans; more are dropped.
MOST_WAITING = 1000
#: What the collector has not taken within this time after the end is dropped.
LAST_WITHIN_S = 2.0
#: Between two sendings.
SEND_EVERY_S = 1.0
_PATH = "/v1/traces"
PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


class TraceExport:
    """Sends rounds to a collector.

    Args:
        endpoint: Its address; one without a path gets the usual one.
        run_id: Of the run, for the resource of all spans, as is ``shard``.
        shard: Of the aggregator.
        now_s: The clock of the spans.

    Raises:
        ConfigError: The packages of the extra are missing.
    """

    def __init__(self, endpoint: str, *, run_id: str, shard: int, now_s: float) -> None:
        address = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as err:
            cure = f"needs a package that is not installed ({err.name}): {install(*PACKAGES)}"
            raise ConfigError("otel_endpoint", shown(endpoint), cure) from err
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # noqa: TID251 (each attempt is a warning)
        resource = Resource.create({"service.name": "atoll-aggregator", "atoll.run": run_id, "atoll.shard": shard})
        # Its own end at exit could wait for a collector that is away.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=address)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000 * SEND_EVERY_S))
        self._tracer = self._provider.get_tracer("atoll.aggregator")
        self._wall_ns = time.time_ns() - round(1e9 * now_s)  # what to add to the clock of the spans
        self._thread = ThreadPoolExecutor(1, "traces")
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)
        self._dropped = 0
        log.info("traces.ready", endpoint=shown(address))

    def send(self, rounds: list[Span]) -> None:
        """Takes rounds that are over; returns at once."""
        for each in rounds:
            if self._waiting.acquire(blocking=False):
                self._thread.submit(self._make, each)
            else:
                self._dropped += 1

    async def close(self) -> None:
        """Sends what is left, if the collector takes it in time."""
        if self._dropped:
            log.warning("traces.dropped", rounds=self._dropped)
        end = threading.Thread(target=self._end, name="atoll-traces-end", daemon=True)
        end.start()
        await asyncio.to_thread(end.join, LAST_WITHIN_S)

    def _end(self) -> None:
        self._thread.shutdown()
        self._provider.force_flush(round(1000 * LAST_WITHIN_S))
        self._provider.shutdown()

    def _make(self, span: Span) -> None:
        try:
            self._open(span, None)
        finally:
            with suppress(ValueError):
                self._waiting.release()

    def _open(self, span: Span, parent: OpenSpan | None) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        context: Any = None if parent is None else set_span_in_context(parent)
        attributes = {f"atoll.{name}": value for name, value in span.attributes.items()}
        made = self._tracer.start_span(span.name, context, attributes=attributes, start_time=self._at(span.began_s))
        for part in span.parts:
            self._open(part, made)
        if span.failed:
            made.set_status(Status(StatusCode.ERROR, span.failed))
        made.end(self._at(span.ended_s))

    def _at(self, at_s: float) -> int:
        return self._wall_ns + round(1e9 * at_s)
