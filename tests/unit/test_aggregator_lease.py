"""A leader and its lease: when it is renewed, what an answer that never came leaves open, and how a leader ends."""

import pytest

from aggregator.events import RunSaved
from aggregator.standby.replication import UNREACHED_LEASES
from aggregator.standby.replication_events import Deposed, Followed, GiveUp, Outranked, Renew, Renewed, RenewFailed
from aggregator.state.founding import Founding
from broker.wire.messages import Follow
from tests.leader_hand import EPOCH, LAG_S, LEASE_S, WHOLE, Leader, commit_of, stored_of

# --- renewing -----------------------------------------------------------------------------------------------------


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


# --- requests whose outcome is unknown ----------------------------------------------------------------------------


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


# --- the end ------------------------------------------------------------------------------------------------------


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


# --- a better store comes late ------------------------------------------------------------------------------------

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
