"""The messages between the hosts of an island, and their form: a msgpack header, raw buffers. Pure.

They stay within an island, over connections that only its hosts have the keys of, and all hosts run one version of this
program: there is no protocol version, and nobody resends. What a message says is checked as strictly as on the wire
(:mod:`broker.wire.schema`).

Orders are carried out by a host one after the other. Each names how many boundaries the speaker had seen when it gave
it (``after``): a host that is not there yet waits before it continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from broker.base.errors import ConfigError
from broker.wire.fragments import Region, TensorSpec
from broker.wire.headers import Buffer
from broker.wire.messages import Block, Codec, RunSettings, StateSource
from broker.wire.schema import Record
from islands.arrays.regions import HeldTensor

# --- parts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A version that a host has placed beside its parameters; plans may name it from then on."""

    fragment_id: int
    fragment_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan: the work of all hosts between two steps, and the run's state for their loops from then on.

    Attributes:
        installs: Versions, in this order.
        fresh_optimizer: The local state was spoilt: the inner optimizer starts afresh.
        copies: Fragments to copy, after that.
        snapshot: Whether to copy the optimizer's state.
        done: Training ends.
        life: Incarnation that the data are of.
        blocks: The island's blocks of the data.
        trained_tokens: The progress of the run (:class:`islands.protocol.fleet.Progress`); with the next two.
    """

    installs: tuple[Placed, ...] = ()
    fresh_optimizer: bool = False
    copies: tuple[int, ...] = ()
    snapshot: bool = False
    done: bool = False
    life: int = 0
    blocks: tuple[Block, ...] = ()
    trained_tokens: int = 0
    own_tokens: int = 0
    ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLeaf:
    """One leaf of the optimizer's state, or of the local parameters: one buffer for each of ``regions``.

    No regions: the buffer is all of it; ``shape`` is that of the whole leaf.
    """

    name: str
    sort: str
    dtype: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...] = ()


# --- from a host to the speaker -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A host introduces itself and names its tensors and regions."""

    token: str
    tensors: tuple[HeldTensor, ...]
    tokens_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAt:
    """A host is alive: the last boundary it came to, and whether training has stopped."""

    step: int
    stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A host's vote: promised, or its training is past that step; ``step`` is its last boundary."""

    number: int
    promised: bool
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """A host waits for the optimizer's state: its leaves, with the regions that it has of them."""

    state: tuple[StateLeaf, ...]
    local: tuple[StateLeaf, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A host's part of a copy of the optimizer's state: its share of leaves spread over hosts."""

    boundary: int
    leaves: tuple[StateLeaf, ...]


# --- from the speaker to every host -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """The speaker is alive; hosts may drop copies older than its first ``after`` boundaries."""

    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistaken:
    """A setting is wrong: the field, the value and the cure of the error that every host ends with."""

    field: str
    value: str
    cure: str

    @classmethod
    def of(cls, error: ConfigError) -> Mistaken:
        """Returns the message that tells other hosts of an error."""
        return cls(field=error.field, value=str(error.value), cure=error.cure)

    def error(self) -> ConfigError:
        """Returns the error that a host raises on this message."""
        return ConfigError(self.field, self.value, self.cure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The island is a member of the run; ``blocks`` are its data."""

    island_id: str
    incarnation: int
    start_step: int
    start_tokens: int
    fragments: tuple[tuple[TensorSpec, ...], ...]
    settings: RunSettings
    blocks: tuple[Block, ...]
    handed: tuple[HeldTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """To every host: stop at the boundary after ``step`` until this plan is decided."""

    number: int
    step: int
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """To every host: the plan is carried out at its step, or nowhere."""

    number: int
    fixed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An order to carry out a plan while no host trains: before the first step or after the last one."""

    after: int
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRegions:
    """An order: encode regions of the initial parameters of the run's seed."""

    after: int
    fragment_id: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRegions:
    """An order: encode reference minus copy, for the copy of this boundary; advance the reference."""

    after: int
    fragment_id: int
    boundary: int
    from_step: int
    to_step: int
    codec: Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPart:
    """An order to send, or send again, an encoded part to the aggregator, as a life of the island.

    ``to_step`` is 0 for a fragment of version 0.
    """

    after: int
    fragment_id: int
    from_step: int
    to_step: int
    island_id: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenParts:
    """An order: keep only these ranges of a fragment's encoded parts, for sending again."""

    after: int
    fragment_id: int
    open_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRegions:
    """An order: place a version, in float32, one buffer for each region that the host has."""

    after: int
    fragment_id: int
    fragment_version: int
    keep: float
    mixes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The first state of the optimizer, one buffer for each region asked for; without leaves it is fresh."""

    source: StateSource
    incarnation: int
    step: int
    tokens: int
    cursor: int | None
    state: tuple[StateLeaf, ...]
    local: tuple[StateLeaf, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """An order: send contributions through the broker at this position of the configured list."""

    broker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """An order: :meth:`islands.Island.close` may return."""

    after: int
    delivered: bool
    finished: bool


# --- from either ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """A host leaves; ``ended``: with all others at the end of training."""

    reason: str
    ended: bool


HostMessage = (
    Hello
    | HostAt
    | Answer
    | Placed
    | Needs
    | Copied
    | Alive
    | Mistaken
    | Terms
    | Proposal
    | Decision
    | Standing
    | EncodeRegions
    | CaptureRegions
    | SendPart
    | OpenParts
    | PrepareRegions
    | Begin
    | Use
    | Ending
    | Goodbye
)
#: The orders that a host carries out one after the other.
Order = Alive | Standing | EncodeRegions | CaptureRegions | SendPart | OpenParts | PrepareRegions | Ending

_RECORDS = {cls.__name__: Record(cls) for cls in HostMessage.__args__}


def packed(message: HostMessage, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """Returns the frames of a message: its header, then its buffers as they are.

    Raises:
        broker.wire.schema.Unfit: A value does not fit its field.
    """
    name = type(message).__name__
    return [msgpack.packb([name, _RECORDS[name].write(message)]), *buffers]


def unpacked(frames: Sequence[Buffer]) -> tuple[Any, tuple[memoryview, ...]]:
    """Returns a message and its buffers, as views of the received frames.

    Raises:
        ValueError, TypeError, KeyError, and errors of msgpack and of the schema: It is no message.
    """
    name, body = msgpack.unpackb(frames[0])
    return _RECORDS[name].read(body), tuple(memoryview(frame) for frame in frames[1:])
