"""One chaos run from its start to its end: the loop that starts, strikes, watches and shows.

Shell. Everything happens on the thread that started the processes; only Redis is asked from another one, because a
stopped Redis keeps whoever asks it waiting.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence

from aggregator.store.layout import read_name
from broker.process import clocks
from broker.process.signals import Interrupted, Signals
from broker.wire.errors import Unavailable
from ops.chaos import records
from ops.chaos.faults import Fault, Role, role_of
from ops.chaos.injector import Injector, Links, clock_file
from ops.chaos.plan import ChaosConfig
from ops.chaos.records import Happening, ProcessChange, Recording
from ops.chaos.view import ChaosView
from ops.chaos.watching import Observer, StatusWatch, pulse_file
from ops.processes.child_process import ProcessSpec
from ops.processes.cluster import Change, LocalCluster, ProcessEvent
from ops.processes.supervision import RestartPolicy
from ops.run.display import Display
from ops.run.local_plan import LocalPlan
from ops.run.up import GaveUp, LocalRun

TICK_S = 0.05
#: Waking later than this is worth remembering.
LATE_S = 0.05
#: Every island must train by then; JAX may have to compile first.
START_WITHIN_S = 180.0
#: Islands that start on a busy machine do so one after another; after the last one's first step it calms down.
CALM_DOWN_S = 1.0


class Drill:
    """A run with faults.

    Args:
        plan: Of the run, prepared.
        config: Times.
        faults: What is to happen, in the order of their times.
        links: The proxy, if there is one.

    Attributes:
        up: The run as ``up`` knows it: it starts the processes, and reports on them.
        recording: What was done and seen.
    """

    def __init__(self, plan: LocalPlan, config: ChaosConfig, faults: Iterable[Fault], *, links: Links | None) -> None:
        self._plan = plan
        self._config = config
        self._faults = deque(faults)
        self._links = links
        pace = plan.up.pace or (0.0,)
        islands = plan.island_ids
        self.recording = Recording(
            islands=islands, pace_s={island: pace[n % len(pace)] for n, island in enumerate(islands)}
        )
        self.up = LocalRun(plan=plan, started_s=time.monotonic())
        (plan.run_dir / "chaos").mkdir()

    def run(self, display: Display, signals: Signals) -> int:
        """Starts everything, strikes, and ends everything.

        Returns:
            0; 1 if the run did not go on, 2 if its settings are wrong; 128 + n if signal n came.
        """
        policy = RestartPolicy(max_delay_s=1.0)
        logs = self._plan.run_dir / "logs"
        watch = StatusWatch(self._plan.redis_url, self._plan.run_id)
        leaders = random.Random(f"leaders {self._config.fault_seed}")
        status = 0
        with LocalCluster(logs, policy=policy, adapt=self._adapted) as cluster, watch:
            injector = Injector(
                cluster,
                self._plan,
                rng=random.Random(f"targets {self._config.fault_seed}"),
                leader=lambda: _leader(watch.leaders, self._plan, leaders),
                links=self._links,
            )
            observer = Observer(self._plan.run_dir, self.recording)
            loop = _Loop(
                cluster, injector, observer, watch, ChaosView(display, self.recording), signals, self.recording
            )
            try:
                self.up.start(cluster, display, signals)
                self._wait_for_training(loop)
                injector.prepare()
                display.note("every island trains; faults begin")
                self._storm(loop)
            except (GaveUp, Unavailable) as err:
                self.up.note = str(err).partition("\n")[0]
                display.note(str(err))
                status = 2 if isinstance(err, GaveUp) and err.misset else 1
            except Interrupted as err:
                self.up.note = str(err)
                display.note(f"{err}; ending every process")
                status = 128 + err.number
            finally:
                self.up.ended_s = self.recording.ended_s = time.monotonic()
                self.recording.began_s = self.recording.began_s or self.recording.ended_s
                injector.end_all(time.monotonic())
                observer.look()
                names = cluster.running() | {each.process for each in self.recording.changes}
                cluster.stop()
                observer.look()
                self.up.restarts = {name: cluster.restarts(name) for name in names}
                self.recording.happenings = injector.happenings
                self.recording.jumps = injector.jumps
                self.recording.redis = watch.answers
        return status

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

    def _wait_for_training(self, loop: _Loop) -> None:
        """Returns when every island has run a few steps and something is merged: what had to be compiled, is.

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
            loop.turn()
        loop.turn_until(time.monotonic() + CALM_DOWN_S)
        recording.began_s = time.monotonic()
        self.up.first_step_s = min(steps[0].at_s for steps in recording.steps.values()) - self.up.started_s

    def _storm(self, loop: _Loop) -> None:
        began_s = self.recording.began_s
        while self._faults:
            at_s = began_s + self._faults[0].at_s
            loop.turn_until(at_s)
            if loop.ended:
                return
            loop.inject(self._faults.popleft())
        loop.turn_until(began_s + self._config.seconds)
        last_s = max((each.at_s + each.fault.for_s for each in loop.injector.active), default=0.0)
        loop.turn_until(last_s)
        loop.turn_until(time.monotonic() + self._config.settle_s)


