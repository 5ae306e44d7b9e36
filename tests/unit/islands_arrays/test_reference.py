"""The reference of a fragment: what is handed over, what survives an adoption, and what rounding must not become."""

import ml_dtypes
import numpy as np
import pytest

from broker.base.errors import LocalProtocolError
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.messages import Codec
from broker.wire.tensors import decode_tensor, encode_tensor
from islands.arrays.reference import Reference, adopted, encode_seed, is_narrow

F32, F64, BF16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(ml_dtypes.bfloat16)
SHAPES = ((70, 1000), (17,), ())  # more than a block, less than one, a scalar
TENSORS = tuple(TensorSpec(name=f"t{i}", shape=s, dtype="", kind=Kind.MEAN) for i, s in enumerate(SHAPES))


def arrays(random, scale=1.0, dtype=F32):
    return [np.asarray(scale * random.standard_normal(shape), np.float32).astype(dtype) for shape in SHAPES]


def version(values, codec=Codec.F32):
    return tuple(encode_tensor(np.asarray(v, np.float32), codec) for v in values)


class Fragment:
    """Local parameters and their reference, adopting and capturing as an island does."""

    def __init__(self, theta, *dtypes):
        self.dtypes = dtypes * (len(SHAPES) // len(dtypes))
        self.reference = Reference(TENSORS)
        self.adopt(theta, keep=0.0)

    def adopt(self, theta, keep=1.0, trained_meanwhile=0):
        shift = self.reference.shift(version(theta), keep, self.dtypes)
        before = []
        if keep == 0:
            self.local = [np.array(s, d) for s, d in zip(shift, self.dtypes, strict=True)]
        else:
            before = [x + np.asarray(trained_meanwhile, x.dtype) for x in self.local]  # the island goes on
            self.local = [np.asarray(adopted(x, s, keep)) for x, s in zip(before, shift, strict=True)]
        self.reference.installed(shift, keep, self.dtypes, before if any(map(is_narrow, self.dtypes)) else [])

    def train(self):
        self.local = [(x + np.asarray(0.25, x.dtype)).astype(x.dtype) for x in self.local]

    def capture(self, codec=Codec.F32, *, feedback=True):
        payload = self.reference.capture([x.copy() for x in self.local], codec, feedback=feedback)
        return [decode_tensor(e) for e in payload]

    def progress(self):
        locals_ = [x.astype(np.float64).reshape(-1) for x in self.local]
        return [x - r for x, r in zip(locals_, self.reference.values, strict=True)]


CHANGES = {
    "captured": lambda fragment, theta: fragment.capture(Codec.INT8),
    "captured in float32": lambda fragment, theta: fragment.capture(Codec.F32),
    "captured without feedback": lambda fragment, theta: fragment.capture(Codec.INT8, feedback=False),
    "adopted": lambda fragment, theta: fragment.adopt([x + 1 for x in theta]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_first_version_is_shared_until_the_reference_changes_and_never_written_to(change):
    theta = arrays(np.random.default_rng(5))
    payload = version(theta)
    fragment = Fragment(theta, F32)
    shift = fragment.reference.shift(payload, 0.0, fragment.dtypes)
    fragment.reference.installed(shift, 0.0, fragment.dtypes, [])
    values = [decode_tensor(encoded) for encoded in payload]
    assert all(map(np.shares_memory, fragment.reference.values, values))
    for leaf in fragment.local:
        leaf += 0.5
    change(fragment, theta)
    assert all(map(np.array_equal, values, theta))
    assert not any(map(np.shares_memory, fragment.reference.values, values))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("codec", list(Codec))
def test_adopting_again_and_again_without_training_leaves_a_pseudo_gradient_of_exactly_zero(dtype, codec):
    random = np.random.default_rng(0)
    fragment = Fragment(arrays(random), dtype)
    for _ in range(30):
        assert not any(map(np.any, fragment.progress()))
        fragment.adopt(arrays(random, scale=random.uniform(0.1, 10)))
    assert not any(np.any(delta) for delta in fragment.capture(codec))


def test_rounding_errors_of_bfloat16_do_not_add_up_over_adoptions():
    random = np.random.default_rng(1)
    fragment = Fragment(arrays(random), BF16)
    for _ in range(30):
        theta = arrays(random)
        fragment.adopt(theta)
    for local, target in zip(fragment.local, theta, strict=True):
        error = np.abs(local.astype(np.float32) - target)
        assert np.all(error <= 1.001 * 2.0**-8 * np.abs(target) + 1e-6), "one rounding to 8 bits, and nothing else"


@pytest.mark.parametrize("dtypes", [(F32,), (F64,), (BF16,), (F32, BF16, F32)], ids=str)
def test_what_was_trained_survives_an_adoption_and_is_handed_over_once(dtypes):
    """In bfloat16 progress is to the last bit what it was; else the reference, in float32, rounds by one unit."""
    random = np.random.default_rng(2)
    fragment = Fragment(arrays(random), *dtypes)
    fragment.train()
    trained = fragment.progress()
    fragment.adopt(arrays(random))
    for before, after, dtype in zip(trained, fragment.progress(), fragment.dtypes, strict=True):
        assert np.max(np.abs(before - after)) <= (0.0 if dtype == BF16 else 1e-6)
    delta = fragment.capture()
    for handed, progress in zip(delta, trained, strict=True):
        assert np.allclose(-handed.reshape(-1), progress, atol=1e-6)
    assert not any(np.any(np.abs(again) > 1e-6) for again in fragment.capture()), "nothing is handed over twice"


def drift(codec, captures):
    """Trains the same small step again and again, and returns what was handed over in all and what was trained."""
    random = np.random.default_rng(3)
    fragment = Fragment(arrays(random), F32)
    # One element in the middle of each block is large, the others lie below the resolution of int4.
    step = arrays(random, scale=1e-3)
    step[0].reshape(-1)[128::256] = 0.05
    total = [np.zeros(shape) for shape in SHAPES]
    for _ in range(captures):
        fragment.local = [x + s for x, s in zip(fragment.local, step, strict=True)]
        total = [t - d for t, d in zip(total, fragment.capture(codec), strict=True)]
    return total, [captures * each.astype(np.float64) for each in step], fragment


#: Of one step: half a unit of bf16's eighth bit; half a scale of a block whose largest value is 0.05, which int4 clips.
ONE_ROUNDING = {Codec.F32: 0, Codec.BF16: 0.05 * 2**-9, Codec.INT8: 0.05 / 127 / 2, Codec.INT4: 0.05 * 3 / 16}


@pytest.mark.parametrize("codec", list(Codec))
def test_what_the_codec_rounds_away_stays_in_the_progress_and_is_handed_over_later(codec):
    for captures in (1, 10, 100):
        total, trained, fragment = drift(codec, captures)
        for handed, each, left in zip(total, trained, fragment.progress(), strict=True):
            own = captures * 2**-21  # parameters and reference are float32, below 4, and move once a capture
            # The largest backlog is one rounding, of progress that is itself one step and one backlog.
            assert np.abs(handed - each).max() <= 1.5 * ONE_ROUNDING[codec] + own, "one rounding in all, not many"
            assert np.abs(handed.reshape(-1) + left - each.reshape(-1)).max() <= own, "nothing is lost on the way"


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_without_feedback_parameters_of_every_dtype_leave_no_progress(dtype):
    fragment = Fragment(arrays(np.random.default_rng(9)), dtype)
    fragment.train()
    fragment.capture(Codec.INT8, feedback=False)
    assert all(np.max(np.abs(progress)) < 1e-6 for progress in fragment.progress())


def test_training_that_goes_on_while_a_version_is_prepared_is_kept():
    random = np.random.default_rng(4)
    fragment = Fragment(arrays(random), F32)
    theta = arrays(random)
    fragment.adopt(theta, trained_meanwhile=1)
    for local, target in zip(fragment.local, theta, strict=True):
        assert np.allclose(local, target + 1, atol=1e-5)


@pytest.mark.parametrize(("keep", "left"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
def test_keep_is_the_share_of_the_progress_that_survives(keep, left):
    random = np.random.default_rng(5)
    fragment = Fragment(arrays(random), F32)
    fragment.local = [x + np.float32(1) for x in fragment.local]
    theta = arrays(random)
    fragment.adopt(theta, keep=keep)
    for local, target, progress in zip(fragment.local, theta, fragment.progress(), strict=True):
        assert np.allclose(local, target + left, atol=1e-5)
        assert np.allclose(progress, left, atol=1e-5)


def test_overwriting_heals_a_reference_that_is_not_finite():
    random = np.random.default_rng(6)
    fragment = Fragment(arrays(random), F32)
    fragment.local = [np.full_like(x, np.nan) for x in fragment.local]
    assert all(np.isnan(delta).all() for delta in fragment.capture(Codec.BF16)), "the aggregator will refuse it"
    fragment.adopt(arrays(random), keep=1.0)
    assert all(np.isnan(x).all() for x in fragment.local)
    theta = arrays(random)
    fragment.adopt(theta, keep=0.0)
    assert not any(np.any(delta) for delta in fragment.capture())
    assert all(np.array_equal(x, t) for x, t in zip(fragment.local, theta, strict=True))


def test_a_seed_is_a_copy_in_float32():
    leaves = [np.ones(shape, BF16) for shape in SHAPES]
    payload = encode_seed(TENSORS, leaves)
    leaves[0][:] = 7
    assert [e.codec for e in payload] == [Codec.F32] * 3
    assert [e.shape for e in payload] == list(SHAPES)
    assert np.all(decode_tensor(payload[0]) == 1)


def test_another_shape_is_named_with_the_cure():
    fragment = Fragment(arrays(np.random.default_rng(7)), F32)
    fragment.local[1] = np.zeros(3, np.float32)
    with pytest.raises(LocalProtocolError, match=r"t1 has the shape \(3,\), it joined with \(17,\): parameters keep"):
        fragment.capture()


def test_nothing_is_captured_before_the_first_version():
    with pytest.raises(LocalProtocolError, match="before its first version"):
        Reference(TENSORS).capture(arrays(np.random.default_rng(8)), Codec.F32)


def settle_alone(fragment, theta):
    """A version was prepared before the bit flipped."""
    before = fragment.local if any(map(is_narrow, fragment.dtypes)) else []
    shift = [np.zeros(shape, np.float32) for shape in SHAPES]
    fragment.reference.installed(shift, 1.0, fragment.dtypes, before)


USES = {
    "captured": lambda fragment, theta: fragment.capture(Codec.INT8),
    "prepared": lambda fragment, theta: fragment.reference.shift(version(theta), 1.0, fragment.dtypes),
    "settled": settle_alone,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_bit_that_flips_in_the_reference_is_found_whatever_it_was_written_by(use, change, dtype):
    """And until a version takes its place it is not forgotten: another change does not make it right."""
    random = np.random.default_rng(3)
    theta = arrays(random)
    fragment = Fragment(theta, dtype)
    fragment.train()
    CHANGES[change](fragment, theta)
    assert fragment.reference.flaw == ""
    values = fragment.reference.values[0]
    values.flags.writeable = True  # a version's own memory is read-only, and a bit flips there all the same
    values.view(np.uint32)[66_000] ^= 1
    USES[use](fragment, theta)
    assert fragment.reference.flaw == "the reference of t0 changed in memory, in elements 65536 to 69999"
    fragment.adopt([x + 1 for x in theta])
    assert fragment.capture() == []
    fragment.adopt([x + 2 for x in theta], keep=0.0)
    assert fragment.reference.flaw == ""
    assert len(fragment.capture()) == len(SHAPES)


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_an_element_that_is_not_adopted_as_it_came_is_named_with_both_values(dtype):
    theta = [np.zeros(shape, np.float32) for shape in SHAPES]
    theta[0][3, 4], theta[1][0] = np.nan, -0.0
    fragment = Fragment(theta, dtype)
    shift = fragment.reference.shift(version(theta), 0.0, fragment.dtypes)
    assert fragment.reference.compare(shift, fragment.dtypes, fragment.local) == "", "what is not finite is equal, too"
    fragment.local[1][5] = 0.5
    flaw = fragment.reference.compare(shift, fragment.dtypes, fragment.local)
    assert flaw == "t1 was not adopted as it came: element 5 is 0.5, where the version has " + str(dtype.type(0))
    assert fragment.capture() == [], "nothing is handed over from it"
