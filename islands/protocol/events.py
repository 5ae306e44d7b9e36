"""The events and actions of an island's state machine.

Whatever takes time is an action whose completion is another event: ``Capture`` ends in ``Captured``, ``Prepare`` in
``Prepared``, ``EncodeSeed`` in ``SeedEncoded``, ``CopyState`` in ``StateCopied``, ``CheckState`` in ``StateChecked``.
The training thread appears only as ``Boundary`` events: what it did between two inner steps, told after the fact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from broker.routing.resending import Carried
from broker.wire.fragments import FragmentManifest
from broker.wire.messages import Codec, Departure, Envelope, Message, Payload, Place, StateSource, Version
from islands.protocol.data_shares import TrainedBatch

# --- in -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A well-formed message arrived; ``flaw`` names a fault of its payload, if any.

    With a FleetState comes what the bulk connection has ``carried``, if there is one.
    """

    envelope: Envelope
    flaw: str = ""
    carried: Carried | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The training thread stood between two inner steps: first it installed, then it copied.

    Attributes:
        inner_step: Steps run so far, over all lives of the island.
        tokens: Tokens trained so far, over all lives as well.
        installed: Fragments whose prepared version is now in the local parameters.
        copied: Fragments of which a copy was taken after that.
        trained: What the steps since the last one were trained on: (number of the step from 0, its batch).
        stopped: No further step will be run.
    """

    inner_step: int
    tokens: int
    installed: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()
    trained: tuple[tuple[int, TrainedBatch], ...] = ()
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """The figures that heartbeats report besides the counters."""

    loss: float | None
    step_time_s: float | None
    sync_share: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A pseudo-gradient is encoded; the reference has moved by the encoded values.

    ``hosts`` and ``places`` are those of the :class:`~broker.wire.messages.Contribution`: with several hosts, the
    payload is the speaker's part. With a ``flaw``, what was found corrupt, there is none, and the reference stands.
    """

    fragment_id: int
    payload: Payload
    hosts: int = 1
    places: tuple[Place, ...] = ()
    flaw: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A version is decoded and placed: the training thread can install it at its next boundary.

    With a ``flaw``, what was found corrupt meanwhile, it overwrites the parameters.
    """

    fragment_id: int
    flaw: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupted:
    """A fragment is corrupt after an installation; ``flaw`` says how."""

    fragment_id: int
    flaw: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedEncoded:
    """A fragment of the initial parameters is encoded; ``hosts`` and ``places`` as in :class:`Captured`."""

    fragment_id: int
    payload: Payload
    hosts: int = 1
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The connection to the present broker stands from now on, or was lost; drivers connect again."""

    stands: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateNeeded:
    """The training thread has no optimizer state and waits, before its first step, for another island's.

    Answered by :class:`Settled`, after ``patience_s`` at the latest. A state above ``most_bytes`` cannot fit.
    """

    most_bytes: int
    patience_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChecked:
    """The whole state of a donor was looked at; ``flaw`` says why it does not serve, or is empty."""

    flaw: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopied:
    """A copy of the optimizer's state is cut into parts of :data:`islands.protocol.donation.PART_BYTES`.

    No parts: the training loop shows no state.
    """

    parts: tuple[Payload, ...]
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The training thread begins, with an optimizer state from ``source``."""

    source: StateSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The time that :meth:`islands.protocol.core.Island.next_deadline_s` asked for has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The process is about to end, on purpose."""

    reason: str
    departure: Departure = Departure.STOPPED


Event = (
    Received
    | Boundary
    | Vitals
    | Captured
    | Prepared
    | Corrupted
    | SeedEncoded
    | StateNeeded
    | StateChecked
    | StateCopied
    | Restored
    | Line
    | Tick
    | Leaving
)

# --- out ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send ``message`` to the aggregator, the broker, or another island."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Leave the present broker for the one at this place of the configuration; then report :class:`Line`."""

    broker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The island is a member: the driver learns its name, its fragments and where its counters start."""

    island_id: str
    incarnation: int
    manifest: FragmentManifest
    start_step: int
    start_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """From now on, copy only these fragments at boundaries: drivers may skip some while no round is open."""

    fragments: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Encode reference minus copy, for the copy taken at ``step``, as ``codec``; advance the reference.

    Completion: :class:`Captured`.
    """

    fragment_id: int
    step: int
    codec: Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Place ``version`` so that installing is one addition. Completion: :class:`Prepared`.

    ``keep`` is the share of local progress since capture that survives: local <- version + keep * (local - reference),
    reference <- version. Where it ``mixes``, ``keep`` is the share of the local value itself:
    local <- keep * local + (1 - keep) * version.
    """

    version: Version
    keep: float
    mixes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeSeed:
    """Encode a fragment of the initial parameters, f32. Completion: :class:`SeedEncoded`."""

    fragment_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshOptimizer:
    """The local state is spoilt: with the global parameters installed, start a fresh inner optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState:
    """Copy the optimizer's state for another island at the next boundary. Then comes :class:`StateCopied`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckState:
    """Check a donor's state: finite, and fit for the island's optimizer. Then comes :class:`StateChecked`."""

    parts: tuple[Payload, ...]
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Begin with the donor's state that was checked last, or with a fresh one; ``detail`` says why."""

    source: StateSource
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something worth a log line."""

    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The island cannot go on; ``cure`` says what would help."""

    reason: str
    cure: str


Action = (
    Send
    | Connect
    | Joined
    | Watch
    | Capture
    | Prepare
    | EncodeSeed
    | RefreshOptimizer
    | CopyState
    | CheckState
    | Settled
    | Note
    | Fail
)
