"""A standby: what it keeps and says, when it leads, and everything that speaks against that."""

import msgpack
import pytest

from aggregator.interface.events import Commit
from aggregator.standby.candidate import BROKER_FRESH_S, ENDED_S, MISSING_LEASES, Candidate, Place
from aggregator.standby.candidate_events import (
    Arrived,
    Heard,
    Keep,
    Kept,
    Lead,
    LeaseTaken,
    Polled,
    Quit,
    SendFollow,
    Take,
    Tick,
    Unpolled,
)
from aggregator.state.founding import Founding
from broker.wire.messages import Following, Replica, ReplicaRun, Standing, Stored
from broker.wire.records import LeaseView

LEASE_S = 1.0
HELD = {0: (5, "0.5"), 1: (4, "1.4")}


def commit_of(p, key, epoch):
    return Commit(
        fragment_id=p, fragment_version=key[0], epoch=epoch, digest=key[1], round_id=key[0], contributions=(), ledger={}
    )


def replica_of(commit, epoch):
    return Replica(
        shard=0,
        epoch=epoch,
        fragment_id=commit.fragment_id,
        fragment_version=commit.fragment_version,
        digest=commit.digest,
        round_id=commit.round_id,
        commit=b"",
        payload=(),
    )


def replica(p=0, version=6, epoch=2):
    return replica_of(commit_of(p, (version, f"{p}.{version}"), epoch), epoch)


def record(epoch=2, serial=1, foundings=(), **more):
    said = {"epoch": epoch, "foundings": [each.row() for each in foundings], **more}
    return ReplicaRun(shard=0, epoch=epoch, serial=serial, record=msgpack.packb(said))


def following(*, epoch=2, heard_ago_s=None, stored=HELD, newest=None):
    held = tuple(Stored(fragment_id=p, fragment_version=v, digest=d) for p, (v, d) in stored.items())
    return Following(epoch=epoch, leader_heard_ago_s=heard_ago_s, stored=held, newest=newest)


def lease(**changes):
    """One that this store may take: its leader is gone, and it is in sync."""
    fields = {"holder": "a", "epoch": 2, "in_sync": frozenset({"a", "b"}), "synced": 2, "age_s": 1.5}
    return LeaseView(**(fields | changes))


NO_LEASE = LeaseView()


class Standby:
    """Store ``b``, in sync with a leader of epoch 2, beside a broker that heard nothing of that leader lately."""

    def __init__(self, stored=HELD, run_epoch=2, *, yields=False, broker=True, foundings=(), damaged=frozenset()):
        self.now_s = 100.0
        self.vetted = set()  # leaders whose run record was sent
        self.core = Candidate(
            name="b",
            shard=0,
            lease_s=LEASE_S,
            yields=yields,
            stored=stored,
            record={"epoch": run_epoch, "foundings": [each.row() for each in foundings]},
            damaged=damaged,
            now_s=self.now_s,
        )
        self.actions = self.core.handle(Tick(), self.now_s)
        if broker:
            self.handle(Heard(broker=0, following=following()))

    def handle(self, event, after_s=0.0):
        self.now_s += after_s
        self.actions = self.core.handle(event, self.now_s)
        return self.actions

    def of(self, kind):
        return [each for each in self.actions if isinstance(each, kind)]

    def poll(self, view, after_s=0.0):
        """Returns whether it reaches for the lease when it sees this one."""
        self.handle(Polled(lease=view), after_s)
        return bool(self.of(Take))

    def polls_for(self, view, seconds, **broker):
        """Returns after how many seconds it reached for a lease that stays as it is; None if it did not."""
        began_s = self.now_s
        while self.now_s < began_s + seconds:
            self.handle(Heard(broker=0, following=following(**broker)))
            if self.poll(view):
                return round(self.now_s - began_s, 2)
            self.now_s += 0.25
        return None

    def keep(self, message):
        """The leader sends something, and it becomes durable."""
        if isinstance(message, Replica) and message.epoch not in self.vetted:
            self.keep(record(epoch=message.epoch))
        self.vetted.add(message.epoch)
        self.handle(Arrived(message=message))
        assert self.of(Keep) == [Keep(message=message)]
        return self.handle(Kept(message=message))

    def said(self):
        return self.of(SendFollow)[-1].follow


@pytest.fixture
def standby():
    return Standby()


def test_it_says_what_it_has_and_reads_the_lease_four_times_per_lease(standby):
    beats = []
    for _ in range(100):
        standby.handle(Tick(), after_s=0.01)
        if standby.of(SendFollow):
            beats.append(standby.now_s)
            standby.handle(Polled(lease=lease(age_s=0.1)))
    assert len(beats) == 4
    assert standby.core.next_deadline_s() == pytest.approx(beats[-1] + LEASE_S / 4)


