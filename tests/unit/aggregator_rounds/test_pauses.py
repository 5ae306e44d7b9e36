"""Islands that pause, and those that leave for good: what the aggregator makes of their lives."""

import pytest

from aggregator.rounds.ending import ALL_CLOSED, LINGER_S
from broker.wire import messages as m
from tests.aggregator_hand import desk, notes, resolutions, sent

OUTSTANDING = (m.Outstanding(fragment_id=0, from_step=0, to_step=3),)


def leave(made, island_id, step, departure):
    return made.say(island_id, m.Leave(inner_step=step, tokens=10 * step, reason="test", departure=departure))


def paused():
    """A run of three whose island a has paused at step 3 with nothing merged."""
    made = desk()
    made.beat("a", 3)
    leave(made, "a", 3, m.Departure.PAUSED)
    return made


def resume(made, nonce="a-2", resumes="a-1"):
    """Lets the next process of island a join, with what the one before has kept; returns its welcome."""
    (welcome,) = sent(made.join("a", nonce=nonce, resumes=resumes), m.Welcome)
    return welcome


def merged(made):
    """Whether island a is told that what it kept was merged."""
    return [r.fate for r in resolutions(made.beat("a", 3, outstanding=OUTSTANDING), "a")] == [m.Fate.MERGED]


def test_nobody_waits_for_an_island_that_has_paused_and_nothing_of_it_is_lost():
    made = paused()
    assert made.live == ["b", "c"]
    assert made.tokens() == {"trained": 30, "merged": 0, "wasted": {}, "in_flight": 30}


def test_a_process_that_goes_on_has_the_life_of_the_one_before_and_hands_over_what_that_kept():
    made = paused()
    welcome = resume(made)
    assert (welcome.incarnation, welcome.start_step) == (1, 0)
    assert notes(made.log, "island.resumed") == [{"island": "a", "incarnation": 1, "last_step": 3, "start_step": 0}]
    said = made.beat("a", 3, outstanding=OUTSTANDING)
    assert [r.fate for r in resolutions(said, "a")] == [m.Fate.UNKNOWN]
    made.offer("a", 0, 3)
    made.open_round("b", "c", step=4)
    made.offer("b", 0, 4)
    made.offer("c", 0, 4)
    assert merged(made)
    assert made.tokens("a")["merged"] == 30


def test_a_run_that_a_returning_island_brings_to_its_end_waits_for_what_that_kept():
    made = desk("a", islands=1, total_tokens=60)
    leave(made, "a", 4, m.Departure.PAUSED)
    made = made.restarted()
    resume(made)
    # It trained on while the aggregator was away, is told that the run ends, and fetches the version first.
    assert sent(made.beat("a", 8, versions=(-1,)), m.FleetState, "a")[-1].phase is m.Phase.FLUSHING
    made.run_to(made.now_s + 1.0)
    assert made.phase is m.Phase.FLUSHING
    made.beat("a", 8, stopped=True)
    made.offer("a", 0, 8)
    made.beat("a", 8, stopped=True)
    assert made.phase is m.Phase.ENDED
    assert made.tokens() == {"trained": 80, "merged": 80, "wasted": {}, "in_flight": 0}


@pytest.mark.parametrize("resumes", ["", "somebody"])
def test_a_process_that_brings_nothing_begins_a_new_life_and_the_paused_one_is_lost(resumes):
    made = paused()
    assert resume(made, resumes=resumes).incarnation == 2
    assert made.tokens()["wasted"] == {"island_lost": 30}


def test_of_two_copies_of_one_machine_the_second_does_not_speak_for_the_first():
    made = paused()
    resume(made)
    assert resume(made, nonce="a-3").incarnation == 2
    assert resume(desk()).incarnation == 2, "its process lives"


@pytest.mark.parametrize(("departure", "moves"), [(m.Departure.PAUSED, False), (m.Departure.STOPPED, True)])
def test_the_data_of_a_paused_island_wait_for_it_as_for_one_that_is_silent(departure, moves):
    made = desk("a", "b", islands=2, share_takeover_s=30.0)
    leave(made, "a", 3, departure)
    made.beat("b", 3)
    assert bool(notes(made.log, "block.ended")) is moves
    for at_s in range(1, 60):
        made.now_s = float(at_s)
        made.beat("b", 3 + at_s)
    assert notes(made.log, "block.ended")


def test_the_data_of_an_island_that_has_paused_with_everything_merged_go_to_others_at_once():
    made = desk("a", "b", islands=2)
    made.offer("a", 0, 3)
    leave(made, "a", 3, m.Departure.PAUSED)
    assert not notes(made.log, "block.ended"), (
        "what waits for a round may come to nothing yet, and is brought again then"
    )
    made.open_round("b", step=4)
    made.offer("b", 0, 4)
    made.beat("b", 5)
    assert [(each["before"], each["reason"]) for each in notes(made.log, "block.ended")] == [
        ("a", "its island has left")
    ]
    # It comes back, and has data of its own from the first step.
    welcome = resume(made)
    assert welcome.incarnation == 1
    (block,) = welcome.blocks
    first = block.from_batch
    data = (m.DataRange(share=block.number, share_epoch=0, from_batch=first, to_batch=first + 1),)
    made.beat("a", 4)
    assert notes(made.offer("a", 3, 4, data=data), "contribution.refused") == []


def test_a_run_ends_when_every_island_has_left_for_good_and_merges_what_they_handed_over():
    made = desk("a", "b", total_tokens=10_000, islands=2)
    for name in "ab":
        made.offer(name, 0, 3)
    leave(made, "a", 3, m.Departure.CLOSED)
    assert made.phase is m.Phase.RUNNING
    said = leave(made, "b", 3, m.Departure.CLOSED)
    assert notes(said, "run.flushing")[0]["reason"] == ALL_CLOSED
    assert made.phase is m.Phase.ENDED
    assert notes(said, "run.ended") == [{"trained": 60, "merged": 60, "wasted": {}, "in_flight": 0}]
    assert any(ALL_CLOSED in each for each in made.troubles)


def test_a_run_that_ended_early_goes_on_for_whoever_comes_when_it_is_started_again():
    made = desk("a", total_tokens=10_000, islands=1)
    leave(made, "a", 3, m.Departure.CLOSED)
    assert made.phase is m.Phase.ENDED
    again = made.restarted()
    again.run_to(again.now_s + 30.0)
    assert again.phase is m.Phase.RUNNING
    assert sent(again.join("a", nonce="later"), m.Welcome)


def test_a_process_that_begins_with_an_ended_run_stays_until_a_broker_can_tell_it():
    made = desk("a", total_tokens=40, islands=1)
    made.beat("a", 4)
    made.beat("a", 4, stopped=True)
    made.offer("a", 0, 4)
    leave(made, "a", 4, m.Departure.CLOSED)
    assert made.core.finished
    made = made.restarted()
    made.run_to(made.now_s + 3 * LINGER_S)
    assert not made.core.finished
    attaches = sent(made.log, m.Attach)
    assert attaches
    assert all(attach.ended for attach in attaches)
    for _ in range(round(LINGER_S) + 1):
        made.say(m.AGGREGATOR, m.Attached(versions=made.versions))
        made.run_to(made.now_s + 1.0)
    assert made.core.finished
