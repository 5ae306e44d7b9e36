"""A task that counts its steps, and runs of fleets that train it: every tensor says how many steps are in it."""

from __future__ import annotations

from ast import literal_eval
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aggregator.interface import events as agg
from aggregator.store.layout import read_newest
from broker.wire.messages import Reason
from broker.wire.tensors import decode_tensor
from islands.tasks.task import Task
from ops.virtual.plan import SimulationPlan
from ops.virtual.simulation import Simulation
from ops.virtual.station import Station
from tests.run_reading import Reading

#: What a step adds to every element.
STEP = 0.25
#: Every element at first: a few hundred steps of an island alone are not beyond what is plausible.
BEGUN = 30.0
#: Tokens of a batch.
TOKENS = 100
#: Virtual seconds within which a run must end.
LIMIT_S = 300.0


def task(tensors: int, rows: int = 64) -> Task:
    """Returns a task of so many tensors of different sizes."""
    begun = {f"layer/{i}": np.zeros((rows * (1 + i % 3), 32), np.float32) for i in range(tensors)}

    def data(share):
        while True:
            yield share.take()

    return Task(
        init=lambda seed: ({name: x + BEGUN for name, x in begun.items()}, [0]),
        train=lambda params, counted, batch, schedule: (
            {name: x + np.float32(STEP) for name, x in params.items()},
            [counted[0] + 1],
            1.0,
        ),
        data=data,
        evaluate=lambda params: 1.0,
        tokens_per_step=TOKENS,
        fresh_optimizer=lambda params: [0],
    )


class Counting(Simulation):
    """A run whose contributions must hold the steps that they say are in them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._longest: Counter[tuple[str, int]] = Counter()  # steps of one contribution

    def decides(self, station: Station, actions: Sequence[agg.Action]) -> None:
        """See :class:`Simulation`."""
        super().decides(station, actions)
        for action in actions:
            if not isinstance(action, agg.Merge) or self.plan.config.keep != 1.0:
                continue
            for part in action.parts:
                if part.island_id not in sound(self):
                    continue
                value, steps = float(np.mean(decode_tensor(part.payload[0]))), part.steps.steps
                # What is rounded away from one is in the next.
                key = part.island_id, action.fragment_id
                self._longest[key] = longest = max(self._longest[key], steps)
                assert abs(value / STEP + steps) < 0.03 * longest, f"{part.island_id}: {steps} steps are {value}"


def sound(simulation: Simulation) -> set[str]:
    """Returns the islands that are honest, and whose memory does not fail."""
    return {
        plan.island_id
        for plan in simulation.plan.islands
        if plan.manner is None and not plan.corrupt_at_s and not plan.spoilt_at_s
    }


def task_of(plan: SimulationPlan) -> Any:
    """Returns what makes the task of each island of a plan: two tensors for each fragment."""
    return lambda island: task(2 * plan.config.fragments)


def simulation_of(plan: SimulationPlan, **options: Any) -> Simulation:
    """Returns a run that counts, to be entered."""
    return Counting(plan, task_of(plan), **options)


def run(plan: SimulationPlan, limit_s: float = LIMIT_S, kind: type[Simulation] = Counting, **how: Any) -> Simulation:
    """Runs a plan to its end; what is wrong carries the last decisions of the run."""
    with kind(plan, task_of(plan), **how) as simulation:
        try:
            finish(simulation, limit_s)
        except AssertionError as err:
            story = "\n".join(
                f"{at:10.4f} {who} {name} {facts}"[:300] for at, who, name, facts in simulation.trace[-40:]
            )
            troubles = [each for station in simulation.stations for each in station.troubles]
            raise AssertionError(f"{err}\n{plan}\n{troubles}\n...\n{story}") from err
    return simulation


def finish(simulation: Simulation, limit_s: float = LIMIT_S) -> Simulation:
    """Runs it to its end, and checks what must hold then."""
    assert simulation.run(limit_s), f"not ended after {limit_s} virtual seconds"
    simulation.invariants.at_end(simulation)
    check_final_parameters(simulation)
    return simulation


def check_final_parameters(simulation: Simulation) -> None:
    """Every island that has ended has the run's last versions, bit for bit, unless all had gone when it came back."""
    store: dict[str, Any] = {}
    for leader in simulation.leaders.values():
        manifest = leader.core.run.model.manifest
        for p in leader.core.run.model.fragments:
            _, params = read_newest(leader.disk.path, p)
            start = 0
            for tensor in manifest.fragments[p]:
                store[tensor.name] = params[start : start + tensor.size].reshape(tensor.shape)
                start += tensor.size
    deserted = {who.partition("/")[0] for _, who, name, _ in simulation.trace if name == "run.deserted"}
    for name, params in simulation.versions.items():
        if name in deserted:
            continue
        for tensor, value in params.items():
            assert np.array_equal(value, store[tensor]), f"{name} ends with another {tensor}"


#: What tells a sound island from a rogue.
ACCUSATIONS = (
    Reason.NOT_FINITE,
    Reason.OUTLIER,
    Reason.QUARANTINED,
    Reason.IMPLAUSIBLE,
    Reason.WRONG_SHAPE,
    Reason.UNKNOWN_FRAGMENT,
)


def check_the_honest(simulation: Simulation) -> None:
    """No honest island whose memory is sound was ever accused of anything."""
    for member in Reading(simulation.aggregator.core).members.values():
        if member.island_id in sound(simulation):
            accused = {reason: n for reason, n in member.refusals.items() if reason in ACCUSATIONS}
            assert not accused, f"{member.island_id}: {accused}"
    kept_out = [fields for _, _, name, fields in simulation.trace if name == "island.quarantined"]
    assert not [fields for fields in kept_out if any(f"'island': '{name}'" in fields for name in sound(simulation))]


# --- what a run reports -----------------------------------------------------------------------------------------------


def with_one(plan: SimulationPlan, number: int, **changes: Any) -> SimulationPlan:
    """Returns the plan with one island that differs."""
    islands = list(plan.islands)
    islands[number] = replace(islands[number], **changes)
    return replace(plan, islands=tuple(islands))


def told(simulation: Simulation, what: str) -> list[tuple[float, Any]]:
    """When something was noted, and its fields, where these are plain values."""
    return [(at_s, literal_eval(fields)) for at_s, _, name, fields in simulation.trace if name == what]


def tokens(simulation: Simulation, island: str | None = None) -> dict[str, Any]:
    """What the books say of an island, or of all."""
    return Reading(simulation.aggregator.core).tokens(island)


def participation(simulation: Simulation) -> float:
    return Reading(simulation.aggregator.core).participation.participation or 0.0
