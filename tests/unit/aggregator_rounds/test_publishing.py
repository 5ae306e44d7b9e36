"""Merged versions on their way out of one aggregator core: its disk, and brokers that lack, refuse or miss them."""

import pytest

from aggregator.interface import events as agg
from aggregator.interface.events import Persist, Publish, refusal_of_ours
from aggregator.rounds.brokers import BrokerVersions
from aggregator.rounds.publishing import DELIVERED_S
from broker.wire import messages as m
from broker.wire.messages import FleetState, WantWhole
from tests.aggregator_hand import desk, notes, of, resolutions, sent

# --- durability before publication --------------------------------------------------------------------------------


def merged_and_not_written(**settings):
    """Returns a core whose first version the disk is yet to write, and what it said to the contribution."""
    made = desk("a", **settings)
    made.writes = False
    made.open_round("a", step=4)
    return made, made.offer("a", 0, 4)


def test_nothing_is_published_before_it_is_durable():
    made, said = merged_and_not_written()
    assert [type(a) for a in said if type(a) in (agg.Merge, Persist, Publish)] == [agg.Merge, Persist]
    assert sent(made.beat("a", 5), FleetState, "a")[-1].versions == (0,)
    assert not of(made.feed(agg.Persisted(fragment_id=0, fragment_version=0)), Publish)  # another is durable
    assert made.versions == (0,)
    (publish,) = of(made.write(), Publish)
    assert (publish.fragment_version, publish.digest) == (1, "0.1")
    assert made.versions == (1,)


def test_a_contribution_in_a_version_that_is_not_durable_is_still_waiting():
    made, _ = merged_and_not_written()
    asked = (m.Outstanding(fragment_id=0, from_step=0, to_step=4),)
    assert [r.fate for r in resolutions(made.beat("a", 5, outstanding=asked), "a")] == [m.Fate.WAITING]
    assert [r.fate for r in resolutions(made.offer("a", 0, 4, base=0), "a")] == [m.Fate.WAITING]
    made.write()
    assert [r.fate for r in resolutions(made.beat("a", 5, outstanding=asked), "a")] == [m.Fate.MERGED]


def test_a_commit_that_failed_is_asked_for_again_and_published_once_it_is_durable():
    made, _ = merged_and_not_written(dead_after_s=100.0)
    commit = made.writing[0].commit
    (note,) = notes(made.write(fails="the disk is full; free space, and it goes on"), "version.not_durable")
    assert note["detail"] == "the disk is full; free space, and it goes on"
    assert not of(made.run_to(0.9), Persist)
    made.tick(0.95)
    assert made.troubles == (
        "for 1 s: nothing is published, islands train on: the disk is full; free space, and it goes on",
    )
    (again,) = of(made.run_to(3.0), Persist)
    assert again.commit is commit
    said = made.write()
    assert notes(said, "store.back") == [{"after_s": 3.0}]
    assert of(said, Publish)
    assert made.troubles == ()
    assert made.versions == (1,)


# --- the broker's copy --------------------------------------------------------------------------------------------


def attached(made, *versions, broker=0):
    return of(made.say(m.AGGREGATOR, m.Attached(versions=versions), broker=broker), Publish)


def test_a_broker_is_sent_again_what_it_lacks_and_others_are_not():
    made = desk("a", fragments=2)
    made.now_s = 5.0
    assert attached(made, 0, 0) == []
    assert [(p.fragment_id, p.by) for p in attached(made, -1, 0, broker=1)] == [(0, 1)]
    made.now_s = 5.5
    assert attached(made, -1, 0, broker=1) == []  # it is on its way
    assert [(p.fragment_id, p.by) for p in attached(made, -1, -1, broker=2)] == [(0, 2), (1, 2)]


def test_a_merged_version_goes_out_as_a_difference_and_again_as_a_whole_and_at_once_whole_in_float32():
    made = desk("a", codec=m.Codec.INT8)
    made.open_round("a", step=4)
    assert [(p.fragment_version, p.base, p.by) for p in of(made.offer("a", 0, 4), Publish)] == [(1, 0, None)]
    made.now_s = 5.0
    assert [(p.fragment_version, p.base) for p in attached(made, 0)] == [(1, None)]
    asked = made.say(m.BROKER, WantWhole(fragment_id=0), broker=1)
    assert [(p.fragment_version, p.base, p.by) for p in of(asked, Publish)] == [(1, None, 1)]
    assert of(made.say(m.BROKER, WantWhole(fragment_id=7)), Publish) == []
    whole = desk("a", codec=m.Codec.INT8, version_codec=m.Codec.F32)
    whole.open_round("a", step=4)
    assert [p.base for p in of(whole.offer("a", 0, 4), Publish)] == [None]


@pytest.mark.parametrize("versions", [1, 2])
def test_no_round_opens_on_a_version_that_is_still_on_its_way_to_every_broker(versions):
    """With two, a newer one is made before the first should have arrived: it does not begin to count anew."""
    made = desk("a")
    attached(made, 0)
    for version in range(1, versions + 1):
        made.now_s = float(version)
        made.beat("a", 4 * version, step_time_s=9.0)
        made.offer("a", 4 * version - 4, 4 * version)
    assert made.versions == (versions,)
    for made.now_s in (2.1, 1.1 + DELIVERED_S):
        attached(made, 0)
    assert not notes(made.beat("a", 4 * versions + 8, step_time_s=9.0), "round.opened")
    assert not notes(made.run_to(made.now_s + 1.0), "round.opened")
    said = made.say(m.AGGREGATOR, m.Attached(versions=(versions,)), broker=1)  # one is enough: its islands have it
    assert [each["fragment"] for each in notes(said, "round.opened")] == [0]


