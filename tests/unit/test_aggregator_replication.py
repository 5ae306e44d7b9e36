"""The leader's side of standing by: who gets what, when a commit counts as durable, and whom the lease names."""

import pytest

from aggregator.events import Commit, Note, Persisted, PersistFailed, RunSaved, RunSaveFailed
from aggregator.standby.replication import FORGET_S, UNREACHED_LEASES, Replication
from aggregator.standby.replication_events import (
    Deliver,
    Deposed,
    Followed,
    GiveUp,
    Local,
    Outranked,
    Renew,
    Renewed,
    RenewFailed,
    Replicate,
    ReplicateRun,
)
from aggregator.state.founding import Founding
from broker.routing.resending import REPUBLISH_S, UNKNOWN_S
from broker.wire.messages import Follow, Stored

EPOCH, LEASE_S, LAG_S = 3, 1.0, 1.0


def commit_of(p=0, version=1, digest=None):
    return Commit(
        fragment_id=p,
        fragment_version=version,
        epoch=EPOCH,
        digest=digest or f"{p}.{version}",
        round_id=1,
        contributions=(),
        ledger={},
    )


def stored_of(*commits):
    return tuple(
        Stored(fragment_id=c.fragment_id, fragment_version=c.fragment_version, digest=c.digest) for c in commits
    )


class Leader:
    """A Replication, and the lease and standbys as far as a test answers for them."""

    def __init__(self, commits=(), fragments=2, foundings=()):
        self.now_s = 100.0
        commits = commits or [commit_of(p, 0) for p in range(fragments)]
        self.core = Replication(
            name="a",
            epoch=EPOCH,
            lease_s=LEASE_S,
            standby_lag_s=LAG_S,
            commits={c.fragment_id: c for c in commits},
            foundings=foundings,
            now_s=self.now_s,
        )
        self.stores = {}
        self.reachable = True  # a broker answers all the time
        self.actions = self.core.tick(self.now_s)

    def handle(self, event, after_s=0.0):
        self.passes(after_s)
        self.actions = self.core.handle(event, self.now_s)
        return self.actions

    def passes(self, seconds):
        self.now_s += seconds
        if self.reachable:
            self.core.reached(self.now_s)

    def tick(self, after_s=0.0):
        self.passes(after_s)
        self.actions = self.core.tick(self.now_s)
        return self.actions

    def begun(self):
        """The lease is renewed, and the run record is durable here."""
        self.saved(1)
        self.granted()
        return self

    def granted(self, after_s=0.0):
        return self.handle(Renewed(granted=True, holder="a", epoch=EPOCH), after_s)

    def saved(self, serial):
        return self.handle(Local(event=RunSaved(serial=serial)))

    def persist(self, commit):
        self.actions = self.core.persist(commit, self.now_s)
        return self.actions

    def stored_here(self, p=0, version=1, after_s=0.0):
        return self.handle(Local(event=Persisted(fragment_id=p, fragment_version=version)), after_s)

    def hear(self, name="b", *commits, epoch=EPOCH, serial=1, after_s=0.0, made_under=None):
        follow = Follow(
            shard=0,
            epoch=epoch,
            stored=stored_of(*commits),
            made_under=epoch if made_under is None else made_under,
            run_epoch=epoch,
            run_serial=serial,
        )
        return self.handle(Followed(name=name, follow=follow), after_s)

    def in_sync(self, *names):
        """These have everything, and the lease says so."""
        for name in names:
            self.hear(name, *(commit_of(p, 0) for p in range(2)))
            self.granted()
        assert self.core.in_sync == set(names)
        return self

    def of(self, kind):
        return [each for each in self.actions if isinstance(each, kind)]

    def delivered(self):
        return [each.event for each in self.of(Deliver)]


VERSION_1 = Persisted(fragment_id=0, fragment_version=1)
WHOLE = (commit_of(0, 0), commit_of(1, 0))


@pytest.fixture
def leader():
    return Leader().begun()


# --- nobody stands by ---------------------------------------------------------------------------------------------


