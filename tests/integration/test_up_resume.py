"""A run that was killed as a whole went on from its directory, and its tape proves that it did."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aggregator.store.recording import read_recording
from ops.dashboard.plot import WholeRun
from ops.inspect.replay import replay_all
from tests.local_run import check_invariants, check_report, ops

pytestmark = pytest.mark.timeout(180)

FRAGMENTS = 4


def test_a_run_that_was_killed_whole_goes_on_to_its_end(resumed):
    seen, report = resumed.seen, resumed.report()
    assert seen["exit"] == 0, seen["err"]
    assert "run run goes on in" in seen["err"]
    assert json.loads(seen["out"].splitlines()[-1]) == report
    assert report["phase"] == "ended"
    assert report["tokens"]["trained"] >= seen["tokens"]
    assert set(report["tokens"]["wasted"]) <= {"island_lost"}
    check_report(report)
    check_invariants(resumed.run_dir)


def test_page_status_and_report_count_alike_over_both_lives(resumed):
    page, report = WholeRun(resumed.run_dir).frame(0), resumed.report()
    found = json.loads(ops("status", resumed.run_dir, "--json").stdout)
    assert page["tokens"] == report["tokens"]["trained"] == found["totals"]["trained_tokens"]
    for name, each in report["islands"].items():
        shown = page["islands"][name]
        assert each["tokens"] == shown["tokens"] == found["islands"][name]["tokens"]
        assert (each["bytes_up"], each["bytes_down"]) == (shown["bytes_up"], shown["bytes_down"])
        assert each["bytes_up"] > resumed.seen["sent_before"][name]  # those of the first life are in it


def test_everything_that_was_merged_before_is_in_it(resumed):
    before, ledger = resumed.seen["before"], resumed.ledger()
    assert ledger[: len(before)] == before
    assert any(each["steps"]["to_tokens"] > 0 for row in before for each in row["contributions"])
    assert {row["epoch"] for row in ledger} == {1, 2}


def test_a_second_up_on_a_directory_in_use_is_refused(resumed):
    status, said = resumed.seen["second"]
    assert status == 2
    assert "is in use by process" in said


def test_the_tape_of_both_lives_gives_the_same_decisions_and_the_same_bytes_with_momentum(resumed):
    found, covered = replayed(resumed.run_dir)
    assert found.difference is None
    assert found.counts.lives == 2
    assert found.unrecorded == 0
    assert covered.versions == len(resumed.ledger())
    assert len(covered.checked) == found.counts.versions
    # The tape is written when a version is about to be: a kill costs it what a write in between takes, if anything.
    assert covered.versions - len(covered.checked) == found.counts.unwitnessed <= FRAGMENTS
    made_twice = found.derived + found.alone + FRAGMENTS - len(resumed.ledger())
    assert 0 <= made_twice <= FRAGMENTS  # computed before the kill, and not durable then


def test_the_momentum_of_the_second_life_is_that_of_the_first_to_the_last_bit(resumed):
    """The recordings of both lives form one chain per fragment: what one leaves is what the next begins with."""
    left = {}
    for path in sorted((resumed.run_dir / "events.payloads").iterdir()):
        recorded = read_recording(path)
        p, version = recorded.facts["fragment_id"], recorded.facts["fragment_version"]
        if (p, version - 1) in left:
            theta, momentum = left[p, version - 1]
            assert recorded.arrays["theta_before"].tobytes() == theta
            assert recorded.arrays["momentum_before"].tobytes() == momentum
            assert version < 2 or np.any(recorded.arrays["momentum_before"])
        left[p, version] = recorded.arrays["theta_after"].tobytes(), recorded.arrays["momentum_after"].tobytes()
    assert {p: max(v for q, v in left if q == p) for p, _ in left} == {
        int(p): version for p, version in resumed.report()["versions"].items()
    }


def replayed(run_dir):
    (found,), covered = replay_all([run_dir / "events.jsonl"], ledgers=[run_dir / "store" / "ledger.jsonl"])
    return found, covered


@pytest.fixture
def copied(resumed, tmp_path):
    """Tape, payloads and ledger of the run, to tamper with; the tape does not tell of what is changed."""
    (tmp_path / "store").mkdir()
    shutil.copy(resumed.run_dir / "store" / "ledger.jsonl", tmp_path / "store" / "ledger.jsonl")
    shutil.copytree(resumed.run_dir / "events.payloads", tmp_path / "events.payloads")
    lines = (resumed.run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if '"event":"computed"' in line and '"fragment_version":1' in line)
    lines[first : first + 3] = ['{"gap":3}\n']
    (tmp_path / "events.jsonl").write_text("".join(lines))
    found, covered = replayed(tmp_path)
    assert found.difference is None
    assert covered.versions == len(resumed.ledger())
    assert covered.versions - len(covered.checked) > FRAGMENTS
    return tmp_path


def test_one_changed_element_of_a_recorded_contribution_is_noticed(copied):
    path = sorted((copied / "events.payloads").iterdir())[3]
    facts, arrays = json.dumps(read_recording(path).facts), dict(load_file(path))
    arrays["delta.0"] = arrays["delta.0"].copy()
    arrays["delta.0"][5] += 0.01
    save_file(arrays, path, metadata={"round": facts})
    assert "its recorded contributions give" in replayed(copied)[0].difference.what


def test_a_cosine_that_the_recorded_contributions_do_not_give_is_noticed(copied):
    tape = copied / "events.jsonl"
    lines = tape.read_text().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if '"event":"computed"' in line and '"cosines":[]' not in line)
    changed = json.loads(lines[last])
    changed["cosines"][0] = round(changed["cosines"][0] - 0.001, 6)
    lines[last] = json.dumps(changed, separators=(",", ":")) + "\n"
    tape.write_text("".join(lines))
    assert f"came with cosines {changed['cosines']}" in replayed(copied)[0].difference.what
