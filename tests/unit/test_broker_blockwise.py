"""Block-wise integers, against a twin that goes through them one by one."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.wire import blockwise
from broker.wire.errors import LocalProtocolError
from broker.wire.lengths import BLOCK_ELEMENTS, block_count, encoded_bytes
from broker.wire.messages import Codec, Encoded
from broker.wire.tensors import Elements, decode_into, decode_tensor, encode_tensor, is_finite, squared_norm
from tests.profiles import examples

BLOCKWISE = [codec for codec in Codec if codec.blockwise]
LARGEST = {Codec.INT8: 127, Codec.INT4: 7}
SIZES = [0, 1, 2, 255, 256, 257, 511, 512, 513, 1000]
MANY = (
    2 * blockwise._CHUNK + 3 * BLOCK_ELEMENTS + 17
)  # several chunks, the last one short, its last block short and odd
#: An element is off by half a scale, and by the float32 roundings of quotient and product, 2**-17 of a code each.
BOUND = 0.5 + 2**-16

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def random_values(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def received(codec, data, elements):
    return Encoded(codec=codec, shape=(elements,), checksum=0, data=data)


def scales_of(encoded):
    return np.frombuffer(encoded.data, "<f4", count=block_count(math.prod(encoded.shape)))


def twin_encode(values, codec):
    """The section of PROTOCOL.md, in Python, an element at a time."""
    scales, codes = b"", []
    for start in range(0, len(values), 256):
        block = values[start : start + 256]
        absmax = max(abs(x) for x in block)
        scale = absmax / np.float32(LARGEST[codec])
        here = [round(float(x / scale)) if absmax else 0 for x in block]
        if codec is Codec.INT4 and absmax:
            smaller = scale * np.float32(13 / 16)
            clipped = [min(max(round(float(x / smaller)), -7), 7) for x in block]
            exact = [round(float(x / scale * np.float32(1024))) for x in block]
            if squares_lost(exact, clipped, 832) < squares_lost(exact, here, 1024):
                scale, here = smaller, clipped
        scales += struct.pack("<f", scale)
        codes += here
    if codec is Codec.INT8:
        return scales + struct.pack(f"<{len(codes)}b", *codes)
    codes += [0] * (len(codes) % 2)
    return scales + bytes((low & 15) | (high & 15) << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))


def squares_lost(exact, codes, unit):
    return sum((x - unit * code) ** 2 for x, code in zip(exact, codes, strict=True))


def twin_decode(data, codec, elements):
    """Likewise. float64 holds the product exactly, so that it is rounded once."""
    blocks = -(-elements // 256)
    scales = struct.unpack(f"<{blocks}f", data[: 4 * blocks])
    body = data[4 * blocks :]
    if codec is Codec.INT8:
        codes = struct.unpack(f"<{elements}b", body)
    else:
        nibbles = [nibble for byte in body for nibble in (byte & 15, byte >> 4)]
        codes = [n - 16 if n > 7 else n for n in nibbles][:elements]
    with np.errstate(all="ignore"):
        return np.array([code * scales[i // 256] for i, code in enumerate(codes)], np.float64).astype(np.float32)


# --- lengths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "elements", "expected"),
    [
        (Codec.F32, 0, 0),
        (Codec.F32, 7, 28),
        (Codec.BF16, 7, 14),
        (Codec.INT8, 0, 0),
        (Codec.INT8, 1, 5),
        (Codec.INT8, 256, 260),
        (Codec.INT8, 257, 265),
        (Codec.INT4, 0, 0),
        (Codec.INT4, 1, 5),
        (Codec.INT4, 2, 5),
        (Codec.INT4, 256, 132),
        (Codec.INT4, 257, 137),
    ],
)
def test_a_length_is_scales_and_codes_to_the_byte(codec, elements, expected):
    assert encoded_bytes(codec, elements) == expected


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("size", SIZES)
def test_what_is_encoded_has_exactly_that_length(codec, size):
    assert memoryview(encode_tensor(random_values(size), codec).data).nbytes == encoded_bytes(codec, size)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("extra", [-1, 1])
def test_bytes_of_another_length_are_not_decoded(codec, extra):
    data = bytes(encoded_bytes(codec, 300) + extra)
    for read in (Elements, squared_norm, lambda e: decode_into(e, np.empty(300, np.float32))):
        with pytest.raises(LocalProtocolError, match=f"a tensor has {len(data)} bytes as {codec}"):
            read(received(codec, data, 300))


# --- encoding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", BLOCKWISE)
@pytest.mark.parametrize("size", SIZES)
def test_the_bytes_are_those_of_the_twin(codec, size):
    values = random_values(size) * np.repeat(np.float32(10) ** np.arange(-2, 2), 256)[:size].astype(np.float32)
    encoded = encode_tensor(values, codec)
    assert bytes(encoded.data) == twin_encode(values, codec)
    assert decode_tensor(encoded).tobytes() == twin_decode(bytes(encoded.data), codec, size).tobytes()


@examples(300)
@given(st.lists(FINITE, max_size=600), st.sampled_from(BLOCKWISE))
def test_no_element_is_off_by_more_than_half_the_scale_of_its_block_but_those_that_are_clipped(values, codec):
    values = np.array(values, np.float32)
    encoded = encode_tensor(values, codec)
    scales = np.repeat(scales_of(encoded).astype(np.float64), 256)[: values.size]
    decoded = decode_tensor(encoded).astype(np.float64)
    assert np.isfinite(decoded).all()
    beyond = np.abs(values) > (LARGEST[codec] + 0.5) * scales
    assert (np.abs(decoded - values)[~beyond] <= BOUND * scales[~beyond]).all()
    np.testing.assert_array_equal(np.abs(decoded[beyond]), (LARGEST[codec] * scales[beyond]).astype(np.float32))
    absmax = np.maximum.reduceat(np.abs(values), range(0, values.size, 256)) if values.size else values
    # Rounded by half a unit, raised to the smallest normal number, or lowered by a unit beside the largest.
    expected = np.where(absmax == 0, 0, np.maximum(absmax / LARGEST[codec], np.finfo(np.float32).smallest_normal))
    if codec is Codec.INT4:
        expected = np.where(scales_of(encoded) < 0.9 * expected, 13 / 16 * expected, expected)
    np.testing.assert_allclose(scales_of(encoded), expected, rtol=2**-22)


@examples(300)
@given(st.lists(FINITE, min_size=1, max_size=256), st.sampled_from([1, 2, 4, 6]))
def test_clipping_never_loses_more_than_the_scale_of_the_largest_element(values, power):
    """Hardly more: errors are compared in 1024ths of that scale."""
    values = np.array(values, np.float32)
    top = float(np.abs(values).max())
    if top < 1e-30 or top > 1e30:
        return
    shaped = (np.sign(values) * (np.abs(values) / top) ** power).astype(np.float32)  # long tails and short ones
    lost = decode_tensor(encode_tensor(shaped, Codec.INT4)).astype(np.float64) - shaped
    plain = np.rint(shaped * 7.0) / 7 - shaped
    assert np.sqrt((lost**2).sum()) <= np.sqrt((plain**2).sum()) + 2**-11 / 7 * np.sqrt(values.size)


def test_int4_loses_eleven_percent_of_normal_values_where_it_lost_thirteen():
    values = random_values(1 << 18)
    lost = decode_tensor(encode_tensor(values, Codec.INT4)) - values
    plain = np.repeat(np.abs(values).reshape(-1, 256).max(axis=1) / 7, 256)
    before = np.rint(values / plain) * plain - values
    assert (
        np.linalg.norm(lost) / np.linalg.norm(values) < 0.115 < 0.125 < np.linalg.norm(before) / np.linalg.norm(values)
    )


def test_a_block_of_one_size_is_not_clipped():
    values = np.array([1.0, -1.0] * 128, np.float32)
    assert decode_tensor(encode_tensor(values, Codec.INT4)) == pytest.approx(values)


@pytest.mark.parametrize("codec", BLOCKWISE)
def test_blocks_of_zeros_have_the_scale_zero_and_stay_zeros(codec):
    encoded = encode_tensor(np.array([0.0, -0.0] * 200, np.float32), codec)
    assert not any(encoded.data)
    assert not decode_tensor(encoded).any()
    assert squared_norm(encoded) == 0


@pytest.mark.parametrize("codec", BLOCKWISE)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_value_that_is_not_finite_is_nan_as_a_whole_and_no_other_is(codec, bad):
    values = random_values(1000)
    values[300] = bad
    encoded = encode_tensor(values, codec)
    assert np.isfinite(scales_of(encoded)).tolist() == [True, False, True, True]
    decoded = decode_tensor(encoded)
    assert np.isnan(decoded[256:512]).all()
    assert np.isfinite(np.delete(decoded, np.s_[256:512])).all()
    assert not math.isfinite(squared_norm(encoded))


@pytest.mark.parametrize("codec", BLOCKWISE)
def test_chunks_leave_no_seam(codec):
    values = random_values(MANY)
    encoded = encode_tensor(values, codec)
    pieces = [encode_tensor(values[i : i + 256], codec) for i in range(0, MANY, 256)]
    blocks = len(pieces)
    assert bytes(encoded.data[: 4 * blocks]) == b"".join(bytes(piece.data[:4]) for piece in pieces)
    assert bytes(encoded.data[4 * blocks :]) == b"".join(bytes(piece.data[4:]) for piece in pieces)
    assert decode_tensor(encoded).tobytes() == b"".join(decode_tensor(piece).tobytes() for piece in pieces)


# --- decoding ---------------------------------------------------------------------------------------------------


@examples(300)
@given(st.data(), st.integers(0, 700), st.sampled_from(BLOCKWISE))
def test_whatever_bytes_arrive_are_decoded_as_the_twin_does(data, elements, codec):
    length = encoded_bytes(codec, elements)
    seed = data.draw(st.integers(0, 2**32 - 1))
    hostile = np.random.default_rng(seed).bytes(length)  # scales of any sign and size, infinities, NaN; every code
    encoded = received(codec, hostile, elements)
    decoded = decode_tensor(encoded)
    np.testing.assert_array_equal(decoded, twin_decode(hostile, codec, elements))
    assert is_finite(encoded) == bool(np.isfinite(decoded).all())


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", BLOCKWISE)
def test_a_scale_that_is_not_finite_is_found_even_where_every_code_is_zero(codec, scale):
    data = struct.pack("<2f", 1.0, scale) + bytes(encoded_bytes(codec, 300) - 8)
    assert not is_finite(received(codec, data, 300))


@pytest.mark.parametrize("codec", BLOCKWISE)
def test_finite_scales_that_lead_beyond_float32_are_found(codec):
    data = struct.pack("<f", 3e38) + bytes([0x77] * (encoded_bytes(codec, 10) - 4))
    assert not is_finite(received(codec, data, 10))


@examples(200)
@given(st.sampled_from(list(Codec)), st.integers(0, 1500), st.integers(0, 1500))
def test_any_range_of_elements_is_that_of_the_whole(codec, one, other):
    start, stop = sorted((one, other))
    encoded = encode_tensor(random_values(1500), codec)
    got = Elements(encoded).read(start, np.empty(stop - start, np.float32))
    assert got.tobytes() == decode_tensor(encoded)[start:stop].tobytes()
