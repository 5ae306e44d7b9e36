"""A tape that was written agrees with its replay; one that was tampered with does not, and the place is named."""

import copy
import inspect
import re

import pytest

from aggregator.standby import replication
from aggregator.standby.replication import NOTES
from aggregator.state.records import ledger_line
from ops.inspect.replay_core import Replay
from ops.inspect.replay_result import fingerprint
from tests.aggregator_hand import Desk
from tests.taped import STEPS_PER_ROUND, Taped


@pytest.fixture(scope="module")
def two_lives():
    """A tape of two rounds, a crash, and another round."""
    first = Taped()
    first.gather("a", "b")
    first.round(1, "a", "b")
    first.round(2, "a", "b")
    second = Taped(tape=first.tape, record=first.record, commits=first.commits, now_s=50.0)
    second.beat(STEPS_PER_ROUND * 2, "a", "b")
    second.round(3, "a", "b")
    assert second.core.run.versions == (3,)
    return second.tape


def played(lines):
    """Returns the replay and the difference it met, if any."""
    replay = Replay()
    for number, line in enumerate(lines, start=1):
        difference = replay.take(number, line)
        if difference is not None:
            return replay, difference
    return replay, None


def at(tape, **wanted):
    """Index of the first line with these values."""
    return next(n for n, line in enumerate(tape) if all(line.get(k) == v for k, v in wanted.items()))


def test_a_tape_agrees_with_its_replay_across_a_restart(two_lives):
    replay, difference = played(two_lives)
    assert difference is None
    counts = replay.counts
    assert (counts.lives, counts.versions, counts.unwitnessed, counts.missing) == (2, 4, 0, 0)
    assert counts.events + counts.decisions + counts.lives == len(two_lives)


def test_what_a_crash_cut_off_is_no_difference_and_is_counted(two_lives):
    second = at(two_lives, now_s=50.0)
    lost = [*two_lives[: second - 8], None, *two_lives[second:]]
    assert not any(line.get("event") == "persisted" for line in lost[second - 8 : second - 6] if line)
    replay, difference = played(lost)
    assert difference is None
    assert replay.counts.unwitnessed == 1


def test_a_damaged_line_in_the_middle_is_named(two_lives):
    middle = at(two_lives, note="round.closed")
    _, difference = played([*two_lives[:middle], None, *two_lives[middle + 1 :]])
    assert (difference.line, difference.what) == (
        middle + 1,
        "this line cannot be read, and the life goes on behind it",
    )


def test_lines_that_a_full_disk_cost_end_that_life_and_not_the_next(two_lives):
    gap = at(two_lives, note="round.opened")
    replay, difference = played([*two_lives[:gap], {"gap": 3}, *two_lives[gap + 3 :]])
    assert difference is None
    assert replay.counts.missing == 3
    assert replay.counts.skipped > 10
    assert replay.counts.versions == 2  # version 0, and the one of the second life


@pytest.mark.parametrize(
    ("tamper", "what"),
    [
        (
            lambda tape, n: tape[n]["fields"].__setitem__("tokens", 81),
            "tokens of version.committed is 81 on the tape, and 80 was decided",
        ),
        (
            lambda tape, n: tape[n]["fields"]["contributions"][0].__setitem__("merge_weight", 0.4),
            "contributions of version.committed is",
        ),
        (lambda tape, n: tape[n].__setitem__("extra", 1), "version.committed has something beside its fields"),
        (lambda tape, n: tape[n].__setitem__("note", "version.invented"), "version.invented is on the tape"),
        (lambda tape, n: tape.pop(n), "here version.committed was decided, which is not on the tape"),
        (lambda tape, n: tape.insert(n, tape[n]), "version.committed is on the tape, and nothing was decided here"),
    ],
)
def test_a_decision_that_was_tampered_with_is_named(two_lives, tamper, what):
    tape = copy.deepcopy(two_lives)
    n = at(tape, note="version.committed")
    tamper(tape, n)
    _, difference = played(tape)
    assert what in difference.what
    assert difference.line in (n + 1, n + 2)
    assert difference.life == 1


