"""Messages of membership: join, welcome, refusal, leave, and the donation of optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from broker.wire.fragments import TensorSpec
from broker.wire.messages.recipe import Demand, Recipe
from broker.wire.messages.values import WHOLE, Block, Channel, Payload, Reason, Role, Share


class Departure(StrEnum):
    """The manner in which an island leaves its run."""

    CLOSED = "closed"  # its training loop has ended: nobody goes on
    PAUSED = "paused"  # it has kept its unmerged progress: its next process goes on as the same life
    STOPPED = "stopped"  # its process ends, and another one may come; what was not handed over is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of the run that an island gets when it joins, from the aggregator's configuration.

    Attributes:
        recipe: What decides learning, settled.
        total_tokens: Where the run ends; 0 for no end.
        tokens_per_fleet_step: Tokens that as many islands as are configured train in one step, if all have this
            one's ``tokens_per_step``: the unit of ``Island.schedule_step``.
        seed: The seed of model initialisation and data order; the same on all islands.
        data_ahead_s: Seconds of training for which an island is given data at a time, in blocks.
    """

    recipe: Recipe
    heartbeat_interval_s: float
    total_tokens: int
    tokens_per_fleet_step: int
    seed: int
    islands: int
    data_ahead_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """An island asks to join. Repeated until answered; safe to repeat.

    Attributes:
        nonce: Random name of this process, by which it is addressed until it has an id.
        island_id: The id it wants; empty: assign one.
        hint: A name that survives a restart (host or container name): gets the same id again.
        resumes: Nonce of the process that kept its unmerged progress, and as whose life this one goes on; empty: none.
        tensors: Every tensor that is not local.
        tokens_per_step: Tokens in one inner step; the counters of contributions are checked against it.
        inner_optimizer: Its name, if known; that of the first island decides what the recipe leaves open.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    nonce: str
    island_id: str
    hint: str
    tensors: tuple[TensorSpec, ...]
    tokens_per_step: int
    resumes: str = ""
    inner_optimizer: str = ""
    demands: tuple[Demand, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """An island ends on purpose; ``departure`` says how, and nobody waits for it."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    inner_step: int
    tokens: int
    reason: str
    departure: Departure = Departure.STOPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The answer to :class:`Join`.

    Attributes:
        island_id: The id to use from now on, with ``incarnation``.
        start_step: Inner step to go on from: the highest step known to have been handed over, with ``start_tokens``.
        blocks: The island's blocks of the data. ``share`` is always all of them, and ``taken_over`` empty.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    nonce: str
    island_id: str
    incarnation: int
    epoch: int
    fragments: tuple[tuple[TensorSpec, ...], ...]
    settings: RunSettings
    share: Share = WHOLE
    taken_over: tuple[Share, ...] = ()
    blocks: tuple[Block, ...] = ()
    start_step: int
    start_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The broker or the aggregator tells a sender that its message was refused, with the reason."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.BROKER
    kind: str  # of the refused message, or empty when it could not be read
    sequence: int  # of the refused message, or -1
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDonor:
    """Asks for an island that can give its optimizer state; those in ``tried`` failed. Repeated."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    tried: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchState:
    """Asks a donor for parts of its optimizer's state; missing parts are asked for again.

    ``state_id`` is empty for the first part: whatever copy the donor holds or makes. Parts of another copy than the one
    begun are of no use.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    state_id: str
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """Part ``part`` of ``num_parts`` of a donor's state; ``num_parts`` 0: it has none.

    Attributes:
        state_id: Names the copy that it is cut from.
        state_bytes: Bytes of all parts together, without the padding of the last one.
        payload: One buffer; its bytes are of any kind, and called ``f32`` because four of them make an element.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    state_id: str
    part: int
    num_parts: int
    state_bytes: int
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFiles:
    """Asks an island for a part of its model's small files; missing parts are asked for again."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    digest: str
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesPart:
    """A part of a model's small files, for the aggregator; ``num_bytes`` 0: none with that digest.

    Attributes:
        digest: The digest of all of them (:mod:`broker.process.small_files`).
        num_bytes: Bytes of all parts together, without the padding of the last one.
        payload: One buffer; its bytes are of any kind, as those of a :class:`StatePart`.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    digest: str
    part: int
    num_bytes: int
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Donor:
    """Answers :class:`AskDonor`: ask ``island_id`` for its state; empty: no island is left to ask.

    ``wait_s`` is the silence of the donor after which to ask for another one.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    island_id: str
    wait_s: float
