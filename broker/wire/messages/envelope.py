"""Any message with its addresses, and the names of the kinds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from broker.wire.messages.donation import AskDonor, Donor, FetchState, StatePart
from broker.wire.messages.membership import Join, Leave, Refused, Welcome
from broker.wire.messages.observation import Observe, Observed
from broker.wire.messages.probing import Probe, Probed
from broker.wire.messages.rounds import Contribution, FleetState, Heartbeat, HostPart, Nothing, Seed
from broker.wire.messages.shards import Roster, Rostered
from broker.wire.messages.standby import Follow, FollowBulk, Following, Replica, ReplicaRun
from broker.wire.messages.versions import Attach, AttachBulk, Attached, Version, Want, WantBack, WantWhole

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
    | Follow
    | FollowBulk
    | Following
    | Replica
    | ReplicaRun
    | Probe
    | Probed
    | Observe
    | Observed
)


MESSAGE_TYPES: tuple[type[Message], ...] = Message.__args__
#: How headers and refusals spell the kinds.
KINDS: dict[str, type[Message]] = {re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower(): cls for cls in MESSAGE_TYPES}
_NAMES = {cls: kind for kind, cls in KINDS.items()}


def kind_of(message: Message | type[Message]) -> str:
    """Returns the kind of a message or message type, as headers and refusals spell it."""
    return _NAMES[message if isinstance(message, type) else type(message)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message with its addresses.

    Attributes:
        run_id: Messages of other runs are refused.
        sender: Island id with its ``incarnation``; ``join:NONCE`` before it has one; ``aggregator``, ``standby:NAME``,
            ``observer:NAME`` or ``broker``.
        incarnation: 0 for all but islands.
        sequence: Grows by one with each message of a sender's life; named in refusals.
        to: Island id, ``join:NONCE``, ``aggregator``, ``standby:NAME``, ``observer:NAME`` or ``broker``.
        message: The content.
    """

    run_id: str
    sender: str
    incarnation: int
    sequence: int
    to: str
    message: Message
