"""Reads and writes the first frame of a message: a msgpack map with a checksum at its end.

Pure. What the map says is a question of :mod:`broker.wire.frames`; here are its size, its checksum, and that it is a
map which takes no more memory than its bytes allow. The checksum is looked at first: a damaged header may well be
readable, and say something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgpack
import xxhash

from broker.base.errors import ConfigError
from broker.wire.messages.scattered import Scattered
from broker.wire.messages.values import Reason
from broker.wire.schema import MAX_ITEMS, MAX_RECORD_BYTES, MAX_TEXT, Unfit

#: Whatever has the buffer protocol: bytes, memoryview, zmq.Frame. Behind the header it may lie in several places
#: (:mod:`broker.wire.messages.scattered`).
Buffer = Any
#: Returns the bytes of a view.
NBYTES = attrgetter("nbytes")

#: The number at a header's end, big-endian as msgpack writes it.
SEAL_BYTES = 8

#: First bytes of msgpack's maps and arrays.
_CONTAINER_BYTES = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
#: Maps and arrays allowed in a header: a fixed number, and one more per this many bytes; ours have one in 20.
_FREE_CONTAINERS, _BYTES_PER_CONTAINER = 65_536, 16
#: The least that machines of ours take as one message, and the part of their memory that they take at the most.
LEAST_ROOM_BYTES, ROOM_SHARE = 4 << 30, 4


def room_bytes(memory_bytes: int) -> int:
    """Returns the bytes for one message, and for all waiting ones: a quarter of the memory; 0: unknown.

    4 GiB at least, however little there is: memory is taken as bytes come. With eight fragments, one in float32 takes a
    quarter of the model in bfloat16. So a machine that holds the model has room for its fragments.
    """
    return max(LEAST_ROOM_BYTES, memory_bytes // ROOM_SHARE)


def partial_room_bytes(memory_bytes: int) -> int:
    """Returns a broker's limit for unfinished messages of all connections: half of its memory."""
    return max(room_bytes(memory_bytes), memory_bytes // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The size limits of a message in bytes; a larger one is refused as ``oversize``."""

    max_header_bytes: int = 4 << 20  # the largest is a Welcome, whose manifest takes 150 bytes a tensor
    max_message_bytes: int = 1 << 30  # the largest is a float32 fragment with its header
    max_buffers: int = 16_384  # frames behind the header; one per tensor of a fragment

    def __post_init__(self) -> None:
        for name in ("max_header_bytes", "max_buffers"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if self.max_message_bytes < self.max_header_bytes:
            cure = f"must be at least max_header_bytes, {self.max_header_bytes}"
            raise ConfigError("max_message_bytes", self.max_message_bytes, cure)


DEFAULT_LIMITS = Limits()


def seal(header: bytes) -> bytes:
    """Returns a packed header with its last 8 bytes replaced by the xxh3_64 of the bytes before."""
    content = header[:-SEAL_BYTES]
    return content + xxhash.xxh3_64_digest(content)  # big-endian, too


def view(frame: Buffer) -> Buffer:
    """Returns a view of anything with bytes; scattered buffers unchanged."""
    if isinstance(frame, Scattered):
        return frame
    try:
        seen = memoryview(frame)
    except (TypeError, ValueError) as err:  # not a buffer, or one that was released
        raise Unfit(frame, "a bytes-like object", at="frame") from err
    if not seen.c_contiguous:
        raise Unfit(frame, "contiguous memory", at="frame")
    return seen


def read(frames: Sequence[Buffer], limits: Limits) -> tuple[dict[str, Any], list[Buffer], int]:
    """Checks the sizes of all frames and the checksum of the first.

    Returns:
        The map in the first frame, views of all frames, and their bytes.

    Raises:
        Unfit: There are none or too many, one is too large or no frame, the checksum is another one, or it is no map.
    """
    if not frames:
        raise Unfit(0, "at least the header", at="number of frames")
    if len(frames) - 1 > limits.max_buffers:
        raise Unfit(len(frames) - 1, f"at most {limits.max_buffers}", reason=Reason.OVERSIZE, at="number of buffers")
    views = list(map(view, frames))
    header, nbytes = views[0], sum(map(NBYTES, views))
    if header.nbytes > limits.max_header_bytes:
        raise Unfit(header.nbytes, f"at most {limits.max_header_bytes} bytes", reason=Reason.OVERSIZE, at="header")
    if nbytes > limits.max_message_bytes:
        raise Unfit(nbytes, f"at most {limits.max_message_bytes} bytes", reason=Reason.OVERSIZE, at="message")
    sealed = bytes(header[-SEAL_BYTES:]) == xxhash.xxh3_64_digest(header[:-SEAL_BYTES])
    if not sealed and not _is_of_version_1(header):
        raise Unfit("another one", "that of all bytes before it", reason=Reason.CHECKSUM, at="checksum")
    return _unpacked(header), views, nbytes


def _is_of_version_1(header: memoryview) -> bool:
    """Returns True if a header without checksum is from a version 1 peer, which is told to update.

    Damage alone makes no such header of ours: it would have to turn the version into another and the key into another.
    """
    try:
        found = _unpacked(header)
    except Unfit:
        return False
    return found.get("v") == 1 and "checksum" not in found


def _unpacked(packed: memoryview) -> dict[str, Any]:
    if packed.nbytes > _FREE_CONTAINERS:
        _check_containers(packed)
    try:
        header = msgpack.unpackb(
            packed,
            max_str_len=4 * MAX_TEXT,  # UTF-8 takes up to 4 bytes a character
            # msgpack takes memory for as many items as an array claims, before it reads one: 271 kB for each of three
            # bytes, in arrays of arrays. None has more items than the header has bytes.
            max_array_len=min(MAX_ITEMS, packed.nbytes),
            max_map_len=64,
            max_bin_len=MAX_RECORD_BYTES,
            max_ext_len=0,
            object_pairs_hook=_unique,
        )
    # RecursionError comes from the slower version of msgpack in Python only.
    except (ValueError, msgpack.UnpackException, RecursionError) as err:
        raise Unfit(f"{type(err).__name__} {err}", "a msgpack map within the limits", at="header") from err
    if type(header) is not dict:
        raise Unfit(header, "a map", at="header")
    return header


def _check_containers(header: memoryview) -> None:
    """Raises Unfit for a header of too many maps and arrays, before it is unpacked.

    An empty map is one byte on the wire and 64 in memory, and each is looked at: 4 MiB of them took 280 MiB and up to
    6 s. Other bytes may look like the beginning of a container, so this counts too many, never too few; the bounds
    leave room for names of tensors in any script.
    """
    raw, most = bytes(header), _FREE_CONTAINERS + header.nbytes // _BYTES_PER_CONTAINER
    found = len(raw) - len(raw.translate(None, _CONTAINER_BYTES))
    if found > most:
        raise Unfit(found, f"at most {most} maps and arrays", reason=Reason.OVERSIZE, at="header")


def _unique(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Refuses a repeated key in a map: two readers could believe different values."""
    listed = list(pairs)
    unpacked = dict(listed)
    if len(unpacked) != len(listed):
        raise ValueError("a key is repeated in a map")
    return unpacked
