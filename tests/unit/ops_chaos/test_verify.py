"""The check of the invariants: silent on a sound run, and loud on each thing that is doctored."""

import copy
import json

import pytest

from broker.base.errors import Unavailable
from ops.chaos import verify
from ops.chaos.verify import as_json, books_agree, render
from ops.faults.checks import MOST_QUOTED, data_checks
from tests.noted import line


def contribution(island="island-0", incarnation=1, steps=(0, 10), weight=0.5):
    a, b = steps
    return {
        "island_id": island,
        "incarnation": incarnation,
        "steps": {"from_step": a, "to_step": b, "from_tokens": 64 * a, "to_tokens": 64 * b},
        "staleness": 0.0,
        "token_weight": 1.0,
        "staleness_weight": 1.0,
        "merge_weight": weight,
        "fresh": True,
    }


def row(p, version, digest=None, epoch=1, contributions=()):
    return {
        "fragment_id": p,
        "fragment_version": version,
        "epoch": epoch,
        "round_id": version,
        "digest": digest or f"{p}.{version}",
        "contributions": list(contributions),
    }


def committed(p, version, digest=None):
    fields = {"fragment": p, "version": version, "digest": digest or f"{p}.{version}", "round": version}
    return note("version.committed", **fields, contributions=[])


def persisted(p, version):
    return {"now_s": 1.0, "event": "persisted", "fragment_id": p, "fragment_version": version}


def started(epoch, commits=()):
    of = [{"fragment_id": p, "fragment_version": version} for p, version in commits]
    return [
        {"tape": 1, "now_s": 0.0, "config": {}, "record": None, "commits": of},
        note("aggregator.started", epoch=epoch),
    ]


def heartbeat(island, *versions):
    event = {"now_s": 1.0, "event": "received", "kind": "heartbeat"}
    return event | {"sender": island, "body": {"versions": list(versions)}}


def note(name, **fields):
    return line(1.0, name, **fields)


