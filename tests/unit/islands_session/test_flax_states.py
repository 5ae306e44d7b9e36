"""Flax NNX as the example splits it: parameters are merged; statistics and random keys are the state of an island."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from broker.wire.fragments import Kind
from islands.arrays.partition import tensor_specs
from islands.session import checkpoint, state_parts
from islands.session.training_state import Position, Snapshot

pytestmark = pytest.mark.timeout(300)  # it compiles


class Network(nnx.Module):
    """BatchNorm under a name that says nothing of statistics, and Dropout."""

    def __init__(self, *, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(self.first(x))))


def both_of(seed):
    model = Network(rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def stepped(both, batch):
    model, optimizer = both
    loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
    optimizer.update(model, gradients)
    return float(loss)


def batch_of(seed):
    return np.random.default_rng(seed).normal(2.0, 1.0, (8, 3)).astype(np.float32)


@pytest.mark.full("compiles for seconds")
def test_parameters_are_merged_and_a_checkpoint_brings_back_statistics_moments_and_the_next_masks_of_dropout(tmp_path):
    both = both_of(0)
    for seed in range(3):
        stepped(both, batch_of(seed))
    params, rest = nnx.state(both, nnx.Param, ...)
    # Two kernels, two biases, scale and bias of the norm: all of them too small for a direction.
    assert [spec.kind for spec in tensor_specs(params)] == [Kind.MEAN] * 6
    held = {name for name, _ in checkpoint.leaves_of(rest)}
    statistics = {"norm/mean/value", "norm/var/value", "dropout/rngs/key/value", "dropout/rngs/count/value"}
    assert {f"0/{name}" for name in statistics} <= held
    snapshot = Snapshot(state=checkpoint.copied(rest), cursor=None, local=())
    checkpoint.save(tmp_path / "c", snapshot, (), Position(3, 24), 1, checkpoint.Newest())

    again = both_of(1)
    _, fresh = nnx.state(again, nnx.Param, ...)
    saved = checkpoint.load(tmp_path / "c")
    assert state_parts.unfit(saved, state_parts.Needed(state=checkpoint.leaves_of(fresh), local=())) == ""
    nnx.update(again, params, checkpoint.restored(fresh, saved.state))
    assert np.array_equal(again[0].norm.mean[...], both[0].norm.mean[...])
    expected = [stepped(both, batch_of(seed)) for seed in range(3, 6)]
    assert [stepped(again, batch_of(seed)) for seed in range(3, 6)] == expected
    other = both_of(1)
    nnx.update(other, params)  # the parameters alone do not give that
    assert [stepped(other, batch_of(seed)) for seed in range(3, 6)] != expected
