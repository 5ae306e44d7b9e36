"""All messages, as frozen dataclasses. PROTOCOL.md and :mod:`broker.wire.frames` have the wire format.

Two rules shape this list. *State, not edges*: whatever a party must know is repeated in :class:`FleetState` and
:class:`Heartbeat` until it is known, so no message exists whose loss could hang anything. *Identity makes re-sending
safe*: a contribution is named by (island, incarnation, fragment, from_step, to_step), so a copy is recognised.

Field types are limited to str, bytes, int, float, bool, enums, other messages' parts, ``X | None`` and tuples of these;
the codec derives its strict checks from the annotations. ``payload`` fields travel as raw frames behind the header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from broker.wire.messages.membership import (
    AskDonor,
    Departure,
    Donor,
    FetchFiles,
    FetchState,
    FilesPart,
    Join,
    Leave,
    Refused,
    RunSettings,
    StatePart,
    Welcome,
)
from broker.wire.messages.observation import (
    MAX_PROBE_BUFFERS,
    PROBE_BUFFER_BYTES,
    Inquiry,
    Observe,
    Observed,
    Probe,
    Probed,
    probe_payload,
)
from broker.wire.messages.recipe import (
    RECIPE,
    Demand,
    MergeRule,
    Pacing,
    Profile,
    Recipe,
    own_rule,
    recipe_digest,
    recipe_line,
    recipe_of,
    recipe_table,
)
from broker.wire.messages.rounds import (
    FASTEST_STEP_S,
    SLOWEST_STEP_S,
    UNASKED,
    Contribution,
    FleetState,
    Heartbeat,
    HostPart,
    LinkUse,
    Nothing,
    OpenRound,
    Outstanding,
    Resolution,
    Seed,
)
from broker.wire.messages.shards import Begin, Enrolled, Reached, Roster, Rostered, Standings, Tenure, Trusted
from broker.wire.messages.standby import Follow, FollowBulk, Following, Replica, ReplicaRun, Standing, Stored, newness
from broker.wire.messages.values import (
    AGGREGATOR,
    BROKER,
    OWN_PASS,
    PROTOCOL_VERSION,
    RETRY_REASONS,
    Block,
    Channel,
    DataRange,
    Encoded,
    Fate,
    Merged,
    Payload,
    Phase,
    Place,
    Reason,
    Role,
    Share,
    StateSource,
    TrainedOn,
    joining,
    observing,
    standing_by,
)
from broker.wire.messages.versions import Attach, AttachBulk, Attached, Version, Want, WantBack, WantWhole
from broker.wire.number_formats import Codec

Message = (
    Join
    | Heartbeat
    | Nothing
    | Leave
    | Seed
    | Contribution
    | HostPart
    | Want
    | AskDonor
    | FetchState
    | StatePart
    | Welcome
    | FleetState
    | Donor
    | Version
    | Refused
    | Attach
    | AttachBulk
    | Attached
    | WantWhole
    | WantBack
    | Roster
    | Rostered
    | Standings
    | Follow
    | FollowBulk
    | Following
    | Replica
    | ReplicaRun
    | Probe
    | Probed
    | Observe
    | Observed
    | FetchFiles
    | FilesPart
)


MESSAGE_TYPES: tuple[type[Message], ...] = Message.__args__
#: How headers and refusals spell the kinds.
KINDS: dict[str, type[Message]] = {re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower(): cls for cls in MESSAGE_TYPES}
_NAMES = {cls: kind for kind, cls in KINDS.items()}


def kind_of(message: Message | type[Message]) -> str:
    """Returns the kind of a message or message type, as written in headers and refusals."""
    return _NAMES[message if isinstance(message, type) else type(message)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message with sender, receiver and sequence number.

    Attributes:
        sender: Island id with its ``incarnation``; ``join:NONCE`` before it has one; ``aggregator``, ``standby:NAME``,
            ``observer:NAME`` or ``broker``.
        incarnation: 0 for all but islands.
        sequence: Grows by one with each message of a sender's life; named in refusals.
        to: As ``sender``.
        frames: The message on the wire, once it was encoded or as it was received; one that is passed on goes as it
            came. ``dataclasses.replace`` does not copy it.
        nbytes: Of all frames; 0 until there are any.
    """

    run_id: str
    sender: str
    incarnation: int
    sequence: int
    to: str
    message: Message
    frames: tuple[Any, ...] | None = field(default=None, init=False, repr=False, compare=False)
    nbytes: int = field(default=0, init=False, repr=False, compare=False)
