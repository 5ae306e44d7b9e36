"""The interface that a training loop programs against, by itself: nobody is at the other end of the exchange."""

import asyncio
import os
import pickle
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from broker.base.errors import ConfigError, LocalProtocolError
from broker.wire.fragments import partition
from broker.wire.messages import Codec
from islands import loop
from islands.arrays.partition import tensor_specs
from islands.interface.config import IslandConfig
from islands.loop import Island
from islands.session import checkpoint
from islands.session.array_work import ArrayWork
from islands.session.exchange import Batch, Exchange, Install, JoinedRun, take_newest
from islands.session.training_state import Position, Snapshot
from tests.aggregator_hand import id_of
from tests.forked import said
from tests.island_hand import SETTINGS


@pytest.fixture
def island_of():
    """Makes the island of a training loop; gives it back with what its communication thread sees."""
    made = []

    def make(params, *, checkpoint_file=None, run="demo", kinds=None, settings=SETTINGS):
        manifest = partition(tensor_specs(params, kinds), 1)
        exchange, array_work = Exchange(), ArrayWork(params, None)
        array_work.open(manifest)
        exchange.due.life = 1
        exchange.membership = JoinedRun(
            run_id=run,
            island_id="island-0",
            incarnation=1,
            start=Position(0, 0),
            settings=settings,
            num_fragments=len(manifest),
            moving=manifest.moving,
        )
        island = Island(
            config=IslandConfig(run_id=run, donor_wait_s=0.0),
            session=SimpleNamespace(checkpoint_file=checkpoint_file, leave=lambda *_: None),
            array_work=array_work,
            exchange=exchange,
            tokens_per_step=10,
            check=lambda: None,
            release=lambda: None,
        )
        made.append((island, array_work))
        return island, exchange

    yield make
    for island, array_work in made:
        island.leave()
        array_work.close()


def params_of(value=1.0):
    return {"w": np.full((4, 3), value, np.float32), "b": np.full(3, value, np.float32)}


@pytest.fixture
def begun(island_of):
    """An island that has joined and restored, what its communication thread sees, and the parameters."""
    island, exchange = island_of(params_of())
    params, _ = island.restore(params_of())
    return island, exchange, params


@pytest.mark.parametrize("cursor", [None, 0, 42, np.int64(42)])
def test_the_loop_of_the_readme_is_copied_when_another_island_or_a_checkpoint_wants_its_state(island_of, cursor):
    island, exchange = island_of(params_of())
    params, opt_state = island.restore(params_of(), {"m": np.zeros(3, np.float32)})
    exchange.due.snapshot_wanted = True
    island.step(params, tokens=10, loss=0.5, state=(opt_state, cursor))
    snapshot = exchange.moments.pop().snapshot
    assert snapshot.cursor == cursor
    assert np.array_equal(snapshot.state["m"], opt_state["m"])
    assert snapshot.state["m"] is not opt_state["m"]


@pytest.mark.parametrize("earlier", ["demo", ""])
def test_the_checkpoint_of_an_earlier_run_does_not_serve_the_next_one(island_of, tmp_path, earlier):
    """Runs that follow each other have the same islands, and often the same directory for their checkpoints."""
    path = tmp_path / "island-0.checkpoint"
    snapshot = Snapshot(state={"m": np.full(3, 7, np.float32)}, cursor=42, local=(), run_id=earlier)
    checkpoint.save(path, snapshot, (), Position(1000, 10_000), 3, checkpoint.Newest())
    fresh = {"m": np.zeros(3, np.float32)}
    if earlier:
        island, _ = island_of(params_of(), checkpoint_file=path, run=earlier)
        island.restore(params_of(), fresh)
        assert (island.restored, island.restored_cursor) == ("checkpoint", 42)
    island, _ = island_of(params_of(), checkpoint_file=path, run="demo2")
    _, opt_state = island.restore(params_of(), fresh)
    assert (opt_state, island.restored, island.restored_cursor) == (fresh, "fresh", None)


