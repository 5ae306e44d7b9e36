"""A fragment that is corrupt in an island's memory: nothing of it is handed over, and it is adopted anew."""

import pytest

from broker.wire import messages as m
from islands.protocol.adoption import MOST_CORRUPTIONS
from islands.protocol.events import Captured, Corrupted, Fail, Note, Prepare, Prepared
from tests.aggregator_hand import of
from tests.island_hand import Hand, sent

FLAW = "the reference of t0 changed in memory, in elements 0 to 3"


@pytest.fixture
def hand():
    return Hand()


def corrupted(said):
    return [note.fields for note in of(said, Note) if note.name == "island.corrupted"]


def capturing(hand, round_id=1):
    hand.boundary(4)
    hand.state(rounds=((round_id, 0),))
    hand.boundary(copied=(0,))


def test_what_was_computed_from_it_is_not_handed_over_and_its_tokens_are_booked_as_dropped(hand):
    capturing(hand)
    said = hand.feed(Captured(fragment_id=0, payload=(), flaw=FLAW))
    assert not sent(said, m.Contribution)
    assert sent(said, m.Nothing) == [m.Nothing(round_id=1, fragment_id=0)], "its round does not wait for it"
    assert corrupted(said) == [{"fragment": 0, "version": 0, "reason": FLAW}]
    assert [want.versions for want in sent(said, m.Want)] == [(-1,)], "a whole version, the one that it had at least"
    (beat,) = sent(said, m.Heartbeat)
    assert (beat.versions, beat.overwritten_tokens) == ((-1,), (40,))
    hand.boundary(2)
    said = hand.version(0)
    assert [each.keep for each in of(said, Prepare)] == [0.0]
    hand.boundary(installed=(0,))
    hand.now_s = 1.0
    (beat,) = sent(hand.state() + hand.boundary(), m.Heartbeat)
    assert (beat.versions, beat.overwritten_tokens) == ((0,), (60,))
    contribution = hand.hand_over(4, 2)
    assert (contribution.steps.from_step, contribution.steps.to_step) == (6, 10)


def test_a_version_at_hand_mends_it(hand):
    hand.boundary(3)
    hand.feed = lambda event: _without_prepared(hand, event)
    hand.version(1)
    said = hand.feed(Prepared(fragment_id=0, flaw=FLAW))
    assert (len(corrupted(said)), sent(said, m.Want)) == (1, [])
    assert sent(said, m.Heartbeat)[0].versions == (-1,)
    hand.boundary(1, installed=(0,))
    assert hand.core.fragments[0].version == 1
    assert hand.core.fragments[0].overwritten_tokens == 40, "with keep = 0, whatever was asked for"
    assert not hand.core.fragments[0].corrupted


def test_a_kept_version_that_is_corrupt_itself_is_asked_for_again(hand):
    hand.core.fragments[0].replace_progress()
    hand.feed = lambda event: _without_prepared(hand, event)
    hand.version(1)
    said = hand.feed(Prepared(fragment_id=0, flaw="a version that was kept changed in memory"))
    assert [want.versions for want in sent(said, m.Want)] == [(-1,)]
    hand.boundary(installed=(0,))
    assert hand.core.fragments[0].corrupted
    assert [each.keep for each in of(hand.version(1), Prepare)] == [0.0]


def test_one_incident_is_told_once_and_a_machine_that_never_gets_it_right_is_given_up(hand):
    said = hand.feed(Corrupted(fragment_id=0, flaw=FLAW))
    assert corrupted(said + hand.feed(Corrupted(fragment_id=0, flaw=FLAW))) == corrupted(said) != []
    for _ in range(MOST_CORRUPTIONS):
        assert not of(said, Fail)
        hand.version(0)
        hand.boundary(installed=(0,))
        said = hand.feed(Corrupted(fragment_id=0, flaw=FLAW))
    (fail,) = of(said, Fail)
    assert "replace the machine" in fail.cure


def test_what_was_adopted_last_is_adopted_anew_before_the_island_ends(hand):
    hand.state(phase=m.Phase.ENDED, versions=(1,))
    hand.boundary(1, stopped=True)
    hand.version(1)
    hand.boundary(installed=(0,))
    assert hand.core.finished
    hand.feed(Corrupted(fragment_id=0, flaw=FLAW))
    assert not hand.core.finished
    hand.version(1)
    hand.boundary(installed=(0,))
    assert hand.core.finished


def _without_prepared(hand, event):
    said = hand.core.handle(event, hand.now_s)
    hand.log += said
    return said
