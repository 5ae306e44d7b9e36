"""What a leader sends to its standbys, for whom a commit waits, and whom the lease names."""

import pytest

from aggregator.interface.events import MergeFailed, Note, PersistFailed, RunSaved, RunSaveFailed
from aggregator.standby.replication import FORGET_S
from aggregator.standby.replication_events import Deliver, Deposed, Local, Renew, RenewFailed, Replicate, ReplicateRun
from broker.routing.resending import REPUBLISH_S, UNKNOWN_S
from tests.leader_hand import EPOCH, LAG_S, LEASE_S, VERSION_1, WHOLE, Leader, commit_of

# --- nobody stands by ---------------------------------------------------------------------------------------------


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


def test_a_leader_whose_store_has_lost_bytes_gives_way_to_one_that_has_them_if_there_is_one(leader):
    failed = MergeFailed(fragment_id=0, fragment_version=1, detail="damaged")
    assert leader.handle(Local(event=failed)) == [Deliver(event=failed)]
    leader.in_sync("b")
    leader.handle(Local(event=failed))
    assert leader.of(Deposed) == [Deposed(holder="b", epoch=EPOCH)]


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


def waits_for_b(leader):
    """Version 1 is durable here, and ``b``, which is in sync, lacks it."""
    leader.in_sync("b")
    leader.persist(commit_of())
    leader.stored_here()


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


# --- before: who has caught up is waited for from the moment of asking --------------------------------------------


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
    leader.persist(commit_of())  # it goes to them while it goes to the disk
    assert leader.of(Replicate) == [Replicate(to=name, commit=commit_of()) for name in "bc"]
    leader.stored_here()
    leader.hear("b", commit_of(), WHOLE[1])
    assert leader.delivered() == []
    leader.hear("c", commit_of(), WHOLE[1])
    assert leader.delivered() == [VERSION_1]


# --- until: who lags is waited for while the lease names it -------------------------------------------------------


def test_a_lagging_standby_is_waited_for_while_the_lease_names_it_which_it_does_again_when_it_has_caught_up(leader):
    waits_for_b(leader)
    leader.tick(after_s=LAG_S - 0.01)
    assert Renew(in_sync=()) not in leader.actions
    leader.granted()
    leader.tick(after_s=0.01)
    assert leader.of(Renew) == [Renew(in_sync=())]
    assert leader.delivered() == []
    leader.granted()
    assert leader.delivered() == [VERSION_1]
    assert leader.core.in_sync == frozenset()
    leader.hear("b", commit_of(), WHOLE[1])
    assert leader.of(Renew) == [Renew(in_sync=("b",))]


def test_the_wait_begins_when_the_version_is_durable_here(leader):
    leader.in_sync("b")
    leader.persist(commit_of())
    leader.tick(after_s=0.3)
    leader.granted()
    leader.tick(after_s=5.0)  # a slow disk of our own
    assert leader.of(Renew) == [Renew(in_sync=("b",))]
    leader.granted()
    leader.stored_here()
    assert leader.core.in_sync == {"b"}


def test_a_standby_that_no_broker_let_be_heard_has_its_whole_time_once_one_answers_again(leader):
    waits_for_b(leader)
    leader.reachable = False
    leader.tick(after_s=2.0)
    leader.granted()
    leader.reachable = True
    leader.tick()  # its acknowledgement is still on its way
    leader.tick(after_s=LAG_S - 0.1)
    assert leader.of(Renew) == [Renew(in_sync=("b",))]
    leader.granted()
    leader.tick(after_s=0.1)
    assert leader.of(Renew) == [Renew(in_sync=())]


def test_a_standby_for_which_each_run_record_waits_too_long_lags(leader):
    """A record comes every 50 ms, and the standby acknowledges the one of 1.5 s ago."""
    leader.in_sync("b")
    began_s, serial = leader.now_s, 1

    def answered():
        if leader.of(Renew):
            leader.granted()

    while leader.core.in_sync and leader.now_s < began_s + 4.0:
        serial += 1
        leader.saved(serial)
        answered()
        leader.hear("b", *WHOLE, serial=max(1, serial - 30))
        answered()
        leader.tick(after_s=0.05)
        answered()
    assert leader.now_s - began_s == pytest.approx(LAG_S, abs=0.06)


def test_a_standby_that_has_restarted_is_not_late_with_the_run_record_it_had_before(leader):
    leader.in_sync("b")
    leader.tick(after_s=2 * LAG_S)
    leader.granted()
    leader.hear("b", *WHOLE, serial=-1, after_s=LEASE_S / 2)
    assert leader.of(Renew) == [Renew(in_sync=("b",))]


def test_without_redis_nothing_is_published_that_a_standby_lacks(leader):
    waits_for_b(leader)
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
