"""A process of an island in virtual time: the daemon's training of a task on a simulated machine.

What it decides is seen at its core. A rogue tampers with what its core says (:mod:`ops.faults.kinds`).
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from broker.base.errors import ConfigError, RunEnded, Unavailable
from broker.process.signals import Interrupted
from islands import daemon
from islands.arrays.tree import named_leaves
from islands.interface.config import IslandConfig
from islands.protocol import events as ie
from islands.protocol.core import Island as Core
from islands.tasks.task import Params, Task
from ops.faults.kinds import Rogue, TamperedTensors
from ops.virtual.loop import VirtualTime
from ops.virtual.machine import SimMachine
from ops.virtual.plan import IslandPlan, SimulationPlan
from ops.virtual.wires import Wires, address_of

#: Between two checkpoints of an island.
CHECKPOINT_INTERVAL_S = 2.0
#: Largest message that it takes.
MOST_BYTES = 1 << 28


class Leaves(Exception):
    """Has an island end for good."""


class Watcher(Protocol):
    """The run of an island: its settings, and the observer of its decisions."""

    plan: SimulationPlan
    virtual: VirtualTime
    wires: Wires
    folder: Path
    task_of: Callable[[Island], Task]

    def note(self, now_s: float, who: str, name: str, fields: Any) -> None:
        """Takes a decision."""

    def acts(self, island: Island, event: ie.Event | None, actions: Sequence[ie.Action]) -> None:
        """An island's core has answered an event, or has begun."""

    def found_over(self, island: Island) -> None:
        """A process of an island came when all was over."""

    def has_ended(self, island: Island, params: Params | None, *, restarts: bool) -> None:
        """Its process has ended: with the run's last parameters, or before."""


