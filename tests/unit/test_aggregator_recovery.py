"""A store that is behind its peers says so and waits; a new lineage loses what it must, and the books say what."""

import copy
from dataclasses import replace

import pytest

from aggregator.events import NewLineage, Publish
from aggregator.process.summary import totals
from aggregator.rounds.recovery import LISTEN_S, Peers, lineages, renumbered
from broker.wire.messages import Attached, FleetState, Reason, Refused, Seed, Welcome
from tests.aggregator_hand import Desk, notes, of, sent
from tests.linked_cores import LinkedCluster

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


def rewound(**settings):
    """A run of two islands whose aggregator comes back with a store that is a few versions old."""
    cluster = LinkedCluster("a", "b", total_tokens=1600, **settings)
    cluster.train(13)
    old = copy.deepcopy(cluster.desk.disk.commits)
    cluster.train(20)
    newest = copy.deepcopy(cluster.desk.disk.commits)
    cluster.desk.disk.commits = old
    return cluster, newest


def test_an_old_store_publishes_and_answers_nothing_and_islands_train_on():
    cluster, newest = rewound()
    cluster.restart_aggregator()
    cluster.run_to(cluster.now_s + 1.5)
    desk = cluster.desk
    assert desk.core.behind
    assert notes(desk.take(), "store.behind")[0]["detail"].startswith("broker 0 holds version ")
    (trouble,) = totals(desk.run, desk.now_s).troubles
    assert "restore the store from a copy" in trouble
    assert "--new-lineage" in trouble
    before = {name: island.step for name, island in cluster.islands.items()}
    cluster.train(30)
    assert {name: island.step for name, island in cluster.islands.items()} == {n: s + 30 for n, s in before.items()}
    said = desk.take()
    assert of(said, Publish) == []
    assert sent(said, FleetState) == sent(said, Welcome) == []
    assert desk.run.versions[0] < newest[0].fragment_version


def test_a_new_lineage_goes_on_above_everything_seen_and_books_what_was_lost():
    cluster, newest = rewound()
    cluster.desk.config = replace(cluster.desk.config, new_lineage=True)
    cluster.restart_aggregator()
    cluster.run_to(cluster.now_s + 1.5 + LISTEN_S)
    (order,) = of(cluster.desk.take(), NewLineage)
    seen = {p: commit.fragment_version for p, commit in newest.items()}
    assert order.above == seen
    assert cluster.desk.core.finished
    disk = cluster.desk.disk
    disk.commits = {p: renumbered(commit, order.above[p], order.epoch) for p, commit in disk.commits.items()}
    cluster.restart_aggregator()
    cluster.train(150)
    run = cluster.aggregator.run
    assert run.phase == "ended"
    assert all(version > seen[p] + 1 for p, version in enumerate(run.versions))
    books = run.ledger.books()
    assert books.balanced()
    tokens = books.tokens()
    assert tokens["in_flight"] == 0
    assert set(tokens["wasted"]) == {"store_lost"}
    assert 0 < tokens["wasted"]["store_lost"] < tokens["merged"]


def test_what_a_lineage_gave_up_is_remembered_through_restarts():
    desk = Desk(dead_after_s=100)
    desk.gather("a")
    commit = renumbered(desk.disk.commits[0], 6, 3)
    assert (commit.fragment_version, commit.epoch, commit.contributions) == (7, 3, ())
    assert commit.digest == desk.disk.commits[0].digest
    desk.disk.commits[0] = commit
    again = desk.restarted()
    assert again.run.versions == (7,)
    assert again.run.ledger.slice(0)["gaps"] == "store_lost"


# --- a lie ----------------------------------------------------------------------------------------------------------


def lied_to(**settings):
    """A run of three whose only live island claims what nobody ever published: the others are cut off."""
    desk = Desk(**settings)
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
    assert desk.core.behind
    desk.now_s += 1
    for island_id in "ab":
        desk.beat(island_id, 3)
    assert not desk.core.behind
    (note,) = notes(desk.take(), "store.not_behind")
    assert note["after_s"] == 1.0
    assert totals(desk.run, desk.now_s).troubles == ()
    desk.beat("rogue", 2, versions=(10**9,))
    assert not desk.core.behind
    desk.open_round("a", "b", step=5)
    for island_id in "ab":
        desk.offer(island_id, 0, 4)
    desk.run_to(desk.now_s + 40)
    assert desk.run.versions == (1,)


