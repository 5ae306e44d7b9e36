"""Every message that crosses a socket, as a frozen value. The wire form is in PROTOCOL.md and :mod:`broker.wire.codec`.

Two rules shape this list. *State, not edges*: whatever a party must know is repeated in :class:`FleetState` and
:class:`Heartbeat` until it is known, so no message exists whose loss could hang anything. *Identity makes re-sending
safe*: a contribution is named by (island, incarnation, fragment, from_step, to_step), so a copy is recognised.

Field types are limited to str, bytes, int, float, bool, enums, other messages' parts, ``X | None`` and tuples of these;
the codec derives its strict checks from the annotations. ``payload`` fields travel as raw frames behind the header.
"""

from broker.wire.messages.donation import AskDonor, Donor, FetchState, StatePart
from broker.wire.messages.envelope import KINDS, MESSAGE_TYPES, Envelope, Message, kind_of
from broker.wire.messages.membership import Departure, Join, Leave, Refused, RunSettings, Welcome
from broker.wire.messages.rounds import (
    FASTEST_STEP_S,
    SLOWEST_STEP_S,
    Contribution,
    FleetState,
    Heartbeat,
    Nothing,
    OpenRound,
    Outstanding,
    Resolution,
    Seed,
)
from broker.wire.messages.shards import Begin, Enrolled, Reached, Roster, Rostered, Tenure
from broker.wire.messages.standby import Follow, FollowBulk, Following, Replica, ReplicaRun, Standing, Stored, newness
from broker.wire.messages.values import (
    AGGREGATOR,
    BROKER,
    PROTOCOL_VERSION,
    RETRY_REASONS,
    Channel,
    Codec,
    DataRange,
    Encoded,
    Fate,
    Merged,
    Payload,
    Phase,
    Reason,
    Role,
    Share,
    StateSource,
    TrainedOn,
    joining,
    standing_by,
)
from broker.wire.messages.versions import Attach, AttachBulk, Attached, Version, Want

__all__ = [
    "KINDS",
    "kind_of",
    "AGGREGATOR",
    "AskDonor",
    "Attach",
    "AttachBulk",
    "Attached",
    "BROKER",
    "Begin",
    "Channel",
    "Codec",
    "Contribution",
    "DataRange",
    "Departure",
    "Donor",
    "Encoded",
    "Enrolled",
    "Envelope",
    "FASTEST_STEP_S",
    "Fate",
    "FetchState",
    "FleetState",
    "Follow",
    "FollowBulk",
    "Following",
    "Heartbeat",
    "Join",
    "Leave",
    "MESSAGE_TYPES",
    "Merged",
    "Message",
    "Nothing",
    "OpenRound",
    "Outstanding",
    "PROTOCOL_VERSION",
    "Payload",
    "Phase",
    "RETRY_REASONS",
    "Reached",
    "Reason",
    "Refused",
    "Replica",
    "ReplicaRun",
    "Resolution",
    "Role",
    "Roster",
    "Rostered",
    "RunSettings",
    "SLOWEST_STEP_S",
    "Seed",
    "Share",
    "Standing",
    "StatePart",
    "StateSource",
    "Stored",
    "Tenure",
    "TrainedOn",
    "Version",
    "Want",
    "Welcome",
    "joining",
    "newness",
    "standing_by",
]
