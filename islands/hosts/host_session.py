"""The communication thread of a host that does not speak: carries out the speaker's orders. Shell.

It has a connection to the speaker, and one to the broker, over which its part of each contribution goes. The core is at
the speaker; what is decided here is only in which order things are done, and that is the speaker's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from broker.base.errors import ConfigError, first_of
from broker.process import logs
from broker.wire.fragments import FragmentManifest
from broker.wire.headers import Buffer
from broker.wire.messages import AGGREGATOR, Channel, Codec, Encoded, Envelope, HostPart, Place
from islands.agreement import messages as m
from islands.agreement.speaker_rules import LOST_S
from islands.arrays.placement import Leaf
from islands.hosts import state
from islands.hosts.link import Contact, HostLink
from islands.hosts.loss import MISTAKEN, end_soon, lost
from islands.hosts.plans import Plans
from islands.hosts.rendezvous import SeveralHosts
from islands.interface.config import IslandConfig
from islands.session.array_work import ArrayWork
from islands.session.connections import Connections, Posted
from islands.session.exchange import Exchange, Install, JoinedRun, Moment, StateFound
from islands.session.thread import CommunicationThread, cancel_all
from islands.session.training_state import Position, Snapshot
from islands.session.workers import Workers

log = logs.get(__name__)

#: How often a host says that it is alive, and looks whether the speaker is.
BEAT_S = 0.25

Key = tuple[int, int, int]  # fragment, from_step, to_step


@dataclass(slots=True)
class Part:
    """This host's part of a contribution, encoded; kept until nobody asks for it any more."""

    payload: tuple[Encoded, ...]
    places: tuple[Place, ...]
    message: HostPart | None = None


