"""The learning rate that a task reports is the one that its next step multiplies its updates by."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from islands.tasks.inner_optimizer import jax_task
from islands.tasks.task import Schedule


def test_the_rate_is_that_of_the_next_step():
    task = jax_task(
        init=lambda key: {"w": jnp.zeros(3)},
        loss=lambda params, batch: (params["w"] * batch).sum(),
        data=lambda share: iter([np.ones(3, np.float32)] * 3),
        evaluate=lambda params: 0.0,
        tokens_per_step=1,
        optimizer=optax.identity(),
        learning_rate=lambda schedule, count: 0.1 * (schedule.step + 1) / (count + 1),
    )
    params, state = task.init(0)
    for step in (0, 5, 7):
        schedule = Schedule(step=step, total_steps=10)
        rate = float(task.learning_rate(state, schedule))
        before = np.asarray(params["w"])
        params, state, _ = task.train(params, state, np.ones(3, np.float32), schedule)
        assert np.asarray(params["w"]) == pytest.approx(before - rate)  # the gradient is 1


def test_a_task_without_a_rate_of_its_own_reports_none():
    task = jax_task(
        init=lambda key: {"w": jnp.zeros(3)},
        loss=lambda params, batch: params["w"].sum(),
        data=lambda share: iter([0]),
        evaluate=lambda params: 0.0,
        tokens_per_step=1,
        optimizer=optax.sgd(0.1),
    )
    assert task.learning_rate is None