def test_a_wait_in_step_for_the_loop_s_own_computations_is_no_time_of_synchronisation(island_of):
    """JAX lets 32 computations be under way on a CPU: the copy of a fragment waits for the oldest of the loop's."""

    @jax.jit
    def train(params):
        return {"w": jax.lax.fori_loop(0, 20, lambda _, w: w - 1e-6 * jnp.tanh(w @ w), params["w"])}

    params = {"w": jnp.ones((400, 400))}
    island, exchange = island_of(params)
    params, _ = island.restore(params)
    params = jax.block_until_ready(island.step(train(params), tokens=10))
    began_s, in_step_s = time.perf_counter(), 0.0
    for _ in range(80):
        params = train(params)
        at_s = time.perf_counter()
        exchange.due.watched = exchange.urgent = frozenset([0])
        params = island.step(params, tokens=10)
        in_step_s += time.perf_counter() - at_s
    counted_s = island.sync_share * (time.perf_counter() - began_s)
    assert in_step_s > 0.1  # the copies did wait
    assert counted_s < 0.6 * in_step_s
    jax.block_until_ready(params)


def test_who_asks_hears_how_long_ago_the_broker_spoke(island_of, monkeypatch):
    island, exchange = island_of(params_of())
    assert island.heard_ago_s is None
    exchange.broker_heard_at_s = 100.0
    monkeypatch.setattr(loop.clocks, "monotonic", lambda: 103.5)
    assert island.heard_ago_s == 3.5


def test_steps_go_on_while_the_clock_stands_still(begun, monkeypatch):
    island, _, params = begun
    monkeypatch.setattr(loop.clocks, "monotonic", lambda: 103.5)
    for _ in range(3):
        params = island.step(params, tokens=10)
    assert (island.inner_step, island.sync_share) == (3, 0.0)


def test_arrays_that_were_one_are_trained_on_where_the_loop_ties_them_and_end_the_first_step_where_not(island_of):
    zeros = np.zeros(3, np.float32)
    given = {"a": {"bias": zeros}, "b": {"bias": zeros}}
    island, _ = island_of(given)
    params, _ = island.restore(given)
    for _ in range(3):
        trained = {name: {"bias": params["a"]["bias"] + 1} for name in params}
        params = island.step(trained, tokens=10)
        assert params is trained
    island, _ = island_of(given)
    params, _ = island.restore(given)
    trained = {"a": {"bias": params["a"]["bias"] + 1}, "b": {"bias": params["b"]["bias"] + 2}}
    with pytest.raises(ConfigError, match="a/bias and b/bias"):
        island.step(trained, tokens=10)


@pytest.mark.parametrize("tokens", [10, 10.0, np.int64(10), np.array(10), np.uint8(10)])
@pytest.mark.parametrize("loss", [None, 0.5, np.float32(0.5), np.array(0.5), jnp.float32(0.5)])
def test_what_counts_as_a_number_is_counted_as_one(begun, tokens, loss):
    island, exchange, params = begun
    island.step(params, tokens=tokens, loss=loss)
    assert (type(island.tokens), island.tokens) == (int, 10)
    assert [type(exchange.position.tokens), type(exchange.position.step)] == [int, int]
    assert take_newest(exchange.losses) == (None if loss is None else 0.5)


def test_a_step_takes_the_optimizers_state_beside_the_parameters_and_the_tokens_of_the_join(begun):
    island, _, params = begun
    island.step(params, {"m": np.zeros(3)}, loss=0.5)
    assert island.tokens == 10
    island._tokens_per_step = 0  # as of a join that left it open
    with pytest.raises(ConfigError, match="tokens = None: say how many this step trained"):
        island.step(params, None)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        *(("tokens", {"tokens": value}) for value in (-1, 1.5, "10", [10], np.ones(2), 11, 1 << 63)),
        *(("loss", {"loss": value}) for value in ("0.5", {"loss": 1}, [0.5], np.ones(2), jnp.ones(2), 1j)),
        *((r"state(\[1\])?", {"state": value}) for value in ({"m": 1}, (1, 2, 3), (None, -1), (None, "x"))),
        ("state m", {"state": ({"m": object()}, None)}),
    ],
    ids=id_of,
)
def test_what_a_step_cannot_take_is_refused_at_once_and_nothing_of_it_is_counted(begun, field, given):
    island, exchange, params = begun
    with pytest.raises(ConfigError, match=rf"^{field} = .+: .+"):
        island.step(params, **({"tokens": 10, "loss": 0.5} | given))
    assert (island.inner_step, island.tokens, list(exchange.losses), list(exchange.trained)) == (0, 0, [], [])
    island.step(params, tokens=10, loss=0.5)
    assert (island.inner_step, island.tokens) == (1, 10)


