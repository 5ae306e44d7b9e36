"""Hosts of one island in virtual time: what is done between two steps is done between the same two on all of them.

Training is as on a slice: a step takes all hosts together, but each thread may run a few steps ahead of its device.
Messages of one host arrive in the order in which they were sent, each after a delay of its own.
"""

import heapq
import random
from dataclasses import dataclass, field

import pytest

from islands.agreement.gate_rules import Gate
from islands.agreement.messages import Answer
from islands.agreement.speaker_rules import LOST_S, Speaker, Stage

STEPS, LOOK_S = 400, 0.0005


@dataclass
class Host:
    """A training thread, its gate, and what it has carried out."""

    gate: Gate
    at: int = 0
    done: list = field(default_factory=list)
    waited_s: float = 0.0
    line_s: float = 0.0  # nothing sent to or by it later arrives before
    dead: bool = False


class World:
    """One island of several hosts."""

    def __init__(self, seed, hosts, *, step_s=0.05, delay_s=(0.0002, 0.004), ahead=3):
        self.random = random.Random(seed)
        self.step_s, self.delay_s, self.ahead = step_s, delay_s, ahead
        self.now_s = 0.0
        self.events, self.count = [], 0
        self.hosts = [Host(Gate(0)) for _ in range(hosts)]
        self.speaker = Speaker(hosts, 0, 0.0)
        self.fixed = self.refused = 0
        for host in range(hosts):
            self.after(self.step_s * self.random.random(), self.step, host)

    def after(self, delay_s, call, *args):
        self.count += 1
        heapq.heappush(self.events, (self.now_s + delay_s, self.count, call, args))

    def message(self, host, call, *args):
        """Sends something between the speaker and a host; to itself at once."""
        if self.hosts[host].dead:
            return
        delay_s = 0.0 if host == 0 else self.random.uniform(*self.delay_s)
        self.hosts[host].line_s = at_s = max(self.hosts[host].line_s, self.now_s + delay_s)
        self.after(at_s - self.now_s, call, host, *args)

    def run(self, until_s):
        while self.events and self.events[0][0] <= until_s and min(h.at for h in self.hosts) < STEPS:
            self.now_s, _, call, args = heapq.heappop(self.events)
            call(*args)
            if self.speaker.stage is Stage.IDLE:
                proposal = self.speaker.propose(f"plan {self.count}", self.step_s, self.now_s)
                for host in range(len(self.hosts)):
                    self.message(host, self.asked, proposal)
        self.now_s = max(self.now_s, until_s)

    def step(self, host):
        here = self.hosts[host]
        if here.dead:
            return
        # A thread may not be further ahead of the slowest one than the device's queue is long.
        if here.at - min(h.at for h in self.hosts) >= self.ahead:
            self.after(0.2 * self.step_s, self.step, host)
            return
        here.gate.enter(here.at + 1)
        self.boundary(host)

    def boundary(self, host):
        here = self.hosts[host]
        if here.dead:
            return
        if here.gate.undecided:
            here.waited_s += LOOK_S
            self.after(LOOK_S, self.boundary, host)
            return
        plan = here.gate.take()
        here.at += 1
        if plan is not None:
            here.done.append((here.at, plan))
        self.message(host, self.told, here.at)
        self.after(self.step_s * self.random.uniform(0.5, 1.5), self.step, host)

    def asked(self, host, proposal):
        gate = self.hosts[host].gate
        promised = gate.promise(proposal.number, proposal.step, proposal.plan)
        self.message(host, self.voted, Answer(number=proposal.number, promised=promised, step=self.hosts[host].at))

    def decided(self, host, decision):
        self.hosts[host].gate.decide(decision.number, fixed=decision.fixed)

    def told(self, host, at):
        self.speaker.heard(host, at, self.now_s)

    def voted(self, host, vote):
        decision = self.speaker.voted(host, vote, self.now_s)
        if decision is None:
            return
        self.fixed += decision.fixed
        self.refused += not decision.fixed
        for each in range(len(self.hosts)):
            self.message(each, self.decided, decision)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("hosts", "least", "network"),
    [
        (2, 20, {"ahead": 1}),
        (2, 20, {"ahead": 4}),
        (5, 20, {}),
        (16, 20, {"ahead": 8}),
        (3, 5, {"step_s": 0.01, "delay_s": (0.01, 0.08)}),  # answers that take several steps only make plans rarer
    ],
)
def test_every_plan_is_carried_out_at_one_step_on_all_hosts_or_on_none(seed, hosts, least, network):
    world = World(seed, hosts, **network)
    world.run(60.0)
    common = min(len(host.done) for host in world.hosts)
    assert common > least
    assert all(host.done[:common] == world.hosts[0].done[:common] for host in world.hosts)
    assert all(len(host.done) - common <= 1 for host in world.hosts)


@pytest.mark.parametrize("seed", range(2))
def test_on_a_quick_network_hosts_wait_less_than_a_thousandth_of_their_time(seed):
    world = World(seed, 4)
    world.run(60.0)
    assert world.refused < 0.1 * world.fixed
    assert max(host.waited_s for host in world.hosts) < 0.001 * STEPS * world.step_s


def test_a_host_that_falls_silent_is_lost_and_the_plan_is_carried_out_nowhere():
    world = World(0, 3)
    world.run(1.0)
    while world.speaker.stage is not Stage.PROPOSED:
        world.run(world.now_s + 0.001)
    world.hosts[2].dead = True
    done = [list(host.done) for host in world.hosts]
    world.run(world.now_s + LOST_S + 2.0)
    assert 2 in world.speaker.lost(world.now_s + LOST_S)
    assert all(len(host.done) - len(before) <= 1 for host, before in zip(world.hosts, done, strict=True))
    assert world.hosts[0].done[: len(done[0])] == world.hosts[1].done[: len(done[0])]
