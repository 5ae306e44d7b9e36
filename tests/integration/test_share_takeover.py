"""An island that dies, with real processes: others train its data on, and it gets them back when it returns."""

import json
import signal
from collections import defaultdict

import pytest

from broker.wire.ranges import IntervalSet
from ops.processes.cluster import free_ports
from tests.local_run import NUMPY_TASK, Process, check_ranges, check_versions, json_lines, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ISLANDS = ("anvers", "berne", "calais")
FRAGMENTS = range(4)
#: An island that was silent for two seconds is dead, and its share goes to another at once.
LIVENESS = ("--heartbeat-interval-s", 0.2, "--suspect-after-s", 1.0, "--dead-after-s", 2.0)


class Fleet:
    """Three islands, of which one is killed, is away for a while, and comes back under its name."""

    def __init__(self, folder):
        self.folder, self.started = folder, {}
        self.port, nobody = free_ports(2), free_ports(1)
        self.variables = {"REDIS_URL": f"redis://127.0.0.1:{nobody}"}  # nobody needs one
        try:
            self.live()
        finally:
            for process in self.started.values():
                process.__exit__()
        self.report = json.loads((folder / "report.json").read_text())

    def start(self, name, *arguments):
        process = self.started[name] = Process(self.folder / name, *arguments, **self.variables)
        return process

    def start_island(self, name):
        of_run = ("--broker", f"tcp://127.0.0.1:{self.port}", "--run", "demo", "--island-id", name)
        return self.start(name, "island", *of_run, "--task", NUMPY_TASK, "--pace", 0.02)

    def ledger(self):
        return json_lines(self.folder / "store" / "ledger.jsonl")

    def moves(self, **wanted):
        """Returns how shares changed hands, of those moves that are as wanted."""
        notes = [x["fields"] for x in json_lines(self.folder / "tape.jsonl") if x.get("note") == "share.moved"]
        return [each for each in notes if wanted.items() <= each.items()]

    def wait_for_merges(self, share, by):
        """Returns when batches of a share that an island trained from now on are merged into every fragment."""
        begin = len(self.ledger())

        def reached():
            rows = [
                row["fragment_id"]
                for row in self.ledger()[begin:]
                for each in row["contributions"]
                if each["island_id"] == by and any(of["share"] == share for of in each["data"])
            ]
            return set(rows) == set(FRAGMENTS)

        wait_for(reached, f"merges of share {share} by {by}", 30.0, evidence=lambda: self.started["aggregator"].err)

    def live(self):
        for name in ISLANDS:  # first: a share that nobody comes for is another's after two seconds, too
            self.start_island(name)
        for name in ISLANDS:
            wait_for(lambda name=name: "island.kinds" in self.started[name].err, f"start of {name}")
        self.start("broker", "broker", "--port", self.port, "--run", "demo", *LIVENESS)
        self.start(
            *("aggregator", "aggregator", "--broker", f"tcp://127.0.0.1:{self.port}", "--run", "demo"),
            *("--store", self.folder / "store", "--tape", self.folder / "tape.jsonl"),
            *("--report", self.folder / "report.json", "--islands", 3, "--share-takeover-s", 2.0, *LIVENESS),
        )
        self.killed = ISLANDS[-1]
        self.share = wait_for(lambda: self.home(self.killed), "share of the island")[0]
        self.wait_for_merges(self.share, self.killed)

        before = len(self.moves(share=self.share, before=self.killed))  # none, but on a machine that stood still
        self.started[self.killed].signal(signal.SIGKILL)
        self.started[self.killed].wait()
        moved = wait_for(lambda: self.moves(share=self.share, before=self.killed)[before:], "takeover", 30.0)
        self.taken = moved[0]
        self.wait_for_merges(self.share, self.taken["owner"])

        self.start_island(self.killed)
        self.wait_for_merges(self.share, self.killed)
        for name in (*ISLANDS, "aggregator", "broker"):
            self.started[name].signal(signal.SIGTERM)
        self.exits = {name: process.wait() for name, process in self.started.items()}

    def tenures(self):
        """Returns share epoch -> whose the killed island's share was, and its first and last batch that were merged."""
        merged = defaultdict(list)
        for row in self.ledger():
            for each in row["contributions"]:
                for of in each["data"]:
                    if of["share"] == self.share:
                        merged[of["share_epoch"]].append((each["island_id"], of["from_batch"], of["to_batch"]))
        assert all(len({name for name, _, _ in of_epoch}) == 1 for of_epoch in merged.values()), merged
        return {
            epoch: (batches[0][0], min(a for _, a, _ in batches), max(b for _, _, b in batches))
            for epoch, batches in merged.items()
        }

    def home(self, name):
        """Returns the share that an island joined with, in a list; an empty one before it did."""
        joined = [
            x["fields"]["island"] for x in json_lines(self.folder / "tape.jsonl") if x.get("note") == "island.joined"
        ]
        return [list(dict.fromkeys(joined)).index(name)] if name in joined else []


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    return Fleet(tmp_path_factory.mktemp("takeover"))


