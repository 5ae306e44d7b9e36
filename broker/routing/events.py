"""The events, actions and limits of the relay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from broker.base.errors import ConfigError
from broker.wire.identity import Identity
from broker.wire.messages import Channel, Envelope, Observed, Reason

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Limits of one relay."""

    run_id: str  # messages of other runs are refused
    peer_queue_bytes: int = 256 * _MIB  # of contributions of one island that may wait for an aggregator
    total_queue_bytes: int = 1024 * _MIB  # of all islands together
    max_peers: int = 10_000  # senders known at a time; further ones are refused
    forget_after_s: float = 60.0  # a peer not heard for this long is forgotten
    leader_silent_s: float = 6.0  # an aggregator not heard for this long no longer leads
    retry_s: float = 0.002  # pause between two bursts of what waited for an aggregator
    release: str = ""  # version of the package, for probes; empty: not known

    def __post_init__(self) -> None:
        for name in ("peer_queue_bytes", "max_peers", "forget_after_s", "leader_silent_s", "retry_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(name, getattr(self, name), "must be above 0")
        if self.total_queue_bytes < self.peer_queue_bytes:
            cure = f"must be at least peer_queue_bytes ({self.peer_queue_bytes})"
            raise ConfigError("total_queue_bytes", self.total_queue_bytes, cure)


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message arrived.

    ``peer`` is the routing id of its connection, ``size_bytes`` its frames together, and ``key`` the public key that
    the connection was opened with, empty where keys are not in use. With a Probe comes the wall clock, ``wall_s``.
    """

    channel: Channel
    peer: bytes
    envelope: Envelope
    size_bytes: int
    key: str = ""
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A message that could not be decoded, with kind, sequence and sender as far as readable."""

    channel: Channel
    peer: bytes
    reason: Reason
    detail: str
    kind: str = ""
    sequence: int = -1
    sender: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outgoing:
    """A message to one connection."""

    channel: Channel
    peer: bytes
    envelope: Envelope
    size_bytes: int = 0


class Blocked(_Outgoing):
    """A :class:`Send` could not be carried out: the connection is at its high-water mark."""


class Unreachable(_Outgoing):
    """A :class:`Send` could not be carried out: there is no such connection any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The other end of a connection has received a whole :class:`Send`, as far as is known."""

    channel: Channel
    peer: bytes
    envelope: Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A blocked connection has room again."""

    channel: Channel
    peer: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowListChanged:
    """A new allow list: ``allowed`` maps a public key to its owner, and every message must fit its key.

    Before the first such event no message is judged.
    """

    allowed: Mapping[str, Identity]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedAway:
    """A connection was refused, or ended before its first message.

    Without a reason it may have been a mere knock.
    """

    channel: Channel
    reason: Reason | None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp:
    """The answer to a :class:`LookUp`, for the observer ``to`` behind a bulk connection."""

    peer: bytes
    to: str
    message: Observed


RelayEvent = (
    Received | Rejected | Blocked | Unreachable | Delivered | Room | Tick | AllowListChanged | TurnedAway | LookedUp
)


# --- actions ----------------------------------------------------------------------------------------------------


class Send(_Outgoing):
    """Send ``envelope`` to a connection now, or answer with :class:`Blocked` or :class:`Unreachable`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A message about membership, for the registry."""

    envelope: Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for the log; a repeated cause only at its 1st, 10th, 100th, .. occurrence."""

    event: str
    fields: Mapping[str, object]
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUp:
    """An observer's question for the task that reads Redis, which answers by :class:`LookedUp`."""

    peer: bytes
    envelope: Envelope


RelayAction = Send | Report | Note | LookUp

#: Why a message is not taken: the reason, and a detail for people.
Refusal = tuple[Reason, str]


# --- counters ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RelayCounters:
    """Counters of the relay since its start.

    Attributes:
        refused: Sender -> reason -> messages; senders that are not known count as ``directory.UNKNOWN``.
        dropped: Cause -> control messages or copies that went nowhere, and connections that said nothing.
        repeated_messages: Those whose sequence number had come over their connection before: refused. They tell
            of a peer that plays back what it recorded.
    """

    received_messages: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    sent_bytes: int = 0
    refused: dict[str, Counter[Reason]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    repeated_messages: int = 0
