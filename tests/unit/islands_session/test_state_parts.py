"""A state on its way between islands: cut, joined, and what of another island's is refused."""

import struct
from dataclasses import replace

import ml_dtypes
import msgpack
import numpy as np
import pytest
import xxhash

from broker.wire import messages as m
from islands.protocol.donation import PART_BYTES
from islands.session import checkpoint, state_parts
from islands.session.training_state import Needed, Position, Snapshot


def sent(state):
    snapshot = Snapshot(state=checkpoint.copied(state), cursor=0, local=())
    return state_parts.cut(checkpoint.packed(snapshot, (), Position(40, 400), 2))


def needed(state):
    return Needed(state=checkpoint.leaves_of(state), local=())


def test_a_large_state_is_cut_into_equal_parts_and_the_last_one_filled_up():
    state = {"m": np.arange(600_001, dtype=np.float32), "odd": np.arange(3, dtype=np.uint8)}
    parts, size = sent(state)
    lengths = [memoryview(each.data).nbytes for (each,) in parts]
    assert lengths[:-1] == [PART_BYTES] * (len(parts) - 1)
    assert 0 <= sum(lengths) - size < 4
    found, flaw = state_parts.read(parts, size, needed(state))
    assert (flaw, size) == ("", len(state_parts.joined(parts, size)))
    assert size <= needed(state).most_bytes
    assert np.array_equal(found.state[0][2], state["m"])


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"m": np.zeros(4, np.float32)}, "saved was m float32[3], needed is m float32[4]"),
        ({"m": np.zeros(3, np.float16)}, "needed is m float16[3]"),
        ({"v": np.zeros(3, np.float32)}, "needed is v"),
        ({"m": np.zeros(3, np.float32), "n": np.zeros(3)}, "1 arrays were saved, 2 are needed"),
    ],
    ids=["of another shape", "of another dtype", "of another name", "with more"],
)
def test_the_state_of_another_optimizer_is_refused(wanted, says):
    found, flaw = state_parts.read(*sent({"m": np.zeros(3, np.float32)}), needed(wanted))
    assert found is None
    assert flaw.startswith("it is of another model or optimizer: ")
    assert says in flaw


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_a_state_that_is_not_finite_is_refused(bad, dtype):
    state, fresh = ({"m": np.array(values).astype(dtype)} for values in ([1, bad, 2], [bad, 0, 0]))
    found, flaw = state_parts.read(*sent(state), needed(fresh))
    assert found is None
    assert flaw == "m is not finite"
    assert state_parts.read(*sent(state), needed(state))[1] == "", "a mask is as it began"


def test_bytes_that_are_no_state_are_refused():
    state = {"m": np.zeros(3, np.float32)}
    parts, size = sent(state)
    for wrong in (size - 1, size - 20, 4):
        found, flaw = state_parts.read(parts, wrong, needed(state))
        assert found is None
        assert "cannot be read" in flaw


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("more", [-4, 4, 1 << 20])
def test_a_part_of_another_length_than_it_says_is_not_kept(part, more):
    size = 2 * PART_BYTES + 5
    length = PART_BYTES if part < 2 else 8
    message = m.StatePart(state_id="1.40", part=part, num_parts=3, state_bytes=size, payload=buffers(length))
    assert state_parts.flaw_in(message) == ""
    message = replace(message, payload=buffers(length + more))
    assert state_parts.flaw_in(message) == f"part {part} has {length + more} bytes, {length} belong there"
    assert "belong there" in state_parts.flaw_in(replace(message, payload=()))
    assert "has 4 bytes, 0 belong there" in state_parts.flaw_in(replace(message, part=9, payload=buffers(4)))


