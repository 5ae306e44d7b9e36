"""A broker's process in a simulated run: drives :class:`broker.routing.relay.Relay` in virtual time.

It mirrors :mod:`broker.server` action by action, with the links of the simulation for sockets.
"""

from __future__ import annotations

from broker.routing.events import (
    AllowListChanged,
    LookUp,
    Note,
    RelayAction,
    RelayConfig,
    RelayEvent,
    Report,
    Send,
    Tick,
)
from broker.routing.relay import Relay
from broker.wire import messages as m
from broker.wire.identity import Identity, KeyRole
from ops.virtual.queue import Alarm
from ops.virtual.world import World


class SimBroker:
    """One process of a broker: the driver of :class:`broker.routing.relay.Relay` in virtual time."""

    def __init__(self, simulation: World, place: int) -> None:
        self.simulation, self.place = simulation, place
        self.name = f"broker-{place}"
        self.clock = simulation.clock(self.name)
        self.alive = True
        self.frozen = False
        self.backlog: list[RelayEvent] = []  # what came while it was frozen
        self.relay = Relay(RelayConfig(run_id=simulation.plan.config.run_id))
        islands = [plan.island_id for plan in simulation.plan.islands]
        allowed = {name: Identity(role=KeyRole.ISLAND, name=name) for name in islands}
        allowed[m.AGGREGATOR] = Identity(role=KeyRole.AGGREGATOR, name=m.AGGREGATOR)
        self.relay.handle(AllowListChanged(allowed=allowed), self.clock.now_s)
        self.alarm = Alarm(simulation.queue, lambda: self.handle(Tick()), self.clock.true_s)

    @property
    def answers(self) -> bool:
        """Whether a connection can be made: a frozen process takes them, but does not shake hands."""
        return self.alive and not self.frozen

    def handle(self, event: RelayEvent) -> None:
        """Feeds one event to the relay and carries out what it answers."""
        if self.frozen:
            self.backlog.append(event)
        elif self.alive:
            self.perform(self.relay.handle(event, self.clock.now_s))

    def perform(self, actions: list[RelayAction]) -> None:
        """Passes on what the relay lets through."""
        for action in actions:
            if not self.alive:
                return  # it died of one of them
            match action:
                case Send():
                    self.simulation.network.from_broker(self, action)
                case Report() | Note() | LookUp():
                    pass
        self.alarm.arm(self.relay.next_deadline_s())

    def freeze(self, for_s: float) -> None:
        """Stops the process for a while; its connections stay, and what comes waits."""
        if self.answers:
            self.frozen = True
            self.simulation.queue.after(for_s, self.thaw)

    def thaw(self) -> None:
        """Goes on, with everything that came meanwhile."""
        self.frozen = False
        backlog, self.backlog = self.backlog, []
        for event in backlog:
            self.handle(event)

    def kill(self) -> None:
        """Ends the process without a word."""
        self.alive = False
        self.alarm.arm(None)
        for island in self.simulation.islands.values():
            if island.alive and island.connected and island.core.broker == self.place and island.connection:
                island.lose()
