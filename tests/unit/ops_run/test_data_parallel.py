"""The worker of data-parallel runs, alone in its mesh: the steps are those of a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from broker.base.errors import ConfigError
from examples import numpy_task
from islands.tasks.inner_optimizer import jax_task
from ops.data_parallel.worker import train

RATE, STEPS, TOKENS = 0.1, 12, 8


def batches(share):
    while True:
        index, count, cursor, seed = share.take()
        yield np.random.default_rng([seed, cursor * count + index]).normal(size=(TOKENS, 3)).astype(np.float32)


def loss(params, batch):
    return jnp.mean((batch @ params["w"] - batch.sum(1, keepdims=True)) ** 2)


def task():
    return jax_task(
        init=lambda key: {"w": jax.random.normal(key, (3, 1))},
        loss=loss,
        data=batches,
        evaluate=lambda params: 0.0,
        tokens_per_step=TOKENS,
        optimizer=optax.sgd(RATE),
    )


@pytest.mark.parametrize("parts", [1, 3], ids=["one batch a step", "the batches of several islands"])
def test_alone_it_takes_the_steps_of_a_plain_loop_and_leaves_both_models(tmp_path, parts):
    tokens = STEPS * parts * TOKENS
    counted = train(task(), rank=0, count=1, parts=parts, seed=3, tokens=tokens, pace_s=0.0, out=tmp_path)
    assert (counted["inner_steps"], counted["tokens"], counted["bytes_up"]) == (STEPS, tokens, 0)
    params, gradient = task().init(3)[0], jax.jit(jax.grad(loss))
    assert np.array_equal(load_file(tmp_path / "seed.safetensors")["w"], params["w"])
    for k in range(STEPS):
        each = [np.random.default_rng([3, k * parts + i]).normal(size=(TOKENS, 3)) for i in range(parts)]
        batch = np.concatenate(each).astype(np.float32)
        params = jax.tree.map(lambda w, g: w - RATE * g, params, gradient(params, batch))
    np.testing.assert_allclose(load_file(tmp_path / "model.safetensors")["w"], params["w"], rtol=1e-5)


def test_a_task_without_jax_is_refused_with_the_cure(tmp_path):
    with pytest.raises(ConfigError, match="must be one of jax_task"):
        train(numpy_task.task(), rank=0, count=1, seed=0, tokens=100, pace_s=0.0, out=tmp_path)
