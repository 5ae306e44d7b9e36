"""The interface that a training loop programs against, by itself: nobody is at the other end of the exchange."""

from types import SimpleNamespace

import numpy as np
import pytest

from broker.errors import ConfigError
from broker.fragments import FragmentManifest
from broker.messages import Codec, RunSettings, Share
from islands import checkpoint, loop
from islands.config import IslandConfig
from islands.exchange import Exchange, Membership, Position, Snapshot
from islands.loop import Island
from islands.partition import tensor_specs
from islands.workshop import Workshop


@pytest.fixture
def island_of():
    """Makes the island of a training loop; gives it back with what its communication thread sees."""
    made = []

    def make(params, *, checkpoint_file=None, run="demo"):
        manifest = FragmentManifest((tensor_specs(params),))
        settings = RunSettings(
            sync_interval_steps=4,
            keep=1.0,
            codec=Codec.F32,
            heartbeat_interval_s=0.5,
            total_tokens=0,
            tokens_per_fleet_step=10,
            seed=0,
        )
        exchange, workshop = Exchange(), Workshop(params, None)
        workshop.open(manifest)
        exchange.shares = (Share(index=0, count=1, share_epoch=1),)
        exchange.membership = Membership(
            island_id="island-0",
            incarnation=1,
            start=Position(0, 0),
            settings=settings,
            num_fragments=1,
            moving=manifest.moving,
        )
        island = Island(
            config=IslandConfig(run_id=run, donor_wait_s=0.0),
            machine=SimpleNamespace(incarnation=1, schedule_tokens=float),
            session=SimpleNamespace(checkpoint_file=checkpoint_file, leave=lambda *_: None),
            workshop=workshop,
            exchange=exchange,
            tokens_per_step=10,
            check=lambda: None,
            seat=None,
        )
        made.append((island, workshop))
        return island, exchange

    yield make
    for island, workshop in made:
        island.leave()
        workshop.close()


def params_of(value=1.0):
    return {"w": np.full((4, 3), value, np.float32), "b": np.full(3, value, np.float32)}


@pytest.mark.parametrize("cursor", [None, 0, 42, np.int64(42)])
def test_the_loop_of_the_readme_is_copied_when_another_island_or_a_checkpoint_wants_its_state(island_of, cursor):
    island, exchange = island_of(params_of())
    params, opt_state = island.restore(params_of(), {"m": np.zeros(3, np.float32)})
    exchange.snapshot_wanted = True
    island.step(params, tokens=10, loss=0.5, state=(opt_state, cursor))
    snapshot = exchange.moments.pop().snapshot
    assert snapshot.cursor == cursor
    assert np.array_equal(snapshot.state["m"], opt_state["m"])
    assert snapshot.state["m"] is not opt_state["m"]


def test_a_loop_without_a_cursor_saves_its_state_and_begins_with_it_again(island_of, tmp_path):
    path = tmp_path / "island-0.checkpoint"
    island, _ = island_of(params_of(), checkpoint_file=path)
    params, _ = island.restore(params_of(), {"m": np.zeros(3, np.float32)})
    params = island.step(params, tokens=10)
    island.save(params, ({"m": np.full(3, 7, np.float32)}, None))
    island, _ = island_of(params_of(), checkpoint_file=path)
    _, opt_state = island.restore(params_of(), {"m": np.zeros(3, np.float32)})
    assert (island.restored, island.restored_cursor) == ("checkpoint", None)
    assert np.array_equal(opt_state["m"], np.full(3, 7))


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


def test_who_asks_hears_how_long_ago_the_broker_spoke(island_of, monkeypatch):
    island, exchange = island_of(params_of())
    assert island.heard_ago_s is None
    exchange.broker_heard_at_s = 100.0
    monkeypatch.setattr(loop.clocks, "monotonic", lambda: 103.5)
    assert island.heard_ago_s == 3.5


def test_biases_that_were_made_of_one_array_end_the_first_step_and_not_in_silence(island_of):
    zeros = np.zeros(3, np.float32)
    given = {"a": {"bias": zeros}, "b": {"bias": zeros}}
    island, _ = island_of(given)
    params, _ = island.restore(given)
    trained = {"a": {"bias": params["a"]["bias"] + 1}, "b": {"bias": params["b"]["bias"] + 2}}
    with pytest.raises(ConfigError, match="a/bias and b/bias"):
        island.step(trained, tokens=10)


def test_weights_that_the_loop_ties_are_trained_on(island_of):
    zeros = np.zeros(3, np.float32)
    given = {"a": {"bias": zeros}, "b": {"bias": zeros}}
    island, _ = island_of(given)
    params, _ = island.restore(given)
    for _ in range(3):
        trained = {name: {"bias": params["a"]["bias"] + 1} for name in params}
        params = island.step(trained, tokens=10)
        assert params is trained