def test_the_counter_of_tokens_stays_one_that_messages_hold(begun):
    island, _, params = begun
    island.tokens = (1 << 63) - 5
    with pytest.raises(ConfigError, match="tokens = 10"):
        island.step(params, tokens=10)


@pytest.mark.parametrize("other", [{"w": np.ones((4, 3), np.float32)}, None, {**params_of(), "b": 1.0}, [1, 2]])
def test_other_parameters_than_those_of_the_join_are_refused_by_name(island_of, begun, other):
    fresh, _ = island_of(params_of())
    with pytest.raises(ConfigError, match=r"^params"):
        fresh.restore(other)
    island, *_ = begun
    with pytest.raises(ConfigError, match=r"^params"):
        island.step(other, tokens=10)


def hand_over(island, exchange, params, **more):
    """A step at whose end a round waits for the first fragment."""
    exchange.due.watched = exchange.urgent = frozenset([0])
    return island.step(params, tokens=10, **more)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda w, b: {"w": w}, "params = '1 leaves, without b'"),
        (lambda w, b: {"w": w, "b": b, "c": b}, "params = '3 leaves, with c'"),
        (lambda w, b: [b, w], "params = '2 leaves, without b and with 0'"),
        (lambda w, b: {"w": w, "b": b.astype(ml_dtypes.bfloat16)}, r"params b = 'bfloat16\[3\]': it joined as float32"),
        (lambda w, b: {"w": w.T, "b": b}, r"params w = 'float32\[3, 4\]': it joined as float32\[4, 3\]"),
    ],
)
def test_parameters_that_become_others_in_mid_run_are_refused_by_name_at_the_next_hand_over(begun, other, told):
    island, exchange, params = begun
    params = hand_over(island, exchange, params)
    island.step(other(**params), tokens=10)  # nobody reads them
    with pytest.raises(ConfigError, match=told):
        hand_over(island, exchange, other(**params))


def test_other_containers_of_the_same_leaves_are_as_good(island_of):
    island, exchange = island_of({"0": np.zeros(3, np.float32), "1": np.ones(2, np.float32)})
    params, _ = island.restore({"0": np.zeros(3, np.float32), "1": np.ones(2, np.float32)})
    params = island.step(params, tokens=10)
    assert type(hand_over(island, exchange, list(params.values()))) is list
    (copies,) = exchange.moments[-1].copied.values()
    assert {x.shape: x.tolist() for x in copies} == {(3,): [0, 0, 0], (2,): [1, 1]}


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_a_frozen_leaf_that_training_moves_is_found_within_a_few_hand_overs(island_of, array):
    given = {f"base/{i:02}": array(np.full((3, 2), i, np.float32)) for i in range(20)} | {"w": array(np.float32([1]))}
    island, exchange = island_of(given, kinds={"^base": "frozen"})
    params, _ = island.restore(given)
    found, looked_at = [], []
    for step in range(6):
        moved = ("w", "base/19") if step else ("w",)
        params = hand_over(island, exchange, {n: x + 1 if n in moved else x + 0 for n, x in params.items()})
        frozen = exchange.moments[-1].frozen
        looked_at.append(len(frozen))
        found.append(asyncio.run(island._array_work.moved(frozen)))
    assert looked_at == [8, 8, 4, 8, 8, 4]
    assert found == ["", "", "base/19", "", "", "base/19"]


@pytest.mark.parametrize("asks", [True, False])
def test_a_loop_that_never_asks_which_data_are_dealt_to_it_is_told_once(island_of, caplog, asks):
    island, exchange = island_of(params_of())
    params, _ = island.restore(params_of())
    for _ in range(4):
        if asks:
            island.share.take()
        params = hand_over(island, exchange, params)
    told = [r for r in caplog.records if r.getMessage().startswith("data.not_taken")]
    assert len(told) == (not asks)


