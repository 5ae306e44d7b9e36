"""Messages of a donation: optimizer state from one island to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from broker.wire.messages.values import Channel, Payload, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDonor:
    """Asks which island may give its optimizer state; those in ``tried`` failed. Repeated till answered."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.ISLAND
    tried: tuple[str, ...]


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
    """Part ``part`` of ``num_parts`` of a donor's state, for the asker; ``num_parts`` 0: none to give.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Donor:
    """Answers :class:`AskDonor`: ask ``island_id`` for its state; empty: no island is left to ask.

    ``wait_s`` is the silence of the donor after which to ask for another one.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    island_id: str
    wait_s: float
