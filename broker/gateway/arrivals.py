"""Turns a message from a socket into an event of the relay, decoding the header only.

Shell. What a broker keeps is served again and again, and must not be what a line has damaged.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from broker.chunks.receiving import Refused
from broker.gateway.receiving import Taken
from broker.process.release import refusal_detail
from broker.routing.events import Received, Rejected
from broker.wire.codec import Origin, Unreadable, decode, peek, verify
from broker.wire.errors import RemoteProtocolError
from broker.wire.headers import Limits
from broker.wire.messages import Channel, Probe, Reason, Version, kind_of
from broker.wire.messages.scattered import nbytes_of

#: The checksums of versions below this are looked at on the spot: it takes less than 1 ms, at 5 to 15 GB/s.
VERIFY_HERE_BYTES = 4 << 20


def event_of(channel: Channel, taken: Taken, limits: Limits, key: str) -> Received | Rejected:
    """Decodes what came, as far as the header; buffers stay the views of frames that they are."""
    frames = taken.frames
    try:
        if taken.surplus:
            most = f"at most {limits.max_buffers}"
            raise RemoteProtocolError(
                Reason.OVERSIZE, field="number of buffers", got=len(frames) - 1 + taken.surplus, expected=most
            )
        envelope = decode(frames, limits)
    except RemoteProtocolError as err:
        origin = err.origin if isinstance(err, Unreadable) else peek(frames, limits)
        return _rejected(channel, taken.peer, key, err, origin)
    size_bytes = sum(map(nbytes_of, frames))
    return Received(channel=channel, peer=taken.peer, envelope=envelope, size_bytes=size_bytes, key=key)


def refused(channel: Channel, taken: Taken, what: Refused, limits: Limits, key: str) -> Rejected:
    """Turns chunks that are not taken in into an event."""
    return _rejected(channel, taken.peer, key, what.error, peek(what.header, limits))


async def verified(event: Received | Rejected) -> Received | Rejected:
    """Rejects a version whose buffers were damaged on their way; its aggregator publishes it again."""
    if not isinstance(event, Received) or not isinstance(event.envelope.message, Version):
        return event
    envelope = event.envelope
    try:
        if event.size_bytes < VERIFY_HERE_BYTES:
            verify(envelope)
        else:
            await asyncio.to_thread(verify, envelope)  # which lets go of the interpreter meanwhile
    except RemoteProtocolError as err:
        origin = Origin(kind=kind_of(envelope.message), sender=envelope.sender, sequence=envelope.sequence)
        return _rejected(event.channel, event.peer, event.key, err, origin)
    return event


def _rejected(channel: Channel, peer: bytes, key: str, err: RemoteProtocolError, origin: Origin) -> Rejected:
    return Rejected(
        channel=channel,
        peer=peer,
        key=key,
        reason=Reason(err.reason),
        detail=refusal_detail(err),
        kind=origin.kind,
        sequence=origin.sequence,
        sender=origin.sender,
    )


def timed(event: Received | Rejected) -> Received | Rejected:
    """Returns the event; a probe with the time."""
    if isinstance(event, Received) and isinstance(event.envelope.message, Probe):
        return replace(event, wall_s=time.time())
    return event