def test_the_lease_is_renewed_at_once_and_then_four_times_per_lease():
    leader = Leader()
    leader.saved(1)
    assert leader.of(Renew) == [Renew(in_sync=())]
    leader.granted()
    assert not leader.tick(after_s=0.2)
    assert leader.core.next_deadline_s() == pytest.approx(100.25)
    leader.tick(after_s=0.05)
    assert leader.of(Renew)


def test_the_lease_names_an_epoch_only_when_the_store_has_it():
    leader = Leader()
    assert not leader.of(Renew)
    assert leader.core.next_deadline_s() > leader.now_s
    assert not leader.tick(after_s=0.5)
    leader.saved(1)
    assert leader.of(Renew)


def test_nothing_is_said_before_the_lease_was_renewed_once():
    leader = Leader()
    leader.saved(1)
    assert leader.delivered() == []
    leader.granted()
    assert leader.delivered() == [RunSaved(serial=1)]


def test_without_standbys_what_is_durable_here_is_durable(leader):
    leader.persist(commit_of())
    assert leader.delivered() == []
    leader.stored_here()
    assert leader.delivered() == [VERSION_1]
    leader.stored_here()
    assert leader.delivered() == []  # once


@pytest.mark.parametrize(
    "failure",
    [PersistFailed(fragment_id=0, fragment_version=1, detail="full"), RunSaveFailed(serial=2, detail="full")],
)
def test_a_failure_of_this_store_reaches_the_core_at_once(leader, failure):
    leader.persist(commit_of())
    assert leader.handle(Local(event=failure)) == [Deliver(event=failure)]


# --- sending ------------------------------------------------------------------------------------------------------


def test_a_standby_is_sent_the_run_record_first_and_then_what_it_lacks_a_few_at_a_time():
    leader = Leader(fragments=5).begun()
    leader.hear("b", commit_of(1, 0), serial=-1)
    assert leader.of(ReplicateRun) == [ReplicateRun(to="b", serial=1)]
    assert not leader.of(Replicate)  # by the record it knows whether it may follow at all
    leader.hear("b", commit_of(1, 0), serial=1)
    assert [each.commit.fragment_id for each in leader.of(Replicate)] == [0, 2]
    leader.hear("b", commit_of(0, 0), commit_of(1, 0), serial=1)
    assert [each.commit.fragment_id for each in leader.of(Replicate)] == [3]


def test_a_commit_goes_to_standbys_while_it_goes_to_the_disk(leader):
    leader.in_sync("b")
    leader.persist(commit_of())
    assert leader.of(Replicate) == [Replicate(to="b", commit=commit_of())]


def test_what_a_standby_still_lacks_when_it_is_heard_later_is_sent_again_with_growing_pauses(leader):
    gaps, since_s = [], 0.0
    leader.hear("b", commit_of(0, 0))
    assert leader.of(Replicate)
    for _ in range(800):
        since_s += 0.25
        leader.hear("b", commit_of(0, 0), after_s=0.25)
        if leader.of(Replicate):
            gaps.append(since_s)
            since_s = 0.0
    assert gaps == [REPUBLISH_S, 2.0, 4.0, 8.0, 16.0, 32.0, UNKNOWN_S, UNKNOWN_S]


def test_a_silent_standby_is_sent_nothing_again_and_what_it_missed_as_soon_as_it_is_heard(leader):
    leader.hear("b", commit_of(0, 0))
    for _ in range(20):
        leader.tick(after_s=0.25)
        assert not leader.of(Replicate)
    leader.hear("b", commit_of(0, 0))
    assert leader.of(Replicate)


def test_a_standby_that_stays_silent_is_forgotten(leader):
    leader.hear("b", *WHOLE)
    assert leader.core.standbys == ("b",)
    leader.tick(after_s=FORGET_S)
    assert leader.core.standbys == ()


def test_its_own_voice_of_before_and_followers_of_a_later_leader_are_not_heeded(leader):
    leader.hear("a", *WHOLE)
    leader.hear("b", *WHOLE, epoch=EPOCH + 1)
    assert leader.core.standbys == ()


