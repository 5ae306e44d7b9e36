"""The modelled network: messages between processes and brokers, their delays, and their losses."""

from __future__ import annotations

from functools import partial

from aggregator.interface import events as agg
from aggregator.standby.replication_events import Followed, Outranked
from broker.chunks.meter import Link
from broker.routing.events import Delivered, Unreachable
from broker.routing.events import Received as RelayReceived
from broker.routing.events import Send as RelaySend
from broker.routing.resending import Carried
from broker.wire import messages as m
from broker.wire.lengths import encoded_bytes
from broker.wire.tensors import payload_bytes
from islands.protocol import events as ie
from islands.protocol.donation import PART_BYTES
from ops.faults.kinds import Fault, FaultKind
from ops.virtual.aggregator import SimAggregator
from ops.virtual.broker import SimBroker
from ops.virtual.failover import SimCandidate
from ops.virtual.island import SimIsland
from ops.virtual.plan import BROKER, Point, Way
from ops.virtual.queue import LinkModel, Sender
from ops.virtual.world import World

Process = SimIsland | SimAggregator | SimCandidate


def _line_of(process: Process, channel: m.Channel) -> str:
    """Names the present connection of a process on a channel."""
    return process.line_of(channel) if isinstance(process, SimIsland) else str(process.connection)


