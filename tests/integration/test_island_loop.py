"""The interface of a training loop against a real broker and a real aggregator, over loopback."""

import contextlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import islands
from aggregator.rounds import membership
from aggregator.state.model_limits import least_message_bytes
from broker.base.errors import ConfigError, LocalProtocolError, Unavailable
from broker.wire.messages import Codec
from ops.models.global_model import export
from ops.processes.cluster import free_ports
from tests.hub import RUN, WAIT_S, Hub
from tests.training_loops import TOKENS, join, numpy_step, params_of, stored, train

pytestmark = pytest.mark.usefixtures("seats_of_its_own")


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
        books = hub.tokens()
    assert books["trained"] == books["merged"] == island.tokens
    assert min(island.versions) > 1
    for name, expected in stored(tmp_path / "store").items():
        assert np.array_equal(final[name], expected), "the global parameters, to the last bit"
        assert final[name].dtype == np.float32
        assert np.all(final[name] < given[name]), "it descended"


def test_an_island_that_insists_on_another_recipe_is_refused_with_both_values(hub):
    with join(hub, params_of(), recipe={"keep": 1, "codec": "bf16"}), pytest.raises(ConfigError) as refused:
        join(hub, params_of(), recipe={"outer_momentum": 0.75})
    has = hub.settings.outer_momentum
    assert f"outer_momentum is 0.75 at the island, and {has} in the run's recipe" in str(refused.value)


def test_jax_loops_with_donating_steps_train_together_and_are_never_traced_again(tmp_path):
    traces = []

    def descend(params):
        traces.append(None)
        return jax.tree.map(lambda x: (x - 0.01).astype(x.dtype), params)

    step = jax.jit(descend, donate_argnums=0)

    def loop(name, value):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params_of(value))
        with join(hub, params, island_id=name) as island:
            params, _ = island.restore(params)
            params = train(island, params, step)
            return island.close(params), island.versions, island.tokens

    with Hub(tmp_path / "store", islands=2, total_tokens=3_000) as hub, ThreadPoolExecutor() as pool:
        results = [each.result(WAIT_S) for each in [pool.submit(loop, "a", 1.0), pool.submit(loop, "b", 2.0)]]
        books = hub.tokens()
    assert len(traces) == 1
    assert books["merged"] + sum(books["wasted"].values()) == books["trained"] == sum(r[2] for r in results)
    for name, expected in stored(tmp_path / "store").items():
        for final, versions, _ in results:
            assert str(final[name].dtype) == "bfloat16"
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


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ({"max_tokens_per_step": 9}, r"tokens_per_step = .* the aggregator allows 9 \(max_tokens_per_step\)"),
        ({"max_message_bytes": 4 << 20}, "params = 'as given to join'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_beyond_a_limit_of_the_run_is_refused_with_the_setting(tmp_path, limit, said):
    with Hub(tmp_path / "store", **limit) as hub, pytest.raises(ConfigError, match=said):
        join(hub, params_of())


@pytest.mark.parametrize(
    "as_array",
    [
        pytest.param(np.asarray, id="numpy"),
        pytest.param(jnp.asarray, id="jax", marks=pytest.mark.full("compiles for each of 14 fragments")),
    ],
)
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
        manifest = hub.manifest
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
