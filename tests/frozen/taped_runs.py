"""Small runs in virtual time with real numbers, which leave what a run directory holds: tapes, payloads, stores.

Islands follow a quadratic in numpy, so that a run needs no JAX and takes a second. Whatever touches a pseudo-gradient
or a version is production code. The same run gives the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from aggregator.interface import events as agg
from aggregator.merge import versions
from aggregator.merge.fragment_state import FragmentState
from aggregator.merge.outer_step import make_outer_step
from aggregator.rules.recipes import ADAMW, MUON
from aggregator.store.recording import Recorder
from aggregator.store.store import Store
from aggregator.store.tape import Tape, event_line, note_line, start_line
from broker.wire import messages as m
from broker.wire.tensors import fragment_digest
from islands.tasks.task import Task
from ops.faults.kinds import Fault, FaultKind
from ops.lab.training import Rule, Training, TrainingAggregator, TrainingIsland
from ops.virtual import failover
from ops.virtual.aggregator import SimAggregator
from ops.virtual.network import Network
from ops.virtual.plan import SimulationPlan
from ops.virtual.queue import LinkModel
from ops.virtual.simulation import Simulation
from ops.virtual.world import Disk
from tests.sim.packed import TOKENS_PER_STEP, short_plan
from tests.sim.test_packed import LIMIT_S

Params = dict[str, np.ndarray]


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
        tokens_per_step=TOKENS_PER_STEP,
        fresh_optimizer=lambda params: {name: np.zeros_like(value) for name, value in params.items()},
        kinds={"rows": "rda", "bias": "mean"},
        unit_axes={"rows": 1},
    )


class RecordedTraining(Training):
    """Makes the work of each process; the data of islands may lead to different targets."""

    def __init__(self, row: int, targets: tuple[float, ...], rule: tuple[float, float]) -> None:
        island_rule = Rule(feedback=True, seed=0, fleet_tokens=TOKENS_PER_STEP, total_tokens=1 << 20)
        super().__init__(_task(row, 0.0), island_rule, make_outer_step(*rule))
        self.known: dict[tuple[int, str], FragmentState] = {}  # every version, by fragment and digest
        self._tasks = [_task(row, target) for target in targets]

    def island(self, island_id: str, life: int) -> TrainingIsland:
        return TrainingIsland(self._tasks[int(island_id[-1]) % len(self._tasks)], self._rule)

    def aggregator(self) -> TrainingAggregator:
        return RecordedWork({}, self._outer_step)


class RecordedWork(TrainingAggregator):
    """Merges as the laboratory does, but from what is on the disk of its process, and keeps payloads and versions."""

    def attach(self, known: dict[tuple[int, str], FragmentState], disk: Disk, recorder: Recorder, store: Any) -> None:
        self.known, self.disk, self.recorder, self.store = known, disk, recorder, store

    def merge(self, action: agg.Merge) -> str:
        p, commit = action.fragment_id, self.disk.commits[action.fragment_id]
        before = self.known[p, commit.digest]._replace(version=commit.fragment_version)
        made, merged = versions.merge(self._tensors(p), action, before, self._outer_step)
        self.recorder.record(action, before, merged, made.state)
        self._pending[p] = made
        return made.digest

    def persist(self, commit: agg.Commit) -> None:
        state = self._pending[commit.fragment_id].state
        assert fragment_digest(state.params) == commit.digest
        self.known[commit.fragment_id, commit.digest] = state
        if self.store is not None:
            self.store.commit(commit, state)

    def payload(self, fragment_id: int, digest: str) -> m.Payload:
        return versions.payload_of(self._tensors(fragment_id), self.known[fragment_id, digest])


# --- what is kept -------------------------------------------------------------------------------------------------


class TapedAggregator(SimAggregator):
    """Leads as any other, with a tape; where nobody stands by, it has a store on a real disk, too."""

    def __init__(self, simulation: RecordedSimulation, station: Any, life: int, epoch: int | None) -> None:
        disk = station.disk = simulation.disks.setdefault(station.name, station.disk)
        self.tape, self.recorder, self.store = simulation.files_of(station.name)
        founding, now_s = station.founding, simulation.clock(station.name).now_s
        self.tape.write(
            start_line(station.config, now_s, disk.record, disk.commits, epoch=epoch or 1, founding=founding)
        )
        super().__init__(simulation, station, life, epoch)
        self.work.attach(simulation.works.known, disk, self.recorder, self.store)

    def feed(self, event: agg.Event) -> None:
        self.tape.write(event_line(event, self.clock.now_s))
        super().feed(event)

    def perform(self, actions: list[agg.Action]) -> None:
        for action in actions:
            if isinstance(action, agg.Note):
                self.tape.write(note_line(action, self.clock.now_s))
        self.tape.flush()
        super().perform(actions)

    def save_run(self, action: agg.SaveRun) -> None:
        super().save_run(action)
        if self.store is not None and self.disk.record == action.record:
            self.store.save_run(action.record)


class ListeningNetwork(Network):
    """Tells ``simulation.said`` of every message that a process sends."""

    def to_broker(self, process: Any, to: str, message: m.Message, sequence: int, broker: int = 0) -> None:
        self._simulation.said(process, to, message, sequence)
        super().to_broker(process, to, message, sequence, broker)


class RecordedSimulation(Simulation):
    """A run whose files are in ``folder``, and which goes on from the disks of an ``earlier`` one."""

    def __init__(self, plan: SimulationPlan, works: RecordedTraining, folder: Path, said: Any, earlier: Any) -> None:
        self.folder, self.said, self.open = folder, said, ExitStack()
        self.disks: dict[str, Disk] = earlier.disks if earlier else {}
        self._files: dict[str, tuple[Tape, Recorder, Store | None]] = {}
        super().__init__(plan, works, network=ListeningNetwork)
        if earlier:
            self._lives, self.invariants = earlier._lives, earlier.invariants

    def files_of(self, station: str) -> tuple[Tape, Recorder, Store | None]:
        """Returns tape, recorder and store of an aggregator, which all of its lives write to."""
        if station not in self._files:
            home, store = self.folder / station.removeprefix(m.AGGREGATOR).removeprefix("-"), None
            tape = Tape(home / "events.jsonl", round(1e6 * self.plan.config.tape_segment_mb))
            self.open.callback(tape.close)
            if not self.plan.standbys:
                store = self.open.enter_context(Store.open(home / "store"))
                store.load()
            self._files[station] = tape, Recorder(home / "events.payloads"), store
        return self._files[station]


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
            "link": LinkModel(delay_s=(0.001, 0.05), loss=0.05, duplication=0.2),
            "persist_failure": 0.2,
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
    said: Callable[..., None],
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
        said: Gets process, addressee, message and sequence number of all that is said.
        islands: Of each what differs from an island of a short plan; None: two.
        steps: Of all islands together, until the run ends.
        more_steps: Those of the same run when it is resumed; 0: it is not.
        targets: Of the islands' data, in turn.
        row: See :func:`initial`.
        plan: What else differs from a short plan.
        config: What differs from its settings.
    """
    base, simulation, islands = short_plan(), None, islands or [{}] * 2
    usual = {"failover": False, "fragments": 2, "sync_interval": 4, "held_bytes": 1 << 30, "record_payloads": True}
    settled = replace(base.config, islands=len(islands), **(usual | config))
    fleet = tuple(
        replace(base.islands[0], **({"island_id": f"island-{i}", "step_time_s": 0.1 + 0.05 * i} | each))
        for i, each in enumerate(islands)
    )
    outer = _outer(ADAMW) | config
    works = RecordedTraining(row, targets, (outer["outer_learning_rate"], outer["outer_momentum"]))
    for total in [steps, steps + more_steps][: 1 + bool(more_steps)]:
        told = replace(settled, total_tokens=total * TOKENS_PER_STEP)
        made = replace(base, **({"islands": fleet, "config": told, "standbys": 0, "calm_after_s": 8.0} | (plan or {})))
        # Segments have the time in their first line, and where they are compressed.
        with patch.object(failover, "SimAggregator", TapedAggregator), patch("time.time", return_value=1e9):
            simulation = RecordedSimulation(made, works, folder, said, simulation)
            with simulation.open:
                assert simulation.run(LIMIT_S), f"{folder.name} has not ended"
    for lock in folder.rglob("lock"):
        lock.unlink()