def test_what_could_not_be_written_is_not_said(standby):
    standby.keep(record())
    standby.handle(Arrived(message=replica()))
    standby.handle(Kept(message=replica(), problem="the disk is full"))
    assert not standby.of(SendFollow)
    standby.handle(Tick(), after_s=0.25)
    assert standby.said().stored[0].fragment_version == 5


@pytest.mark.parametrize(
    ("kept", "late"),
    [
        pytest.param(record(epoch=4), replica(epoch=3), id="a commit of an earlier leader"),
        pytest.param(record(epoch=4), record(epoch=2, serial=9), id="a record of an earlier leader"),
        pytest.param(replica(version=7), replica(version=6), id="a commit before its newest"),
        pytest.param(record(serial=4), record(serial=3), id="a record before its newest"),
        pytest.param(record(), replica(epoch=3), id="a commit before the record of its leader"),
    ],
)
def test_what_a_leader_that_is_gone_says_is_not_taken_nor_what_comes_out_of_its_order(standby, kept, late):
    standby.keep(kept)
    assert standby.core.epoch == kept.epoch
    assert standby.handle(Arrived(message=late)) == []


def test_copies_do_no_harm_and_the_word_of_the_next_leader_counts_from_there(standby):
    standby.keep(replica(version=7))
    standby.keep(replica(version=7))
    standby.keep(replica(p=1, version=3))
    standby.keep(replica(version=6, epoch=3))
    assert standby.said().stored[0].fragment_version == 6


def test_it_leads_under_the_next_epoch_once_the_lease_has_run_out(standby):
    assert not standby.poll(lease(age_s=0.9))
    assert standby.poll(lease(age_s=1.0))
    assert standby.of(Take) == [Take(expected_epoch=2, epoch=3, store_epoch=2)]
    assert standby.core.place is Place.TAKING
    standby.handle(LeaseTaken(granted=True))
    assert standby.of(Lead) == [Lead(epoch=3, founding=None)]
    assert standby.core.next_deadline_s() is None


def test_its_epoch_is_above_all_that_it_has_heard_of(standby):
    standby.handle(Heard(broker=1, following=following(epoch=8)))
    assert standby.poll(lease())
    assert standby.of(Take)[0].epoch == 9


def test_it_does_not_reach_for_the_lease_while_it_is_writing_nor_write_while_it_reaches(standby):
    standby.keep(record())
    standby.handle(Arrived(message=replica()))
    assert not standby.poll(lease())
    standby.handle(Kept(message=replica()))
    assert standby.poll(lease())
    assert standby.handle(Arrived(message=replica(version=7))) == []


@pytest.mark.parametrize("answer", [LeaseTaken(granted=False), Unpolled(detail="no answer")])
def test_an_attempt_that_was_not_granted_or_not_answered_leaves_it_following(standby, answer):
    standby.poll(lease())
    standby.handle(answer)
    assert standby.core.place is Place.FOLLOWING
    standby.keep(record())
    standby.keep(replica())
    # It may have been granted: that is seen in the lease.
    assert standby.poll(lease(holder="b", epoch=3, in_sync=frozenset({"a", "b"}), age_s=LEASE_S))
    assert standby.of(Take) == [Take(expected_epoch=3, epoch=4, store_epoch=2)]


def test_its_own_lease_has_to_run_out_too_since_a_copy_of_its_store_may_lead_under_its_name(standby):
    assert not standby.poll(lease(holder="b", age_s=0.1))
    standby.handle(Heard(broker=0, following=following(heard_ago_s=0.1)))
    assert not standby.poll(lease(holder="b", age_s=LEASE_S))
    standby.handle(Heard(broker=0, following=following(heard_ago_s=LEASE_S)))
    assert standby.poll(lease(holder="b", age_s=LEASE_S))


@pytest.mark.parametrize(
    ("holds", "held", "objection"),
    [
        ({}, (6, "0.6"), "behind: a broker holds version 6 of fragment 0, this store 5"),
        ({}, (5, "other"), "behind: a broker holds version 5 of fragment 0 with other bytes than this store"),
        ({"run_epoch": 1}, (5, "0.5"), "this store has nothing of epoch 2"),
        ({"damaged": frozenset({1})}, (4, "0.4"), "fragment 1 is damaged"),
    ],
)
def test_a_store_that_lacks_something_does_not_lead_and_says_what(holds, held, objection):
    standby = Standby(**holds)
    standby.handle(Heard(broker=0, following=following(stored={0: held})))
    assert not standby.poll(lease())
    assert objection in standby.core.objection


def test_an_empty_store_never_leads_a_run_that_a_broker_knows():
    standby = Standby(stored={}, run_epoch=0)
    assert standby.polls_for(NO_LEASE, 20.0) is None
    assert standby.core.objection.startswith("behind: ")


