"""A relay to try: the messages that it passes on, and a driver that hands it events."""

from broker.routing.events import Blocked, Delivered, Note, Received, RelayConfig, Room, Send, Tick, Unreachable
from broker.routing.relay import Relay
from broker.wire import messages as m
from broker.wire.messages import AGGREGATOR, BROKER, Envelope
from broker.wire.ranges import StepRange

RUN = "demo"
CONFIG = RelayConfig(run_id=RUN, peer_queue_bytes=200, total_queue_bytes=300, max_peers=50)


def contribution(fragment_id=0, from_step=0, to_step=1):
    steps = StepRange(from_step=from_step, to_step=to_step, from_tokens=from_step * 10, to_tokens=to_step * 10)
    return m.Contribution(round_id=1, fragment_id=fragment_id, steps=steps, trained_on=(), payload=())


def version(fragment_id=0, fragment_version=0, epoch=1):
    return m.Version(
        epoch=epoch,
        fragment_id=fragment_id,
        fragment_version=fragment_version,
        digest="00",
        contributions=(),
        payload=(),
    )


def join(nonce="n"):
    return m.Join(nonce=nonce, island_id="", hint="", tensors=(), tokens_per_step=10)


def welcome(island_id, incarnation, nonce="n"):
    settings_ = m.RunSettings(
        recipe=m.Recipe(fragments=1, sync_interval=4, keep=1.0, codec=m.Codec.F32),
        heartbeat_interval_s=0.5,
        total_tokens=0,
        tokens_per_fleet_step=10,
        seed=0,
        islands=2,
        data_ahead_s=10.0,
    )
    return m.Welcome(
        nonce=nonce,
        island_id=island_id,
        incarnation=incarnation,
        epoch=1,
        fragments=(),
        settings=settings_,
        start_step=0,
        start_tokens=0,
    )


def fleet_state(epoch=1, phase=m.Phase.RUNNING):
    return m.FleetState(
        epoch=epoch,
        phase=phase,
        rounds=(),
        due_soon=(),
        versions=(),
        resolutions=(),
        seed=(),
        trained_tokens=0,
        fleet_ratio=1.0,
    )


def state_part(index=0):
    return m.StatePart(state_id="1.4", part=index, num_parts=3, state_bytes=12, payload=())


class Driver:
    """Hands events to a relay and remembers the last actions."""

    def __init__(self, config=CONFIG):
        self.relay = Relay(config)
        self.now_s = 100.0
        self.sequence = 0
        self.actions = []

    def event(self, event):
        self.actions = self.relay.handle(event, self.now_s)
        return self.actions

    def receive(
        self,
        sender,
        message,
        *,
        route=None,
        channel=None,
        incarnation=None,
        to="",
        run=RUN,
        nbytes=100,
        key="",
    ):
        """What ``sender`` sends over its usual connection."""
        self.sequence += 1
        channel = channel or message.channel
        if incarnation is None:
            incarnation = 0 if sender == AGGREGATOR or sender.startswith("join:") else 1
        route = route or f"{sender}/{incarnation}/{channel}".encode()
        envelope = Envelope(
            run_id=run, sender=sender, incarnation=incarnation, sequence=self.sequence, to=to, message=message
        )
        return self.event(Received(channel=channel, peer=route, envelope=envelope, size_bytes=nbytes, key=key))

    def attach(self, versions=(-1, -1), epoch=1, shard=0):
        self.receive(AGGREGATOR, m.Attach(shard=shard, epoch=epoch, versions=versions))
        return self.receive(AGGREGATOR, m.AttachBulk(shard=shard, epoch=epoch, shards=1))

    def block(self, send, outcome=Blocked):
        return self.event(
            outcome(channel=send.channel, peer=send.peer, envelope=send.envelope, size_bytes=send.size_bytes)
        )

    def delivered(self, send):
        return self.event(Delivered(channel=send.channel, peer=send.peer, envelope=send.envelope))

    def room(self, send):
        return self.event(Room(channel=send.channel, peer=send.peer))

    def unreachable(self, send):
        return self.block(send, Unreachable)

    def tick(self, now_s):
        """Moves the time from deadline to deadline, as a driver would; all that followed are the last actions."""
        actions = []
        while (due_s := self.relay.next_deadline_s()) is not None and due_s < now_s:
            self.now_s = max(self.now_s, due_s)
            actions += self.event(Tick())
        self.now_s = now_s
        self.actions = actions + self.event(Tick())
        return self.actions

    @property
    def sends(self):
        return [action for action in self.actions if isinstance(action, Send)]

    @property
    def sent(self):
        """(routing id, message) of what was sent."""
        return [(send.peer, send.envelope.message) for send in self.sends]

    @property
    def notes(self):
        return [action.event for action in self.actions if isinstance(action, Note)]

    def refusal(self):
        """The one refusal sent; fails if there is none or something else."""
        (send,) = self.sends
        assert isinstance(send.envelope.message, m.Refused), send
        assert send.envelope.sender == BROKER
        return send

    def reason(self):
        return self.refusal().envelope.message.reason
