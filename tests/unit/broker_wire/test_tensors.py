"""Tensors as bytes, against ml_dtypes, numpy and Python as slow twins."""

import math
import struct

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import LocalProtocolError, RemoteProtocolError
from broker.wire import blockwise, tensors
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.messages import Codec, Encoded, Reason
from broker.wire.number_formats import BLOCK_ELEMENTS, block_count, encoded_bytes
from broker.wire.tensors import (
    Elements,
    check_payload,
    decode_into,
    decode_tensor,
    encode_tensor,
    fragment_digest,
    norm,
    squared_norm,
)
from tests.profiles import examples

SPECIAL = np.array([0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, 1e-45, -1e-45, 3.4028235e38, 1e-38], np.float32)
MANY = 3 * tensors._BLOCK + 17  # several blocks, the last one short


def random_values(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7), (2, 3, 4, 5)])
@pytest.mark.parametrize("codec", list(Codec))
def test_shapes_survive(shape, codec):
    array = random_values(math.prod(shape)).astype(ml_dtypes.bfloat16).astype(np.float32).reshape(shape)
    decoded = decode_tensor(encode_tensor(array, codec))
    assert decoded.dtype == np.float32
    assert decoded.shape == shape
    # All are within one block, rounded to half of max / 127, or clipped to 13/16 of it; see below.
    tolerance = np.abs(array).max(initial=0) * {Codec.INT8: 0.501 / 127, Codec.INT4: 3.003 / 16}.get(codec, 0)
    np.testing.assert_allclose(decoded, array, rtol=0, atol=tolerance)


def test_f32_is_exact_to_the_bit_and_shares_the_memory():
    array = np.concatenate([SPECIAL, np.array([np.nan], np.float32)])
    encoded = encode_tensor(array, Codec.F32)
    decoded = decode_tensor(encoded)
    assert decoded.tobytes() == array.tobytes()
    assert np.shares_memory(np.frombuffer(encoded.data, np.uint8), array)
    assert np.shares_memory(decoded, array)
    assert not decoded.flags.writeable
    assert array.flags.writeable  # the caller's array is left as it was


def test_unaligned_bytes_decode_into_an_aligned_array():
    array = random_values(8)
    data = memoryview(b"x" + array.tobytes())[1:]
    encoded = Encoded(codec=Codec.F32, shape=(8,), checksum=0, data=data)
    decoded = decode_tensor(encoded)
    assert decoded.flags.aligned
    np.testing.assert_array_equal(decoded, array)
    assert norm(encoded) == pytest.approx(np.linalg.norm(array), rel=1e-6)