def test_a_fragment_is_copied_when_its_round_is_open_and_ahead_of_that_where_a_step_takes_long(begun):
    island, exchange, params = begun

    def copied_at(steps, step_time_s):
        nonlocal params
        exchange.moments.clear()
        for _ in range(steps):
            exchange.step_time_s = step_time_s
            params = island.step(params, tokens=10)
        return [moment.at.step for moment in exchange.moments if 0 in moment.copied]

    assert copied_at(3, 0.01) == []
    exchange.due.watched = frozenset({0})
    assert copied_at(3, 0.01) == []
    assert copied_at(3, 10.0) == [7, 8, 9]
    exchange.urgent = frozenset({0})
    assert copied_at(3, 0.01) == [10]  # and no more before the other thread has looked
    exchange.urgent = frozenset([0])
    assert copied_at(3, 0.01) == [13]
    exchange.urgent = frozenset()
    assert copied_at(2, 0.01) == []


@pytest.mark.parametrize("counts", [(0, jnp.int32(7)), (jnp.int32(0), 7), (0.0, np.float32(7)), (np.float32(0), 7.0)])
def test_a_number_that_a_jitted_step_has_made_an_array_is_the_same_leaf(island_of, tmp_path, counts):
    path = tmp_path / "island-0.checkpoint"
    fresh, later = counts
    island, _ = island_of(params_of(), checkpoint_file=path)
    params, _ = island.restore(params_of(), {"count": fresh})
    island.step(params, tokens=10)
    island.save(params, ({"count": later}, None))
    island, _ = island_of(params_of(), checkpoint_file=path)
    _, found = island.restore(params_of(), {"count": fresh})
    assert (island.restored, island.restored_cursor) == ("checkpoint", None)
    assert found["count"] == 7
    assert checkpoint.sort_of(found["count"]) == checkpoint.sort_of(fresh)


@pytest.mark.parametrize(
    "leaf",
    [object(), Position(1, 2), np.random.default_rng(0), np.array([object()]), np.zeros(2, "V4"), Codec.F32, len],
    ids=id_of,
)
def test_a_leaf_that_no_checkpoint_can_hold_is_refused_by_path_at_restore_and_the_first_time_it_is_shown(
    island_of, tmp_path, leaf
):
    def begun():
        island, _ = island_of(params_of(), checkpoint_file=tmp_path / "checkpoint")
        return island, island.restore(params_of(), {"inner": [1]})[0]

    island, _ = island_of(params_of())
    with pytest.raises(ConfigError, match=r"^state inner/0 = .*: no checkpoint carries it"):
        island.restore(params_of(), {"inner": [leaf]})
    island, params = begun()
    with pytest.raises(ConfigError, match=r"^state inner/0 = "):
        island.step(params, tokens=10, state=({"inner": [leaf]}, None))
    island, params = begun()
    params = island.step(params, tokens=10)
    with pytest.raises(ConfigError, match=r"^state inner/0 = "):
        island.save(params, ({"inner": [leaf]}, None))


def test_a_state_that_no_restore_could_take_back_is_told_at_the_first_step(begun, caplog):
    island, _, params = begun
    island.step(params, tokens=10, state=({"m": np.zeros(3)}, None))
    (said,) = [r.atoll_fields["detail"] for r in caplog.records if r.getMessage().startswith("island.state_differs")]
    assert "1 arrays were saved, 0 are needed" in said


def test_a_state_that_becomes_another_one_in_mid_run_is_told_once_with_its_first_copy(island_of, caplog):
    island, exchange = island_of(params_of())
    params, _ = island.restore(params_of(), {"m": np.zeros(3), "count": 0})
    for step, moments in enumerate([3, 4, 4, 5]):
        exchange.due.snapshot_wanted = step > 1
        params = island.step(params, tokens=10, state=({"m": np.zeros(moments), "count": step}, None))
    (said,) = [r.atoll_fields["detail"] for r in caplog.records if r.getMessage().startswith("island.state_differs")]
    assert "saved was m float64[4], needed is m float64[3]" in said


