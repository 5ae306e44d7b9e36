"""The parameters of a training loop: what is adopted stays in them, and what is not finite is replaced."""

import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from broker.base.errors import ConfigError
from tests.hub import WAIT_S, Hub
from tests.training_loops import TOKENS, join, newest, params_of, stored, train

pytestmark = pytest.mark.usefixtures("seats_of_its_own")


RATE = 0.02


@jax.jit
def descended(masters, batch):
    """One step of linear regression in mixed precision: float32 masters, seen in bfloat16."""

    def loss(masters):
        seen = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), masters)
        return jnp.mean((batch[0] @ seen["w"] + seen["b"] - batch[1]) ** 2)

    return jax.tree.map(lambda w, slope: w - RATE * slope, masters, jax.grad(loss)(masters))


def batches_of(seed):
    """Endless noisy batches of one truth."""
    rng = np.random.default_rng(seed)
    truth = np.random.default_rng(0).normal(size=(20, 10))
    while True:
        x = rng.normal(size=(8, 20)).astype(np.float32)
        yield x, (x @ truth + rng.normal(size=(8, 10))).astype(np.float32)


def masters_of(seed=0):
    return {"w": jax.random.normal(jax.random.key(seed), (20, 10)), "b": jnp.zeros(10)}


def short(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def train_from_own_masters(island, data):
    """Hands over bfloat16 parameters that each step casts anew from masters, which never hear of a version."""
    masters = masters_of()
    params, _ = island.restore(short(masters))
    while not island.done:
        masters = descended(masters, next(data))
        params = island.step(short(masters), tokens=TOKENS, state=(masters, None))
        time.sleep(0.001)
    return island.close(params)


def train_handing_over_masters(island, data):
    masters, _ = island.restore(masters_of())
    while not island.done:
        masters = island.step(descended(masters, next(data)), tokens=TOKENS)
        time.sleep(0.001)
    return island.close(masters)


def run_two(store, loop, params, **settings):
    """Trains two islands, until the first error; returns what each ended with: its parameters, or an error.

    By itself an island has nothing to adopt that it has not made, so the other one may never be told.
    """
    ends, failed = {}, threading.Event()

    def batches(seed):
        for batch in batches_of(seed):
            if failed.is_set():
                return
            yield batch

    def main(name, seed):
        try:
            with join(hub, params, island_id=name) as island:
                ends[name] = loop(island, batches(seed))
        except Exception as err:  # noqa: BLE001 (returned)
            ends[name] = err
            failed.set()

    with Hub(store, islands=2, sync_interval=24, **settings) as hub:
        threads = [threading.Thread(target=main, args=each) for each in (("a", 1), ("b", 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    return ends


def test_bfloat16_parameters_cast_from_masters_that_are_not_handed_over_end_training_with_the_cure(tmp_path):
    ends = run_two(tmp_path / "store", train_from_own_masters, short(masters_of()), keep=0.0)
    (told, *_) = [str(end) for end in ends.values() if isinstance(end, ConfigError)]
    # What restore returned, where the other island had made a version before this one came.
    assert re.search("what (was adopted|restore returned) is not in the next ones", told)
    assert "hand over the tree that the optimizer steps from: float32 masters" in told


def test_the_same_loop_that_hands_over_its_masters_trains_to_the_end(tmp_path):
    settings = {"keep": 0.0, "total_tokens": 12_000}
    ends = run_two(tmp_path / "store", train_handing_over_masters, masters_of(), **settings)
    final = stored(tmp_path / "store")
    for end in ends.values():
        assert {name: np.asarray(x).tolist() for name, x in end.items()} == {n: x.tolist() for n, x in final.items()}


def test_a_frozen_leaf_that_is_trained_ends_training_with_the_cure(hub):
    with join(hub, params_of(), kinds={"^b$": "frozen"}) as island:
        params, _ = island.restore(params_of())
        with pytest.raises(ConfigError, match=r"params b = .*the run calls it frozen.*kinds="):
            train(island, params)


@pytest.mark.parametrize("loads", [True, False])
def test_a_checkpoint_that_is_loaded_over_the_run_s_values_is_told_by_name_with_the_cure(hub, caplog, loads):
    begun = params_of()
    with join(hub, begun) as island:
        params, _ = island.restore(begun)
        params = {"w": params["w"] + loads, "b": params["b"]}  # after the join, and so too late
        train(island, params, until=lambda: min(newest(hub)) > 1)
    told = [record.getMessage() for record in caplog.records if "written_over" in record.getMessage()]
    assert len(told) == loads
    assert all("tensor=w" in each and "Load it before the join" in each for each in told)


# --- what is not finite is replaced -------------------------------------------------------------------------------


def test_parameters_that_are_not_finite_are_replaced_all_at_once_and_the_optimizer_is_reset(hub):
    with join(hub, params_of()) as island:
        params, _ = island.restore(params_of())
        params = train(island, params, until=lambda: min(newest(hub)) > 1)
        params = {name: np.full_like(x, np.nan) for name, x in params.items()}
        params = train(island, params, until=lambda: island.reset_optimizer)
        assert all(np.isfinite(x).all() for x in params.values())
        healthy = newest(hub)
        params = train(island, params, until=lambda: min(a - b for a, b in zip(newest(hub), healthy, strict=True)) > 1)
        assert not island.reset_optimizer
        assert all(np.isfinite(x).all() for x in params.values())


def test_spoilt_parameters_that_nobody_else_has_are_set_back_with_the_others(hub):
    """Batch statistics that are not finite would make each step after the recovery not finite again."""

    def step(params):
        mean, little = params["batch_stats"]["mean"], np.float32(1e-6)  # each feeds the other: nothing may overflow
        moved = mean + little * params["w"].mean()
        return {"w": params["w"] + little * mean[0], "b": params["b"], "batch_stats": {"mean": moved}}

    def begin():
        return {**params_of(), "batch_stats": {"mean": np.full(4, 0.01, np.float32)}}

    with join(hub, begin()) as island:
        params, _ = island.restore(begin())
        params["w"] = params["w"] * np.float32(np.nan)
        params = train(island, params, step, until=lambda: island.reset_optimizer)
        assert all(np.isfinite(x).all() for x in (params["w"], params["batch_stats"]["mean"]))
        healthy = newest(hub)
        params = train(
            island, params, step, until=lambda: min(a - b for a, b in zip(newest(hub), healthy, strict=True)) > 1
        )
        assert np.isfinite(params["w"]).all()
