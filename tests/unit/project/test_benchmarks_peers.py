"""The comparison with others: what their lines come to, and what they need."""

from pathlib import Path

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import reading
from benchmarks.peers.systems import SYSTEMS


def step(at_s, took_s=0.001, finite=True, changed_s=0.001):
    return {"kind": "step", "at_s": at_s, "took_s": took_s, "changed_s": changed_s, "finite": finite}


def synced(at_s, capture_s, fragment=0, committed=True):
    return {"kind": "synced", "at_s": at_s, "capture_s": capture_s, "fragment": fragment, "committed": committed}


ALL = {"begins_s": 0.0, "ends_s": 100.0}


def test_a_sync_is_the_median_of_each_fragment_one_after_another_but_not_one_given_up_or_begun_before():
    lines = [synced(1.1, 1.0), synced(2.3, 2.0), synced(3.2, 3.0), synced(1.5, 1.0, fragment=1)]
    assert reading.sync_ms(lines, **ALL) == pytest.approx(200 + 500)
    assert reading.whole_syncs(lines, 2, **ALL) == 2
    given_up, begun_before = synced(1.1, 1.0, committed=False), synced(5.1, 4.0)
    assert reading.sync_ms([given_up, begun_before], begins_s=4.5, ends_s=9.0) is None
    assert reading.whole_syncs([given_up], 1, **ALL) == 0


def test_what_a_sync_makes_longer_is_what_is_beyond_a_usual_step():
    lines = [step(1, 0.010), step(2, 0.010, changed_s=0.031), step(3, 0.210)]
    assert reading.longer_ms("took_s", lines, 2, **ALL) == pytest.approx(100)
    assert reading.longer_ms("changed_s", lines, 2, **ALL) == pytest.approx(15)
    assert reading.longer_ms("took_s", lines, 0, **ALL) is None
    assert reading.longer_ms("took_s", [], 2, **ALL) is None


@pytest.mark.parametrize(
    ("times", "stall"),
    [
        ((1, 2, 3, 4, 5), 5),  # none until the end
        ((1, 2, 3, 4, 7, 8, 9), 3),  # from the last step before the fault
        ((1, 2, 3, 4, 4.5, 5.5, 6, 7, 8, 9, 10), 1),
        ((), 6),
    ],
)
def test_a_stall_is_the_longest_time_without_a_step_after_a_fault(times, stall):
    assert reading.stall_s([step(at_s) for at_s in times], fault_s=4.0, ends_s=10.0) == stall


def test_parameters_are_finite_if_they_are_after_every_step():
    lines = [step(1), step(2, finite=False), step(3)]
    assert not reading.finite(lines, **ALL)
    assert reading.finite(lines, begins_s=2.5, ends_s=9.0)
    assert reading.steps_per_s(lines, begins_s=0.0, ends_s=2.0) == 1.0


def run(fault, **more):
    before = {"sync_ms": 300.0, "held_up_ms": 2.0, "waits_ms": 1.0, "peer_bytes": 4000}
    return {"fault": fault, **before, "mb": None, "stall_s": 0.5, "steps_per_s_after": 0.0, "finite": True, **more}


def test_a_row_has_medians_of_all_runs_and_what_each_fault_did():
    runs = [run("peer", sync_ms=100.0), run("coordinator", stall_s=75.0), run("nan", finite=False)]
    row = command.row_of(SYSTEMS[0], 1000, runs)
    assert (row["runs"], row["sync_ms"], row["mb"], row["models"]) == (3, 300.0, None, 1.0)
    assert (row["held_up_ms"], row["waits_ms"]) == (2.0, 1.0)
    assert (row["peer_stall_s"], row["coordinator_stall_s"], row["goes_on"], row["nan"]) == (0.5, 75.0, "no", "yes")
    alone = command.row_of(SYSTEMS[0], 1000, runs[:1])
    assert (alone["coordinator_stall_s"], alone["goes_on"], alone["nan"]) == (None, None, None)


def test_requirements_are_pinned():
    for name in {each.package for each in SYSTEMS} - {""}:
        lines = Path(command.__file__).with_name(f"requirements-{name}.txt").read_text().splitlines()
        assert all("==" in line for line in lines if line and not line.startswith("#"))
        assert any(name in line for line in lines[1:])


def test_a_system_without_an_interpreter_is_left_out(capsys):
    assert command.main(["--quick", "--system", "torchft"]) == 0
    assert "without torchft: --python torchft=.. names no interpreter" in capsys.readouterr().err