@examples(200)
@given(st.lists(st.floats(width=32), max_size=50))
def test_bf16_is_what_ml_dtypes_rounds_to(values):
    array = np.array(values, np.float32)
    decoded = decode_tensor(encode_tensor(array, Codec.BF16))
    np.testing.assert_array_equal(decoded, array.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_a_strided_array_is_encoded_in_row_major_order():
    array = random_values(24).reshape(4, 6).T
    for codec in Codec:
        expected = encode_tensor(np.ascontiguousarray(array), codec)
        assert encode_tensor(array, codec) == expected


def test_checksums_are_xxh3_of_the_bytes_and_digests_also_however_these_are_split():
    vector = random_values(60)
    encoded = encode_tensor(vector, Codec.BF16)
    assert encoded.checksum == xxhash.xxh3_64_intdigest(bytes(encoded.data))
    digest = fragment_digest(vector)
    assert digest == xxhash.xxh3_128_hexdigest(vector.tobytes())
    assert digest == fragment_digest(vector[:24].reshape(4, 6), vector[24:])
    assert digest != fragment_digest(vector[::-1])


@pytest.mark.parametrize("use", [fragment_digest, lambda array: encode_tensor(array, Codec.F32)])
def test_only_float32_is_encoded_and_has_a_digest(use):
    with pytest.raises(LocalProtocolError, match="float64"):
        use(np.zeros(3))


@pytest.mark.parametrize("codec", list(Codec))
def test_decode_into_fills_a_slice_of_a_fragment_vector(codec):
    encoded = encode_tensor(random_values(MANY), codec)
    vector = np.full(MANY + 10, 7, np.float32)
    decode_into(encoded, vector[5:-5])
    np.testing.assert_array_equal(vector, np.pad(decode_tensor(encoded), 5, constant_values=7))


@pytest.mark.parametrize(
    "out",
    [np.zeros(5, np.float32), np.zeros(6, np.float64), np.zeros((6, 2), np.float32)[:, 0], np.zeros(7, np.float32)],
)
def test_decode_into_refuses_an_array_that_does_not_fit(out):
    with pytest.raises(LocalProtocolError, match="out is"):
        decode_into(encode_tensor(random_values(6), Codec.F32), out)


@pytest.mark.parametrize("codec", list(Codec))
def test_the_norm_is_that_of_the_decoded_values(codec):
    encoded = encode_tensor(random_values(MANY), codec)
    expected = float(np.sum(np.square(decode_tensor(encoded), dtype=np.float64)))
    # float32 products and sums within a block of 65,536: about sqrt(block) * 2**-24, with room.
    assert squared_norm(encoded) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", [1e30, 1e-30, 3e38, 1e-45])
def test_the_norm_of_extreme_values_neither_overflows_nor_vanishes(scale):
    array = np.full(1000, scale, np.float32)
    encoded = encode_tensor(array, Codec.F32)
    assert norm(encoded) == pytest.approx(float(array[0]) * math.sqrt(1000), rel=1e-6)
    assert math.isfinite(squared_norm(encoded))


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, MANY // 2, MANY - 1])
def test_one_value_that_is_not_finite_is_found_anywhere(codec, bad, place):
    array = random_values(MANY)
    assert math.isfinite(squared_norm(encode_tensor(array, codec)))
    array[place] = bad
    encoded = encode_tensor(array, codec)
    assert not math.isfinite(squared_norm(encoded))
    assert not math.isfinite(norm(encoded))


SPECS = (
    TensorSpec(name="w", shape=(2, 3), dtype="float32", kind=Kind.RDA),
    TensorSpec(name="b", shape=(3,), dtype="bfloat16", kind=Kind.MEAN),
)


@pytest.mark.parametrize(
    ("shapes", "codec", "reason", "field"),
    [
        ([(2, 3)], Codec.F32, Reason.WRONG_SHAPE, "buffers"),
        ([(2, 3), (3,), (1,)], Codec.F32, Reason.WRONG_SHAPE, "buffers"),
        ([(3, 2), (3,)], Codec.F32, Reason.WRONG_SHAPE, "buffers[0].shape"),
        ([(3,), (2, 3)], Codec.F32, Reason.WRONG_SHAPE, "buffers[0].shape"),
        ([(2, 3), (3, 1)], Codec.F32, Reason.WRONG_SHAPE, "buffers[1].shape"),
        ([(2, 3), (3,)], Codec.BF16, Reason.WRONG_DTYPE, "buffers[0].codec"),
    ],
)
def test_a_payload_of_other_shapes_or_in_a_codec_that_is_not_allowed_here_is_refused(shapes, codec, reason, field):
    payload = tuple(encode_tensor(np.zeros(shape, np.float32), codec) for shape in shapes)
    with pytest.raises(RemoteProtocolError) as caught:
        check_payload(payload, SPECS, codecs=frozenset({Codec.F32}))
    assert (caught.value.reason, caught.value.field) == (reason, field)


# --- block-wise integers, against a twin that goes through them one by one -------------------------------------------

#: Several chunks, the last one short, its last block short and odd.
SEVERAL = 2 * blockwise._CHUNK + 3 * BLOCK_ELEMENTS + 17
BLOCKWISE = [codec for codec in Codec if codec.blockwise]
LARGEST = {Codec.INT8: 127, Codec.INT4: 7}
SIZES = [0, 1, 2, 255, 256, 257, 511, 512, 513, 1000]
#: An element is off by half a scale, and by the float32 roundings of quotient and product, 2**-17 of a code each.
BOUND = 0.5 + 2**-16

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


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


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("extra", [-1, 1])
def test_bytes_of_another_length_are_not_decoded(codec, extra):
    data = bytes(encoded_bytes(codec, 300) + extra)
    for read in (Elements, squared_norm, lambda e: decode_into(e, np.empty(300, np.float32))):
        with pytest.raises(LocalProtocolError, match=f"a tensor has {len(data)} bytes as {codec}"):
            read(received(codec, data, 300))


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
    lost, before = (np.linalg.norm(each) / np.linalg.norm(values) for each in (lost, before))
    assert lost < 0.115 < 0.125 < before


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
    values = random_values(SEVERAL)
    encoded = encode_tensor(values, codec)
    pieces = [encode_tensor(values[i : i + 256], codec) for i in range(0, SEVERAL, 256)]
    blocks = len(pieces)
    assert bytes(encoded.data[: 4 * blocks]) == b"".join(bytes(piece.data[:4]) for piece in pieces)
    assert bytes(encoded.data[4 * blocks :]) == b"".join(bytes(piece.data[4:]) for piece in pieces)
    assert decode_tensor(encoded).tobytes() == b"".join(decode_tensor(piece).tobytes() for piece in pieces)


@examples(300)
@given(st.data(), st.integers(0, 700), st.sampled_from(BLOCKWISE))
def test_whatever_bytes_arrive_are_decoded_as_the_twin_does(data, elements, codec):
    length = encoded_bytes(codec, elements)
    seed = data.draw(st.integers(0, 2**32 - 1))
    hostile = np.random.default_rng(seed).bytes(length)  # scales of any sign and size, infinities, NaN; every code
    encoded = received(codec, hostile, elements)
    decoded = decode_tensor(encoded)
    np.testing.assert_array_equal(decoded, twin_decode(hostile, codec, elements))
    assert math.isfinite(squared_norm(encoded)) == bool(np.isfinite(decoded).all())


@pytest.mark.parametrize(("scale", "codes"), [(math.nan, 0), (math.inf, 0), (-math.inf, 0), (3e38, 0x77)])
@pytest.mark.parametrize("codec", BLOCKWISE)
def test_scales_that_are_not_finite_or_lead_beyond_float32_are_found_whatever_the_codes(codec, scale, codes):
    data = struct.pack("<2f", 1.0, scale) + bytes([codes]) * (encoded_bytes(codec, 300) - 8)
    assert not math.isfinite(squared_norm(received(codec, data, 300)))


@examples(200)
@given(st.sampled_from(list(Codec)), st.integers(0, 1500), st.integers(0, 1500))
def test_any_range_of_elements_is_that_of_the_whole(codec, one, other):
    start, stop = sorted((one, other))
    encoded = encode_tensor(random_values(1500), codec)
    got = Elements(encoded).read(start, np.empty(stop - start, np.float32))
    assert got.tobytes() == decode_tensor(encoded)[start:stop].tobytes()
