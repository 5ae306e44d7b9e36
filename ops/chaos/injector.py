"""Does faults to the processes of a cluster, and takes them back when they are over.

Shell. Signals, limits and clocks of processes that the cluster runs, the files of its Redis, its links, and one island
more that misbehaves: all of it on this machine, and without any right that the user does not have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import redis

from broker.process import clocks
from broker.wire.errors import AtollError, Unavailable
from ops.chaos.faults import Fault, Kind, Role, option, resolve, role_of
from ops.chaos.records import ClockJump, Happening
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
#: A snapshot of Redis takes milliseconds; whoever waits longer waits for nothing.
REDIS_TIMEOUT_S = 2.0


class Links(Protocol):
    """The proxy between clients and broker, as far as faults need it."""

    def set(self, link: str, condition: Mapping[str, float | bool], *, for_s: float) -> None:
        """Gives a link a condition, as a table of keys, for a while; raises an AtollError if it cannot."""


class Injector:
    """The faults of one run.

    Args:
        cluster: Whose processes are struck.
        plan: Of the run.
        rng: Chooses among those that a target may mean.
        leader: Returns the aggregator that publishes, if it is known.
        links: The proxy, if there is one.

    Attributes:
        happenings: Every fault so far, those that could not be done too.
        jumps: Of clocks.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        plan: LocalPlan,
        *,
        rng: random.Random,
        leader: Callable[[], str | None],
        links: Links | None = None,
    ) -> None:
        self._cluster = cluster
        self._plan = plan
        self._rng = rng
        self._leader = leader
        self._links = links
        self._undo: dict[int, Callable[[float], None]] = {}
        self._ends_s: dict[int, float] = {}
        self.happenings: list[Happening] = []
        self.jumps: list[ClockJump] = []

    @property
    def active(self) -> list[Happening]:
        """The faults that last."""
        return [each for each in self.happenings if each.number in self._ends_s]

    def disturbed(self, now_s: float) -> set[str]:
        """Returns the processes that suffer from a fault, or did a moment ago."""
        late_s = now_s - RECOVERS_WITHIN_S
        recent = [each for each in self.happenings if each.ended_s is None or each.ended_s > late_s]
        return {process for each in recent for process in each.processes}

    def prepare(self) -> None:
        """Puts by what faults will need: Redis' data as they are at the beginning."""
        if self._plan.redis_port is None:
            return
        try:
            client = redis.Redis(port=self._plan.redis_port, socket_timeout=REDIS_TIMEOUT_S)
            client.save()
            client.close()
            shutil.copy(self._plan.run_dir / SNAPSHOT, self._stale_file)
        except (redis.RedisError, OSError) as err:
            raise Unavailable(f"cannot keep a copy of Redis' data: {err}", definite=True) from err

    def inject(self, fault: Fault, now_s: float) -> Happening:
        """Does a fault now, and remembers to take it back; or says why it cannot be done."""
        number = len(self.happenings) + 1
        processes, why_not = self._processes(fault, now_s)
        happening = Happening(number=number, fault=fault, processes=processes, at_s=now_s, skipped=why_not)
        if not why_not:
            try:
                undo = self._do(fault, processes, now_s)
            except (AtollError, OSError, ValueError) as err:
                happening = dataclasses.replace(happening, skipped=str(err) or type(err).__name__)
            else:
                self._undo[number], self._ends_s[number] = undo, now_s + fault.for_s
        if happening.skipped:
            happening = dataclasses.replace(happening, ended_s=now_s, processes=())
        self.happenings.append(happening)
        return happening

    def advance(self, now_s: float) -> list[Happening]:
        """Takes back what is over; returns it."""
        over = [number for number, ends_s in self._ends_s.items() if now_s >= ends_s]
        return [self._end(number, now_s) for number in over]

    def end_all(self, now_s: float) -> list[Happening]:
        """Takes everything back now."""
        return [self._end(number, now_s) for number in list(self._ends_s)]

    def _end(self, number: int, now_s: float) -> Happening:
        del self._ends_s[number]
        with contextlib.suppress(AtollError, OSError):  # a link or a process that is gone needs no taking back
            self._undo.pop(number)(now_s)
        happening = dataclasses.replace(self.happenings[number - 1], ended_s=now_s)
        self.happenings[number - 1] = happening
        return happening

    # --- whom ---------------------------------------------------------------------------------------------------

    def _processes(self, fault: Fault, now_s: float) -> tuple[tuple[str, ...], str]:
        running = {name for name in self._cluster.running() if self._cluster.pid(name) is not None}
        if fault.kind is Kind.OUTAGE:
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

    def _do(self, fault: Fault, processes: tuple[str, ...], now_s: float) -> Callable[[float], None]:
        """Does it; returns what takes it back."""
        match fault.kind:
            case Kind.KILL | Kind.OUTAGE:
                for name in processes:
                    self._cluster.kill(name, down_s=fault.for_s)
                return _nothing
            case Kind.STOP:
                return self._stop(processes)
            case Kind.CLOCK:
                return self._jump(processes, option(fault, "jump_s"), now_s)
            case Kind.DISK_FULL:
                return self._fill_disk(processes)
            case Kind.WIPE | Kind.STALE:
                return self._replace_redis(fault.kind)
            case Kind.PARTITION | Kind.SLOW | Kind.CORRUPT | Kind.RESET:
                return self._worsen_links(processes, fault.options, fault.for_s)
            case Kind.CUT_REDIS:
                return self._worsen_links([name + TO_REDIS for name in processes], {"partition": True}, fault.for_s)
            case Kind.NAN | Kind.SCALE | Kind.REPLAY | Kind.GARBAGE:
                return self._start_rogue(processes[0], fault.kind)

    def _stop(self, processes: tuple[str, ...]) -> Callable[[float], None]:
        stopped = {name: self._cluster.pid(name) for name in processes}
        for name in processes:
            self._cluster.signal(name, signal.SIGSTOP)

        def go_on(now_s: float) -> None:
            for name, pid in stopped.items():
                if self._cluster.pid(name) == pid:  # a later life was never stopped
                    self._cluster.signal(name, signal.SIGCONT)

        return go_on

    def _jump(self, processes: tuple[str, ...], jump_s: float, now_s: float) -> Callable[[float], None]:
        def shift(offset_s: float, at_s: float) -> None:
            for name in processes:
                clocks.write_offset(clock_file(self._plan.run_dir, name), offset_s)
                self.jumps.append(ClockJump(at_s=at_s, process=name, offset_s=offset_s))

        shift(jump_s, now_s)
        return lambda at_s: shift(0.0, at_s)

    def _fill_disk(self, processes: tuple[str, ...]) -> Callable[[float], None]:
        """No file of the process may grow: every write fails as on a full disk. Only the soft limit is changed."""
        before: dict[int, tuple[int, int]] = {}
        for name in processes:
            pid = self._cluster.pid(name)
            if pid is not None:
                before[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, before[pid][1]))

        def free(now_s: float) -> None:
            for pid, limits in before.items():
                if pid in map(self._cluster.pid, processes):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

        return free

    def _replace_redis(self, kind: Kind) -> Callable[[float], None]:
        """Kills Redis; the one that the supervisor starts finds no data, or those of the beginning."""
        snapshot = self._plan.run_dir / SNAPSHOT
        self._cluster.kill("redis")
        if kind is Kind.WIPE:
            snapshot.unlink(missing_ok=True)
        else:
            shutil.copy(self._stale_file, snapshot)
        return _nothing

    def _worsen_links(
        self, links: Iterable[str], condition: Mapping[str, float | bool], for_s: float
    ) -> Callable[[float], None]:
        if self._links is None:
            raise Unavailable("this run has no links", definite=True)
        for name in links:
            self._links.set(name, condition, for_s=for_s)
        return _nothing  # the proxy takes it back by itself

    def _start_rogue(self, name: str, manner: Kind) -> Callable[[float], None]:
        config = ["--config", os.fspath(self._plan.config_file), "--island-id", name]
        command = [sys.executable, "-P", "-m", "ops.chaos.rogue", "--manner", manner.value, *config]
        if self._plan.up.pace:
            command += ["--pace", str(self._plan.up.pace[0])]
        environment = our_environment(self._plan.redis_url) | one_thread_environment()
        self._cluster.start([ProcessSpec(name=name, command=command, environment=environment, ends_by_itself=True)])

        def end(now_s: float) -> None:
            self._cluster.stop([name], within_s=0.5)

        return end

    @property
    def _stale_file(self) -> Path:
        return self._plan.run_dir / "chaos" / "stale.rdb"


def clock_file(run_dir: Path, process: str) -> Path:
    """Where the offset of a process's clock stands."""
    return run_dir / "chaos" / f"{process}.clock"


def _nothing(now_s: float) -> None:
    """For faults that end by themselves."""
