"""An exported model loads back into the tree that it was trained in, by one call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import islands
from broker.base.errors import ConfigError


def tree():
    shared = jnp.zeros((3, 2), jnp.bfloat16)
    return {
        "embed": shared,
        "head": shared,
        "layers": (np.zeros(4, np.float32), None),
        "norm": {"running_mean": jnp.ones(2)},
        "rng": jax.random.key(1),
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    values = {"embed": np.arange(6, dtype=np.float32).reshape(3, 2), "layers/0": np.arange(4, dtype=np.float32)}
    save_file(values, path)
    return path


def test_structure_dtypes_ties_and_what_is_local_stay(file):
    like = tree()
    loaded = islands.load(file, like=like)
    assert jax.tree_util.tree_structure(loaded) == jax.tree_util.tree_structure(like)
    assert loaded["embed"] is loaded["head"]
    assert loaded["embed"].dtype == jnp.bfloat16
    assert isinstance(loaded["layers"][0], np.ndarray)
    np.testing.assert_array_equal(np.asarray(loaded["embed"], np.float32), np.arange(6).reshape(3, 2))
    np.testing.assert_array_equal(loaded["layers"][0], np.arange(4))
    assert loaded["norm"]["running_mean"] is like["norm"]["running_mean"]
    assert loaded["rng"] is like["rng"]


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        (lambda like: (like.pop("embed"), like.pop("head")), "model", "1 unexpected (embed)"),
        (lambda like: like.update(more=np.zeros(3, np.float32)), "model", "1 missing (more)"),
        (lambda like: like.update(layers=(np.zeros(5, np.float32), None)), "model", "layers/0 (5,), in the file (4,)"),
    ],
)
def test_a_tree_that_is_not_that_of_the_file_is_refused_by_name(file, change, field, said):
    like = tree()
    change(like)
    with pytest.raises(ConfigError) as refused:
        islands.load(file, like=like)
    assert refused.value.field == field
    assert said in str(refused.value)


def test_what_fits_of_a_file_is_taken_where_that_is_asked_for(file, caplog):
    like = tree() | {"layers": (np.zeros(5, np.float32), None), "more": np.ones(1, np.float32)}
    loaded = islands.load(file, like=like, partial=True)
    np.testing.assert_array_equal(np.asarray(loaded["embed"], np.float32), np.arange(6).reshape(3, 2))
    assert loaded["layers"][0] is like["layers"][0]
    assert loaded["more"] is like["more"]
    assert "1 missing (more); 1 of another shape (layers/0 (5,), in the file (4,))" in caplog.text


def test_names_in_the_file_are_those_that_a_function_says(tmp_path):
    save_file({"model.0.w": np.arange(4, dtype=np.float16)}, tmp_path / "x.safetensors")
    like = {"layers": [{"w": jnp.zeros(4)}]}
    loaded = islands.load(tmp_path, like=like, names=lambda name: name.replace("layers", "model").replace("/", "."))
    np.testing.assert_array_equal(loaded["layers"][0]["w"], np.arange(4))
