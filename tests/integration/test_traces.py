"""Traces of rounds, as a real run sent them to a collector, read with OpenTelemetry's own classes."""

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

pytestmark = pytest.mark.timeout(240)

PARTS = {"open", "contribution", "merge", "persist", "publish", "adopt"}


def attributes_of(holder):
    return {each.key: each.value.string_value or each.value.int_value for each in holder.attributes}


def test_a_run_sends_a_trace_of_each_round_with_all_its_parts(plain):
    files = sorted((plain.folder / "traces").iterdir())
    assert {path.name[3:] for path in files} == {"-v1-traces"}
    sent = [part for path in files for part in ExportTraceServiceRequest.FromString(path.read_bytes()).resource_spans]
    resource = attributes_of(sent[0].resource)
    assert (resource["service.name"], resource["atoll.run"]) == ("atoll-aggregator", "run")
    traces = {}
    for span in (span for part in sent for scope in part.scope_spans for span in scope.spans):
        traces.setdefault(span.trace_id, []).append(span)
    whole = [spans for spans in traces.values() if {span.name for span in spans} == {"round", *PARTS}]
    assert len(whole) > 10
    versions = {(row["fragment_id"], row["fragment_version"]): row for row in plain.ledger()}
    for spans in whole:
        by_id, of = {span.span_id: span for span in spans}, {span.name: span for span in spans}
        for span in spans:
            if span.name != "round":
                parent = by_id[span.parent_span_id]
                assert parent.name == ("open" if span.name == "contribution" else "round")
                assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
                assert span.end_time_unix_nano <= parent.end_time_unix_nano
        for before, after in (("open", "merge"), ("merge", "persist"), ("persist", "publish")):
            assert of[before].end_time_unix_nano == of[after].start_time_unix_nano
        facts = attributes_of(of["round"])
        version = versions[facts["atoll.fragment"], facts["atoll.version"]]
        assert facts["atoll.digest"] == version["digest"]
        for name in ("contribution", "adopt"):  # of a contribution that was held from before there is no such span
            islands = {attributes_of(span)["atoll.island"] for span in spans if span.name == name}
            assert islands <= {each["island_id"] for each in version["contributions"]}
