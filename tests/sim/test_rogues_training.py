"""Real training in virtual time, with a rogue of each manner: the model comes out as it does without them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from islands.tasks.task import load_task
from ops.faults.kinds import MISBEHAVIORS, FaultKind
from ops.lab.decoupled import global_params, plan_of
from ops.plans.cell import cell_settings
from ops.virtual.plan import IslandPlan
from ops.virtual.simulation import Simulation

TASK = load_task("examples.numpy_task:task", {})
STEPS = 60
HONEST = 5


def loss_after(manners: tuple[FaultKind, ...]) -> tuple[float, Simulation]:
    """Returns the held-out loss after the honest islands' steps, with a rogue of each manner beside them."""
    recipe = {"mode": "decoupled", "fragments": 4, "sync_interval": 12, "codec": "bf16", "outer_momentum": 0.0}
    cell = cell_settings({**recipe, "outer_learning_rate": 1.0, "islands": HONEST, "steps": STEPS})
    islands = HONEST + len(manners)
    # The schedule goes by what all of them say that they have trained.
    plan = plan_of(cell, 0, STEPS * islands * TASK.tokens_per_step, TASK.tokens_per_step)
    rogues = tuple(IslandPlan(island_id=f"rogue-{each}", step_time_s=1.0, jitter=0.0, manner=each) for each in manners)
    plan = replace(
        plan, islands=(*plan.islands, *rogues), config=replace(plan.config, islands=islands, quarantine_s=30.0)
    )
    with Simulation(plan, lambda island: TASK) as simulation:
        assert simulation.run(20.0 * STEPS)
        params = global_params(TASK.init(0)[0], simulation.aggregator)
    return TASK.evaluate(params), simulation


@pytest.mark.full("trains twice in the laboratory")
def test_the_model_is_as_good_with_a_rogue_of_each_manner_as_without() -> None:
    alone, _ = loss_after(())
    with_rogues, simulation = loss_after(MISBEHAVIORS)
    assert math.isfinite(with_rogues)
    # Other data for the same islands moves it by 0.6 %.
    assert abs(with_rogues / alone - 1) < 0.01, (with_rogues, alone)
    run = simulation.aggregator.core.run
    for member in run.fleet.members:
        assert bool(member.refusals) == member.island_id.startswith("rogue-"), (member.island_id, member.refusals)
    merged = {m: run.books.ledger.books(f"rogue-{m}").tokens()["merged"] for m in MISBEHAVIORS}
    assert merged[FaultKind.NAN] == merged[FaultKind.SCALE] == merged[FaultKind.GARBAGE] == 0, merged
