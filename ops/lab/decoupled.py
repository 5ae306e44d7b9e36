"""One decoupled run: the production cores in virtual time, with real training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aggregator.merge.outer_step import make_outer_step
from broker.base.errors import ConfigError
from broker.wire.fragments import FragmentManifest
from islands.arrays.tree import flatten, unflatten
from islands.tasks.task import Params, Task
from ops.lab.records import Outcome, Point
from ops.lab.training import Durable, Judge, Rule, Training, values_of
from ops.plans.cell import CellSettings
from ops.virtual.plan import IslandPlan, SimulationPlan
from ops.virtual.queue import LinkModel
from ops.virtual.simulation import Simulation

#: A run that takes this multiple of its expected duration has a bug.
PATIENCE = 20.0


def run(task: Task, cell: CellSettings, seed: int, judge: Judge) -> Outcome:
    """Returns the outcome of one decoupled run.

    Args:
        task: The task of the islands.
        cell: A cell of mode ``decoupled``.
        seed: The seed of parameters, data order and the fleet's accidents.
        judge: Called for every point of the loss curve but the last.

    Raises:
        ConfigError: The run does not end: no island trains, or no contribution arrives.
    """
    per_step = task.tokens_per_step
    fleet_tokens = cell.islands * per_step
    total_tokens = cell.steps * fleet_tokens
    like, _ = task.init(seed)
    rule = Rule(
        feedback=cell.error_feedback,
        seed=seed,
        fleet_tokens=fleet_tokens,
        total_tokens=total_tokens,
    )
    outer_step = make_outer_step(cell.outer_learning_rate, cell.outer_momentum)
    training = Training(task, rule, outer_step)
    plan = plan_of(cell, seed, total_tokens, per_step)
    simulation = Simulation(plan, training, _forget, watching=False)

    curve: list[Point] = []
    expected_s = total_tokens / sum(per_step / cell.step_time_s(i) for i in range(cell.islands))
    for k in range(1, cell.evaluations):
        # By tokens, not by time: the points of all modes are at the same counts.
        due = total_tokens * k // cell.evaluations

        def reached(due: int = due) -> bool:
            return trained(simulation) >= due or simulation.ended()

        simulation.queue.run_until(PATIENCE * expected_s, reached)
        if training.durable:
            params = global_params(like, simulation.disk.manifest, training.durable)
            curve.append(Point(trained(simulation), simulation.queue.now_s, judge(params)))
    if not simulation.run(PATIENCE * expected_s):
        cure = (
            f"have trained {trained(simulation):,} of {total_tokens:,} tokens after {simulation.queue.now_s:.4g} "
            f"virtual seconds, {PATIENCE:g} times what islands that train need: look at joins, outages, "
            "delays_s, megabytes_per_s, and at step times below a millisecond"
        )
        raise ConfigError("steps", cell.steps, cure)

    ledger = simulation.aggregator.core.run.ledger
    tokens = ledger.books().tokens()
    return Outcome(
        params=global_params(like, simulation.disk.manifest, training.durable),
        curve=curve,
        tokens=tokens["trained"],
        merged_tokens=tokens["merged"],
        wasted={str(cause): count for cause, count in tokens["wasted"].items()},
        virtual_s=simulation.queue.now_s,
        rounds=sum(state.version for state in training.durable.values()),
        participation=ledger.participation().participation or 0.0,
    )


def plan_of(cell: CellSettings, seed: int, total_tokens: int, per_step: int) -> SimulationPlan:
    """Returns the simulation plan of a cell; it ends early by the steps until islands hear of the end."""
    steps_unheard = 1 + int(2 * cell.longest_delay_s / cell.step_times_range_s[0])
    target = max(1, total_tokens - steps_unheard * cell.islands * per_step)
    islands = []
    pauses = failure_pauses(cell, seed)
    for i in range(cell.islands):
        join = next(((from_s, until_s) for who, from_s, until_s in cell.joins if int(who) == i), None)
        delay_s = cell.delay_s(i)
        islands.append(
            IslandPlan(
                island_id=f"island-{i}",
                step_time_s=cell.step_time_s(i),
                jitter=cell.jitter,
                joins_at_s=join[0] if join else 0.0,
                leaves_at_s=join[1] if join else None,
                pauses=pauses[i],
                outages=tuple((at_s, for_s) for who, at_s, for_s in cell.outages if int(who) == i),
                link=LinkModel(delay_s=(0.9 * delay_s, 1.1 * delay_s), bytes_per_s=1e6 * cell.megabytes_per_s),
            )
        )
    config = replace(cell.aggregator, seed=seed, total_tokens=target)
    return SimulationPlan(seed=seed, islands=tuple(islands), config=config)


def failure_pauses(cell: CellSettings, seed: int) -> list[tuple[tuple[float, float], ...]]:
    """Returns each island's pauses from failures of its simulated chips."""
    if not cell.chips:
        return [()] * cell.islands
    from ops.forecast.failures import FailureModel  # here: runs without failures do not need the fleet's models
    from ops.forecast.goodput import pauses

    model = FailureModel(mtbi_years=1.0)
    # As long as the run may last: pauses make it longer than its steps.
    duration_s = 4.0 * cell.steps * cell.step_times_range_s[1]
    lines = pauses(model, chips=cell.chips, islands=cell.islands, duration_s=duration_s, seed=seed)
    return [tuple((pause.at_s, pause.for_s) for pause in line) for line in lines]


def trained(simulation: Simulation) -> int:
    """Returns the tokens that all islands have trained."""
    return sum(island.tokens for island in simulation.islands.values())


def global_params(like: Params, manifest: FragmentManifest | None, durable: Durable) -> Params:
    """Returns the durable global parameters in the task's structure and dtypes."""
    assert manifest is not None
    placed = dict(flatten(like))
    for p, state in durable.items():
        for name, value in values_of(manifest.fragments[p], state.params):
            placed[name] = value.astype(placed[name].dtype)
    return unflatten(like, placed)


def _forget(now_s: float, who: str, name: str, fields: Mapping[str, Any]) -> None:
    """Drops an event: a run has millions of decisions."""
