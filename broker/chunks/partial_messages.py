"""Partial messages of broken connections, so that the next connection can resume them. Pure.

A payload is known by the checksums of its buffers, not by its sender or number. Before a sender repeats a payload of
which a part was sent, it asks how much is here. In the end the whole is checked against its checksums, like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from broker.chunks.memory import Opened
from broker.wire import headers
from broker.wire.headers import Buffer, Limits
from broker.wire.messages import Message
from broker.wire.schema import Unfit

#: Payloads below this are sent again as a whole: that takes no longer than asking.
LEAST_BYTES = 1 << 20
#: A part for which nobody asks is forgotten after this.
KEPT_S = 120.0


@dataclass(slots=True)
class Partial:
    """The beginning of a payload of ``total`` bytes, of which ``nbytes`` are here."""

    frames: list[Buffer]  # its buffers, the last one maybe in part
    open: Opened | None  # that one, if more of it is to come
    nbytes: int
    total: int


def key_of(checksums: Iterable[int]) -> int:
    """Returns the name of a payload with these checksums of its buffers."""
    return xxhash.xxh3_64_intdigest(b"".join([each.to_bytes(8) for each in checksums]))


def key_for(message: Message, nbytes: int) -> int:
    """Returns the name of a message's payload; 0 if it has none, or one too small to be resumed."""
    payload = getattr(message, "payload", ())
    return key_of([each.checksum for each in payload]) if nbytes >= LEAST_BYTES and payload else 0


def key_in(header: Buffer, limits: Limits) -> int | None:
    """Returns the name of the payload that a header announces; None if it announces none."""
    try:
        buffers = headers.read([headers.view(header)], limits).get("buffers")
        return key_of([each["checksum"] for each in buffers]) if buffers else None
    except (Unfit, KeyError, TypeError, AttributeError, OverflowError):
        return None


class PartialMessages:
    """Partial payloads of one peer, or of all without a key; above ``most_bytes`` the oldest are dropped."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._partial: dict[int, tuple[Partial, float]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all partial payloads."""
        return sum(partial.nbytes for partial, _ in self._partial.values())

    def keep(self, key: int, partial: Partial, now_s: float) -> None:
        """Adds a payload that a broken connection has left partial, and drops those that are too old."""
        self._partial.pop(key, None)
        self._partial[key] = partial, now_s
        for old, (_, since_s) in list(self._partial.items()):
            if now_s - since_s > KEPT_S or self.nbytes > self._most_bytes:
                del self._partial[old]

    def take(self, key: int | None, total: int) -> Partial | None:
        """Removes and returns the part of a payload of ``total`` bytes; None if there is none."""
        partial, _ = self._partial.pop(key, (None, 0.0)) if key is not None else (None, 0.0)
        return partial if partial is not None and partial.total == total else None
