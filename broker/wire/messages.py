"""Every message that crosses a socket, as a frozen value. The wire form is in PROTOCOL.md and :mod:`broker.wire.codec`.

Two rules shape this list. *State, not edges*: whatever a party must know is repeated in :class:`FleetState` and
:class:`Heartbeat` until it is known, so no message exists whose loss could hang anything. *Identity makes re-sending
safe*: a contribution is named by (island, incarnation, fragment, from_step, to_step), so a copy is recognised.

Field types are limited to str, bytes, int, float, bool, enums, other messages' parts, ``X | None`` and tuples of these;
the codec derives its strict checks from the annotations. ``payload`` fields travel as raw frames behind the header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from broker.wire.fragments import TensorSpec
from broker.wire.ranges import StepRange

PROTOCOL_VERSION = 4


class Channel(StrEnum):
    """The broker's two ports. Small messages never queue behind tensors."""

    CONTROL = "control"
    BULK = "bulk"


class Role(StrEnum):
    """Who may send a message; the broker refuses a kind from the wrong role."""

    ISLAND = "island"
    AGGREGATOR = "aggregator"
    STANDBY = "standby"
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


class StateSource(StrEnum):
    """Where a life of an island has the state of its inner optimizer from."""

    PENDING = "pending"  # not decided yet
    CHECKPOINT = "checkpoint"  # its own
    DONOR = "donor"  # another island's
    FRESH = "fresh"  # an optimizer that has seen no step


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
    REPLAYED = "replayed"  # this sequence number has come over this connection before
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
    OUTLIER = "outlier"  # far longer than what the fleet sends: its norm per step
    IMPLAUSIBLE = "implausible"  # counters that do not fit each other or the declared tokens per step
    QUARANTINED = "quarantined"  # the island has offended again and again: not looked at for a while
    SHARE_MOVED = "share_moved"  # trained on data that is in the hands of another island by now
    RUN_ENDED = "run_ended"  # the run is over: nothing is merged any more
    # a contribution, for now: send it again
    QUEUE_FULL = "queue_full"
    NOT_LEADER = "not_leader"
    # waste that nobody refused
    OVERWRITTEN = "overwritten"  # steps dropped by adopting with keep = 0
    ISLAND_LOST = "island_lost"  # trained by an incarnation that ended before handing them over
    UNRECORDED = "unrecorded"  # a gap whose cause was lost with an aggregator
    STORE_LOST = "store_lost"  # merged into versions that were lost with a store, and given up by the operator


RETRY_REASONS = frozenset({Reason.CHECKSUM, Reason.QUEUE_FULL, Reason.NOT_LEADER})


class Departure(StrEnum):
    """How an island leaves its run."""

    CLOSED = "closed"  # its training loop has ended: nobody goes on
    PAUSED = "paused"  # it has kept its unmerged progress: its next process goes on as the same life
    STOPPED = "stopped"  # its process ends, and another one may come; what was not handed over is lost


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
        tokens_per_fleet_step: Tokens that as many islands as are configured train in one step, if all have this
            one's ``tokens_per_step``: the unit of ``Island.schedule_step``.
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
    """A part of the data in one island's hands: ``index`` of ``count``, from batch ``cursor`` on.

    ``share_epoch`` grows with each change of hands. ``lane`` counts passes over the data, for islands beyond the
    expected number, each in an order of its own.
    """

    index: int
    count: int
    share_epoch: int
    lane: int = 0
    cursor: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRange:
    """Batches ``[from_batch, to_batch)`` of share number ``share``, which is ``lane * count + index``."""

    share: int
    share_epoch: int
    from_batch: int
    to_batch: int


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
class Stored:
    """The newest version of one fragment in a standby's store, or at a broker."""

    fragment_id: int
    fragment_version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolled:
    """An island in shard 0's books: its present life, and where that began, once ``begun`` says that this is known."""

    island_id: str
    index: int
    hint: str
    incarnation: int
    nonce: str
    tokens_per_step: int
    left: bool
    begun: bool
    start_step: int
    start_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """A share in one island's hands, from batch ``cursor`` on; empty ``owner``: in nobody's."""

    share: int
    owner: str
    share_epoch: int
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The furthest step of an island that one shard knows, and the token counter there."""

    island_id: str
    step: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The furthest batch of a share that one shard has merged, or holds: one past it."""

    share: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """One contribution in a version: who, which steps, and with what weight."""

    island_id: str
    incarnation: int
    steps: StepRange
    staleness: float
    token_weight: float  # n * n / s, with n / s near the fleet's; of three or more at most half of the sum
    staleness_weight: float  # (1 + staleness) ** -a, times (share of live islands in the round) ** b, and less if cut
    merge_weight: float  # their product over the sum of token weights
    fresh: bool  # False: held over from an earlier round
    data: tuple[DataRange, ...] = ()  # what the steps were trained on


