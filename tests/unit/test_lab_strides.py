"""Steps in a row as one computation: the same bits or not at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from islands.task import Schedule, Task
from ops.lab import strides
from ops.lab.strides import Strides


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(strides, "ALONE", 2)


def begun():
    """Returns parameters and optimizer state."""
    return {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)}, {"m": jnp.zeros((3, 4)), "steps": jnp.int32(0)}


def step(params, state, batch, schedule):
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(params["w"])
    m = 0.9 * state["m"] + gradient
    rate = 0.1 * (1 - schedule.step / schedule.total_steps)
    return {"w": params["w"] - rate * m}, {"m": m, "steps": state["steps"] + 1}, jnp.mean(gradient)


def task_of(train):
    return Task(
        init=lambda seed: begun(),
        train=train,
        data=lambda share: iter(()),
        evaluate=lambda params: 0.0,
        tokens_per_step=1,
        fresh_optimizer=lambda params: {},
    )


def batches(count, rows=5):
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((rows, 3)).astype(np.float32), Schedule(step=t, total_steps=count)) for t in range(count)
    ]


def one_by_one(train, steps):
    params, state = begun()
    for batch, schedule in steps:
        params, state, _ = train(params, state, batch, schedule)
    return params, state


def in_strides(task, steps, lengths):
    """Returns what comes out, and the strides that it came from."""
    runner, (params, state), start = Strides(task), begun(), 0
    for length in lengths:
        params, state = runner.run(params, state, steps[start : start + length])
        start += length
    assert start == len(steps)
    return (params, state), runner


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("lengths", [(1, 2, 3, 8, 5, 1), (20,), (1,) * 20])
def test_strides_of_any_length_give_the_bits_of_a_plain_loop(lengths):
    jitted = jax.jit(step, donate_argnums=(0, 1))
    result, runner = in_strides(task_of(jitted), batches(20), lengths)
    assert_same(result, one_by_one(jitted, batches(20)))
    assert runner.agrees is (None if set(lengths) == {1} else True)
    assert runner.train_s > 0


def test_once_they_agree_no_step_is_called_by_itself():
    jitted, calls = jax.jit(step), []

    def train(*args):
        calls.append(isinstance(args[0]["w"], jax.core.Tracer))
        return jitted(*args)

    result, runner = in_strides(task_of(train), batches(40), (2, 4, 8, 8, 1, 8, 1, 8))
    assert runner.agrees
    assert calls.count(False) == 6, "two alone, four to find out"
    assert_same(result, one_by_one(jitted, batches(40)))


def test_a_step_that_cannot_be_traced_goes_on_by_itself():
    jitted = jax.jit(step)

    def train(params, state, batch, schedule):
        params, state, loss = jitted(params, state, batch, schedule)
        return params, state, float(loss)

    result, runner = in_strides(task_of(train), batches(24), (8, 8, 8))
    assert runner.agrees is False
    assert_same(result, one_by_one(train, batches(24)))


def test_a_step_that_does_something_else_when_it_is_traced_goes_on_by_itself():
    def noisy():
        rng, jitted = np.random.default_rng(1), jax.jit(step)

        def train(params, state, batch, schedule):  # noise from outside: frozen where it is traced
            return jitted(params, state, batch + rng.standard_normal((1, 3)).astype(np.float32), schedule)

        return train

    _, runner = in_strides(task_of(noisy()), batches(24), (8, 8, 8))
    assert runner.agrees is False


def test_steps_on_numpy_arrays_go_by_themselves():
    def train(params, state, batch, schedule):
        return {"w": params["w"] + np.float32(1)}, state, 0.0

    runner, params, state = Strides(task_of(train)), {"w": np.zeros(2, np.float32)}, {}
    for _ in range(3):
        params, state = runner.run(params, state, batches(8))
    assert params["w"].tolist() == [24, 24]
    assert runner.agrees is False


def test_batches_of_unlike_shapes_go_one_by_one_and_leave_what_went_in_as_it_was():
    jitted = jax.jit(step, donate_argnums=(0, 1))
    runner, (params, state) = Strides(task_of(jitted)), begun()
    steps = [*batches(24)[:16], batches(24, rows=5)[16], *batches(24, rows=4)[17:]]
    for start in (0, 8):
        params, state = runner.run(params, state, steps[start : start + 8])
    assert runner.agrees
    before, kept = np.array(params["w"]), params["w"]
    after = runner.run(params, state, steps[16:])
    assert np.array_equal(kept, before), "donated though somebody may keep it instead of a copy"
    assert_same(after, one_by_one(jitted, steps))


def test_batches_with_random_keys_or_of_unlike_structure_go_one_by_one():
    inner = jax.jit(step)

    def train(params, state, batch, schedule):
        return inner(params, state, batch["x"], schedule)

    keyed = [({"x": x, "key": jax.random.key(t)}, schedule) for t, (x, schedule) in enumerate(batches(16))]
    mixed = [({"x": x} | ({"more": x} if t % 2 else {}), schedule) for t, (x, schedule) in enumerate(batches(16))]
    for steps in (keyed, mixed):
        result, runner = in_strides(task_of(train), steps, (8, 8))
        assert runner.agrees is None
        assert_same(result, one_by_one(inner, batches(16)))


def test_large_batches_go_one_by_one(monkeypatch):
    monkeypatch.setattr(strides, "MOST_BATCH_BYTES", 10)
    jitted = jax.jit(step)
    result, runner = in_strides(task_of(jitted), batches(16), (8, 8))
    assert runner.agrees is None
    assert_same(result, one_by_one(jitted, batches(16)))
