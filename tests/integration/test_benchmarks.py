"""Every benchmark runs from the command line with ``--quick``, and says what it should. No figure is judged here."""

import argparse
import json
import os

import pytest

from benchmarks import (
    accelerator,
    core_heartbeats,
    heartbeats,
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
def folder(tmp_path):
    """Where a benchmark may write, and leaves nothing."""
    yield str(tmp_path)
    assert list(tmp_path.iterdir()) == []


@whole
def test_bytes_on_the_wire_agree_with_the_closed_form_within_two_percent(capsys, folder):
    (row,) = rows(wire_bytes, capsys, "--dir", folder)
    for name in ("up_ratio", "down_ratio", "counters_ratio"):
        assert row[name] == pytest.approx(1, abs=wire_bytes.TOLERANCE)


@whole
def test_a_round_shows_every_stage_beside_raw_tcp_and_the_disk(capsys, folder):
    printed = rows(round_latency, capsys, "--dir", folder)
    assert [(row["over"], row["rounds"]) for row in printed] == [("tcp", 3), ("ipc", 3)]
    stages = ("collect", "merge", "persist", "deliver", "tcp", "disk")
    assert all(row[f"{stage}_ms"] > 0 for row in printed for stage in stages)


two_processors = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")


@whole
def test_merging_stands_beside_what_memory_gives(capsys):
    found = {(row["what"], row["threads"]): row for row in rows(merge, capsys, "--islands", "2")}
    for threads in (1, 2):
        assert found[merge.READING, threads]["of_memory"] == 1.0
        with_step = found["mean int8 + step", threads]
        num_bytes = 100_000 * 16 + 2 * (100_000 + 4 * 391)  # two contributions, with a scale for each block of 256
        assert with_step["gb_per_s"] == pytest.approx(num_bytes / with_step["ms"] / 1e6)
        assert with_step["of_memory"] > 0


@whole
def test_a_link_is_narrow_in_the_middle_of_the_drill_and_its_island_in_versions_throughout(capsys, folder, monkeypatch):
    monkeypatch.setattr(narrowing, "WARM_UP_S", 1.0)
    before, narrow, after = rows(narrowing, capsys, "--dir", folder)
    assert [row["phase"] for row in (before, narrow, after)] == ["before", "narrow", "after"]
    assert narrow["mbit"] == before["mbit"] / 20 == after["mbit"] / 20
    assert narrow["up_fill"] > before["up_fill"] > 0
    assert narrow["down_fill"] > before["down_fill"] > 0
    # Beside other load an island may take its link for narrower than it is, once.
    assert max(before["contributions"], key=before["contributions"].__getitem__) == "bf16"
    assert before["share"] > 0
    assert set(before["stalls_ms"]) == {"island-0", "island-1", "island-2"}


def test_the_core_is_measured_with_rounds_open(capsys):
    few, more = rows(core_heartbeats, capsys)
    assert (few["islands"], more["islands"], few["ratio"]) == (4, 8, 1.0)
    for row in (few, more):
        assert all(row[name] > 0 for name in ("us", "joins_us", "open_rounds"))


@whole
def test_a_heartbeat_of_more_islands_stands_beside_one_of_few(capsys, folder):
    few, more = rows(heartbeats, capsys, "--dir", folder)
    assert (few["islands"], more["islands"], few["ratio"]) == (4, 8, 1.0)
    assert more["ratio"] == pytest.approx(more["hub_us"] / few["hub_us"])
    for row in (few, more):
        assert row["broker_us"] + row["aggregator_us"] == pytest.approx(row["hub_us"])
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["rounds"] >= 1


ALL = accelerator, core_heartbeats, heartbeats, merge, narrowing, profiles, round_latency, sync_share, wire_bytes
ALL += hostile, peers, drill


@pytest.mark.parametrize("measure", ALL, ids=lambda measure: measure.__name__)
def test_help_of_every_benchmark_has_an_example(measure, capsys):
    with pytest.raises(SystemExit):
        measure.main(["--help"])
    assert "example:\n  python -m benchmarks." in capsys.readouterr().out


@whole
@two_processors
def test_the_training_thread_has_a_processor_of_its_own_where_that_is_asked(folder, capsys):
    processors = os.sched_getaffinity(0)
    (row,) = rows(sync_share, capsys, "--own-core", "--dir", folder)
    assert 0 < row["sync_share"] < 1
    assert 0 < row["cpu_share"] < 1
    assert os.sched_getaffinity(0) == processors


@whole
def test_a_step_is_timed_without_and_with_an_island(folder, capsys):
    (row,) = rows(accelerator, capsys, "--dir", folder)
    assert row["slowdown"] == pytest.approx(row["step_ms"] / row["alone_ms"] - 1)
    assert 0 < row["sync_share"] < 1
    assert row["versions"] >= 1


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


@whole
def test_two_islands_stand_in_the_comparison_without_the_others(capsys, folder):
    (row,) = rows(peers, capsys, "--dir", folder)
    assert (row["system"], row["runs"], row["parameters"]) == ("atoll", 1, 1_007_616)
    assert row["sync_ms"] > 0
    assert row["held_up_ms"] > 0
    assert 0 <= row["peer_stall_s"] < 3  # the time that was looked at: so it stepped


@pytest.fixture
def namespaces():
    """Leave to make network namespaces, or the test is skipped."""
    try:
        with regions(1, round_trip_ms=80, mbit=100):
            pass
    except Unavailable as err:
        pytest.skip(str(err))


@whole
@pytest.mark.usefixtures("namespaces")
def test_both_sides_of_the_drill_come_down_to_the_loss(capsys, tmp_path):
    raw = tmp_path / "raw.jsonl"
    found = rows(drill, capsys, "--dir", str(tmp_path), "--raw", str(raw), "--context", "16")
    assert [row["side"] for row in found] == ["atoll", "data-parallel", "atoll"]
    assert all(row["seconds"] > 0 and row["mb_up"] > 0 for row in found)
    assert [len(json.loads(line)["curve"]) > 0 for line in raw.read_text().splitlines()] == [True] * 3
    assert list(tmp_path.iterdir()) == [raw]
