"""Islands that are told to end and come back: what they keep is merged once, whatever else happens meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ops.virtual.plan import SimulationPlan
from ops.virtual.simulation import Simulation
from tests.run_reading import Reading
from tests.sim.counting import run, tokens, with_one
from tests.sim.faults import kills
from tests.sim.fleets import steady
from tests.sim.packed import packed_plan

#: Within which a packed run with pauses ends.
LIMIT_S = 300.0


def resumed(simulation: Simulation) -> int:
    """How often a process went on with the life of another one."""
    return sum(name == "island.resumed" for _, _, name, _ in simulation.trace)


def incarnations(simulation: Simulation) -> dict[str, int]:
    return {m.island_id: m.incarnation for m in Reading(simulation.aggregator.core).members.values()}


def check_that_nothing_was_lost(simulation: Simulation) -> None:
    assert resumed(simulation) == len(simulation.islands)
    assert set(incarnations(simulation).values()) == {1}
    books = tokens(simulation)
    assert books["wasted"] == {}
    assert books["merged"] == books["trained"]


@pytest.mark.full("seconds; the fast profile has a cluster that is stopped as a whole")
def test_islands_that_pause_in_turn_lose_nothing_and_are_the_same_life_afterwards() -> None:
    plan = steady(3, total_tokens=75_000)
    islands = tuple(replace(each, pauses_at_s=(4.0 + 2 * i,)) for i, each in enumerate(plan.islands))
    check_that_nothing_was_lost(run(replace(plan, islands=islands)))


@pytest.mark.rotating(4)
@pytest.mark.parametrize("crash_s", [5.0, 5.8, 7.0, 9.5])
def test_a_cluster_that_is_stopped_and_started_as_a_whole_loses_nothing(crash_s: float) -> None:
    plan = steady(3, total_tokens=60_000)
    islands = tuple(replace(each, pauses_at_s=(5.0,), restart_s=3.0) for each in plan.islands)
    crashes = (*kills("aggregator", crash_s, for_s=1.0), *kills("broker-0", crash_s + 0.1, for_s=1.0))
    check_that_nothing_was_lost(run(replace(plan, islands=islands, faults=crashes)))


def test_what_others_have_been_given_during_a_pause_is_theirs() -> None:
    plan = steady(3, total_tokens=120_000, share_takeover_s=5.0)
    plan = with_one(plan, 0, pauses_at_s=(5.0,), restart_s=10.0)
    simulation = run(replace(plan, faults=kills("broker-0", 5.01, for_s=3.0)))
    ended = [fields for _, _, name, fields in simulation.trace if name == "block.ended" and "is away" in fields]
    assert ended, "given to others"
    assert incarnations(simulation)["island-0"] == 1
    assert set(tokens(simulation)["wasted"]) == {"share_moved"}, "what it had kept was trained again by others"


def paused(seed: int) -> SimulationPlan:
    """A small run with many troubles, whose islands are told to end once or twice besides."""
    plan, drawn = packed_plan(seed), random.Random(f"pauses {seed}")
    islands = []
    for island in plan.islands:
        at_s = sorted(drawn.uniform(1.0, 9.0) for _ in range(drawn.randint(1, 2)))
        islands.append(replace(island, pauses_at_s=tuple(at_s)))
    return replace(plan, islands=tuple(islands))


@pytest.mark.rotating(8)
@pytest.mark.parametrize("part", range(8))
def test_pauses_among_troubles_of_all_kinds_keep_every_invariant(part: int) -> None:
    """Nothing is merged twice, every token is accounted for, and every run ends: checked as it runs."""
    times = sum(resumed(run(paused(seed), LIMIT_S)) for seed in range(part, 24, 8))
    assert times >= 1, "most pauses are followed by a process that goes on"
