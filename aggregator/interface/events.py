"""The events and actions of the aggregator's state machine.

Anything that takes time is an action whose completion is another event: ``Plant`` and ``Merge`` end in ``Computed`` or
``MergeFailed``, ``Persist`` in ``Persisted`` or ``PersistFailed``, ``SaveRun`` in ``RunSaved``, ``KeepFiles`` in
``FilesKept``. The core accepts any event meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, dataclass_transform

from broker.routing.resending import Carried
from broker.wire.fragments import FragmentManifest, Region
from broker.wire.messages import Codec, Encoded, Envelope, Merged, Message, Payload, Reason, Refused
from broker.wire.ranges import StepRange

#: Contributions of one round whose directions are compared, each with each.
MOST_COMPARED = 16

# --- in -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """A flaw that the driver found in a payload; the core never reads one."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The inspection of a payload: a flaw, or else the finite Euclidean norm of all its tensors."""

    flaw: Flaw | None = None
    norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A well-formed message arrived.

    ``broker`` is the place of the one it came by in the configuration, ``norm`` that of its payload, None if it has
    none or a flaw. With a broker's answers to Attach comes what the bulk connection to it has ``carried``.
    """

    envelope: Envelope
    flaw: Flaw | None = None
    payload_bytes: int = 0
    broker: int = 0
    norm: float | None = None
    carried: Carried | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The parameters of ``fragment_version`` are in memory; ``digest`` names their bytes.

    ``cosines`` are those between any two of the parts that were compared (:attr:`Merge.compared`), row by row,
    ``momentum_cosine`` that of the merge and the momentum before it, which says how much successive moves agree.

    Reported for the newest order of a fragment only: what an abandoned seed brings is never heard of.
    """

    fragment_id: int
    fragment_version: int
    digest: str
    cosines: tuple[float, ...] = ()
    momentum_cosine: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeFailed:
    """A merge failed, because the version before it is damaged. The core asks again later."""

    fragment_id: int
    fragment_version: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted:
    """A commit is durable everywhere it must be."""

    fragment_id: int
    fragment_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFailed:
    """A commit is not durable; nothing was published. The core asks again after a while."""

    fragment_id: int
    fragment_version: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSaved:
    """The run record with this serial number, and so every earlier one, is durable."""

    serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSaveFailed:
    """The run record could not be written."""

    serial: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesKept:
    """The small files beside the store have this digest, or ``detail`` says why none were written."""

    digest: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """A broker refused this aggregator's message of that ``kind``: a later epoch leads there."""

    broker: int
    kind: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLetIn:
    """A broker refused to attach this aggregator, which counts other shards than those that lead there."""

    broker: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The time that :meth:`aggregator.rounds.core.Aggregator.next_deadline_s` asked for has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The operator ends the run now (Ctrl-C, SIGTERM): nothing is flushed."""


def refusal_of_ours(refused: Refused, broker: int) -> Fenced | NotLetIn | None:
    """Returns the meaning of a broker's refusal of our message; None if the message is just sent again."""
    if refused.reason is Reason.FENCED:
        return Fenced(broker=broker, kind=refused.kind, detail=refused.detail)
    if refused.reason is Reason.IMPLAUSIBLE and refused.kind == "attach":
        return NotLetIn(broker=broker, detail=refused.detail)
    return None


Event = (
    Received
    | Computed
    | MergeFailed
    | Persisted
    | PersistFailed
    | RunSaved
    | RunSaveFailed
    | FilesKept
    | Fenced
    | NotLetIn
    | Tick
    | Stop
)

#: Of the workers, which are first looked at beside the standbys where there are some.
Completion = MergeFailed | Persisted | PersistFailed | RunSaved | RunSaveFailed

# --- out ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send ``message`` to one party, through the broker at place ``by``, or through each of them."""

    to: str
    message: Message
    by: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """Decode version 0 of a fragment from a seed. Completion: :class:`Computed`."""

    fragment_id: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Piece:
    """One region of a tensor, as one host of an island encoded it."""

    start: tuple[int, ...]
    encoded: Encoded

    @property
    def region(self) -> Region:
        """Returns the place of the piece in the tensor."""
        return Region(self.start, tuple(self.encoded.shape))


