"""A store that is behind its peers says so and waits; a new lineage loses what it must, and the books say what."""

import pytest

from aggregator.interface.events import NewLineage, Publish
from aggregator.rounds.recovery import LISTEN_S, Peers, lineages, renumbered
from broker.wire.messages import Attached, FleetState, Reason, Refused, Seed, Welcome
from tests.aggregator_hand import Desk, desk, notes, of, sent

ABC = frozenset("abc")

# --- who is believed ------------------------------------------------------------------------------------------------


def test_a_broker_is_believed():
    peers = Peers()
    assert peers.broker_holds(0, (3, 4), (3, 4)) == ""
    assert peers.broker_holds(1, (3, 6), (3, 4)) == "broker 1 holds version 6 of fragment 1, this store 4"
    assert peers.versions == {1: 6}


def test_one_island_of_several_cannot_stop_a_run_by_a_lie():
    peers = Peers()
    assert peers.island_holds("a", (9,), (4,), live=ABC) == ""
    assert peers.versions == {}
    assert peers.island_holds("b", (5,), (4,), live=ABC) == "island b holds version 5 of fragment 0, this store 4"
    assert peers.versions == {0: 9}


def test_it_takes_more_than_half_of_those_who_are_heard_to_refute_a_claim():
    peers = Peers()
    peers.broker_holds(0, (5,), (4,))
    peers.island_holds("a", (9,), (4,), live=frozenset("a"))
    assert not peers.outvoted(frozenset("ab"))
    assert peers.outvoted(ABC)
    peers.disbelieve()
    assert peers.versions == {0: 5}


def test_those_who_made_a_store_behind_and_died_are_witnesses_still():
    peers = Peers()
    for island_id in "ab":
        peers.island_holds(island_id, (9,), (4,), live=frozenset("ab"))
    peers.island_holds("a", (9,), (4,), live=frozenset("a"))
    assert not peers.outvoted(frozenset("acd"))
    assert peers.outvoted(frozenset("acdef"))


# --- a run whose store was restored from an old copy ----------------------------------------------------------------


@pytest.mark.parametrize("new_lineage", [False, True])
def test_an_old_store_publishes_and_answers_nothing_and_a_new_lineage_is_asked_for_above_all_that_was_seen(new_lineage):
    """What islands do meanwhile, and what the books say in the end: ``tests/sim/test_lineage.py``."""
    first = desk("a", "b")
    old = dict(first.disk.commits)
    first.open_round("a", "b", step=4)
    first.offer("a", 0, 4)
    first.offer("b", 0, 4)
    first.disk.commits = old
    made = first.restarted(new_lineage=new_lineage)
    made.take()
    (note,) = notes(made.say("broker", Attached(versions=(1,))), "store.behind")
    assert note["detail"] == "broker 0 holds version 1 of fragment 0, this store 0"
    assert made.behind
    made.beat("a", 8, versions=(1,))
    made.join("c")
    made.run_to(made.now_s + LISTEN_S)
    (trouble,) = made.troubles
    assert "restore the store from a copy" in trouble
    assert "--new-lineage" in trouble
    said = made.take()
    assert of(said, Publish) == []
    assert sent(said, FleetState) == sent(said, Welcome) == []
    assert [order.above for order in of(said, NewLineage)] == [{0: 1}] * new_lineage
    assert made.core.finished is new_lineage


def test_what_a_lineage_gave_up_is_remembered_through_restarts():
    desk = Desk(dead_after_s=100)
    desk.gather("a")
    commit = renumbered(desk.disk.commits[0], 6, 3)
    assert (commit.fragment_version, commit.epoch, commit.contributions) == (7, 3, ())
    assert commit.digest == desk.disk.commits[0].digest
    desk.disk.commits[0] = commit
    again = desk.restarted()
    assert again.versions == (7,)
    again.beat("a", 8)
    again.offer("a", 4, 8)
    assert again.core.run.books.ledger.account("a", 1, 0).forgotten_tokens == 40, "the first four steps"
    again.core.run.books.ledger.close_gap("a", 1, 0)
    assert again.tokens()["wasted"] == {"store_lost": 40}


# --- a lie ----------------------------------------------------------------------------------------------------------


def lied_to():
    """A run of three whose only live island claims what nobody ever published: the others are cut off."""
    desk = Desk()
    desk.gather("a", "b", "rogue")
    beat(desk, 6.5, 1, "rogue")
    desk.take()
    desk.beat("rogue", 2, versions=(10**9,))
    return desk


