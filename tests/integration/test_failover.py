"""``up --standbys 1`` with real processes: leaders killed and frozen, a Redis that is away."""

import os
import signal
import time

import pytest

from aggregator.store.layout import commit_path, read_name, run_path, versions
from ops.inspect.replay import replay_all
from ops.processes.cluster import free_ports
from tests.live_views import scrape
from tests.local_run import Up, check_invariants, check_report, json_lines, wait_for
from tests.recorded.recording import status_of

pytestmark = [pytest.mark.timeout(240), pytest.mark.full("a whole run of its own")]

AGGREGATORS = ("aggregator", "standby-1")


class Run:
    """A run with one drill after the other; the times at which each began and was over."""

    def __init__(self, run_dir):
        self.took_s = {}
        self.first = free_ports(5)  # of broker, leader, standby, islands
        flags = ("--standbys", 1, "--islands", 2, "--tokens", 90_000, "--pace", 0.05, "--json")
        with Up(run_dir, *flags, "--metrics", self.first) as self.up:
            self.wait_for("aggregator", "standby.in_sync")
            self.metrics = [wait_for(lambda: self.scraped("aggregator", standbys_in_sync=1), "metrics of the leader")]
            self.metrics.append(self.scraped("standby-1", leader=0))
            self.wait_for("aggregator", "version.committed")
            self.names = {each: read_name(self.up.folder(each) / "store") for each in AGGREGATORS}
            self.led_by = wait_for(self.lease_of_two, "lease with a standby in it", evidence=lambda: self.up.err)
            self.kill_the_leader()
            self.freeze_the_leader()
            self.lose_redis_and_the_leader()
            self.exit = self.up.wait()
        self.ledgers = {name: json_lines(self.up.folder(name) / "store" / "ledger.jsonl") for name in AGGREGATORS}
        self.report = self.up.report()
        print(f"\nfailover, seconds: {self.took_s}")

    def scraped(self, name, **expected):
        """Returns the metrics of one of them, once they are as expected."""
        found = scrape(self.first + 1 + AGGREGATORS.index(name))
        ready = found and all(found.all(f"atoll_aggregator_{each}") == [value] for each, value in expected.items())
        return found if ready else None

    def wait_for(self, name, note, since_s=0.0):
        """Returns the first such note of one of them."""
        evidence = lambda: "\n".join(self.log(each)[-1500:] for each in AGGREGATORS)  # noqa: E731
        return wait_for(lambda: self.up.notes(note, name, since_s), f"{note} by {name}", 30.0, evidence=evidence)[0]

    def log(self, name):
        return (self.up.run_dir / "logs" / f"{name}.log").read_text()

    def signal(self, name, number):
        """Signals one of them; returns when."""
        self.up.kill(name, number)
        return time.monotonic()

    def lease_of_two(self):
        """What status says of the lease, once it names both: it is written a moment after the notes."""
        lease = status_of(self.up.run_dir)["shards"].get("0")
        return lease if lease is not None and len(lease["in_sync"]) == 2 and lease["standbys"] else None

    def kill_the_leader(self):
        with self.up.nobody_restarts():
            began_s = self.signal("aggregator", signal.SIGKILL)
            first = self.wait_for("standby-1", "version.committed", began_s)
            self.metrics.append(wait_for(lambda: self.scraped("standby-1", leader=1), "metrics of the new leader"))
        self.took_s["from kill -9 of the leader to the first new version"] = round(first["now_s"] - began_s, 2)
        self.epoch_after_kill = self.up.notes("aggregator.started", "standby-1")[-1]["epoch"]
        self.wait_for("standby-1", "standby.in_sync", began_s)  # the killed one is back

    def freeze_the_leader(self):
        began_s = self.signal("standby-1", signal.SIGSTOP)
        first = self.wait_for("aggregator", "version.committed", began_s)
        self.took_s["from the freeze of the leader to the first new version"] = round(first["now_s"] - began_s, 2)
        time.sleep(max(0.0, began_s + 4.0 - time.monotonic()))
        woken_s = self.signal("standby-1", signal.SIGCONT)
        in_sync = self.wait_for("aggregator", "standby.in_sync", woken_s)
        self.took_s["from waking the old leader to its being in sync"] = round(in_sync["now_s"] - woken_s, 2)
        self.committed_by_the_woken = self.up.notes("version.committed", "standby-1", woken_s)

    def lose_redis_and_the_leader(self):
        os.kill(self.up.process("redis"), signal.SIGSTOP)
        began_s = self.signal("aggregator", signal.SIGKILL)
        time.sleep(2.0)
        self.led_without_redis = [
            each for name in AGGREGATORS for each in self.up.notes("aggregator.started", name, began_s)
        ]
        self.up.kill("redis")  # it comes back empty
        back_s = time.monotonic()

        def new_versions():
            return [each for name in AGGREGATORS for each in self.up.notes("version.committed", name, back_s)]

        found = wait_for(new_versions, "version after Redis came back", evidence=lambda: self.log("standby-1"))
        first_s = min(each["now_s"] for each in found)
        self.took_s["from the return of an empty Redis to the first new version"] = round(first_s - back_s, 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("failover") / "run")


