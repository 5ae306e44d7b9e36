"""One aggregator: the pump around :class:`aggregator.core.Aggregator`, and everything that it drives.

Shell. Events from sockets, threads and the timer pass through one queue into the core, one at a time, and what it
answers is done in order. Nothing in the pump waits: what takes time is handed on (:mod:`aggregator.workshop`,
:mod:`aggregator.wire`) and comes back as an event, so heartbeats are answered during a merge as at any other time.

With failover, a process leads for one term at a time, and follows between its terms (:mod:`aggregator.follower`). While
it leads, :mod:`aggregator.replication` stands between the disk and the core: what is durable here is reported to the
core once it is durable at the standbys too.

:class:`ops.virtual.aggregator.SimAggregator` is the same pump in virtual time.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Self, assert_never

import zmq.asyncio

from aggregator import summary
from aggregator.candidate import Lead
from aggregator.config import AggregatorConfig
from aggregator.core import Aggregator
from aggregator.events import (
    Action,
    Commit,
    Event,
    Fenced,
    Finished,
    Manifested,
    Merge,
    NewLineage,
    Note,
    Persist,
    Persisted,
    PersistFailed,
    Plant,
    Publish,
    Received,
    RenewBulk,
    RunSaved,
    RunSaveFailed,
    SaveRun,
    Send,
    Stop,
    Tick,
)
from aggregator.follower import Follower
from aggregator.founding import Founding
from aggregator.notes import NoteLog
from aggregator.recording import Recorder
from aggregator.replicas import run_message
from aggregator.replication import (
    Deliver,
    Deposed,
    Followed,
    GiveUp,
    Local,
    Outranked,
    Renew,
    Renewed,
    RenewFailed,
    Replicate,
    ReplicateRun,
    Replication,
    ReplicationAction,
    ReplicationEvent,
)
from aggregator.reporter import Reporter, Snapshot
from aggregator.store import Loaded, Store, newer_but_damaged
from aggregator.summary import Traffic
from aggregator.tape import Tape, event_line, note_line, start_line
from aggregator.wire import Wire
from aggregator.workshop import Workshop
from broker import clocks, logs
from broker.config import DEFAULT_REDIS_URL
from broker.directory import STANDBY
from broker.errors import ConfigError, Unavailable
from broker.lease import LeaseKey
from broker.messages import Attached, Follow, Phase
from broker.registry import Registry

log = logs.get(__name__)

TAPE_FLUSH_S = 0.5
#: The last report to Redis may take so long.
LAST_REPORT_S = 0.8
#: Events that may wait for the core; then the sockets wait, and the broker's queues hold what comes.
MAX_EVENTS = 1000
#: The timer's resolution: a deadline that has passed already must not keep the loop from the sockets.
MIN_WAIT_S = 0.0005


async def serve(
    config: AggregatorConfig, *, stop: asyncio.Event, ready: Callable[[Aggregator], None] = lambda _: None
) -> None:
    """Runs the aggregator until the run has ended or ``stop`` is set; then writes the report.

    Args:
        config: Resolved settings.
        stop: Ends the aggregator within about a second, wherever the run stands.
        ready: Called once with the core, when the store is loaded; for tests to look at.

    Raises:
        ConfigError: A setting cannot work, such as a store that belongs to another run.
        Unavailable: The store cannot be used.
    """
    with ExitStack() as stack:
        tape = None
        if config.tape is not None:
            tape = Tape(config.tape)
            stack.callback(tape.close)
        store = stack.enter_context(Store.open(config.store))
        loaded = load_for(store, config, mendable=config.failover)
        context = zmq.asyncio.Context()
        stack.callback(context.term)
        try:
            if not config.failover:
                await _lead(config, context, store, loaded, tape, None, stop, ready)
                return
            while True:
                term = await _follow(config, context, store, loaded, stop)
                if term is None:
                    break
                async with term:
                    deposed = await _lead(config, context, store, load_for(store, config), tape, term, stop, ready)
                if not deposed:
                    break
                loaded = load_for(store, config, mendable=True)
        except BaseExceptionGroup as group:
            # A task met something that somebody must put right: that is what is to be said, not which task it was.
            curable = group.subgroup((ConfigError, Unavailable))
            if curable is None:
                raise
            raise _first(curable) from group


class _Term:
    """The right to lead under one epoch, with the lease that says so."""

    def __init__(self, name: str, lead: Lead, registry: Registry, shard: int) -> None:
        self.name, self.epoch, self.founding = name, lead.epoch, lead.founding
        self.lease = LeaseKey(registry, shard)
        self._registry = registry

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._registry.aclose()


async def _follow(
    config: AggregatorConfig, context: zmq.asyncio.Context, store: Store, loaded: Loaded, stop: asyncio.Event
) -> _Term | None:
    """Stands by until this process may lead; None if it was stopped, or the run has ended."""
    registry = Registry(config.redis_url or DEFAULT_REDIS_URL, config.run_id)
    follower = Follower(config, context, store, loaded, LeaseKey(registry, config.shard))
    log.info("aggregator.stands_by", run=config.run_id, broker=config.broker, name=store.name, redis=registry.address)
    lead = None
    try:
        lead = await follower.run(stop)
    finally:
        if lead is None:
            await registry.aclose()
    return None if lead is None else _Term(store.name, lead, registry, config.shard)


async def _lead(
    config: AggregatorConfig,
    context: zmq.asyncio.Context,
    store: Store,
    loaded: Loaded,
    tape: Tape | None,
    term: _Term | None,
    stop: asyncio.Event,
    ready: Callable[[Aggregator], None],
    *,
    least_epoch: int = 1,
) -> bool:
    """Leads until the run has ended, it is stopped, or deposed, which is what it returns."""
    registry = Registry(config.redis_url or DEFAULT_REDIS_URL, config.run_id)
    service = _Service(config, context, store, loaded, tape, registry, term, least_epoch=least_epoch)
    epoch = service.core.run.epoch
    log.info(
        "aggregator.ready",
        run=config.run_id,
        broker=config.broker,
        store=str(config.store),
        epoch=epoch,
        redis=registry.address,
    )
    ready(service.core)
    try:
        await service.run(stop)
    finally:
        service.close()
        await registry.aclose()
    if service.lineage is not None:
        order = service.lineage
        store.begin_lineage(order.above, order.epoch)
        log.warning("store.new_lineage", above=str(dict(order.above)), epoch=order.epoch)
        again = load_for(store, config)
        return await _lead(config, context, store, again, tape, term, stop, ready, least_epoch=order.epoch)
    if service.deposed is None:
        log.info("aggregator.ended", run=config.run_id, phase=service.core.run.phase)
        return False
    log.warning("aggregator.deposed", epoch=epoch, by=service.deposed.holder, their_epoch=service.deposed.epoch)
    return True


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def load_for(store: Store, config: AggregatorConfig, *, mendable: bool = False) -> Loaded:
    """Returns what the store holds, if this run can go on from it; or follow a leader that mends it (``mendable``).

    Raises:
        ConfigError: It belongs to another run, or to another shard of it.
        Unavailable: It is damaged beyond what a restart may pass over.
    """
    loaded = store.load()
    for damaged in loaded.damaged:
        log.error("store.damaged", path=str(damaged.path), problem=damaged.problem)
    if loaded.run is None:
        return loaded
    if loaded.run["run_id"] != config.run_id:
        cure = f"holds the run {loaded.run['run_id']!r}: give --run {loaded.run['run_id']}, or another --store"
        raise ConfigError("store", str(config.store), cure)
    shard, shards = loaded.run.get("shard", (config.shard, config.shards))  # which older stores do not say
    if (shard, shards) != (config.shard, config.shards):
        # Its fragments would not be all that this shard has, and so count as never begun.
        cure = f"is that of shard {shard} of {shards}: give --shard {shard} --shards {shards}, or another --store"
        raise ConfigError("store", str(config.store), cure)
    if mendable:
        return loaded
    given_up: dict[int, int] = {}
    for p, damaged in newer_but_damaged(loaded):
        # Islands may have seen it. Made again with other bytes, it would part them from this run for good.
        if config.new_lineage:
            given_up[p] = max(int(damaged.path.stem), given_up.get(p, -1))
            continue
        kept = loaded.fragments[p][0].fragment_version
        cure = (
            f"is damaged ({damaged.problem}): restore it from a copy, such as a standby's; or give up what is in "
            f"it and go on from version {kept}, with --new-lineage"
        )
        raise ConfigError("store", str(damaged.path), cure)
    lost = {int(d.path.parent.name) for d in loaded.damaged if d.path.parent.name.isdecimal()} - set(loaded.fragments)
    if lost:
        # Seeding anew over versions that islands have seen would be another run under the same name.
        which = ", ".join(map(str, sorted(lost)))
        what = f"the store {config.store} holds no whole version of fragment {which}"
        raise Unavailable(f"{what}; restore it from a copy, or start a new run with another --store", definite=True)
    if given_up:  # also where no peer has seen it: who could tell?
        store.begin_lineage(given_up, loaded.run["epoch"] + 1)
        log.warning("store.new_lineage", above=str(given_up), epoch=loaded.run["epoch"] + 1)
        return store.load()
    return loaded


class _Service:
    """The core, its pump, and the tasks around it."""

    def __init__(
        self,
        config: AggregatorConfig,
        context: zmq.asyncio.Context,
        store: Store,
        loaded: Loaded,
        tape: Tape | None,
        registry: Registry,
        term: _Term | None,
        *,
        least_epoch: int = 1,
    ) -> None:
        self.lineage: NewLineage | None = None
        self.deposed: Deposed | None = None
        self._config = config
        self._clock = clocks.monotonic
        self._events: asyncio.Queue[Event | ReplicationEvent] = asyncio.Queue(MAX_EVENTS)
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._tape = tape
        self._tape_due = asyncio.Event()
        commits = {p: commit for p, (commit, _) in loaded.fragments.items()}
        now_s = self._clock()
        epoch = least_epoch if term is None else term.epoch
        founding = None if term is None else term.founding
        if tape is not None:
            tape.write(start_line(config, now_s, loaded.run, commits, epoch=epoch, founding=founding))
        self.core = Aggregator(config, now_s=now_s, record=loaded.run, commits=commits, epoch=epoch, founding=founding)
        self._term = term
        self._replication = (
            None if term is None else _replication(config, term, commits, self.core.run.foundings, now_s)
        )
        self._record: SaveRun | None = None  # the newest
        self._ways: dict[str, int] = {}  # by which broker each standby was heard last
        self._wire = Wire(context, config, self._heard)
        self._workshop = Workshop(
            config,
            store,
            {p: state for p, (_, state) in loaded.fragments.items()},
            deliver=self._made,
            spawn=self._spawn,
            recorder=_recorder(config),
        )
        self._traffic = Traffic()
        self._notes = NoteLog()
        self._committed_at_s: dict[int, float] = {}
        self._reporter = Reporter(
            registry,
            collect=self._snapshot,
            shard=config.shard,
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
                self._spawn(self._workshop.warm_up())
                self._spawn(self._reporter.run())
                self._spawn(self._flush_tape())
                self._spawn(self._stop_when(stop))
                await self._pump()
                # Threads are not waited for here: a merge or a write whose completion the core never hears of is
                # what a crash would have left as well.
                for task in self._tasks:
                    task.cancel()
        finally:
            if self.deposed is None:
                self._write_report()
        if self.deposed is not None:
            return
        try:
            async with asyncio.timeout(LAST_REPORT_S):
                if self._term is not None and self.core.run.phase is Phase.ENDED:
                    with suppress(Unavailable):
                        await self._term.lease.end(holder=self._term.name, epoch=self._term.epoch)
                await self._reporter.write()  # so that status knows how it ended
        except TimeoutError:
            log.warning("redis.lost", detail=f"no answer to the last report within {LAST_REPORT_S} s")

    def close(self) -> None:
        """Waits for what the threads are at; the store may be closed afterwards."""
        self._workshop.close()

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
        self._observe(event, now_s)
        await self._perform(self.core.handle(event, now_s), now_s)

    async def _next_event(self) -> Event | ReplicationEvent:
        """Returns what has happened, or Tick at the next deadline."""
        if not self._events.empty():
            await asyncio.sleep(0)  # under a steady stream nobody else would ever run
            return self._events.get_nowait()
        now_s = self._clock()
        deadline_s = self.core.next_deadline_s(now_s)
        if self._replication is not None:
            deadline_s = min(deadline_s or math.inf, self._replication.next_deadline_s())
        try:
            async with asyncio.timeout(None if deadline_s is None else max(MIN_WAIT_S, deadline_s - now_s)):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    def _observe(self, event: Event, now_s: float) -> None:
        """Takes down what the core is about to hear."""
        if self._tape is not None:
            self._tape.write(event_line(event, now_s))
        match event:
            case Received(envelope=envelope):
                member = self.core.run.members.get(envelope.sender)
                if member is not None and member.incarnation == envelope.incarnation:
                    self._traffic.observe(envelope)
            case Persisted(fragment_id=p, fragment_version=version):
                self._workshop.settle(p, version)
                self._committed_at_s[p] = now_s
                self._reporter.changed()
            case _:
                pass

    async def _perform(self, actions: list[Action], now_s: float) -> None:
        """Carries actions out, in order; none of them is waited for."""
        for action in actions:
            match action:
                case Send():
                    await self._wire.send(action)
                case Publish():
                    self._wire.publish(action, self.core.run.epoch, self._workshop.durable[action.fragment_id])
                case RenewBulk(by=by):
                    self._wire.renew_bulk(by)
                case Plant():
                    self._workshop.plant(action)
                case Merge():
                    self._workshop.merge(action)
                case Persist():
                    self._tape_due.set()  # what led to a version had better be on the tape before it is durable
                    self._workshop.persist(action)
                    if self._replication is not None:
                        await self._replicate(self._replication.persist(action.commit, now_s), now_s)
                case SaveRun():
                    self._record = action
                    self._workshop.save_run(action)
                case Manifested(manifest=manifest):
                    self._wire.expect(manifest)
                    self._workshop.manifest = manifest
                case Note():
                    self._note(action, now_s)
                case NewLineage():
                    self.lineage = action
                case Finished():
                    pass  # the pump looks for itself
                case _:
                    assert_never(action)

    # --- the standbys -----------------------------------------------------------------------------------------------

    async def _heard(self, received: Received | Fenced) -> None:
        """Takes a message in: what standbys say is not for the core."""
        message = None if isinstance(received, Fenced) else received.envelope.message
        if isinstance(message, Attached) and self._replication is not None:
            self._replication.reached(self._clock())
        if isinstance(received, Fenced) and self._replication is not None:
            await self._events.put(received)
            await self._events.put(Outranked())
        elif isinstance(received, Fenced) or not isinstance(message, Follow):
            await self._events.put(received)
        elif self._replication is not None:
            name = received.envelope.sender.removeprefix(STANDBY)
            self._ways[name] = received.broker
            await self._events.put(Followed(name=name, follow=message))

    async def _made(self, event: Event) -> None:
        """Takes a completion of the workshop in: what has become durable here is not yet durable everywhere."""
        if self._replication is not None and isinstance(event, Persisted | PersistFailed | RunSaved | RunSaveFailed):
            await self._events.put(Local(event=event))
        else:
            await self._events.put(event)

    async def _replicate(self, actions: list[ReplicationAction], now_s: float) -> None:
        """Carries out what :mod:`aggregator.replication` has decided."""
        assert self._replication is not None
        assert self._term is not None
        epoch = self._term.epoch
        for action in actions:
            match action:
                case Replicate(to=to, commit=commit):
                    state = self._workshop.state_of(commit)
                    if state is not None:
                        self._wire.replicate(to, self._ways.get(to), commit, epoch, state)
                case ReplicateRun(to=to, serial=serial):
                    if self._record is not None and self._record.serial >= serial:
                        message = run_message(self._record.record, self._config.shard, epoch, self._record.serial)
                        self._wire.replicate_run(to, self._ways.get(to), message)
                case Renew(in_sync=in_sync):
                    self._spawn(self._renew(self._term, in_sync))
                case Deliver(event=event):
                    await self._feed(event, now_s)
                case GiveUp(to=to):
                    with suppress(Unavailable):  # then it runs out
                        await self._term.lease.give_up(holder=self._term.name, epoch=epoch, to=to)
                case Deposed():
                    self.deposed = action
                case Note():
                    self._note(action, now_s)
                case _:
                    assert_never(action)

    async def _renew(self, term: _Term, in_sync: tuple[str, ...]) -> None:
        heard = () if self._replication is None else self._replication.standbys
        try:
            granted, holder, epoch = await term.lease.renew(
                holder=term.name, epoch=term.epoch, in_sync=in_sync, standbys=heard
            )
        except Unavailable as err:
            await self._events.put(RenewFailed(detail=str(err)))
        else:
            await self._events.put(Renewed(granted=granted, holder=holder, epoch=epoch))

    def _note(self, note: Note, now_s: float) -> None:
        if self._tape is not None:
            self._tape.write(note_line(note, now_s))
        worth_reading = self._notes.write(note)
        if worth_reading is not None:
            self._reporter.note(note.name, worth_reading)

    # --- around it --------------------------------------------------------------------------------------------------

    async def _stop_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        await self._events.put(Stop())

    async def _flush_tape(self) -> None:
        while self._tape is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(TAPE_FLUSH_S):
                    await self._tape_due.wait()
            self._tape_due.clear()
            await asyncio.to_thread(self._tape.flush)

    def _snapshot(self) -> Snapshot:
        now_s = self._clock()
        return Snapshot(
            epoch=self.core.run.epoch,
            fragments=summary.fragments(self.core.run, self._committed_at_s, now_s),
            totals=summary.totals(self.core.run, now_s),
            refusals=summary.refusals(self.core.run),
        )

    def _write_report(self) -> None:
        path = self._config.report
        if path is None:
            return
        temporary = path.with_name(path.name + ".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(summary.report(self.core.run, self._traffic), indent=1) + "\n")
            os.replace(temporary, path)
        except OSError as err:
            log.error("report.failed", path=str(path), detail=err.strerror, cure="the log and Redis have the same")


def _replication(
    config: AggregatorConfig,
    term: _Term,
    commits: Mapping[int, Commit],
    foundings: tuple[Founding, ...],
    now_s: float,
) -> Replication:
    return Replication(
        name=term.name,
        epoch=term.epoch,
        lease_s=config.lease_s,
        standby_lag_s=config.standby_lag_s,
        commits=commits,
        foundings=foundings,
        now_s=now_s,
    )


def _recorder(config: AggregatorConfig) -> Recorder | None:
    """Returns what keeps merged payloads, beside the tape; ConfigError if there is no tape to be beside."""
    if not config.record_payloads:
        return None
    if config.tape is None:
        raise ConfigError("record_payloads", True, "keeps payloads beside the tape: give --tape FILE too")
    return Recorder(config.tape.with_suffix(".payloads"))
