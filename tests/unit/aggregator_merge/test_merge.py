"""Merging, against the formulas written out in float64."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.interface.events import Part
from aggregator.merge.kernels import merge_fragment
from aggregator.merge.passes import PIECE
from broker.base.errors import LocalProtocolError
from broker.wire.fragments import Kind, TensorSpec, cut
from broker.wire.messages import Codec
from broker.wire.ranges import StepRange
from broker.wire.tensors import decode_tensor, encode_tensor

STEPS = StepRange(from_step=0, to_step=24, from_tokens=0, to_tokens=24_000)


def spec(shape, kind=Kind.RDA, unit_axes=0, name="x"):
    return TensorSpec(name=name, shape=shape, dtype="float32", kind=kind, unit_axes=unit_axes)


def part(*arrays, w=1.0, lam=1.0, codec=Codec.F32, island_id="a"):
    payload = tuple(encode_tensor(np.asarray(array, np.float32), codec) for array in arrays)
    return Part(island_id=island_id, steps=STEPS, payload=payload, token_weight=w, staleness_weight=lam)


def random(shape, seed, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


#: Of three contributions: token and staleness weights.
WEIGHTS = [4.0, 1.0, 2.5], [1.0, 0.5, 0.7]
WEIGHTED = [{"w": w, "lam": lam} for w, lam in zip(*WEIGHTS, strict=True)]


def twin_mean(deltas, w, lam):
    w, lam = np.asarray(w, np.float64), np.asarray(lam, np.float64)
    return sum(wi * li * d.astype(np.float64) for wi, li, d in zip(w, lam, deltas, strict=True)) / w.sum()


def twin_rda(deltas, w, lam):
    """The formula of reference.md, section 4.4, for one unit; plain, in float64, on whole stacks."""
    w, lam = np.asarray(w, np.float64), np.asarray(lam, np.float64)
    rows = [d.astype(np.float64).ravel() for d in deltas]
    lengths = np.array([np.linalg.norm(row) for row in rows])
    units = [row / n if n else row for row, n in zip(rows, lengths, strict=True)]
    direction = sum(a * u for a, u in zip(w * lam, units, strict=True))
    radius = float((w * lam * lengths).sum() / w.sum())
    share = w / w.sum()
    mean = twin_mean(deltas, w, lam).ravel()
    radius = min(radius, np.linalg.norm(mean) / math.sqrt((share**2).sum()))
    return (radius * direction / np.linalg.norm(direction)).reshape(deltas[0].shape)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("size", [1, 8, 1000, PIECE - 1, PIECE, 2 * PIECE + 33])
@pytest.mark.parametrize(("kind", "twin", "rtol"), [(Kind.MEAN, twin_mean, 1e-5), (Kind.RDA, twin_rda, 2e-5)])
def test_the_merge_equals_the_formula_for_every_size_and_codec(kind, twin, rtol, size, codec):
    deltas = [random(size, seed, scale) for seed, scale in enumerate((1.0, 5.0, 0.2))]
    parts = [part(d, codec=codec, **how) for d, how in zip(deltas, WEIGHTED, strict=True)]
    expected = twin([decode_tensor(p.payload[0]) for p in parts], *WEIGHTS)
    merged = merge_fragment([spec((size,), kind)], parts)
    np.testing.assert_allclose(merged.delta, expected, rtol=rtol, atol=rtol / 10)  # float32 additions
    assert merged.norm == pytest.approx(np.linalg.norm(expected), rel=rtol)


@pytest.mark.parametrize("kind", [Kind.MEAN, Kind.RDA])
@pytest.mark.parametrize(
    ("shape", "unit_axes"),
    [((7,), 0), ((1000, 7), 1), ((3, 100), 1), ((2, PIECE + 3), 1), ((5, 3, 301), 2), ((2 * PIECE + 301,), 0)],
)
@pytest.mark.parametrize(
    "codecs", [[Codec.BF16] * 3, [Codec.INT8] * 3, [Codec.INT4] * 3, [Codec.INT4, Codec.F32, Codec.INT8, Codec.BF16]]
)
def test_codecs_fold_as_their_decoded_tensors_do_to_the_last_bit_also_mixed(codecs, shape, unit_axes, kind):
    """Units, and the blocks that are folded, begin and end anywhere in the blocks that share a scale."""
    deltas = [random(shape, seed) for seed in range(len(codecs))]
    weighted = [{"w": seed + 1.0, "lam": 1 / (seed + 1)} for seed in range(len(codecs))]
    parts = [part(d, codec=codec, **how) for d, codec, how in zip(deltas, codecs, weighted, strict=True)]
    decoded = [part(decode_tensor(p.payload[0]), **how) for p, how in zip(parts, weighted, strict=True)]
    tensors = [spec(shape, kind, unit_axes)]
    merged, expected = merge_fragment(tensors, parts), merge_fragment(tensors, decoded)
    assert merged.delta.tobytes() == expected.delta.tobytes()
    assert (merged.norm, merged.norms, merged.cosines) == (expected.norm, expected.norms, expected.cosines)


def test_tensors_of_a_fragment_follow_each_other_in_manifest_order_each_by_its_kind():
    specs = [spec((4,), Kind.MEAN), spec((2, 3), Kind.FROZEN), spec((3, 3)), spec((), Kind.MEAN)]
    arrays = [[random(s.shape, 10 * seed + i) for i, s in enumerate(specs)] for seed in (1, 2)]
    merged = merge_fragment(specs, [part(*a, w=w) for a, w in zip(arrays, (1.0, 3.0), strict=True)])
    twins = (twin_mean, lambda deltas, *_: 0 * deltas[0], twin_rda, twin_mean)
    expected = [np.ravel(twin(of, [1, 3], [1, 1])) for twin, of in zip(twins, zip(*arrays, strict=True), strict=True)]
    np.testing.assert_allclose(merged.delta, np.concatenate(expected), rtol=1e-5, atol=1e-6)
    assert merged.norms[0] == pytest.approx(np.linalg.norm(np.concatenate([arrays[0][i].ravel() for i in (0, 2, 3)])))


def test_directions_that_cancel_leave_the_mean_not_amplified_rounding_noise():
    delta = random(5_000, 1)
    merged = merge_fragment(
        [spec((2, 2_500), unit_axes=1)], [part(delta.reshape(2, -1)), part(-3 * delta.reshape(2, -1))]
    )
    np.testing.assert_allclose(merged.delta, -delta, rtol=1e-5, atol=1e-6)
    assert merged.norm == pytest.approx(merged.mean_norm)


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e25, 1e30])
def test_lengths_survive_where_their_squares_leave_the_range_of_float32(scale):
    deltas = [random(100, seed) for seed in (1, 2)]
    merged = merge_fragment([spec((100,))], [part(d * np.float32(scale)) for d in deltas])
    expected = twin_rda(deltas, [1, 1], [1, 1])
    np.testing.assert_allclose(merged.delta.astype(np.float64) / scale, expected, rtol=1e-4, atol=1e-5)


@given(
    seed=st.integers(0, 10**6),
    weights=st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 1)), min_size=1, max_size=6),
    likeness=st.floats(-1, 1),
)
def test_the_result_is_never_longer_than_the_cap_nor_than_the_longest_contribution(seed, weights, likeness):
    common = random(200, seed)
    parts = [part(likeness * common + random(200, seed + 1 + i), w=w, lam=lam) for i, (w, lam) in enumerate(weights)]
    merged = merge_fragment([spec((200,))], parts)
    share = np.array([w for w, _ in weights]) / sum(w for w, _ in weights)
    assert merged.norm <= merged.mean_norm / math.sqrt((share**2).sum()) * (1 + 1e-5)
    assert merged.norm <= max(merged.norms) * (1 + 1e-5)
    assert merged.norm == pytest.approx(np.linalg.norm(merged.delta), rel=1e-5)


def test_the_cosines_tell_agreement_from_independence_from_opposition():
    a, b = np.zeros(4, np.float32), np.zeros(4, np.float32)
    a[0], b[1] = 1, 2
    for kind in (Kind.MEAN, Kind.RDA):
        assert merge_fragment([spec((4,), kind)], [part(a), part(b)]).cosines == pytest.approx([0])
    assert merge_fragment([spec((4,))], [part(a), part(3 * a), part(-a)]).cosines == pytest.approx([1, -1, -1])
    assert merge_fragment([spec((4,))], [part(a)]).cosines == ()
    assert merge_fragment([spec((4,))], [part(a), part(0 * a)]).cosines == (0,)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
def test_cosines_are_those_of_the_decoded_contributions_over_all_tensors_that_move(codec, count):
    shapes = {(7, 31): Kind.RDA, (300_000,): Kind.MEAN, (9_000,): Kind.FROZEN, (3, 5_000): Kind.RDA}
    tensors = [spec(shape, kind) for shape, kind in shapes.items()]
    parts = [part(*(random(shape, 10 * i + n) for n, shape in enumerate(shapes)), codec=codec) for i in range(count)]
    flat = [np.concatenate([decode_tensor(p.payload[i]).ravel() for i in (0, 1, 3)]).astype(np.float64) for p in parts]
    lengths = [np.linalg.norm(each) for each in flat]
    expected = [flat[i] @ flat[j] / lengths[i] / lengths[j] for i in range(count) for j in range(i + 1, count)]
    assert merge_fragment(tensors, parts).cosines == pytest.approx(expected, abs=1e-6)
    two = merge_fragment(tensors, parts, compared=[0, count - 1]).cosines
    assert two == pytest.approx([expected[count - 2]], abs=1e-6)


@pytest.mark.parametrize("codec", Codec)
def test_memory_is_one_accumulator_whatever_the_number_of_contributions(codec):
    size = 1_000_000
    shared = part(random(size, 1), codec=codec)
    tracemalloc.start()
    merge_fragment([spec((size,))], [shared] * 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * size + 3 * 4 * PIECE


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([], "without contributions"),
        ([part(np.zeros(4), w=-1.0)], "weights of a"),
        ([part(np.zeros(4), lam=math.nan)], "weights of a"),
        ([part(np.zeros(4), np.zeros(4))], "sent 2 buffers for 1 tensors"),
        ([part(np.zeros(5), island_id="b")], "x from b has 20 bytes as f32, its shape takes 16"),
        ([part(np.zeros(5), codec=Codec.INT4)], "x from a has 7 bytes as int4, its shape takes 6"),
    ],
)
def test_what_the_door_should_have_refused_is_our_own_error(parts, problem):
    with pytest.raises(LocalProtocolError, match=problem):
        merge_fragment([spec((4,))], parts)


def merged_in_sections(tensor, deltas, most, weighted, codec=Codec.F32):
    """Each section by itself, as if it were alone in its fragment; put together again."""
    found, start = [], 0
    for section in cut((tensor,), most):
        rows = slice(start, start + section.shape[0])
        start = rows.stop
        parts = [part(d[rows], codec=codec, **how) for d, how in zip(deltas, weighted, strict=True)]
        found.append(merge_fragment([section], parts).delta)
    assert len(found) > 1
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("tensor", "codec"),
    [
        (spec((23, 301), Kind.MEAN), Codec.F32),
        (spec((23, 301), Kind.MEAN), Codec.BF16),
        (spec((PIECE + 33,), Kind.MEAN), Codec.F32),
        (spec((23, 301), Kind.RDA, unit_axes=1), Codec.F32),
        (spec((7, 3, 301), Kind.RDA, unit_axes=2), Codec.BF16),
    ],
    ids=str,
)
def test_the_mean_and_the_merge_by_units_of_a_tensor_that_is_cut_are_those_of_the_whole_to_the_last_bit(tensor, codec):
    deltas = [random(tensor.shape, seed) for seed in range(3)]
    parts = [part(d, codec=codec, **how) for d, how in zip(deltas, WEIGHTED, strict=True)]
    whole = merge_fragment([tensor], parts).delta
    assert merged_in_sections(tensor, deltas, tensor.size // 3, WEIGHTED, codec).tobytes() == whole.tobytes()


def test_without_unit_axes_each_section_is_a_unit_of_its_own():
    tensor = spec((20, 301))
    deltas = [random(tensor.shape, seed) for seed in range(3)]
    merged = merged_in_sections(tensor, deltas, 10 * 301, WEIGHTED).reshape(tensor.shape)
    for rows in (slice(0, 10), slice(10, 20)):
        expected = twin_rda([np.ascontiguousarray(d[rows]) for d in deltas], *WEIGHTS)
        np.testing.assert_allclose(merged[rows], expected, rtol=2e-5, atol=2e-6)
