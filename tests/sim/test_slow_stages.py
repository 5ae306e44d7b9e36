"""Runs whose aggregator merges, or writes, more slowly than rounds fall due: they open farther apart meanwhile."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace
from typing import Any

import pytest

from broker.wire.messages import Phase
from ops.faults.kinds import Fault, FaultKind
from ops.virtual.plan import LinkModel
from ops.virtual.simulation import Simulation
from tests.run_reading import Reading
from tests.sim.counting import LIMIT_S, finish, run, simulation_of
from tests.sim.fleets import steady

SLOW_S: Any = (0.28, 0.32)
QUICK_S: Any = (0.001, 0.01)


def changes_of(simulation: Simulation) -> list[tuple[str, dict[str, Any]]]:
    """Which aggregator changed the interval, and what it said."""
    return [(who, literal_eval(said)) for _, who, name, said in simulation.trace if name == "interval.changed"]


@pytest.mark.rotating(2)
@pytest.mark.parametrize("stage", ["merge_s", "persist_s"])
def test_rounds_open_as_far_apart_as_the_slower_stage_takes_and_as_before_once_it_is_quick(stage: str) -> None:
    """At 0.3 s for each of 8 rounds an interval of 24 steps of 0.05 s is too short: it takes 48 or more."""
    # Blocks for the whole run: their records, which wait in the same turn, would make a round take as long as two.
    plan = replace(steady(2, fragments=8, total_tokens=180_000, data_ahead_s=120.0), **{stage: SLOW_S})
    with simulation_of(plan) as simulation:
        simulation.run(24.0)
        run_ = simulation.aggregator.core.run
        slow = run_.schedule.interval.steps
        assert slow >= 40
        simulation.plan = replace(simulation.plan, **{stage: QUICK_S})
        while run_.phase is Phase.RUNNING and simulation.now_s < LIMIT_S:
            simulation.run(simulation.now_s + 0.5)
        assert run_.schedule.interval.steps == 24
        changes = changes_of(finish(simulation))
    assert changes[0][1]["because"].startswith("merging" if stage == "merge_s" else "writing")


def test_an_aggregator_that_comes_back_goes_on_with_the_interval_and_learns_again() -> None:
    plan = replace(steady(2, fragments=8, total_tokens=120_000), merge_s=SLOW_S)
    kill = Fault(kind=FaultKind.KILL, targets=("aggregator",), at_s=14.0, for_s=1.0)
    simulation = run(replace(plan, faults=(kill,)))
    first, *others = changes_of(simulation)
    assert (first[0], first[1]["was"]) == ("aggregator/1.1", 24)
    assert [said["was"] for who, said in others if who == "aggregator/2.2"][:1] in ([], [first[1]["steps"]])
    assert simulation.aggregator.core.run.schedule.interval.steps > 40


def test_rounds_of_islands_that_are_far_away_open_as_far_apart_as_three_journeys_take() -> None:
    """Two links of 0.15 s each way: 12 steps of 0.05 s there and back, and one until an island answers."""
    plan = replace(steady(3, fragments=4, total_tokens=120_000), link=LinkModel(delay_s=(0.14, 0.16)))
    simulation = run(plan)
    changes = changes_of(simulation)
    assert changes[0][1]["because"].startswith("a journey takes")
    assert 36 <= simulation.aggregator.core.run.schedule.interval.steps <= 48
    assert len(changes) <= 2


def test_versions_that_are_made_durable_in_several_places_at_a_time_are_not_timed() -> None:
    """With standbys: what is on its way to one does not keep the next from setting out."""
    plan = replace(steady(2, fragments=4, total_tokens=60_000, failover=True), standbys=1, persist_s=(0.1, 0.12))
    simulation = run(plan)
    assert Reading(simulation.aggregator.core).participation.rounds.total() > 30
    assert changes_of(simulation) == []
