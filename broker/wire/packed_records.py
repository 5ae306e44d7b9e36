"""Records in answers to observers: msgpack, deflated, with a size limit at both ends. Pure.

Redis holds plain data, and they travel as such. A broker packs no record that its own codec would refuse. A reader
believes no length: it stops where a record would grow beyond ``MOST_PLAIN_BYTES``.
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

#: Most bytes of a packed record. A much larger header of deflated bytes could be refused, because every seventh byte
#: looks like the beginning of a map or array (:mod:`broker.wire.headers`).
MOST_BYTES = 512 << 10
#: Most bytes of an unpacked record.
MOST_PLAIN_BYTES = 64 << 20
#: Names repeat so often that more effort gains little.
_EFFORT = 1


class TooLarge(Exception):
    """A record is larger than ``MOST_BYTES``."""


def pack_snapshot(snapshot: Snapshot) -> bytes:
    """Returns a snapshot as a record; raises TooLarge for thousands of islands."""
    return _packed({each.name: getattr(snapshot, each.name) for each in dataclasses.fields(snapshot)})


def unpack_snapshot(record: bytes) -> Snapshot:
    """Returns the snapshot in a record; raises Unavailable if it is no such record."""

    def build(fields: dict[str, Any]) -> Snapshot:
        leases = {shard: LeaseView(**_sets(lease)) for shard, lease in fields["leases"].items()}
        return Snapshot(**(fields | {"leases": leases}))

    return _unpacked(record, build)


def pack_events(events: Sequence[NumberedEvent]) -> tuple[bytes, int]:
    """Returns as many first events as fit into a record, and their number; raises TooLarge."""
    count = len(events)
    while True:
        try:
            return _packed([[*number, event] for number, event in events[:count]]), count
        except TooLarge:
            if count <= 1:
                raise
            count //= 2


def unpack_events(record: bytes) -> list[NumberedEvent]:
    """Returns the events in a record; raises Unavailable if it is no such record."""

    def build(rows: list[Any]) -> list[NumberedEvent]:
        found = [((int(ms), int(n)), dict(event)) for ms, n, event in rows]
        if any(later <= earlier for (earlier, _), (later, _) in pairwise(found)):
            raise ValueError("their numbers do not grow")
        return found

    return _unpacked(record, build)


def pack_version(kept: KeptVersion) -> bytes:
    """Returns the facts about a version as a record; raises TooLarge."""
    return _packed(kept)


def unpack_version(record: bytes) -> KeptVersion:
    """Returns the facts about a version in a record; raises Unavailable if it is no such record."""
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
