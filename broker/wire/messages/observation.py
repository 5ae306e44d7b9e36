"""Messages of an observer: a question about the run, and the broker's answer from Redis.

Both travel on the bulk port, and nothing else does over an observer's connection. An answer may have half a megabyte,
and there ZeroMQ holds four messages for who does not read, not a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from broker.wire.messages.values import Channel, Role


class Inquiry(StrEnum):
    """What an observer asks about."""

    SNAPSHOT = "snapshot"  # islands, fragments, totals, brokers, leases, as they stand now
    EVENTS = "events"  # what happened after (after_ms, after_n), oldest first
    VERSION = "version"  # who is in one version of a fragment


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """A question. Asked again when no answer comes; it changes nothing, so a copy does no harm.

    Attributes:
        after_ms: Of ``events``: with ``after_n`` the number of the last one that is known; 0 and 0: from the oldest on.
        after_n: Likewise.
        fragment_id: Of ``version``.
        fragment_version: Likewise; None: the newest one.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.OBSERVER
    about: Inquiry
    after_ms: int = 0
    after_n: int = 0
    fragment_id: int = 0
    fragment_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The answer to question number ``question``.

    Attributes:
        detail: Why there is no record; empty where there is one.
        record: What was asked for, as :mod:`broker.observing.answers` packs it.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.BROKER
    question: int
    detail: str
    record: bytes
