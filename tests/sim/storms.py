"""Nights after which an older store may be the first to be heard."""

from __future__ import annotations

import random
from dataclasses import replace

from ops.faults.kinds import Fault, FaultKind
from ops.virtual.plan import Cut, Link, SimulationPlan
from tests.sim.packed import short_plan

STATIONS = ("aggregator", "standby-1")


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