@pytest.mark.parametrize(
    ("tamper", "what"),
    [
        (lambda line: line.update(fragment_version=2), "version 2 of fragment 0 was computed, and version 1 was order"),
        (lambda line: line.update(digest="another"), "digest of version.committed is '0.1' on the tape, and 'another'"),
        (lambda line: line.update(fragment_id=8), "version 1 of fragment 8 was computed, and nothing was ordered"),
        (lambda line: line.pop("digest"), "this line cannot be played: TypeError"),
        (lambda line: line.update(event="dreamt"), "this line cannot be played: KeyError"),
    ],
)
def test_an_event_that_was_tampered_with_is_named(two_lives, tamper, what):
    tape = copy.deepcopy(two_lives)
    tamper(tape[at(tape, event="computed", fragment_version=1)])
    _, difference = played(tape)
    assert what in difference.what


def test_a_message_that_was_left_out_is_noticed_by_what_follows(two_lives):
    tape = copy.deepcopy(two_lives)
    del tape[at(tape, kind="contribution")]
    assert played(tape)[1] is not None


def test_a_life_that_begins_before_the_end_of_the_last_one_is_named(two_lives):
    tape = copy.deepcopy(two_lives)
    first, second = at(tape, note="version.committed"), at(tape, now_s=50.0)
    start = tape[second]
    start["commits"][0]["fragment_version"] = 1
    _, difference = played(tape)
    assert difference.line == second + 1 > first
    assert difference.what == "this life begins with version 1 of fragment 0, and version 2 was durable"


def test_books_that_changed_between_two_lives_are_named(two_lives):
    tape = copy.deepcopy(two_lives)
    start = tape[at(tape, now_s=50.0)]
    start["commits"][0]["ledger"]["accounts"]["a"]["1"]["merged_tokens"] += 1
    _, difference = played(tape)
    assert difference.what == "the commit of version 2 of fragment 0 is not the one that was ordered"


def test_a_tape_without_a_beginning_is_refused(two_lives):
    assert played(two_lives[1:])[1].what == "the tape does not begin with the beginning of a life"


def test_fingerprints_are_those_of_the_ledger_lines(two_lives):
    first = Taped()
    first.gather("a", "b")
    first.round(1, "a", "b")
    replay, _ = played(first.tape)
    assert replay.fingerprints[0, 1] == {fingerprint(ledger_line(first.commits[0]))}
    assert fingerprint({**ledger_line(first.commits[0]), "epoch": 2}) not in replay.fingerprints[0, 1]


def test_a_driver_may_ask_for_deadlines_at_any_time_without_changing_a_decision():
    def silence(*asked_at_s):
        desk = Desk(dead_after_s=100)
        desk.gather("a", "b", "c")
        for island_id, step_time_s in (("a", 0.1), ("b", 0.1), ("c", 1.0)):
            desk.now_s += 0.1
            desk.beat(island_id, 1, step_time_s=step_time_s)
        for at_s in asked_at_s:  # at 2 s only c is still thought to advance, at 10 s nobody
            desk.core.next_deadline_s(at_s)
        desk.tick(10.0)
        return desk.run.median_step_s

    assert silence(2.0) == silence() == 0.1


def test_a_version_that_was_not_ordered_cannot_be_durable(two_lives):
    tape = copy.deepcopy(two_lives)
    tape[at(tape, event="persisted", fragment_version=1)]["fragment_version"] = 2
    _, difference = played(tape)
    assert "version 2 of fragment 0 is durable, and version 1 was ordered" in difference.what


def test_notes_about_standbys_and_the_lease_are_no_decisions_of_the_core(two_lives):
    tape = copy.deepcopy(two_lives)
    for name in sorted(NOTES):
        tape.insert(at(tape, note="version.committed"), {"now_s": 1.0, "note": name, "fields": {"standby": "b"}})
    replay, difference = played(tape)
    assert difference is None
    assert replay.counts.beside == len(NOTES)
    assert replay.counts.versions == 4


def test_every_note_about_standbys_is_known_to_a_replay():
    source = inspect.getsource(replication)
    assert set(re.findall(r'"((?:standby|lease)\.[a-z_]+)"', source)) == NOTES
