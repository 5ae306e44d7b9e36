"""Plans of an island of several hosts: when they are made, what is in them, and how a training thread meets them."""

import threading
from collections import deque
from types import SimpleNamespace

import pytest

from broker.base.errors import Unavailable
from broker.wire.messages import Block
from islands.agreement import messages as m
from islands.hosts.plans import NEVER, PROGRESS_EVERY, Planner, Plans
from islands.protocol.fleet import Progress
from islands.session.exchange import Batch, Due, Exchange, Install


def install(p, version):
    return Install(fragment_id=p, fragment_version=version, keep=1.0, placed=(), shift=(), dtypes=())


def names(plan):
    return [(each.fragment_id, each.fragment_version) for each in plan.installs]


class Hand:
    """A speaker and one other host, whose words the test says."""

    def __init__(self, fragments=2, begun=True):
        self.exchange, self.due, self.said = Exchange(), Due(), []
        self.plans = Plans(self.exchange, speaks=True)
        self.planner = Planner(2, self.due, self.plans, self.exchange, self.said.append)
        self.planner.begin(SimpleNamespace(manifest=range(fragments), start_step=10))
        self.boundaries = 0
        if begun:
            self.ready(*((p, 0) for p in range(fragments)))
            self.advance()
            self.standing()

    def ready(self, *versions):
        for p, version in versions:
            self.plans.placed(install(p, version))
            self.due.ready.append(Batch(installs=(install(p, version),)))

    def advance(self, *, all_stopped=False):
        self.planner.advance(self.boundaries, all_stopped=all_stopped)

    def decided(self):
        """A plan is made and promised; training comes to its step."""
        self.advance()
        self.vote()
        proposal = self.last(m.Proposal)
        arrived = [self.plans.arrive(step) for step in range(11, proposal.step + 1)]
        assert arrived == [False] * (len(arrived) - 1) + [True]
        return proposal

    def standing(self):
        assert self.plans.next()
        return self.carried_out()

    def carried_out(self):
        """The training thread does what is in its ``due``."""
        due = self.exchange.due
        done = [i.fragment_version for batch in due.ready for i in batch.installs], due.watched, due.snapshot_wanted
        due.ready.clear()
        self.plans.carried_out()
        self.boundaries += 1
        return done

    def last(self, kind):
        return next(message for message in reversed(self.said) if isinstance(message, kind))

    def vote(self, promised=True, at=10):
        self.planner.voted(1, m.Answer(number=self.last(m.Proposal).number, promised=promised, step=at))


@pytest.fixture
def hand():
    return Hand()


def test_before_the_first_step_all_fragments_are_installed_at_once():
    hand = Hand(begun=False)
    hand.ready((0, 3))
    hand.advance()
    assert not hand.said
    hand.ready((1, 4))
    hand.advance()
    assert names(hand.last(m.Standing).plan) == [(0, 3), (1, 4)]
    assert hand.standing()[0] == [3, 4]
    hand.advance()
    assert len(hand.said) == 1  # and nothing twice


def test_a_version_is_installed_by_a_plan_that_all_have_promised_and_at_its_step(hand):
    hand.ready((1, 5))
    proposal = hand.decided()
    assert names(proposal.plan) == [(1, 5)]
    assert proposal.step > 11
    assert hand.last(m.Decision) == m.Decision(number=proposal.number, fixed=True)
    assert hand.carried_out()[0] == [5]
    assert not hand.plans.arrive(proposal.step + 1)


def test_a_plan_that_a_host_refuses_is_carried_out_nowhere_and_made_again(hand):
    hand.ready((0, 5))
    hand.due.snapshot_wanted = True
    hand.advance()
    step = hand.last(m.Proposal).step
    hand.vote(promised=False, at=step)
    assert not hand.last(m.Decision).fixed
    assert (len(hand.due.ready), hand.due.snapshot_wanted) == (1, True)
    for later in range(11, step + 2):
        assert not hand.plans.arrive(later)
    hand.advance()
    again = hand.last(m.Proposal)
    assert again.step > step + 1
    assert (names(again.plan), again.plan.snapshot) == ([(0, 5)], True)
    hand.vote()
    assert not hand.due.snapshot_wanted
    for later in range(step + 2, again.step):
        assert not hand.plans.arrive(later)
    assert hand.plans.arrive(again.step)
    assert hand.carried_out() == ([5], frozenset(), True)


