"""Merged versions on their way out of one aggregator core: its disk, and brokers that lack, refuse or miss them."""

import pytest

from aggregator.events import (
    Fenced,
    Merge,
    NotLetIn,
    Persist,
    Persisted,
    Publish,
    Send,
    refusal_of_ours,
)
from aggregator.process.summary import totals
from aggregator.rounds.publishing import DELIVERED_S
from broker.wire.messages import (
    AGGREGATOR,
    BROKER,
    Attached,
    Codec,
    Fate,
    FleetState,
    Nothing,
    Outstanding,
    Reason,
    Refused,
    WantWhole,
)
from tests.aggregator_hand import Desk, desk, notes, of, resolutions, sent

# --- durability before publication --------------------------------------------------------------------------------


def merged_and_not_written(**settings):
    """Returns a core whose first version the disk is yet to write, and what it said to the contribution."""
    made = desk("a", **settings)
    made.writes = False
    made.open_round("a", step=4)
    return made, made.offer("a", 0, 4)


def test_nothing_is_published_before_it_is_durable():
    made, said = merged_and_not_written()
    assert [type(a) for a in said if type(a) in (Merge, Persist, Publish)] == [Merge, Persist]
    assert made.run.versions == (0,)
    assert sent(made.beat("a", 5), FleetState, "a")[-1].versions == (0,)
    (publish,) = of(made.write(), Publish)
    assert (publish.fragment_version, publish.digest) == (1, "0.1")
    assert made.run.versions == (1,)


def test_a_contribution_in_a_version_that_is_not_durable_is_still_waiting():
    made, _ = merged_and_not_written()
    asked = (Outstanding(fragment_id=0, from_step=0, to_step=4),)
    assert [r.fate for r in resolutions(made.beat("a", 5, outstanding=asked), "a")] == [Fate.WAITING]
    assert [r.fate for r in resolutions(made.offer("a", 0, 4, base=0), "a")] == [Fate.WAITING]
    made.write()
    assert [r.fate for r in resolutions(made.beat("a", 5, outstanding=asked), "a")] == [Fate.MERGED]


def test_a_commit_that_failed_is_asked_for_again_and_published_once_it_is_durable():
    made, _ = merged_and_not_written(dead_after_s=100.0)
    commit = made.writing[0].commit
    said = made.write(fails="no space left on device")
    (note,) = notes(said, "version.not_durable")
    assert note["detail"] == "no space left on device"
    assert not of(made.run_to(0.9), Persist)
    (again,) = of(made.run_to(1.1), Persist)
    assert again.commit is commit
    assert of(made.write(), Publish)
    assert made.run.versions == (1,)


def test_while_a_commit_is_under_way_another_version_that_is_durable_publishes_nothing():
    made, _ = merged_and_not_written()
    assert not of(made.feed(Persisted(fragment_id=0, fragment_version=0)), Publish)
    assert made.run.versions == (0,)
    assert of(made.write(), Publish)


def test_a_version_names_what_is_in_it_and_the_commit_the_books_with_it():
    made = desk("a", "b")
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.nothing("b")
    commit = made.disk.commits[0]
    assert [c.island_id for c in commit.contributions] == ["a"]
    assert commit.ledger["accounts"]["a"]["1"]["merged"] == [[0, 4]]
    assert commit.round_id == 2  # the first id went to the seeding


def test_a_disk_that_cannot_be_written_is_a_trouble_until_it_can():
    desk = Desk(dead_after_s=100)
    desk.gather("a")
    desk.writes = False
    desk.open_round("a", step=4)
    desk.offer("a", 0, 4)
    desk.now_s += 1.0
    desk.write(fails="the disk is full; free space, and it goes on")
    assert totals(desk.run, desk.now_s + 2.0).troubles == (
        "for 2 s: nothing is published, islands train on: the disk is full; free space, and it goes on",
    )
    desk.run_to(desk.now_s + 3.0)
    assert notes(desk.write(), "store.back") == [{"after_s": 3.0}]
    assert totals(desk.run, desk.now_s).troubles == ()
    assert desk.run.versions == (1,)


# --- the broker's copy --------------------------------------------------------------------------------------------


def attached(made, *versions):
    return of(made.say(AGGREGATOR, Attached(versions=versions)), Publish)


def test_a_broker_that_came_back_empty_gets_everything_again():
    made = desk("a", fragments=2)
    made.now_s = 5.0
    assert [p.fragment_id for p in attached(made, -1, 0)] == [0]
    assert attached(made, 0, 0) == []