def buffers(size):
    data = memoryview(bytes(size))
    return (m.Encoded(codec=m.Codec.F32, shape=(size // 4,), checksum=0, data=data),)


ROW = {"name": "m", "sort": "float32", "dtype": "float32", "shape": [3], "nbytes": 12, "checksum": None}


def written(header):
    """What a donor may send whose program is not ours: any header, whole."""
    body = msgpack.packb(header)
    prefix = struct.pack("<8sQQ", b"ATOLLCK2", len(body), xxhash.xxh3_64_intdigest(body))
    return state_parts.cut([prefix + body, bytes(12)])


def header_of(row=None, **changed):
    row = {**ROW, "checksum": xxhash.xxh3_64_intdigest(bytes(12)), **(row or {})}
    counts = {"incarnation": 1, "step": 1, "tokens": 1, "cursor": 0}
    return {**counts, "state": [list(row.values())], "local": [], **changed}


COUNTS = (-1, 1.0, None, "1", True, 1 << 63)
DTYPES = (None, 5, "O", "(", "", ["f4"], [["a", "f4"]], {"names": []}, "V4", "(9999999999,)f4", "f4,f4")
LITERALS = ("(,)f4", "f4,(1", "07", "04c")  # of Python, which numpy reads some dtypes as
SHAPES = (None, 3, "3", [3.0], [-1], [True], [0, 1 << 62, 1 << 62], [1] * 100, [[3]], [4])


@pytest.mark.parametrize(
    "header",
    [
        *({name: value} for name in ("incarnation", "step", "tokens") for value in COUNTS),
        *({"cursor": value} for value in COUNTS if value is not None),  # None: the donor's loop keeps none
        *({"run_id": value} for value in (None, 5, b"demo", ["demo"])),
        *({"state": value} for value in (None, 1, {"m": 1}, "m", [None], [[]], [["m"]], [{}])),
        *({"row": {"sort": value}} for value in (None, 5, ["f"], b"float32", {})),
        *({"row": {"name": value}} for value in (None, 5, ["m"], {})),
        *({"row": {"dtype": value}} for value in (*DTYPES, *LITERALS)),
        *({"row": {"shape": value}} for value in SHAPES),
        *({"row": {"nbytes": value}} for value in (None, -1, 12.0, "12", 1 << 62, 8)),
        *({"row": {"checksum": value}} for value in (None, -1, 0, "0")),
    ],
    ids=repr,
)
def test_a_header_that_holds_what_does_not_belong_there_ends_no_session(header):
    wanted = needed({"m": np.zeros(3, np.float32)})
    assert state_parts.read(*written(header_of()), wanted)[1] == "", "what the others are changed from"
    row = header.pop("row", None)
    found, flaw = state_parts.read(*written(header_of(row, **header)), wanted)
    assert found is None
    assert flaw


def test_a_header_that_is_no_map_or_too_deep_or_changed_is_refused():
    wanted = needed({})
    for header in (None, 1, [], [1, 2], "state"):
        assert "cannot be read" in state_parts.read(*written(header), wanted)[1]
    deep = b"\x91" * 200_000
    prefix = struct.pack("<8sQQ", b"ATOLLCK2", len(deep), xxhash.xxh3_64_intdigest(deep))
    assert "cannot be read" in state_parts.read(*state_parts.cut([prefix, deep]), wanted)[1]
    (((whole,),), size) = sent({"lr": 1.0})
    changed = bytearray(whole.data)
    changed[40] ^= 1
    assert "its header is changed" in state_parts.read([[replace(whole, data=memoryview(changed))]], size, wanted)[1]


@pytest.mark.parametrize(
    ("sort", "array", "wanted"),
    [
        ("str", np.frombuffer(b"\xff\xfe", np.uint8), "adam"),
        ("str", np.zeros((2, 2), np.uint8), "adam"),
        ("str", np.zeros(2, np.float32), "adam"),
        ("str", np.float32(1), "adam"),
        ("bytes", np.zeros(2, np.int8), b"x"),
        ("int", np.frombuffer(b"0xz", np.uint8), 1),
        ("int", np.frombuffer(b"", np.uint8), 1),
        ("int", np.float32(1), 1),
        ("float", np.zeros(3), 1.0),
        ("float", np.frombuffer(b"1.5", np.uint8), 1.0),
        ("float", np.float64("nan"), 1.0),
        ("bool", np.int64(1), True),
    ],
    ids=str,
)
def test_bytes_that_are_no_value_of_their_sort_are_refused(monkeypatch, sort, array, wanted):
    monkeypatch.setattr(checkpoint, "sort_of", lambda leaf: sort)
    given = sent({"x": array})
    monkeypatch.undo()
    found, flaw = state_parts.read(*given, needed({"x": wanted}))
    assert found is None
    assert flaw
