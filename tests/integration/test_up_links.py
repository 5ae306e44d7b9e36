"""``up --link`` with real processes: training goes on over a slow link that is cut, and over the death of the proxy."""

import json
import os
import signal
import time

import pytest

from ops.links.condition import LinkCondition
from ops.links.control import LinkControl
from tests.local_run import Up, check_invariants, check_report, descendants, wait_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.full("a whole run of its own")]

REGION = """
[link."*"]
delay_ms = 40
jitter_ms = 5
up_mbit = 100
down_mbit = 200

"""
CUT_S = 3.0


class Run:
    """A run over slow links: one island is cut off for a while, the proxy is killed, and it trains to its end."""

    def __init__(self, folder):
        (folder / "region.toml").write_text(REGION)
        # Rounds of two seconds: who connects again late, on a busy machine, is not too stale by then.
        flags = ["--islands", 3, "--tokens", 75_000, "--pace", 0.04, "--sync-interval", 48, "--json"]
        flags += ["--link", folder / "region.toml"]
        with Up(folder / "run", *flags) as up:
            up.wait_for_progress()
            wait_for(lambda: len(merged_islands(up)) == 3, "something merged of every island")
            control = LinkControl(up.run_dir / "links.sock")
            self.conditions = control.conditions()
            self.cut_s = time.monotonic()  # the clock of the tape, on one machine
            control.set("island-1", self.conditions["island-1"].changed({"partition": True}), for_s=CUT_S)
            wait_for(lambda: not control.conditions()["island-1"].partitioned, "end of the partition")
            often = self.conditions["island-2"].changed({"reset_every_s": 0.05})
            assert control.set("island-2", often, for_s=1.0) == ("island-2",)
            wait_for(lambda: not control.conditions()["island-2"].reset_every_s, "end of the resets")
            # Who was reset or cut off for a while connects again first, and sends what it held back.
            self.counts = wait_for(lambda: all_busy(control.counts()), "two connections of everybody, and their bytes")
            os.kill(links(up), signal.SIGKILL)
            wait_for(lambda: "links started again (restart 1)" in up.err, "new links process")
            up.wait_for_progress()
            self.conditions_after = control.conditions()
            self.exit = up.wait()
        self.up = up
        self.report = json.loads(up.out.splitlines()[-1]) if up.out else {}
        self.tape = up.tape()


def merged_islands(up):
    return {each["island_id"] for row in up.ledger() for each in row["contributions"]}


def all_busy(counts):
    busy = all(c.connections == 2 and min(c.up_bytes, c.down_bytes) > 10_000 for c in counts.values())
    return counts if busy else None


def links(up):
    return next(pid for pid, line in descendants(up.pid).items() if " ops links " in line and "child.py" not in line)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("links"))


def test_a_run_over_slow_links_ends_with_everything_merged_though_one_is_cut_and_the_proxy_dies(run):
    assert run.exit == 0, run.up.err
    check_report(run.report)
    tokens = run.report["tokens"]
    assert tokens["trained"] >= 75_000
    assert tokens["merged"] == tokens["trained"], tokens  # a link loses bytes of nobody's work: it is repeated
    assert run.report["restarts"]["links"] == 1
    assert not any(each["restarts"] for each in run.report["islands"].values())  # nobody ended because of it
    assert run.report["loss"]["after"] < run.report["loss"]["before"]


def test_nothing_that_was_merged_is_lost_or_merged_twice(run):
    check_invariants(run.up.run_dir)


def test_an_island_that_is_cut_off_goes_on_training(run):
    # Three of some four seconds would be missing, had it waited. The others are as fast as a busy machine lets them be.
    assert steps_per_s(run, "island-1") > 0.5 * steps_per_s(run, "island-0")


def steps_per_s(run, island):
    """Returns how fast an island trained from before the cut until the heartbeats that it held up are through."""
    beats = [line for line in run.tape if line.get("kind") == "heartbeat" and line["sender"] == island]
    heard = [(line["now_s"], line["body"]["inner_step"]) for line in beats]
    (a_s, a) = max(beat for beat in heard if beat[0] < run.cut_s)
    (b_s, b) = min(beat for beat in heard if beat[0] > run.cut_s + CUT_S + 1.0)
    return (b - a) / (b_s - a_s)


def test_every_client_has_a_link_and_all_its_bytes_pass_there(run):
    planned = LinkCondition.of(delay_ms=40, jitter_ms=5, up_mbit=100, down_mbit=200)
    assert run.conditions == dict.fromkeys(["aggregator", "island-0", "island-1", "island-2"], planned)
    assert run.conditions_after == run.conditions  # those of the plan, and on the same ports
    assert run.counts.keys() == run.conditions.keys()  # each had two connections, and bytes both ways: all_busy
    log = (run.up.run_dir / "logs" / "links.log").read_text()
    assert "link.changed link=island-1" in log
    assert "link.reset link=island-2" in log
    assert "Traceback" not in log
    assert not (run.up.run_dir / "links.sock").exists()