def test_only_the_broker_that_lacks_a_version_is_sent_it_again():
    made = desk("a")
    made.now_s = 5.0
    assert of(made.say(AGGREGATOR, Attached(versions=(0,)), broker=0), Publish) == []
    assert [p.by for p in of(made.say(AGGREGATOR, Attached(versions=(-1,)), broker=1), Publish)] == [1]
    made.now_s = 5.5
    assert of(made.say(AGGREGATOR, Attached(versions=(-1,)), broker=1), Publish) == []  # it is on its way
    assert [p.by for p in of(made.say(AGGREGATOR, Attached(versions=(-1,)), broker=2), Publish)] == [2]


def test_a_merged_version_goes_out_as_a_difference_and_again_as_a_whole():
    made = desk("a", codec=Codec.INT8)
    made.open_round("a", step=4)
    (publish,) = of(made.offer("a", 0, 4), Publish)
    assert (publish.fragment_version, publish.base, publish.by) == (1, 0, None)
    made.now_s = 5.0
    (again,) = attached(made, 0)
    assert (again.fragment_version, again.base) == (1, None)
    asked = made.say(BROKER, WantWhole(fragment_id=0), broker=1)
    assert [(p.fragment_version, p.base, p.by) for p in of(asked, Publish)] == [(1, None, 1)]
    assert of(made.say(BROKER, WantWhole(fragment_id=7)), Publish) == []


def test_a_merged_version_goes_out_whole_where_it_travels_in_float32():
    made = desk("a", codec=Codec.INT8, version_codec=Codec.F32)
    made.open_round("a", step=4)
    assert [p.base for p in of(made.offer("a", 0, 4), Publish)] == [None]


@pytest.mark.parametrize("versions", [1, 2])
def test_no_round_opens_on_a_version_that_is_still_on_its_way_to_every_broker(versions):
    """With two, a newer one is made before the first should have arrived: it does not begin to count anew."""
    made = desk("a")
    attached(made, 0)
    for version in range(1, versions + 1):
        made.now_s = float(version)
        made.beat("a", 4 * version, step_time_s=9.0)
        made.offer("a", 4 * version - 4, 4 * version)
    assert made.run.versions == (versions,)
    for made.now_s in (2.1, 1.1 + DELIVERED_S):
        attached(made, 0)
    assert not notes(made.beat("a", 4 * versions + 8, step_time_s=9.0), "round.opened")
    assert not notes(made.run_to(made.now_s + 1.0), "round.opened")
    said = made.say(AGGREGATOR, Attached(versions=(versions,)), broker=1)  # one is enough: its islands have it
    assert [each["fragment"] for each in notes(said, "round.opened")] == [0]
    attached(made, 0)
    assert not made.run.fragments[0].undelivered


# --- brokers that were away, or refuse ----------------------------------------------------------------------------


def test_after_an_outage_of_the_only_broker_rounds_wait_for_those_who_are_not_back_yet():
    made = desk("a", "b", "c", quorum=1, grace_factor=0.0)
    made.open_round("a", "b", "c", step=4)
    made.now_s += 4.0
    back_s = made.now_s
    attached(made, -1)
    made.offer("a", 0, 4)
    made.offer("b", 0, 4)
    made.run_to(back_s + 1.4)
    assert made.run.versions == (0,), "the third may be on its way: it has three heartbeats to come back in"
    made.run_to(back_s + 1.6)
    assert made.run.versions == (1,)
    made.open_round("a", "b", step=8)
    made.offer("a", 4, 8)
    made.run_to(made.now_s + 0.1)
    assert made.run.versions == (2,), "and later ones have the usual time"


def test_an_outage_of_the_only_broker_brings_nobody_back_who_was_silent_before_it():
    made = desk("a", "b")
    made.open_round("a", "b", step=4)
    silent_since_s = made.run.members["b"].last_seen_s
    made.now_s += 2.0
    made.beat("a", 5)
    attached(made, 0)
    made.now_s += 4.0
    attached(made, -1)
    assert made.run.members["a"].last_seen_s == made.now_s
    assert made.run.members["b"].last_seen_s == silent_since_s