# --- brokers that were away, or refuse ----------------------------------------------------------------------------


@pytest.mark.parametrize("takeover", [False, True])
def test_after_an_outage_of_the_broker_or_a_takeover_a_round_waits_for_those_who_are_not_back_yet(takeover):
    made = desk("a", "b", "c", quorum=1, grace_factor=0.0)
    made.open_round("a", "b", "c", step=4)
    made.now_s += 4.0
    if takeover:
        made = made.restarted()
        made.beat("a", 4)
    else:
        attached(made, -1)
    back_s = made.now_s
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.offer("b", 0, 4)
    late_s = 1.0 if takeover else 1.5
    made.run_to(back_s + late_s - 0.1)
    assert made.versions == (0,), "the third may be on its way: it has two or three heartbeats to come back in"
    made.run_to(back_s + late_s + 0.1)
    assert made.versions == (1,)
    made.open_round("a", "b", step=8)
    made.offer("a", 4, 8)
    made.run_to(made.now_s + 0.1)
    assert made.versions == (2,), "and later ones have the usual time"


def test_an_outage_of_the_only_broker_brings_nobody_back_who_was_silent_before_it():
    made = desk("a", "b")
    made.open_round("a", "b", step=4)
    silent_since_s = made.members["b"].last_seen_s
    made.now_s += 2.0
    made.beat("a", 5)
    attached(made, 0)
    made.now_s += 4.0
    attached(made, -1)
    assert made.members["a"].last_seen_s == made.now_s
    assert made.members["b"].last_seen_s == silent_since_s


@pytest.mark.parametrize(
    ("reason", "kind", "event"),
    [
        (m.Reason.FENCED, "version", agg.Fenced(broker=2, kind="version", detail="why")),
        (m.Reason.IMPLAUSIBLE, "attach", agg.NotLetIn(broker=2, detail="why")),
        (m.Reason.IMPLAUSIBLE, "attach_bulk", None),
        (m.Reason.REPLAYED, "attach", None),
        (m.Reason.CHECKSUM, "attach", None),
    ],
)
def test_of_what_brokers_refuse_an_epoch_that_has_ended_and_a_wrong_count_of_shards_matter(reason, kind, event):
    assert refusal_of_ours(m.Refused(kind=kind, sequence=7, reason=reason, detail="why"), 2) == event


def test_an_aggregator_that_no_broker_lets_in_says_so_until_one_does():
    made, why = desk("a"), "shards is 1, and shard 1 leads as one of 2"
    made.feed(agg.NotLetIn(broker=0, detail=why))
    made.now_s += 3.0
    attached(made, 0)  # another answer of the same broker comes first
    made.feed(agg.NotLetIn(broker=1, detail=why))
    made.tick(5.0)
    assert made.troubles == (f"for 2 s: broker 1 does not let this aggregator in: {why}",)


def test_an_outage_of_one_broker_of_two_keeps_its_islands_and_opens_no_round_anew():
    made = desk("a", "b", quorum=1, round_timeout_s=30.0)
    made.by["b"] = 1
    made.open_round("a", "b", step=4)
    (round_,) = made.core.run.schedule.open_rounds.values()
    opened_at_s, start_s = round_.opened_at_s, made.now_s
    for second in range(5):  # the first broker is silent
        made.now_s = start_s + second
        made.say(m.AGGREGATOR, m.Attached(versions=(0,)), broker=1)
    heard = {m.island_id: m.last_seen_s for m in made.members.values()}
    made.say(m.AGGREGATOR, m.Attached(versions=(-1,)), broker=0)
    assert made.members["a"].last_seen_s == made.now_s
    assert made.members["b"].last_seen_s == heard["b"] < made.now_s
    assert round_.opened_at_s == opened_at_s


def test_an_island_is_answered_over_the_broker_it_was_last_heard_by_and_over_all_while_it_is_unknown():
    made = desk("a")
    for made.by["a"] in (1, 0):
        assert {each.by for each in of(made.beat("a", 0), agg.Send)} == {made.by["a"]}
    old = m.Nothing(round_id=1, fragment_id=0)
    made.say("a", old, incarnation=0, broker=1)  # an earlier life leads nobody astray
    made.now_s += 0.5
    assert {each.by for each in of(made.beat("a", 4), agg.Send) if each.to == "a"} == {0}
    next_life = made.restarted()
    assert [each.by for each in of(next_life.log, agg.Send) if each.to == m.BROKER] == [None, None]  # a new leader
    assert next_life.core.run.fleet.routes.to("a") is None  # heard by nobody yet: addressed through all


def test_a_refusal_as_fenced_is_noted_once_for_each_broker():
    made = desk("a")
    said = [made.feed(agg.Fenced(broker=broker, kind="attach", detail="2 leads")) for broker in (0, 0, 1)]
    assert [len(notes(each, "aggregator.fenced")) for each in said] == [1, 0, 1]


def test_the_absence_of_a_broker_makes_no_later_pause_longer():
    brokers = BrokerVersions(0.0)

    def lacking(now_s, held, version, published_at_s):
        brokers.answered(0, (held,), now_s)
        return brokers.lacking(0, {0: held}, {0: (version, published_at_s)}, now_s)

    assert lacking(0.0, 0, 0, 0.0) == []
    assert lacking(20.0, 0, 1, 0.5) == [0], "it was frozen meanwhile"
    assert lacking(20.5, 1, 1, 0.5) == []
    assert [at_s for at_s in (21.25, 21.75, 22.0) if lacking(at_s, 1, 2, 21.0)] == [22.0], "a second, as ever"
