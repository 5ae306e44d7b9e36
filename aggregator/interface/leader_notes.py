"""Notes about the aggregator itself: its lives, store and brokers, and who leads. Pure.

How they are written: :mod:`aggregator.interface.notes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aggregator.interface.events import Note


class AggregatorStarted(Note, name="aggregator.started"):
    """A life of an aggregator leads; ``versions`` of all fragments, -1 for those of other shards."""

    epoch: int
    phase: str
    versions: Sequence[int] = ()


class SettingChanged(Note, name="aggregator.setting_changed"):
    """A life goes on with another setting than the run had."""

    field: str
    was: Any
    now: Any


class AggregatorFenced(Note, name="aggregator.fenced"):
    """A later epoch leads at a broker."""

    epoch: int
    broker: int
    detail: str


class AggregatorFinished(Note, name="aggregator.finished"):
    """The process may exit, whether the run has ended or not."""

    reason: str
    phase: str = ""


class MessageRefused(Note, name="message.refused", level="warning"):
    """A message was not taken."""

    sender: str
    kind: str
    reason: str = ""
    detail: str = ""


class MessageUnexpected(Note, name="message.unexpected", level="warning"):
    """A message is of a kind that nobody sends to an aggregator."""

    kind: str
    sender: str


class RunRecordFailed(Note, name="run_record.failed", level="warning"):
    """The run record could not be written."""

    detail: str
    retry_s: float


class StoreFallenBehind(Note, name="store.behind", level="warning"):
    """The store lacks what was published already: nothing is merged until somebody decides."""

    detail: str
    cure: str = ""


class StoreNotBehind(Note, name="store.not_behind", level="warning"):
    """A store that was taken for an older one is the newest after all."""

    detail: str
    after_s: float


class StoreBack(Note, name="store.back"):
    """The store takes writes again."""

    after_s: float


class BrokerBack(Note, name="broker.back"):
    """A broker answers again: its islands count as just heard."""

    broker: int
    open_rounds: int


# --- standbys and leases ----------------------------------------------------------------------------------------


class StandbyCame(Note, name="standby.came"):
    """A standby follows."""

    standby: str


class StandbyLost(Note, name="standby.lost"):
    """A standby has fallen silent."""

    standby: str


class StandbyInSync(Note, name="standby.in_sync"):
    """A standby has every published version: it may take over."""

    standby: str


class StandbyLags(Note, name="standby.lags"):
    """A standby lacks published versions: it may not take over."""

    standby: str


class StandbyNamesake(Note, name="standby.namesake", level="warning"):
    """Two processes stand by under one name."""

    standby: str
    detail: str


class LeaseUnknown(Note, name="lease.unknown"):
    """Redis does not say who leads."""

    detail: str


class LeaseBack(Note, name="lease.back"):
    """Redis says again who leads."""


class LeaseGivenUp(Note, name="lease.given_up"):
    """Another one leads, or is to lead."""

    to: str
    detail: str


class LeaseWon(Note, name="lease.taken"):
    """This standby leads."""

    epoch: int


class LeaderFollowed(Note, name="leader.followed"):
    """This standby hears a leader of that epoch."""

    epoch: int


class ReplicaNotDurable(Note, name="replica.not_durable", level="warning"):
    """A standby could not write a commit of the leader."""

    detail: str


class CandidateWaits(Note, name="candidate.waits", level="warning"):
    """Why this store does not lead, though it could."""

    detail: str
