"""Real rogues among real islands: what they send does not get in, they are told why, and the others train on."""

import contextlib
import json
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file

from aggregator.rules.outliers import WARM_UP_ROUNDS
from ops.faults import MISBEHAVIORS, FaultKind
from tests.local_run import NUMPY_TASK, Process, Up, end_by_signal, ops, wait_for

pytestmark = [pytest.mark.timeout(120), pytest.mark.full("a whole run of its own")]

#: What each of them is refused for, at least.
REASONS = {
    FaultKind.NAN: {"not_finite"},
    FaultKind.SCALE: {"outlier"},
    FaultKind.REPLAY: {"overlap"},
    FaultKind.GARBAGE: {"implausible", "unknown_fragment", "wrong_shape"},
}
#: What one of them hears: of what replay sends twice its own core knows nothing, of the rest it is told.
TOLD = {manner: REASONS[manner] - {"overlap", "implausible"} or {"quarantined"} for manner in MISBEHAVIORS}


class Run:
    """A run of three islands that four rogues join; it is ended when all of them are quarantined and status knows."""

    def __init__(self, run_dir):
        flags = ("--islands", 3, "--tokens", 10_000_000, "--pace", 0.04, "--sync-interval", 12, "--fragments", 4)
        self.run_dir, settings = run_dir, run_dir.with_name("settings.toml")
        settings.write_text("[aggregator]\nquarantine_s = 60\n")
        with Up(run_dir, *flags, "--config", settings, "--json") as self.up, contextlib.ExitStack() as stack:
            up = self.up
            wait_for(lambda: (run_dir / "config.toml").exists(), "configuration", evidence=lambda: up.err)
            # At the very first steps a thousand times too long may be no longer than what is usual soon.
            wait_for(lambda: len(up.ledger()) >= 4 * WARM_UP_ROUNDS, "what is usual", evidence=lambda: up.err)
            self.rogues = {manner: self.rogue(run_dir, manner) for manner in MISBEHAVIORS}
            for rogue in self.rogues.values():
                stack.enter_context(rogue)
            wait_for(lambda: len(up.notes("island.quarantined")) == 4, "four quarantines", evidence=lambda: up.err)
            up.wait_for_progress()  # without them
            # One that hears of a refusal late, or has not done yet all that it does, is waited for as well.
            wait_for(lambda: all(map(self.was_told, MISBEHAVIORS)), "word of refusals", evidence=self.said_by_rogues)
            self.status = wait_for(self.quarantines, "status of four quarantines", evidence=lambda: up.err)
            end_by_signal(up, signal.SIGTERM, up.signal)

    def refused(self, manner):
        """Why messages of a rogue were refused so far."""
        rogue = f"rogue-{manner}"
        refused = {each["reason"] for each in self.up.notes("contribution.refused") if each["island"] == rogue}
        return refused | {each["reason"] for each in self.up.notes("message.refused") if each["sender"] == rogue}

    def heard(self, manner):
        return self.rogues[manner].err + self.rogues[manner].out

    def was_told(self, manner):
        """Whether a rogue was refused for all that it does, and has heard of one refusal."""
        return REASONS[manner] <= self.refused(manner) and any(reason in self.heard(manner) for reason in TOLD[manner])

    def said_by_rogues(self):
        return "\n".join(f"{manner}: {self.refused(manner)}\n{self.heard(manner)[-1500:]}" for manner in MISBEHAVIORS)

    def quarantines(self):
        """The status of the run, once it has all quarantines."""
        status = json.loads(ops("status", self.run_dir, "--json").stdout)
        return status if len(status["totals"]["quarantined"]) == len(MISBEHAVIORS) else None

    @staticmethod
    def rogue(run_dir, manner):
        own = ("--manner", manner, "--island-id", f"rogue-{manner}", "--task", NUMPY_TASK, "--pace", 0.04)
        folder = run_dir.with_name(f"rogue-{manner}")
        return Process(folder, *own, "--config", run_dir / "config.toml", module="ops.chaos.rogue")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("rogues") / "run")


def test_the_islands_train_on_and_their_parameters_stay_finite(run, tmp_path):
    model = tmp_path / "model.safetensors"
    assert ops("export", run.run_dir, "--out", model).returncode == 0
    assert all(np.isfinite(tensor).all() for tensor in load_file(model).values())
    honest = [
        each["body"]["loss"]
        for each in run.up.tape()
        if each.get("kind") == "heartbeat" and each["sender"].startswith("island-") and each["body"]["loss"]
    ]
    assert np.mean(honest[-6:]) < np.mean(honest[:6]), honest


@pytest.mark.parametrize("manner", MISBEHAVIORS)
def test_each_rogue_is_refused_by_reason_and_hears_it(run, manner):
    assert REASONS[manner] <= run.refused(manner)
    assert any(reason in run.heard(manner) for reason in TOLD[manner]), run.heard(manner)


def test_status_shows_who_is_quarantined_until_when_and_why(run):
    kept_out = run.status["totals"]["quarantined"]
    assert set(kept_out) == {f"rogue-{manner}" for manner in MISBEHAVIORS}
    for manner in MISBEHAVIORS:
        each = kept_out[f"rogue-{manner}"]
        assert 0 < each["for_s"] <= 60
        random_values = {"outlier", "not_finite"} if manner is FaultKind.GARBAGE else set()
        assert (each["times"], each["reason"] in REASONS[manner] | random_values) == (1, True), each


def test_nothing_of_the_honest_islands_is_refused_and_nothing_spoilt_is_merged(run):
    accused = {each["island"] for each in run.up.notes("contribution.refused")}
    assert all(island.startswith("rogue-") for island in accused), accused
    for row in run.up.ledger():
        assert not {each["island_id"] for each in row["contributions"]} & {"rogue-nan", "rogue-scale"}, row
