"""A tape that was written agrees with its replay; one that was tampered with does not, and the place is named."""

import copy

import pytest

from aggregator.interface.events import Note
from aggregator.standby import replication
from aggregator.standby.replication import NOTES
from aggregator.state.records import ledger_line
from ops.inspect.replay_core import Replay
from ops.inspect.replay_result import fingerprint
from tests.taped import STEPS_PER_ROUND, Taped


@pytest.fixture(scope="module")
def two_lives():
    """A tape of two rounds, a crash, and another round."""
    first = Taped()
    first.gather("a", "b")
    first.round(1, "a", "b")
    first.round(2, "a", "b")
    second = Taped(tape=first.tape, record=first.record, commits=first.commits, now_s=50.0)
    second.report(STEPS_PER_ROUND * 2, "a", "b")
    second.round(3, "a", "b")
    assert second.versions == (3,)
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
    assert difference.line == middle + 1
    assert difference.what == "this line cannot be read, and the life goes on behind it"


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
            lambda tape, n: tape[n]["fields"].update(tokens=81),
            "tokens of version.committed is 81 on the tape, and 80 was decided",
        ),
        (
            lambda tape, n: tape[n]["fields"]["contributions"][0].update(merge_weight=0.4),
            "contributions of version.committed is",
        ),
        (lambda tape, n: tape[n].update(extra=1), "version.committed has something beside its fields"),
        (lambda tape, n: tape[n].update(note="version.invented"), "version.invented is on the tape"),
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
    ("event", "tamper", "what"),
    [
        ("computed", {"fragment_version": 2}, "version 2 of fragment 0 was computed, and version 1 was order"),
        ("computed", {"digest": "another"}, "digest of version.committed is '0.1' on the tape, and 'another'"),
        ("computed", {"fragment_id": 8}, "version 1 of fragment 8 was computed, and nothing was ordered"),
        ("computed", {"event": "dreamt"}, "this line cannot be played: KeyError"),
        ("computed", {"more": 1}, "this line cannot be played: TypeError"),
        ("persisted", {"fragment_version": 2}, "version 2 of fragment 0 is durable, and version 1 was ordered"),
    ],
)
def test_an_event_that_was_tampered_with_is_named(two_lives, event, tamper, what):
    tape = copy.deepcopy(two_lives)
    tape[at(tape, event=event, fragment_version=1)].update(tamper)
    assert what in played(tape)[1].what


def test_a_message_that_was_left_out_is_noticed_by_what_follows(two_lives):
    left_out = at(two_lives, kind="contribution")
    assert played([*two_lives[:left_out], *two_lives[left_out + 1 :]])[1] is not None


@pytest.mark.parametrize(
    ("tamper", "what"),
    [
        (
            lambda commit: commit.update(fragment_version=1),
            "this life begins with version 1 of fragment 0, and version 2 was durable",
        ),
        (
            lambda commit: commit["ledger"]["accounts"]["a"]["1"].update(merged_tokens=1),
            "the commit of version 2 of fragment 0 is not the one that was ordered",
        ),
    ],
)
def test_a_life_that_does_not_begin_where_the_last_one_ended_is_named(two_lives, tamper, what):
    tape = copy.deepcopy(two_lives)
    second = at(tape, now_s=50.0)
    tamper(tape[second]["commits"][0])
    _, difference = played(tape)
    assert (difference.line, difference.what) == (second + 1, what)


def test_a_tape_without_a_beginning_is_refused(two_lives):
    assert played(two_lives[1:])[1].what == "the tape does not begin with the beginning of a life"


def test_fingerprints_are_those_of_the_ledger_lines():
    first = Taped()
    first.gather("a", "b")
    first.round(1, "a", "b")
    line = ledger_line(first.commits[0])
    found = played(first.tape)[0].fingerprints[0, 1]
    assert found == {fingerprint(line)} != {fingerprint({**line, "epoch": 2})}


def test_notes_about_standbys_and_the_lease_are_no_decisions_of_the_core(two_lives):
    tape = copy.deepcopy(two_lives)
    for each in NOTES:
        tape.insert(at(tape, note="version.committed"), {"now_s": 1.0, "note": each.name, "fields": {"standby": "b"}})
    replay, difference = played(tape)
    assert difference is None
    assert replay.counts.beside == len(NOTES)
    assert replay.counts.versions == 4


def test_every_note_about_standbys_is_known_to_a_replay():
    classes = [each for each in vars(replication).values() if isinstance(each, type)]
    assert {each for each in classes if issubclass(each, Note)} == set(NOTES)
