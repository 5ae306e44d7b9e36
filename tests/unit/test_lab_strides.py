"""Steps in a row as one computation: the same bits or not at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from islands.tasks.task import Schedule, Task
from ops.lab import strides
from ops.lab.strides import Strides


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(strides, "ALONE", 2)
    monkeypatch.setattr(strides, "COMPARED", 4)


def begun():
    """Returns parameters and optimizer state."""
    return {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)}, {"m": jnp.zeros((3, 4)), "steps": jnp.int32(0)}


def step(params, state, batch, schedule):
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(params["w"])
    m = 0.9 * state["m"] + gradient
    rate = 0.1 * (1 - schedule.step / schedule.total_steps)
    return {"w": params["w"] - rate * m}, {"m": m, "steps": state["steps"] + 1}, jnp.mean(gradient)


def task_of(train, pure=True):
    return Task(
        init=lambda seed: begun(),
        train=train,
        data=lambda share: iter(()),
        evaluate=lambda params: 0.0,
        tokens_per_step=1,
        fresh_optimizer=lambda params: {},
        pure=pure,
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


def test_agreement_takes_more_than_a_stride_that_agrees_by_chance(monkeypatch):
    monkeypatch.setattr(strides, "COMPARED", 9)
    jitted = jax.jit(step)

    def train(params, state, batch, schedule):  # the last steps differ where it is traced: counts are no Python ints
        late = isinstance(schedule.step, jax.core.Tracer) * jnp.float32(schedule.step > 8)
        return jitted(params, state, batch + late, schedule)

    result, runner = in_strides(task_of(train), batches(16), (2, 2, 2, 8, 2))
    assert runner.agrees is False
    assert_same(result, one_by_one(jitted, batches(16)))


def test_only_a_step_that_says_it_is_pure_or_that_is_jitted_is_ever_traced():
    jitted, key, seen = jax.jit(step), [jax.random.key(0)], []

    def train(params, state, batch, schedule):  # what it keeps from step to step a trace would spoil
        key[0], drawn = jax.random.split(key[0])
        params, state, loss = jitted(params, state, batch + jax.random.normal(drawn, batch.shape), schedule)
        seen.append(loss)
        return params, state, loss

    _, runner = in_strides(task_of(train, pure=False), batches(24), (8, 8, 8))
    assert runner.agrees is False
    assert len(seen) == 24
    assert np.isfinite(np.mean(seen))
    assert not runner.may_wait(batches(1)), "nothing is gained by waiting"

    _, runner = in_strides(task_of(jitted, pure=False), batches(24), (8, 8, 8))
    assert runner.agrees


def changing(params, state, batch, schedule):
    """A step whose state starts in one type and goes on in another."""
    return step(params, state | {"m": state["m"].astype(jnp.float32)}, batch, schedule)


def test_what_begins_with_other_types_than_those_compared_takes_its_first_steps_alone():
    jitted = jax.jit(changing, donate_argnums=(0, 1))
    runner, steps = Strides(task_of(jitted)), batches(24)
    params, state = begun()
    for start in range(0, 24, 8):
        params, state = runner.run(params, state, steps[start : start + 8])
    assert runner.agrees

    def restarted():
        params, state = begun()
        return params, state | {"m": state["m"].astype(jnp.bfloat16)}

    params, state = restarted()
    for start in (0, 8):
        params, state = runner.run(params, state, steps[start : start + 8])
    expected = restarted()
    for batch, schedule in steps[:16]:
        *expected, _ = jitted(*expected, batch, schedule)
    assert_same((params, state), tuple(expected))


def test_a_state_whose_arrays_are_one_and_the_same_or_the_tasks_own_stays_valid():
    own = jnp.zeros((3, 4))

    @jax.jit
    def train(params, state, batch, schedule):
        params, moved, loss = step(params, {"m": state["m"], "steps": state["steps"]}, batch, schedule)
        return params, {**moved, "v": moved["m"]}, loss

    runner, steps = Strides(task_of(train)), batches(24)
    params, state = begun()[0], {"m": own, "v": own, "steps": jnp.int32(0)}
    for start in range(0, 24, 8):
        params, state = runner.run(params, state, steps[start : start + 8])
    assert runner.agrees
    runner.run(begun()[0], {"m": own, "v": own, "steps": jnp.int32(0)}, steps[:8])
    assert not own.is_deleted()


def test_a_step_that_is_put_off_has_a_batch_of_its_own():
    filled = {"x": np.ones(3), "y": None}
    batch, _ = strides.put_off(filled, Schedule(0, 1))
    filled["x"][:] = 2
    assert batch["x"].tolist() == [1, 1, 1]
    strange = {"x": np.ones(3), 0: 1}  # no order of keys, so no tree for JAX
    assert strides.put_off(strange, Schedule(0, 1))[0] is strange


class Sparse:
    """An array of a kind that JAX does not know."""

    dtype, shape = np.dtype(np.float32), (5, 3)

    def __init__(self, dense):
        self.dense = dense


def test_batches_that_jax_does_not_know_go_one_by_one():
    inner = jax.jit(step)

    def train(params, state, batch, schedule):
        return inner(params, state, batch.dense if isinstance(batch, Sparse) else batch["x"], schedule)

    for wrapped in (Sparse, lambda x: {"x": x, 0: x}):
        steps = [(wrapped(x), schedule) for x, schedule in batches(16)]
        result, runner = in_strides(task_of(train), steps, (8, 8))
        assert runner.agrees is None
        assert not runner.may_wait(steps[:1])
        assert_same(result, one_by_one(inner, batches(16)))


def test_a_step_that_cannot_be_traced_goes_on_by_itself():
    jitted = jax.jit(step)

    def train(params, state, batch, schedule):
        params, state, loss = jitted(params, state, batch, schedule)
        return params, state, float(loss)

    result, runner = in_strides(task_of(train), batches(24), (8, 8, 8))
    assert runner.agrees is False
    assert_same(result, one_by_one(train, batches(24)))


def test_steps_on_numpy_arrays_go_by_themselves():
    def train(params, state, batch, schedule):
        return {"w": params["w"] + np.float32(1)}, state, 0.0

    runner, params, state = Strides(task_of(train)), {"w": np.zeros(2, np.float32)}, {}
    for _ in range(3):
        params, state = runner.run(params, state, batches(8))
    assert params["w"].tolist() == [24, 24]
    assert not runner.agrees


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


def test_large_batches_go_one_by_one(monkeypatch):
    monkeypatch.setattr(strides, "MOST_BATCH_BYTES", 10)
    jitted = jax.jit(step)
    result, runner = in_strides(task_of(jitted), batches(16), (8, 8))
    assert runner.agrees is None
    assert not runner.may_wait(batches(1)), "eight of them would only take memory"
    assert_same(result, one_by_one(jitted, batches(16)))
