"""``chaos`` with real processes: faults are done, noticed, healed and reported, and the invariants hold.

One run serves all tests. It is ended by Ctrl-C as soon as it has healed, which on a busy machine takes what it takes.
"""

import json
import signal
from collections import defaultdict
from statistics import median

import pytest

from ops import cli
from tests.local_run import Process, RunFiles, descendants, is_alive, wait_for

pytestmark = [pytest.mark.timeout(150), pytest.mark.full("a whole run of its own")]

LIAR = "rogue-sign-flip-8-claims"
FAULTS = """
[chaos]
seconds = 10.0
fault_every_s = 0.0
settle_s = 600.0
[cluster]
task = "examples.numpy_task:task"
islands = 3
pace = [0.05]
sync_interval = 8

[[fault]]
at_s = 1.5
kind = "kill"
target = "any island"

[[fault]]
at_s = 2.0
kind = "wipe"

[[fault]]
at_s = 2.0
kind = "nan"
for_s = 600.0

[[fault]]
at_s = 3.0
kind = "stop"
target = "leader"
for_s = 1.0

[[fault]]
at_s = 3.5
kind = "cut-redis"
target = ["aggregator", "broker"]
for_s = 2.0

[[fault]]
at_s = 4.5
kind = "disk-full"
for_s = 1.5

[[fault]]
at_s = 5.0
kind = "partition"
target = "any island"
for_s = 2.0

[[fault]]
at_s = 6.5
kind = "clock"
jump_s = -20.0
for_s = 1.0

[[fault]]
at_s = 8.0
kind = "kill"
target = "broker"

[[fault]]
at_s = 9.0
kind = "kill"
target = "links"

[[fault]]
at_s = 9.2
kind = "sign-flip-8-claims"
for_s = 600.0

# The last one: what the second aggregator publishes shows that all are over.
[[fault]]
at_s = 9.5
kind = "kill"
target = "leader"
"""


class Run:
    """The run that all tests look at."""

    def __init__(self, folder):
        self.dir, self.files = folder / "run", RunFiles(folder / "run")
        (folder / "faults.toml").write_text(FAULTS)
        flags = [folder / "faults.toml", "--run-dir", self.dir, "--json"]
        with Process(folder / "output", "chaos", *flags) as process:
            whole = "whole run after the faults"
            wait_for(lambda: self.healed() or not process.is_running(), whole, evidence=lambda: process.err)
            assert process.is_running(), process.err
            below = descendants(process.pid)
            process.signal(signal.SIGINT)
            self.exit = process.wait(60.0)
            self.survivors = [pid for pid in below if is_alive(pid)]
            self.err = process.err
            self.report = json.loads(process.out.splitlines()[-1])
        self.faults = {" ".join([each["kind"], *each["processes"]]): each for each in self.report["chaos"]["faults"]}

    def healed(self):
        """Whether the second aggregator has published all, a new life of an island too, and both rogues lied."""
        rows = [row for row in self.files.ledger() if row["epoch"] == 2]
        lives = {each["incarnation"] for row in rows for each in row["contributions"]}
        return (
            {row["fragment_id"] for row in rows} == {0, 1, 2, 3} and 2 in lives and self.refused() and self.sent()[LIAR]
        )

    def sent(self):
        """Returns tokens and length of a step in each contribution, by sender."""
        found = defaultdict(list)
        for each in self.files.tape():
            if each.get("kind") == "contribution" and each["norm"] is not None:
                steps = each["body"]["steps"]
                num = steps["to_step"] - steps["from_step"]
                found[each["sender"]].append(((steps["to_tokens"] - steps["from_tokens"]) / num, each["norm"] / num))
        return found

    def refused(self):
        return {(each["island"], each["reason"]) for each in self.files.notes("contribution.refused")}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("chaos"))


def test_every_fault_is_done_and_heals(run):
    assert not run.report["chaos"]["skipped"]
    assert {name for name in run.faults if " island" not in name} == {
        *("wipe redis", "stop aggregator", "disk-full aggregator", "clock aggregator", "kill aggregator"),
        *("cut-redis aggregator broker", "kill broker", "kill links", "nan rogue-nan", f"sign-flip-8-claims {LIAR}"),
    }
    assert len(run.faults) == 12
    never = ("links", "nan", LIAR)
    healed = [each["healed_s"] is not None for name, each in run.faults.items() if not name.endswith(never)]
    assert all(healed), run.err
    died = {name: each for name, each in run.faults.items() if name.startswith(("kill", "wipe"))}
    assert all(each["restarted_s"] is not None for each in died.values())
    assert all(each["detected_s"] is not None for each in run.faults.values() if each["restarted_s"] is not None)
    restarts = run.report["restarts"]
    assert [restarts[name] for name in ("aggregator", "broker", "redis", "links")] == [1, 1, 1, 1]


def test_a_rogue_is_refused_and_a_cut_or_broken_link_costs_no_step(run):
    assert ("rogue-nan", "not_finite") in run.refused()
    merged = {each["island_id"] for row in run.files.ledger() for each in row["contributions"]}
    assert merged - {LIAR} == {"island-0", "island-1", "island-2"}
    log = (run.dir / "logs" / "links.log").read_text()
    assert "link.changed link=island-" in log
    assert "Traceback" not in log


def test_a_liar_sends_what_its_manner_says_and_claims_tokens_that_it_never_trained(run):
    honest, lies = run.sent()["island-0"], run.sent()[LIAR]
    assert ({tokens for tokens, _ in honest}, {tokens for tokens, _ in lies}) == ({64}, {256})
    assert median(length for _, length in lies) > 3 * median(length for _, length in honest)


def test_an_interrupted_run_ends_every_process_and_reports_what_it_saw(run):
    assert run.exit == 130, run.err
    assert not run.survivors
    assert (run.report["exit"], run.report["note"]) == (130, "interrupted by SIGINT")
    assert json.loads((run.dir / "report.json").read_text()) == run.report


def test_the_invariants_hold_and_are_checked_again_from_the_files_alone(run, capsys):
    assert run.report["holds"]
    looked_at = {each["name"]: each["looked_at"] for each in run.report["invariants"]}
    assert min(looked_at.values()) > 0, looked_at
    assert cli.main(["chaos", "--check", str(run.dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"]


def test_islands_that_were_not_struck_train_on(run):
    stepping = run.report["chaos"]["stepping"]
    # Not a measurement: two processors and a test suite. Whoever waited for all of these faults would lose a third.
    assert stepping["goodput"] > 0.75, stepping
    assert run.report["chaos"]["participation"]["versions"] >= 4