class _Loop:
    """What is done twenty times a second."""

    def __init__(
        self,
        cluster: LocalCluster,
        injector: Injector,
        observer: Observer,
        watch: StatusWatch,
        view: ChaosView,
        signals: Signals,
        recording: Recording,
    ) -> None:
        self._cluster = cluster
        self.injector = injector
        self._observer = observer
        self._watch = watch
        self._view = view
        self._signals = signals
        self._recording = recording
        self.ended = False  #: the aggregator has ended the run by itself

    def turn_until(self, at_s: float) -> None:
        """Turns until a moment, or until the run has ended."""
        while time.monotonic() < at_s and not self.ended:
            self.turn(at_s)

    def turn(self, until_s: float = float("inf")) -> None:
        """Sees what happened, takes faults back, observes, shows; then sleeps for a tick.

        Raises:
            GaveUp: A process of the run could not be kept alive.
            Interrupted: A signal came.
        """
        self._signals.check()
        for event in self._cluster.poll():
            self._take_note(event)
        now_s = time.monotonic()
        for happening in self.injector.advance(now_s):
            self._say(happening, "is over")
        self._observer.look()
        self._view.show(self._watch.latest, self.injector.active, now_s)
        began_s = time.monotonic()
        nap_s = max(0.0, min(TICK_S, until_s - began_s))
        time.sleep(nap_s)
        late_s = time.monotonic() - began_s - nap_s
        if late_s > LATE_S:
            self._recording.late.append((began_s, late_s))

    def inject(self, fault: Fault) -> None:
        """Does a fault now."""
        happening = self.injector.inject(fault, time.monotonic())
        self._say(happening, f"could not be done: {happening.skipped}" if happening.skipped else "")

    def _say(self, happening: Happening, what: str) -> None:
        if what == "is over" and not happening.fault.for_s:
            return
        whom = " + ".join(happening.processes)
        lasts = f" for {happening.fault.for_s:g} s" if happening.fault.for_s and not what else ""
        self._view.note(f"#{happening.number} {happening.fault.kind} {whom}{lasts} {what}".rstrip())

    def _take_note(self, event: ProcessEvent) -> None:
        change = records.Change(event.change.value)
        self._recording.changes.append(ProcessChange(at_s=time.monotonic(), process=event.process, change=change))
        match event.change:
            case Change.GAVE_UP if role_of(event.process) is not Role.ROGUE:
                raise GaveUp(event.detail)
            case Change.ENDED if role_of(event.process) is Role.AGGREGATOR:
                self.ended = True
            case _:
                self._view.note(event.detail.partition("\n")[0])


def _leader(holders: Sequence[str], plan: LocalPlan, rng: random.Random) -> str | None:
    """Returns the process that holds a lease, by the name of its store: of several shards' any."""
    stores = {read_name(plan.store_of(name)): name for name in plan.aggregator_ids}
    leading = [stores[holder] for holder in holders if holder in stores]
    return rng.choice(leading) if len(leading) > 1 else next(iter(leading), None)