def merged_batches(ledger):
    """Returns (share, fragment) -> batches merged into it; fails if one is in it twice."""
    merged = defaultdict(IntervalSet)
    for row in ledger:
        for each in row["contributions"]:
            for of in each["data"]:
                batches, key = merged[of["share"], row["fragment_id"]], (of["share"], row["fragment_id"])
                assert not batches.overlaps(of["from_batch"], of["to_batch"]), f"{key}: {of} is merged twice"
                batches.add(of["from_batch"], of["to_batch"])
    return merged


def test_the_share_of_an_island_that_is_gone_goes_to_another_and_back_when_it_returns(fleet):
    assert fleet.taken["owner"] in set(ISLANDS) - {fleet.killed}
    owners = [owner for _, (owner, *_) in sorted(fleet.tenures().items())]
    assert owners[-1] == fleet.killed
    assert fleet.taken["owner"] in owners[:-1]
    assert fleet.taken["cursor"] > 0


def test_each_owner_begins_where_the_one_before_it_was_merged_last(fleet):
    tenures = fleet.tenures()
    assert tenures[fleet.taken["share_epoch"]][1] == fleet.taken["cursor"]
    reached = 0
    for _, (_, first, end) in sorted(tenures.items()):
        assert first == reached
        reached = end


def test_no_batch_is_merged_twice_into_a_fragment_and_none_is_skipped(fleet):
    merged = merged_batches(fleet.ledger())
    assert {share for share, _ in merged} == {0, 1, 2}
    handed_over, refused = set(), set()
    for line in json_lines(fleet.folder / "tape.jsonl"):
        if line.get("kind") == "contribution":
            last = {
                (of["share"], batch) for of in line["body"]["data"] for batch in range(of["from_batch"], of["to_batch"])
            }
            handed_over |= last
        elif line.get("note") == "contribution.refused" and line["fields"]["reason"] == "share_moved":
            refused |= last
    for share in range(3):
        everywhere = {(share, batch) for p in FRAGMENTS for a, b in merged[share, p] for batch in range(a, b)}
        # What is behind the end of a fragment, that one would still have brought: islands were told to end.
        ended = {(share, batch) for batch in range(min(merged[share, p].end for p in FRAGMENTS))}
        assert ended <= handed_over
        # With what its island had under way of a share that went back, an heir loses what it had trained of its own.
        assert ended <= everywhere | refused, f"share {share}"


def test_the_books_say_what_became_of_every_token(fleet):
    check_versions(fleet.ledger())
    check_ranges(fleet.ledger())
    tokens = fleet.report["tokens"]
    assert tokens["trained"] == tokens["merged"] + sum(tokens["wasted"].values()) + tokens["in_flight"]
    assert "unrecorded" not in tokens["wasted"]
    assert tokens["merged"] > 0.5 * tokens["trained"]


def test_everybody_ended_in_order(fleet):
    assert set(fleet.exits.values()) <= {0, 128 + signal.SIGTERM}, fleet.exits
