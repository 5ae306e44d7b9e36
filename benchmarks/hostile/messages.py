"""Valid messages of every kind, broken copies of them, and headers of the greatest cost."""

from __future__ import annotations

import dataclasses
import math
import random
import types
import typing
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import msgpack
import xxhash

from broker.wire.fragments import TensorSpec
from broker.wire.frames import encode
from broker.wire.headers import seal
from broker.wire.messages import MESSAGE_TYPES, Codec, Encoded, Envelope, Message, Recipe
from broker.wire.number_formats import encoded_bytes

#: Messages of each kind that are broken.
VALID_PER_KIND = 20
#: Size of an input that is built to be expensive.
BOMB_BYTES = 1 << 20

Frames = list[bytes]


def valid_messages(rng: random.Random) -> list[Frames]:
    """Returns the frames of valid messages of every kind, made from the annotations of their fields."""
    return [
        [bytes(frame) for frame in encode(_envelope(cls, rng))] for cls in MESSAGE_TYPES for _ in range(VALID_PER_KIND)
    ]


def _envelope(cls: type[Message], rng: random.Random) -> Envelope:
    sender, to = (rng.choice(("island-0", "join:n0", "observer:n0", "aggregator", "broker")) for _ in range(2))
    counters = [rng.choice((0, 1, 17, 2**31, 2**63 - 1)) for _ in range(2)]
    message = _value(cls, "", rng)
    return Envelope(run_id="demo", sender=sender, incarnation=counters[0], sequence=counters[1], to=to, message=message)


def _value(hint: Any, field: str, rng: random.Random) -> Any:
    """Returns a value of an annotation that its field may have."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint)
        values = {each.name: _value(hints[each.name], each.name, rng) for each in dataclasses.fields(hint)}
        return hint(**_related(hint, values, rng))
    if field == "payload":
        return tuple(_buffer(rng) for _ in range(rng.randrange(4)))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return rng.choice(list(hint))
    if hint is bool:
        return rng.random() < 0.5
    if hint is bytes:
        return rng.randbytes(rng.randrange(40))
    if hint is int:
        return rng.choice((0, 1, 7, 200, 70_000, 2**40))
    if hint is float:
        return rng.choice((0.0, 0.5, 1e300))
    if hint is str:
        names, texts = ("a", "paris", "x" * 60), ("", "w/0", "héé")
        return rng.choice(names if field in ("nonce", "island_id", "resumes") else texts)
    if typing.get_origin(hint) is tuple:
        return tuple(_value(typing.get_args(hint)[0], field, rng) for _ in range(rng.randrange(4)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return rng.choice((None, _value(typing.get_args(hint)[0], field, rng)))
    raise TypeError(f"{field}: {hint} is not known here")


def _related(cls: type[Any], values: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns the values with those relations between fields that the protocol demands."""
    ordered = ("from_step", "to_step"), ("from_tokens", "to_tokens"), ("from_batch", "to_batch"), ("index", "count")
    for lower, upper in ordered:
        if lower in values and upper in values:
            values[upper] = values[lower] + rng.randint(1, 9)
    if cls is TensorSpec:
        values["shape"] = tuple(rng.randint(0, 9) for _ in range(rng.randrange(4)))
        values["unit_axes"] = rng.randint(0, len(values["shape"]))
    if "hosts" in values:
        values["hosts"] = rng.randint(10, 99)
        values |= {"host": rng.randint(1, 9)} if "host" in values else {}
    if values.get("base") is not None:
        values["fragment_version"] = values["base"] + rng.randint(1, 9)
    if "answer_buffers" in values:
        values["answer_buffers"] %= 257
    if cls is Recipe:  # which checks its own relations
        values = {"merge": rng.choice((None, "rda", "a.b:C")), "codec": values["codec"], "quorum": 1 + values["quorum"]}
    return values


def _buffer(rng: random.Random) -> Encoded:
    shape = tuple(rng.randrange(5) for _ in range(rng.randrange(4)))
    codec = rng.choice(list(Codec))
    data = rng.randbytes(encoded_bytes(codec, math.prod(shape)))
    return Encoded(codec=codec, shape=shape, checksum=xxhash.xxh3_64_intdigest(data), data=data)


