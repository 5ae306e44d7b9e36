"""Messages from outside a run: an observer's questions, and probes that measure a link.

All travel on the bulk port, and nothing else does over an observer's connection. An answer may have half a megabyte,
and there ZeroMQ holds four messages for who does not read, not a thousand. A broker answers a probe at once, passes
nothing on and remembers nobody.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import xxhash

from broker.wire.messages.values import Channel, Encoded, Payload, Role
from broker.wire.number_formats import Codec


class Inquiry(StrEnum):
    """The subject of an observer's question."""

    SNAPSHOT = "snapshot"  # islands, fragments, totals, brokers, leases, as they stand now
    EVENTS = "events"  # what happened after (after_ms, after_n), oldest first
    VERSION = "version"  # who is in one version of a fragment


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """An observer's question. It is repeated without an answer; copies do no harm.

    The number of the last event that is known is ``(after_ms, after_n)``; 0 and 0: from the oldest on. A
    ``fragment_version`` of None is the newest one.
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
    """The answer to a question: a record of :mod:`broker.wire.packed_records`, or why there is none."""

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.BROKER
    question: int
    detail: str
    record: bytes


#: Of each buffer of an answer.
PROBE_BUFFER_BYTES = 1 << 16
#: In one answer: 16 MiB.
MAX_PROBE_BUFFERS = 256

_BYTES = hashlib.shake_128(b"atoll").digest(PROBE_BUFFER_BYTES)  # that no tunnel can compress
_BUFFER = Encoded(
    codec=Codec.F32, shape=(PROBE_BUFFER_BYTES // 4,), checksum=xxhash.xxh3_64_intdigest(_BYTES), data=_BYTES
)


def probe_payload(buffers: int) -> Payload:
    """Returns buffers of 64 KiB that all share one buffer's memory."""
    return (_BUFFER,) * buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Asks a broker for an answer of ``answer_buffers`` buffers; ``payload`` sets its own size."""

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.ISLAND
    answer_buffers: int
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The answer to probe number ``answers``, with the requested number of buffers.

    ``release`` is the version of the broker's package, empty where it is not known; ``clock_s`` its wall clock, in
    seconds since 1970, 0 where it has none.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.BROKER
    answers: int
    release: str
    clock_s: float
    payload: Payload
