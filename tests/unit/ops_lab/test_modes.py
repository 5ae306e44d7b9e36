"""The laboratory against plain loops: what a mode computes when nothing is unequal, late or lost."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from broker.base.errors import ConfigError
from islands.tasks.inner_optimizer import jax_task, warm_up_cosine
from islands.tasks.task import DataShare, Schedule
from ops.lab import decoupled, lockstep
from ops.plans.cell import cell_settings

pytestmark = pytest.mark.full("each test trains for a minute of virtual time or more")

WIDTH, BATCH = 40, 8  # 40 x 40 elements: enough for a matrix to be merged by direction


def numbered(share):
    """Yields inputs of a fixed linear map with their number, of which they are a function."""
    while True:
        index, count, k, seed = share.take()
        number = k * count + index
        yield number, np.random.default_rng([seed, number]).standard_normal((BATCH, WIDTH), np.float32)


def batches(share):
    return (batch for _, batch in numbered(share))


def truth():
    return np.random.default_rng(99).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 6


def loss(params, batch):
    return jnp.mean((batch @ params["matrix"] + params["bias"] - batch @ truth()) ** 2)


HELD_OUT = np.random.default_rng(7).standard_normal((64, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def task():
    return jax_task(
        init=lambda key: {"matrix": 0.1 * jax.random.normal(key, (WIDTH, WIDTH)), "bias": jnp.zeros((WIDTH,))},
        loss=loss,
        data=batches,
        evaluate=lambda params: float(loss(params, HELD_OUT)),
        tokens_per_step=BATCH,
        learning_rate=warm_up_cosine(0.01, warm_up_steps=5),
    )


def cell(**values):
    defaults = {"steps": 60, "fragments": 2, "sync_interval": 6, "evaluations": 2, "mix": 1.0}
    return cell_settings(defaults | {"task": "tests:none"} | values)


def plain(task, steps, sources=1, total=None):
    """The textbook loop: one optimizer, the batches of all sources joined."""
    params, state = task.init(0)
    streams = [task.data(DataShare(index=i, count=sources, seed=0)) for i in range(sources)]
    for t in range(steps):
        batch = np.concatenate([next(stream) for stream in streams])
        params, state, _ = task.train(params, state, batch, Schedule(t, total or steps))
    return params


def as_vector(params):
    return np.concatenate([np.asarray(params[name]).reshape(-1) for name in sorted(params)])


def run(task, settings):
    mode = decoupled if settings.mode == "decoupled" else lockstep
    return mode.run(task, settings, 0, task.evaluate)


@pytest.mark.parametrize("islands", [1, 3])
def test_data_parallel_is_a_plain_loop_over_all_batches(task, islands):
    found = run(task, cell(mode="data-parallel", islands=islands))
    np.testing.assert_array_equal(as_vector(found.params), as_vector(plain(task, 60, islands)))
    assert found.tokens == 60 * islands * BATCH


@pytest.mark.parametrize("mode", ["diloco", "streaming", "decoupled"])
def test_one_island_that_keeps_all_and_steps_fully_is_a_plain_loop(task, mode):
    # With rate 1 and no momentum what was handed over comes back as it was: merging changes nothing but roundings.
    one = {"outer_learning_rate": 1.0, "outer_momentum": 0.0, "keep": 1.0, "staleness_exponent": 0.0}
    found = run(task, cell(mode=mode, islands=1, **one))
    if mode == "decoupled":
        assert found.tokens <= 60 * BATCH  # it ends when a heartbeat says so, at most a step early
    expected = as_vector(plain(task, found.tokens // BATCH, total=60))
    np.testing.assert_allclose(as_vector(found.params), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("islands", "overlap", "mix", "due_at"),
    [
        (3, None, 0.0, {"bias": 0, "matrix": 0}),
        (2, 2, 0.0, {"bias": 3, "matrix": 0}),
        (2, 2, 0.5, {"bias": 3, "matrix": 0}),
    ],
    ids=["synchronous", "streaming that overwrites", "streaming that mixes"],
)
def test_diloco_is_the_textbook_loop(task, islands, overlap, mix, due_at):
    """All at once every six steps; or two fragments of one tensor each, three steps apart, adopted two steps later."""
    rule = {"merge": "mean", "outer_learning_rate": 0.7, "outer_momentum": 0.9}
    mode = {"mode": "diloco"} if overlap is None else {"mode": "streaming", "overlap": overlap, "mix": mix}
    found = run(task, cell(islands=islands, **mode, **rule))

    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    theta = {name: np.asarray(value) for name, value in task.init(0)[0].items()}
    states = {name: outer.init(theta[name]) for name in theta}
    locals_ = [task.init(0) for _ in range(islands)]
    streams = [task.data(DataShare(index=i, count=islands, seed=0)) for i in range(islands)]
    arrives = {}
    for t in range(1, 61):
        locals_ = [
            task.train(params, state, next(stream), Schedule(t - 1, 60))[:2]
            for (params, state), stream in zip(locals_, streams, strict=True)
        ]
        due = [name for name, at in due_at.items() if t == 60 or t % 6 == at]
        for name in due:
            delta = np.mean([theta[name] - np.asarray(params[name]) for params, _ in locals_], axis=0)
            update, states[name] = outer.update(delta, states[name], theta[name])
            theta[name] = np.asarray(optax.apply_updates(theta[name], update))
        arrives[t + (overlap or 0)] = due
        for name in arrives.pop(t, ()):
            for params, _ in locals_:
                params[name] = jnp.asarray(mix * np.asarray(params[name]) + (1 - mix) * theta[name])
    np.testing.assert_allclose(as_vector(found.params), as_vector(theta), rtol=1e-4, atol=1e-5)


def test_a_fleet_that_cannot_get_there_is_told_where_to_look(task):
    with pytest.raises(ConfigError, match="look at joins, outages"):
        run(task, cell(islands=2, megabytes_per_s=1e-6))


def test_decoupled_islands_of_one_speed_that_overwrite_learn_as_in_streaming_diloco(task):
    # On a fast link a version is adopted one step after its capture, and what was trained in that step is overwritten.
    same = {"islands": 4, "overlap": 1, "keep": 0.0, "mix": 0.0}
    ours, theirs = (run(task, cell(mode=mode, **same)) for mode in ("decoupled", "streaming"))
    assert abs(ours.rounds - theirs.rounds) <= 1  # the last one may find that its only step has been overwritten
    learned = task.evaluate(task.init(0)[0]) - task.evaluate(theirs.params)
    # Rounds that begin a step later move it by 0.7 %.
    assert abs(task.evaluate(ours.params) - task.evaluate(theirs.params)) < 0.01 * learned


def test_every_token_is_accounted_for_whatever_befalls_the_fleet(task):
    unequal = {"step_times_s": (1.0, 1.0, 1.0, 0.5), "jitter": 0.1}
    found = run(task, cell(islands=4, steps=80, joins=[[3, 10, 50]], outages=[[1, 20, 25]], **unequal))
    assert found.tokens == found.merged_tokens + sum(found.wasted.values())
    assert np.isfinite(task.evaluate(found.params))


def test_long_journeys_take_as_many_steps_as_they_say_and_the_run_makes_its_interval_longer(task):
    far = {"mode": "decoupled", "islands": 2, "steps": 240, "delays_s": (3.0,)}
    follows, stays = (run(task, cell(**far, **more)) for more in ({}, {"intervals": ((0.0, 6.0),)}))
    # A journey of 6 steps and one or two to answer: 18 to 24 and not 6, at 2 fragments.
    assert 240 * 2 / 24 <= follows.rounds <= 240 * 2 / 16
    assert stays.rounds > 1.5 * follows.rounds
    assert follows.virtual_s == pytest.approx(240, rel=0.6), "in the cell's own seconds, with the time to join"


def test_an_interval_that_is_set_changes_rounds_and_with_them_the_outer_step(task):
    near = {"mode": "decoupled", "islands": 2, "steps": 240, "outer_learning_rate": 0.7, "outer_momentum": 0.5}
    begun = cell(**near, intervals=((0.0, 6.0),))
    changed = cell(**near, intervals=((0.0, 6.0), (120.0, 24.0)))
    usual, longer = run(task, begun), run(task, changed)
    assert longer.rounds == pytest.approx(usual.rounds * (1 / 2 + 1 / 8), rel=0.15)
    kept = run(task, replace(changed, outer_follows=False))
    assert kept.rounds == longer.rounds
    assert not np.array_equal(as_vector(kept.params), as_vector(longer.params))


def test_chip_failures_pause_islands_and_cost_time_but_no_tokens(task):
    # One virtual second per step: pauses of some 25 s, every 26 s for each island of 1.2 M chips.
    calm, troubled = (run(task, cell(islands=4, chips=chips)) for chips in (0, 4_800_000))
    assert troubled.virtual_s > 1.3 * calm.virtual_s
    assert troubled.merged_tokens == troubled.tokens
    assert troubled.participation < calm.participation


def test_an_exchange_costs_what_its_mode_cannot_hide(task):
    def took_s(mode, delay_s=0.002):
        return run(task, cell(mode=mode, islands=2, overlap=2, delays_s=(delay_s,))).virtual_s

    # A fragment of some 3 kB; H = 6 and P = 2: one is sent every three steps, and needed two steps later.
    assert took_s("streaming") == pytest.approx(60.0, abs=0.1)
    assert took_s("streaming", 0.4) == pytest.approx(60.8, abs=0.1)  # hidden, but for the last exchange
    assert took_s("streaming", 2.0) > 90.0
    assert took_s("diloco", 1.0) == pytest.approx(60 + 10 * 2.0, abs=0.1)
    assert took_s("data-parallel", 1.0) == pytest.approx(60 + 60 * 2.0, abs=0.1)


def test_an_island_that_turns_to_nan_recovers_with_a_fresh_optimizer(task):
    poisoned = []

    def data(share):
        for number, batch in numbered(share):
            if number == 60 and not poisoned:
                poisoned.append(number)
                batch = np.full_like(batch, np.nan)
            yield batch

    found = run(replace(task, data=data), cell(islands=3, steps=120))
    assert poisoned == [60]
    assert np.isfinite(task.evaluate(found.params))
    # What was trained between the NaN and the global parameters is lost, and no more.
    assert 0 < found.wasted["not_finite"] + found.wasted.get("overwritten", 0) < 0.12 * found.tokens
    assert found.tokens == found.merged_tokens + sum(found.wasted.values())
