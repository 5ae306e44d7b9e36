"""Messages that measure a link: a peer sends so many bytes to a broker, and gets so many back.

Who measures takes no part in the run: a broker answers at once, passes nothing on and remembers nobody.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import xxhash

from broker.wire.messages.values import Channel, Codec, Encoded, Payload, Role

#: Of each buffer of an answer.
PROBE_BUFFER_BYTES = 1 << 16
#: In one answer: 16 MiB.
MAX_PROBE_BUFFERS = 256

_BYTES = hashlib.shake_128(b"atoll").digest(PROBE_BUFFER_BYTES)  # that no tunnel can compress
_BUFFER = Encoded(
    codec=Codec.F32, shape=(PROBE_BUFFER_BYTES // 4,), checksum=xxhash.xxh3_64_intdigest(_BYTES), data=_BYTES
)


def probe_payload(buffers: int) -> Payload:
    """Returns so many buffers of 64 KiB, all the same memory, so that many take no more than one."""
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
    """Answers :class:`Probe`.

    Attributes:
        answers: The number of the probe that it answers.
        release: Version of the broker's package; empty: it is not known there.
        clock_s: The broker's wall clock, in seconds since 1970; 0: it has none.
        payload: As many buffers as were asked for.
    """

    channel: ClassVar[Channel] = Channel.BULK
    role: ClassVar[Role] = Role.BROKER
    answers: int
    release: str
    clock_s: float
    payload: Payload
