"""Traces: rounds as spans, read from a run's tapes and sent to an OpenTelemetry collector over HTTP.

A span has the same id whenever the tape is read: a follower that begins again sends nothing under a second id.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span as OpenSpan
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from ops.sinks.sink import Identity
from ops.sinks.sources import DirectorySource
from ops.story.round_spans import Span, span_of
from ops.story.rows import Row

STREAM = "rounds"
#: Spans that one request holds at most.
MOST_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow(Row):
    """A round that is over; ``step`` counts rounds, ``at`` is when its run began."""

    span: Span


class RoundsSource(DirectorySource):
    """The rounds of a run directory, in the order in which they ended."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, float("inf"))
        self._spans, self._count = list[Span](), 0
        self._figures.history.rounds.over = lambda each: self._spans.append(span_of(each))

    def rows(self) -> list[Row]:
        """Reads the tapes to their ends."""
        history = self._figures.history
        for line in self._tapes.to_end(self._run_dir):
            history.take(line)
        if self._closing:
            history.rounds.end(history.now_s)
        found, self._spans = self._spans, []
        began_at, first, self._count = self.began_at, self._count, self._count + len(found)
        return [
            RoundRow(stream=STREAM, step=first + k, at=began_at, values={}, span=span) for k, span in enumerate(found)
        ]


class TraceSink:
    """A collector, which :class:`ops.sinks.sink.Sink` describes.

    Args:
        endpoint: Its address, with the path.
        identity: Identity of the run.
    """

    #: Endpoint and run -> last round that was taken: a collector cannot be asked.
    _taken: ClassVar[dict[tuple[str, str], int]] = {}

    def __init__(self, endpoint: str, identity: Identity) -> None:
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # noqa: TID251 (said by the follower)
        resource = Resource.create({"service.name": "atoll-aggregator", "atoll.run": identity.group})
        self._key, self._ids, self._ended = (endpoint, identity.key), _Ids(), _Ended()
        provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("atoll.aggregator")
        self._exporter, self._last = OTLPSpanExporter(endpoint=endpoint), -1

    def written(self, stream: str) -> int:
        """Returns the last round that this process has sent."""
        return self._taken.get(self._key, -1)

    def write(self, row: Row) -> None:
        """Makes the spans of a round, and sends them once there are many."""
        assert isinstance(row, RoundRow)
        facts = row.span.attributes
        self._ids.begin(f"{self._key[1]} {facts['fragment']} {facts['round']} {row.span.began_s:.3f}")
        self._open(row.span, None, row.at)
        self._last = row.step
        if len(self._ended.spans) >= MOST_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Sends the spans made so far; raises OSError if the collector does not take them."""
        spans, self._ended.spans = self._ended.spans, []
        if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise OSError("the collector did not take the spans")
        self._taken[self._key] = self._last

    def close(self) -> None:
        """Sends the spans that are left."""
        self.flush()
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _open(self, span: Span, parent: OpenSpan | None, began_at: float) -> None:
        context: Any = None if parent is None else set_span_in_context(parent)
        attributes = {f"atoll.{name}": value for name, value in span.attributes.items()}
        at_ns = round(1e9 * (began_at + span.began_s))
        made = self._tracer.start_span(span.name, context, attributes=attributes, start_time=at_ns)
        for part in span.parts:
            self._open(part, made, began_at)
        if span.failed:
            made.set_status(Status(StatusCode.ERROR, span.failed))
        made.end(round(1e9 * (began_at + span.ended_s)))


class _Ended(SpanProcessor):
    """Keeps spans until they are sent."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class _Ids(IdGenerator):
    """Ids that follow from the round."""

    def begin(self, name: str) -> None:
        """Sets the name from which the next trace's ids follow."""
        self._name, self._count = name, 0

    def generate_span_id(self) -> int:
        return self._next(8)

    def generate_trace_id(self) -> int:
        return self._next(16)

    def _next(self, size: int) -> int:
        self._count += 1
        return int.from_bytes(hashlib.sha256(f"{self._name} {self._count}".encode()).digest()[:size], "big") or 1
