"""The communication thread of an island: drives :class:`islands.protocol.core.Island` over sockets.

Shell. One thread with one event loop owns the core, both connections (:mod:`islands.session.connections`) and every
copy that waits to be encoded; what computes or waits is done in other threads (:mod:`islands.session.array_work`) and
comes back as an event.

The training thread appears as :class:`islands.session.exchange.Moment` values, and as two counters that are read before
each event: the core always knows where training stands. In virtual time this driver runs on another machine
(:mod:`ops.virtual.machine`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from broker.base.errors import worth_repeating
from broker.metrics.family import Family
from broker.metrics.serving import served
from broker.process import clocks, logs
from broker.wire.fragments import Region
from broker.wire.messages import (
    BROKER,
    Channel,
    Codec,
    Envelope,
    FleetState,
    Message,
    Refused,
    StatePart,
    Version,
    joining,
)
from islands.arrays.persistence import Persistence, Verdict, gone
from islands.arrays.placement import Leaf
from islands.interface.config import IslandConfig, refusal
from islands.protocol import events
from islands.protocol.core import Island
from islands.protocol.data_shares import TrainedBatch
from islands.protocol.metrics import families_of
from islands.protocol.paused import Paused
from islands.session.array_work import ArrayWork
from islands.session.connections import Connections, Posted, Unreadable
from islands.session.exchange import (
    CONNECTING,
    Due,
    Exchange,
    Install,
    JoinedRun,
    Moment,
    Offers,
    Returned,
    take_newest,
)
from islands.session.snapshots import Snapshots, Work
from islands.session.thread import CommunicationThread, cancel_all
from islands.session.training_state import Copies, Position, Snapshot

log = logs.get(__name__)


#: What is waited for between the connection and the first answer, for people.
WAITING = "waiting for the run's aggregator to answer"
#: The last word may take so long; the broker notices silence by itself.
GOODBYE_S = 0.5


class Session(CommunicationThread):
    """One island's membership in a run, from joining to leaving.

    Of several hosts the one that speaks has another (:class:`islands.hosts.speaker.SpeakerSession`).

    Args:
        config: Addresses and intervals.
        core: Fresh; touched by this session's thread alone.
        array_work: With the initial parameters.
        exchange: Shared with the training thread.
        due: What the core has for training, where that is not what the training thread looks at.
        num_hosts: Of the island.
        sequence: Of the last message of an earlier process of this life.
    """

    def __init__(
        self,
        config: IslandConfig,
        core: Island,
        array_work: ArrayWork,
        exchange: Exchange,
        *,
        due: Due | None = None,
        num_hosts: int = 1,
        sequence: int = 0,
    ) -> None:
        super().__init__(array_work, exchange)
        self._config = config
        self._core = core

        # Touched by the communication thread only.
        self._due, self._num_hosts = due or exchange.due, num_hosts
        self._handed: Mapping[str, frozenset[Region]] = {}  # of several hosts: what this one hands over
        self._boundaries = 0
        unreadable = Unreadable(config, core, exchange)
        ways = exchange.machine.context, self._receive, self._line
        self._wire = Connections(config, *ways, sequence=sequence, on_unreadable=unreadable)
        self._snapshots = Snapshots(config, core, array_work, exchange, self._due)
        self._offers = Offers(exchange, self._due)
        self._persistence = Persistence()
        self._timer: asyncio.TimerHandle | None = None
        self._copies: dict[int, Copies] = {}  # by fragment
        self._settling = 0  # installations that may be found corrupt yet
        self._warm = False  # everything that a boundary calls is compiled
        self._loss: float | None = None  # as last seen; None if it is not finite
        self._notes: Counter[tuple[str, str]] = Counter()

    # --- called by the training thread ------------------------------------------------------------------------

    def paused(self) -> Paused | None:
        """Returns a state for the next process of this life; None if there is none, or the thread hangs."""
        if not self.ended:
            return None
        return self._core.pause(self._config.run_id, self._wire.sequence)

    @property
    def checkpoint_file(self) -> Path | None:
        """This island's checkpoint, if it keeps one."""
        return self._snapshots.checkpoint_file

    # --- the thread -------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._open()
        metrics = served(self._config.metrics_host, self._config.metrics_port, self._metrics, list)
        async with metrics, self._beside(), self._wire, asyncio.TaskGroup() as self._tasks:
            self._spawn(self._begin_run())
            if self._leave_reason is None:
                await self._leaving.wait()
            self._catch_up()
            leaving = events.Leaving(reason=self._leave_reason or "ended", departure=self._departure)
            self._perform(self._core.handle(leaving, self._clock()))
            await self._goodbye()
            if self._timer is not None:
                self._timer.cancel()
            cancel_all()

    def _beside(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Returns a context around the connections."""
        return contextlib.nullcontext()

    async def _goodbye(self) -> None:
        await self._wire.emptied(Channel.CONTROL, GOODBYE_S)

    async def _begin_run(self) -> None:
        self._perform(self._core.start(self._clock()))
        self._wire.connect(self._core.broker)
        self._spawn(self._wire.run())
        self._after()

    def _look(self) -> None:
        self._catch_up()
        self._after()

    def _begin(self, works: Sequence[Work]) -> None:
        for work in works:
            self._spawn(self._finish(work))

    async def _finish(self, work: Work) -> None:
        """Does work that takes time, and tells the core."""
        event = await work()
        if event is not None:
            self._handle(event)

    # --- messages ---------------------------------------------------------------------------------------------

    def _line(self, stands: bool, no_address: str) -> None:
        """Tells the core whether there is a connection: it joins as soon as one stands. Says what lacks."""
        if not self._core.joined:
            name = self._config.brokers[self._core.broker]
            lacks = f"{CONNECTING}: the name in {name} is not found ({no_address})" if no_address else CONNECTING
            self._exchange.doing = WAITING if stands else lacks
            self._exchange.news.set()
        self._handle(events.Line(stands=stands))

    async def _receive(self, channel: Channel, envelope: Envelope) -> None:
        self._exchange.broker_heard_at_s = self._clock()
        match envelope.message:
            case Refused(kind="join") as refused:
                self._exchange.refused = refused  # who hears nothing else is not let in
            case _ if envelope.sender != BROKER:  # which speaks when nobody else does
                self._exchange.heard_at_s = self._clock()
            case _:
                pass
        flaw = ""
        carried = self._wire.carried if isinstance(envelope.message, FleetState) else None
        match envelope.message:
            case Version():
                envelope, flaw = await self._array_work.take(envelope)
            case StatePart():
                flaw = await self._array_work.inspect_part(envelope)
            case _:
                pass
        self._handle(events.Received(envelope=envelope, flaw=flaw, carried=carried))

    def _post(self, to: str, message: Message) -> None:
        core = self._core
        sender = core.island_id if core.joined else joining(core.nonce)
        self._wire.post(Posted(message, to, sender, core.incarnation))

    # --- the core ---------------------------------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        """Feeds an event to the core, after all that the training thread has done, and performs the answer."""
        self._catch_up()
        self._perform(self._core.handle(event, self._clock()))
        self._after()

    def _catch_up(self) -> None:
        exchange, core = self._exchange, self._core
        position = exchange.position  # before the moments: see islands.session.exchange
        now_s, deadline_s = self._clock(), core.next_deadline_s()
        if exchange.moments or (deadline_s is not None and now_s >= deadline_s):
            core.handle(self._vitals(), now_s)  # what the next heartbeat reports; nothing follows from it
        while exchange.moments:
            self._boundary(exchange.moments.popleft())
        if core.joined and position.step > core.at.step:
            boundary = events.Boundary(inner_step=position.step, tokens=position.tokens, trained=self._trained())
            self._perform(core.handle(boundary, now_s))
        while exchange.returned:
            self._spawn(self._judge(exchange.returned.popleft()))
        for event in self._snapshots.advance(now_s):
            self._perform(core.handle(event, now_s))

    def _boundary(self, moment: Moment) -> None:
        self._boundaries += 1
        self._settling += len(moment.installed)
        for install, beside in moment.installed:
            self._copies.pop(install.fragment_id, None)
            # Ahead of whatever the core asks of this fragment next.
            self._spawn(self._settle(install, beside))
        copies = {p: Copies(moment.at.step, self._boundaries, leaves) for p, leaves in moment.copied.items()}
        self._copies.update(copies)
        if moment.frozen:
            self._spawn(self._look_at_frozen(moment))
        if moment.snapshot is not None:
            self._spawn(self._snapshot(moment, moment.snapshot, self._boundaries))
        boundary = events.Boundary(
            inner_step=moment.at.step,
            tokens=moment.at.tokens,
            installed=tuple(install.fragment_id for install, _ in moment.installed),
            copied=tuple(moment.copied),
            trained=self._trained(),
            stopped=moment.stopped,
        )
        self._perform(self._core.handle(boundary, self._clock()))

    def _trained(self) -> tuple[tuple[int, TrainedBatch], ...]:
        """Takes out what the steps up to now, or a little further, were trained on."""
        waiting = self._exchange.trained
        return tuple(waiting.popleft() for _ in range(len(waiting)))

    def _perform(self, actions: Sequence[events.Action]) -> None:
        """Carries out actions; what takes time ends in an event."""
        for action in actions:
            match action:
                case events.Send():
                    self._post(action.to, action.message)
                case events.Connect():
                    self._connect(action.broker)
                case events.Joined():
                    self._joined(action)
                case events.Watch():
                    self._due.watched = action.fragments
                case events.Capture():
                    # Taken out now: by the time the task runs, a later boundary may have put another one there.
                    copies = self._copies.pop(action.fragment_id)
                    assert copies.step == action.step, "a capture names a copy that is gone"
                    self._begin_capture(action.fragment_id, copies, action.codec)
                case events.Prepare():
                    self._spawn(self._prepare(action))
                case events.EncodeSeed():
                    self._begin_seed(action.fragment_id)
                case events.RefreshOptimizer():
                    self._offers.recover()
                case events.CopyState():
                    self._begin(self._snapshots.gift())
                case events.CheckState():
                    self._begin([partial(self._snapshots.check, action)])
                case events.Settled():
                    self._snapshots.settled(action.detail)
                case events.Note():
                    self._note(action.name, action.fields)
                case events.Fail():
                    raise refusal(action.reason, action.cure, self._config, self._core.island_id)
                case _:
                    assert_never(action)

    def _after(self) -> None:
        """Publishes what the training thread looks at, and sets the timer."""
        exchange, core, due = self._exchange, self._core, self._due
        due.life, due.blocks, due.progress = core.incarnation, core.blocks, core.schedule.progress
        exchange.urgent = frozenset(p for p, fragment in core.fragments.items() if fragment.asked is not None)
        exchange.held_back = core.held_back
        startable = core.startable and self._warm
        now = core.done, core.delivered, core.finished and not self._settling, startable
        if now != (due.done, exchange.delivered, exchange.finished, exchange.startable):
            due.done, exchange.delivered, exchange.finished, exchange.startable = now
            exchange.news.set()
        deadline_s = core.next_deadline_s()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline_s is not None and self._leave_reason is None:
            self._timer = self._ring(deadline_s, lambda: self._handle(events.Tick()))

    def _vitals(self) -> events.Vitals:
        exchange = self._exchange
        loss = take_newest(exchange.losses)
        if loss is not None:
            self._loss = loss if math.isfinite(loss) else None
        return events.Vitals(
            loss=self._loss,
            step_time_s=exchange.step_time_s,
            sync_share=exchange.sync_share,
            bytes_up=self._wire.bytes_up,
            bytes_down=self._wire.bytes_down,
        )

    def _metrics(self) -> list[Family]:
        exchange, heard_at_s = self._exchange, self._exchange.broker_heard_at_s
        heard_wall_s = None if heard_at_s is None else clocks.wall() - (self._clock() - heard_at_s)
        now = self._config.run_id, self._core, self._vitals(), exchange.position, self._notes
        return families_of(*now, heard_wall_s=heard_wall_s)

    def _note(self, name: str, fields: Mapping[str, Any]) -> None:
        """Logs what the core has to say; what repeats itself, the first time and at each power of ten."""
        key = name, str(fields.get("reason", ""))
        self._notes[key] += 1
        times = self._notes[key]
        if worth_repeating(times):
            log.warning(name, **fields, **({"times": times} if times > 1 else {}))

    # --- what actions lead to ---------------------------------------------------------------------------------

    def _connect(self, broker: int) -> None:
        self._wire.connect(broker)

    def _joined(self, joined: events.Joined) -> None:
        core = self._core
        assert core.settings is not None
        self._config.check_room(joined.manifest)
        self._array_work.open(joined.manifest, self._handed, core.settings.recipe.codec_of_versions)
        for due in (self._exchange.due, self._due):
            due.life, due.blocks = core.incarnation, core.blocks
        self._snapshots.joined(self._clock())
        membership = JoinedRun(
            run_id=self._config.run_id,
            island_id=joined.island_id,
            incarnation=joined.incarnation,
            start=Position(joined.start_step, joined.start_tokens),
            settings=core.settings,
            num_fragments=len(joined.manifest),
            moving=joined.manifest.moving,
        )
        self._tell_joined(membership)

    async def _warm_up(self, keep: float) -> None:
        await self._array_work.warm_up(keep)
        self._warm = True
        self._after()

    def _begin_seed(self, fragment_id: int) -> None:
        assert self._core.settings is not None
        self._spawn(self._seed(fragment_id, self._core.settings.seed))

    async def _seed(self, fragment_id: int, seed: int) -> None:
        payload, places = await self._array_work.seed(fragment_id, seed)
        encoded = events.SeedEncoded(fragment_id=fragment_id, payload=payload, hosts=self._num_hosts, places=places)
        self._handle(encoded)

    def _begin_capture(self, fragment_id: int, copies: Copies, codec: Codec) -> None:
        self._spawn(self._capture(fragment_id, copies.leaves, codec))

    async def _capture(self, fragment_id: int, copies: tuple[Leaf, ...], codec: Codec) -> None:
        payload, places, flaw = await self._array_work.capture(fragment_id, copies, codec)
        p, hosts = fragment_id, self._num_hosts
        self._handle(events.Captured(fragment_id=p, payload=payload, hosts=hosts, places=places, flaw=flaw))

    async def _settle(self, install: Install, beside: tuple[Leaf, ...]) -> None:
        flaw = await self._array_work.settle(install, beside)
        self._settling -= 1
        if flaw:
            self._handle(events.Corrupted(fragment_id=install.fragment_id, flaw=flaw))
        elif self._core.finished:
            self._after()

    async def _snapshot(self, moment: Moment, snapshot: Snapshot, boundary: int) -> None:
        """Does what is to be done with a copy of the state, once it is whole."""
        self._begin(self._snapshots.taken(replace(moment, snapshot=snapshot)))

    async def _judge(self, returned: Returned) -> None:
        """Ends training where adoptions do not stay in the parameters: the books would say that they do."""
        found = await self._array_work.judge(returned)
        lost = self._persistence.lost(returned.fragment_id, returned.step, found)
        self._exchange.suspected = self._persistence.suspected
        if lost or (returned.first and found is Verdict.UNDONE):
            self._exchange.error = gone(returned.first)
            self._exchange.news.set()

    async def _prepare(self, action: events.Prepare) -> None:
        install = await self._placed(action)
        prepared = events.Prepared(fragment_id=install.fragment_id, flaw=install.flaw)
        # The core first: the training thread may install it as soon as it can see it.
        self._catch_up()
        self._perform(self._core.handle(prepared, self._clock()))
        self._offers.offer(install, self._core.fragments.values())
        self._after()

    async def _placed(self, action: events.Prepare) -> Install:
        version = action.version
        named = version.fragment_id, version.fragment_version, version.payload, action.keep
        return await self._array_work.prepare(*named, mixes=action.mixes, digest=version.digest)
