"""The injector: does faults to the processes of a cluster, and takes them back when they are over.

Signals, limits and clocks of processes that the cluster runs, the files of its Redis, its links, and one island
more that misbehaves: all of it on this machine, and without any right that the user does not have.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from broker.base.errors import AtollError, Unavailable
from broker.process import clocks
from ops.chaos.recording import Happening
from ops.faults.kinds import Fault, FaultKind, Role, role_of
from ops.faults.plan import resolve
from ops.link_proxy.control import SOCKET_NAME, LinkControl
from ops.links.condition import LinkCondition
from ops.links.region import TO_REDIS
from ops.processes.child_process import ProcessSpec
from ops.processes.cluster import LocalCluster
from ops.processes.numeric import one_thread_environment
from ops.processes.redis_server import SNAPSHOT
from ops.run.daemons import our_environment
from ops.run.local_plan import LocalPlan

#: After its fault a process counts as disturbed for so long: "any" chooses somebody else.
RECOVERS_WITHIN_S = 8.0
#: A file of this size is full. Not 0: a limit of 0 is refused by some kernels for files that are open for appending.
FULL_BYTES = 1
#: A snapshot of Redis takes milliseconds; a longer wait is for nothing.
REDIS_TIMEOUT_S = 2.0
#: The link proxy answers within milliseconds; nothing else is done while it is asked.
LINKS_TIMEOUT_S = 1.0


class Injector:
    """The faults of one run.

    Args:
        cluster: The processes to strike.
        plan: The run's plan.
        rng: Chooses among those that a target may mean.
        leader: Returns the aggregator that publishes, if it is known.

    Attributes:
        happenings: Every fault so far, those that could not be done too.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        plan: LocalPlan,
        *,
        rng: random.Random,
        leader: Callable[[], str | None],
    ) -> None:
        self._cluster = cluster
        self._plan = plan
        self._rng = rng
        self._leader = leader
        self._links = LinkControl(plan.run_dir / SOCKET_NAME, within_s=LINKS_TIMEOUT_S)
        self._undo: dict[int, Callable[[], None]] = {}
        self.happenings: list[Happening] = []

    @property
    def active(self) -> list[Happening]:
        """The faults under way."""
        return [each for each in self.happenings if each.ended_s is None]

    def disturbed(self, now_s: float) -> set[str]:
        """Returns the processes that suffer from a fault, or did a moment ago."""
        late_s = now_s - RECOVERS_WITHIN_S
        recent = [each for each in self.happenings if each.ended_s is None or each.ended_s > late_s]
        return {process for each in recent for process in each.processes}

    def prepare(self) -> None:
        """Saves what faults will need: the data of Redis as they are at the beginning."""
        if self._plan.redis_port is None:
            return
        try:
            # A server that saves by itself just now refuses, for a moment.
            again = Retry(ConstantBackoff(0.1), retries=round(REDIS_TIMEOUT_S / 0.1))
            client = redis.Redis(
                port=self._plan.redis_port,
                socket_timeout=REDIS_TIMEOUT_S,
                retry=again,
                retry_on_error=[redis.ResponseError],
            )
            client.save()
            client.close()
            shutil.copy(self._plan.run_dir / SNAPSHOT, self._stale_file)
        except (redis.RedisError, OSError) as err:
            raise Unavailable(f"cannot keep a copy of Redis' data: {err}", definite=True) from err

    def inject(self, fault: Fault, now_s: float) -> Happening:
        """Does a fault now, and remembers to take it back; or notes why it cannot be done."""
        number = len(self.happenings) + 1
        processes, why_not = self._processes(fault, now_s)
        happening = Happening(number=number, fault=fault, processes=processes, at_s=now_s, skipped=why_not)
        self.happenings.append(happening)
        if not why_not:
            try:
                self._undo[number] = self._do(fault, processes)
            except (AtollError, OSError, ValueError) as err:
                happening.skipped = str(err) or type(err).__name__
        if happening.skipped:
            happening.ended_s, happening.processes = now_s, ()
        return happening

    def advance(self, now_s: float) -> list[Happening]:
        """Takes back the faults that are over, and returns them."""
        over = [each for each in self.active if now_s >= each.at_s + each.fault.for_s]
        self._end(over, now_s)
        return over

    def end_all(self, now_s: float) -> None:
        """Takes everything back now."""
        self._end(self.active, now_s)

    def _end(self, happenings: Iterable[Happening], now_s: float) -> None:
        for happening in happenings:
            happening.ended_s = now_s
            with contextlib.suppress(AtollError, OSError):  # a link or a process that is gone needs no taking back
                self._undo.pop(happening.number)()

    # --- whom ---------------------------------------------------------------------------------------------------

    def _processes(self, fault: Fault, now_s: float) -> tuple[tuple[str, ...], str]:
        running = {name for name in self._cluster.running() if self._cluster.pid(name) is not None}
        if fault.kind is FaultKind.OUTAGE:
            roles = (Role.AGGREGATOR, Role.BROKER, Role.REDIS)
            return tuple(sorted(name for name in running if role_of(name) in roles)), ""
        if not fault.targets:  # a process of its own
            name = f"rogue-{fault.kind}"
            return (name,), f"{name} is still there" if name in self._cluster.running() else ""
        chosen: list[str] = []
        for target in fault.targets:
            disturbed = self.disturbed(now_s) | set(chosen)
            leader = self._leader()
            name_or_none = resolve(target, running=running, disturbed=disturbed, leader=leader, rng=self._rng)
            if name_or_none is None:
                return (), f"there is no {target} that may be struck now"
            chosen.append(name_or_none)
        return tuple(dict.fromkeys(chosen)), ""

    # --- what ---------------------------------------------------------------------------------------------------

    def _do(self, fault: Fault, processes: tuple[str, ...]) -> Callable[[], None]:
        """Does a fault; returns the function that takes it back."""
        match fault.kind:
            case FaultKind.KILL | FaultKind.OUTAGE:
                for name in processes:
                    self._cluster.kill(name, down_s=fault.for_s)
                return _nothing
            case FaultKind.STOP:
                return self._stop(processes)
            case FaultKind.CLOCK:
                return self._jump(processes, float(fault.options["jump_s"]))
            case FaultKind.DISK_FULL:
                return self._fill_disk(processes)
            case FaultKind.WIPE | FaultKind.STALE:
                return self._replace_redis(fault.kind)
            case FaultKind.PARTITION | FaultKind.SLOW | FaultKind.CORRUPT | FaultKind.RESET:
                return self._worsen_links(processes, fault.options, fault.for_s)
            case FaultKind.CUT_REDIS:
                return self._worsen_links([name + TO_REDIS for name in processes], {"partition": True}, fault.for_s)
            case _:
                return self._start_rogue(processes[0], fault.kind, fault.options)

    def _stop(self, processes: tuple[str, ...]) -> Callable[[], None]:
        stopped = {name: self._cluster.pid(name) for name in processes}
        for name in processes:
            self._cluster.signal(name, signal.SIGSTOP)

        def go_on() -> None:
            for name, pid in stopped.items():
                if self._cluster.pid(name) == pid:  # a later life was never stopped
                    self._cluster.signal(name, signal.SIGCONT)

        return go_on

    def _jump(self, processes: tuple[str, ...], jump_s: float) -> Callable[[], None]:
        def shift(offset_s: float) -> None:
            for name in processes:
                clocks.write_offset(clock_file(self._plan.run_dir, name), offset_s)

        shift(jump_s)
        return lambda: shift(0.0)

    def _fill_disk(self, processes: tuple[str, ...]) -> Callable[[], None]:
        """Lets no file of the processes grow: writes fail as on a full disk. Only the soft limit is changed."""
        before: dict[int, tuple[int, int]] = {}
        for name in processes:
            pid = self._cluster.pid(name)
            if pid is not None:
                before[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, before[pid][1]))

        def free() -> None:
            for pid, limits in before.items():
                if pid in map(self._cluster.pid, processes):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

        return free

    def _replace_redis(self, kind: FaultKind) -> Callable[[], None]:
        """Kills Redis; the one that the supervisor starts finds no data, or those of the beginning."""
        snapshot = self._plan.run_dir / SNAPSHOT
        self._cluster.kill("redis")
        if kind is FaultKind.WIPE:
            snapshot.unlink(missing_ok=True)
        else:
            shutil.copy(self._stale_file, snapshot)
        return _nothing

    def _worsen_links(
        self, links: Iterable[str], condition: Mapping[str, float | bool], for_s: float
    ) -> Callable[[], None]:
        for name in links:
            self._links.set(name, LinkCondition.of(**condition), for_s=for_s)
        return _nothing  # the proxy takes it back by itself

    def _start_rogue(self, name: str, manner: FaultKind, options: Mapping[str, float | bool]) -> Callable[[], None]:
        config = ["--config", os.fspath(self._plan.config_file), "--island-id", name]
        config += ["--honest-s", str(options.get("honest_s", 0.0))]
        command = [sys.executable, "-P", "-m", "ops.chaos.rogue", "--manner", manner.value, *config]
        if self._plan.up.pace:
            command += ["--pace", str(self._plan.up.pace[0])]
        environment = our_environment(self._plan.redis_url) | one_thread_environment()
        self._cluster.start([ProcessSpec(name=name, command=command, environment=environment, ends_by_itself=True)])

        def end() -> None:
            self._cluster.stop([name], within_s=0.5)

        return end

    @property
    def _stale_file(self) -> Path:
        return self._plan.run_dir / "chaos" / "stale.rdb"


def clock_file(run_dir: Path, process: str) -> Path:
    """Returns the file with the offset of a process's clock."""
    return run_dir / "chaos" / f"{process}.clock"


def _nothing() -> None:
    """Does nothing: ends a fault that ends by itself."""
