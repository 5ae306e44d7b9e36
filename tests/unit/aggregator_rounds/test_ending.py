"""How a run ends: the flush with everybody, and what is given up."""

import pytest

from aggregator.interface.events import Finished, Merge, Stop
from aggregator.rounds.ending import LINGER_S
from broker.wire.messages import Fate, Leave, Outstanding, Phase, Reason
from tests.aggregator_hand import Desk, notes, of, resolutions


def flushing(*island_ids, step=4, **settings):
    """A run whose islands have reached the target at ``step`` and been told so."""
    made = Desk(**{"total_tokens": 10 * step * len(island_ids), "islands": len(island_ids), **settings})
    made.gather(*island_ids)
    for island_id in island_ids:
        made.beat(island_id, step)
    assert made.phase is Phase.FLUSHING
    return made


def ended():
    """A run of island a whose four steps are merged."""
    made = flushing("a")
    made.offer("a", 0, 4)
    made.beat("a", 4, stopped=True)
    made.nothing("a")
    assert made.phase is Phase.ENDED
    return made


def test_a_flush_asks_everybody_and_ends_when_all_is_accounted_for():
    made = flushing("a", "b", quorum=1)
    made.offer("a", 0, 4)
    made.offer("b", 0, 4)
    made.beat("a", 6, stopped=True)
    made.beat("b", 6, stopped=True)
    made.offer("a", 4, 6)
    made.run_to(5.0)
    assert made.phase is Phase.FLUSHING, "a quorum does not close a flush"
    said = made.offer("b", 4, 6)
    assert made.phase is Phase.ENDED
    assert notes(said, "run.ended") == [{"trained": 120, "merged": 120, "wasted": {}, "in_flight": 0}]


def test_an_ended_run_stays_up_for_its_time_and_no_longer():
    made = flushing("a")
    made.now_s = 0.5
    made.offer("a", 0, 4)
    made.beat("a", 4, stopped=True)
    made.nothing("a")
    assert made.phase is Phase.ENDED
    assert not of(made.run_to(0.4 + LINGER_S), Finished)
    assert of(made.run_to(0.6 + LINGER_S), Finished)


def test_what_a_flush_round_did_not_bring_is_asked_for_again():
    made = flushing("a")
    made.offer("a", 0, 4)
    made.beat("a", 6, stopped=True)
    made.nothing("a")  # although it has two steps left: its copy was not at hand
    for at_s in (0.0, 1.0):
        made.now_s = at_s
        made.beat("a", 6, stopped=True, outstanding=(Outstanding(fragment_id=0, from_step=4, to_step=6),))
        assert made.phase is Phase.FLUSHING
    made.offer("a", 4, 6)
    assert made.phase is Phase.ENDED
    assert made.tokens()["merged"] == 60


def test_what_nobody_remembers_is_booked_as_unrecorded():
    made = flushing("a")
    made.offer("a", 0, 4)
    made.beat("a", 6, stopped=True)
    made.nothing("a")
    made.beat("a", 6, stopped=True)  # sent after the "nothing", with nothing outstanding
    made.run_to(2.0)
    assert made.phase is Phase.ENDED
    assert made.tokens()["wasted"] == {"unrecorded": 20}


def test_an_island_that_dies_in_the_flush_is_not_waited_for():
    made = flushing("a", "b", quorum=2)
    made.now_s = 5.0
    made.beat("a", 4, stopped=True)
    made.offer("a", 0, 4)
    made.run_to(7.0)
    made.nothing("a")
    assert made.phase is Phase.ENDED
    tokens = made.tokens()
    assert tokens == {"trained": 80, "merged": 40, "wasted": {"island_lost": 40}, "in_flight": 0}


