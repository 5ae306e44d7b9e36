"""A store that comes back too old, in virtual time: the run waits, and goes on where that was ordered."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from ops.faults.invariants import MergedRanges
from ops.virtual.simulation import Simulation
from tests.run_reading import Reading
from tests.sim.test_simulation import steady, tokens, told, with_one


def rewound(
    *, new_lineage: bool = True, crashes_at_s: tuple[float, ...] = (), record: bool = False
) -> tuple[Simulation, bool]:
    """Runs three islands; after 20 s the aggregator comes back with the store of 10 s. The first island may crash.

    With ``record`` the run record goes back as well: who had joined, and how often.
    """
    plan = replace(steady(3, total_tokens=200_000, fragments=4, new_lineage=new_lineage), seed=3)
    simulation = Simulation(with_one(plan, 0, crashes_at_s=crashes_at_s), watching=False)
    kept, kept_record = {}, {}

    def keep() -> None:
        kept.update(simulation.disk.commits)
        kept_record.update(deepcopy(simulation.disk.record or {}))

    def rewind() -> None:
        simulation.disk.commits = dict(kept)
        if record:
            simulation.disk.record = kept_record
            simulation.invariants._merged_data = MergedRanges()  # with the shares' cursors, what was merged is lost
        simulation.stations[0].crash(simulation.plan.restart_s)

    simulation.queue.after(10.0, keep)
    simulation.queue.after(20.0, rewind)
    return simulation, simulation.run(60.0)


def test_without_an_order_it_waits_and_islands_train_on() -> None:
    simulation, ended = rewound(new_lineage=False)
    assert not ended
    assert Reading(simulation.aggregator.core).behind
    assert min(island.step for island in simulation.islands.values()) > 1000


def test_a_new_lineage_ends_the_run_with_books_that_balance_also_if_an_island_dies_before_the_end() -> None:
    simulation, ended = rewound()
    assert ended
    run = Reading(simulation.aggregator.core)
    run.check_books()
    calm = run.tokens()
    assert set(calm["wasted"]) == {"store_lost"}
    assert 0 < calm["wasted"]["store_lost"] < calm["merged"]
    committed = [(said["fragment"], said["version"]) for _, said in told(simulation, "version.committed")]
    assert len(set(committed)) == len(committed), "a version was made twice"
    assert run.versions == tuple(max(version for q, version in committed if q == p) for p in range(4))

    simulation, ended = rewound(crashes_at_s=(26.0,))
    assert ended
    run = Reading(simulation.aggregator.core)
    run.check_books()
    wasted = run.tokens()["wasted"]
    assert set(wasted) == {"store_lost", "island_lost"}
    assert wasted["store_lost"] > 0.95 * calm["wasted"]["store_lost"]
    assert wasted["island_lost"] < 3000  # what the dead island still had


def test_an_island_that_has_restarted_since_goes_on_as_a_life_above_all_that_brokers_know() -> None:
    """It was welcomed as the life after the one in the store, and fenced by the broker, which knew later ones."""
    simulation, ended = rewound(crashes_at_s=(12.0, 14.0, 16.0), record=True)
    assert ended
    assert {island.address: island.core.incarnation for island in simulation.islands.values()} == {
        "island-0/3": 5,  # the process of before, whose fifth life it is
        "island-1/0": 1,
        "island-2/0": 1,
    }
    Reading(simulation.aggregator.core).check_books()
    assert tokens(simulation, "island-0")["merged"] > 0