def test_the_first_round_after_a_takeover_waits_for_islands_whose_broker_was_away_too():
    made = desk("a", "b", quorum=1, grace_factor=0.0)
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.offer("b", 0, 4)
    assert made.run.versions == (1,)
    again = made.restarted()
    began_s = again.now_s
    again.beat("a", 8)
    again.offer("a", 4, 8, base=1)
    again.run_to(began_s + 0.9)
    assert again.run.versions == (1,), "the other has two heartbeats to come back in"
    again.run_to(began_s + 1.1)
    assert again.run.versions == (2,)


@pytest.mark.parametrize(
    ("reason", "kind", "event"),
    [
        (Reason.FENCED, "version", Fenced(broker=2, kind="version", detail="why")),
        (Reason.IMPLAUSIBLE, "attach", NotLetIn(broker=2, detail="why")),
        (Reason.IMPLAUSIBLE, "attach_bulk", None),
        (Reason.REPLAYED, "attach", None),
        (Reason.CHECKSUM, "attach", None),
    ],
)
def test_of_what_brokers_refuse_an_epoch_that_has_ended_and_a_wrong_count_of_shards_matter(reason, kind, event):
    assert refusal_of_ours(Refused(kind=kind, sequence=7, reason=reason, detail="why"), 2) == event


def test_an_aggregator_that_no_broker_lets_in_says_so_until_one_does():
    made = desk("a")
    made.feed(NotLetIn(broker=0, detail="shards is 1, and shard 1 leads as one of 2"))
    made.now_s += 3.0
    attached(made, 0)  # another answer of the same broker comes first
    made.feed(NotLetIn(broker=1, detail="shards is 1, and shard 1 leads as one of 2"))
    troubles = made.run.troubles.sentences(made.now_s + 2.0)
    assert troubles == (
        "for 2 s: broker 1 does not let this aggregator in: shards is 1, and shard 1 leads as one of 2",
    )


def test_an_outage_of_one_broker_of_two_keeps_its_islands_and_opens_no_round_anew():
    made = desk("a", "b", quorum=1, round_timeout_s=30.0)
    made.by["b"] = 1
    made.open_round("a", "b", step=4)
    (round_,) = made.run.open_rounds.values()
    opened_at_s, start_s = round_.opened_at_s, made.now_s
    for second in range(5):  # the first broker is silent
        made.now_s = start_s + second
        made.say(AGGREGATOR, Attached(versions=(0,)), broker=1)
    heard = {m.island_id: m.last_seen_s for m in made.run.members}
    made.say(AGGREGATOR, Attached(versions=(-1,)), broker=0)
    assert made.run.members["a"].last_seen_s == made.now_s
    assert made.run.members["b"].last_seen_s == heard["b"] < made.now_s
    assert round_.opened_at_s == opened_at_s


def test_an_island_is_answered_over_the_broker_it_was_last_heard_by_and_over_all_while_it_is_unknown():
    made = desk("a")
    for broker in (1, 0):
        made.by["a"] = broker
        assert {each.by for each in of(made.beat("a", 0), Send)} == {broker}
    old = Nothing(round_id=1, fragment_id=0)
    made.say("a", old, incarnation=0, broker=1)  # an earlier life leads nobody astray
    made.now_s += 0.5
    assert {each.by for each in of(made.beat("a", 4), Send) if each.to == "a"} == {0}
    made.take()
    next_life = made.restarted()
    attached = [each.by for each in of(next_life.log, Send) if each.to == BROKER]
    assert attached == [None, None]  # every broker is told of a new leader
    assert next_life.run.routes.to("a") is None  # heard by nobody yet: addressed through all


def test_a_refusal_as_fenced_is_noted_once_for_each_broker():
    made = desk("a")
    said = [made.feed(Fenced(broker=broker, kind="attach", detail="2 leads")) for broker in (0, 0, 1)]
    assert [len(notes(each, "aggregator.fenced")) for each in said] == [1, 0, 1]


def test_a_round_that_spans_an_outage_of_the_broker_waits_for_everybody_anew():
    made = desk("a", "b", quorum=1, round_timeout_s=3.0)
    made.open_round("a", "b", step=4)
    opened_at_s = made.now_s
    attached(made, *made.run.versions)
    made.now_s = opened_at_s + 20.0  # neither island, nor any answer to Attach, was heard meanwhile
    attached(made, -1)
    made.offer("a", 0, 4)
    assert made.run.open_rounds, "the round closed with the first island that came back"
    made.offer("b", 0, 4)
    assert not made.run.open_rounds
    assert {c.island_id for c in made.run.fragments[0].contributions} == {"a", "b"}