def test_the_end_waits_for_an_island_that_has_just_found_a_fragment_corrupt():
    """It holds no version until it has adopted one anew, and trains on all the same."""
    made = flushing("a", "b", quorum=1)
    made.beat("b", 5, versions=(-1,), overwritten_tokens=(50,))
    made.offer("a", 0, 4)
    made.beat("a", 4, stopped=True)
    made.run_to(5.0)
    assert not made.open_rounds, "its last steps are not known yet"
    made.beat("b", 7, versions=(-1,), overwritten_tokens=(70,), stopped=True)
    made.nothing("a")
    assert made.phase is Phase.ENDED
    assert made.tokens("b") == {"trained": 70, "merged": 0, "wasted": {"overwritten": 70}, "in_flight": 0}


@pytest.mark.parametrize(("heard", "waits_s"), [(False, 6.0), (True, 10.0)], ids=["dead", "lying"])
def test_such_an_island_holds_up_the_end_until_it_is_dead_or_for_a_round_timeout(heard, waits_s):
    made = flushing("a", "b", quorum=1, round_timeout_s=10.0)
    made.beat("b", 5, versions=(-1,), overwritten_tokens=(50,))
    flushes = []
    while not flushes:
        made.run_to(made.now_s + 1.0)
        made.beat("a", 4, stopped=True)
        if heard:
            made.beat("b", 5, versions=(-1,), overwritten_tokens=(50,))
        flushes = [note for note in notes(made.log, "round.opened") if note["flush"]]
    assert waits_s <= made.now_s <= waits_s + 1.0


def test_an_island_that_joins_an_ended_run_leaves_nothing_in_flight():
    made = ended()
    made.join("b")
    made.beat("b", 1)  # one step, before it heard that the run is over
    assert made.tokens()["in_flight"] == 0
    assert made.tokens()["wasted"] == {"island_lost": 10}


def test_an_ended_run_stays_until_every_island_has_left():
    made = ended()
    assert not made.core.finished
    said = made.say("a", Leave(inner_step=4, tokens=40, reason="done"))
    assert of(said, Finished)
    assert notes(said, "aggregator.finished")[0]["reason"] == "every island has left"


def test_a_stop_ends_everything_at_once_and_only_once():
    made = Desk()
    made.gather("a")
    assert notes(made.feed(Stop()), "aggregator.finished")[0]["reason"] == "stopped by the operator"
    assert made.core.finished
    assert not of(made.feed(Stop()), Finished)
    assert made.core.next_deadline_s() is None


def test_every_fragment_is_flushed_a_few_at_a_time():
    made = Desk(total_tokens=40, fragments=4, sync_interval=8, rounds_in_flight=2)
    made.gather("a")
    made.beat("a", 1)
    made.beat("a", 4)
    made.beat("a", 4, stopped=True)
    merges = []
    for _ in range(8):
        assert len(made.open_rounds) <= 2
        for p in made.open_rounds.values():
            merges += of(made.offer("a", 0, 4, fragment=p), Merge)
    assert made.phase is Phase.ENDED
    assert sorted(m.fragment_id for m in merges) == [0, 1, 2, 3]


def test_a_fleet_that_falls_silent_in_the_flush_all_at_once_is_waited_for():
    """So it looks to the aggregator when the broker they all speak through is cut off from it."""
    made = flushing("a", "b", quorum=2)
    for island_id in "ab":
        made.beat(island_id, 4, stopped=True)
    made.run_to(8.0)  # longer than dead_after_s
    assert made.phase is Phase.FLUSHING
    for island_id in "ab":
        made.beat(island_id, 4, stopped=True)
    for island_id in "ab":
        made.offer(island_id, 0, 4)
    made.run_to(9.0)
    for island_id in "ab":
        made.nothing(island_id)
    assert made.phase is Phase.ENDED
    assert made.tokens()["merged"] == 80


def test_who_asks_after_the_end_is_told_that_the_run_is_over():
    made = ended()
    said = made.beat("a", 4, stopped=True, outstanding=(Outstanding(fragment_id=0, from_step=8, to_step=9),))
    assert [(r.fate, r.reason) for r in resolutions(said, "a")] == [(Fate.REFUSED, Reason.RUN_ENDED)]
