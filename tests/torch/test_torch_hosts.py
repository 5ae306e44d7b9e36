"""Islands of several processes of torch.distributed: FSDP2 and DistributedDataParallel, and one of JAX beside them."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import islands
from aggregator.interface.events import Pieced
from tests.fsdp_torch import ROWS, network, rows_of
from tests.hub import RUN, WAIT_S, Hub
from tests.local_run import wait_for
from tests.several_hosts import Merges, islands_in, live_again

PATIENCE_S = 150.0  # of one test; nothing here depends on how long it takes
PROGRAM = "tests.fsdp_torch"
pytestmark = pytest.mark.timeout(300)


class JaxIsland(threading.Thread):
    """An island of JAX with the same tensors, under the names of the module."""

    def __init__(self, address):
        super().__init__(daemon=True)
        self.address, self.losses, self.params = address, [], None

    def run(self):
        params = {name: jnp.asarray(p.detach().numpy()) for name, p in network().named_parameters()}
        optimizer = optax.adamw(3e-3)
        opt_state = optimizer.init(params)

        def loss(params, inputs, wanted):
            hidden = jnp.tanh(inputs @ params["0.weight"].T + params["0.bias"])
            hidden = jnp.tanh(hidden @ params["2.weight"].T + params["2.bias"])
            return jnp.mean((hidden @ params["4.weight"].T + params["4.bias"] - wanted) ** 2)

        @jax.jit
        def train(params, opt_state, inputs, wanted):
            found, grads = jax.value_and_grad(loss)(params, inputs, wanted)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, found

        given = {"run": RUN, "island_id": "jax", "tokens_per_step": ROWS, "timeout_s": WAIT_S, "donor_wait_s": 0.0}
        with islands.join(self.address, params, inner_optimizer="adamw", **given) as island:
            params, opt_state = island.restore(params, opt_state)
            while not island.done:
                inputs, wanted = (x.numpy() for x in rows_of(island.share.take()))
                params, opt_state, found = train(params, opt_state, inputs, wanted)
                params = island.step(params, tokens=ROWS, loss=found)
                self.losses.append(float(found))
                island._exchange.news.wait(0.02)  # about as quick as the others
            self.params = island.close(params)


@pytest.mark.parametrize("spread", ["fsdp", "ddp"])
def test_two_ranks_and_an_island_of_jax_train_one_model(tmp_path, spread):
    settings = {"islands": 2, "fragments": 3, "sync_interval": 8, "total_tokens": 5000}
    store = tmp_path / "store"
    with (
        Merges() as merges,
        Hub(store, **settings) as hub,
        islands_in(tmp_path, hub, PROGRAM, spread=spread, pace_s=0.02) as start,
    ):
        ranks, other = start("a", 2), JaxIsland(hub.address)
        wait_for(lambda: ranks[0].lines("restored"), "both ranks train", PATIENCE_S)
        other.start()
        for rank in ranks:
            assert rank.process.wait(PATIENCE_S) == 0, rank.err.read_text()[-2000:]
        other.join(WAIT_S)
    first, second = (rank.lines() for rank in ranks)
    together = [
        [{key: line[key] for key in ("step", "versions", "done", "cursor", "schedule")} for line in lines]
        for lines in (first, second)
    ]
    assert together[0] == together[1]
    assert len(first) > 20
    assert np.mean(other.losses[-20:]) < 0.5 * np.mean([line["loss"] for line in first[:3]])
    ends = [rank.lines("ended")[0] for rank in ranks]
    total = float(sum(np.asarray(x, np.float64).sum() for x in other.params.values()))
    assert ends[0]["sum"] == ends[1]["sum"] == pytest.approx(total, rel=1e-5)
    assert len(merges.of("a")) > 2
    assert all(isinstance(tensor, Pieced) for part in merges.of("a") for tensor in part.payload)
    merges.check()


def test_ranks_that_lose_one_come_back_as_one_process_and_as_two(tmp_path):
    store = tmp_path / "store"
    kept = {"state_dir": str(tmp_path / "state"), "checkpoint_interval_s": 0.5, "spread": "fsdp", "pace_s": 0.02}
    with (
        Hub(store, islands=1, fragments=2, sync_interval=6) as hub,
        islands_in(tmp_path, hub, PROGRAM, **kept) as start,
    ):
        live_again(start, store, tmp_path / "state" / "a.checkpoint", (2, 1, 2), PATIENCE_S)
