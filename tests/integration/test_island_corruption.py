"""Memory of an island that changes by itself, against a real broker and a real aggregator, over loopback."""

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from islands.arrays.placement import Placement
from tests.hub import WAIT_S, Hub
from tests.local_run import wait_for
from tests.training_loops import join, params_of, stored, train

pytestmark = pytest.mark.usefixtures("seats_of_its_own")

#: Between steps, until all is found: the first merge of a new process takes seconds, and tokens have to last so long.
PAUSE_S = 0.03
#: A training loop that flips a bit of its own island's reference, as memory may, and ends as the run does. Each time it
#: trains until that is mended: the same bit twice would be right again.
ISLAND = """
import sys
import numpy as np
import islands
from tests.integration.test_island_corruption import PAUSE_S
from tests.training_loops import join, params_of, train
class Hub: address = sys.argv[1]
islands.log_to_stderr()
params = params_of(2.0)
with join(Hub, params, island_id="b") as island:
    params, _ = island.restore(params)
    for _ in range(4):
        params = train(island, params, until=lambda at=island.versions[0]: island.versions[0] > at, pause_s=PAUSE_S)
        words = lambda: island._array_work._references[0].values[0].view(np.uint32)
        island._array_work._references[0].values[0].flags.writeable = True
        words()[7] ^= 1 << 20
        params = train(island, params, until=lambda wrong=words()[7]: words()[7] != wrong, pause_s=PAUSE_S)
    params = island.close(train(island, params))
    np.savez(sys.argv[2], **params)
"""


def assert_ended_alike(store, *finals):
    for name, expected in stored(store).items():
        for final in finals:
            assert np.array_equal(np.asarray(final[name]), expected.astype(np.asarray(final[name]).dtype)), name


def test_an_island_process_whose_reference_changes_finds_it_names_it_and_mends_it(tmp_path):
    """An exponent's bit: what is handed over from such a reference is many times too long, or just wrong."""
    store, file = tmp_path / "store", tmp_path / "final.npz"
    with Hub(store, islands=2, total_tokens=16_000) as hub, ThreadPoolExecutor() as pool:
        other = [sys.executable, "-c", ISLAND, hub.address, str(file)]
        process = subprocess.Popen(other, stderr=subprocess.PIPE, text=True)
        try:
            with join(hub, params_of(), island_id="a") as island:
                params, _ = island.restore(params_of())
                said = pool.submit(process.communicate, timeout=WAIT_S)
                wait_for(lambda: hub.member("b"), "second island", evidence=lambda: str(process.poll()))
                params = train(island, params, until=lambda: hub.member("b").corruptions >= 3, pause_s=PAUSE_S)
                final = island.close(train(island, params))
            log = said.result()[1]
        finally:
            process.kill()
        assert process.returncode == 0, log
        assert hub.member("b").corruptions >= 3
        assert any("b was corrupt in its memory" in each for each in hub.core.run.troubles.sentences(0.0))
        books = hub.tokens()
    assert_ended_alike(store, final, np.load(file))
    (first, *_) = [line for line in log.splitlines() if "island.corrupted" in line]
    assert "changed in memory, in elements 0 to" in first
    assert "fragment=0" in first
    assert "version=" in first
    assert books["merged"] + sum(books["wasted"].values()) == books["trained"]
    assert books["wasted"]["overwritten"] > 0
    assert set(books["wasted"]) <= {"overwritten", "island_lost"}, "nothing of it was handed over, to be refused"


@pytest.mark.parametrize("leaf", [np.asarray, lambda x: jnp.asarray(x, jnp.bfloat16)], ids=["numpy", "jax"])
def test_a_device_that_copies_the_last_version_wrong_is_found_before_the_island_ends(
    tmp_path, monkeypatch, caplog, leaf
):
    """What is adopted at the end overwrites, and nothing is handed over after it that could tell."""
    caplog.set_level(logging.WARNING)
    place, wrong, trained = Placement.place, [], []

    def placed(self, values, keep):
        result = place(self, values, keep)
        if keep == 0 and trained and len(wrong) < 2:
            i = max(range(len(result)), key=lambda i: result[i].size)
            bad = np.array(result[i])
            bad.reshape(-1)[5] += 1
            result[i] = bad if isinstance(result[i], np.ndarray) else jnp.asarray(bad)
            wrong.append(i)
        return result

    monkeypatch.setattr(Placement, "place", placed)
    given = {name: leaf(x) for name, x in params_of().items()}
    with Hub(tmp_path / "store", total_tokens=1_000) as hub, join(hub, given) as island:
        params, _ = island.restore(given)
        step = lambda tree: {name: (x - x.dtype.type(0.01)).astype(x.dtype) for name, x in tree.items()}  # noqa: E731
        params = train(island, params, step)
        trained.append(island.inner_step)
        final = island.close(params)
        corruptions = hub.member("island-0").corruptions
    assert len(wrong) >= 2
    assert corruptions > 0
    assert "was not adopted as it came: element 5 is" in caplog.text
    assert_ended_alike(tmp_path / "store", final)
