"""Events and actions of a leader's replication; :mod:`aggregator.standby.replication` has the rules."""

from __future__ import annotations

from dataclasses import dataclass

from aggregator.interface.events import Commit, Completion, Event, Note
from broker.wire.messages import Follow

# --- in ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """The store of this process has completed, or failed, an action of the core."""

    event: Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A standby was heard."""

    name: str
    follow: Follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """The lease was asked for: ``granted``, or held by another."""

    granted: bool
    holder: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewFailed:
    """Redis did not answer, so the lease may have changed or not."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outranked:
    """A broker says that a later epoch leads there: the lease was taken, even if Redis is away."""


ReplicationEvent = Outranked | Local | Followed | Renewed | RenewFailed


# --- out --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """Send a standby the newest commit of a fragment."""

    to: str
    commit: Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateRun:
    """Send a standby the newest run record."""

    to: str
    serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Renew the lease with the in-sync set. Completion: :class:`Renewed` or :class:`RenewFailed`."""

    in_sync: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Tell the core: a commit or a run record is durable everywhere it must be, or is not."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Deposed:
    """Another process leads, under this epoch or a higher one: stop, and follow it."""

    holder: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Leave the lease to a standby with a better store; :class:`Deposed` comes next."""

    to: str


ReplicationAction = Replicate | ReplicateRun | Renew | Deliver | Deposed | GiveUp | Note
