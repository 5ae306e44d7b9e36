"""Many small runs with many troubles each: crashes at what is said and written, cut links, clocks that are wrong.

A failing seed N reproduces with ``python3 -m ops test tests/sim/test_packed.py --seeds N:N+1``.
"""

from __future__ import annotations

import pytest

from broker.wire.fragments import shard_of
from ops.virtual.simulation import Simulation
from tests.sim.packed import packed_plan
from tests.sim.test_rogues import check_the_honest
from tests.sim.test_simulation import run

#: Within which a small run ends, whatever happens to it: seconds of training, seconds of trouble, and repair.
LIMIT_S = 200.0

#: Seeds that once found a bug.
KEPT_SEEDS = (
    254,  # a leader that no broker answered asked to be woken at once, again and again, instead of renewing its lease
    734,  # the honest came late, by their pauses before another Join: a rogue was alone, and the plan must not allow it
    2499,  # the late message of a dead process outranked the living one, and no broker knew: nobody ever heard it
)


def check_that_shards_agree(simulation: Simulation) -> None:
    """Every shard has the same lives, from the same step on, and the same data; and its own fragments alone."""
    cores = [simulation.leaders[n].core.run for n in range(simulation.plan.config.shards)]
    lives = [{m.island_id: (m.incarnation, m.start, m.begun) for m in core.members} for core in cores]
    assert all(each == lives[0] for each in lives), lives
    assert all(core.data.tenures() == cores[0].data.tenures() for core in cores)
    assert all({shard_of(p, len(cores)) for p in core.fragments} == {n} for n, core in enumerate(cores))


def check(seed: int) -> None:
    """Runs one seed; what fails names it."""
    try:
        simulation = run(packed_plan(seed), LIMIT_S)
        check_the_honest(simulation)
        check_that_shards_agree(simulation)
    except AssertionError as err:
        raise AssertionError(f"seed {seed}: {err}") from err


@pytest.mark.rotating(4)
def test_whatever_is_packed_into_a_few_seconds_every_invariant_holds(packed_seeds: range) -> None:
    for seed in packed_seeds:
        check(seed)


@pytest.mark.parametrize("seed", KEPT_SEEDS)
def test_a_seed_that_found_a_bug_stays_mended(seed: int) -> None:
    check(seed)
