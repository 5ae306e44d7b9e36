"""A store that comes back too old, in virtual time: the run waits, and goes on where that was ordered."""

from __future__ import annotations

import shutil
from pathlib import Path

from aggregator.interface.config import AggregatorConfig
from ops.faults.invariants import MergedRanges
from ops.virtual.plan import IslandPlan, SimulationPlan
from ops.virtual.simulation import Simulation
from tests.run_reading import Reading
from tests.sim.counting import simulation_of, tokens, told, with_one

#: When the store is copied, and when it comes back.
KEPT_S, BACK_S = 5.0, 9.0


def rewound(*, new_lineage: bool = True, crashes_at_s: tuple[float, ...] = ()) -> tuple[Simulation, bool]:
    """Runs three islands; the aggregator comes back with the store of four seconds ago. The first island may crash."""
    config = AggregatorConfig(islands=3, total_tokens=80_000, fragments=4, new_lineage=new_lineage)
    islands = tuple(IslandPlan(island_id=f"island-{i}", step_time_s=0.05) for i in range(3))
    plan = with_one(SimulationPlan(seed=3, islands=islands, config=config), 0, crashes_at_s=crashes_at_s)
    with simulation_of(plan, watching=False) as simulation:
        (station,) = simulation.stations
        store, kept = station.disk.path, station.run_dir / "kept"

        def rewind() -> None:
            station.crash(plan.restart_s)
            _replace(kept, store)
            simulation.invariants._merged_data = MergedRanges()  # with the shares' cursors, what was merged is lost

        simulation.virtual.at(KEPT_S, lambda: _replace(store, kept))
        simulation.virtual.at(BACK_S, rewind)
        return simulation, simulation.run(30.0)


def _replace(source: Path, target: Path) -> None:
    """Makes a store like another one; each keeps the name of its machine."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("name"), dirs_exist_ok=True)
    for path in target.rglob("*"):
        if path.is_file() and path.name != "name" and not (source / path.relative_to(target)).exists():
            path.unlink()


def test_without_an_order_it_waits_and_islands_train_on() -> None:
    simulation, ended = rewound(new_lineage=False)
    assert not ended
    assert Reading(simulation.aggregator.core).behind
    assert min(island.step for island in simulation.islands.values()) > 400


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

    simulation, ended = rewound(crashes_at_s=(14.0,))
    assert ended
    run = Reading(simulation.aggregator.core)
    run.check_books()
    wasted = run.tokens()["wasted"]
    assert set(wasted) == {"store_lost", "island_lost"}
    assert wasted["store_lost"] > 0.95 * calm["wasted"]["store_lost"]
    assert wasted["island_lost"] < 3000  # what the dead island still had


def test_an_island_that_has_restarted_since_goes_on_as_a_life_above_all_that_brokers_know() -> None:
    """It was welcomed as the life after the one in the store, and fenced by the broker, which knew later ones."""
    simulation, ended = rewound(crashes_at_s=(5.2, 6.5, 7.8))
    assert ended
    assert {island.address: island.core.incarnation for island in simulation.islands.values()} == {
        "island-0/3": 5,  # the process of before, whose fifth life it is
        "island-1/0": 1,
        "island-2/0": 1,
    }
    Reading(simulation.aggregator.core).check_books()
    assert tokens(simulation, "island-0")["merged"] > 0
