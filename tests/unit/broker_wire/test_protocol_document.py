"""PROTOCOL.md names all that the code knows, with its type, and its examples decode."""

import dataclasses
import json
import math
import re
import types
import typing
from pathlib import Path

import msgpack
import numpy as np
import pytest

from broker.server import LINGER_MS
from broker.transport.sockets import BULK_OPTIONS, CONTROL_OPTIONS
from broker.wire import messages as m
from broker.wire.fragments import Kind
from broker.wire.frames import decode, encode, verify
from broker.wire.headers import Limits
from broker.wire.messages import KINDS, PROTOCOL_VERSION, RETRY_REASONS, Channel, Codec, Reason
from broker.wire.number_formats import encoded_bytes
from broker.wire.tensors import decode_tensor, encode_tensor

DOCUMENT = (Path(__file__).parents[3] / "broker" / "PROTOCOL.md").read_text()
HEADINGS = dict(re.findall(r"^### ([a-z_]+)\n(.*?)(?=^#|\Z)", DOCUMENT, re.MULTILINE | re.DOTALL))
EXAMPLES = re.findall(r"```json\n(.*?)```\n```hex\n(.*?)```", DOCUMENT, re.DOTALL)


def snake(cls):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def type_word(hint, name):
    """How the document writes an annotation."""
    if name == "payload":
        return "payload"
    if typing.get_origin(hint) is tuple:
        return f"[{type_word(typing.get_args(hint)[0], name)}]"
    if isinstance(hint, types.UnionType):
        return f"{type_word(typing.get_args(hint)[0], name)} or null"
    if hint is str:
        return "text"
    return hint.__name__ if hint in (int, float, bool, bytes) else snake(hint)


def parts_of(cls):
    """Every dataclass that occurs in the fields of ``cls``, at any depth."""
    found = set()
    for hint in typing.get_type_hints(cls).values():
        while typing.get_origin(hint) is tuple or isinstance(hint, types.UnionType):
            hint = typing.get_args(hint)[0]
        if dataclasses.is_dataclass(hint):
            found |= {hint} | parts_of(hint)
    return found


PARTS = set().union(*(parts_of(cls) for cls in KINDS.values()))


def rows(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def section(number):
    return re.search(rf"^## {number}\. .*?(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)[0]


@pytest.mark.parametrize("cls", [*KINDS.values(), *sorted(PARTS, key=snake)], ids=snake)
def test_every_field_of_every_kind_and_part_is_described_with_its_type(cls):
    hints = typing.get_type_hints(cls)
    described = [row[:2] for row in rows(HEADINGS[snake(cls)])[2:]]
    assert described == [[f"`{f.name}`", type_word(hints[f.name], f.name)] for f in dataclasses.fields(cls)]


def test_nothing_is_described_that_does_not_exist():
    assert set(HEADINGS) == set(KINDS) | {snake(part) for part in PARTS}


def test_every_kind_is_listed_with_its_sender_and_channel():
    listed = {row[0].strip("`"): row for row in rows(section(4).split("###")[0])[2:]}
    assert listed.keys() == KINDS.keys()
    for kind, cls in KINDS.items():
        assert listed[kind][3] == cls.channel
        assert cls.role in listed[kind][1]


def test_every_reason_is_listed_and_those_to_be_retried_are_marked():
    listed = {row[0].strip("`"): row[2] for row in rows(section(7))[2:]}
    assert list(listed) == list(Reason)
    assert {reason for reason, again in listed.items() if again == "yes"} == RETRY_REASONS


@pytest.mark.parametrize("enum", [Codec, Kind, m.Phase, m.Fate, m.Departure, m.StateSource, m.Inquiry], ids=snake)
def test_every_word_of_every_enum_is_listed(enum):
    (words,) = [row[1] for row in rows(section(6)) if row[0].split()[0] == snake(enum)]
    assert re.findall(r"`(\w+)`", words) == list(enum)


def test_limits_queues_and_version_are_those_of_the_code():
    assert {row[0].strip("`"): int(row[1]) for row in rows(section(8))[2:]} == dataclasses.asdict(Limits())
    for name, marks, linger in [(row[0], row[1], row[3]) for row in rows(section(10))[2:]]:
        options = BULK_OPTIONS if name.endswith(Channel.BULK) else CONTROL_OPTIONS
        linger_s = LINGER_MS / 1000 if name.startswith("broker") else options.linger_s
        assert (int(marks), linger) == (options.high_water_mark, f"{linger_s:g} s")
    assert f"The wire protocol, version {PROTOCOL_VERSION}\n" in DOCUMENT
    assert f"| `v` | int | version of this protocol: {PROTOCOL_VERSION} |" in section(2)
    releases, versions = (rows(table)[2:] for table in re.findall(r"(?:^\|.*\n)+", section(11), re.MULTILINE))
    assert releases[-1][1:] == [str(PROTOCOL_VERSION)] * 2
    assert [int(row[0]) for row in versions] == list(range(1, PROTOCOL_VERSION + 1))
    assert {json.loads(written)["v"] for written, _ in EXAMPLES} == {PROTOCOL_VERSION}


LENGTHS = {
    "4 n": lambda n: 4 * n,
    "2 n": lambda n: 2 * n,
    "4 ceil(n / 256) + n": lambda n: 4 * math.ceil(n / 256) + n,
    "4 ceil(n / 256) + ceil(n / 2)": lambda n: 4 * math.ceil(n / 256) + math.ceil(n / 2),
}


@pytest.mark.parametrize("codec", Codec)
def test_frames_are_as_long_as_the_table_of_codecs_says(codec):
    (form,) = [row[2] for row in rows(section(2)) if row[0] == f"`{codec}`"]
    for n in (0, 1, 3, 255, 256, 257, 1000):
        assert LENGTHS[form](n) == encoded_bytes(codec, n)


def test_the_blockwise_example_is_what_is_written_and_read():
    listed = re.findall(r"^(int\d)  ([0-9a-f ]+)$", section(2), re.MULTILINE)
    assert [name for name, _ in listed] == [Codec.INT8, Codec.INT4]
    values = np.array([1, -2, 7], np.float32)
    for name, written in listed:
        encoded = encode_tensor(values, Codec(name))
        assert bytes(encoded.data) == bytes.fromhex(written)
        np.testing.assert_allclose(decode_tensor(encoded), values, atol=7 / 127 / 2)


@pytest.mark.parametrize(("written", "frames"), EXAMPLES)
def test_every_example_is_what_the_codec_reads_and_writes(written, frames):
    frames = [bytes.fromhex(line) for line in frames.split()]
    assert msgpack.unpackb(frames[0]) == json.loads(written)
    received = decode(frames)
    verify(received)
    assert [bytes(frame) for frame in encode(received)] == frames