class RunFiles:
    """The files of a sound run of two fragments, to be doctored and checked."""

    def __init__(self, directory):
        self.directory = directory
        both = [contribution(steps=(0, 10)), contribution("island-1", steps=(0, 8))]
        later = [contribution(steps=(10, 20)), contribution("island-1", 2, steps=(8, 16))]
        self.ledger = [
            row(0, 0),
            row(1, 0),
            row(0, 1, contributions=both),
            row(1, 1, contributions=copy.deepcopy(both)),
            row(0, 2, epoch=2, contributions=later),
        ]
        self.tape = [
            *started(1),
            *(persisted(p, 0) for p in (0, 1)),
            persisted(0, 1),
            committed(0, 1),
            heartbeat("island-0", 1, 0),
            note("contribution.refused", island="island-1", reason="stale"),
            note("round.closed", round=1, reason="complete"),
            persisted(1, 1),
            committed(1, 1),
            *started(2, [(0, 1), (1, 1)]),
            persisted(0, 2),
            committed(0, 2),
            heartbeat("island-1", 2, 1),
        ]
        self.report = {
            "tokens": {"trained": 2304, "merged": 2000, "wasted": {"stale": 300}, "in_flight": 4},
            "islands": {"island-0": {"tokens": 1280}, "island-1": {"tokens": 1024}},
            "refusals": {"stale": 1},
        }

    def check(self):
        """Returns the names of the checks that do not hold."""
        self.write("store/ledger.jsonl", self.ledger)
        self.write("events.jsonl", self.tape)
        (self.directory / "aggregator-report.json").write_text(json.dumps(self.report))
        return self.failing(verify.verify(self.directory))

    def write(self, name, lines):
        (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
        (self.directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    @staticmethod
    def failing(checks):
        assert len(json.dumps(as_json(checks))) > 0
        text = render(as_json(checks))
        failing = {check.name.removeprefix("store: ") for check in checks if not check.holds}
        assert ("VIOLATED" in text) is bool(failing)
        return failing


@pytest.fixture
def run(tmp_path):
    return RunFiles(tmp_path)


GROW, GAP, CONTENT = "versions grow", "no version is missing", "a version names one content"
ONCE = "each range is merged at most once"
LOST, DURABLE = "nothing that was published is lost", "nothing is published before it is durable"
EPOCHS, BALANCE = "epochs grow, and each has one publisher", "trained = merged + wasted + in flight"
WEIGHTS, REASONS = "merge weights add up to at most 1", "every refusal has a reason"
BOOKS = "the books in the commits agree with the ledger"


def merge(run, *given, **more):
    run.ledger[-1]["contributions"].append(contribution(*given, weight=0.0, **more))


#: What is doctored -> how, and the checks that notice it, those alone.
DOCTORED = {
    "nothing": (lambda run: None, set()),
    "a tail that nobody saw is written again": (lambda run: run.ledger.insert(4, row(0, 2, "unseen")), set()),
    "a tape lacks lines": (lambda run: run.tape.__setitem__(run.tape.index(persisted(0, 1)), {"gap": 1}), set()),
    "a version goes back": (lambda run: run.ledger.append(row(1, 1, epoch=2)), {GROW}),
    "a version has two contents": (lambda run: run.tape.append(committed(1, 1, "other")), {CONTENT}),
    "a ledger differs from what was published": (lambda run: run.ledger[2].update(digest="doctored"), {CONTENT}),
    "a lineage begins with other bytes": (lambda run: new_lineage(run, digest="invented"), {GAP, ONCE}),
    "a range is merged twice": (lambda run: merge(run, steps=(5, 12)), {ONCE}),
    "a range is merged twice, by another life": (lambda run: merge(run, incarnation=2, steps=(5, 12)), {ONCE}),
    "a range is empty": (lambda run: merge(run, "island-2", steps=(5, 5)), {ONCE}),
    "weights add up to too much": (lambda run: run.ledger[-1]["contributions"][0].update(merge_weight=0.6), {WEIGHTS}),
    "a weight is negative": (lambda run: run.ledger[-1]["contributions"][0].update(merge_weight=-0.1), {WEIGHTS}),
    "a published version is in no ledger": (lambda run: run.ledger.pop(), {LOST}),
    "an island has what no ledger has": (lambda run: run.tape.append(heartbeat("island-0", 3, 1)), {LOST}),
    "an island of two lies beyond all reason": (lambda run: run.tape.append(heartbeat("island-0", 2**62, 1)), set()),
    "one island of three lies": (lambda run: run.tape.extend([heartbeat("a", 2, 1), heartbeat("b", 3, 1)]), set()),
    "an epoch goes back": (lambda run: run.ledger.append(row(0, 3, epoch=1)), {EPOCHS}),
    "books do not balance": (lambda run: run.report["tokens"].update(merged=1999), {BALANCE}),
    "no island has trained it": (lambda run: run.report["islands"]["island-0"].update(tokens=1279), {BALANCE}),
    "a round closed for no reason": (lambda run: run.tape.append(note("round.closed", round=2)), {REASONS}),
}


@pytest.mark.parametrize("what", DOCTORED)
def test_what_is_doctored_is_noticed_by_the_checks_that_it_breaks(run, what):
    doctor, broken = DOCTORED[what]
    doctor(run)
    assert run.check() == broken


def test_a_line_that_a_crash_cut_short_is_no_violation(run):
    run.check()
    with (run.directory / "events.jsonl").open("a") as file:
        file.write('{"now_s": 3.0, "note": "versi')
    assert run.failing(verify.verify(run.directory)) == set()


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(Unavailable, match="holds no ledger"):
        verify.verify(tmp_path)


def test_a_version_that_is_skipped_is_noticed(run):
    run.ledger[-1]["fragment_version"] = 3
    run.tape[-3:] = [persisted(0, 3), committed(0, 3, "0.2"), heartbeat("island-1", 3, 1)]
    assert run.check() == {GAP}


def test_a_store_that_was_away_may_have_gaps_that_another_one_fills_but_no_other_content(run):
    run.write("standby-1/store/ledger.jsonl", [row(0, 0), run.ledger[-1]])
    assert run.check() == set()
    run.write("standby-1/store/ledger.jsonl", [row(1, 0), row(1, 1, "other")])
    assert CONTENT in run.check()


def new_lineage(run, *, digest="0.1"):
    """Fragment 0 goes back to version 1, which is version 4 from then on: one more than anybody has seen."""
    again = [contribution(steps=(10, 20)), contribution("island-1", 3, steps=(8, 12))]
    run.ledger += [row(0, 4, digest, epoch=3), row(0, 5, epoch=3, contributions=again)]
    run.tape += [*started(3, [(0, 4), (1, 1)]), persisted(0, 5), committed(0, 5), heartbeat("island-0", 5, 1)]


@pytest.mark.parametrize("lost", ["nothing", "the lines of what was given up"])
def test_a_new_lineage_is_no_gap_and_what_it_gave_up_is_not_lost(run, lost):
    new_lineage(run)  # and what was merged into the version that was given up may be merged again
    if lost != "nothing":
        del run.ledger[4]
    assert run.check() == set()


def test_a_run_may_go_back_to_a_snapshot_of_versions_that_it_had_given_up(run):
    new_lineage(run)
    again = [contribution(steps=(20, 30))]
    run.ledger += [row(0, 6, "0.2", epoch=4), row(0, 7, epoch=4, contributions=again)]  # 0.2 had steps 10 to 20
    run.tape += [*started(4, [(0, 6), (1, 1)]), persisted(0, 7), committed(0, 7)]
    assert run.check() == set()


def test_a_version_that_is_published_before_it_is_durable_is_noticed(run):
    first, second = run.tape.index(persisted(0, 1)), run.tape.index(committed(0, 1))
    run.tape[first], run.tape[second] = run.tape[second], run.tape[first]
    assert run.check() == {DURABLE}


def test_two_lives_with_one_epoch_are_noticed(run):
    run.tape += [*started(2, [(0, 2), (1, 1)]), persisted(1, 2), committed(1, 2)]
    run.ledger.append(row(1, 2, epoch=2))
    assert run.check() == {EPOCHS}


def test_a_life_whose_store_was_lost_may_have_any_epoch_while_it_waits(run):
    run.tape += [*started(1), note("store.behind"), *started(3, [(0, 2), (1, 1)])]
    assert run.check() == set()
    run.tape += started(1)
    assert run.check() == {EPOCHS}


@pytest.mark.parametrize("name", ["contribution.refused", "join.refused", "message.refused", "contribution.retry"])
@pytest.mark.parametrize("reason", [None, "", "because"])
def test_a_refusal_without_a_reason_that_exists_is_noticed(run, name, reason):
    run.tape.append(note(name, reason=reason))
    assert run.check() == {REASONS}


def test_books_in_a_commit_that_differ_from_the_ledger_are_noticed(run):
    accounts = {"island-0": {"1": {"merged_tokens": 640}}, "island-1": {"1": {"merged_tokens": 512}}}
    whole = {1: (1, "1.1", {"accounts": accounts})}
    assert books_agree("store", whole, run.ledger).holds
    unpublished = {1: (1, "a tail that nobody saw", {"accounts": {}})}
    assert books_agree("store", unpublished, run.ledger).holds
    accounts["island-1"]["2"] = {"merged_tokens": 1}
    assert not books_agree("store", whole, run.ledger).holds
    assert not books_agree("store", {1: "it is damaged"}, run.ledger).holds


def test_only_the_first_violations_are_quoted_and_all_are_counted(run):
    run.tape += [committed(1, 1, f"other {n}") for n in range(20)]
    run.check()
    check = next(each for each in verify.verify(run.directory) if each.name == CONTENT)
    assert (check.violations, len(check.examples)) == (20, MOST_QUOTED)


@pytest.mark.parametrize(("from_batch", "holds"), [(4, True), (3, False)])
def test_batches_of_unlike_sizes_are_merged_once_where_their_tokens_are(from_batch, holds):
    """Batches 0 to 15 of 64 tokens are as many tokens as batches 0 to 3 of 256."""
    given = [note("block.given", block=n, from_batch=a, to_batch=b, batch_tokens=t) for n, a, b, t in BLOCKS]
    first, second = contribution(), contribution("island-1")
    first["data"] = [{"share": 1, "from_batch": 0, "to_batch": 16}]
    second["data"] = [{"share": 2, "from_batch": from_batch, "to_batch": 8}]
    once, _ = data_checks({"tape": given}, [row(0, 1, contributions=[first, second])])
    assert once.holds is holds


#: Number, batches and tokens of a batch.
BLOCKS = [(1, 0, 16, 64), (2, 4, 8, 256)]
