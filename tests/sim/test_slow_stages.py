"""Runs whose aggregator merges, or writes, more slowly than rounds fall due: they open farther apart meanwhile."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace
from typing import Any

import pytest

from aggregator.state.fragment import Stage
from aggregator.state.summary import totals
from broker.wire.messages import Phase
from ops.faults.kinds import Fault, FaultKind
from ops.virtual import failover
from ops.virtual.simulation import Simulation
from tests.run_reading import Reading
from tests.sim.test_replay import ShadowedAggregator
from tests.sim.test_simulation import LIMIT_S, finish, steady

SLOW_S: Any = (0.28, 0.32)
QUICK_S: Any = (0.001, 0.01)


def changes_of(simulation: Simulation) -> list[tuple[str, dict[str, Any]]]:
    """Which aggregator changed the interval, and what it said."""
    return [(who, literal_eval(said)) for _, who, name, said in simulation.trace if name == "interval.changed"]


@pytest.mark.rotating(2)
@pytest.mark.parametrize("stage", ["merge_s", "persist_s"])
def test_rounds_open_as_far_apart_as_the_slower_stage_takes_and_as_before_once_it_is_quick(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 0.3 s for each of 8 rounds an interval of 24 steps of 0.05 s is too short: it takes 48.

    All that is decided is decided likewise by a second core that hears the same events.
    """
    monkeypatch.setattr(failover, "SimAggregator", ShadowedAggregator)
    # Blocks for the whole run: their records, which wait in the same turn, would make a round take as long as two.
    plan = replace(steady(2, fragments=8, total_tokens=220_000, data_ahead_s=120.0), in_turn=True)
    simulation = Simulation(replace(plan, **{stage: SLOW_S}))
    run = simulation.aggregator.core.run
    most = 0
    while simulation.queue.now_s < 36.0:
        assert not simulation.run(simulation.queue.now_s + 0.5)
        if simulation.queue.now_s > 20.0:  # what had piled up before it was known is merged
            closed = [each.stage in (Stage.COMPUTING, Stage.PERSISTING) for each in run.fragments.values()]
            most = max(most, sum(closed))
            assert 48 < run.interval.steps <= 70
    assert most <= 3
    assert totals(run, simulation.queue.now_s).interval == {
        "steps": run.interval.steps,
        "because": run.interval.because,
    }
    simulation.plan = replace(simulation.plan, **{stage: QUICK_S})
    while run.phase is Phase.RUNNING and simulation.queue.now_s < LIMIT_S:
        simulation.run(simulation.queue.now_s + 0.5)
    assert run.interval.steps == 24
    changes = changes_of(finish(simulation))
    assert 2 <= len(changes) <= 4
    assert changes[0][1]["because"].startswith("merging" if stage == "merge_s" else "writing")


def test_an_aggregator_that_comes_back_begins_with_the_interval_of_the_recipe_and_learns_again() -> None:
    plan = replace(steady(2, fragments=8, total_tokens=200_000), in_turn=True, merge_s=SLOW_S)
    kill = Fault(kind=FaultKind.KILL, targets=("aggregator",), at_s=20.0, for_s=1.0)
    simulation = finish(Simulation(replace(plan, faults=(kill,))))
    firsts = {who: said["was"] for who, said in reversed(changes_of(simulation))}
    assert firsts == {"aggregator/0": 24, "aggregator/1": 24}


def test_versions_that_are_made_durable_in_several_places_at_a_time_are_not_timed() -> None:
    """With standbys: what is on its way to one does not keep the next from setting out."""
    plan = replace(steady(2, fragments=8, total_tokens=120_000, failover=True), standbys=1)
    simulation = finish(Simulation(replace(plan, persist_s=SLOW_S)))
    assert Reading(simulation.aggregator.core).participation.rounds.total() > 50
    assert changes_of(simulation) == []