def test_it_does_not_lead_where_no_broker_answers():
    standby = Standby(broker=False)
    assert not standby.poll(lease())
    assert not standby.poll(lease(), after_s=BROKER_FRESH_S)
    assert standby.core.objection == "no broker answers"


def test_a_broker_that_fell_silent_has_no_say(standby):
    standby.handle(Heard(broker=1, following=following(stored={0: (6, "0.6")})))
    assert not standby.poll(lease())
    standby.handle(Heard(broker=0, following=following()), after_s=BROKER_FRESH_S)
    assert standby.poll(lease())


def test_a_leader_that_a_broker_hears_is_only_cut_off_from_redis(standby):
    standby.handle(Heard(broker=1, following=following(heard_ago_s=0.5)))
    assert not standby.poll(lease(age_s=60.0))
    assert standby.core.objection == ""
    standby.handle(Heard(broker=1, following=following(heard_ago_s=LEASE_S)))
    assert standby.poll(lease(age_s=60.0))


def test_a_store_that_the_lease_does_not_name_waits_for_one_that_it_does(standby):
    assert standby.polls_for(lease(in_sync=frozenset({"a"}), age_s=60.0), 20.0) is None
    assert standby.core.objection.startswith("a led last, and this store was not in sync with it; if no store that was")


def test_without_redis_nobody_leads(standby):
    standby.handle(Unpolled(detail="refused"))
    assert standby.core.objection == "Redis does not answer: refused"


VOID = [
    pytest.param(NO_LEASE, id="no key"),
    pytest.param(lease(epoch=1, holder="c", in_sync=frozenset({"c"})), id="an old key"),
    pytest.param(lease(epoch=1, holder="b", in_sync=frozenset({"b"})), id="an old key of its own"),
]


@pytest.mark.parametrize("view", VOID)
def test_a_lease_that_redis_lost_is_first_left_to_the_leader_that_may_live_then_a_line_is_founded(standby, view):
    assert standby.polls_for(view, 20.0) == MISSING_LEASES * LEASE_S
    assert standby.of(Take) == [Take(expected_epoch=view.epoch, epoch=3, store_epoch=2)]
    standby.handle(LeaseTaken(granted=True))
    assert standby.of(Lead)[0].founding == Founding(name="3.b", after=2, base=HELD)


@pytest.mark.parametrize("view", VOID)
def test_it_is_not_taken_from_a_leader_that_a_broker_hears(standby, view):
    assert standby.polls_for(view, 20.0, heard_ago_s=0.2) is None


def test_the_wait_begins_anew_when_redis_was_away_or_the_key_was_back(standby):
    for interruption in (Unpolled(detail="away"), Polled(lease=lease(age_s=0.0))):
        assert standby.polls_for(NO_LEASE, MISSING_LEASES * LEASE_S - 0.1) is None
        standby.handle(interruption)
    assert standby.polls_for(NO_LEASE, 20.0) == MISSING_LEASES * LEASE_S


def test_a_new_run_begins_at_once_but_not_with_the_one_that_was_started_to_stand_by():
    nothing = following(epoch=0, stored={})
    first, second = (Standby(stored={}, run_epoch=0, yields=yields, broker=False) for yields in (False, True))
    for each in (first, second):
        each.handle(Heard(broker=0, following=nothing))
    assert first.poll(NO_LEASE)
    assert first.of(Take) == [Take(expected_epoch=0, epoch=1, store_epoch=0)]
    assert second.polls_for(NO_LEASE, 30.0, epoch=0, stored={}) == (MISSING_LEASES + 1) * LEASE_S + 2.0


def newest(made_under=2, version=6):
    return Standing(name="a", made_under=made_under, stored=following(stored=HELD | {0: (version, "x")}).stored)


@pytest.mark.parametrize("view", VOID)
def test_without_a_lease_the_newest_store_goes_first(standby, view):
    assert standby.polls_for(view, 20.0, newest=newest()) is None
    assert standby.core.objection == "the store of a is newer; to go on from less, stop that one"
    assert standby.polls_for(view, 20.0, newest=newest(made_under=1, version=9)) is not None


def test_what_a_lease_says_soon_after_everything_began_anew_may_be_old(standby):
    standby.handle(Heard(broker=0, following=following(newest=newest())))
    assert not standby.poll(lease())
    assert standby.core.objection.startswith("the store of a is newer")
    assert standby.polls_for(lease(), 20.0, newest=newest()) == 2 * MISSING_LEASES * LEASE_S  # it may be unable to
    other = Standby()
    other.handle(Heard(broker=0, following=following(newest=newest())))
    assert other.poll(lease(in_sync=frozenset({"b"})))  # that one may not lead


