"""Every benchmark runs from the command line with ``--quick``, and says what it should. No figure is judged here."""

import argparse
import json
import os
import tempfile

import pytest

from benchmarks import (
    accelerator,
    core_heartbeats,
    heartbeats,
    ladder,
    merge,
    narrowing,
    output,
    profiles,
    round_latency,
    sync_share,
    wire_bytes,
)
from benchmarks.hostile import __main__ as hostile
from benchmarks.peers import __main__ as peers
from benchmarks.regions import __main__ as drill
from benchmarks.regions.network import regions
from broker.base.errors import Unavailable
from ops.processes.cluster import free_ports

whole = pytest.mark.full("whole benchmarks: minutes")
pytestmark = pytest.mark.timeout(300)


def rows(measure, capsys, *flags):
    assert measure.main(["--quick", "--json", *flags]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a benchmark may write, and leaves nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


@whole
@pytest.mark.usefixtures("folder")
def test_bytes_on_the_wire_agree_with_the_closed_form_within_two_percent(capsys):
    (row,) = rows(wire_bytes, capsys)
    for name in ("up_ratio", "down_ratio", "counters_ratio"):
        assert row[name] == pytest.approx(1, abs=wire_bytes.TOLERANCE)


@whole
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("measure", "number"),
    [(round_latency, 2), (narrowing, 3), (heartbeats, 2), (accelerator, 1), (peers, 1)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_benchmark_says_its_rows_and_leaves_nothing(measure, number, capsys):
    assert len(rows(measure, capsys)) == number


@whole
@pytest.mark.usefixtures("folder")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_two_threads_are_measured_and_a_processor_that_was_kept_for_one_is_given_back(capsys):
    assert {row["threads"] for row in rows(merge, capsys, "--islands", "2")} == {1, 2}
    processors = os.sched_getaffinity(0)
    (row,) = rows(sync_share, capsys, "--own-core")
    assert 0 < row["sync_share"] < 1
    assert os.sched_getaffinity(0) == processors


def test_the_core_is_measured_with_rounds_open(capsys):
    few, more = rows(core_heartbeats, capsys)
    assert (few["islands"], more["islands"], few["ratio"]) == (4, 8, 1.0)
    for row in (few, more):
        assert all(row[name] > 0 for name in ("us", "joins_us", "open_rounds"))


ALL = accelerator, core_heartbeats, heartbeats, merge, narrowing, profiles, round_latency, sync_share, wire_bytes
ALL += hostile, ladder, peers, drill


@pytest.mark.parametrize("measure", ALL, ids=lambda measure: measure.__name__)
def test_help_of_every_benchmark_has_an_example(measure, capsys):
    with pytest.raises(SystemExit):
        measure.main(["--help"])
    assert "example:\n  python -m benchmarks." in capsys.readouterr().out


def test_an_error_from_within_a_group_of_tasks_is_said_in_one_line(capsys):
    def measure(args):
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [Unavailable("the hub is gone", definite=True)])])

    assert output.guarded(measure, argparse.Namespace()) == 1
    assert capsys.readouterr().err == "error: the hub is gone\n"


def test_strangers_say_that_a_broker_is_gone(capsys):
    address = f"tcp://127.0.0.1:{free_ports(2)}"
    assert hostile.main(["--quick", address]) == 1
    assert "error: no broker at 127.0.0.1:" in capsys.readouterr().err
    assert hostile.main(["--quick", "--at-once", "0", address]) == 2


@pytest.fixture
def namespaces():
    """Leave to make network namespaces, or the test is skipped."""
    try:
        with regions(1, round_trip_ms=80, mbit=100):
            pass
    except Unavailable as err:
        pytest.skip(str(err))


@whole
@pytest.mark.usefixtures("folder", "namespaces")
def test_both_sides_of_the_drill_come_down_to_the_loss(capsys, tmp_path_factory):
    raw = tmp_path_factory.mktemp("raw") / "raw.jsonl"
    found = rows(drill, capsys, "--raw", str(raw), "--context", "16")
    assert [row["side"] for row in found] == ["atoll", "data-parallel", "atoll"]
    assert all(row["seconds"] > 0 and row["mb_up"] > 0 for row in found)
    assert [len(json.loads(line)["curve"]) > 0 for line in raw.read_text().splitlines()] == [True] * 3