class Network:
    """Every link of a simulated run: :meth:`to_broker` and :meth:`from_broker` carry what is said."""

    def __init__(self, simulation: World) -> None:
        self._simulation = simulation
        self._plan = simulation.plan
        self._queue = simulation.queue
        self.version_codecs: dict[tuple[int, int], m.Codec] = {}  # (fragment, version) -> its number format
        self._senders: dict[tuple[str, str, m.Channel], Sender] = {}
        self._partitions: dict[str, list[Fault]] = {}
        for fault in self._plan.faults:
            if fault.kind is FaultKind.PARTITION:
                self._partitions.setdefault(fault.targets[0], []).append(fault)

    def to_broker(self, process: Process, to: str, message: m.Message, sequence: int, broker: int = 0) -> None:
        """Carries a message from a process to a broker: an island's own, or the one that an aggregator names."""
        if not process.alive or self._simulation.dies_at(process.name, Point.SEND):
            return
        sender, incarnation = "", 0
        if isinstance(process, SimIsland):
            incarnation = process.core.incarnation
            sender = process.core.island_id if process.core.joined else m.joining(process.core.nonce)
            broker = process.core.broker
            if not process.connected:
                return
        elif self._cut_off(broker):
            return
        else:
            sender = process.sender
        delays_s = self.arrivals_s(process, message, "up", broker)
        if not delays_s or self._swallows(process, message, broker):
            return
        envelope = m.Envelope(
            run_id=self._plan.config.run_id,
            sender=sender,
            incarnation=incarnation,
            sequence=sequence,
            to=to,
            message=message,
        )
        event = RelayReceived(
            channel=message.channel,
            peer=f"{process.address}#{_line_of(process, message.channel)}".encode(),
            envelope=envelope,
            size_bytes=self._size(message),
            key=process.key,
        )

        def arrives() -> None:
            if isinstance(process, SimAggregator) and message.channel is m.Channel.BULK and process.core.finished:
                return  # what still waited for a turn on its link went with it
            self._simulation.brokers[broker].handle(event)

        for delay_s in delays_s:
            self._queue.after(delay_s, arrives)

    def from_broker(self, broker: SimBroker, action: RelaySend) -> None:
        """Carries a message from the broker to a process, or says that there is none."""
        if self._simulation.dies_at(broker.name, Point.SEND):
            return
        address, _, line = action.peer.decode().partition("#")
        process = self._simulation.processes.get(address)
        if process is None or not process.alive or line != _line_of(process, action.channel):
            gone = Unreachable(
                channel=action.channel, peer=action.peer, envelope=action.envelope, size_bytes=action.size_bytes
            )
            self._queue.after(0.0, lambda: broker.handle(gone))
            return
        if not isinstance(process, SimIsland) and self._cut_off(broker.place):
            sender = self._senders.setdefault((process.address, "down", action.channel), Sender())
            sender.lose(self._size(action.envelope.message))
            return
        delays_s = self.arrivals_s(process, action.envelope.message, "down", broker.place)
        for delay_s in delays_s:
            self._queue.after(delay_s, partial(self._deliver, process, line, action.envelope, broker.place))
        if isinstance(action.envelope.message, m.Contribution | m.Seed):  # what is lost has left the broker, too
            noted = Delivered(channel=action.channel, peer=action.peer, envelope=action.envelope)
            self._queue.after(min(delays_s, default=0.0), lambda: broker.handle(noted))

    def _deliver(self, process: Process, line: str, envelope: m.Envelope, broker: int) -> None:
        """Hands a message to a process, unless it has left the connection that this came by."""
        if line != _line_of(process, envelope.message.channel):
            return
        if isinstance(process, SimIsland):
            if process.deaf and envelope.message.channel is m.Channel.BULK:
                return
            flaw = process.flaw_in(envelope.message)
            process.handle(ie.Received(envelope=envelope, flaw=flaw, carried=self._carried(process, broker)))
            return
        message = envelope.message
        if isinstance(process, SimCandidate):
            process.received(message, broker)
            return
        if self._swallows(process, message, broker):
            return
        if isinstance(message, m.Attached) and process.replication is not None:
            process.replication.reached(process.clock.now_s)
        if isinstance(message, m.Follow):
            name = envelope.sender.removeprefix(m.standing_by(""))
            process.routes[name] = broker
            process.handle(Followed(name=name, follow=message))
            return
        if isinstance(message, m.Refused):
            event = agg.refusal_of_ours(message, broker)
            if event is not None:
                process.handle(event)
            if isinstance(event, agg.Fenced) and process.replication is not None:
                process.handle(Outranked())
            return
        has_payload = isinstance(message, m.Contribution | m.Seed)
        found = process.work.inspect(envelope) if has_payload else agg.Inspection()
        received = agg.Received(
            envelope=envelope,
            flaw=found.flaw,
            payload_bytes=self._size(message),
            norm=found.norm,
            broker=broker,
            carried=self._carried(process, broker),
        )
        process.handle(received)

    def arrivals_s(self, process: Process, message: m.Message, direction: str, broker: int) -> list[float]:
        """Returns the delays after which copies of a message get through to or from a process, if any does.

        Bulk waits for bulk, control for control: they have connections of their own. Links are faultless once the
        plan's troubles are over.
        """
        link = self._link_of(process)
        sender = self._senders.setdefault((process.address, direction, message.channel), Sender())
        if self._plan.cuts and self.is_cut(process.name, broker, direction):
            return sender.lose(self._size(message))
        if isinstance(process, SimIsland) and not process.plan.reachable(self._queue.now_s):
            return sender.lose(self._size(message))
        if self._queue.now_s > self._plan.calm_after_s:
            link = LinkModel(delay_s=link.delay_s, bytes_per_s=link.bytes_per_s)
        queued_s = sender.queued_s(self._queue.now_s, self._size(message), link.bytes_per_s)
        return link.arrivals_s(self._simulation.rng, queued_s)

    def is_cut(self, process: str, broker: int, direction: str = "") -> bool:
        """Whether nothing passes a link now, in one direction; in neither, without a handshake, or in any."""
        now_s, directions = self._queue.now_s, (direction,) if direction else (Way.UP, Way.DOWN)
        return any(
            cut.link.broker == broker and cut.link.process == process and cut.stops(each, now_s)
            for cut in self._plan.cuts
            for each in directions
        )

    def _cut_off(self, broker: int) -> bool:
        """Whether nothing passes between a broker and the aggregator now."""
        return any(fault.lasts(self._queue.now_s) for fault in self._partitions.get(f"{BROKER}{broker}", ()))

    def _swallows(self, process: Process, message: m.Message, broker: int) -> bool:
        """Whether an aggregator's bulk connection to a broker has become deaf."""
        return isinstance(process, SimAggregator) and message.channel is m.Channel.BULK and broker in process.deaf

    def _carried(self, process: SimIsland | SimAggregator, broker: int) -> Carried:
        """Returns what a process's link has carried up of bulk, for all of its brokers."""
        up = self._senders.setdefault((process.address, "up", m.Channel.BULK), Sender())
        carried = up.carried_bytes(self._queue.now_s, self._link_of(process).bytes_per_s)
        number = process.bulk_number if isinstance(process, SimIsland) else process.bulk_numbers[broker]
        link = self._link_of(process)
        rate = link.bytes_per_s or None
        known = Link(rate, rate, 2 * link.delay_s[0]) if self._plan.links_measured else Link()
        return Carried(carried, round(up.given_bytes) - carried, number, known)

    def _link_of(self, process: Process) -> LinkModel:
        """Returns the model of a process's own link."""
        own = process.plan.link if isinstance(process, SimIsland) else None
        return own or self._plan.link

    def _size(self, message: m.Message) -> int:
        """Bytes of a message: of what was encoded, or as many as float32 would take."""
        if isinstance(message, m.Replica):  # parameters and momentum
            manifest = self._simulation.disk.manifest
            return 0 if manifest is None else 8 * manifest.sizes[message.fragment_id]
        if isinstance(message, m.Contribution | m.Version | m.Seed):
            if isinstance(message.payload, tuple):
                return payload_bytes(message.payload)
            manifest = self._simulation.disk.manifest if self._simulation.leaders else None
            if manifest is None or message.fragment_id >= len(manifest):
                return 0
            if isinstance(message, m.Contribution) and self._plan.links_measured:
                return encoded_bytes(message.payload.codec, manifest.sizes[message.fragment_id])
            differs = isinstance(message, m.Version) and message.base is not None
            version = message.fragment_id, getattr(message, "fragment_version", -1)
            codec = self.version_codecs.get(version, m.Codec.F32) if differs else m.Codec.F32
            return encoded_bytes(codec, manifest.sizes[message.fragment_id])
        if isinstance(message, m.StatePart):
            return min(message.state_bytes, PART_BYTES)
        return 200
