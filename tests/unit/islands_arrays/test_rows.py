"""Leaves that the run has cut: their sections are read, copied, installed and put back, to the last bit."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import ConfigError
from broker.wire.fragments import Kind, cut, partition, tensor_of
from broker.wire.messages import Codec
from broker.wire.tensors import decode_tensor
from islands.arrays.parameters import Parameters
from islands.arrays.partition import tensor_specs
from islands.arrays.placement import Placement, is_on_device
from islands.arrays.reference import Reference, encode_seed
from tests.profiles import examples

pytestmark = pytest.mark.timeout(600)  # it compiles: the limit is for a hang, not for a busy machine

ROOT = Path(__file__).parents[3]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.dtype(">f4")]


def cut_parameters(tree, most, fragments=3):
    specs = tuple(s for s in tensor_specs(tree) if s.kind is not Kind.LOCAL)
    manifest = partition(cut(specs, most), fragments, most)
    found = Parameters(tree)
    found.assign(manifest)
    return found, manifest


def bits(leaf):
    return np.ascontiguousarray(np.asarray(leaf)).tobytes()


def values(shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@examples(60)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    st.integers(1, 80),
    st.integers(1, 5),
)
def test_what_is_read_of_all_fragments_and_put_back_is_the_tree_in_numpy(shape, dtype, most, fragments):
    tree = {"w": values(shape, dtype), "b": values((3,), np.float32), "n": np.arange(100)}
    parameters, manifest = cut_parameters(tree, most, fragments)
    assert parameters.local == ("n",), "it is never cut"
    other = {"w": values(shape, dtype, 1), "b": values((3,), np.float32, 1), "n": np.arange(100) + 1}
    read = {p: parameters.of_fragment(other, p) for p in range(len(manifest))}
    for p, leaves in read.items():
        assert [leaf.shape for leaf in leaves] == [spec.shape for spec in manifest.fragments[p]]
        named = zip(leaves, manifest.fragments[p], strict=True)
        assert all(np.shares_memory(leaf, other[tensor_of(spec.name)]) for leaf, spec in named), "views, and no copies"
    before = bits(tree["w"])
    back = parameters.replace(tree, read)
    assert (bits(back["w"]), back["w"].dtype) == (bits(other["w"]), other["w"].dtype)
    assert bits(back["b"]) == bits(other["b"])
    assert back["n"] is tree["n"]
    assert bits(tree["w"]) == before, "what is replaced is still read elsewhere"


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_one_fragment_changes_its_own_rows_alone_and_a_leaf_is_numpy_or_jax_as_it_was(make):
    kept = {"w": make(values((7, 4), np.float32))}
    parameters, manifest = cut_parameters(kept, 9, 4)
    assert len(manifest.sections) == 4
    for p, fragment in enumerate(manifest.fragments):
        sections = parameters.of_fragment(kept, p)
        assert all(is_on_device(each) == is_on_device(kept["w"]) for each in sections)
        new = parameters.replace(kept, {p: [each + 1 for each in sections]})
        changed = np.zeros((7, 4), bool)
        for spec in fragment:
            changed[manifest.sections[spec.name].start : manifest.sections[spec.name].stop] = True
        assert np.array_equal(np.asarray(new["w"]) != np.asarray(kept["w"]), changed)
        assert type(new["w"]) is type(kept["w"])


@pytest.mark.parametrize(("dtype", "committed"), [(jnp.float32, False), (jnp.bfloat16, True)])
def test_sections_under_jax_keep_dtype_place_and_weakness_and_no_step_is_traced_again(dtype, committed):
    tree = {"w": jnp.ones((10, 3), dtype), "weak": jnp.full((8, 2), 1.0)}
    if committed:
        tree = jax.device_put(tree, jax.devices()[0])
    parameters, manifest = cut_parameters(tree, 7, 4)
    assert {s.tensor for s in manifest.sections.values()} == {"w", "weak"}
    step = jax.jit(lambda given: {name: 2 * x for name, x in given.items()}, donate_argnums=0)
    for p in range(len(manifest)):
        parameters.warm_up(tree, p, parameters.of_fragment(tree, p))
    params = step(tree)
    for p in range(len(manifest)):
        leaves = parameters.of_fragment(params, p)
        placement = Placement(leaves)
        shifts = [np.full(leaf.shape, 0.5, np.float32) for leaf in leaves]
        new = parameters.replace(params, {p: placement.install(leaves, placement.place(shifts, 1.0), 1.0)})
        for name in params:
            assert new[name].dtype == params[name].dtype
            assert new[name].weak_type == params[name].weak_type
            assert (new[name].committed, new[name].sharding) == (params[name].committed, params[name].sharding)
        params = step(new)
    assert step._cache_size() == 1


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_capture_and_adoption_of_sections_are_those_of_the_whole_tensor_to_the_last_bit(make, dtype):
    """Elementwise: what a section sends and adopts is what its rows of the whole tensor would."""
    start, trained = values((9, 5), dtype, 1), values((9, 5), dtype, 2)
    target = values((9, 5), np.float32, 3)
    results = []
    for most in (1000, 12):
        tree = {"w": make(start)}
        parameters, manifest = cut_parameters(tree, most, 4)
        sent, params = np.empty((9, 5), np.float32), {"w": make(trained)}
        for p, tensors in enumerate(manifest.fragments):
            reference = Reference(tensors)
            initial = encode_seed(tensors, [np.asarray(x) for x in parameters.of_fragment(tree, p)])
            dtypes = [np.dtype(dtype)] * len(tensors)
            reference.installed(reference.shift(initial, 0.0, dtypes), 0.0, dtypes, ())
            local = [np.asarray(x) for x in parameters.of_fragment(params, p)]
            captured = reference.capture(local, Codec.BF16)
            places = [manifest.sections.get(t.name) for t in tensors]
            here = [slice(None) if place is None else slice(place.start, place.stop) for place in places]
            for rows, each in zip(here, captured, strict=True):
                sent[rows] = decode_tensor(each)
            version = encode_seed(tensors, [target[rows] for rows in here])
            shift = reference.shift(version, 1.0, dtypes)
            leaves = parameters.of_fragment(params, p)
            placement = Placement(leaves)
            params = parameters.replace(params, {p: placement.install(leaves, placement.place(shift, 1.0), 1.0)})
        results.append((bits(sent), bits(params["w"])))
    assert results[0] == results[1]


def test_tied_leaves_get_the_same_new_array_with_the_sections_in_it():
    table = values((8, 2), np.float32)
    tree = {"embed": table, "head": table}
    parameters, manifest = cut_parameters(tree, 6)
    assert {s.tensor for s in manifest.sections.values()} == {"embed"}
    new = parameters.replace(tree, {0: [leaf + 1 for leaf in parameters.of_fragment(tree, 0)]})
    assert new["embed"] is new["head"]
    assert not np.array_equal(new["embed"], table)


def test_errors_name_the_tensor_and_no_section_of_it():
    spoilt = values((9, 5), np.float32)
    spoilt[8, 1] = np.inf
    parameters, manifest = cut_parameters({"w": spoilt}, 12, 2)
    (last,) = (p for p, tensors in enumerate(manifest.fragments) if f"w#{len(manifest.sections) - 1}of" in str(tensors))
    with pytest.raises(ConfigError, match=r"^params = 'w': 1 of its"):
        encode_seed(manifest.fragments[last], parameters.of_fragment({"w": spoilt}, last))
    with pytest.raises(ConfigError, match=r"^params w = 'float32\[8, 5\]': it joined as float32\[9, 5\]"):
        parameters.check({"w": spoilt[:8]})


def test_a_parameter_that_is_named_like_a_section_is_refused_when_joining():
    with pytest.raises(ConfigError, match=r"params = 'w#0of2': is named like a section"):
        tensor_specs({"w#0of2": np.zeros(3, np.float32)})


SHARDED = """
import itertools, jax, ml_dtypes, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from broker.wire.fragments import cut, partition
from islands.arrays.partition import tensor_specs
from islands.arrays.parameters import Parameters
from islands.arrays.placement import Placement, to_host
from islands.arrays.reference import adopted

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
rng = np.random.default_rng(0)
layouts = (P(), P("data"), P("data", "model"), P(None, "model"), P(("data", "model")))
for layout, dtype in zip(layouts, itertools.cycle((np.float32, ml_dtypes.bfloat16))):
    value = rng.normal(size=(12, 8)).astype(dtype)
    tree = {"w": jax.device_put(value, NamedSharding(mesh, layout))}
    manifest = partition(cut(tensor_specs(tree), 40), 3)
    assert len(manifest.sections) == 3
    parameters = Parameters(tree)
    parameters.assign(manifest)
    step = jax.jit(lambda given: {"w": 2 * given["w"]}, donate_argnums=0, out_shardings={"w": tree["w"].sharding})
    params, expected = step(tree), 2 * value
    for p, (spec,) in enumerate(manifest.fragments):
        here = manifest.sections[spec.name]
        leaves = parameters.of_fragment(params, p)
        rows = slice(here.start, here.stop)
        placement = Placement(leaves)
        copy = placement.copy(leaves)[0]
        assert np.array_equal(np.asarray(copy), expected[rows])
        shift = rng.normal(size=leaves[0].shape).astype(np.float32)
        for keep in (1.0, 0.0):
            placed = placement.place([shift], keep)
            new = parameters.replace(params, {p: placement.install(leaves, placed, keep)})
            assert new["w"].sharding == params["w"].sharding and new["w"].dtype == params["w"].dtype
            target = expected.copy()
            target[rows] = adopted(expected[rows], shift, 1.0) if keep else shift.astype(dtype)
            assert np.array_equal(np.asarray(new["w"]), target), (layout, dtype, keep)
            assert np.array_equal(to_host(new["w"]), target)
        params, expected = step(new), 2 * target
    assert step._cache_size() == 1
print("ok")
"""


def test_sections_of_sharded_leaves_go_back_into_their_place_in_every_layout():
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    said = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, timeout=300)
    assert said.stdout == "ok\n", said.stderr[-2000:]
