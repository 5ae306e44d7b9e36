"""Who is told of an open round, and when: all at once in a small fleet, one after the other in a large one."""

import pytest

from aggregator.interface.events import Send
from aggregator.rounds import notices as rules
from broker.wire.messages import FleetState, Leave
from tests.aggregator_hand import Desk, notes, of


def told(actions):
    return [each.to for each in of(actions, Send) if isinstance(each.message, FleetState)]


@pytest.fixture
def large(monkeypatch):
    """A fleet of six, of which two are told at once, and 10 in a second, one by one."""
    monkeypatch.setattr(rules, "AT_ONCE", 2)
    monkeypatch.setattr(rules, "PER_S", 10.0)
    monkeypatch.setattr(rules, "PORTION", 1)
    made = Desk(islands=6)
    made.gather(*"abcdef")
    made.take()
    return made


def untold(made):
    return list(made.core._notices._untold)


def opened(made):
    """Brings a round about by the heartbeats of four; returns who has not heard of it by then."""
    assert notes([each for name in "abcd" for each in made.beat(name, 4)], "round.opened")
    assert untold(made)
    return untold(made)


def test_a_small_fleet_is_told_at_once():
    made = Desk(islands=3)
    made.gather(*"abc")
    said = [each for name in "ab" for each in made.beat(name, 4)]
    assert notes(said, "round.opened")
    assert set(told(said)) == {"a", "b", "c"}
    assert not untold(made)


def test_a_large_fleet_is_told_one_after_the_other(large):
    waiting = opened(large)
    assert len(waiting) >= 2
    assert told(large.run_to(0.15)) == waiting[:1]
    assert told(large.run_to(1.0)) == waiting[1:]
    assert not untold(large)


def test_who_hears_of_the_round_by_a_heartbeat_of_its_own_is_not_told_again(large):
    waiting = opened(large)
    assert told(large.beat(waiting[0], 4)) == waiting[:1]
    assert told(large.run_to(1.0)) == waiting[1:]


def test_a_clock_that_goes_back_keeps_nobody_waiting(large):
    large.tick(100.0)
    for name in "abcdef":
        large.beat(name, 0)
    waiting = opened(large)
    assert told(large.tick(50.0))[: len(waiting)] == waiting[:2]


def test_who_has_left_is_not_told(large):
    waiting = opened(large)
    large.say(waiting[0], Leave(inner_step=0, tokens=0, reason="goodbye"))
    assert told(large.run_to(1.0)) == waiting[1:]


def test_each_round_tells_others_first(monkeypatch):
    monkeypatch.setattr(rules, "AT_ONCE", 2)
    made = Desk(islands=5)
    made.gather(*"abcde")
    notices = made.core._notices
    members = list(made.members.values())
    firsts = []
    for number in range(5):
        made.tick(100.0 * (number + 1))
        notices._untold.clear()
        made.core.run.outbox.clear()
        notices.announce(members, number)
        firsts.append([each.to for each in made.core.run.outbox if isinstance(each, Send)])
    made.core.run.outbox.clear()
    assert firsts == [["a", "b"], ["c", "d"], ["e", "a"], ["b", "c"], ["d", "e"]]