def offer(island, exchange, version, *, keep=1.0, by=1.0, fresh_optimizer=False):
    """Has the next boundary install a version that moves every element."""
    here = island._array_work.placements[0]
    shift = tuple(np.full(leaf.shape, by, np.float32) for leaf in island._parameters.of_fragment(params_of(), 0))
    install = Install(
        fragment_id=0,
        fragment_version=version,
        keep=keep,
        placed=tuple(here.place(shift, keep)),
        shift=shift,
        dtypes=here.dtypes,
        places=here.places(shift),
    )
    exchange.due.ready.append(Batch(installs=(install,), fresh_optimizer=fresh_optimizer))


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("keep", [1.0, 0.0])
def test_elements_of_an_adoption_are_compared_with_the_next_two_steps_and_with_no_other(island_of, array, keep):
    def step_of(params):
        return {name: x + array(np.float32(0.25)) for name, x in params.items()}

    given = {name: array(x) for name, x in params_of(0.0).items()}
    island, exchange = island_of(given)
    params, _ = island.restore(given)
    for step in range(3):
        if step == 1:
            offer(island, exchange, 1, keep=keep)
        params = island.step(step_of(params), tokens=10)
        assert not exchange.returned
        if step == 1:
            began = [np.asarray(x).copy() for x in params.values()]
    params = island.step(step_of(params), tokens=10)
    (found,) = exchange.returned
    assert (found.step, found.first) == (2, False)
    installed = 1.5 if keep else 1.0
    expected = {"before": 0.5, "installed": installed, "following": installed + 0.25, "later": installed + 0.5}
    for name, value in expected.items():
        samples = getattr(found, name)
        assert [np.asarray(x).shape for x in samples] == [(12,), (3,)]
        assert all(np.all(np.asarray(x) == value) for x in samples)
    assert all(np.all(x == installed) for x in began)
    island.step(step_of(params), tokens=10)
    assert len(exchange.returned) == 1


def test_what_restore_returns_is_looked_at_too_and_a_recovery_and_the_end_are_not(island_of):
    island, exchange = island_of(params_of(0.0))
    offer(island, exchange, 0, keep=0.0)
    params, _ = island.restore(params_of(0.0))
    params = island.step(island.step(params, tokens=10), tokens=10)
    assert [(found.step, found.first) for found in exchange.returned] == [(0, True)]
    offer(island, exchange, 1, keep=0.0, fresh_optimizer=True)
    params = island.step(params, tokens=10)
    assert island.reset_optimizer
    params = island.step(params, tokens=10)
    exchange.due.done = exchange.finished = True
    offer(island, exchange, 2)
    island.close(params)
    assert len(exchange.returned) == 1


def test_adoptions_are_looked_at_at_first_then_now_and_then_and_all_again_under_suspicion(begun):
    island, exchange, params = begun
    looked_at = []
    for version in range(1, 80):
        exchange.suspected = 48 < version < 55
        offer(island, exchange, version)
        for _ in range(3):
            params = island.step(params, tokens=10)
        if exchange.returned:
            exchange.returned.clear()
            looked_at.append(version)
    assert looked_at == [*range(1, 17), 32, *range(49, 55), 64]


def test_in_a_forked_child_every_call_names_the_process_that_has_the_island_and_leaving_is_quiet(begun, monkeypatch):
    island, exchange, params = begun
    left = []
    monkeypatch.setattr(island._session, "leave", lambda *_: left.append(True))
    calls = {
        "step": lambda: island.step(params, tokens=10),
        "close": lambda: island.close(params),
        "pause": lambda: island.pause(params),
        "save": lambda: island.save(params, (None, None)),
        "restore": lambda: island.restore(params),
        "take": island.share.take,
    }
    for name, call in calls.items():
        text = said(call)
        assert f"island-0 lives in process {os.getpid()}, and process" in text, (name, text)
        assert text.startswith("LocalProtocolError")
        assert "LocalProtocolError" in said(lambda call=call: said(call)), name  # in a child of a child, too

    def falls_out():
        island.__exit__(None, None, None)
        island._at_exit()
        return left

    assert said(falls_out) == "[]"
    assert island.step(params, tokens=10) is params
    assert exchange.error is None


def test_a_share_is_not_copied_to_another_process(begun):
    island, _, _ = begun
    with pytest.raises(LocalProtocolError, match="num_workers=0"):
        pickle.dumps(island.share)
