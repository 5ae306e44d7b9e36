"""What was one array when the island joined, and whether it is one parameter."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from broker.base.errors import ConfigError
from islands.arrays.parameters import MOST_LOOKS, Ties
from islands.arrays.tree import TreeNames


def tree_of(bias, **more):
    return {"a": {"bias": bias}, "b": {"bias": bias}, "w": np.ones(3, np.float32), **more}


def ties_of(params):
    ties = Ties(TreeNames(params).tied)
    ties.begin(params)
    return ties


@pytest.mark.parametrize("zeros", [np.zeros(4, np.float32), np.zeros((2, 2), ml_dtypes.bfloat16), jnp.zeros(4)])
def test_one_array_of_zeros_for_two_biases_becomes_two_parameters_with_the_first_step_that_moves_them(zeros):
    params = tree_of(zeros)
    ties = ties_of(params)
    still = jax.tree.map(lambda x: x + 0, params)  # a learning rate that begins at zero
    assert still["a"]["bias"] is not still["b"]["bias"]
    ties.look(still)
    moved = {**still, "b": {"bias": still["b"]["bias"] + 1}}
    with pytest.raises(ConfigError, match="params = 'a/bias and b/bias'"):
        ties.look(moved)


def test_what_a_loop_writes_to_in_place_stays_one():
    ties = ties_of(params := tree_of(np.zeros(4, np.float32)))
    params["a"]["bias"] += 1
    ties.look(params)
    assert ties.looks == 0


def test_what_never_moves_is_left_alone_in_the_end():
    ties = ties_of(params := tree_of(np.zeros(4, np.float32)))
    for _ in range(MOST_LOOKS):
        assert ties.looks
        ties.look(params)
    assert ties.looks == 0
