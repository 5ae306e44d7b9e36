"""The interface of a training loop against a real broker and a real aggregator, over loopback."""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import islands
from aggregator.rounds import membership
from aggregator.state.model_limits import least_message_bytes
from aggregator.store.store import Store
from broker.wire.errors import ConfigError, LocalProtocolError, Unavailable
from broker.wire.messages import OWN_PASS, Codec
from broker.wire.ranges import IntervalSet
from islands.session import checkpoint
from ops.inspect.export import export
from ops.processes.cluster import free_ports
from tests.hub import RUN, WAIT_S, Hub

TOKENS = 10  # per inner step


@pytest.fixture(autouse=True)
def seats_of_its_own(tmp_path_factory, monkeypatch):
    """Islands without a name are known by their seat on this host, and tests in other processes take seats too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("seats")))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "store") as running:
        yield running


def stored(path):
    """The newest parameters in a store, by tensor name."""
    with Store.open(path) as store:
        loaded = store.load()
    arrays = {}
    for p, (_, state) in loaded.fragments.items():
        start = 0
        for row in loaded.run["manifest"][p]:
            name, shape = row[0], tuple(row[1])
            size = int(np.prod(shape, dtype=int))
            arrays[name] = state.params[start : start + size].reshape(shape)
            start += size
    return arrays


def params_of(value=1.0, dtype=np.float32):
    return {"w": np.full((40, 30), value, dtype), "b": np.full(30, value, dtype)}


def join(hub, params, **options):
    return islands.join(hub.address, params, run=RUN, timeout_s=WAIT_S, **({"tokens_per_step": TOKENS} | options))


def numpy_step(params, by=0.01):
    return {name: x - np.float32(by) for name, x in params.items()}


def train(island, params, train_step=numpy_step, *, until=lambda: False, pause_s=0.002, **options):
    """A loop of one's own, until the run is done or ``until()``; returns the parameters."""
    ends_s = time.monotonic() + WAIT_S
    while not island.done and not until():
        assert time.monotonic() < ends_s
        params = train_step(params)
        params = island.step(params, tokens=TOKENS, loss=1.0, **options)
        time.sleep(pause_s)  # plays the work of a step
    return params


def newest(hub):
    return [f.version for f in hub.core.run.fragments.values()]


# --- a whole run ------------------------------------------------------------------------------------------------


def test_a_numpy_loop_trains_to_the_end_and_gets_the_runs_parameters(tmp_path):
    with Hub(tmp_path / "store", total_tokens=2_000) as hub:
        given = params_of()
        with join(hub, given) as island:
            assert (island.id, island.share.index, island.share.count, island.share.cursor) == ("island-0", 0, 1, 0)
            params, opt_state = island.restore(given, {"m": 1})
            assert (opt_state, island.restored) == ({"m": 1}, "fresh")
            params = train(island, params)
            final = island.close(params)
            assert island.schedule.total_steps == 200
            assert island.schedule.step >= 199
        books = hub.core.run.ledger.books().tokens()
    assert books["trained"] == books["merged"] == island.tokens
    assert min(island.versions) > 1
    for name, expected in stored(tmp_path / "store").items():
        assert np.array_equal(final[name], expected), "the global parameters, to the last bit"
        assert final[name].dtype == np.float32
        assert np.all(final[name] < given[name]), "it descended"


