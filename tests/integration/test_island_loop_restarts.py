"""Training loops that leave, are killed or are cut off, what they find when they come back, and who gets their data."""

import json
import subprocess
import sys
import threading
from itertools import pairwise

import jax
import numpy as np
import pytest

from broker.wire.messages import OWN_PASS
from islands.session import checkpoint
from tests.hub import WAIT_S, Hub
from tests.local_run import wait_for
from tests.training_loops import join, newest, params_of, train, training

pytestmark = pytest.mark.usefixtures("seats_of_its_own")


def test_an_exception_in_the_loop_leaves_the_run_in_order(hub):
    island = join(hub, params_of())

    def loop():
        with island:
            params, _ = island.restore(params_of())
            train(island, params, until=lambda: island.inner_step >= 20)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    wait_for(lambda: hub.member(island.id).left, "departure", WAIT_S)


def test_closing_before_the_end_leaves_once_the_aggregator_has_what_is_left(tmp_path, caplog):
    with Hub(tmp_path / "store", islands=2) as hub, join(hub, params_of()) as island:
        params, _ = island.restore(params_of())
        params = train(island, params, until=lambda: island.inner_step >= 5)
        with caplog.at_level("INFO"):
            assert jax.tree.structure(island.close(params)) == jax.tree.structure(params)
    said = [each.getMessage() for each in caplog.records if each.name == "islands.loop"]  # the hub logs here as well
    (left,) = [message for message in said if message.startswith("island.left")]
    assert "closed before the end of the run" in left, "what it had arrived"


def test_a_restarted_island_goes_on_where_it_was_with_its_own_optimizer_state(hub, tmp_path):
    options = {"state_dir": tmp_path / "state", "checkpoint_interval_s": 0.05}
    path = tmp_path / "state" / "island-0.checkpoint"
    fresh = {"m": np.zeros(3, np.float32)}
    with join(hub, params_of(), **options) as island:
        params, opt_state = island.restore(params_of(), fresh)
        assert (opt_state, island.restored, island.restored_cursor) == (fresh, "fresh", None)
        state = ({"m": np.full(3, 7, np.float32)}, 42)
        train(island, params, until=lambda: path.exists() and min(newest(hub)) > 1, state=state)
        before = island.inner_step
    with join(hub, params_of(), **options) as island:
        assert island.id == "island-0", "the same host gets the same id again"
        assert 0 < island.share.cursor <= before
        params, opt_state = island.restore(params_of(), fresh)
        assert (island.restored, island.restored_cursor) == ("checkpoint", 42)
        assert np.array_equal(opt_state["m"], np.full(3, 7))
        assert params["w"][0, 0] < 1, "the run's parameters, not the initial ones"
    with join(hub, params_of(), **options) as island:
        other = {"m": np.zeros(4, np.float32)}
        _, opt_state = island.restore(params_of(), other)
        assert (opt_state, island.restored) == (other, "fresh")


def test_a_restarted_island_without_a_checkpoint_takes_the_optimizer_state_of_another(tmp_path):
    def adam(count):
        big = np.full(700_000, float(count), np.float32)  # in three parts
        return {"count": np.int32(count), "m": big, "key": np.uint32(count)}

    def keep_training(island, stop):
        params, _ = island.restore(params_of(), adam(0))
        train(island, params, until=stop.is_set, state=(adam(41), None))  # as in README.md

    stop = threading.Event()
    with Hub(tmp_path / "store", islands=2) as hub, join(hub, params_of(), island_id="donor") as donor:
        trainer = threading.Thread(target=keep_training, args=(donor, stop))
        trainer.start()
        try:
            wait_for(lambda: donor.inner_step >= 20 and min(newest(hub)) >= 2, "version 2", WAIT_S)
            with join(hub, params_of(), island_id="newcomer") as island:
                params, opt_state = island.restore(params_of(), adam(0))
                assert island.restored == "donor"
                assert (opt_state["count"], opt_state["key"], opt_state["m"][-1]) == (41, 41, 41.0)
                assert params["w"][0, 0] < 1, "the run's parameters"
                before = donor.inner_step
                told = lambda: hub.member("newcomer").optimizer == "donor" and donor.inner_step > before  # noqa: E731
                train(island, params, until=told, state=(opt_state, 0))
                assert donor.inner_step > before, "the donor goes on"
            with join(hub, params_of(), island_id="other") as island:
                other = {"m": np.zeros(4, np.float32)}
                _, opt_state = island.restore(params_of(), other)
                assert (opt_state, island.restored) == (other, "fresh"), "a state of another optimizer is refused"
            with join(hub, params_of(), island_id="impatient", donor_wait_s=0.0) as island:
                island.restore(params_of(), adam(0))
                assert island.restored == "fresh"
        finally:
            stop.set()
            trainer.join(WAIT_S)


_KILLED = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
import optax
import islands

address, state_dir, wanted = sys.argv[1:]
optimizer = optax.MultiSteps(optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.01, 0.0, 10_000)), 3)
params = {"w": jnp.ones((20, 10)), "none": None, "temperature": jnp.asarray(1.0), "seen": np.int64(0)}
state = {"optimizer": optimizer.init({"w": params["w"]}), "key": jax.random.key(0), "mask": jnp.arange(3) < 2}
traces = []

