"""Messages between a leader and its standbys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from broker.wire.messages.values import Channel, Payload, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The newest version of one fragment in a standby's store, or at a broker."""

    fragment_id: int
    fragment_version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """A standby's heartbeat: the durable state of its store; request, acknowledgement and sign of life.

    The broker answers with :class:`Following` and passes it on to the leader, which sends whatever differs.

    Attributes:
        epoch: The epoch of the leader that it follows; it refuses lower ones. 0: none yet.
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
    """A standby's heartbeat on the bulk channel, so that replicas can be routed to it."""

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.STANDBY
    shard: int


def newness(made_under: int, stored: Sequence[Stored]) -> tuple[int, int]:
    """Returns the sort key of stores in a shard: epoch of the last version, then number of versions."""
    return made_under, sum(each.fragment_version + 1 for each in stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of another standby, from its last :class:`Follow`."""

    name: str
    made_under: int
    stored: tuple[Stored, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """The broker's answer to a standby: its knowledge of the leader and the model's versions.

    Attributes:
        epoch: The highest one seen of this shard, 0 for none.
        leader_heard_ago_s: Since the leader was heard last; None if nobody leads here.
        stored: The newest version of each fragment that the broker holds.
        newest: Of the recently heard other standbys of this shard, the one with the newest store.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.BROKER
    epoch: int
    leader_heard_ago_s: float | None
    stored: tuple[Stored, ...]
    newest: Standing | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A commit for a standby's store: all data that are durable with one fragment version.

    Attributes:
        round_id: That made the version: of two replicas of a fragment under one epoch, the later one has the higher.
        commit: The record of :mod:`aggregator.state.records`, as msgpack.
        payload: Parameters and momentum of the fragment, and the residual of a version that was rounded, each one
            float32 vector.
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
    """The run record for a standby's store: manifest, members and their incarnations."""

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.AGGREGATOR
    shard: int
    epoch: int
    serial: int
    record: bytes