def test_an_island_that_insists_on_another_recipe_is_refused_with_both_values(hub):
    with join(hub, params_of(), recipe={"keep": 1, "codec": "bf16"}), pytest.raises(ConfigError) as refused:
        join(hub, params_of(), recipe={"outer_momentum": 0.75})
    has = hub.core.run.config.outer_momentum
    assert f"outer_momentum is 0.75 at the island, and {has} in the run's recipe" in str(refused.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_loops_with_donating_steps_train_together_and_are_never_traced_again(tmp_path, dtype):
    traces = []

    def descend(params):
        traces.append(None)
        return jax.tree.map(lambda x: (x - 0.01).astype(x.dtype), params)

    step = jax.jit(descend, donate_argnums=0)
    results, failures = {}, []

    def loop(name, value):
        try:
            params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params_of(value))
            with join(hub, params, island_id=name) as island:
                params, _ = island.restore(params)
                params = train(island, params, step)
                results[name] = (island.close(params), island.versions, island.tokens)
        except BaseException as err:
            failures.append(err)
            raise

    with Hub(tmp_path / "store", islands=2, total_tokens=3_000) as hub:
        threads = [threading.Thread(target=loop, args=each) for each in (("a", 1.0), ("b", 2.0))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not failures
        books = hub.core.run.ledger.books().tokens()
    assert len(traces) == 1
    assert books["merged"] + sum(books["wasted"].values()) == books["trained"] == sum(r[2] for r in results.values())
    for name, expected in stored(tmp_path / "store").items():
        for final, versions, _ in results.values():
            assert str(final[name].dtype) == dtype
            assert np.array_equal(np.asarray(final[name]), expected.astype(final[name].dtype))
            assert min(versions) > 1


def test_version_0_comes_from_the_first_island_or_from_init_with_the_runs_seed(tmp_path):
    with Hub(tmp_path / "store", seed=5) as hub:
        given = params_of(1.0)
        with join(hub, given, init=lambda seed: params_of(float(seed))) as first:
            params, _ = first.restore(given)
            assert params["w"][0, 0] == 5.0
            assert first.share.seed == 5
            with join(hub, params_of(9.0)) as second:
                assert second.id == "island-1"
                theirs, _ = second.restore(params_of(9.0))
                assert np.array_equal(theirs["w"], params["w"])


def test_the_share_of_time_in_here_counts_from_the_end_of_the_first_step(hub):
    """A life of one step has spent no share of it: when that step's training began is not known here."""
    given = params_of()
    with join(hub, given) as island:
        params, _ = island.restore(given)
        island.step(numpy_step(params), tokens=TOKENS)
        assert island.sync_share == 0.0
        time.sleep(0.05)
        island.step(numpy_step(params), tokens=TOKENS)
        assert 0.0 < island.sync_share < 1.0


# --- refusals -----------------------------------------------------------------------------------------------------


def test_a_model_that_differs_is_refused_with_the_tensor_and_the_cure(hub):
    with join(hub, params_of()) as island:
        island.restore(params_of())
        other = {**params_of(), "w": np.zeros((40, 31), np.float32)}
        with pytest.raises(ConfigError, match=r"tensor 'w' has shape \(40, 31\), the run has \(40, 30\)"):
            join(hub, other)


def test_more_tokens_in_a_step_than_the_run_allows_are_refused_with_the_setting(tmp_path):
    limit = r"tokens_per_step = .* the aggregator allows 9 \(max_tokens_per_step\)"
    with Hub(tmp_path / "store", max_tokens_per_step=9) as hub, pytest.raises(ConfigError, match=limit):
        join(hub, params_of())


def test_a_model_that_fits_no_message_of_the_aggregator_is_refused_as_such(tmp_path):
    small = r"params = 'as given to join'"
    with Hub(tmp_path / "store", max_message_bytes=4 << 20) as hub, pytest.raises(ConfigError, match=small):
        join(hub, params_of())


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_tensor_that_no_message_holds_is_cut_and_trained_exported_and_loaded_as_if_it_were_not(tmp_path, as_array):
    """Everything here is exact in float32, so what was trained and merged is to be there to the last bit."""
    random = np.random.default_rng(0)
    shapes = {"embed": {"table": (33, 20)}, "layers": {"w": (5, 30, 4), "b": (5, 3)}, "head": (700,), "norm": (4,)}

    def draw(scale):
        whole = lambda shape: as_array((random.integers(-64, 64, shape) * scale).astype(np.float32))  # noqa: E731
        return jax.tree.map(whole, shapes, is_leaf=lambda node: isinstance(node, tuple))

    given, change = draw(2.0**-4), draw(2.0**-10)
    step = jax.jit(lambda params: jax.tree.map(jnp.add, params, change), donate_argnums=0)
    if as_array is np.asarray:
        step = lambda params: jax.tree.map(np.add, params, change)  # noqa: E731
    recipe = {"outer_learning_rate": 1.0, "outer_momentum": 0.0, "codec": Codec.F32, "staleness_exponent": 0.0}
    fragments = {"fragments": 14, "sync_interval": 14, "max_message_bytes": least_message_bytes(200)}
    with Hub(tmp_path / "store", total_tokens=1_000, **fragments, **recipe) as hub:
        with join(hub, given) as island:  # its own largest message is another one
            params, _ = island.restore(given)
            final = island.close(train(island, params, step))
            assert max(island.versions) > 1
        manifest = hub.core.run.manifest
    cut = {section.tensor for section in manifest.sections.values()}
    assert cut == {"embed/table", "layers/w", "head"}
    assert max(manifest.sizes) <= 200
    expected = jax.tree.map(lambda x, c: np.asarray(x) + island.inner_step * np.asarray(c), given, change)
    jax.tree.map(np.testing.assert_array_equal, final, expected)
    exported = export(tmp_path / "store", tmp_path / "model.safetensors")
    assert exported.parameters == sum(x.size for x in jax.tree.leaves(expected))
    loaded = islands.load(tmp_path / "model.safetensors", like=given)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_a_run_that_has_no_room_is_given_up_in_time_with_what_it_said(hub, monkeypatch):
    full = "took no join for 1 s, and said at last queue_full: 1 islands have joined, the run takes no more"
    with join(hub, params_of()):
        monkeypatch.setattr(membership, "MOST_MEMBERS", 1)
        with pytest.raises(Unavailable, match=full):
            islands.join(hub.address, params_of(), run=RUN, timeout_s=1.0)


def test_silence_ends_the_attempt_to_join_and_names_the_address():
    address = f"tcp://127.0.0.1:{free_ports(1)}"
    with pytest.raises(Unavailable, match=rf"cannot join run {RUN}: {address} was silent for 0.3 s while connecting"):
        islands.join(address, params_of(), run=RUN, timeout_s=0.3)


def test_what_check_raises_ends_the_waiting():
    class Stop(Exception):
        pass

    def check():
        raise Stop

    with pytest.raises(Stop):
        islands.join(f"tcp://127.0.0.1:{free_ports(1)}", params_of(), run=RUN, check=check)


def test_a_second_process_under_the_same_id_fences_the_first(hub):
    with contextlib.suppress(ConfigError), join(hub, params_of(), island_id="twin") as first:
        params, _ = first.restore(params_of())
        with join(hub, params_of(), island_id="twin") as second:
            theirs, _ = second.restore(params_of())
            with pytest.raises(ConfigError, match="another process has joined as 'twin': give every island an id"):
                train(first, params)
            second.step(numpy_step(theirs), tokens=TOKENS)


def test_a_loop_that_is_used_wrongly_is_told_what_to_do(hub):
    with join(hub, params_of()) as island:
        with pytest.raises(LocalProtocolError, match="call restore before the first step"):
            island.step(params_of(), tokens=TOKENS)
        params, _ = island.restore(params_of())
        with pytest.raises(LocalProtocolError, match="restore was called twice"):
            island.restore(params)
        with pytest.raises(ConfigError, match=r"tokens = 11"):
            island.step(params, tokens=11)
    with pytest.raises(LocalProtocolError, match="has left its run"):
        island.step(params, tokens=TOKENS)


# --- what is adopted stays ------------------------------------------------------------------------------------------


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
    return {
        "w": jax.random.normal(jax.random.key(seed), (20, 10)),
        "b": jnp.zeros(10),
    }


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


@pytest.mark.parametrize("keep", [1.0, 0.0])
def test_bfloat16_parameters_cast_from_masters_that_are_not_handed_over_end_training_with_the_cure(tmp_path, keep):
    ends = run_two(tmp_path / "store", train_from_own_masters, short(masters_of()), keep=keep)
    (told, *_) = [str(end) for end in ends.values() if isinstance(end, ConfigError)]
    # What restore returned, where the other island had made a version before this one came.
    assert re.search("what (was adopted|restore returned) is not in the next ones", told)
    assert "hand over the tree that the optimizer steps from: float32 masters" in told


@pytest.mark.parametrize("keep", [1.0, 0.0])
def test_the_same_loop_that_hands_over_its_masters_trains_to_the_end(tmp_path, keep):
    settings = {"keep": keep, "total_tokens": 12_000}
    ends = run_two(tmp_path / "store", train_handing_over_masters, masters_of(), **settings)
    final = stored(tmp_path / "store")
    for end in ends.values():
        assert {name: np.asarray(x).tolist() for name, x in end.items()} == {n: x.tolist() for n, x in final.items()}


# --- coming and going ---------------------------------------------------------------------------------------------


def test_an_exception_in_the_loop_leaves_the_run_in_order(hub):
    island = join(hub, params_of())

    def loop():
        with island:
            params, _ = island.restore(params_of())
            train(island, params, until=lambda: island.inner_step >= 20)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    ends_s = time.monotonic() + WAIT_S
    while not hub.member(island.id).left:
        assert time.monotonic() < ends_s
        time.sleep(0.01)


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
            ends_s = time.monotonic() + WAIT_S
            while donor.inner_step < 20 or min(newest(hub)) < 2:
                assert time.monotonic() < ends_s
                time.sleep(0.01)
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
            ends_s = time.monotonic() + WAIT_S
            while not (path.exists() and checkpoint.load(path).at.step >= 6):
                assert time.monotonic() < ends_s
                assert first.poll() is None
                time.sleep(0.05)
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


def rows_of(store):
    """Returns the whole rows of a ledger; one that is being written is left out."""
    return [
        json.loads(line)
        for line in (store / "ledger.jsonl").read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def owners_in(store):
    """Returns whose batches were merged, as (island, incarnation, data share)."""
    return {
        (each["island_id"], each["incarnation"], d["share"])
        for row in rows_of(store)
        for each in row["contributions"]
        for d in each["data"]
    }


def test_the_data_of_an_island_that_is_cut_off_go_to_another_and_back_and_no_batch_is_merged_twice(tmp_path):
    waits = {"suspect_after_s": 0.2, "dead_after_s": 0.4, "share_takeover_s": 0.5, "data_ahead_s": 0.0}
    with Hub(tmp_path / "store", islands=2, **waits) as hub:
        tenures = hub.core.run.shares._owners.now
        with join(hub, params_of(), island_id="stays") as stays:
            params, _ = stays.restore(params_of())
            goes = join(hub, params_of(), island_id="goes")
            theirs, _ = goes.restore(params_of())
            stop = threading.Event()
            trainer = threading.Thread(target=train, args=(stays, params), kwargs={"until": stop.is_set})
            trainer.start()
            try:
                train(goes, theirs, until=lambda: min(newest(hub)) > 2)
                goes._session._post = lambda to, message: None  # cut off: from here on nobody hears of it
                train(goes, theirs, until=lambda: tenures[1].owner == "stays")
                reached = tenures[1].cursor
                train(goes, theirs, until=lambda: hub.core.run.shares.books.reached(1) > reached + 8)
                goes.leave()
                with join(hub, params_of(), island_id="goes") as back:
                    assert (back.share.index, back.share.cursor) == (1, tenures[1].cursor)
                    assert back.share.cursor > reached + 8, "it goes on where its heir has come to"
                    theirs, _ = back.restore(params_of())
                    ends_s = time.monotonic() + WAIT_S
                    while ("goes", 2, 1) not in owners_in(tmp_path / "store"):
                        assert time.monotonic() < ends_s
                        begins = back.inner_step
                        theirs = train(back, theirs, until=lambda: back.inner_step > begins + 30)  # noqa: B023
            finally:
                stop.set()
                trainer.join(WAIT_S)
    batches = {}
    for row in rows_of(tmp_path / "store"):
        for each in row["contributions"]:
            for d in each["data"]:
                merged = batches.setdefault((row["fragment_id"], d["share"]), IntervalSet())
                merged.add(d["from_batch"], d["to_batch"])  # raises if one of them is there already
    assert {("stays", 1, 0), ("stays", 1, 1), ("goes", 1, 1), ("goes", 2, 1)} <= owners_in(tmp_path / "store")


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
        mean = params["batch_stats"]["mean"]
        return {"w": params["w"] + mean[0], "b": params["b"], "batch_stats": {"mean": mean + params["w"].mean()}}

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


# --- JAX is for those who use it ----------------------------------------------------------------------------------


def test_a_numpy_loop_never_imports_jax(hub):
    code = f"""
import sys
import numpy as np
import islands
params = {{"w": np.ones((40, 30), np.float32), "b": np.ones(30, np.float32)}}
with islands.join({hub.address!r}, params, run={RUN!r}) as island:
    params, _ = island.restore(params)
    while min(island.versions) < 1:
        params = island.step({{n: x - np.float32(0.01) for n, x in params.items()}}, tokens=10, loss=0.5)
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


def test_what_an_island_that_is_cut_off_has_not_trained_goes_to_another_in_blocks_of_its_own(tmp_path):
    waits = {"suspect_after_s": 0.2, "dead_after_s": 0.4, "share_takeover_s": 0.5, "data_ahead_s": 0.2}
    with Hub(tmp_path / "store", islands=2, **waits) as hub, join(hub, params_of(), island_id="stays") as stays:
        params, _ = stays.restore(params_of())
        goes = join(hub, params_of(), island_id="goes")
        theirs, _ = goes.restore(params_of())
        stop = threading.Event()
        trainer = threading.Thread(target=train, args=(stays, params), kwargs={"until": stop.is_set})
        trainer.start()
        try:
            train(goes, theirs, until=lambda: min(newest(hub)) > 2)
            goes._session._post = lambda to, message: None  # cut off: from here on nobody hears of it
            train(goes, theirs, until=lambda: not hub.core.run.shares.told("goes", 1).blocks)
            assert goes.share.cursor >= OWN_PASS, "it had no block left, and trained on all the same"
            goes.leave()
            with join(hub, params_of(), island_id="goes") as back:
                theirs, _ = back.restore(params_of())
                began = back.share.cursor
                theirs = train(back, theirs, until=lambda: back.share.cursor > began + 30)
        finally:
            stop.set()
            trainer.join()
    batches = [
        (d["from_batch"], d["to_batch"])
        for row in rows_of(tmp_path / "store")
        if row["fragment_id"] == 0
        for each in row["contributions"]
        for d in each["data"]
    ]
    ends = sorted(batches)
    assert all(a[1] <= b[0] for a, b in pairwise(ends)), "a batch was merged twice"
