"""Rejoins against everything at once: islands come, die, are cut off and freeze, and donors die while they give.

The production cores in virtual time, with a network that loses and repeats. Each step lets one thing happen; between
steps time passes. What must hold is checked after every event (:mod:`ops.virtual.invariants`): no step and no batch is
merged twice, none is passed over, a donor's state is whole and of an island that has trained. At the end everything is
healed, and the run must end with everybody's books in order.
"""

from collections import Counter
from dataclasses import replace

import pytest

from aggregator.interface.config import AggregatorConfig
from broker.wire.messages import StateSource
from islands.protocol.donation import Stage
from ops.virtual.island import SimIsland
from ops.virtual.plan import IslandPlan, SimulationPlan
from ops.virtual.queue import LinkModel
from ops.virtual.simulation import Simulation
from tests.worlds import brief_runs, long_run

NAMES = ("a", "b", "c", "d")
TAKEOVER_S, DONOR_WAIT_S = 2.0, 4.0
DELAY_S = 0.05  # of a message, at most
SLACK_S = 1.0  # of whoever looks for a donor, for a tick
LIMIT_S = 1000.0  # after the healing


class World:
    """A fleet in virtual time; each public method is one thing that happens."""

    def __init__(self, seed=0):
        config = AggregatorConfig(
            islands=3,
            fragments=2,
            sync_interval=6,
            total_tokens=90_000,
            share_takeover_s=TAKEOVER_S,
            suspect_after_s=1.0,
            dead_after_s=1.5,
            round_timeout_s=3.0,
            data_ahead_s=1.0,
        )
        plans = tuple(
            IslandPlan(island_id=name, step_time_s=0.15 + 0.05 * i, joins_at_s=0.0 if i < 3 else 1e9)
            for i, name in enumerate(NAMES)
        )
        link = LinkModel(delay_s=(0.001, DELAY_S), loss=0.04, duplication=0.04)
        self.plans = {each.island_id: each for each in plans}
        self.sim = Simulation(
            SimulationPlan(seed=seed, islands=plans, config=config, link=link, donor_wait_s=DONOR_WAIT_S)
        )
        self.seen = Counter()
        self._searching = {}  # address -> since when
        self._owners = {}  # block -> whose it is, as told
        while not self.sim.islands or not all(island.training for island in self.sim.islands.values()):
            self.pass_time(1.0)
            assert self.now_s < 30.0, "version 0 takes too long"

    @property
    def now_s(self):
        return self.sim.queue.now_s

    def processes(self):
        """Every island's process that lives, those among them that were replaced and do not know it yet."""
        return [each for each in self.sim.processes.values() if isinstance(each, SimIsland) and each.alive]

    def pass_time(self, for_s):
        ends_s = self.now_s + for_s
        while self.now_s < ends_s and not self.sim.ended():
            self.sim.queue.run_until(min(ends_s, self.now_s + 0.1), self.sim.ended)
            self._look()

    def _look(self):
        for island in self.processes():
            if island.searching and not island.training:
                since_s = self._searching.setdefault(island.address, self.now_s)
                assert self.now_s - since_s <= DONOR_WAIT_S + SLACK_S, f"{island.address} looks for a donor for ever"
        for number, given in self.sim.aggregator.core.run.data.durable.items():
            before = self._owners.setdefault(number, given.owner)
            assert before == given.owner, f"{before} and {given.owner} own {number}"

    def kill(self, name):
        island = self.sim.islands.get(name)
        if island is not None and island.alive and sum(each.alive for each in self.sim.islands.values()) > 1:
            island.kill()
            self.sim.invariants.island_killed(island)

    def start(self, name):
        """A new process; of an island that lives, in the place of the one there is, which may not hear of it soon.

        Of two first joins on their way at the same time the one that arrives last stays, though its process may be the
        dead one; a start takes longer than that, but where a broker is frozen.
        """
        self.pass_time(2 * DELAY_S)
        before = self.sim.islands.get(name)
        if before is not None and before.alive:
            if not before.core.joined:
                return  # of two that join at the same time, either may be the one that stays
            self.sim.invariants.island_killed(before)
            self.seen["replaced"] += 1
        self.sim.start_island(self.plans[name])

    def trouble(self, name, **lasting_s):
        island = self.sim.islands.get(name)
        if island is not None:
            island.plan = replace(island.plan, **{what: ((self.now_s, for_s),) for what, for_s in lasting_s.items()})

    def leave(self, name):
        if sum(each.alive for each in self.sim.islands.values()) > 1 and name in self.sim.islands:
            self.sim.leave(self.plans[name])

    def kill_donor(self, index):
        """The island that gives its state right now, if any does: half-way, or before its first part."""
        fetching = [i for i in self.processes() if i.core._receiver.stage in (Stage.FETCHING, Stage.CHECKING)]
        if fetching:
            self.seen["donors killed"] += 1
            self.kill(fetching[index % len(fetching)].core._receiver.donor)

    def rejoin(self, name, index):
        """Killed and started, and then stopped just where it hurts."""
        self.kill(name)
        self.pass_time((0.1, 0.5, TAKEOVER_S + 1.5)[index % 3])
        self.start(name)
        for _ in range(40):
            self.pass_time(0.02)
            if self.sim.islands[name].core._receiver.stage is Stage.FETCHING:
                break
        if index % 4 == 3:
            self.kill_donor(index)

    def heal(self):
        self.sim.plan = replace(self.sim.plan, calm_after_s=self.now_s)
        for island in self.processes():
            island.plan = self.plans[island.plan.island_id]
        for name in NAMES:
            island = self.sim.islands.get(name)
            if island is None or not island.alive:
                self.start(name)
        ends_s = self.now_s + LIMIT_S
        while not self.sim.ended():
            assert self.now_s < ends_s, f"it does not end: {self.sim.trace[-20:]}"
            self.pass_time(1.0)
        self.sim.invariants.at_end(self.sim)
        settled = Counter(fields for _, _, name, fields in self.sim.trace if name == "island.settled")
        self.seen["from donors"] += sum(n for fields, n in settled.items() if str(StateSource.DONOR) in fields)
        self.seen["refused"] += sum(name == "contribution.refused" for _, _, name, _ in self.sim.trace)


