"""Traces of rounds: a real run sends them over HTTP to a collector, read with OpenTelemetry's own classes."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ops.processes.cluster import free_ports
from tests.local_run import Up, check_report, wait_for

pytestmark = pytest.mark.timeout(240)


PARTS = {"open", "contribution", "merge", "persist", "publish", "adopt"}


class Collector:
    """Takes traces in, as a collector does at its port for OTLP over HTTP."""

    def __init__(self):
        self.spans, self.resources, self.paths = [], [], set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def take(self, path, request):
        self.paths.add(path)
        for of_resource in request.resource_spans:
            self.resources.append(attributes_of(of_resource.resource))
            self.spans += [span for scope in of_resource.scope_spans for span in scope.spans]

    def rounds(self):
        """Returns the spans of each whole trace, the root first."""
        spans = list(self.spans)
        roots = [span for span in spans if span.name == "round"]
        return [
            [root, *(each for each in spans if each.trace_id == root.trace_id and each is not root)] for root in roots
        ]


def attributes_of(holder):
    return {each.key: each.value.string_value or each.value.int_value for each in holder.attributes}


def test_a_run_sends_a_trace_of_each_round_with_all_its_parts(tmp_path):
    with Collector() as collector, Up(tmp_path / "run", "--islands", "2", "--otel", collector.endpoint) as up:

        def whole():
            for trace in collector.rounds():
                if {span.name for span in trace} == {"round", *PARTS}:
                    return trace
            return None

        root, *parts = wait_for(whole, "trace with every part", within_s=180, evidence=lambda: up.err)
        by_id = {span.span_id: span for span in (root, *parts)}
        for span in parts:
            parent = by_id[span.parent_span_id]
            assert parent.name == ("open" if span.name == "contribution" else "round")
            assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano
        of = {span.name: span for span in parts}
        for before, after in (("open", "merge"), ("merge", "persist"), ("persist", "publish")):
            assert of[before].end_time_unix_nano == of[after].start_time_unix_nano
        facts = attributes_of(root)
        version = next(
            row
            for row in up.ledger()
            if (row["fragment_id"], row["fragment_version"]) == (facts["atoll.fragment"], facts["atoll.version"])
        )
        assert facts["atoll.digest"] == version["digest"]
        for name in ("contribution", "adopt"):  # of a contribution that was held from before there is no such span
            islands = {attributes_of(span)["atoll.island"] for span in parts if span.name == name}
            assert islands <= {each["island_id"] for each in version["contributions"]}
        assert collector.paths == {"/v1/traces"}
        assert collector.resources[0]["service.name"] == "atoll-aggregator"
        assert collector.resources[0]["atoll.run"] == "run"


def test_a_collector_that_is_away_costs_traces_and_nothing_else(tmp_path):
    away = f"http://127.0.0.1:{free_ports(1)}"
    with Up(tmp_path / "run", "--islands", "2", "--tokens", "20K", "--otel", away, "--json") as up:
        assert up.wait(200) == 0, up.err
        check_report(up.report())