# --- broken messages --------------------------------------------------------------------------------------------------

#: First bytes of every type of msgpack.
_MARKS = bytes((0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, *range(0xC0, 0xE0), 0xE0, 0xFF))


def broken(valid: list[Frames], rng: random.Random) -> Frames:
    """Returns one input: a valid message with one to three things wrong with it, or noise."""
    if rng.random() < 0.05:
        return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(4))]
    frames = list(rng.choice(valid))
    for _ in range(rng.randint(1, 3)):
        if not frames:
            break
        at = 0 if rng.random() < 0.9 else rng.randrange(len(frames))
        frames[at] = rng.choice(_CHANGES)(frames[at], valid, rng)
        if rng.random() < 0.05:
            rng.choice(_REARRANGEMENTS)(frames)
    if frames and rng.random() < 0.9:
        frames[0] = seal(frames[0])
    return frames


def _flip(data: bytes, valid: list[Frames], rng: random.Random) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, valid: list[Frames], rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _swap_type(data: bytes, valid: list[Frames], rng: random.Random) -> bytes:
    """Puts the mark of some type anywhere; what follows is then read as its length or content."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + bytes((rng.choice(_MARKS),)) + data[at + 1 :]


def _splice(data: bytes, valid: list[Frames], rng: random.Random) -> bytes:
    other = rng.choice(valid)[0]
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other)) :]


def _repeat(data: bytes, valid: list[Frames], rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.randint(1, 40)]
    return data[:start] + piece * rng.choice((2, 3, 300)) + data[start:]


def _replace_value(data: bytes, valid: list[Frames], rng: random.Random) -> bytes:
    """Puts another value in some place of the header, which stays good msgpack."""
    try:
        header = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException):
        return data
    places = list(_places(header))
    if not places:
        return data
    holder, key = rng.choice(places)
    if rng.random() < 0.2 and isinstance(holder, dict):
        holder[rng.choice(("extra", "", "v"))] = holder.pop(key)
    else:
        holder[key] = rng.choice(_VALUES)
    try:
        return bytes(msgpack.packb(header))
    except (ValueError, OverflowError, TypeError):
        return data


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(items):
        yield value, key
        yield from _places(each)


_VALUES: tuple[Any, ...] = (
    *(None, True, -1, -(2**63), 2**63, 2**64 - 1, 0.0, -1.0, math.nan, math.inf, "", "x" * 5000, "\x00", "a\nb", b""),
    *([], {}, [[]], [None] * 70_000, {"": None}, {"a": {"a": {"a": {}}}}, ["island-0"], [2**62] * 9, "aggregator"),
)
_CHANGES: tuple[Callable[[bytes, list[Frames], random.Random], bytes], ...] = (
    *(_flip, _flip, _truncate, _swap_type, _swap_type, _swap_type, _splice, _repeat),
    *(_replace_value, _replace_value),
)
_REARRANGEMENTS: tuple[Callable[[Frames], object], ...] = (
    lambda frames: frames.reverse(),
    lambda frames: frames.append(b"\0\0\0\0"),
    lambda frames: frames.pop(),
    lambda frames: frames.extend([b""] * 20_000),
)


def bomb(rng: random.Random) -> Frames:
    """Returns a header of the greatest cost: as many small things as fit, in arrays of the longest kind."""
    deep = b"\x81\xa1a" * 20 + b"\x01"
    one = rng.choice((b"\x80", b"\x90", b"\x81\xa1a\x01", deep, b"\xa2ab", b"\xcd\xff\xff", b"\xc0"))
    one += b"\xc0" * rng.choice((0, 3, 15, 16, 40))
    per_array = 60_000 // (1 + one.count(b"\xc0"))
    items = one * per_array
    num_items = per_array * (1 + one.count(b"\xc0")) if one[:1] != b"\xc0" else len(items)
    inner = b"\xdd" + num_items.to_bytes(4, "big") + items
    count = max(1, BOMB_BYTES // len(inner))
    return [seal(b"\x82\xa1a\xdd" + count.to_bytes(4, "big") + inner * count + b"\xa8checksum\xcf" + bytes(8))]