def beat(desk, seconds, step, *island_ids):
    for _ in range(round(2 * seconds)):
        desk.now_s += 0.5
        desk.tick()
        for island_id in island_ids:
            desk.beat(island_id, step)


def test_a_store_goes_on_when_those_come_back_who_know_better():
    desk = lied_to()
    assert desk.behind
    desk.now_s += 1
    for island_id in "ab":
        desk.beat(island_id, 3)
    assert not desk.behind
    (note,) = notes(desk.take(), "store.not_behind")
    assert note["after_s"] == 1.0
    assert desk.troubles == ()
    desk.beat("rogue", 2, versions=(10**9,))
    assert not desk.behind
    desk.open_round("a", "b", step=5)
    for island_id in "ab":
        desk.offer(island_id, 0, 4)
    desk.run_to(desk.now_s + 40)
    assert desk.versions == (1,)


def test_what_was_completed_while_a_store_was_taken_for_behind_is_not_lost():
    desk = Desk()
    desk.gather("a", "b", "rogue")
    desk.writes = False
    desk.open_round("a", "b", "rogue", step=4)
    for island_id in ("a", "b", "rogue"):
        desk.offer(island_id, 0, 4)
    beat(desk, 6.5, 5, "rogue")
    desk.beat("rogue", 5, versions=(10**9,))
    assert desk.behind
    assert not of(desk.write(), Publish)
    desk.writes = True
    desk.take()
    for island_id in "ab":
        desk.beat(island_id, 5)
    assert [p.fragment_version for p in of(desk.take(), Publish)] == [1]
    assert desk.versions == (1,)


def test_a_store_stays_behind_by_the_word_of_a_broker_whatever_islands_say():
    desk = lied_to()
    desk.say("broker", Attached(versions=(7,)))
    beat(desk, 3, 3, "a", "b")
    assert desk.behind


@pytest.mark.parametrize("restarts", [False, True])
def test_an_island_that_joins_before_the_run_begins_holds_nothing_of_it(restarts):
    desk = Desk()
    desk.join("rogue")
    if restarts:
        desk = desk.restarted()
    for _ in range(3):
        (refused,) = sent(desk.beat("rogue", 0, versions=(7,), overwritten_tokens=(0,)), Refused)
        assert refused.reason is Reason.IMPLAUSIBLE
    assert not desk.behind
    assert desk.quarantined == ["rogue"]
    desk.join("a")
    desk.tick()
    desk.say("a", Seed(fragment_id=0, payload="x"))
    assert desk.phase == "running"


def test_an_island_of_an_earlier_life_may_know_of_a_run_whose_store_was_emptied():
    desk = Desk()
    desk.gather("a")
    desk.disk.commits.clear()
    again = desk.restarted()
    assert again.phase == "seeding"
    again.beat("a", 50, versions=(41,))
    assert again.behind


# --- an empty store -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_lineage", [False, True])
def test_an_empty_store_never_restarts_a_run_that_a_broker_knows_nor_begins_a_new_lineage(new_lineage):
    desk = Desk(new_lineage=new_lineage)
    (note,) = notes(desk.say("broker", Attached(versions=(41, 40))), "store.behind")
    assert "this store holds no model to go on from" in note["cure"]
    assert sent(desk.join("a"), Welcome) == []
    assert desk.phase == "seeding"
    desk.run_to(10.0)
    assert of(desk.log, NewLineage) == []
    assert not desk.core.finished


def test_an_empty_store_never_restarts_a_run_that_an_island_knows():
    """The broker lost its versions too; an island is heard that holds some."""
    desk = Desk()
    said = desk.beat("a", 50, versions=(41,), overwritten_tokens=(0,))
    assert notes(said, "store.behind")[0]["detail"] == "island a holds version 41 of fragment 0, this store none"
    assert sent(desk.join("b"), Welcome) == []


def test_lineages_are_found_in_the_lines_of_a_ledger_by_what_nobody_contributed_to():
    rows = [
        {"fragment_id": 0, "fragment_version": version, "digest": digest, "contributions": contributions}
        for version, digest, *contributions in [
            (0, "0"),
            (1, "1", "a"),
            (2, "2", "a"),
            (4, "1"),
            (5, "5", "a"),
            (7, "5"),
        ]
    ]
    assert [(each.version, each.kept, list(each.given_up)) for each in lineages(rows)] == [(4, 1, [2, 3]), (7, 5, [6])]
