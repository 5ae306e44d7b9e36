"""Messages to frames and back: ``[header: msgpack map][buffer]...``, by PROTOCOL.md.

Pure. Decoding trusts nothing: sizes are checked before anything is allocated, every value against the annotation of its
field (:mod:`broker.wire.schema`), and whatever is wrong ends in :class:`RemoteProtocolError`, never in another
exception. :mod:`broker.wire.headers` checks the first frame before its values are read. Buffers
are passed through as views of the received frames, and what a broker passes on unchanged leaves it in the frames that
it came in. Whether their content is right is a question of its own, :func:`verify`, asked by those who read it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

from broker.base.errors import LocalProtocolError, RemoteProtocolError
from broker.wire import headers
from broker.wire.headers import DEFAULT_LIMITS, Buffer, Limits
from broker.wire.messages import KINDS, PROTOCOL_VERSION, Codec, Encoded, Envelope, Payload, Reason, kind_of
from broker.wire.messages.scattered import Scattered
from broker.wire.number_formats import encoded_bytes
from broker.wire.schema import INT_MAX, MAX_DIMENSIONS, Record, Unfit, address, counter, identifier

_RECORDS: dict[str, Record] = {kind: Record(cls) for kind, cls in KINDS.items()}
_CODECS = {str(codec): codec for codec in Codec}
_HEADER_KEYS = frozenset({"v", "kind", "run", "sender", "inc", "seq", "to", "body", "checksum"})
_BULK_HEADER_KEYS = _HEADER_KEYS | {"buffers"}
#: The keys between kind and body, the envelope's fields that they are, and their checks.
_FIELDS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("run", "run_id", identifier),
    ("sender", "sender", address),
    ("inc", "incarnation", counter),
    ("seq", "sequence", counter),
    ("to", "to", address),
)
_BUFFER_KEYS = frozenset({"codec", "shape", "nbytes", "checksum"})
_CHECKSUM_MAX = 2**64 - 1
#: The keys that follow the body; the number at the end has the place of any other.
_BUFFERS_KEY, _CHECKSUM_LAST = msgpack.packb("buffers"), msgpack.packb("checksum") + msgpack.packb(_CHECKSUM_MAX)


def encode(envelope: Envelope) -> list[Buffer]:
    """Returns the frames of a message: the header, then the payload's buffers, uncopied.

    The buffers are not copied and must not be written to until they have been sent. An envelope is encoded once, and
    one that was decoded keeps the frames that it came in: a message that is passed on is not made again.

    Raises:
        LocalProtocolError: If a value does not fit its field; nothing that a peer would refuse leaves this process.
    """
    if envelope.frames is not None:
        return list(envelope.frames)
    message: Any = envelope.message
    kind = kind_of(message)
    record, entries = _RECORDS[kind], list[bytes]()
    frames: list[Buffer] = [b""]
    header: dict[str, Any] = {"v": PROTOCOL_VERSION, "kind": kind}
    key = ""
    try:
        for key, name, check in _FIELDS:
            header[key] = check(getattr(envelope, name))
        key = "body"
        header[key] = record.write(message)
        if record.has_payload:
            key = "payload"
            if type(message.payload) is not tuple:
                raise Unfit(message.payload, "a tuple of Encoded")
            key = ""
            for encoded in message.payload:
                frames.append(_written(encoded))
                entries.append(encoded.entry)
    except Unfit as unfit:
        unfit.path.append(key or f"buffers[{len(entries)}]")
        got = reprlib.repr(unfit.got)  # ``repr`` alone could be megabytes
        raise LocalProtocolError(f"{kind}: {unfit.field} is {got}, must be {unfit.expected}") from unfit
    # One map, of parts that are packed by themselves: its first byte says how many keys follow.
    packed, tail = msgpack.packb(header), _CHECKSUM_LAST
    if record.has_payload:
        tail = _BUFFERS_KEY + msgpack.Packer().pack_array_header(len(entries)) + b"".join(entries) + tail
    keys = packed[0] + (2 if record.has_payload else 1)
    frames[0] = headers.seal(bytes([keys]) + packed[1:] + tail)
    object.__setattr__(envelope, "frames", tuple(frames))
    object.__setattr__(envelope, "nbytes", len(frames[0]) + sum(map(headers.NBYTES, frames[1:])))
    return frames


def _written(encoded: Any) -> Buffer:
    """Returns the frame of a buffer; its entry in the header is packed then."""
    if type(encoded) is not Encoded:
        raise Unfit(encoded, "Encoded")
    view = headers.view(encoded.data)
    if not encoded.entry:
        entry = {
            "codec": str(encoded.codec),
            "shape": list(encoded.shape),
            "nbytes": view.nbytes,
            "checksum": encoded.checksum,
        }
        _read_buffer(entry, view)  # the receiver's checks
        object.__setattr__(encoded, "entry", msgpack.packb(entry))
    return view


def decode(frames: Sequence[Buffer], limits: Limits = DEFAULT_LIMITS) -> Envelope:
    """Returns the message in ``frames``; its buffers are views of them, not yet checked by :func:`verify`.

    Raises:
        Unreadable: Whatever is wrong, with reason ``oversize``, ``checksum`` (of the header), ``protocol_version``,
            ``unknown_kind``, ``implausible`` (counters that contradict each other) or ``malformed``.
    """
    header: dict[str, Any] = {}
    try:
        header, views, nbytes = headers.read(frames, limits)
        return _decode(header, views, nbytes)
    except Unfit as unfit:
        raise Unreadable(unfit, _origin(header)) from unfit


def _decode(header: dict[str, Any], frames: Sequence[Buffer], nbytes: int) -> Envelope:
    # The version comes first: another version may have other keys.
    if type(header.get("v")) is not int or header["v"] != PROTOCOL_VERSION:
        raise Unfit(header.get("v"), str(PROTOCOL_VERSION), reason=Reason.PROTOCOL_VERSION, at="v")
    kind = header.get("kind")
    records = _RECORDS.get(kind) if type(kind) is str else None
    if records is None:
        raise Unfit(kind, "one of " + ", ".join(KINDS), reason=Reason.UNKNOWN_KIND, at="kind")
    keys = _BULK_HEADER_KEYS if records.has_payload else _HEADER_KEYS
    if header.keys() != keys:
        raise Unfit(sorted(map(str, header)), "the keys " + ", ".join(sorted(keys)), at="header")
    if header["checksum"] != int.from_bytes(frames[0][-headers.SEAL_BYTES :]):
        raise Unfit(header["checksum"], "the last 8 bytes of the header", at="checksum")
    if len(frames) > 1 and not records.has_payload:
        raise Unfit(len(frames) - 1, f"0 for {kind}", at="number of buffers")
    payload = {"payload": _read_buffers(header["buffers"], frames[1:])} if records.has_payload else {}
    key, fields = "body", dict[str, Any]()
    try:
        fields["message"] = records.read(header[key], **payload)
        for key, name, check in _FIELDS:
            fields[name] = check(header[key])
    except Unfit as unfit:
        unfit.path.append(key)
        raise
    envelope = Envelope(**fields)
    object.__setattr__(envelope, "frames", tuple(frames))
    object.__setattr__(envelope, "nbytes", nbytes)
    return envelope


def _read_buffers(entries: Any, frames: Sequence[Buffer]) -> tuple[Encoded, ...]:
    if type(entries) is not list:
        raise Unfit(entries, "an array", at="buffers")
    if len(entries) != len(frames):
        raise Unfit(len(frames), f"{len(entries)}, as in the header", at="number of buffers")
    found: list[Encoded] = []
    try:
        for entry, frame in zip(entries, frames, strict=True):
            found.append(_read_buffer(entry, frame))
    except Unfit as unfit:
        unfit.path.append(f"buffers[{len(found)}]")
        raise
    return tuple(found)


def _read_buffer(entry: Any, frame: Buffer) -> Encoded:
    if type(entry) is not dict or entry.keys() != _BUFFER_KEYS:
        raise Unfit(entry, "a map with the keys " + ", ".join(sorted(_BUFFER_KEYS)))
    codec = _CODECS.get(entry["codec"]) if type(entry["codec"]) is str else None
    if codec is None:
        raise Unfit(entry["codec"], "one of " + ", ".join(_CODECS), at="codec")
    shape = entry["shape"]
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise Unfit(shape, f"an array of at most {MAX_DIMENSIONS} integers", at="shape")
    for dimension in shape:
        if type(dimension) is not int or not 0 <= dimension <= INT_MAX:
            raise Unfit(dimension, "an integer from 0 to 2**63 - 1", at="shape")
    checksum = entry["checksum"]
    if type(checksum) is not int or not 0 <= checksum <= _CHECKSUM_MAX:
        raise Unfit(checksum, "an integer from 0 to 2**64 - 1", at="checksum")
    # Python integers do not overflow, so a product of absurd dimensions is absurd and equals no length.
    nbytes = encoded_bytes(codec, math.prod(shape))
    if entry["nbytes"] != nbytes or type(entry["nbytes"]) is not int:
        raise Unfit(entry["nbytes"], f"{nbytes} for {codec} and this shape", at="nbytes")
    if frame.nbytes != nbytes:
        raise Unfit(frame.nbytes, f"a frame of {nbytes} bytes")
    return Encoded(codec=codec, shape=tuple(shape), checksum=checksum, data=frame)


def verify(envelope: Envelope) -> None:
    """Checks the checksum of every buffer of a message; messages without payload pass.

    Raises:
        RemoteProtocolError: With reason ``checksum``. The message was damaged on its way: sent again, it may pass.
    """
    verify_payload(getattr(envelope.message, "payload", ()))


def verify_payload(payload: Payload) -> None:
    """Checks a payload without its envelope."""
    for index, encoded in enumerate(payload):
        data, content = encoded.data, xxhash.xxh3_64()
        for piece in data if isinstance(data, Scattered) else (data,):
            content.update(piece)
        found = content.intdigest()
        if found != encoded.checksum:
            field = f"buffers[{index}].checksum"
            expected = f"{encoded.checksum:#018x}"
            raise RemoteProtocolError(Reason.CHECKSUM, field=field, got=f"{found:#018x}", expected=expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The valid claims of a message that failed its checks, only for addressing a refusal."""

    kind: str = ""
    sender: str = ""
    sequence: int = -1


class Unreadable(RemoteProtocolError):
    """The error for a message that cannot be decoded, with the ``origin`` that its header claims."""

    def __init__(self, unfit: Unfit, origin: Origin) -> None:
        self.origin = origin
        super().__init__(unfit.reason, field=unfit.field, got=reprlib.repr(unfit.got), expected=unfit.expected)


def peek(frames: Sequence[Buffer], limits: Limits = DEFAULT_LIMITS) -> Origin:
    """Returns the readable claims of a message that :func:`decode` refused; never raises."""
    try:
        return _origin(headers.read(frames, limits)[0])
    except Unfit:
        return Origin()


def _origin(header: dict[str, Any]) -> Origin:
    kind = header.get("kind")
    return Origin(
        kind=kind if type(kind) is str and kind in KINDS else "",
        sender=_or("", address, header.get("sender")),
        sequence=_or(-1, counter, header.get("seq")),
    )


def _or(otherwise: Any, check: Any, value: Any) -> Any:
    try:
        return check(value)
    except Unfit:
        return otherwise
