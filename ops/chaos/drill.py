"""One chaos run from its start to its end: the loop that starts, strikes, watches and shows.

Everything happens on the thread that started the processes; only Redis is asked from another one, because a stopped
Redis keeps its clients waiting.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

from aggregator.store.layout import read_name
from broker.base.errors import Unavailable
from broker.process import clocks
from broker.process.signals import Interrupted, Signals
from ops import run_directory
from ops.chaos.injector import Injector, clock_file
from ops.chaos.recording import Happening, Observer, Recording, pulse_file
from ops.faults.kinds import Fault, Role, role_of
from ops.faults.plan import ChaosConfig
from ops.processes.child_process import ProcessSpec
from ops.processes.cluster import Change, LocalCluster, ProcessEvent
from ops.processes.supervision import RestartPolicy
from ops.run.display import Display, Rate, progress_of
from ops.run.end_of_run import GaveUp
from ops.run.local_plan import LocalPlan
from ops.run.local_run import LocalRun, StatusWatch

TICK_S = 0.05
SHOW_EVERY_S = 1.0
#: Every island must train by then; JAX may have to compile first.
START_WITHIN_S = 180.0
#: Islands that start on a busy machine do so one after another; after the last one's first step it calms down.
CALM_DOWN_S = 1.0


class Drill:
    """A run with faults.

    Args:
        plan: The run's plan, prepared.
        config: Times.
        faults: The planned faults, in the order of their times.
        as_called: Names our commands as they are called here.

    Attributes:
        up: The run as ``up`` knows it: it starts the processes, and reports on them.
        recording: The faults done, and the run as observed.
    """

    def __init__(
        self, plan: LocalPlan, config: ChaosConfig, faults: Sequence[Fault], *, as_called: Callable[[str], str]
    ) -> None:
        self._plan = plan
        self._config = config
        self._faults = faults
        self.recording = Recording(islands=plan.island_ids)
        self.up = LocalRun(plan=plan, started_s=time.monotonic(), as_called=as_called)
        self._observer = Observer(plan.run_dir, self.recording)
        self._rate = Rate()
        self._next_show_s = 0.0
        self._ended = False  # the aggregator has ended the run by itself
        (plan.run_dir / "chaos").mkdir()

    def run(self, display: Display, signals: Signals) -> int:
        """Starts everything, strikes, and ends everything.

        Returns:
            0; 1 if the run did not go on, 2 if its settings are wrong; 128 + n if signal n came.
        """
        self._display, self._signals = display, signals
        logs, policy = self._plan.run_dir / "logs", RestartPolicy(max_delay_s=1.0)
        leaders = random.Random(f"leaders {self._config.fault_seed}")
        with (
            LocalCluster(logs, policy=policy, adapt=self._adapted) as cluster,
            StatusWatch(self._plan.redis_url, self._plan.run_id, tell=self.recording.redis.append) as watch,
        ):
            self._cluster, self._watch = cluster, watch
            self._injector = Injector(
                cluster,
                self._plan,
                rng=random.Random(f"targets {self._config.fault_seed}"),
                leader=lambda: _leader(watch.leaders, self._plan, leaders),
            )
            try:
                self.up.start(cluster, display, signals)
                self._wait_for_training()
                self._injector.prepare()
                display.note("every island trains; faults begin")
                self._storm()
            except (GaveUp, Unavailable, Interrupted) as err:
                return self.up.cut_short(err, display)
            finally:
                self._end()
        return 0

    def _end(self) -> None:
        """Takes every fault back, ends every process, and completes the recording."""
        recording = self.recording
        self.up.ended_s = recording.ended_s = time.monotonic()
        recording.began_s = recording.began_s or recording.ended_s
        self._injector.end_all(time.monotonic())
        names = self._cluster.running() | {event.process for _, event in recording.changes}
        self._cluster.stop()
        self._observer.look()
        self.up.restarts = {name: self._cluster.restarts(name) for name in names}
        recording.happenings = self._injector.happenings

    def _adapted(self, spec: ProcessSpec) -> ProcessSpec:
        """Gives every process of ours a clock that can jump, and every island a pulse."""
        role = role_of(spec.name)
        if role is Role.REDIS:
            return spec
        offset = clock_file(self._plan.run_dir, spec.name)
        clocks.write_offset(offset, 0.0)
        environment = {**spec.environment, clocks.VARIABLE: str(offset)}
        command = list(spec.command)
        if role is Role.ISLAND:
            command += ["--pulse", str(pulse_file(self._plan.run_dir, spec.name))]
        return dataclasses.replace(spec, command=command, environment=environment)

    def _wait_for_training(self) -> None:
        """Waits until every island has run a few steps and something is merged: all is compiled then.

        Raises:
            Unavailable: That takes too long.
        """
        recording, ends_s = self.recording, time.monotonic() + START_WITHIN_S
        while not (
            all(len(recording.steps.get(island, ())) >= 3 for island in recording.islands)
            and any(each.version > 0 for each in recording.versions)
        ):
            if time.monotonic() > ends_s:
                cure = f"see the logs in {self._plan.run_dir / 'logs'}"
                raise Unavailable(f"within {START_WITHIN_S:g} s not every island trained; {cure}", definite=True)
            self._turn()
        self._turn_until(time.monotonic() + CALM_DOWN_S)
        recording.began_s = time.monotonic()
        self.up.first_step_s = min(steps[0].at_s for steps in recording.steps.values()) - self.up.started_s

    def _storm(self) -> None:
        began_s = self.recording.began_s
        for fault in self._faults:
            self._turn_until(began_s + fault.at_s)
            if self._ended:
                return
            happening = self._injector.inject(fault, time.monotonic())
            lasts = f"for {fault.for_s:g} s" if fault.for_s else ""
            self._tell(happening, f"could not be done: {happening.skipped}" if happening.skipped else lasts)
        self._turn_until(began_s + self._config.seconds)
        self._turn_until(max((each.at_s + each.fault.for_s for each in self._injector.active), default=0.0))
        self._turn_until(time.monotonic() + self._config.settle_s)

    # --- what is done twenty times a second ---------------------------------------------------------------------

    def _turn_until(self, at_s: float) -> None:
        """Runs the loop until a time, or until the run has ended."""
        while time.monotonic() < at_s and not self._ended:
            self._turn(at_s)

    def _turn(self, until_s: float = float("inf")) -> None:
        """Runs the loop once: polls processes, ends faults, observes, shows; then sleeps for a tick.

        Raises:
            GaveUp: A process of the run could not be kept alive.
            Interrupted: A signal came.
        """
        self._signals.check()
        for event in self._cluster.poll():
            self._take_note(event)
        now_s = time.monotonic()
        for happening in self._injector.advance(now_s):
            if happening.fault.for_s:
                self._tell(happening, "is over")
        self._observer.look()
        self._show(now_s)
        time.sleep(max(0.0, min(TICK_S, until_s - time.monotonic())))

    def _take_note(self, event: ProcessEvent) -> None:
        self.recording.changes.append((time.monotonic(), event))
        match event.change:
            case Change.GAVE_UP if role_of(event.process) not in (Role.ROGUE, Role.EVALUATION):
                raise GaveUp(event.detail)
            case Change.ENDED if role_of(event.process) is Role.AGGREGATOR:
                self._ended = True
            case _:
                self._note(text := event.detail.partition("\n")[0])
                run_directory.tell(self._plan.run_dir, event.process, text)

    def _tell(self, happening: Happening, what: str) -> None:
        whom = " + ".join(happening.processes)
        text = " ".join(filter(None, (f"#{happening.number} {happening.fault.kind}", whom, what)))
        self._note(text)
        run_directory.tell(self._plan.run_dir, happening.processes[0] if happening.processes else "", text)

    def _note(self, text: str) -> None:
        """Writes a line that stays, with the time since the beginning."""
        began_s = self.recording.began_s
        since = f"[{time.monotonic() - began_s:6.1f} s] " if began_s else ""
        self._display.note(f"{since}{text}")

    def _show(self, now_s: float) -> None:
        """Shows where the run stands, once a second."""
        status = self._watch.latest
        if status is None or now_s < self._next_show_s:
            return
        self._next_show_s = now_s + SHOW_EVERY_S
        progress = progress_of(status, self._rate.update(now_s, status))
        lasting = ", ".join(f"{each.fault.kind} {' + '.join(each.processes)}" for each in self._injector.active)
        self._display.show(status, progress, now_s, also=f"faults: {lasting}" if lasting else "")


def _leader(holders: Sequence[str], plan: LocalPlan, rng: random.Random) -> str | None:
    """Returns the process that holds a lease (any shard's), by the name of its store."""
    stores = {read_name(plan.store_of(name)): name for name in plan.aggregator_ids}
    leading = [stores[holder] for holder in holders if holder in stores]
    return rng.choice(leading) if len(leading) > 1 else next(iter(leading), None)
