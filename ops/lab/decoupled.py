"""Trains a cell by the real programs in virtual time (:mod:`ops.virtual.simulation`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any
from unittest.mock import patch

from aggregator.rules.interval import Interval
from aggregator.store.layout import fragment_ids, read_newest
from broker.base.errors import ConfigError
from islands.arrays.reference import Reference
from islands.arrays.tree import flatten, unflatten
from islands.protocol import events as ie
from islands.tasks.task import Params, Schedule, Task
from ops.lab.lockstep import values_of
from ops.lab.records import Judge, Outcome, Point
from ops.plans.cell import CellSettings
from ops.virtual.island import Island
from ops.virtual.plan import IslandPlan, LinkModel, SimulationPlan
from ops.virtual.simulation import Simulation
from ops.virtual.station import Station

#: A run that takes this multiple of its expected duration has a bug.
PATIENCE = 20.0
#: When broker and aggregator are there: islands that ask before try again half a second later, and step apart.
BEGINS_AT_S = 0.5
#: One-way delay of a link in seconds, at most. The programs take a link of seconds for a narrow one, as it would be:
#: where a cell's are longer, all its times are shortened, so that journeys take as many steps.
LONGEST_DELAY_S = 0.1
#: How often in a step of the fastest island to look whether a point of the loss curve is due.
LOOKS = 8


class Run(Simulation):
    """A run whose islands join over quick links.

    Joining takes ten journeys, which in the laboratory may be many steps: an island would come late by as much.
    """

    def start_island(self, plan: IslandPlan) -> None:
        """See :class:`Simulation`."""
        self.wires.become(plan.island_id, LinkModel())
        super().start_island(plan)

    def acts(self, island: Island, event: ie.Event | None, actions: Sequence[ie.Action]) -> None:
        """See :class:`Simulation`."""
        super().acts(island, event, actions)
        if any(isinstance(action, ie.Joined) for action in actions):
            self.wires.become(island.name, island.plan.link or self.plan.link)


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
    total_tokens = cell.steps * cell.islands * per_step
    pace = pace_of(cell)
    like, _ = task.init(seed)
    plan = plan_of(cell, seed, total_tokens, per_step)
    curve: list[Point] = []
    longest_s = pace * PATIENCE * total_tokens / sum(per_step / cell.step_time_s(i) for i in range(cell.islands))
    with (
        _ablations(cell),
        Run(plan, lambda island: _scheduled(task, cell.steps), _forget, watching=False) as simulation,
    ):
        for at_s, steps in (each for each in cell.intervals if each[0]):
            simulation.virtual.at(pace * at_s, partial(_set_interval, simulation, int(steps)))
        for k in range(1, cell.evaluations):
            # By tokens, not by time: the points of all modes are at the same counts.
            _train(simulation, total_tokens * k // cell.evaluations, longest_s)
            if simulation.leaders:
                params = global_params(like, simulation.aggregator)
                curve.append(Point(trained(simulation), simulation.now_s / pace, judge(params)))
        if not simulation.run(longest_s):
            cure = (
                f"have trained {trained(simulation):,} of {total_tokens:,} tokens after {simulation.now_s:.4g} "
                f"virtual seconds, {PATIENCE:g} times what islands that train need: look at joins, outages, "
                "delays_s, megabytes_per_s, and at step times below a millisecond"
            )
            raise ConfigError("steps", cell.steps, cure)
        params = global_params(like, simulation.aggregator)

    state = simulation.aggregator.core.run
    tokens = state.books.ledger.books().tokens()
    return Outcome(
        params=params,
        curve=curve,
        tokens=tokens["trained"],
        merged_tokens=tokens["merged"],
        wasted={str(cause): count for cause, count in tokens["wasted"].items()},
        virtual_s=simulation.now_s / pace,
        rounds=sum(state.versions),
        participation=state.books.ledger.participation().participation or 0.0,
    )


def pace_of(cell: CellSettings) -> float:
    """Returns simulated seconds for a virtual second of a cell: 1, or less where journeys are long."""
    return min(1.0, LONGEST_DELAY_S / cell.longest_delay_s)


def _paced(cell: CellSettings) -> CellSettings:
    """Returns the cell with the times of the simulated fleet."""
    pace = pace_of(cell)
    return replace(
        cell,
        step_times_s=tuple(pace * each for each in cell.step_times_s),
        delays_s=tuple(pace * each for each in cell.delays_s),
        megabytes_per_s=cell.megabytes_per_s / pace,
        data_ahead_s=None if cell.data_ahead_s is None and pace == 1 else pace * (cell.data_ahead_s or 10.0),
        joins=tuple((who, pace * from_s, pace * until_s) for who, from_s, until_s in cell.joins),
        outages=tuple((who, pace * at_s, pace * for_s) for who, at_s, for_s in cell.outages),
    )


def plan_of(cell: CellSettings, seed: int, total_tokens: int, per_step: int) -> SimulationPlan:
    """Returns the simulation plan of a cell; it ends early by the steps until islands hear of the end."""
    pace, cell = pace_of(cell), _paced(cell)
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
                joins_at_s=max(BEGINS_AT_S, join[0] if join else 0.0),
                leaves_at_s=join[1] if join else None,
                pauses=pauses[i],
                outages=tuple((at_s, for_s) for who, at_s, for_s in cell.outages if int(who) == i),
                link=LinkModel(delay_s=(0.9 * delay_s, 1.1 * delay_s), bytes_per_s=1e6 * cell.megabytes_per_s),
            )
        )
    config = replace(cell.aggregator, seed=seed, total_tokens=target)
    # No island starts twice, so none has a use for what it kept.
    plan = SimulationPlan(seed=seed, islands=tuple(islands), config=config, checkpoints=False, calm_after_s=0.0)
    works: dict[str, Any] = {
        name: tuple(pace * each_s for each_s in getattr(plan, name))
        for name in ("merge_s", "persist_s", "capture_s", "job_s")
    }
    return replace(plan, **works)


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


def _scheduled(task: Task, steps: int) -> Task:
    """Returns the task, whose schedules now end after ``steps``.

    The aggregator's target is less, by what is trained until islands hear of the end.
    """

    def train(params: Params, opt_state: Any, batch: Any, schedule: Schedule) -> tuple[Params, Any, Any]:
        return task.train(params, opt_state, batch, schedule._replace(total_steps=steps))

    return replace(task, train=train)


def _train(simulation: Simulation, tokens: int, limit_s: float) -> None:
    """Lets islands train until they have trained ``tokens``, or the run has ended or failed."""
    look_every_s = min(island.step_time_s for island in simulation.plan.islands) / LOOKS
    while trained(simulation) < tokens and simulation.now_s < limit_s:
        # Not after every event: a step has hundreds of them.
        simulation.virtual.run_until(simulation.now_s + look_every_s)
        if simulation.ended() or simulation.virtual.failures:
            break


def global_params(like: Params, leader: Station) -> Params:
    """Returns the durable global parameters in the task's structure and dtypes.

    Args:
        like: The task's parameters, whose values stand for what has no version yet.
        leader: Of a run that has not been left.
    """
    placed = dict(flatten(like))
    for p in fragment_ids(leader.disk.path):
        _, vector = read_newest(leader.disk.path, p)
        for name, value in values_of(leader.core.run.model.manifest.fragments[p], vector):
            placed[name] = value.astype(placed[name].dtype)
    return unflatten(like, placed)


def _set_interval(simulation: Simulation, steps: int) -> None:
    """Sets every leader's interval."""
    for leader in simulation.leaders.values():
        leader.core.run.schedule.set_interval(steps, leader.core.run.now_s)


@contextmanager
def _ablations(cell: CellSettings) -> Iterator[None]:
    """Takes away what a cell goes without."""
    with ExitStack() as stack:
        if cell.intervals:  # which nothing else changes
            stack.enter_context(patch.object(Interval, "follow", lambda *_: ""))
        if not cell.error_feedback:
            lossy = partialmethod(Reference.capture, feedback=False)
            stack.enter_context(patch.object(Reference, "capture", lossy))
        if not cell.outer_follows:
            stack.enter_context(patch.object(Interval, "outer_rule", lambda _, rule, before: rule))
        yield


def _forget(now_s: float, who: str, name: str, fields: Mapping[str, Any]) -> None:
    """Drops an event: a run has millions of decisions."""