def test_there_is_one_plan_at_a_time_until_every_host_is_past_it(hand):
    hand.due.watched = frozenset({1})
    first = hand.decided()
    hand.advance()
    assert hand.last(m.Proposal) is first
    assert hand.carried_out()[1] == {1}
    hand.advance()
    assert hand.last(m.Proposal) is first  # the other host has not come there yet
    hand.planner.heard(1, m.HostAt(step=first.step, stopped=False))
    hand.advance()
    assert hand.last(m.Proposal).number == first.number + 1


def test_what_training_may_know_changes_with_a_plan_only(hand):
    block = Block(number=1, from_batch=0, to_batch=9)
    hand.due.blocks, hand.due.life, hand.due.done = (block,), 2, True
    hand.due.progress = Progress(100, 40, 2.0)
    hand.advance()
    hand.vote()
    here = hand.exchange.due
    assert (here.blocks, here.life, here.done) == ((), 0, False)
    for step in range(11, hand.last(m.Proposal).step + 1):
        hand.plans.arrive(step)
    assert (here.blocks, here.life, here.done, here.progress) == ((block,), 2, True, Progress(100, 40, 2.0))


def test_the_progress_of_the_fleet_alone_is_no_plan_for_a_while(hand):
    """A plan takes some steps, in which there is no other one: what falls due then would wait for it."""
    for step in range(11, 11 + PROGRESS_EVERY):
        hand.due.progress = Progress(step, step, 2.0)
        hand.advance()
        assert len(hand.said) == 1  # the plan before the first step
        hand.plans.arrive(step)
    hand.advance()
    assert hand.last(m.Proposal).plan.trained_tokens == 10 + PROGRESS_EVERY


def test_after_the_last_step_versions_are_installed_as_they_come_once_all_have_stopped(hand):
    hand.plans.stop()
    hand.carried_out()
    assert hand.plans.passed == NEVER
    assert not hand.plans.gate.promise(7, 99, m.Plan())
    hand.ready((0, 8))
    hand.advance()
    assert len(hand.said) == 1  # the other host trains on
    hand.advance(all_stopped=True)
    assert names(hand.last(m.Standing).plan) == [(0, 8)]
    assert hand.standing()[0] == [8]


def test_what_was_planned_for_a_step_after_the_last_one_is_done_after_the_end(hand):
    hand.ready((1, 5))
    hand.advance()
    hand.vote()
    assert not hand.due.ready
    hand.plans.stop()  # before the plan's step, on all hosts alike
    hand.carried_out()
    hand.advance(all_stopped=True)
    assert names(hand.last(m.Standing).plan) == [(1, 5)]
    assert hand.standing()[0] == [5]
    hand.advance(all_stopped=True)
    assert not hand.plans.next()  # and not again


def test_training_waits_at_its_boundary_until_the_plan_is_decided(hand):
    assert hand.plans.gate.promise(1, 11, m.Plan(copies=(0,)))
    decide = threading.Timer(0.05, lambda: hand.plans.gate.decide(1, fixed=False))
    decide.start()
    assert not hand.plans.arrive(11)  # it was abandoned
    decide.join()


def test_training_that_waits_for_a_decision_ends_when_the_island_does(hand):
    assert hand.plans.gate.promise(1, 11, m.Plan())
    hand.exchange.error = Unavailable("host 1 is lost", definite=True)
    with pytest.raises(Unavailable, match="host 1"):
        hand.plans.arrive(11)


def test_a_recovery_is_one_batch_with_a_fresh_optimizer_on_every_host(hand):
    installs = (install(0, 6), install(1, 6))
    for each in installs:
        hand.plans.placed(each)
    hand.due.ready = deque([Batch(installs=installs, fresh_optimizer=True)])
    assert hand.decided().plan.fresh_optimizer
    (batch,) = hand.exchange.due.ready
    assert (batch.fresh_optimizer, len(batch.installs)) == (True, 2)
