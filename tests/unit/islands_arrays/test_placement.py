"""What the training thread does at a boundary: copies and installations under JAX, in numpy, and in mixed trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from broker.base.errors import ConfigError
from broker.wire.fragments import FragmentManifest
from islands.arrays import jax_placement, placement
from islands.arrays.parameters import Parameters
from islands.arrays.partition import tensor_specs
from islands.arrays.placement import Placement
from islands.arrays.reference import adopted, wide_dtype

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine


def parameters(tree):
    """A tree with a fragment for each tensor."""
    found = Parameters(tree)
    found.assign(FragmentManifest(tuple((spec,) for spec in tensor_specs(tree))))
    return found


def shifts(leaves, value=0.5):
    return [np.full(x.shape, value, wide_dtype(np.dtype(x.dtype))) for x in leaves]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_copy_outlives_the_donation_of_its_original(dtype):
    leaves = [jnp.arange(1000, dtype=dtype), jnp.ones((3, 4), dtype)]
    copies = Placement(leaves).copy(leaves)
    train = jax.jit(lambda xs: [x * 0 for x in xs], donate_argnums=0)
    train(leaves)
    assert all(x.is_deleted() for x in leaves)
    assert np.array_equal(copies[0], np.arange(1000).astype(dtype))
    assert [c.dtype for c in copies] == [dtype] * 2


def test_a_copy_outlives_writing_to_a_numpy_original():
    leaf = np.zeros(5, np.float32)
    (copied,) = Placement([leaf]).copy([leaf])
    leaf += 1
    assert np.array_equal(copied, np.zeros(5))


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize(("keep", "dtype"), [(0.0, jnp.bfloat16), (0.5, jnp.float32), (1.0, jnp.bfloat16)])
def test_a_jitted_donating_step_is_not_traced_again_after_an_installation(committed, keep, dtype):
    train = jax.jit(lambda params: jax.tree.map(lambda x: x * 2, params), donate_argnums=0)
    params = {"w": jnp.ones((8, 4), dtype), "b": jnp.zeros(4, dtype)}
    if committed:
        params = jax.device_put(params, SingleDeviceSharding(jax.devices()[0]))
    found = parameters(params)
    params = train(params)
    for p in (0, 1):
        leaves = found.of_fragment(params, p)
        here = Placement(leaves)
        placed = here.place(shifts(leaves), keep)
        params = found.replace(params, {p: here.install(leaves, placed, keep)})
    params = train(params)
    assert train._cache_size() == 1
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    expected = {0.0: 0.5, 0.5: 1.5, 1.0: 2.5}[keep] * 2  # w was 2 after the first step
    assert np.all(np.asarray(params["w"], np.float32) == expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_host_computes_an_installation_to_the_same_bits_as_the_device(dtype):
    random = np.random.default_rng(0)
    local = random.standard_normal(100_000).astype(dtype)
    shift = (1e-2 * random.standard_normal(100_000)).astype(np.float32)
    leaves = [jnp.asarray(local)]
    here = Placement(leaves)
    (installed,) = here.install(leaves, here.place([shift], 1.0), 1.0)
    assert np.array_equal(np.asarray(installed), adopted(local, shift, 1.0))


def test_a_tree_of_numpy_and_jax_leaves_is_copied_and_installed_leaf_by_leaf():
    there = jax.device_put(np.ones(2, np.float32), jax.devices()[0])
    leaves = [np.ones(3, np.float32), jnp.ones(3, jnp.bfloat16), there]
    here = Placement(leaves)
    assert [type(x) is np.ndarray for x in here.copy(leaves)] == [True, False, False]
    installed = here.install(leaves, here.place(shifts(leaves), 1.0), 1.0)
    assert [x.dtype for x in installed] == [x.dtype for x in leaves]
    assert [getattr(x, "committed", None) for x in installed] == [None, False, True]
    assert all(np.all(np.asarray(x, np.float32) == 1.5) for x in installed)


def test_a_donated_array_is_told_instead_of_read_or_sampled():
    leaf = jnp.zeros(5)
    leaf.delete()
    with pytest.raises(ConfigError, match=r"donated after island\.step"):
        placement.to_host(leaf)
    with pytest.raises(ConfigError, match="continue with the result of step"):
        placement.sample([leaf], [np.zeros((1, 2), np.int32)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_])
def test_what_goes_to_the_host_through_pinned_memory_is_the_same(monkeypatch, dtype):
    """As from a GPU: a CPU has pinned memory, too, in JAX."""
    monkeypatch.setattr(jax_placement, "PINNED_ON", "cpu")
    moved = []
    monkeypatch.setattr(jax, "device_put", lambda x, to, put=jax.device_put: moved.append(to.memory_kind) or put(x, to))
    large, small = jnp.arange(1 << 20).reshape(1024, 1024).astype(dtype), jnp.arange(8).astype(dtype)
    for leaf in (large, small):
        found = placement.to_host(leaf)
        assert found.dtype == dtype
        assert np.array_equal(found, np.asarray(leaf))
    assert moved == ["pinned_host"], "the large one alone"


def test_sampling_is_compiled_with_the_rest_before_the_first_step():
    random = np.random.default_rng(0)
    movements = [random.normal(size=shape).astype(np.float32) for shape in ((33, 31), (7,), (2, 3, 5), (11,), (13,))]
    leaves = list(map(jnp.asarray, movements))
    here = Placement(leaves)
    here.warm_up(leaves, 1.0)
    compiled = jax_placement._sample._cache_size()
    places = here.places(movements)
    placement.sample([leaves[i] for i in places], list(places.values()))
    assert jax_placement._sample._cache_size() == compiled
