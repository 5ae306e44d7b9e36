"""Tensors as bytes, against ml_dtypes and numpy as slow twins."""

import math

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from broker.wire import tensors
from broker.wire.errors import LocalProtocolError, RemoteProtocolError
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.messages import Codec, Encoded, Reason
from broker.wire.tensors import (
    check_payload,
    decode_into,
    decode_tensor,
    encode_tensor,
    fragment_digest,
    is_finite,
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
    # All are within one block, rounded to half of max / 127, or clipped to 13/16 of it; see test_broker_blockwise.
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


def test_the_checksum_is_xxh3_of_the_bytes():
    encoded = encode_tensor(random_values(100), Codec.BF16)
    assert encoded.checksum == xxhash.xxh3_64_intdigest(bytes(encoded.data))
    assert len(encoded.data) == 200


def test_only_float32_is_encoded():
    with pytest.raises(LocalProtocolError, match="float64"):
        encode_tensor(np.zeros(3), Codec.F32)


@pytest.mark.parametrize("codec", list(Codec))
def test_decode_into_fills_a_slice_of_a_fragment_vector(codec):
    array = random_values(MANY)
    encoded = encode_tensor(array, codec)
    vector = np.full(MANY + 10, 7, np.float32)
    decode_into(encoded, vector[5:-5])
    np.testing.assert_array_equal(vector[5:-5], decode_tensor(encoded))
    assert (vector[:5] == 7).all()
    assert (vector[-5:] == 7).all()


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
    assert norm(encoded) == pytest.approx(math.sqrt(expected), rel=1e-5)


@pytest.mark.parametrize("scale", [1e30, 1e-30, 3e38, 1e-45])
def test_the_norm_of_extreme_values_neither_overflows_nor_vanishes(scale):
    array = np.full(1000, scale, np.float32)
    encoded = encode_tensor(array, Codec.F32)
    assert norm(encoded) == pytest.approx(float(array[0]) * math.sqrt(1000), rel=1e-6)
    assert is_finite(encoded)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, MANY // 2, MANY - 1])
def test_one_value_that_is_not_finite_is_found_anywhere(codec, bad, place):
    array = random_values(MANY)
    assert is_finite(encode_tensor(array, codec))
    array[place] = bad
    encoded = encode_tensor(array, codec)
    assert not is_finite(encoded)
    assert not math.isfinite(norm(encoded))


# --- payloads ---------------------------------------------------------------------------------------------------

SPECS = (
    TensorSpec(name="w", shape=(2, 3), dtype="float32", kind=Kind.RDA),
    TensorSpec(name="b", shape=(3,), dtype="bfloat16", kind=Kind.MEAN),
)


def payload(codec=Codec.F32, shapes=((2, 3), (3,))):
    return tuple(encode_tensor(np.zeros(shape, np.float32), codec) for shape in shapes)


@pytest.mark.parametrize("shapes", [((2, 3),), ((2, 3), (3,), (1,)), ((3, 2), (3,)), ((3,), (2, 3)), ((2, 3), (3, 1))])
def test_a_payload_of_other_shapes_is_refused(shapes):
    with pytest.raises(RemoteProtocolError) as caught:
        check_payload(payload(shapes=shapes), SPECS)
    assert caught.value.reason == Reason.WRONG_SHAPE


def test_a_codec_that_is_not_allowed_here_is_refused():
    with pytest.raises(RemoteProtocolError) as caught:
        check_payload(payload(Codec.BF16), SPECS, codecs=frozenset({Codec.F32}))
    assert (caught.value.reason, caught.value.field) == (Reason.WRONG_DTYPE, "buffers[0].codec")


# --- digests ----------------------------------------------------------------------------------------------------


def test_a_digest_names_the_bytes_however_they_are_split():
    vector = random_values(60)
    digest = fragment_digest(vector)
    assert digest == xxhash.xxh3_128_hexdigest(vector.tobytes())
    assert digest == fragment_digest(vector[:24].reshape(4, 6), vector[24:])
    assert digest != fragment_digest(vector[::-1])


def test_a_digest_is_of_float32_only():
    with pytest.raises(LocalProtocolError, match="float64"):
        fragment_digest(np.zeros(3))