def test_a_standby_under_the_leaders_own_name_is_complained_about_once_it_cannot_be_its_own_voice(leader):
    leader.hear("a", *WHOLE, after_s=FORGET_S - 0.1)
    assert not leader.of(Note)
    leader.hear("a", *WHOLE, after_s=0.1)
    assert [each.name for each in leader.of(Note)] == ["standby.namesake"]
    leader.hear("a", *WHOLE)
    assert not leader.of(Note)
    assert leader.core.standbys == ()


# --- before: who has caught up is waited for from the moment of asking ----------------------------------------------


def test_a_standby_that_has_everything_is_named_in_the_lease_at_once(leader):
    leader.hear("b", *WHOLE)
    assert leader.of(Renew) == [Renew(in_sync=("b",))]
    assert leader.core.in_sync == frozenset()
    leader.granted()
    assert leader.core.in_sync == {"b"}


@pytest.mark.parametrize(
    "heard",
    [
        pytest.param({"commits": WHOLE[:1]}, id="lacks a fragment"),
        pytest.param({"commits": (commit_of(0, 0, "other"), WHOLE[1])}, id="has other bytes"),
        pytest.param({"commits": WHOLE, "serial": -1}, id="lacks the run record"),
        pytest.param({"commits": WHOLE, "epoch": EPOCH - 1}, id="follows an earlier leader"),
    ],
)
def test_a_standby_that_lacks_something_is_not_named(leader, heard):
    leader.hear("b", *heard.pop("commits"), **heard)
    assert not leader.of(Renew)


def test_a_commit_waits_for_a_standby_that_the_lease_may_name_from_now_on(leader):
    leader.hear("b", *WHOLE)
    assert leader.of(Renew)  # on its way
    leader.persist(commit_of())
    leader.stored_here()
    assert leader.delivered() == []
    leader.hear("b", commit_of(), WHOLE[1])
    assert leader.delivered() == [VERSION_1]


def test_what_is_published_is_enough_to_be_named_and_what_is_not_waits_for_it(leader):
    leader.persist(commit_of())
    leader.hear("b", *WHOLE)  # lacks version 1, which nobody has seen
    assert leader.of(Renew) == [Renew(in_sync=("b",))]
    leader.stored_here()
    assert leader.delivered() == []
    leader.granted()
    assert leader.delivered() == []
    leader.hear("b", commit_of(), WHOLE[1])
    assert leader.delivered() == [VERSION_1]


def test_one_that_lacks_what_was_just_published_is_not_named(leader):
    leader.persist(commit_of())
    leader.stored_here()
    leader.hear("b", *WHOLE)
    assert not leader.of(Renew)


def test_a_run_record_waits_for_the_standbys_too(leader):
    leader.in_sync("b")
    leader.saved(2)
    assert leader.delivered() == []
    assert leader.of(ReplicateRun) == [ReplicateRun(to="b", serial=2)]
    leader.hear("b", *WHOLE, serial=2)
    assert leader.delivered() == [RunSaved(serial=2)]


def test_every_standby_in_sync_is_waited_for(leader):
    leader.in_sync("b")
    leader.hear("c", *WHOLE)
    leader.granted()
    leader.persist(commit_of())
    leader.stored_here()
    leader.hear("b", commit_of(), WHOLE[1])
    assert leader.delivered() == []
    leader.hear("c", commit_of(), WHOLE[1])
    assert leader.delivered() == [VERSION_1]


# --- until: who lags is waited for while the lease names it -----------------------------------------------------------


def test_a_lagging_standby_is_waited_for_until_the_lease_names_it_no_more(leader):
    leader.in_sync("b")
    leader.persist(commit_of())
    leader.stored_here()
    leader.tick(after_s=LAG_S - 0.01)
    assert Renew(in_sync=()) not in leader.actions
    leader.granted()
    leader.tick(after_s=0.01)
    assert leader.of(Renew) == [Renew(in_sync=())]
    assert leader.delivered() == []
    leader.granted()
    assert leader.delivered() == [VERSION_1]
    assert leader.core.in_sync == frozenset()


