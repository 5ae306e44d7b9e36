"""Every message that crosses a socket, as a frozen value. The wire form is in PROTOCOL.md and :mod:`broker.codec`.

Two rules shape this list. *State, not edges*: whatever a party must know is repeated in :class:`FleetState` and
:class:`Heartbeat` until it is known, so no message exists whose loss could hang anything. *Identity makes re-sending
safe*: a contribution is named by (island, incarnation, fragment, from_step, to_step), so a copy is recognised.

Field types are limited to str, int, float, bool, enums, other messages' parts, ``X | None`` and tuples of these; the
codec derives its strict checks from the annotations. ``payload`` fields travel as raw frames behind the header.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from broker.fragments import TensorSpec
from broker.ranges import StepRange

PROTOCOL_VERSION = 1


class Channel(StrEnum):
    """The broker's two ports. Small messages never queue behind tensors."""

    CONTROL = "control"
    BULK = "bulk"


class Role(StrEnum):
    """Who may send a message; the broker refuses a kind from the wrong role."""

    ISLAND = "island"
    AGGREGATOR = "aggregator"
    BROKER = "broker"


class Codec(StrEnum):
    """How the elements of a tensor are written on the wire."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def blockwise(self) -> bool:
        """Whether elements are small integers that share a scale, 256 at a time.

        For contributions only: what is rounded away from one is handed over with the next. From a version it would be
        lost, and the islands would train on other parameters than the aggregator steps from.
        """
        return self in (Codec.INT8, Codec.INT4)


class Phase(StrEnum):
    """Where the run stands, as islands see it."""

    SEEDING = "seeding"  # version 0 is not complete yet
    RUNNING = "running"
    FLUSHING = "flushing"  # stop stepping, hand over everything: the last rounds are open
    ENDED = "ended"  # every fragment is flushed and durable


class Reason(StrEnum):
    """Why something was refused: one word for the sender, the log, the counters and status."""

    # the message itself (any kind)
    MALFORMED = "malformed"  # cannot be parsed, or a field is missing, unknown or of the wrong type
    PROTOCOL_VERSION = "protocol_version"
    UNKNOWN_KIND = "unknown_kind"
    WRONG_RUN = "wrong_run"
    OVERSIZE = "oversize"
    CHECKSUM = "checksum"
    WRONG_ROLE = "wrong_role"  # this kind may not come from that sender, or not on that channel
    WRONG_KEY = "wrong_key"  # the key of the connection is bound to another sender, or was revoked
    # joining
    UNKNOWN_ISLAND = "unknown_island"  # not a member: join (again) first
    FENCED = "fenced"  # a later incarnation of this island has joined
    MANIFEST = "manifest"  # the tensors differ from those of the run
    # a contribution, finally
    UNKNOWN_FRAGMENT = "unknown_fragment"
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"
    FUTURE_VERSION = "future_version"  # claims to have trained on a version that does not exist
    STALE = "stale"
    OVERLAP = "overlap"  # some of these steps were handed over already
    NOT_FINITE = "not_finite"
    IMPLAUSIBLE = "implausible"  # counters that do not fit each other or the declared tokens per step
    RUN_ENDED = "run_ended"  # the run is over: nothing is merged any more
    # a contribution, for now: send it again
    QUEUE_FULL = "queue_full"
    NOT_LEADER = "not_leader"
    # waste that nobody refused
    OVERWRITTEN = "overwritten"  # steps dropped by adopting with keep = 0
    ISLAND_LOST = "island_lost"  # trained by an incarnation that ended before handing them over
    UNRECORDED = "unrecorded"  # a gap whose cause was lost with an aggregator


RETRY_REASONS = frozenset({Reason.CHECKSUM, Reason.QUEUE_FULL, Reason.NOT_LEADER})


class Fate(StrEnum):
    """What became of a contribution, or where it is."""

    MERGED = "merged"
    REFUSED = "refused"  # final: its tokens are wasted, by the reason given
    RETRY = "retry"  # not taken, send again
    WAITING = "waiting"  # arrived: in the open round, held for the next one, or being merged
    UNKNOWN = "unknown"  # never seen here, or lost with a restart: send (again)


# --- parts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One tensor on the wire.

    Attributes:
        codec: How ``data`` is written.
        shape: Its dimensions.
        checksum: xxh3_64 of ``data``, as an unsigned integer.
        data: A bytes-like object, often a view of a received frame; never copied on the way through the broker.
    """

    codec: Codec
    shape: tuple[int, ...]
    checksum: int
    data: Any


