"""Rounds from opening to closing, on one aggregator core whose islands the test plays by hand."""

from aggregator.interface.events import Flaw, Merge
from broker.wire.messages import UNASKED, Fate, FleetState, OpenRound, Outstanding, Reason
from tests.aggregator_hand import desk, notes, of, resolutions, sent


def merged(made):
    return {m.island_id: m for m in made.contributions()}


# --- opening ------------------------------------------------------------------------------------------------------


def test_a_round_opens_when_the_fleet_has_run_its_interval_and_everybody_is_asked():
    made = desk()
    assert not notes(made.beat("a", 4), "round.opened")
    said = made.beat("b", 4)  # the lower median of 4, 4 and 0
    (note,) = notes(said, "round.opened")
    assert (note["asked"], note["held"]) == (3, 0)
    asked = OpenRound(round_id=note["round"], fragment_id=0)
    assert [sent(said, FleetState, island_id)[-1].rounds for island_id in "abc"] == [(asked,)] * 3


def test_an_island_that_lacks_a_fragment_is_not_asked():
    made = desk("a", "b")
    made.join("late")
    made.beat("late", 0, versions=(-1,))
    made.open_round("a", "b", step=4)
    assert [note["asked"] for note in notes(made.log, "round.opened")] == [2]


def test_no_more_rounds_are_open_than_allowed_and_each_on_a_fragment_of_its_own():
    made = desk("a", fragments=4, sync_interval=4, rounds_in_flight=2)
    made.beat("a", 40)
    assert len(set(made.open_rounds.values())) == len(made.open_rounds) == 2


# --- closing ------------------------------------------------------------------------------------------------------


def test_a_round_closes_when_everybody_has_answered():
    made = desk()
    made.open_round("a", "b", "c", step=4)
    made.offer("a", 0, 4)
    made.nothing("b")
    assert made.versions == (0,)
    made.offer("c", 0, 4)
    assert made.versions == (1,)
    assert merged(made).keys() == {"a", "c"}


def test_a_round_closes_at_quorum_and_grace_without_the_last():
    made = desk(quorum=2)
    made.open_round("a", "b", "c", step=4)
    made.offer("a", 0, 4)
    made.offer("b", 0, 4)
    assert made.versions == (0,)
    (note,) = notes(made.run_to(5.0), "round.closed")
    assert "quorum 2 met and grace window over: 2 of 3" in note["reason"]
    assert note["missing"] == ["c"]


def test_a_round_below_its_quorum_closes_at_the_timeout_with_what_is_there():
    made = desk(quorum=3, round_timeout_s=5.0)
    made.open_round("a", "b", "c", step=4)
    made.offer("a", 0, 4)
    assert not notes(made.run_to(4.9), "round.closed")
    assert "timeout" in notes(made.run_to(5.1), "round.closed")[0]["reason"]


def test_the_time_of_a_round_counts_from_its_opening_on_without_another_event():
    made = desk("a", round_timeout_s=0.3)
    made.now_s = 0.4
    made.open_round("a", step=4)
    assert notes(made.run_to(0.75), "round.cancelled")


def test_a_round_does_not_wait_for_a_process_that_another_one_has_replaced():
    made = desk("a", "b", quorum=2)
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    assert made.versions == (0,)
    made.join("b")
    assert made.versions == (1,)


def test_two_missed_rounds_and_an_island_is_not_waited_for_until_it_contributes_again():
    made = desk("a", "b", quorum=1, dead_after_s=1000.0, share_takeover_s=0.0, round_timeout_s=30.0)
    for i in range(2):
        made.open_round("a", "b", step=4 * (i + 1))
        made.offer("a", 4 * i, 4 * (i + 1))
        made.run_to(made.now_s + 3.0)
    assert made.members["b"].missed_rounds == 2
    made.open_round("a", "b", step=12)
    made.offer("a", 8, 12)
    assert made.versions == (3,), "closed at once: nobody else is waited for"
    made.offer("b", 0, 12, base=2, round_id=1)
    assert made.members["b"].missed_rounds == 0
    made.open_round("a", "b", step=16)
    made.offer("a", 12, 16)
    assert made.versions == (3,), "b is waited for again"


def test_where_all_islands_are_unresponsive_all_are_waited_for():
    made = desk("a", quorum=1, dead_after_s=1000.0, share_takeover_s=0.0, round_timeout_s=5.0)
    for i in range(3):
        made.open_round("a", step=4 * (i + 1))
        made.run_to(made.now_s + 5.1)
    made.open_round("a", step=16)
    assert made.members["a"].missed_rounds >= 2
    made.offer("a", 0, 16)
    assert made.versions == (1,)


def test_a_round_does_not_wait_for_an_island_that_is_heard_and_makes_no_steps():
    made = desk("a", "b", quorum=2)
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    while made.versions == (0,) and made.now_s < 30.0:
        made.run_to(made.now_s + 0.5)
        made.beat("a", 4 + round(10 * made.now_s))
        made.beat("b", 4)
    assert made.now_s == 6.5, "it counts as dead after 6 s without a word"
    made.beat("b", 4)
    made.open_round("a", step=100)
    made.offer("a", 4, 100)
    assert made.versions == (2,)
    assert notes(made.beat("b", 5), "island.advancing")
    assert made.members["b"].responds