def test_what_was_completed_while_a_store_was_taken_for_behind_is_not_lost():
    desk = Desk()
    desk.gather("a", "b", "rogue")
    desk.writes = False
    desk.open_round("a", "b", "rogue", step=4)
    for island_id in ("a", "b", "rogue"):
        desk.offer(island_id, 0, 4)
    beat(desk, 6.5, 5, "rogue")
    desk.beat("rogue", 5, versions=(10**9,))
    assert desk.core.behind
    assert not of(desk.write(), Publish)
    desk.writes = True
    desk.take()
    for island_id in "ab":
        desk.beat(island_id, 5)
    assert [p.fragment_version for p in of(desk.take(), Publish)] == [1]
    assert desk.run.versions == (1,)


def test_a_store_stays_behind_by_the_word_of_a_broker_whatever_islands_say():
    desk = lied_to()
    desk.say("broker", Attached(versions=(7,)))
    beat(desk, 3, 3, "a", "b")
    assert desk.core.behind


@pytest.mark.parametrize("restarts", [False, True])
def test_an_island_that_joins_before_the_run_begins_holds_nothing_of_it(restarts):
    desk = Desk()
    desk.join("rogue")
    if restarts:
        desk = desk.restarted()
    for _ in range(3):
        (refused,) = sent(desk.beat("rogue", 0, versions=(7,), overwritten_tokens=(0,)), Refused)
        assert refused.reason is Reason.IMPLAUSIBLE
    assert not desk.core.behind
    assert [q.island_id for q in desk.run.quarantine.now(desk.now_s)] == ["rogue"]
    desk.join("a")
    desk.tick()
    desk.say("a", Seed(fragment_id=0, payload="x"))
    assert desk.run.phase == "running"


def test_an_island_of_an_earlier_life_may_know_of_a_run_whose_store_was_emptied():
    desk = Desk()
    desk.gather("a")
    desk.disk.commits.clear()
    again = desk.restarted()
    assert again.run.phase == "seeding"
    again.beat("a", 50, versions=(41,))
    assert again.core.behind


# --- an empty store -------------------------------------------------------------------------------------------------


def test_an_empty_store_never_restarts_a_run_that_a_broker_knows():
    desk = Desk()
    said = desk.say("broker", Attached(versions=(41, 40)))
    (note,) = notes(said, "store.behind")
    assert "this store holds no model to go on from" in note["cure"]
    assert sent(desk.join("a"), Welcome) == []
    assert desk.run.phase == "seeding"


def test_an_empty_store_never_restarts_a_run_that_an_island_knows():
    """The broker lost its versions too; an island is heard that holds some."""
    desk = Desk()
    said = desk.beat("a", 50, versions=(41,), overwritten_tokens=(0,))
    assert notes(said, "store.behind")[0]["detail"] == "island a holds version 41 of fragment 0, this store none"
    assert sent(desk.join("b"), Welcome) == []


def test_an_empty_store_has_nothing_to_begin_a_new_lineage_from():
    desk = Desk(new_lineage=True)
    desk.say("broker", Attached(versions=(41,)))
    desk.run_to(10.0)
    assert of(desk.log, NewLineage) == []
    assert not desk.core.finished


def line(version, digest, contributions=("a",), p=0):
    return {"fragment_id": p, "fragment_version": version, "digest": digest, "contributions": contributions}


def test_lineages_are_found_in_the_lines_of_a_ledger_by_what_nobody_contributed_to():
    rows = [line(0, "0", ()), line(1, "1"), line(2, "2"), line(4, "1", ()), line(5, "5"), line(7, "5", ())]
    assert [(each.version, each.kept, list(each.given_up)) for each in lineages(rows)] == [(4, 1, [2, 3]), (7, 5, [6])]
