"""The relay's actions for one event, in order, with their counts. Pure.

Every refusal is counted by sender and reason, logged at its 1st, 10th, 100th, .. time, and told to the sender, over its
control connection if there is one. A sender that could not be read is told over the connection it came by.
"""

from __future__ import annotations

from collections import Counter

from broker.base.errors import worth_repeating
from broker.routing.directory import UNKNOWN, Directory
from broker.routing.events import (
    Blocked,
    LookUp,
    Note,
    Refusal,
    RelayAction,
    RelayCounters,
    Report,
    Send,
    TurnedAway,
    Unreachable,
)
from broker.wire import messages as m
from broker.wire.messages import BROKER, Channel, Envelope, Reason, kind_of

#: Where a refusal is addressed whose sender could not be read.
NOBODY = m.joining("unknown")


class Actions:
    """Collects actions for the driver; ``counters`` counts all since the start."""

    __slots__ = ("_actions", "_run_id", "_sequence", "_who", "counters")

    def __init__(self, *, run_id: str, who: Directory) -> None:
        self.counters = RelayCounters()
        self._run_id = run_id
        self._who = who
        self._sequence = 0  # of the broker's own messages
        self._actions: list[RelayAction] = []

    def take(self) -> list[RelayAction]:
        """Returns all actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def add(self, action: Note | Report | LookUp) -> None:
        """Adds an action that sends no message."""
        self._actions.append(action)

    def send(self, channel: Channel, peer: bytes, envelope: Envelope, size_bytes: int) -> None:
        """Sends a message to a connection: ``peer`` is its routing id."""
        self.counters.sent_messages += 1
        self.counters.sent_bytes += size_bytes
        self._actions.append(Send(channel=channel, peer=peer, envelope=envelope, size_bytes=size_bytes))

    def send_or_drop(
        self, channel: Channel, route: bytes | None, envelope: Envelope, size_bytes: int, *, missing: str
    ) -> None:
        """Sends a repeated message; without a connection drops it, and counts it under ``missing``."""
        if route is None:
            self.counters.dropped[missing] += 1
        else:
            self.send(channel, route, envelope, size_bytes)

    def unsend(self, event: Blocked | Unreachable) -> None:
        """Subtracts from the counters a message that the driver could not send."""
        self.counters.sent_messages -= 1
        self.counters.sent_bytes -= event.size_bytes

    def reply(self, channel: Channel, peer: bytes, to: str, message: m.Message, size_bytes: int = 0) -> None:
        """Sends a message of the broker itself; small ones are not counted in bytes."""
        self._sequence += 1
        envelope = Envelope(
            run_id=self._run_id, sender=BROKER, incarnation=0, sequence=self._sequence, to=to, message=message
        )
        self.send(channel, peer, envelope, size_bytes)

    def refuse_message(self, channel: Channel, peer: bytes, envelope: Envelope, refusal: Refusal) -> None:
        """Refuses a message from a verified sender; see :meth:`refuse`."""
        self.refuse(channel, peer, envelope.sender, kind_of(envelope.message), envelope.sequence, refusal)

    def refuse(
        self,
        channel: Channel,
        peer: bytes,
        claimed: str,
        kind: str,
        sequence: int,
        refusal: Refusal,
        to: str = "",
    ) -> None:
        """Counts a refusal, logs its 1st, 10th, 100th, .. time, and tells the sender the reason.

        ``claimed`` is who sent the message, as far as that is known: believed only if it is a known peer. The answer
        goes to ``to``, what the message named as its sender, if that is another.
        """
        reason, detail = refusal
        name = self._who.name_of(channel, peer) or (claimed if claimed in self._who.peers else UNKNOWN)
        times = self._count_refusal(name, reason)
        if worth_repeating(times):
            fields = {"sender": name, "kind": kind, "reason": reason, "times": times, "detail": detail}
            self._actions.append(Note(event="relay.refused", fields=fields, warning=True))
        if kind == kind_of(m.Refused):
            return  # two peers must not refuse each other's refusals for ever
        control = self._who.control_beside(channel, peer)
        if control is not None:
            channel, peer = Channel.CONTROL, control
        refused = m.Refused(kind=kind, sequence=sequence, reason=reason, detail=detail)
        self.reply(channel, peer, to or claimed or (name if name != UNKNOWN else NOBODY), refused)

    def turn_away(self, event: TurnedAway) -> None:
        """Counts a connection that ended before its first message; nobody is left to be told."""
        if event.reason is None:
            self.counters.dropped["silent_connection"] += 1
            return
        times = self._count_refusal(UNKNOWN, event.reason)
        if worth_repeating(times):
            fields = {"channel": event.channel, "reason": event.reason, "times": times, "detail": event.detail}
            self._actions.append(Note(event="relay.turned_away", fields=fields, warning=True))

    def _count_refusal(self, name: str, reason: Reason) -> int:
        counts = self.counters.refused.setdefault(name, Counter())
        counts[reason] += 1
        return counts[reason]
