"""The records of answers to observers: msgpack, deflated, and bounded at both ends. Pure.

What stands in Redis is plain data, so it travels as such. A broker packs no record that its own codec would refuse, and
a reader believes no length: what would grow beyond ``MOST_PLAIN_BYTES`` is not read to its end.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import msgpack

from broker.base.errors import Unavailable
from broker.wire.records import KeptVersion, LeaseView, NumberedEvent, Snapshot

T = TypeVar("T")

#: Of a packed record. A header of deflated bytes that is much larger could be refused: every seventh byte looks like
#: the beginning of a map or array (:mod:`broker.wire.headers`).
MOST_BYTES = 512 << 10
#: Of an unpacked one.
MOST_PLAIN_BYTES = 64 << 20
#: Names repeat so often that more effort gains little.
_EFFORT = 1


class TooLarge(Exception):
    """A record has more than ``MOST_BYTES``."""


def pack_snapshot(snapshot: Snapshot) -> bytes:
    """Returns a snapshot as a record; raises TooLarge where there are thousands of islands."""
    return _packed({each.name: getattr(snapshot, each.name) for each in dataclasses.fields(snapshot)})


def unpack_snapshot(record: bytes) -> Snapshot:
    """Returns what :func:`pack_snapshot` packed; raises Unavailable if it is no such record."""

    def build(fields: dict[str, Any]) -> Snapshot:
        leases = {shard: LeaseView(**_sets(lease)) for shard, lease in fields["leases"].items()}
        return Snapshot(**(fields | {"leases": leases}))

    return _unpacked(record, build)


def pack_events(events: Sequence[NumberedEvent]) -> tuple[bytes, int]:
    """Returns the first events as a record, as many as go into it, and their number; raises TooLarge."""
    count = len(events)
    while True:
        try:
            return _packed([[*number, event] for number, event in events[:count]]), count
        except TooLarge:
            if count <= 1:
                raise
            count //= 2


def unpack_events(record: bytes) -> list[NumberedEvent]:
    """Returns what :func:`pack_events` packed; raises Unavailable if it is no such record."""

    def build(rows: list[Any]) -> list[NumberedEvent]:
        found = [((int(ms), int(n)), dict(event)) for ms, n, event in rows]
        if any(later <= earlier for (earlier, _), (later, _) in pairwise(found)):
            raise ValueError("their numbers do not grow")
        return found

    return _unpacked(record, build)


def pack_version(kept: KeptVersion) -> bytes:
    """Returns what is known of a version as a record; raises TooLarge."""
    return _packed(kept)


def unpack_version(record: bytes) -> KeptVersion:
    """Returns what :func:`pack_version` packed; raises Unavailable if it is no such record."""
    return _unpacked(record, lambda fields: KeptVersion(**(fields | {"known": tuple(map(int, fields["known"]))})))


def _sets(fields: Mapping[str, Any]) -> dict[str, Any]:
    return dict(fields) | {name: frozenset(value) for name, value in fields.items() if isinstance(value, list)}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else dataclasses.asdict(value)


def _packed(value: Any) -> bytes:
    packed = zlib.compress(msgpack.packb(value, default=_plain), _EFFORT)
    if len(packed) > MOST_BYTES:
        raise TooLarge
    return packed


def _unpacked(record: bytes, build: Callable[[Any], T]) -> T:
    inflating = zlib.decompressobj()
    try:
        plain = inflating.decompress(record, MOST_PLAIN_BYTES)
        if not inflating.eof:
            raise ValueError(f"it is cut off, or has more than {MOST_PLAIN_BYTES} bytes")
        return build(msgpack.unpackb(plain, strict_map_key=False))
    except (zlib.error, msgpack.UnpackException, ValueError, TypeError, KeyError, AttributeError) as err:
        raise Unavailable(f"the broker's answer cannot be read ({type(err).__name__}: {err})", definite=True) from err