# --- island -> aggregator -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Asks to take part. Repeated until answered; safe to repeat.

    Attributes:
        nonce: Random name of this process, by which it is addressed until it has an id.
        island_id: The id it wants; empty: assign one.
        hint: A name that survives a restart (host or container name): gets the same id again.
        resumes: Nonce of the process that kept its unmerged progress, and as whose life this one goes on; empty: none.
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
    resumes: str = ""


#: Seconds per inner step that a heartbeat may claim: no training loop is faster, and none that is slower than a day a
#: step is of use. Islands keep what they report within it.
FASTEST_STEP_S, SLOWEST_STEP_S = 1e-6, 1e5


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Says that the island lives, how far it is, and what it still waits for. Answered by :class:`FleetState`.

    ``versions[p]`` is the version of fragment p in the local parameters, -1 for none; ``overwritten_tokens[p]`` counts
    tokens that adoptions with keep = 0 dropped, over this incarnation; ``optimizer`` says what its inner optimizer
    started from.
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
    optimizer: StateSource = StateSource.PENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """Answers an open round: no step was run on this fragment since the last hand-over."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    round_id: int
    fragment_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A last word: the island ends on purpose and is not missed; ``departure`` says what becomes of its life."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    inner_step: int
    tokens: int
    reason: str
    departure: Departure = Departure.STOPPED


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
        data: Batches its steps were trained on; they add up likewise. Empty: its island does not say.
        payload: One buffer per tensor of the fragment.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    round_id: int
    fragment_id: int
    steps: StepRange
    trained_on: tuple[TrainedOn, ...]
    data: tuple[DataRange, ...] = ()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDonor:
    """Asks which island may give its optimizer state; ``tried`` were named and failed. Repeated until answered."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    tried: tuple[str, ...]


# --- island -> island, through the broker -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchState:
    """To a donor: send these parts of your optimizer's state; what does not come is asked for again.

    ``state_id`` is empty for the first part: whatever copy the donor holds or makes. Parts of another copy than the one
    begun are of no use.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    state_id: str
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """Part ``part`` of ``num_parts`` of a donor's state, for who asked; ``num_parts`` 0: it has none to give.

    Attributes:
        state_id: Names the copy that it is cut from.
        state_bytes: Of all parts together, without what fills the last one up to whole elements.
        payload: One buffer; its bytes are of any kind, and called ``f32`` because four of them make an element.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    state_id: str
    part: int
    num_parts: int
    state_bytes: int
    payload: Payload


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
    taken_over: tuple[Share, ...] = ()
    start_step: int
    start_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """All that an island must know, in one message: the reply to a heartbeat, and pushed when a round opens.

    With several shards each sends its own: it speaks of its fragments (:func:`broker.wire.fragments.shard_of`), and of
    all else only shard 0 is believed.

    Attributes:
        epoch: Of the leader of this shard; lower ones are ignored.
        phase: Where the run stands.
        rounds: Open rounds in which this island owes an answer.
        due_soon: Fragments whose rounds open within two steps and H / P more: copy them at each boundary.
        versions: The newest published version per fragment, -1 for none and for those of other shards.
        resolutions: One for each outstanding contribution that the heartbeat named, or that was just resolved.
        seed: Fragments of version 0 that this island is asked to supply.
        trained_tokens: Tokens trained by the fleet as last reported.
        fleet_ratio: Tokens the fleet trains while this island trains one.
        share: This island's own part of the data.
        taken_over: Parts of islands that are away; whatever is not listed any more is theirs again.
        shard: Whose fragments this is about, of ``shards``.
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
    taken_over: tuple[Share, ...] = ()
    shard: int = 0
    shards: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Donor:
    """Answers :class:`AskDonor`: ``island_id`` may be asked for its state; empty: nobody is left who could give one.

    ``wait_s`` is the silence of the donor after which to ask for another one.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    island_id: str
    wait_s: float


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
    shard: int = 0
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
    """The aggregator's heartbeat to the broker, on the control channel: it leads this shard, under this epoch.

    ``versions`` are the newest published ones per fragment, -1 for none and for fragments of other shards. ``ended``:
    the run is over, which the broker tells whoever comes later.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    shard: int
    epoch: int
    versions: tuple[int, ...]
    shards: int = 1
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachBulk:
    """The same on the bulk channel, so that contributions find their way."""

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.AGGREGATOR
    shard: int
    epoch: int
    shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """The broker's answer: versions it holds. The aggregator publishes again what is missing or older."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.BROKER
    versions: tuple[int, ...]


