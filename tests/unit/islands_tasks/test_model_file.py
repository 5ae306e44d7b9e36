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
        (lambda like: (like.pop("embed"), like.pop("head")), "model", "has the unknown ['embed']"),
        (lambda like: like.update(more=np.zeros(3, np.float32)), "model", "lacks ['more']"),
        (lambda like: like.update(layers=(np.zeros(5, np.float32), None)), "model layers/0", "the shape (5,)"),
    ],
)
def test_a_tree_that_is_not_that_of_the_file_is_refused_by_name(file, change, field, said):
    like = tree()
    change(like)
    with pytest.raises(ConfigError) as refused:
        islands.load(file, like=like)
    assert refused.value.field == field
    assert said in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused_with_the_cure(tmp_path):
    (tmp_path / "x").write_text("no model")
    for path in (tmp_path / "x", tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"cannot be read as safetensors.*: name a run's model.safetensors"):
            islands.load(path, like=tree())
