"""Runs :class:`aggregator.rounds.core.Aggregator`: sockets, store, workers and lease. Shell.

Events from sockets, threads and the timer pass through one queue into the core, one at a time, and what it answers is
done in order. Nothing in the pump waits: what takes time is handed on (:mod:`aggregator.process.workers`,
:mod:`aggregator.process.broker_links`) and comes back as an event, so heartbeats are answered during a merge as at any
other time.

With failover, :mod:`aggregator.standby.replication` stands between the disk and the core: what is durable here is
reported to the core once it is durable at the standbys too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar, assert_never

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import (
    Action,
    Completion,
    Event,
    Fenced,
    Finished,
    KeepFiles,
    Manifested,
    Merge,
    NewLineage,
    Note,
    NotLetIn,
    Persist,
    Persisted,
    Plant,
    Publish,
    Received,
    SaveRun,
    Send,
    Stop,
    Tick,
)
from aggregator.process.broker_links import BrokerLinks
from aggregator.process.lease import LeaseKey, Term
from aggregator.process.telemetry import Telemetry
from aggregator.process.workers import Workers
from aggregator.rounds.core import Aggregator
from aggregator.standby.replicas import run_message
from aggregator.standby.replication import Replication
from aggregator.standby.replication_events import (
    Deliver,
    Deposed,
    Followed,
    GiveUp,
    Local,
    Outranked,
    Renew,
    Replicate,
    ReplicateRun,
    ReplicationAction,
    ReplicationEvent,
)
from aggregator.state.metrics import Leading
from aggregator.store.recording import Recorder
from aggregator.store.store import Loaded, Store
from aggregator.store.tape import Tape, start_line
from broker.base.errors import ConfigError
from broker.process import clocks, logs
from broker.registry.registry import Registry
from broker.routing.directory import STANDBY
from broker.transport.sockets import Context
from broker.wire.messages import Attached, Contribution, Follow, HostPart, Phase

log = logs.get(__name__)

T = TypeVar("T")

#: The last report to Redis may take so long.
LAST_REPORT_S = 0.8
#: Events that may wait for the core, and contributions that may; then a socket waits, and the broker's queues hold what
#: comes.
MAX_EVENTS, MAX_PAYLOADS = 1000, 64
#: This many of the first line in a row go before one of the second that waits.
IN_A_ROW = 16
#: This many events that are there are handed out before other tasks have their turn: to read a payload takes longer.
AT_A_TIME = 4
#: The timer's resolution: a deadline that has passed already must not keep the loop from the sockets.
MIN_WAIT_S = 0.0005


class EventLines(Generic[T]):
    """Events that wait for the core, in two lines: what carries tensors waits behind all else.

    A thousand islands hand over within a second or two. A heartbeat that came behind them waited for all of them; now
    it waits for one.

    Args:
        most: How many events may wait in the first line, and in the second; who has another one waits with it.
    """

    def __init__(self, most: tuple[int, int]) -> None:
        self._first: asyncio.Queue[T] = asyncio.Queue(most[0])
        self._second: asyncio.Queue[T] = asyncio.Queue(most[1])
        self._some = asyncio.Event()
        self._in_a_row = 0
        self._taken = 0

    async def put(self, event: T, *, behind: bool = False) -> None:
        """Adds an event to the first line, or to the second; waits while that is full."""
        await (self._second if behind else self._first).put(event)
        self._some.set()

    def empty(self) -> bool:
        """Returns True if nothing waits."""
        return self._first.empty() and self._second.empty()

    def get_nowait(self) -> T:
        """Returns the next event.

        Raises:
            asyncio.QueueEmpty: There is none.
        """
        if self._first.empty() or (self._in_a_row >= IN_A_ROW and not self._second.empty()):
            self._in_a_row = 0
            return self._second.get_nowait()
        self._in_a_row += 1
        return self._first.get_nowait()

    async def get_there(self) -> T | None:
        """Returns the next event that is there, at times after a turn of other tasks; None without any."""
        if self.empty():
            return None
        self._taken += 1
        if self._taken % AT_A_TIME == 0:
            await asyncio.sleep(0)  # under a steady stream nobody else would ever run
        return self.get_nowait()

    async def get(self) -> T:
        """Returns the next event; waits for one."""
        while self.empty():
            self._some.clear()
            await self._some.wait()
        return self.get_nowait()


class Leader:
    """One stretch of leading: the core, its pump, and the tasks around it.

    Args:
        config: Of the process.
        context: Likewise.
        store: Loaded.
        loaded: What it holds.
        tape: Of the process, if it keeps one.
        registry: For the reports; closed by the caller.
        term: With failover, the right to lead.
        least_epoch: Without failover, the epoch to begin with; one higher than the store's, if that is more.

    Attributes:
        core: Which decides.
        lineage: What the core has ordered, once it has: a new lineage is to begin.
        deposed: Who leads instead, once somebody does.
    """

    def __init__(
        self,
        config: AggregatorConfig,
        context: Context,
        store: Store,
        loaded: Loaded,
        tape: Tape | None,
        registry: Registry,
        term: Term | None,
        *,
        least_epoch: int = 1,
    ) -> None:
        self.lineage: NewLineage | None = None
        self.deposed: Deposed | None = None
        self._config = config
        self._clock = clocks.monotonic
        self._events: EventLines[Event | ReplicationEvent] = EventLines((MAX_EVENTS, MAX_PAYLOADS))
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        commits = loaded.fragments
        now_s = self._clock()
        epoch = least_epoch if term is None else term.epoch
        founding = None if term is None else term.founding
        if tape is not None:
            tape.write(start_line(config, now_s, loaded.run, commits, epoch=epoch, founding=founding))
        self.core = Aggregator(config, now_s=now_s, record=loaded.run, commits=commits, epoch=epoch, founding=founding)
        self._term = term
        self._replication = None
        if term is not None:
            self._replication = Replication(
                name=term.name,
                epoch=term.epoch,
                lease_s=config.lease_s,
                standby_lag_s=config.standby_lag_s,
                commits=commits,
                foundings=self.core.run.record.foundings,
                now_s=now_s,
            )
        self._record: SaveRun | None = None  # the newest
        self._standby_routes: dict[str, int] = {}  # by which broker each standby was heard last
        self._wire = BrokerLinks(context, config, self._heard)
        self._workers = Workers(
            store,
            loaded.fragments,
            deliver=self._made,
            spawn=self._spawn,
            recorder=_recorder(config),
        )
        self._telemetry = Telemetry(
            config,
            self.core.run,
            tape,
            registry,
            lease=LeaseKey(registry, config.shard) if term is None else None,
            holder=store.name,
            clock=self._clock,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until the core has finished; if a task fails, all end and its error is raised, in a group."""
        try:
            async with self._wire, self._group:
                for work in self._wire.work():
                    self._spawn(work)
                self._spawn(self._workers.warm_up())
                self._spawn(self._workers.look_at_files())
                for work in self._telemetry.work():
                    self._spawn(work)
                self._spawn(self._stop_when(stop))
                await self._pump()
                # Threads are not waited for here: a merge or a write whose completion the core never hears of is
                # what a crash would have left as well.
                for task in self._tasks:
                    task.cancel()
        except BaseException:
            if self.deposed is None:
                self._telemetry.write_report()
            raise
        if self.deposed is None:
            await self.report()

    async def report(self) -> None:
        """Writes the report, and how the run ended to Redis; again where there is more to say after the end."""
        self._telemetry.write_report()
        try:
            async with asyncio.timeout(LAST_REPORT_S):
                if self._term is not None and self.core.run.phase is Phase.ENDED:
                    await self._term.end()
                await self._telemetry.report_now()  # so that status knows how it ended
        except TimeoutError:
            log.warning("redis.lost", detail=f"no answer to the last report within {LAST_REPORT_S} s")

    def leading(self) -> Leading:
        """Returns the figures of the moment, for metrics."""
        replication = self._replication
        standbys = None if replication is None else {n: n in replication.in_sync for n in replication.standbys}
        return self._telemetry.leading(standbys)

    def report_too(self, troubles: Callable[[], tuple[str, ...]]) -> None:
        """Has status say what else is wrong with this process, as ``troubles`` returns it."""
        self._telemetry.more_troubles = troubles

    async def close(self) -> None:
        """Waits for what the threads are at; the store may be closed afterwards."""
        await self._workers.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work, name=getattr(work, "__qualname__", None))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the pump -------------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        now_s = self._clock()
        await self._perform(self.core.start(now_s), now_s)
        while not self.core.finished and self.deposed is None:
            event = await self._next_event()
            now_s = self._clock()
            if isinstance(event, ReplicationEvent):
                assert self._replication is not None
                await self._replicate(self._replication.handle(event, now_s), now_s)
                continue
            if self._replication is not None and now_s >= self._replication.next_deadline_s():
                # Whatever has happened: under a steady stream there is no tick, and the lease must not run out.
                await self._replicate(self._replication.tick(now_s), now_s)
            await self._feed(event, now_s)

    async def _feed(self, event: Event, now_s: float) -> None:
        """Tells the core of an event and carries out what it answers."""
        self._telemetry.heard(event, now_s)
        if isinstance(event, Persisted):
            self._workers.versions[event.fragment_id].settle(event.fragment_version)
        await self._perform(self.core.handle(event, now_s), now_s)

    async def _next_event(self) -> Event | ReplicationEvent:
        """Returns what has happened, or Tick at the next deadline."""
        if (event := await self._events.get_there()) is not None:
            return event
        now_s = self._clock()
        deadline_s = self.core.next_deadline_s()
        if self._replication is not None:
            deadline_s = min(deadline_s or math.inf, self._replication.next_deadline_s())
        try:
            async with asyncio.timeout(None if deadline_s is None else max(MIN_WAIT_S, deadline_s - now_s)):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    async def _perform(self, actions: list[Action], now_s: float) -> None:
        """Carries actions out, in order; none of them is waited for."""
        for action in actions:
            match action:
                case Send():
                    await self._wire.send(action)
                case Publish():
                    self._wire.publish(action, self.core.run.epoch, self._workers.payload(action))
                case Plant():
                    self._workers.plant(action)
                case Merge():
                    self._workers.merge(action)
                case Persist():
                    # What led to a version had better be on the tape before it is durable.
                    self._telemetry.flush_tape_soon()
                    self._workers.persist(action)
                    if self._replication is not None:
                        await self._replicate(self._replication.persist(action.commit, now_s), now_s)
                case SaveRun():
                    self._record = action
                    self._workers.save_run(action)
                case KeepFiles():
                    self._workers.keep_files(action)
                case Manifested(manifest=manifest):
                    self._wire.expect(manifest)
                    self._workers.manifest = manifest
                case Note():
                    self._telemetry.note(action, now_s)
                case NewLineage():
                    self.lineage = action
                case Finished():
                    pass  # the pump looks for itself
                case _:
                    assert_never(action)

    # --- the standbys -----------------------------------------------------------------------------------------------

    async def _heard(self, received: Received | Fenced | NotLetIn) -> None:
        """Takes a message in: what standbys say is not for the core."""
        message = received.envelope.message if isinstance(received, Received) else None
        if isinstance(message, Attached) and self._replication is not None:
            self._replication.reached(self._clock())
        if isinstance(received, Fenced) and self._replication is not None:
            await self._events.put(received)
            await self._events.put(Outranked())
        elif not isinstance(received, Received) or not isinstance(message, Follow):
            await self._events.put(received, behind=isinstance(message, Contribution | HostPart))
        elif self._replication is not None:
            name = received.envelope.sender.removeprefix(STANDBY)
            self._standby_routes[name] = received.broker
            await self._events.put(Followed(name=name, follow=message))

    async def _made(self, event: Event) -> None:
        """Takes a completion of the workers in: what has become durable here is not yet durable everywhere."""
        if self._replication is not None and isinstance(event, Completion):
            await self._events.put(Local(event=event))
        else:
            await self._events.put(event)

    async def _replicate(self, actions: list[ReplicationAction], now_s: float) -> None:
        """Carries out what :mod:`aggregator.standby.replication` has decided."""
        assert self._replication is not None
        assert self._term is not None
        epoch = self._term.epoch
        for action in actions:
            match action:
                case Replicate(to=to, commit=commit):
                    read = self._workers.versions[commit.fragment_id].read(commit)
                    if read is not None:
                        self._wire.replicate(to, self._standby_routes.get(to), commit, epoch, read)
                case ReplicateRun(to=to, serial=serial):
                    if self._record is not None and self._record.serial >= serial:
                        message = run_message(self._record.record, self._config.shard, epoch, self._record.serial)
                        self._wire.replicate_run(to, self._standby_routes.get(to), message)
                case Renew(in_sync=in_sync):
                    self._spawn(self._renew(self._term, in_sync))
                case Deliver(event=event):
                    await self._feed(event, now_s)
                case GiveUp(to=to):
                    await self._term.give_up(to)
                case Deposed():
                    self.deposed = action
                case Note():
                    self._telemetry.note(action, now_s)
                case _:
                    assert_never(action)

    async def _renew(self, term: Term, in_sync: tuple[str, ...]) -> None:
        heard = () if self._replication is None else self._replication.standbys
        await self._events.put(await term.renew(in_sync, heard))

    # --- around it --------------------------------------------------------------------------------------------------

    async def _stop_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        await self._events.put(Stop())


def _recorder(config: AggregatorConfig) -> Recorder | None:
    """Returns what keeps merged payloads, beside the tape; ConfigError if there is no tape to be beside."""
    if not config.record_payloads:
        return None
    if config.tape is None:
        raise ConfigError("record_payloads", True, "keeps payloads beside the tape: give --tape FILE too")
    return Recorder(config.tape.with_suffix(".payloads"))