@pytest.mark.parametrize(
    ("view", "back", "leads_after_s"),
    [
        (NO_LEASE, {}, MISSING_LEASES * LEASE_S),
        (NO_LEASE, {"newest": newest()}, None),
        (lease(epoch=1), {"newest": newest()}, None),
        (lease(), {"newest": newest()}, 2 * MISSING_LEASES * LEASE_S),  # a lease that may be old
    ],
)
@pytest.mark.parametrize(("away_s", "epoch"), [(30.0, 2), (1.0, 0)], ids=["it was away", "it began anew"])
def test_every_wait_begins_again_with_a_broker_that_has_yet_to_hear_the_others(
    standby, view, back, leads_after_s, away_s, epoch
):
    """What had run out while no broker answered let the first store lead that came back, also an older one."""
    assert standby.polls_for(view, 10.0, heard_ago_s=0.2) is None
    for _ in range(round(away_s / 0.25)):
        assert not standby.poll(view, after_s=0.25)
    if view != lease():
        before = standby.now_s
        assert standby.polls_for(view, 0.46, epoch=epoch, stored={}) is None
        leads_after_s = leads_after_s and leads_after_s - (standby.now_s - before)
    assert standby.polls_for(view, 20.0, epoch=epoch, stored={}, **back) == leads_after_s


def test_brokers_that_never_heard_of_the_last_leader_leave_it_time_to_come_back():
    standby = Standby(broker=False)
    assert standby.polls_for(lease(), 20.0, epoch=0, stored={}) == MISSING_LEASES * LEASE_S


def test_a_founder_that_died_before_it_wrote_that_down_founds_again(standby):
    standby.poll(lease(holder="b", epoch=5, in_sync=frozenset({"b"}), synced=0))
    standby.handle(LeaseTaken(granted=True))
    assert standby.of(Lead) == [Lead(epoch=6, founding=Founding(name="6.b", after=2, base=HELD))]


def test_a_founder_that_has_made_nothing_is_as_new_as_it_was():
    founding = Founding(name="7.b", after=2, base=HELD)
    standby = Standby(run_epoch=7, foundings=(founding,))
    standby.handle(Tick(), after_s=0.25)
    assert standby.said().made_under == 2
    standby.keep(record(epoch=7, foundings=(founding,)))
    standby.keep(replica(epoch=7))
    assert standby.said().made_under == 7


def test_it_follows_no_leader_that_counts_other_shards_and_says_how_to_start_it(standby):
    standby.handle(Arrived(message=record(epoch=3, shard=[0, 2])))
    standby.handle(Arrived(message=replica(epoch=3)))
    assert standby.of(Keep) == []
    standby.handle(Polled(lease=lease(epoch=3, age_s=0.1)))
    assert standby.core.objection == "a counts 2 shards, this standby 1: start it with --shards 2"
    standby.handle(Arrived(message=record(epoch=4)))
    assert len(standby.of(Keep)) == 1, "one that counts as it does"


@pytest.mark.parametrize("epoch", [2, 9], ids=["the epoch that this store has of another", "a later epoch"])
def test_nothing_is_taken_of_a_leader_that_began_with_less_than_this_store_has(standby, epoch):
    line = (Founding(name="x", after=1, base={0: (5, "0.5"), 1: (3, "1.3")}),)
    assert standby.handle(Arrived(message=record(epoch=epoch, foundings=line))) == []
    assert standby.handle(Arrived(message=replica(epoch=epoch))) == []
    standby.poll(lease(holder="a", epoch=epoch, age_s=0.1))
    assert standby.core.objection.startswith("this store holds version 4 of fragment 1, which a began without")
    line = (Founding(name="y", after=2, base=HELD),)
    standby.keep(record(epoch=epoch + 1, foundings=line))
    assert not standby.poll(lease(holder="a", epoch=epoch + 1, age_s=0.1))
    assert standby.core.objection == ""


@pytest.mark.parametrize(
    ("in_sync", "age_s", "quits"), [("ab", 0.1, True), ("a", ENDED_S - 0.1, False), ("a", ENDED_S, True)]
)
def test_a_standby_goes_home_when_the_run_has_ended_after_a_while_to_fetch_what_it_lacks(
    standby, in_sync, age_s, quits
):
    standby.keep(record())
    assert not standby.poll(lease(ended=True, in_sync=frozenset(in_sync), age_s=age_s))
    assert bool(standby.of(Quit)) is quits


def test_a_run_record_that_is_none_is_not_followed(standby):
    standby.handle(Arrived(message=ReplicaRun(shard=0, epoch=3, serial=1, record=b"")))
    assert not standby.of(Keep)
    assert standby.core.epoch == 2