@jax.jit
def train(w, state):
    traces.append(1)
    key, now = jax.random.split(state["key"])
    grads = {"w": w + jax.random.normal(now, w.shape)}
    updates, opt = optimizer.update(grads, state["optimizer"], {"w": w})
    return optax.apply_updates({"w": w}, updates)["w"], {**state, "optimizer": opt, "key": key}

options = {"run": "demo", "island_id": "a", "state_dir": state_dir, "checkpoint_interval_s": 0.05, "timeout_s": 40.0}
with islands.join(address, params, tokens_per_step=10, kinds={"temperature": "local"}, **options) as island:
    params, state = island.restore(params, state)
    opt = state["optimizer"]
    drawn = jax.random.key_data(state["key"]).tolist()
    print(island.restored, int(opt.gradient_step), drawn, type(params["seen"]).__name__, params["seen"],
        params["temperature"].weak_type, state["mask"].tolist(), flush=True)
    for step in range(int(wanted) or 10**9):
        w, state = train(params["w"], state)
        params = {**params, "w": w, "seen": params["seen"] + 1}
        params = island.step(params, tokens=10, loss=1.0, state=(state, None))
    print(len(traces), flush=True)
"""


def test_a_loop_that_is_killed_comes_back_with_its_multi_steps_its_keys_and_its_scalars(hub, tmp_path):
    args = [sys.executable, "-c", _KILLED, hub.address, str(tmp_path / "state")]
    path = tmp_path / "state" / "a.checkpoint"
    with subprocess.Popen([*args, "0"], stdout=subprocess.PIPE, text=True) as first:
        try:
            began = first.stdout.readline()
            wait_for(lambda: path.exists() and checkpoint.load(path).at.step >= 6, "checkpoint of step 6", WAIT_S)
        finally:
            first.kill()
    step = checkpoint.load(path).at.step
    again = subprocess.run([*args, "4"], stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
    came_back, traces = again.stdout.splitlines()
    assert began.split() == ["fresh", "0", "[0,", "0]", "int64", "0", "True", "[True,", "True,", "False]"]
    assert came_back.split()[:2] == ["checkpoint", str(step // 3)]
    assert "[0, 0]" not in came_back, "the key is where it was"
    assert came_back.split()[4:] == ["int64", str(step), "True", "[True,", "True,", "False]"]
    assert traces == "1"


def test_parameters_that_are_never_synchronised_stay_local_and_come_from_the_checkpoint(hub, tmp_path):
    options = {"state_dir": tmp_path, "checkpoint_interval_s": 0.05}

    def with_stats(value):
        return {**params_of(), "batch_stats": {"mean": np.full(4, value, np.float32)}}

    with join(hub, with_stats(1.0), **options) as island:
        params, _ = island.restore(with_stats(1.0), ())
        assert params["batch_stats"]["mean"][0] == 1
        params["batch_stats"]["mean"] = np.full(4, 3, np.float32)
        train(island, params, lambda p: p, until=lambda: any(tmp_path.glob("*.checkpoint")), state=((), 0))
    with join(hub, with_stats(1.0), **options) as island:
        params, _ = island.restore(with_stats(1.0), ())
        assert island.restored == "checkpoint"
        assert np.all(params["batch_stats"]["mean"] == 3)


def merged_data(store):
    """The batches that were merged, each range with its fragment and whose it was."""
    for line in (store / "ledger.jsonl").read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # else it is being written
            row = json.loads(line)
            for each in row["contributions"]:
                for data in each["data"]:
                    yield row["fragment_id"], each["island_id"], each["incarnation"], data


#: How soon an island that is cut off loses its data to another.
WAITS = {"suspect_after_s": 0.2, "dead_after_s": 0.4, "share_takeover_s": 0.5}


def test_what_an_island_that_is_cut_off_has_not_trained_goes_to_another_in_blocks_of_its_own(tmp_path):
    with (
        Hub(tmp_path / "store", islands=2, data_ahead_s=0.2, **WAITS) as hub,
        join(hub, params_of(), island_id="stays") as stays,
    ):
        params, _ = stays.restore(params_of())
        goes = join(hub, params_of(), island_id="goes")
        theirs, _ = goes.restore(params_of())
        with training(stays, params):
            train(goes, theirs, until=lambda: min(newest(hub)) > 2)
            goes._session._post = lambda to, message: None  # cut off: from here on nobody hears of it
            train(goes, theirs, until=lambda: not hub.blocks("goes"))
            assert goes.share.cursor >= OWN_PASS, "it had no block left, and trained on all the same"
            goes.leave()
            with join(hub, params_of(), island_id="goes") as back:
                assert back.share.own == back.inner_step > 0, "of data of its own it trains none twice"
                theirs, _ = back.restore(params_of())
                began = back.share.cursor
                theirs = train(back, theirs, until=lambda: back.share.cursor > began + 30)
    ranges = (
        (data["from_batch"], data["to_batch"])
        for fragment_id, _, _, data in merged_data(tmp_path / "store")
        if fragment_id == 0
    )
    assert all(a[1] <= b[0] for a, b in pairwise(sorted(ranges))), "a batch was merged twice"
