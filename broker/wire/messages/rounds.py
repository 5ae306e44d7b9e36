"""Messages of rounds: heartbeats, fleet state, seeds, contributions and resolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from broker.wire.messages.values import (
    WHOLE,
    Block,
    Channel,
    DataRange,
    Fate,
    Payload,
    Phase,
    Place,
    Reason,
    Role,
    Share,
    StateSource,
    TrainedOn,
)
from broker.wire.number_formats import Codec
from broker.wire.ranges import StepRange

#: ``round_id`` of a contribution that was handed over unasked: it answers whichever round takes it in.
UNASKED = 0


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


#: Seconds per inner step that a heartbeat may claim: no training loop is faster, and none that is slower than a day a
#: step is of use. Islands keep what they report within it.
FASTEST_STEP_S, SLOWEST_STEP_S = 1e-6, 1e5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """An island's link as measured by chunks, and the number format that the island sends over it.

    What is not known of the link is None.
    """

    up: float | None  # bytes/s
    down: float | None  # bytes/s
    round_trip_s: float | None  # from a chunk to the note of it, over the idle link
    codec: Codec  # of the pseudo-gradients that it sends
    share: float  # of the rounds, in which it takes part


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """An island's sign of life, progress and outstanding contributions; :class:`FleetState` answers.

    ``versions[p]`` is the version of fragment p in the local parameters, -1 for none: none yet, or they were found
    corrupt and are about to be adopted anew. ``overwritten_tokens[p]`` counts tokens that adoptions with keep = 0
    dropped, or that were trained on what was corrupt, over this incarnation. ``optimizer`` says what its inner
    optimizer started from. ``block`` is the number of the block of data that it trains, 0 for none: those with higher
    numbers it has not begun. ``released`` lists blocks that it has by the last :class:`FleetState`, and needs no more:
    they are trained, and what became of that is known. ``link`` is the way to its broker; None: it says nothing of it.
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
    block: int = 0
    released: tuple[int, ...] = ()
    link: LinkUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """The answer to an open round if no step was run since the fragment's last hand-over."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    round_id: int
    fragment_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """One fragment of version 0, from the island that :class:`FleetState` asked. Buffers: float32.

    ``hosts`` and ``places`` as in :class:`Contribution`.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    fragment_id: int
    hosts: int = 1
    places: tuple[Place, ...] = ()
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A pseudo-gradient (reference minus local) with the range of steps it hands over.

    Attributes:
        round_id: The round it answers; :data:`UNASKED`: the next one of its fragment.
        trained_on: Versions its steps were run on, oldest first; the steps add up to ``steps.steps``.
        data: Batches its steps were trained on; they add up likewise. Empty: its island does not say.
        hosts: How many hosts the island has. With more than one this is the part of its speaker, host 0, and each of
            the others sends a :class:`HostPart`.
        places: The place of each buffer, for an island of several hosts; else none.
        payload: One buffer per tensor of the fragment; of several hosts, those regions that this one hands over.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    round_id: int
    fragment_id: int
    steps: StepRange
    trained_on: tuple[TrainedOn, ...]
    data: tuple[DataRange, ...] = ()
    hosts: int = 1
    places: tuple[Place, ...] = ()
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart:
    """One host's regions of a contribution or seed, if the island has several hosts; perhaps none.

    The speaker's own part is in the :class:`Contribution` or the :class:`Seed` itself. Both steps are 0 for a seed;
    ``host`` counts from 1.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    fragment_id: int
    from_step: int
    to_step: int
    host: int
    hosts: int
    places: tuple[Place, ...]
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """The run's state for an island: the reply to a heartbeat, also sent when a round opens.

    With several shards each sends its own: it speaks of its fragments (:func:`broker.wire.fragments.shard_of`), and of
    all else only shard 0 is believed.

    Attributes:
        epoch: The epoch of the leader of this shard; lower ones are ignored.
        rounds: Open rounds in which this island owes an answer.
        due_soon: Fragments whose rounds open within two steps and H / P more: copies of them are taken ahead.
        versions: The newest published version per fragment, -1 for none and for those of other shards.
        resolutions: One for each outstanding contribution that the heartbeat named, or that was just resolved.
        seed: Fragments of version 0 that this island is asked to supply.
        trained_tokens: Tokens of the fleet that count, as last reported: of what islands claim, what is believed.
        fleet_ratio: Tokens of the fleet that count while this island trains one.
        blocks: The island's blocks of the data; a missing one is no longer its own. ``share`` is all of the data.
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
    share: Share = WHOLE
    taken_over: tuple[Share, ...] = ()
    blocks: tuple[Block, ...] = ()
    shard: int = 0
    shards: int = 1
