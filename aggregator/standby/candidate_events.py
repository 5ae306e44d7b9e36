"""Events and actions of a standby aggregator, whose rules are in :mod:`aggregator.standby.candidate`."""

from __future__ import annotations

from dataclasses import dataclass

from aggregator.interface.events import Note
from aggregator.state.founding import Founding
from broker.wire.messages import Follow, Following, Replica, ReplicaRun
from broker.wire.records import LeaseView

# --- in ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Polled:
    """The lease as Redis has it."""

    lease: LeaseView


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpolled:
    """Redis did not answer a poll or an attempt at the lease, which may have been granted even so."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTaken:
    """Whether the lease was granted."""

    granted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A broker answered."""

    broker: int
    following: Following


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """The leader sent a commit or its run record."""

    message: Replica | ReplicaRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The result of :class:`Keep`: the replica is in the store; or is not, and will be sent again."""

    message: Replica | ReplicaRun
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The time that :meth:`Candidate.next_deadline_s` asked for has come."""


CandidateEvent = Polled | Unpolled | LeaseTaken | Heard | Arrived | Kept | Tick


# --- out --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """Read the lease. Completion: :class:`Polled` or :class:`Unpolled`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Take the lease by compare-and-set. Completion: :class:`LeaseTaken` or :class:`Unpolled`.

    Attributes:
        expected_epoch: Of the lease as it was polled, 0 for no key.
        epoch: To lead under.
        store_epoch: Of this store's run record: a key that is older says nothing.
    """

    expected_epoch: int
    epoch: int
    store_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFollow:
    """Send this to every broker, with its companion on the bulk channel."""

    follow: Follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Write it to the store, durably, in place of whatever is there. Completion: :class:`Kept`."""

    message: Replica | ReplicaRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """Lead from now on, under this epoch, from the store's versions.

    Attributes:
        founding: Where no lease vouches for it; else None.
    """

    epoch: int
    founding: Founding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """The leader that was followed has ended the run: there is nothing to stand by for."""


CandidateAction = Poll | Take | SendFollow | Keep | Lead | Quit | Note
