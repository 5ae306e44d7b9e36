"""Real rogues among real islands: what they send does not get in, they are told why, and the others train on."""

import contextlib
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from ops.chaos.manners import Manner
from tests.local_run import NUMPY_TASK, Process, Up, check_report, check_versions, ops, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

#: What each of them is refused for, at least.
REASONS = {
    Manner.NAN: {"not_finite"},
    Manner.SCALE: {"outlier"},
    Manner.REPLAY: {"overlap"},
    Manner.GARBAGE: {"implausible", "unknown_fragment"},
}
#: Where runs of the three honest islands alone, of as many tokens as they train here, end; and how those differ.
LOSS, NOISE = 1.24, 0.15


class Run:
    """A run of three islands that four rogues join, one of each manner; and what status said while they were there."""

    def __init__(self, run_dir):
        flags = ("--islands", 3, "--tokens", 60_000, "--pace", 0.04, "--sync-interval", 12, "--fragments", 4)
        with Up(run_dir, *flags, "--quarantine-s", 60, "--json") as up, contextlib.ExitStack() as stack:
            wait_for(lambda: (run_dir / "config.toml").exists(), "configuration")
            for manner in Manner:
                chosen = ("--manner", manner, "--island-id", f"rogue-{manner}", "--task", NUMPY_TASK, "--pace", 0.04)
                rogue = Process(
                    run_dir.with_name(f"rogue-{manner}"),
                    *chosen,
                    "--config",
                    run_dir / "config.toml",
                    module="ops.chaos.rogue",
                )
                stack.enter_context(rogue)
            wait_for(lambda: len({each["island"] for each in up.notes("island.quarantined")}) == 4, "quarantines")
            self.status = json.loads(ops("status", run_dir, "--json").stdout)
            self.exit = up.wait()
        self.up = up
        self.report = json.loads(up.out.splitlines()[-1])
        self.run_dir = run_dir


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("rogues") / "run")


def test_a_run_with_four_rogues_ends_well_and_as_good_as_without_them(run):
    assert run.exit == 0, run.up.err
    check_report(run.report)
    check_versions(run.up.ledger())
    assert all(np.isfinite(tensor).all() for tensor in load_file(run.run_dir / "model.safetensors").values())
    assert abs(run.report["loss"]["after"] - LOSS) < NOISE, run.report["loss"]


@pytest.mark.parametrize("manner", Manner)
def test_each_rogue_is_refused_by_reason_and_hears_it(run, manner):
    rogue = f"rogue-{manner}"
    refused = {each["reason"] for each in run.up.notes("contribution.refused") if each["island"] == rogue}
    refused |= {each["reason"] for each in run.up.notes("message.refused") if each["sender"] == rogue}
    assert REASONS[manner] <= refused
    log = run.run_dir.with_name(f"rogue-{manner}") / "err"
    heard = log.read_text() + log.with_name("out").read_text()
    # Of what replay sends twice its own core knows nothing; what became of the rest it is told.
    told = REASONS[manner] - {"overlap", "implausible"} or {"quarantined"}
    assert any(reason in heard for reason in told), heard


def test_status_shows_who_is_quarantined_until_when_and_why(run):
    kept_out = run.status["totals"]["quarantined"]
    assert set(kept_out) == {f"rogue-{manner}" for manner in Manner}
    for manner in Manner:
        each = kept_out[f"rogue-{manner}"]
        assert 0 < each["for_s"] <= 60
        assert (each["times"], each["reason"] in REASONS[manner]) == (1, True), each


def test_nothing_of_the_honest_islands_is_refused_and_nothing_spoilt_is_merged(run):
    accused = {each["island"] for each in run.up.notes("contribution.refused")}
    assert all(island.startswith("rogue-") for island in accused), accused
    for row in run.up.ledger():
        assert not {each["island_id"] for each in row["contributions"]} & {"rogue-nan", "rogue-scale"}, row
