"""The compiled kernels: the same bytes whatever the threads and the addresses, and what plain libraries compute."""

import errno
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numba
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba.core import caching

from aggregator.interface.events import Merge
from aggregator.merge import compiled, lengths, versions
from aggregator.merge.fragment_state import FragmentState
from aggregator.merge.kernels import STRIP, merge_and_step, merge_fragment
from aggregator.merge.outer_step import make_outer_step
from aggregator.merge.passes import PIECE
from aggregator.merge.resources import Resources
from aggregator.merge.versions import round_step
from broker.chunks.memory import ReusedMemory
from broker.wire.fragments import Kind
from broker.wire.messages import Codec
from broker.wire.tensors import added, decode_tensor, difference
from tests.profiles import examples
from tests.unit.aggregator_merge.test_merge import part, random, spec

pytestmark = pytest.mark.timeout(300)  # kernels are compiled where nothing is cached
RULE = 0.7, 0.3
STEP = make_outer_step(*RULE)


def outcome(merged):
    return merged.delta.tobytes(), merged.norm, merged.mean_norm, merged.norms, merged.cosines, merged.momentum_cosine


#: Kinds and shapes that are cut in every way: long rows, several strips of rows, many short rows, one element.
FRAGMENT = (
    spec((2 * PIECE + 33,), Kind.MEAN, name="a"),
    spec((3, PIECE + 5), unit_axes=1, name="b"),
    spec((STRIP // 500 + 7, 500), unit_axes=1, name="c"),
    spec((7, 11), Kind.FROZEN, name="d"),
    spec((), name="e"),
)


@pytest.fixture(scope="module")
def before():
    size = sum(tensor.size for tensor in FRAGMENT)
    return FragmentState(params=random(size, 1), momentum=random(size, 2), version=3)


@pytest.fixture(scope="module")
def parts():
    codecs = [Codec.F32, Codec.BF16, Codec.INT8, Codec.INT4, Codec.F32, Codec.BF16]
    return [
        part(*(random(s.shape, 10 * i + j) for j, s in enumerate(FRAGMENT)), w=i + 1.0, lam=1 / (i + 1), codec=codec)
        for i, codec in enumerate(codecs)
    ]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_the_bytes_do_not_depend_on_the_number_of_threads(parts, before, threads):
    action = Merge(
        round_id=1,
        fragment_id=0,
        fragment_version=4,
        parts=tuple(parts),
        outer_rule=RULE,
        version_codec=Codec.INT8,
    )
    expected, merged = versions.merge(FRAGMENT, action, before)
    with ThreadPoolExecutor(threads) as pool:
        resources = Resources(lambda call, count: pool.map(call, range(count)), ReusedMemory(3).floats)
        for _ in range(2):  # the second time in memory that has been used
            made, found = versions.merge(FRAGMENT, action, before, resources=resources)
            assert outcome(found) == outcome(merged)
            assert made.digest == expected.digest
            assert made.state.momentum.tobytes() == expected.state.momentum.tobytes()
            assert made.state.residual.tobytes() == expected.state.residual.tobytes()
            assert [e.checksum for e in made.difference] == [e.checksum for e in expected.difference]


def test_a_step_on_the_way_of_the_merge_is_the_step_by_its_result_in_whichever_order_of_the_pieces(parts, before):
    before = before._replace(residual=random(before.params.size, 3, 1e-3))
    merged = merge_fragment(FRAGMENT, parts)
    backwards = Resources(lambda call, count: [call(i) for i in reversed(range(count))])
    assert outcome(merge_fragment(FRAGMENT, parts, resources=backwards)) == outcome(merged)
    apart = STEP(before, merged.delta)
    for kept in (True, False):
        after, found, finite = merge_and_step(FRAGMENT, parts, before, STEP, kept=kept)
        assert finite
        assert found.delta.tobytes() == (merged.delta.tobytes() if kept else b"")
        assert found.momentum_cosine == pytest.approx(_cosine_of_what_moves(merged.delta, before.momentum), abs=1e-6)
        assert outcome(replace(found, delta=merged.delta, momentum_cosine=None)) == outcome(merged)
        assert (after.params.tobytes(), after.momentum.tobytes()) == (apart.params.tobytes(), apart.momentum.tobytes())


def _cosine_of_what_moves(delta, momentum):
    """Returns the cosine of two vectors of the fragment, without its frozen tensors."""
    moves = np.concatenate([np.full(s.size, s.kind is not Kind.FROZEN) for s in FRAGMENT])
    a, b = delta[moves].astype(np.float64), momentum[moves].astype(np.float64)
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_received_bytes_may_lie_at_any_address_and_are_left_as_they_are(codec, shift):
    aligned = [part(random((3, 1001), seed), codec=codec) for seed in (1, 2)]
    moved = []
    for each in aligned:
        (encoded,) = each.payload
        data = bytes(shift) + bytes(encoded.data)
        moved.append(replace(each, payload=(replace(encoded, data=memoryview(data)[shift:]),)))
    tensors = [spec((3, 1001), unit_axes=1)]
    assert outcome(merge_fragment(tensors, moved)) == outcome(merge_fragment(tensors, aligned))
    assert [bytes(p.payload[0].data) for p in moved] == [bytes(p.payload[0].data) for p in aligned]


@examples(60)
@given(
    exact=hnp.arrays(np.float32, 1301, elements=st.floats(-(2.0**99), 2.0**99, width=32)),
    base=hnp.arrays(np.float32, 1301, elements=st.sampled_from([0.0, -0.0, 1.0, -3.5, 1e-40, 7e5, -2e30])),
    codec=st.sampled_from([Codec.BF16, Codec.INT8, Codec.INT4]),
)
@example(random(2 * PIECE + 301, 1), random(2 * PIECE + 301, 2), Codec.BF16)  # over many pieces
@example(random(2 * PIECE + 301, 1), random(2 * PIECE + 301, 2), Codec.INT8)
@example(random(2 * PIECE + 301, 1), random(2 * PIECE + 301, 2), Codec.INT4)
def test_a_rounded_step_is_byte_for_byte_what_islands_add(exact, base, codec):
    tensors = (spec((exact.size - 601,)), spec((40, 15)), spec(()))
    payload = difference(exact, base, [tensor.shape for tensor in tensors], codec)
    version = added(base, payload)
    found = round_step(tensors, exact.copy(), base, codec, Resources())
    assert [bytes(e.data) for e in found.difference] == [bytes(e.data) for e in payload]
    assert [(e.checksum, e.shape) for e in found.difference] == [(e.checksum, e.shape) for e in payload]
    assert found.params.tobytes() == version.tobytes()
    assert found.residual.tobytes() == (exact - version).tobytes()
    assert found.finite


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize(("shape", "unit_axes"), [((1001, 7), 1), ((3, PIECE + 5), 1), ((2 * PIECE + 1,), 0)])
def test_lengths_kept_from_inspection_change_no_byte_of_the_merge(codec, shape, unit_axes):
    tensor = spec(shape, unit_axes=unit_axes)
    parts = [part(random(shape, seed), w=seed, codec=codec) for seed in (1, 2, 3)]
    unknown = outcome(merge_fragment([tensor], parts))
    for number, each in enumerate(parts):  # one is known, then two, then all
        found = lengths.measure(tensor, each.payload[0])
        exact = np.square(decode_tensor(each.payload[0]).astype(np.float64)).reshape(lengths.units_of(tensor), -1)
        np.testing.assert_allclose(found, exact.sum(axis=1), rtol=1e-5)
        assert outcome(merge_fragment([tensor], parts)) == unknown, number


def test_a_contribution_that_is_dropped_leaves_no_trace():
    """Refused, or merged: its lengths go with its bytes, and another merge does not know that it was there."""
    tensor = spec((5, 100), unit_axes=1)
    kept = [part(random((5, 100), seed)) for seed in (1, 2)]
    alone = outcome(merge_fragment([tensor], kept))
    known = len(lengths._known)
    refused = part(random((5, 100), 3, 1e6))
    lengths.measure(tensor, refused.payload[0])
    lengths.measure(tensor, refused.payload[0])
    assert len(lengths._known) == known + 1
    del refused
    assert len(lengths._known) == known
    assert outcome(merge_fragment([tensor], kept)) == alone


def test_memory_is_used_again_when_nobody_refers_to_it_and_not_before():
    memory = ReusedMemory(most=1)
    vector = memory.floats(1000)
    address = vector.__array_interface__["data"][0]
    view, sending = vector[10:20], memoryview(vector[500:])
    vector[:] = 7
    del vector
    other = memory.floats(1000)
    assert other.__array_interface__["data"][0] != address
    del view
    other[:] = 0
    assert set(np.frombuffer(sending, np.float32)) == {7.0}
    del sending
    again = memory.floats(900)
    assert again.__array_interface__["data"][0] == address
    assert memory.floats(2000).size == 2000  # what is too small is not taken


def test_no_more_memory_is_kept_than_is_said():
    memory = ReusedMemory(most=10, most_bytes=3000)
    held = [memory.take(1000) for _ in range(5)]
    places = [each.__array_interface__["data"][0] for each in held]
    for _ in range(5):
        del held[0]
    again = [memory.take(1000) for _ in range(3)]
    assert {each.__array_interface__["data"][0] for each in again} == set(places[2:])


def no_space(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("trouble", ["nowhere", "no space", "cut short"])
def test_a_machine_on_which_nothing_can_be_cached_computes_all_the_same(monkeypatch, tmp_path, trouble):
    def doubled(number):
        return 2 * number

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    if trouble == "nowhere":
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    elif trouble == "no space":
        monkeypatch.setattr(caching.IndexDataCacheFile, "save", no_space)
    else:
        compiled.compile_kernel(doubled, "int64(int64)")
        (index,) = tmp_path.rglob("*.nbi")
        index.write_bytes(index.read_bytes()[:-20])
    assert compiled.compile_kernel(doubled, "int64(int64)")(21) == 42