#: One entry per tensor of the fragment, in manifest order. In virtual time it is whatever the driver merges.
Payload = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedOn:
    """``steps`` inner steps were run on ``fragment_version``."""

    fragment_version: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What an island is told about the run when it joins: the aggregator's configuration decides.

    Attributes:
        sync_interval_steps: H, inner steps between two rounds of one fragment.
        keep: Share of the local progress since capture that survives an adoption; 1 keeps every step.
        codec: Of pseudo-gradients.
        heartbeat_interval_s: How often to send :class:`Heartbeat`.
        total_tokens: Where the run ends; 0 for no end.
        tokens_per_fleet_step: Tokens the fleet as configured trains in one step of each island: the unit of
            ``Island.schedule_step``.
        seed: Of model initialisation and data order; the same on all islands.
    """

    sync_interval_steps: int
    keep: float
    codec: Codec
    heartbeat_interval_s: float
    total_tokens: int
    tokens_per_fleet_step: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of the data that belongs to one island: ``index`` of ``count``, under ``share_epoch``."""

    index: int
    count: int
    share_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRound:
    """A round that waits for this island's answer."""

    round_id: int
    fragment_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outstanding:
    """A contribution whose fate its island does not know yet."""

    fragment_id: int
    from_step: int
    to_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The fate of one contribution of the receiving island."""

    fragment_id: int
    from_step: int
    to_step: int
    fate: Fate
    reason: Reason | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """One contribution in a version: who, which steps, and with what weight."""

    island_id: str
    incarnation: int
    steps: StepRange
    staleness: float
    token_weight: float  # n * n / s, capped at half of the round's sum
    staleness_weight: float  # (1 + staleness) ** -a, times (share of live islands in the round) ** b
    merge_weight: float  # their product over the sum of token weights
    fresh: bool  # False: held over from an earlier round


# --- island -> aggregator -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Asks to take part. Repeated until answered; safe to repeat.

    Attributes:
        nonce: Random name of this process, by which it is addressed until it has an id.
        island_id: The id it wants; empty: assign one.
        hint: A name that survives a restart (host or container name): gets the same id again.
        tensors: Every tensor that is not local.
        tokens_per_step: Tokens in one inner step; the counters of contributions are checked against it.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    nonce: str
    island_id: str
    hint: str
    tensors: tuple[TensorSpec, ...]
    tokens_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Says that the island lives, how far it is, and what it still waits for. Answered by :class:`FleetState`.

    ``versions[p]`` is the version of fragment p in the local parameters, -1 for none; ``overwritten_tokens[p]`` counts
    tokens that adoptions with keep = 0 dropped, over this incarnation.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    inner_step: int
    tokens: int
    loss: float | None
    step_time_s: float | None
    sync_share: float
    bytes_up: int
    bytes_down: int
    versions: tuple[int, ...]
    overwritten_tokens: tuple[int, ...]
    outstanding: tuple[Outstanding, ...]
    stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """Answers an open round: no step was run on this fragment since the last hand-over."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    round_id: int
    fragment_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A last word: the island ends on purpose and is not missed."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    inner_step: int
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """One fragment of version 0, from the island that :class:`FleetState` asked for it. Buffers: float32."""

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    fragment_id: int
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A pseudo-gradient (reference minus local) with the range of steps it hands over.

    Attributes:
        round_id: The round it answers.
        trained_on: Versions its steps were run on, oldest first; the steps add up to ``steps.steps``.
        payload: One buffer per tensor of the fragment.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    round_id: int
    fragment_id: int
    steps: StepRange
    trained_on: tuple[TrainedOn, ...]
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """To the broker: what this island has, and so what it may be sent.

    Each Want grants one transfer (the newest version of one fragment that is newer than ``versions``). The island
    sends the next one as soon as a transfer has begun to be used, and again after silence.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    versions: tuple[int, ...]


# --- aggregator -> island -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answers a join.

    Attributes:
        island_id: The id to use from now on, with ``incarnation``.
        fragments: The run's manifest.
        start_step: Inner step to go on from: the highest step known to have been handed over.
        start_tokens: The token counter at that step.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    nonce: str
    island_id: str
    incarnation: int
    epoch: int
    fragments: tuple[tuple[TensorSpec, ...], ...]
    settings: RunSettings
    share: Share
    start_step: int
    start_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """All that an island must know, in one message: the reply to a heartbeat, and pushed when a round opens.

    Attributes:
        epoch: Of the leader; lower ones are ignored.
        phase: Where the run stands.
        rounds: Open rounds in which this island owes an answer.
        due_soon: Fragments whose rounds open within about one step of this island: copy them at each boundary.
        versions: The newest published version per fragment, -1 for none.
        resolutions: One for each outstanding contribution that the heartbeat named, or that was just resolved.
        seed: Fragments of version 0 that this island is asked to supply.
        trained_tokens: Tokens trained by the fleet as last reported.
        fleet_ratio: Tokens the fleet trains while this island trains one.
        share: This island's part of the data.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    epoch: int
    phase: Phase
    rounds: tuple[OpenRound, ...]
    due_soon: tuple[int, ...]
    versions: tuple[int, ...]
    resolutions: tuple[Resolution, ...]
    seed: tuple[int, ...]
    trained_tokens: int
    fleet_ratio: float
    share: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A published fragment version; the broker keeps the newest of each fragment and hands it out by credit.

    Attributes:
        digest: xxh3_128 of the float32 bytes of the fragment, in hex: names the byte string in the store.
        contributions: Who is in it; empty for version 0.
        payload: The new global parameters of the fragment.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.AGGREGATOR
    epoch: int
    fragment_id: int
    fragment_version: int
    digest: str
    contributions: tuple[Merged, ...]
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A message was not taken, and why. Sent by the broker or the aggregator to whoever sent it."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.BROKER
    kind: str  # of the refused message, or empty when it could not be read
    sequence: int  # of the refused message, or -1
    reason: Reason
    detail: str


