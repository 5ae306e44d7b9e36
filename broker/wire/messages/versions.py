"""Messages of versions: holdings of brokers, wants of islands, and the version itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from broker.wire.messages.values import Channel, Merged, Payload, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """To the broker: what this island has, and so what it may be sent.

    The broker sends the newest version of each fragment that is newer than ``versions``, as many at a time as the link
    carries without delay (:mod:`broker.routing.window`). The island says anew what it has as soon as a version has
    arrived, and again after silence.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A published fragment version; the broker keeps the newest of each fragment and sends it to who wants it.

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