def test_the_wait_begins_when_the_version_is_durable_here(leader):
    leader.in_sync("b")
    leader.persist(commit_of())
    leader.tick(after_s=0.3)
    leader.granted()
    leader.stored_here(after_s=5.0)  # a slow disk of our own
    leader.granted()
    assert leader.core.in_sync == {"b"}


def test_a_standby_that_does_not_take_the_run_record_lags_too(leader):
    leader.in_sync("b")
    leader.saved(2)
    leader.tick(after_s=0.3)
    leader.granted()
    leader.tick(after_s=LAG_S)
    assert leader.of(Renew) == [Renew(in_sync=())]
    leader.granted()
    assert leader.delivered() == [RunSaved(serial=2)]


def records_every_50_ms(leader, acknowledged):
    """Returns for how many seconds the standby ``b`` was in sync, and at most 4, while run records kept coming."""
    leader.in_sync("b")
    began_s, serial = leader.now_s, 1

    def settled(actions):
        if any(isinstance(each, Renew) for each in actions):
            leader.granted()

    while leader.core.in_sync and leader.now_s < began_s + 4.0:
        serial += 1
        settled(leader.saved(serial))
        settled(leader.hear("b", *WHOLE, serial=acknowledged(serial)))
        settled(leader.tick(after_s=0.05))
    return leader.now_s - began_s


def test_a_standby_for_which_each_run_record_waits_too_long_lags(leader):
    assert records_every_50_ms(leader, lambda serial: max(1, serial - 30)) == pytest.approx(LAG_S, abs=0.06)


def test_a_standby_that_has_restarted_is_not_late_with_the_run_record_it_had_before(leader):
    leader.in_sync("b")
    leader.tick(after_s=2 * LAG_S)
    leader.granted()
    leader.hear("b", *WHOLE, serial=-1, after_s=LEASE_S / 2)
    assert leader.of(Renew) == [Renew(in_sync=("b",))]


def test_one_that_lagged_is_named_again_when_it_has_caught_up(leader):
    leader.in_sync("b")
    leader.persist(commit_of())
    leader.stored_here()
    leader.tick(after_s=LAG_S)
    leader.granted()
    leader.hear("b", commit_of(), WHOLE[1])
    assert leader.of(Renew) == [Renew(in_sync=("b",))]


def test_without_redis_nothing_is_published_that_a_standby_lacks(leader):
    leader.in_sync("b")
    leader.persist(commit_of())
    leader.stored_here()
    for _ in range(20):
        leader.tick(after_s=1.0)
        leader.handle(RenewFailed(detail="away"))
        assert leader.delivered() == []
    leader.tick(after_s=1.0)
    leader.granted()
    assert leader.delivered() == [VERSION_1]


def test_without_redis_a_run_whose_standbys_keep_up_goes_on(leader):
    leader.in_sync("b")
    leader.tick(after_s=0.3)
    leader.handle(RenewFailed(detail="away"))
    leader.persist(commit_of())
    leader.stored_here()
    leader.hear("b", commit_of(), WHOLE[1])
    assert leader.delivered() == [VERSION_1]


# --- requests whose outcome is unknown --------------------------------------------------------------------------------


def test_a_standby_that_may_have_been_named_is_waited_for(leader):
    leader.hear("b", *WHOLE)
    leader.handle(RenewFailed(detail="no answer"))
    assert leader.core.required == {"b"}
    leader.persist(commit_of())
    leader.stored_here()
    assert leader.delivered() == []


def test_one_that_may_have_been_struck_out_is_still_waited_for(leader):
    leader.in_sync("b")
    leader.persist(commit_of())
    leader.stored_here()
    leader.tick(after_s=LAG_S)
    assert leader.of(Renew) == [Renew(in_sync=())]
    leader.handle(RenewFailed(detail="no answer"))
    assert leader.core.required == {"b"}
    assert leader.delivered() == []


def test_the_next_answer_settles_what_was_unknown(leader):
    leader.hear("b", *WHOLE)
    leader.handle(RenewFailed(detail="no answer"))
    leader.tick(after_s=0.3)
    leader.granted()
    assert leader.core.required == leader.core.in_sync == {"b"}


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_refused_renewal_deposes_and_nothing_is_done_any_more(leader):
    leader.persist(commit_of())
    leader.tick(after_s=0.3)
    leader.handle(Renewed(granted=False, holder="b", epoch=EPOCH + 1))
    assert leader.actions == [Deposed(holder="b", epoch=EPOCH + 1)]
    leader.stored_here()
    assert leader.actions == []
    leader.hear("b", *WHOLE)
    assert leader.actions == []