@dataclass(frozen=True, slots=True)
class Pieced:
    """A tensor that came in pieces, each element once; it stands in a payload in the place of a buffer."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One contribution in a merge, with its final weights."""

    island_id: str
    steps: StepRange
    payload: Payload
    token_weight: float
    staleness_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Merge ``parts`` in this order, take the outer step; ``capped`` limits lengths of opposed directions.

    ``outer_rule`` has the learning rate and the momentum of that step.
    With another ``version_codec`` than float32 the version is the one before plus a rounded difference. ``given_back``
    has the parameters of the version before, from a broker, where the store has lost bytes of it: they go there first.
    A rule of one's own is to be asked before for ``factors`` of the weights, by cosines of all parts if it ``compares``
    (:meth:`aggregator.interface.merge_rule.Question.factors`).

    Completion: :class:`Computed`, or :class:`MergeFailed`.
    """

    round_id: int
    fragment_id: int
    fragment_version: int
    parts: tuple[Part, ...]
    outer_rule: tuple[float, float]
    capped: bool = True
    version_codec: Codec = Codec.F32
    given_back: Payload | None = None
    factors: Callable[[Sequence[float]], Sequence[float]] | None = field(default=None, compare=False)
    compares: bool = False

    def final_parts(self, cosines: Sequence[float]) -> tuple[Part, ...]:
        """Returns the parts with their final weights: as they are, without a rule of one's own."""
        if self.factors is None:
            return self.parts
        return tuple(
            replace(part, staleness_weight=part.staleness_weight * factor)
            for part, factor in zip(self.parts, self.factors(cosines), strict=True)
        )

    @property
    def compared(self) -> tuple[int, ...]:
        """Returns the indexes of the parts to compare: all, or ``MOST_COMPARED``, others in each round."""
        count = len(self.parts)
        if count <= MOST_COMPARED or self.compares:
            return tuple(range(count))
        return tuple(sorted((self.round_id * MOST_COMPARED + i) % count for i in range(MOST_COMPARED)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """All that becomes durable with a fragment version; ``ledger`` is the fragment's slice of the books."""

    fragment_id: int
    fragment_version: int
    epoch: int
    digest: str
    round_id: int
    contributions: tuple[Merged, ...]
    ledger: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Write a commit with the parameters and the momentum last computed for its fragment."""

    commit: Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRun:
    """Replace the run record: epoch, manifest, members, incarnations. Completion: :class:`RunSaved`."""

    serial: int
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepFiles:
    """Write the small files beside the store, if the digest is theirs. Completion: :class:`FilesKept`."""

    digest: str
    num_bytes: int
    parts: tuple[Payload, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Send the newest durable version of a fragment to the broker at place ``by``, or to each of them.

    First publications are announced in status. With ``base``, as the difference to that version, which was made with
    this one; without, whole.
    """

    fragment_id: int
    fragment_version: int
    digest: str
    contributions: tuple[Merged, ...]
    by: int | None = None
    base: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifested:
    """The fragments are settled; the driver can now check payloads, and merge."""

    manifest: FragmentManifest


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Note:
    """A decision with its reason; each has a class of its own.

    Attributes:
        name: What it is called wherever it is written.
        level: Of the log: ``debug`` for what comes several times in a round, ``warning`` for what is not meant to
            happen, and is dealt with.
    """

    name: ClassVar[str]
    level: ClassVar[str]

    def __init_subclass__(cls, *, name: str, level: str = "info") -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        cls.name, cls.level = name, level

    @property
    def fields(self) -> dict[str, Any]:
        """Returns its fields as plain data."""
        return plain_of(self)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the note with those of these fields that it knows; raises TypeError if one lacks."""
        return cls(**known_of(cls, fields))


def plain_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass by name, without those that are None and need not be."""
    pairs = ((each, getattr(value, each.name)) for each in dataclasses.fields(value))
    return {each.name: found for each, found in pairs if found is not None or each.default is not None}


def known_of(cls: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of some fields that a dataclass has."""
    return {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLineage:
    """Renumber the store's versions above ``above``, and start again under at least ``epoch``.

    The operator has ordered it (:mod:`aggregator.rounds.recovery`). Always followed by :class:`Finished`.
    """

    above: Mapping[int, int]
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run is over: everything is flushed, durable and announced. The driver may exit."""


Action = Send | Plant | Merge | Persist | SaveRun | KeepFiles | Publish | Manifested | Note | NewLineage | Finished
