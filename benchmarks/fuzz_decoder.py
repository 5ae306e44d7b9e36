"""Hostile bytes for the decoder of the wire: broken copies of all kinds of valid messages, and noise.

Nine in ten of the broken headers get a checksum of their own: what somebody means to send is whole, and reaches what
is behind that check. Each input follows from the seed and its number alone, so that a finding is repeated with
``--first NUMBER --inputs 1``.
What is required of every input: it is read or refused with a reason of the protocol; what is read encodes to the same
message again; no other exception, whatever the bytes. Of every 20th, and of all that were built to be expensive, the
memory is measured too: at most 6 MiB, and 32 times the input's own size beyond that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import resource
import sys
import time
import tracemalloc
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import msgpack
import xxhash

from benchmarks import output
from broker.wire.codec import Unreadable, decode, encode, peek
from broker.wire.errors import ConfigError
from broker.wire.fragments import TensorSpec
from broker.wire.headers import seal
from broker.wire.lengths import encoded_bytes
from broker.wire.messages import MESSAGE_TYPES, Codec, Encoded, Envelope, Message, Reason, Recipe

#: What decoding may allocate: this, and so many bytes for each byte of input.
FREE_BYTES, BYTES_PER_BYTE = 6 << 20, 32
MEASURE_EVERY = 20
#: One input in so many is built to be expensive, and as large as this.
BOMB_EVERY, BOMB_BYTES = 5_000, 1 << 20
#: Messages of each kind that are broken.
VALID_PER_KIND = 20

Frames = list[bytes]


@dataclasses.dataclass(slots=True, kw_only=True)
class Findings:
    """What came of a run.

    Attributes:
        outcomes: ``read``, or the reason of the refusal -> inputs.
        failures: What must not be, with the number of the input.
        peak_ratio: Most memory that was measured, over what is allowed.
        slowest_s: Longest time that one input took.
    """

    inputs: int = 0
    wall_s: float = 0.0
    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[str] = dataclasses.field(default_factory=list)
    measured: int = 0
    peak_bytes: int = 0
    peak_ratio: float = 0.0
    slowest_s: float = 0.0


# --- valid messages -----------------------------------------------------------------------------------------------


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
        values = {"merge": values["merge"], "codec": values["codec"], "quorum": 1 + values["quorum"]}
    return values


def _buffer(rng: random.Random) -> Encoded:
    shape = tuple(rng.randrange(5) for _ in range(rng.randrange(4)))
    codec = rng.choice(list(Codec))
    data = rng.randbytes(encoded_bytes(codec, math.prod(shape)))
    return Encoded(codec=codec, shape=shape, checksum=xxhash.xxh3_64_intdigest(data), data=data)


# --- broken ones --------------------------------------------------------------------------------------------------

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
    return _resealed(frames) if rng.random() < 0.9 else frames


def _resealed(frames: Frames) -> Frames:
    """Returns the frames with a header that ends with its checksum."""
    return [seal(frames[0]), *frames[1:]] if frames else frames


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


def _lie_about_length(data: bytes, valid: list[Frames], rng: random.Random) -> bytes:
    """Puts a text, array or map of a length that is not there."""
    at = rng.randrange(len(data) + 1)
    mark = rng.choice((b"\xd9", b"\xda", b"\xdb", b"\xdc", b"\xdd", b"\xde", b"\xdf", b"\xc4", b"\xc6", b"\xc9"))
    length = rng.choice((0, 1, 255, 65_535, 2**31, 2**32 - 1)).to_bytes(4, "big")[-rng.choice((1, 2, 4)) :]
    return data[:at] + mark + length + data[at:]


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
    *(_flip, _flip, _truncate, _swap_type, _swap_type, _lie_about_length, _splice, _repeat),
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


# --- the run ------------------------------------------------------------------------------------------------------


def fuzz(inputs: int, seed: int, *, first: int = 0, progress: Callable[[int], None] = lambda _: None) -> Findings:
    """Decodes so many inputs, from number ``first`` on; a failure does not end it."""
    valid = valid_messages(random.Random(seed))
    findings = Findings()
    rng = random.Random()
    began_s = time.perf_counter()
    for number in range(first, first + inputs):
        rng.seed(seed * 1_000_000_007 + number)
        is_bomb = number % BOMB_EVERY == 0
        frames = bomb(rng) if is_bomb else broken(valid, rng)
        _try(frames, number, findings, measured=is_bomb or number % MEASURE_EVERY == 0)
        findings.inputs += 1
        if number % 50_000 == 0:
            progress(number)
    findings.wall_s = time.perf_counter() - began_s
    return findings


def _try(frames: Frames, number: int, findings: Findings, *, measured: bool) -> None:
    if measured:
        findings.measured += 1
        tracemalloc.start()
    began_s = time.perf_counter()
    envelope = None
    try:
        envelope = decode(frames)
        outcome = "read"
    except Unreadable as err:
        outcome = str(err.reason)
        if err.reason not in set(Reason) or not str(err).isprintable():
            findings.failures.append(f"input {number}: refused with {err!r}")
    except Exception as err:  # noqa: BLE001 - whatever else it is, it is what we look for
        outcome = "crashed"
        findings.failures.append(f"input {number}: {err!r}")
    took_s = time.perf_counter() - began_s
    if measured:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        allowed = FREE_BYTES + BYTES_PER_BYTE * sum(map(len, frames))
        findings.peak_bytes = max(findings.peak_bytes, peak)
        findings.peak_ratio = max(findings.peak_ratio, peak / allowed)
        if peak > allowed:
            findings.failures.append(f"input {number}: {peak} bytes allocated, {allowed} allowed")
    else:
        findings.slowest_s = max(findings.slowest_s, took_s)
    findings.outcomes[outcome] += 1
    if envelope is None:
        peek(frames)  # never raises
    elif decode(encode(envelope)) != envelope:
        findings.failures.append(f"input {number}: read as what does not encode to itself")


def main(argv: list[str] | None = None) -> int:
    """Runs as a command; returns the exit status: 1 if any input did what none may."""
    parser = output.parser_of("fuzz_decoder", __doc__, "--inputs 1000000 --seed 0")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many (default: 1,000,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first one, to repeat a finding")
    output.add_arguments(parser)
    return output.guarded(_main, parser.parse_args(argv))


def _main(args: argparse.Namespace) -> int:
    inputs = min(args.inputs, 20_000) if args.quick else args.inputs
    if inputs < 1:
        raise ConfigError("inputs", inputs, "must be at least 1")
    say = (lambda number: print(f"input {number:,}", file=sys.stderr)) if sys.stderr.isatty() else lambda _: None
    found = fuzz(inputs, args.seed, first=args.first, progress=say)
    facts = {
        "inputs": found.inputs,
        "failures": len(found.failures),
        "inputs_per_s": round(found.inputs / found.wall_s),
        "wall_s": round(found.wall_s, 1),
        "slowest_ms": round(1000 * found.slowest_s, 1),
        "measured": found.measured,
        "peak_mib": round(found.peak_bytes / (1 << 20), 1),
        "peak_of_allowed": round(found.peak_ratio, 3),
        "process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "outcomes": dict(found.outcomes.most_common()),
    }
    if args.json:
        print(json.dumps(facts))
    else:
        print("\n".join(f"{name:16} {value}" for name, value in facts.items()))
    for failure in found.failures[:20]:
        print(failure, file=sys.stderr)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
