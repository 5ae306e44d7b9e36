"""Messages of versions: holdings of brokers, wants of islands, and the version itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from broker.wire.messages.values import Channel, Merged, Payload, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """An island tells the broker its versions, and so which newer ones to send.

    The broker sends the newest version of each fragment that is newer than ``versions``, as many at a time as the link
    carries without delay (:mod:`broker.routing.window`). The island says anew what it has as soon as a version has
    arrived, and again after silence.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A published version of a fragment; the broker keeps it, and sends it on request.

    Attributes:
        base: The version of the fragment that ``payload`` is to be added to (:func:`broker.wire.tensors.added`); None:
            it is the whole version, in float32.
        digest: xxh3_128 of the float32 bytes of the fragment, in hex: names the byte string in the store.
        contributions: Who is in it; empty for version 0.
        payload: The new global parameters of the fragment, or their difference to those of ``base``.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.AGGREGATOR
    epoch: int
    fragment_id: int
    fragment_version: int
    digest: str
    contributions: tuple[Merged, ...]
    shard: int = 0
    base: int | None = None
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """The heartbeat of a shard's leader to a broker, on the control channel, with its epoch.

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
    """The leader's heartbeat on the bulk channel, so that contributions can be routed to it."""

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.AGGREGATOR
    shard: int
    epoch: int
    shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WantWhole:
    """The broker asks for a whole version, because an island lacks the base of its differences.

    The aggregator publishes the newest version of the fragment whole. Repeated while it does not come.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.BROKER
    fragment_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WantBack:
    """The aggregator asks for its published version back, because its store has a damaged one.

    A broker that holds it whole answers with it on the bulk channel. Repeated while it does not come.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    fragment_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """The broker's answer to :class:`Attach`: its versions; the aggregator publishes newer ones again."""

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.BROKER
    versions: tuple[int, ...]