#: How likely each is, beside the others.
STEPS = {
    "time": 30, "kill": 6, "start": 10, "rejoin": 8, "kill donor": 6, "cut": 5, "freeze": 3, "leave": 2,
    "aggregator": 2, "broker": 2,
}  # fmt: skip


def step(world, kind, a, b):
    """One thing happens; ``a`` and ``b`` say which."""
    name = NAMES[a % len(NAMES)]
    match kind:
        case "time":
            world.pass_time((0.05, 0.2, 0.5, 1.0, 3.0)[b % 5])
        case "kill":
            world.kill(name)
        case "start":
            if name not in world.sim.islands or not world.sim.islands[name].alive or b % 8 == 0:
                world.start(name)
        case "rejoin":
            world.rejoin(name, b)
        case "kill donor":
            world.kill_donor(a)
        case "cut":
            world.trouble(name, outages=(0.5, 2.0, TAKEOVER_S + 3.0)[b % 3])
        case "freeze":
            world.trouble(name, pauses=(0.5, TAKEOVER_S + 2.0)[b % 2])
        case "leave":
            world.leave(name)
        case "aggregator":
            world.sim.stations[0].crash(0.5)
        case "broker":
            world.sim.crash_broker(0, 0.3)


TestRejoin = brief_runs(World, step, STEPS, runs=4, steps=20)


@pytest.mark.full("long runs; the fast profile has the brief ones")
def test_whoever_comes_back_trains_what_is_its_own_and_nothing_is_merged_twice_in_long_runs():
    seen = Counter()
    for seed in range(1, 4):
        seen += long_run(World(seed), step, STEPS, seed=seed, steps=40).seen
    assert min(seen[what] for what in ("from donors", "donors killed", "replaced")) > 0, seen