class HostSession(CommunicationThread):
    """A host's place in an island for its training loop, like :class:`islands.session.session.Session`.

    Args:
        config: Addresses and intervals.
        team: Of this island.
        contact: Of its speaker.
        tokens_per_step: As declared.
        plans: Of this host's training thread.
        array_work: With the initial parameters.
        exchange: Shared with the training thread.
    """

    def __init__(
        self,
        config: IslandConfig,
        team: SeveralHosts,
        contact: Contact,
        tokens_per_step: int,
        plans: Plans,
        array_work: ArrayWork,
        exchange: Exchange,
    ) -> None:
        super().__init__(array_work, exchange)
        self._config, self._team, self._contact, self._plans = config, team, contact, plans
        self._hello = m.Hello(token=contact.token, tensors=team.tensors, tokens_per_step=tokens_per_step)
        self._link = HostLink(exchange.machine.context, contact, team.host)
        self._wire = Connections(
            config, exchange.machine.context, self._refused, lambda *_: None, channels=(Channel.BULK,)
        )
        self._orders: deque[tuple[m.Order, Sequence[Buffer]]] = deque()
        self._boundaries = 0
        self._copies: dict[int, dict[int, tuple[Leaf, ...]]] = {}  # fragment -> boundary -> leaves
        self._parts: dict[Key, Part] = {}
        self._asked: dict[Key, m.SendPart] = {}  # before they were encoded
        self._said: m.HostAt | None = None
        self._workers = Workers(1, "atoll-hosts")
        self._heard_s = self._clock()
        self._speaker_left = self._state_asked = False
        exchange.doing = "waiting for the speaker of this island"

    # --- the thread -------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._open()
        async with self._link:
            try:
                await self._work()
            except* ConfigError as group:
                mistake = first_of(group)
                assert isinstance(mistake, ConfigError)
                if not self._speaker_left:
                    await self._link.send(m.Mistaken.of(mistake))
                if self._exchange.startable:  # training has begun, and may wait in a collective
                    end_soon(MISTAKEN, str(mistake))
                raise

    async def _work(self) -> None:
        async with self._wire, asyncio.TaskGroup() as self._tasks:
            await self._link.send(self._hello)
            for work in (self._hear(), self._beat(), self._wire.run()):
                self._spawn(work)
            if self._leave_reason is None:
                await self._leaving.wait()
            if not self._speaker_left:
                reason = (self._leave_reason or "ended")[:500]
                mistake, ended = self._plans.mistake, not self._plans.broken_off
                said = m.Mistaken.of(mistake) if mistake else m.Goodbye(reason=reason, ended=ended)
                await self._link.send(said)
            self._workers.close()
            cancel_all()

    async def _hear(self) -> None:
        while True:
            heard = await self._link.recv()
            if heard is None:
                continue
            self._heard_s = self._exchange.heard_at_s = self._clock()
            message, buffers = heard
            if isinstance(message, m.Order):
                self._orders.append((message, buffers))
                self._carry_on()
            else:
                await self._at_once(message, buffers)

    async def _beat(self) -> None:
        while True:
            await self._say_where()
            if not self._speaker_left and self._clock() - self._heard_s > LOST_S:
                raise lost(f"the speaker, at {self._contact.address}, has said nothing for {LOST_S:g} s")
            await asyncio.sleep(BEAT_S)
            self._said = None  # says it in any case

    async def _say_where(self) -> None:
        """Tells the speaker how far training is, where it does not know."""
        step = 0 if self._plans.stopped else self._plans.passed
        at = m.HostAt(step=step, stopped=self._plans.stopped)
        if at != self._said:
            self._said = at
            await self._link.send(at)

    def _look(self) -> None:
        exchange = self._exchange
        while exchange.moments:
            self._boundary(exchange.moments.popleft())
        exchange.trained.clear()  # the speaker says what this island has trained on
        exchange.losses.clear()
        exchange.returned.clear()
        if exchange.state_needed is not None and not self._state_asked:
            self._state_asked = True
            needed = exchange.state_needed
            needs = m.Needs(state=state.needed(needed.state), local=state.needed(needed.local))
            self._spawn(self._link.send(needs))
        self._carry_on()
        self._spawn(self._say_where())

    def _boundary(self, moment: Moment) -> None:
        self._boundaries += 1
        for install, beside in moment.installed:
            self._copies.pop(install.fragment_id, None)
            # Ahead of whatever the speaker orders of this fragment next.
            self._spawn(self._settle(install, beside))
        for p, leaves in moment.copied.items():
            self._copies.setdefault(p, {})[self._boundaries] = leaves
        if moment.frozen:
            self._spawn(self._look_at_frozen(moment))
        if moment.snapshot is not None:
            self._spawn(self._copied(self._boundaries, moment.snapshot))

    # --- what the speaker says --------------------------------------------------------------------------------

    async def _at_once(self, message: Any, buffers: Sequence[Buffer]) -> None:
        match message:
            case m.Mistaken():
                self._speaker_left = True
                raise message.error()
            case m.Terms():
                self._joined(message)
            case m.Proposal():
                promised = self._plans.gate.promise(message.number, message.step, message.plan)
                passed = self._plans.passed
                await self._link.send(m.Answer(number=message.number, promised=promised, step=passed))
            case m.Decision():
                self._plans.gate.decide(message.number, fixed=message.fixed)
            case m.Begin():
                found = state.taken(message, buffers, self._config.run_id) if message.state or message.local else None
                said = "as the speaker has begun"
                self._exchange.state_found = StateFound(found=found, detail=said, source=message.source)
                self._exchange.news.set()
            case m.Use():
                self._wire.connect(message.broker)
            case m.Goodbye():
                self._speaker_left = True
                if not message.ended:
                    raise lost(f"the speaker has left ({message.reason})")
            case _:
                log.warning("hosts.unexpected", kind=type(message).__name__)

    def _joined(self, terms: m.Terms) -> None:
        manifest, exchange = FragmentManifest(terms.fragments), self._exchange
        self._config.check_room(manifest)
        handed = {each.tensor.name: frozenset(each.regions) for each in terms.handed}
        self._array_work.open(manifest, handed)
        exchange.due.life, exchange.due.blocks = terms.incarnation, terms.blocks
        self._plans.begin(terms.start_step)
        membership = JoinedRun(
            run_id=self._config.run_id,
            island_id=terms.island_id,
            incarnation=terms.incarnation,
            start=Position(terms.start_step, terms.start_tokens),
            settings=terms.settings,
            num_fragments=len(manifest),
            moving=manifest.moving,
        )
        self._tell_joined(membership, host=f"{self._team.host} of {self._team.hosts}")

    async def _warm_up(self, keep: float) -> None:
        await self._array_work.warm_up(keep)
        while not self._plans.ready:
            await asyncio.sleep(0.01)
        self._exchange.startable = True
        self._exchange.news.set()

    # --- orders -----------------------------------------------------------------------------------------------

    def _carry_on(self) -> None:
        """Carries out orders, as far as training is where the speaker's was when it gave them."""
        while self._orders and self._orders[0][0].after <= self._boundaries:
            order, buffers = self._orders.popleft()
            self._forget_copies(order.after)
            match order:
                case m.Alive():
                    pass
                case m.Standing():
                    self._plans.stand(order.plan)
                case m.EncodeRegions():
                    self._spawn(self._encode(order))
                case m.CaptureRegions():
                    copies = self._copies[order.fragment_id].pop(order.boundary)
                    self._spawn(self._capture(order, copies))
                case m.SendPart():
                    self._send_part(order)
                case m.OpenParts():
                    self._close_parts(order)
                case m.PrepareRegions():
                    self._spawn(self._prepare(order, buffers))
                case m.Ending():
                    self._exchange.delivered, self._exchange.finished = order.delivered, order.finished
                    self._exchange.news.set()
                case _:
                    assert_never(order)

    def _forget_copies(self, seen: int) -> None:
        """Drops copies that the speaker will not ask for, since it had newer ones after ``seen`` boundaries."""
        for p, copies in self._copies.items():
            newest = max((boundary for boundary in copies if boundary <= seen), default=0)
            self._copies[p] = {boundary: leaves for boundary, leaves in copies.items() if boundary >= newest}

    async def _encode(self, order: m.EncodeRegions) -> None:
        payload, places = await self._array_work.seed(order.fragment_id, order.seed)
        self._encoded((order.fragment_id, 0, 0), Part(payload, places))

    async def _settle(self, install: Install, beside: tuple[Leaf, ...]) -> None:
        await self._array_work.settle(install, beside)  # which raises where something is corrupt: there are others

    async def _capture(self, order: m.CaptureRegions, copies: tuple[Leaf, ...]) -> None:
        payload, places, _ = await self._array_work.capture(order.fragment_id, copies, order.codec)
        self._encoded((order.fragment_id, order.from_step, order.to_step), Part(payload, places))

    def _encoded(self, key: Key, part: Part) -> None:
        self._parts[key] = part
        if key in self._asked:
            self._send_part(self._asked.pop(key))

    def _send_part(self, order: m.SendPart) -> None:
        key = order.fragment_id, order.from_step, order.to_step
        part = self._parts.get(key)
        if part is None:
            self._asked[key] = order
            return
        if part.message is None:
            part.message = HostPart(
                fragment_id=order.fragment_id,
                from_step=order.from_step,
                to_step=order.to_step,
                host=self._team.host,
                hosts=self._team.hosts,
                places=part.places,
                payload=part.payload,
            )
        self._wire.post(Posted(part.message, AGGREGATOR, order.island_id, order.incarnation))
        if not order.to_step:
            del self._parts[key]  # the speaker has it encoded again, if it is asked for again

    def _close_parts(self, order: m.OpenParts) -> None:
        steps = order.open_steps
        open_keys = {(order.fragment_id, a, b) for a, b in zip(steps[::2], steps[1::2], strict=True)}
        self._parts = {
            key: part
            for key, part in self._parts.items()
            if key[0] != order.fragment_id or part.message is None or key in open_keys
        }

    async def _prepare(self, order: m.PrepareRegions, buffers: Sequence[Buffer]) -> None:
        p = order.fragment_id
        tensors = self._array_work.regions(p)
        payload = tuple(
            Encoded(codec=Codec.F32, shape=shape, checksum=0, data=data)
            for shape, data in zip(tensors, buffers, strict=True)
        )
        install: Install = await self._array_work.prepare(
            p, order.fragment_version, payload, order.keep, mixes=order.mixes, is_cut=True
        )
        self._plans.placed(install)
        await self._link.send(m.Placed(fragment_id=p, fragment_version=order.fragment_version))

    async def _copied(self, boundary: int, snapshot: Snapshot) -> None:
        """Sends this host's part of a copy of the optimizer's state."""
        labelled = state.labelled(snapshot, self._array_work.parameters.local)
        leaves, buffers = await self._workers.do(state.copied, labelled)
        await self._link.send(m.Copied(boundary=boundary, leaves=leaves), buffers)

    async def _refused(self, channel: Channel, envelope: Envelope) -> None:
        """Takes in what the broker says, which is that it has refused something."""
        del channel
        self._exchange.broker_heard_at_s = self._clock()
        log.warning("hosts.refused", message=repr(envelope.message)[:300])
