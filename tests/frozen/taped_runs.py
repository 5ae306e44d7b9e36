"""Small runs in virtual time with real numbers, which leave what a run directory holds: tapes, payloads, stores.

Islands follow a quadratic in numpy, so that a run needs no JAX and takes seconds. The same run gives the same files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from aggregator.interface.config import AggregatorConfig
from aggregator.process import leader
from aggregator.rules.recipes import ADAMW, MUON
from aggregator.store.tape import start_line
from broker.transport.endpoint import Endpoint
from broker.wire import messages as m
from islands.tasks.task import Task
from ops.faults.kinds import Fault, FaultKind
from ops.virtual.plan import LinkModel
from ops.virtual.simulation import Simulation
from tests.sim.counting import LIMIT_S, TOKENS, finish
from tests.sim.packed import short_plan

Params = dict[str, np.ndarray]

#: What a life leaves beside tape, payloads and store.
LEFT = shutil.ignore_patterns("lock", "name", "*.attic")


# --- what is trained ----------------------------------------------------------------------------------------------


def initial(seed: int, row: int = 2) -> tuple[Params, Params]:
    """Returns parameters and momentum; ``row`` is the length of the units that RDA merges by.

    With units of two elements no sum has more than one order, so that all processors give the same bytes.
    """
    rng = np.random.default_rng(seed)
    shapes = {"a/rows": (24, row), "b/bias": (40,), "c/rows": (16, row), "d/bias": (24,)}
    params = {name: (rng.integers(-64, 65, shape) / 32).astype(np.float32) for name, shape in shapes.items()}
    return params, {name: np.zeros_like(value) for name, value in params.items()}


def step(params: Params, momentum: Params, batch: int, target: float = 1.0) -> tuple[Params, Params]:
    """Returns parameters and momentum after one step towards ``target``, with the noise of a batch."""
    rng, rate, memory = np.random.default_rng(batch), np.float32(0.05), np.float32(0.5)
    wanted = {name: (rng.integers(-64, 65, x.shape) / 32 + target).astype(np.float32) for name, x in params.items()}
    momentum = {name: memory * momentum[name] + (params[name] - wanted[name]) for name in params}
    return {name: params[name] - rate * momentum[name] for name in params}, momentum


def _task(row: int, target: float) -> Task:
    def batches(share: Any) -> Iterator[int]:
        while True:
            yield share.take()[2]

    return Task(
        init=lambda seed: initial(seed, row),
        train=lambda params, momentum, batch, schedule: (*step(params, momentum, batch, target), 1.0),
        data=batches,
        evaluate=lambda params: 1.0,
        tokens_per_step=TOKENS,
        fresh_optimizer=lambda params: {name: np.zeros_like(value) for name, value in params.items()},
        kinds={"rows": "rda", "bias": "mean"},
        unit_axes={"rows": 1},
    )


# --- the runs -----------------------------------------------------------------------------------------------------


def _kill(target: str, at_s: float) -> Fault:
    return Fault(kind=FaultKind.KILL, targets=(target,), at_s=at_s, for_s=1.5)


def _outer(defaults: Any) -> dict[str, Any]:
    return {name: getattr(defaults, name) for name in ("merge", "outer_learning_rate", "outer_momentum")}


#: Those that the repository keeps.
SMALL = ("plain", "failover", "resumed")
#: The arguments of :func:`record` for each run.
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"row": 2},
    "failover": {
        "row": 2,
        "steps": 150,
        "plan": {"standbys": 1, "brokers": 2, "faults": (_kill("aggregator", 1.5), _kill("standby-1", 4.5))},
        "failover": True,
    },
    "resumed": {"row": 2, "more_steps": 60, "tape_segment_mb": 0.02, **_outer(ADAMW)},
    "muon": {"islands": [{}] * 3, "steps": 150, "version_codec": m.Codec.INT8, **_outer(MUON)},
    "sharded": {"plan": {"faults": (_kill("aggregator-1", 2.0), _kill("broker-0", 4.0))}, "shards": 2, "fragments": 4},
    "faults": {
        "islands": [{"crashes_at_s": (3.0,)}, {"pauses_at_s": (4.0,)}, {"outages": ((2.0, 2.5),)}],
        "steps": 200,
        "plan": {
            "link": LinkModel(delay_s=(0.001, 0.05)),
            "breaks": ((1.5, "aggregator", 0), (3.5, "island-1", 0)),
            "faults": (_kill("aggregator", 2.5), _kill("aggregator", 5.0)),
            "donor_wait_s": 1.0,
        },
    },
    "differing": {"islands": [{}] * 3, "steps": 150, "targets": (1.0, -1.0, 3.0), "quorum": 2},
    "int4": {
        "islands": [{}, {"link": LinkModel(delay_s=(0.2, 0.4))}],
        "codec": m.Codec.INT4,
        "version_codec": m.Codec.BF16,
    },
    "lockstep": {"pacing": m.Pacing.LOCKSTEP, "keep": 0.0, "mix": 0.5, "quorum": 0, "overlap": 1},
    "rogue": {
        "islands": [{}, {}, {}, {"manner": FaultKind.SCALE, "misbehaves": 0.5, "joins_last": True}],
        "steps": 250,
        "quarantine_s": 1.0,
    },
}


def record(
    folder: Path,
    said: Callable[[m.Envelope], None],
    *,
    islands: list[dict[str, Any]] | None = None,
    steps: int = 90,
    more_steps: int = 0,
    targets: tuple[float, ...] = (1.0,),
    row: int = 12,
    plan: dict[str, Any] | None = None,
    **config: Any,
) -> None:
    """Writes the files of a run.

    Args:
        folder: Its directory.
        said: Gets all that is sent.
        islands: Of each what differs from an island of a short plan; None: two.
        steps: Of all islands together, until the run ends.
        more_steps: Those of the same run when it is resumed, which has one aggregator then; 0: it is not.
        targets: Of the islands' data, in turn.
        row: See :func:`initial`.
        plan: What else differs from a short plan.
        config: What differs from its settings.
    """
    base, islands = short_plan(), islands or [{}] * 2
    usual = {"failover": False, "fragments": 2, "sync_interval": 4, "held_bytes": 1 << 30, "record_payloads": True}
    usual |= {"islands": len(islands), "memory_bytes": 1 << 30, "tape": Path("events.jsonl")}
    settled = replace(base.config, **(usual | config))
    fleet = tuple(
        replace(base.islands[0], **({"island_id": f"island-{i}", "step_time_s": 0.1 + 0.05 * i} | each))
        for i, each in enumerate(islands)
    )
    tasks = [_task(row, target) for target in targets]
    invariants = None
    for total in [steps, steps + more_steps][: 1 + bool(more_steps)]:
        told = replace(settled, total_tokens=total * TOKENS)
        usually = {"seed": total, "islands": fleet, "config": told, "standbys": 0, "calm_after_s": 8.0}
        made = replace(base, **(usually | (plan or {})))
        with _heard(said), Simulation(made, lambda island: tasks[int(island.name[-1]) % len(tasks)]) as simulation:
            if invariants is not None:
                shutil.copytree(folder, simulation.stations[0].run_dir, dirs_exist_ok=True)
                shutil.rmtree(folder)
                simulation.invariants = invariants
            invariants = finish(simulation).invariants
            keep(simulation, folder)


def keep(simulation: Simulation, folder: Path) -> None:
    """Lets the aggregators of a run that has ended write the rest of their tapes, and copies what they have on disk.

    Args:
        simulation: Still entered.
        folder: To be the directory of the run, with one of its own in it for each aggregator but the first.
    """
    stations = simulation.stations
    assert simulation.virtual.run_until(LIMIT_S, lambda: all(station.ended for station in stations))
    for station in stations:
        home = folder / station.name.removeprefix(m.AGGREGATOR).removeprefix("-")
        shutil.copytree(station.run_dir, home, ignore=LEFT, dirs_exist_ok=True)


@contextmanager
def _heard(said: Callable[[m.Envelope], None]) -> Iterator[None]:
    """Tells ``said`` of all that is sent; tapes do not say in which folder this was."""
    send = Endpoint.send

    async def sent(endpoint: Endpoint, envelope: m.Envelope, **how: Any) -> bool:
        said(envelope)
        return await send(endpoint, envelope, **how)

    def line(config: AggregatorConfig, *args: Any, **more: Any) -> dict[str, Any]:
        return start_line(replace(config, store=Path("store"), tape=Path("events.jsonl")), *args, **more)

    with patch.object(Endpoint, "send", sent), patch.object(leader, "start_line", line):
        yield
