"""Names, kinds and units of a parameter tree, and trees taken apart and put together."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from broker.base.errors import ConfigError
from broker.wire.fragments import partition
from islands.arrays.partition import describe_kinds, tensor_specs
from islands.arrays.tree import TreeNames, _plain_leaves, _plain_map, flatten, unflatten


class Pair(NamedTuple):
    left: object
    right: object


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def kinds_of(tree, **options):
    return {spec.name: str(spec.kind) for spec in tensor_specs(tree, **options)}


def test_names_and_trees_are_the_same_with_and_without_jax():
    """Of every container that is walked without JAX, keys out of order, and an empty one."""
    tree = {
        "z": [zeros(1), (zeros(2), zeros(3))],
        "a": Pair(zeros(4), {"y": zeros(5), "x": zeros(6)}),
        "m": OrderedDict(second=zeros(7), first=zeros(8)),
        "none": None,
    }
    plain = dict(_plain_leaves(tree, ()))
    assert list(plain) == list(flatten(tree))
    assert list(plain) == ["a/left", "a/right/x", "a/right/y", "m/second", "m/first", "z/0", "z/1/0", "z/1/1"]
    assert all(plain[name] is leaf for name, leaf in flatten(tree).items())
    ours = _plain_map(lambda leaf: leaf + 1, tree)
    theirs = jax.tree.map(lambda leaf: leaf + 1, tree)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
    assert list(ours["m"]) == ["second", "first"]


def test_flatten_and_unflatten_are_inverse_for_numpy_jax_and_bfloat16():
    tree = {"w": jnp.ones((2, 3), jnp.bfloat16), "b": [np.arange(3.0), np.ones(2, ml_dtypes.bfloat16)]}
    again = unflatten(tree, flatten(tree))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True))
    assert [spec.dtype for spec in tensor_specs(tree)] == ["float64", "bfloat16", "bfloat16"]


def test_replacing_some_leaves_keeps_the_others():
    tree = {"a": zeros(2), "b": zeros(3)}
    replaced = TreeNames(tree).replace(tree, {"b": np.ones(3)})
    assert replaced["a"] is tree["a"]
    assert replaced["b"].sum() == 3
    with pytest.raises(KeyError, match="no parameter is named c"):
        TreeNames(tree).replace(tree, {"c": zeros(1)})
    with pytest.raises(KeyError, match="no value is given for b"):
        unflatten(tree, {"a": zeros(2)})


def test_a_tied_array_has_one_name_and_is_put_back_in_both_places():
    shared = zeros(64, 64)
    tree = {"embed": shared, "output": shared, "bias": zeros(3)}
    names = TreeNames(tree)
    assert names.names == ("bias", "embed")
    assert [spec.name for spec in tensor_specs(tree)] == ["bias", "embed"]
    new = np.ones((64, 64))
    rebuilt = names.replace(tree, {"embed": new})
    assert rebuilt["embed"] is new
    assert rebuilt["output"] is new
    # Once trained the two are different objects; the names were settled at the start.
    assert list(names.leaves({"embed": zeros(1), "output": zeros(1), "bias": zeros(1)})) == ["bias", "embed"]


def test_kinds_by_default():
    expected = {
        "batch_stats/mean": (zeros(64), "local"),
        "embed": (zeros(256, 64), "mean"),
        "empty": (zeros(0, 64), "local"),
        "layers/0/attention/norm": (zeros(64), "mean"),
        "layers/0/attention/query": (zeros(64, 64), "rda"),
        "layers/0/heads": (zeros(64, 64), "rda"),
        "layers/0/mlp/gate": (zeros(64, 64), "rda"),
        "layers/0/mlp/least": (zeros(32, 32), "rda"),
        "layers/0/mlp/router": (zeros(64, 64), "mean"),
        "layers/0/mlp/tiny": (zeros(31, 33), "mean"),
        "lm_head/kernel": (zeros(64, 256), "mean"),
        "mask": (zeros(64, 64, dtype="bool"), "local"),
        "norm/running_var": (zeros(64, 64), "local"),
        "of int4": (zeros(64, 64, dtype=ml_dtypes.int4), "local"),
        "of int8": (zeros(64, 64, dtype="int8"), "local"),
        "of uint64": (zeros(64, 64, dtype="uint64"), "local"),
        "scale": (zeros(), "mean"),
        "step": (zeros(dtype="int32"), "local"),
        "token_embedding/weight": (zeros(256, 64), "mean"),
    }
    assert kinds_of({name: leaf for name, (leaf, _) in expected.items()}) == {n: k for n, (_, k) in expected.items()}


def test_statistics_of_normalisation_are_told_by_their_names_from_what_only_sounds_like_them():
    statistics = ["bn/mean/value", "layers/0/batch_norm/var/value", "bn1.running_mean"]
    trained = ["bn/scale/value", "norm/scale", "bn1/scale", "mean", "latent/mean", "layer_norm/mean", "bnet/w", "ema"]
    found = {name: kinds_of({name: zeros(64, 64)})[name] for name in (*statistics, *trained)}
    assert found == dict.fromkeys(statistics, "local") | dict.fromkeys(trained, "rda")


class Foreign:
    """An array of another library: its dtype is none that numpy knows."""

    def __init__(self, dtype):
        self.shape, self.dtype = (64, 64), dtype


@pytest.mark.parametrize(
    "leaf",
    [
        Foreign("torch.float32"),
        Foreign(object()),
        zeros(64, 64, dtype="complex64"),
        zeros(64, 64, dtype="U3"),
        zeros(64, 64, dtype="S3"),
        zeros(64, 64, dtype="datetime64[s]"),
        zeros(64, 64, dtype=object),
        zeros(64, 64, dtype="V4"),
        zeros(64, 64, dtype=[("a", "f4")]),
        zeros(0, dtype=object),
    ],
    ids=lambda leaf: str(leaf.dtype).partition(" at ")[0],
)
def test_what_is_no_array_of_real_numbers_is_refused_by_path_and_never_local_in_silence(leaf):
    with pytest.raises(ConfigError, match=r"^params layers/0/t = .*: no such values are merged: .* leave it out"):
        tensor_specs({"layers": [{"t": leaf, "w": zeros(64, 64)}]})


def test_what_numpy_holds_may_be_local_by_name_and_nothing_else_may():
    kinds = {"t": "local"}
    assert kinds_of({"t": zeros(3, dtype="complex64"), "w": zeros(64, 64)}, kinds=kinds)["t"] == "local"
    for leaf in (Foreign("torch.float32"), zeros(3, dtype=object)):
        with pytest.raises(ConfigError, match="no such values are merged"):
            tensor_specs({"t": leaf, "w": zeros(64, 64)}, kinds)
    with pytest.raises(ConfigError, match="only numbers can be frozen"):
        tensor_specs({"t": jax.random.key(0), "w": zeros(64, 64)}, {"t": "frozen"})


def test_patterns_override_kinds_and_the_first_wins():
    tree = {"backbone": {"w": zeros(64, 64), "head": zeros(64, 64)}, "top": zeros(64, 64)}
    kinds = {"^backbone/head": "rda", "^backbone": "frozen", "top": "mean"}
    assert kinds_of(tree, kinds=kinds) == {"backbone/head": "rda", "backbone/w": "frozen", "top": "mean"}


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"w": "average"}, "must be one of rda, mean, frozen, local"),
        ({"(": "mean"}, "is no regular expression"),
        ({"embedd": "mean"}, "is found in no parameter name; there are: count, w"),
        ({"count": "mean"}, "only floating-point arrays"),
    ],
)
def test_kinds_that_cannot_work_are_refused_with_the_cure(kinds, message):
    with pytest.raises(ConfigError, match=message):
        tensor_specs({"w": zeros(64, 64), "count": zeros(3, dtype="int32")}, kinds)


def test_stacked_layers_and_experts_count_as_units():
    experts = {"up": zeros(4, 8, 64, 32), "down": zeros(4, 8, 32, 64)}
    stacked = {
        "layers": {"query": zeros(4, 64, 64), "norm": zeros(4, 64), "experts": experts},
        "plain": {"experts": {"up": zeros(8, 64, 32), "down": zeros(8, 32, 64)}},
    }
    assert {s.name: (s.unit_axes, str(s.kind)) for s in tensor_specs(stacked)} == {
        "layers/experts/down": (2, "rda"),
        "layers/experts/up": (2, "rda"),
        "layers/norm": (1, "mean"),  # one unit has one dimension
        "layers/query": (1, "rda"),
        "plain/experts/down": (1, "rda"),
        "plain/experts/up": (1, "rda"),
    }


def test_a_list_of_layers_and_a_lone_matrix_are_not_stacked():
    tree = {"layers": [{"w": zeros(64, 64)}, {"w": zeros(64, 64)}], "net": {"layers": {"w": zeros(64, 32)}}}
    assert {s.unit_axes for s in tensor_specs(tree)} == {0}
    unequal = {"layers": {"weight": zeros(64, 32), "bias": zeros(32)}}
    assert {s.unit_axes for s in tensor_specs(unequal)} == {0}


def test_kinds_are_described_and_the_specs_make_a_manifest():
    specs = tensor_specs({"embed": zeros(256, 64), "w": zeros(64, 64), "steps": zeros(1, dtype="int32")})
    assert describe_kinds(specs).splitlines() == [
        "rda: 1 tensors, 4,096 elements: w",
        "mean: 1 tensors, 16,384 elements: embed",
        "local: 1 tensors, 1 elements: steps",
    ]
    assert set(partition(specs, 2).tensors()) == {"embed", "w"}
