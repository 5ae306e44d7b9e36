"""A leader and its lease: when it is renewed, what an answer that never came leaves open, and how a leader ends."""

import pytest

from aggregator.interface.events import RunSaved
from aggregator.standby.replication import UNREACHED_LEASES
from aggregator.standby.replication_events import Deposed, Followed, GiveUp, Outranked, Renew, Renewed, RenewFailed
from aggregator.state.founding import Founding
from broker.wire.messages import Follow
from tests.leader_hand import EPOCH, LAG_S, LEASE_S, WHOLE, Leader, commit_of, stored_of


def test_the_lease_is_renewed_once_the_store_has_the_epoch_then_four_times_per_lease_and_nothing_is_said_before():
    leader = Leader()
    assert not leader.of(Renew)
    assert leader.core.next_deadline_s() > leader.now_s
    assert not leader.tick(after_s=0.5)
    leader.saved(1)
    assert leader.of(Renew) == [Renew(in_sync=())]
    assert leader.delivered() == []
    leader.granted()
    assert leader.delivered() == [RunSaved(serial=1)]
    assert not leader.tick(after_s=0.2)
    assert leader.core.next_deadline_s() == pytest.approx(leader.now_s + 0.05)
    leader.tick(after_s=0.05)
    assert leader.of(Renew)


def test_a_standby_that_may_have_been_named_is_waited_for_until_the_next_answer(leader):
    leader.hear("b", *WHOLE)
    leader.handle(RenewFailed(detail="no answer"))
    assert leader.core.required == {"b"}
    leader.persist(commit_of())
    leader.stored_here()
    assert leader.delivered() == []
    leader.tick(after_s=0.3)
    leader.granted()
    assert leader.core.required == leader.core.in_sync == {"b"}


def test_one_that_may_have_been_struck_out_is_still_waited_for(leader):
    leader.in_sync("b")
    leader.persist(commit_of())
    leader.stored_here()
    leader.tick(after_s=LAG_S)
    assert leader.of(Renew) == [Renew(in_sync=())]
    leader.handle(RenewFailed(detail="no answer"))
    assert leader.core.required == {"b"}
    assert leader.delivered() == []


def test_a_refused_renewal_deposes_and_nothing_is_done_any_more(leader):
    leader.persist(commit_of())
    leader.tick(after_s=0.3)
    leader.handle(Renewed(granted=False, holder="b", epoch=EPOCH + 1))
    assert leader.actions == [Deposed(holder="b", epoch=EPOCH + 1)]
    assert leader.stored_here() == leader.hear("b", *WHOLE) == []


def renewals(leader):
    """What is asked of the lease in the next quarter of it."""
    leader.tick(0.25 * LEASE_S)
    return leader.of(Renew)


def test_a_leader_that_no_broker_answers_lets_its_lease_run_out_and_takes_it_up_again():
    leader = Leader().begun()
    leader.reachable = False
    for _ in range(4 * UNREACHED_LEASES - 1):
        assert renewals(leader)
        leader.granted()
    assert not [a for _ in range(8) for a in renewals(leader)]
    leader.reachable = True
    assert renewals(leader)


def test_a_new_leader_that_redis_does_not_answer_for_long_renews_as_soon_as_it_does():
    """Until then it says nothing, so that no broker can answer either."""
    leader = Leader()
    leader.saved(1)
    leader.reachable = False
    for _ in range(8 * UNREACHED_LEASES):
        leader.handle(RenewFailed(detail="no answer"), after_s=0.25 * LEASE_S)
        assert leader.of(Renew) or renewals(leader)


def test_a_leader_that_no_broker_answers_strikes_out_nobody():
    leader = Leader().begun()
    leader.hear("b", commit_of(0, 0), commit_of(1, 0))
    leader.granted()
    assert leader.core.in_sync == {"b"}
    leader.reachable = False
    leader.persist(commit_of(0, 1))
    leader.stored_here(0, 1)
    assert {each.in_sync for _ in range(10) for each in renewals(leader)} <= {("b",)}


def test_a_leader_that_wakes_up_outranked_stops_even_if_it_asks_redis_nothing():
    leader = Leader().begun()
    leader.reachable = False
    leader.tick(10 * LEASE_S)  # frozen
    leader.handle(Outranked())
    (deposed,) = leader.of(Deposed)
    assert deposed.epoch > EPOCH
    assert leader.handle(Outranked()) == []


BETTER = (commit_of(0, 4), commit_of(1, 3))


@pytest.fixture
def founder():
    """It began without a lease, on what had been made under epoch 1."""
    return Leader(foundings=(Founding(name="3.a", after=1, base={0: (0, "0.0"), 1: (0, "1.0")}),)).begun()


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


def test_a_founder_that_has_made_something_gives_way_to_nobody_nor_does_a_leader_with_a_lease(founder, leader):
    founder.persist(commit_of(0, 1))
    for each in (founder, leader):
        each.hear("b", *BETTER, epoch=2)
        assert not each.of(GiveUp)