class Island:
    """One process of an island.

    Attributes:
        address: Names island and process.
        alive: Whether the process runs.
        asked: Raised by the next look for signals.
        session: The membership in the run; None before it joins.
        stepped_at_s: When its first step ended.
        spoils: The next step makes parameters that are not finite.
        corrupted: A bit of its memory has changed.
        rogue: Tampers with what it says; None if it is honest.
    """

    def __init__(self, run: Watcher, plan: IslandPlan, life: int) -> None:
        self.plan, self.life, self.name, self.address = plan, life, plan.island_id, f"{plan.island_id}/{life}"
        self._run, virtual = run, run.virtual
        troubles = tuple(each for each in run.plan.clocks if each.process == self.name)
        self.process = virtual.process(self.name, troubles)
        self.process.job_s = lambda pool: virtual.between(self.name, f"job {pool}", *run.plan.job_s)
        self.machine = SimMachine(self.process, lambda: run.wires.context(self.process), self._begins)
        self.session: Any = None
        self.alive = True
        self.asked: Exception | None = None
        self.stepped_at_s = float("inf")
        self.spoils = self.corrupted = False
        self.rogue = None if plan.manner is None else self._rogue(plan)

    def _rogue(self, plan: IslandPlan) -> Rogue:
        assert plan.manner is not None
        drawn, virtual = random.Random(f"rogue {self.address}"), self._run.virtual
        honest = lambda: virtual.now_s < plan.honest_until_s  # noqa: E731
        return Rogue(plan.manner, plan.misbehaves, TamperedTensors(), drawn, honest=honest)

    # --- its training -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Runs the daemon's training on the process's training thread."""
        self.machine.train(self._main)

    def _main(self) -> None:
        run, plan = self._run, self.plan
        config = IslandConfig(
            broker=",".join(map(address_of, range(run.plan.brokers))),
            run_id=run.plan.config.run_id,
            island_id=plan.island_id,
            donor_wait_s=run.plan.donor_wait_s,
            state_dir=run.folder / plan.island_id if run.plan.checkpoints else None,
            checkpoint_interval_s=CHECKPOINT_INTERVAL_S,
            max_message_bytes=MOST_BYTES,
        )
        task = run.task_of(self)
        claimed = task.tokens_per_step * (self.rogue.tokens if self.rogue else 1)
        task = replace(task, train=self._timed(task.train), tokens_per_step=claimed)
        try:
            params = daemon.train(config, task, check=self._check, machine=self.machine)
        except Interrupted:
            self._end(restarts=True)
        except Leaves:
            self._end(restarts=False)
        except RunEnded:
            self.alive = False
            run.found_over(self)
        except (ConfigError, Unavailable) as error:
            run.note(run.virtual.now_s, self.address, "gave up", {"error": str(error)})
            self._end(restarts=True)
        else:
            if self.core.finished:
                run.has_ended(self, dict(named_leaves(params)), restarts=False)
            else:  # the run fell silent
                self._end(restarts=True)

    def _timed(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Returns steps that take their time."""
        plan, virtual = self.plan, self._run.virtual
        least, most = plan.step_time_s * (1 - plan.jitter), plan.step_time_s * (1 + plan.jitter)

        def timed(params: Params, *more: Any) -> tuple[Params, Any, Any]:
            step_s = virtual.between(self.name, "step", least, most)
            self.machine.sleep(plan.stepped_at_s(virtual.now_s, step_s) - virtual.now_s)
            params, opt_state, loss = train(params, *more)
            self.stepped_at_s = min(self.stepped_at_s, virtual.now_s)
            if self.spoils:
                self.spoils = False
                params = {name: x * np.float32(np.nan) for name, x in params.items()}
            return params, opt_state, loss

        return timed

    def _check(self) -> None:
        if self.asked is not None:
            raise self.asked

    def pause(self) -> None:
        """Asks the process to end as if it were told by a signal; another one goes on."""
        self.asked = Interrupted(signal.SIGTERM)

    def leave(self) -> None:
        """Asks the process to end for good."""
        self.asked = Leaves()

    def corrupt(self) -> None:
        """A bit changes in a reference of this island."""
        references = self.session._array_work._references if self.alive and self.session is not None else ()
        if references and references[0].values:
            # A copy: what it has may be the bytes of a version that others have, too.
            self.corrupted = True
            references[0].values[0] = values = references[0].values[0].copy()
            values.reshape(-1).view(np.uint32)[0] ^= 1 << 20
            self._run.note(self._run.virtual.now_s, self.address, "corrupted", {})

    def kill(self) -> None:
        """Ends the process without a word."""
        self.alive = False
        self.process.kill()

    def _end(self, *, restarts: bool) -> None:
        self.alive = False
        self._run.has_ended(self, None, restarts=restarts)

    # --- as others see it -------------------------------------------------------------------------------------

    @property
    def core(self) -> Any:
        """Returns the core of its session, or a stand-in before there is one."""
        return self.session._core if self.session is not None else NOBODY

    @property
    def training(self) -> bool:
        """Returns True once its first step has ended."""
        return self.stepped_at_s < float("inf")

    @property
    def step(self) -> int:
        """Inner steps of all lives, as the training thread has them."""
        return int(self.session._exchange.position.step) if self.session is not None else 0

    @property
    def tokens(self) -> int:
        """Tokens of all lives, as the training thread has them."""
        return int(self.session._exchange.position.tokens) if self.session is not None else 0

    def _begins(self, session: Any) -> None:
        """Its communication is about to begin."""
        self.session = session
        core: Core = session._core
        start, handle = core.start, core.handle

        def seen(event: ie.Event | None, actions: list[ie.Action]) -> list[ie.Action]:
            if self.alive:
                self._run.acts(self, event, actions)
            return actions if self.rogue is None else [each for action in actions for each in self._tampered(action)]

        watched: Any = core
        watched.start = lambda now_s: seen(None, start(now_s))
        watched.handle = lambda event, now_s: seen(event, handle(event, now_s))

    def _tampered(self, action: ie.Action) -> list[ie.Action]:
        assert self.rogue is not None
        if not isinstance(action, ie.Send):
            return [action]
        return [replace(action, message=message) for message in self.rogue.outgoing(action.message)]


NOBODY = SimpleNamespace(joined=False, finished=False, broker=0, fragments={}, island_id="", incarnation=0)