# --- aggregator <-> broker ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """The aggregator's heartbeat to the broker, on the control channel: it owns these fragments, under this epoch."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    shard: int
    epoch: int
    versions: tuple[int, ...]  # newest published per fragment, -1 for none


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachBulk:
    """The same on the bulk channel, so that contributions find their way."""

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.AGGREGATOR
    shard: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """The broker's answer: versions it holds. The aggregator publishes again what is missing or older."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.BROKER
    versions: tuple[int, ...]


Message = (
    Join
    | Heartbeat
    | Nothing
    | Leave
    | Seed
    | Contribution
    | Want
    | Welcome
    | FleetState
    | Version
    | Refused
    | Attach
    | AttachBulk
    | Attached
)
MESSAGE_TYPES: tuple[type[Message], ...] = Message.__args__


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message with its addresses.

    Attributes:
        run_id: Messages of other runs are refused.
        sender: Island id with its ``incarnation``; ``join:NONCE`` before it has one; ``aggregator`` or ``broker``.
        incarnation: 0 for all but islands.
        sequence: Grows by one with each message of a sender's life; named in refusals.
        to: Island id, ``join:NONCE``, ``aggregator`` or ``broker``.
        message: The content.
    """

    run_id: str
    sender: str
    incarnation: int
    sequence: int
    to: str
    message: Message


AGGREGATOR = "aggregator"
BROKER = "broker"


def joining(nonce: str) -> str:
    """The address of an island that has no id yet."""
    return f"join:{nonce}"
