"""Everything loses power, or dies, at once: aggregators come back with their disks, brokers and Redis with nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ops.faults.kinds import Fault, FaultKind
from ops.virtual.plan import Cut, Link, SimulationPlan
from ops.virtual.simulation import Simulation
from ops.virtual.station import Station
from tests.sim.counting import run
from tests.sim.packed import short_plan

STATIONS = ("aggregator", "standby-1")


@pytest.mark.rotating(8)
@pytest.mark.parametrize("seed", range(16))
def test_what_was_flushed_is_there_when_power_comes_back(seed: int) -> None:
    outage = Fault(kind=FaultKind.OUTAGE, targets=("redis",), at_s=0.6 + 0.2 * seed, for_s=0.5)
    run(replace(short_plan(seed), faults=(outage,)))


def night(seed: int) -> SimulationPlan:
    """One store lags, then all is out. Redis comes back empty, and the older store is heard first, by a moment."""
    rng, plan = random.Random(f"night {seed}"), short_plan(seed, steps=160)
    behind, ahead = rng.sample(STATIONS, 2)
    at_s = rng.uniform(5.0, 8.0)
    lags = Cut(link=Link(process=behind, broker=0), at_s=at_s - 4.0, for_s=rng.uniform(4.0, 6.0))
    downs = {name: rng.choice([0.5, 0.5, 3.0]) for name in STATIONS} | {"broker-0": rng.uniform(4.0, 14.0)}
    late = Cut(link=Link(process=ahead, broker=0), at_s=at_s, for_s=downs["broker-0"] + rng.uniform(0.3, 1.0))
    faults = [Fault(at_s=at_s, kind=FaultKind.KILL, targets=(name,), for_s=for_s) for name, for_s in downs.items()]
    faults.append(Fault(at_s=at_s, kind=FaultKind.WIPE, targets=("redis",), for_s=0.1))
    return replace(plan, cuts=(lags, late), faults=tuple(faults), calm_after_s=0.0)  # nothing else goes wrong


def test_nobody_leads_before_who_could_object_was_heard() -> None:
    """A lease was taken by the older store, which the broker had heard for a moment longer."""
    for seed in (5, 7):
        run(night(seed))


@pytest.mark.full("the same with other times")
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 6, *range(8, 13)])
def test_after_any_night_the_newer_store_leads(seed: int) -> None:
    run(night(seed))


class Doomed(Simulation):
    """A run in which whoever leads dies soon, until it is calm."""

    def leads(self, station: Station) -> None:
        """See :class:`Simulation`."""
        super().leads(station)
        if self.now_s < self.plan.calm_after_s:
            self.virtual.after(self.virtual.between(station.name, "lives", 0.2, 2.0), lambda: station.crash(0.3))


def test_what_leaders_took_with_them_goes_again_at_once_however_many_they_were() -> None:
    """An island took each of them for a journey in vain, and waited twice as long after each."""
    for seed in (1, 4):
        plan = replace(short_plan(seed, steps=100), merge_s=(1.0, 3.0), calm_after_s=40.0)
        stormy = run(plan, kind=Doomed)
        assert sum(name == "leads" for _, _, name, _ in stormy.trace) > 12
        assert stormy.now_s < plan.calm_after_s + 14.0