def test_the_run_ends_as_if_nothing_had_happened(run):
    assert run.exit == 0, run.up.err
    check_report(run.report)


def test_status_says_who_leads_and_who_could_take_over(run):
    leader, standby = (run.names[each] for each in AGGREGATORS)
    assert (run.led_by["leader"], run.led_by["epoch"]) == (leader, 1)
    assert run.led_by["in_sync"] == sorted([leader, standby])
    assert run.led_by["standbys"] == [standby]
    assert run.led_by["age_s"] < 10.0  # it is renewed several times a second, if the machine has time for it


def test_metrics_say_who_is_in_sync_and_who_leads(run):
    before, waits, after = run.metrics
    assert before.all("atoll_aggregator_standby_in_sync") == [1]
    assert waits.one("atoll_aggregator_store_free_bytes") > 0
    assert waits.all("atoll_aggregator_trained_tokens_total") == []
    assert after.one("atoll_aggregator_epoch") > 1


def test_a_standby_takes_over_under_the_next_epoch_within_three_seconds(run):
    assert run.epoch_after_kill == 2
    assert run.took_s["from kill -9 of the leader to the first new version"] < 3.0


def test_a_leader_that_was_frozen_makes_nothing_when_it_wakes_and_stands_by(run):
    # Of a version that its standby wrote, and acknowledged, as it froze, it hears when it wakes: the standby goes on
    # from that one, under its own epoch. Anything else would be a version that only the woken one has.
    held = {(row["fragment_id"], row["fragment_version"]): row for row in run.ledgers["aggregator"]}
    for each in run.committed_by_the_woken:
        row = held[each["fragment"], each["version"]]
        assert (row["epoch"], row["digest"]) == (run.epoch_after_kill, each["digest"])
    assert "aggregator.deposed" in run.log("standby-1")


def test_nobody_leads_while_redis_is_away_and_somebody_does_once_it_is_back_empty(run):
    assert run.led_without_redis == []


def test_there_is_one_lineage_of_versions_and_no_step_is_in_it_twice(run):
    check_invariants(run.up.run_dir)


def test_in_the_end_both_stores_hold_the_same_bytes(run):
    one, other = (run.up.folder(each) / "store" for each in AGGREGATORS)
    assert run_path(one).read_bytes() == run_path(other).read_bytes()
    for p in map(int, run.report["versions"]):
        newest = versions(one, p)[0]
        assert newest == versions(other, p)[0] == run.report["versions"][str(p)]
        assert commit_path(one, p, newest).read_bytes() == commit_path(other, p, newest).read_bytes()
        for store in (one, other):
            kept = {0, newest - 2, newest - 1, newest}  # the third, if the end came before it was removed
            assert set(versions(store, p)) <= kept, "a leader and a standby remove what is older"


def test_the_tapes_of_both_agree_with_their_replay_and_together_tell_almost_everything(run):
    tapes = [run.up.folder(each) / "events.jsonl" for each in AGGREGATORS]
    found, covered = replay_all(tapes, ledgers=[run.up.folder(each) / "store" / "ledger.jsonl" for each in AGGREGATORS])
    assert [each.difference for each in found] == [None, None]
    made = {(row["fragment_id"], row["fragment_version"]) for rows in run.ledgers.values() for row in rows}
    assert covered.versions == len(made)
    assert (
        len(covered.checked) >= len(made) - 8
    )  # two leaders were killed, and may have been about to write a version each