def test_whoever_joins_while_a_round_is_open_may_answer_it():
    """The one that was asked is left behind in a notebook: no steps, and a heartbeat now and then."""
    made = desk("a", islands=1, quorum=1)
    round_id = made.open_round("a", step=4)
    made.join("b")
    assert sent(made.beat("b", 4), FleetState, "b")[-1].rounds == (OpenRound(round_id=round_id, fragment_id=0),)
    made.offer("b", 0, 4)
    made.run_to(1.0)
    assert made.versions == (1,)


# --- held contributions -------------------------------------------------------------------------------------------


def test_a_late_contribution_is_held_and_joins_the_next_round_without_counting_towards_its_quorum():
    made = desk("a", "b", quorum=2, round_timeout_s=3.0)
    first = made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.run_to(3.1)
    assert made.versions == (1,)
    assert notes(made.offer("b", 0, 4, base=0, round_id=first), "contribution.held")
    made.open_round("a", "b", step=8)
    made.offer("a", 4, 8)
    assert made.versions == (1,), "two contributors, but one answer: below the quorum of 2"
    made.offer("b", 4, 8, base=0)
    assert made.versions == (2,)
    by_start = {(m.island_id, m.steps.from_step): m for m in made.contributions()}
    assert {key: m.fresh for key, m in by_start.items()} == {("a", 4): True, ("b", 0): False, ("b", 4): True}
    assert by_start["b", 0].staleness == 1.0


def test_what_was_handed_over_unasked_is_the_answer_to_the_round_that_takes_it_in():
    made = desk("a", "b", quorum=2)
    for island_id in ("a", "b"):
        assert notes(made.offer(island_id, 0, 4, round_id=UNASKED), "contribution.held")
    made.beat("a", 4)
    made.beat("b", 4)
    assert made.versions == (1,), "nobody has anything else to say"
    assert all(merged.fresh for merged in made.contributions())
    made.open_round("a", "b", step=8)
    made.offer("a", 4, 8)
    assert made.versions == (1,)
    made.offer("b", 4, 8, round_id=UNASKED)
    assert made.versions == (2,)


def test_what_became_too_old_while_it_was_held_is_refused_when_the_round_closes():
    made = desk("a", "b", quorum=2, max_staleness=1, max_staleness_s=0.0, round_timeout_s=3.0)
    made.computes = False
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.run_to(3.1)
    made.offer("b", 0, 4, base=0, round_id=1)  # too late: held while version 1 is computed
    made.compute()
    made.computes = True
    made.core.run.model.fragments[0].version = 2  # as if another version had come between
    made.open_round("a", "b", step=8)
    made.offer("a", 4, 8)
    refused = notes(made.nothing("b"), "contribution.refused")
    assert [(n["island"], n["reason"]) for n in refused] == [("b", Reason.STALE)]
    told = made.beat("b", 8, outstanding=(Outstanding(fragment_id=0, from_step=0, to_step=4),))
    assert {r.reason for r in resolutions(told, "b")} == {Reason.STALE}
    assert made.tokens("b")["wasted"] == {"stale": 40}


def test_contributions_that_come_while_a_version_is_made_wait_for_the_next():
    made = desk("a", "b")
    made.computes = made.writes = False
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.offer("b", 0, 4)
    assert notes(made.offer("a", 4, 6), "contribution.held")
    made.compute()
    assert notes(made.offer("a", 6, 8), "contribution.held")
    made.write()
    assert made.versions == (1,)
    assert merged(made)["a"].steps.to_step == 4
    assert made.waiting_bytes == 2 * 256


def test_held_bytes_are_limited_and_freed_by_merging():
    made = desk("a", "b", held_bytes=500, islands=1)
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4, payload_bytes=300)
    (resolution,) = resolutions(made.offer("b", 0, 4, payload_bytes=300), "b")
    assert (resolution.fate, resolution.reason) == (Fate.RETRY, Reason.QUEUE_FULL)
    assert made.versions == (1,), "the round does not wait for what it has no room for"
    assert made.waiting_bytes == 0
    assert notes(made.offer("b", 0, 4, base=0, payload_bytes=300), "contribution.held")


# --- bad answers --------------------------------------------------------------------------------------------------


def test_a_round_to_which_everybody_has_nothing_is_cancelled_and_no_version_is_made():
    made = desk("a", "b")
    made.open_round("a", "b", step=4)
    assert not notes(made.nothing("a", round_id=77) + made.nothing("b", round_id=77), "round.cancelled")
    made.nothing("a")
    said = made.nothing("b")
    assert "nobody has anything" in notes(said, "round.cancelled")[0]["reason"]
    assert made.versions == (0,)
    assert not of(said, Merge)


def test_a_damaged_contribution_may_come_again_and_still_counts_as_fresh():
    made = desk("a", "b", quorum=2)
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4, flaw=Flaw(reason=Reason.CHECKSUM, detail="of w0"))
    made.offer("a", 0, 4)
    made.offer("b", 0, 4)
    assert {m.island_id: m.fresh for m in merged(made).values()} == {"a": True, "b": True}