# --- shard 0 <-> the other shards -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """What shard 0 has decided for all: the phase, who seeds, the islands with their lives, and the data shares.

    Repeated until :class:`Rostered` says that it is durable there; see :mod:`aggregator.rounds.roster`.

    Attributes:
        to_shard: Whom it is for.
        epoch: Of the leader of shard 0.
        serial: Of its run record that says so; grows under one epoch.
        phase: Of the run.
        seeding_id: Of the present attempt at version 0; 0: of none yet.
        seeder: The island that is asked for it, empty for none.
        seeder_incarnation: Its life.
        fragments: The run's manifest; empty before the first island joins.
        members: Every island that ever joined.
        tenures: Every share that was ever given to anybody.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    to_shard: int
    epoch: int
    serial: int
    phase: Phase
    seeding_id: int
    seeder: str
    seeder_incarnation: int
    fragments: tuple[tuple[TensorSpec, ...], ...]
    members: tuple[Enrolled, ...]
    tenures: tuple[Tenure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rostered:
    """Another shard's heartbeat to shard 0: which roster is durable there, and what shard 0 must know to decide.

    Attributes:
        shard: Who says it.
        epoch: Of its leader.
        roster_epoch: With ``roster_serial``: of the newest roster that is durable there; 0: of none in this life.
        seeding_id: Of the attempt at version 0 that is durable there whole; 0: none is.
        flushed: Its flush is done, as far as it can be.
        begins: Where islands go on whose new life has not begun.
        reached: How far shares that belong to nobody were trained.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    shard: int
    epoch: int
    roster_epoch: int
    roster_serial: int
    seeding_id: int
    flushed: bool
    begins: tuple[Begin, ...]
    reached: tuple[Reached, ...]


# --- leader <-> standby ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """A standby's heartbeat: what is durable in its store. Request, acknowledgement and sign of life in one.

    The broker answers with :class:`Following` and passes it on to the leader, which sends whatever differs.

    Attributes:
        shard: Whose fragments it follows.
        epoch: Of the leader that it follows: it takes nothing of a lower one any more. 0: of none yet.
        stored: The newest version per fragment, as far as there is one.
        made_under: The epoch under which the last of them was made, as far as the store can tell; 0: there is none.
        run_epoch: With ``run_serial``: of the newest run record in its store.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.STANDBY
    shard: int
    epoch: int
    stored: tuple[Stored, ...]
    made_under: int
    run_epoch: int
    run_serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowBulk:
    """The same on the bulk channel, so that replicas find their way."""

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.STANDBY
    shard: int


def newness(made_under: int, stored: Sequence[Stored]) -> tuple[int, int]:
    """Returns what orders the stores of a shard: the epoch of their last version, then how many versions there were."""
    return made_under, sum(each.fragment_version + 1 for each in stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What another standby has, as its last :class:`Follow` said."""

    name: str
    made_under: int
    stored: tuple[Stored, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """The broker's answer to a standby: what it knows of the leader and of the model.

    Attributes:
        epoch: The highest one seen of this shard, 0 for none.
        leader_heard_ago_s: Since the leader was heard last; None if nobody leads here.
        stored: The newest version of each fragment that the broker holds.
        newest: Of the other standbys of this shard that were heard lately, the one with the newest store.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.BROKER
    epoch: int
    leader_heard_ago_s: float | None
    stored: tuple[Stored, ...]
    newest: Standing | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A commit on its way into a standby's store: all that is durable with one fragment version.

    Attributes:
        round_id: That made the version: of two replicas of a fragment under one epoch, the later one has the higher.
        commit: The record of :mod:`aggregator.state.records`, as msgpack.
        payload: Parameters and momentum of the fragment, each one float32 vector.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.AGGREGATOR
    shard: int
    epoch: int
    fragment_id: int
    fragment_version: int
    digest: str
    round_id: int
    commit: bytes
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRun:
    """The run record on its way into a standby's store: manifest, members and their incarnations."""

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.AGGREGATOR
    shard: int
    epoch: int
    serial: int
    record: bytes


Message = (
    Join
    | Heartbeat
    | Nothing
    | Leave
    | Seed
    | Contribution
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
    | Roster
    | Rostered
    | Follow
    | FollowBulk
    | Following
    | Replica
    | ReplicaRun
)
MESSAGE_TYPES: tuple[type[Message], ...] = Message.__args__


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message with its addresses.

    Attributes:
        run_id: Messages of other runs are refused.
        sender: Island id with its ``incarnation``; ``join:NONCE`` before it has one; ``aggregator``, ``standby:NAME``
            or ``broker``.
        incarnation: 0 for all but islands.
        sequence: Grows by one with each message of a sender's life; named in refusals.
        to: Island id, ``join:NONCE``, ``aggregator``, ``standby:NAME`` or ``broker``.
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


def standing_by(name: str) -> str:
    """The address of a standby aggregator."""
    return f"standby:{name}"


def joining(nonce: str) -> str:
    """The address of an island that has no id yet."""
    return f"join:{nonce}"