# --- cut off from every broker ------------------------------------------------------------------------------------


def test_a_leader_that_no_broker_answers_lets_its_lease_run_out_and_takes_it_up_again():
    leader = Leader().begun()
    leader.reachable = False
    waits_s = [0.25 * LEASE_S] * (4 * UNREACHED_LEASES - 1)
    for wait_s in waits_s:
        renews = [a for a in leader.tick(wait_s) if isinstance(a, Renew)]
        assert renews
        leader.granted()
    assert not [a for _ in range(8) for a in leader.tick(0.25 * LEASE_S) if isinstance(a, Renew)]
    leader.reachable = True
    assert [a for a in leader.tick(0.25 * LEASE_S) if isinstance(a, Renew)]


def test_a_new_leader_that_redis_does_not_answer_for_long_renews_as_soon_as_it_does():
    """Until then it says nothing, so that no broker can answer either."""
    leader = Leader()
    leader.saved(1)
    leader.reachable = False
    for _ in range(8 * UNREACHED_LEASES):
        actions = [
            *leader.handle(RenewFailed(detail="no answer"), after_s=0.25 * LEASE_S),
            *leader.tick(0.25 * LEASE_S),
        ]
        assert [a for a in actions if isinstance(a, Renew)]


def test_a_leader_that_no_broker_answers_strikes_out_nobody():
    leader = Leader().begun()
    leader.hear("b", commit_of(0, 0), commit_of(1, 0))
    leader.granted()
    assert leader.core.in_sync == {"b"}
    leader.reachable = False
    leader.persist(commit_of(0, 1))
    leader.stored_here(0, 1)
    asked = [a.in_sync for _ in range(10) for a in leader.tick(0.25 * LEASE_S) if isinstance(a, Renew)]
    assert set(asked) <= {("b",)}


def test_a_leader_that_wakes_up_outranked_stops_even_if_it_asks_redis_nothing():
    leader = Leader().begun()
    leader.reachable = False
    leader.tick(10 * LEASE_S)  # frozen
    (deposed,) = [a for a in leader.handle(Outranked()) if isinstance(a, Deposed)]
    assert deposed.epoch > EPOCH
    assert leader.handle(Outranked()) == []


# --- a better store comes late ----------------------------------------------------------------------------------------

FOUNDING = Founding(name="3.a", after=1, base={0: (0, "0.0"), 1: (0, "1.0")})
BETTER = (commit_of(0, 4), commit_of(1, 3))


@pytest.fixture
def founder():
    """It began without a lease, on what had been made under epoch 1."""
    return Leader(foundings=(FOUNDING,)).begun()


@pytest.mark.parametrize("epoch", [2, EPOCH, EPOCH + 4], ids=["before", "the same epoch", "above"])
def test_a_founder_that_has_made_nothing_leaves_the_lease_to_a_newer_store(founder, epoch):
    if epoch == EPOCH:  # which it had of another leader
        follow = Follow(shard=0, epoch=EPOCH, stored=stored_of(*BETTER), made_under=EPOCH, run_epoch=0, run_serial=0)
        founder.handle(Followed(name="b", follow=follow))
    else:
        founder.hear("b", *BETTER, epoch=epoch)
    assert founder.of(GiveUp) == [GiveUp(to="b")]
    assert founder.of(Deposed) == [Deposed(holder="b", epoch=EPOCH)]
    assert founder.core.deposed


def test_a_founder_that_has_made_something_goes_on(founder):
    founder.persist(commit_of(0, 1))
    founder.hear("b", *BETTER, epoch=2)
    assert not founder.of(GiveUp)


def test_a_leader_with_a_lease_gives_way_to_nobody(leader):
    leader.hear("b", *BETTER, epoch=2)
    assert not leader.of(GiveUp)
