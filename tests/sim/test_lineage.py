"""A store that comes back too old, in virtual time: the run waits, and goes on where that was ordered."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from aggregator.config import AggregatorConfig
from ops.invariants import MergedRanges
from ops.virtual.plan import IslandPlan, SimulationPlan
from ops.virtual.simulation import Simulation

Committed = list[tuple[int, int]]


def rewound(
    *, new_lineage: bool, crashes_at_s: tuple[float, ...] = (), record: bool = False
) -> tuple[Simulation, bool, Committed]:
    """Runs three islands; after 20 s the aggregator comes back with the store of 10 s. The first island may crash.

    With ``record`` the run record goes back as well: who had joined, and how often.
    """
    islands = tuple(IslandPlan(island_id=f"island-{i}", step_time_s=0.05) for i in range(3))
    islands = (replace(islands[0], crashes_at_s=crashes_at_s), *islands[1:])
    config = AggregatorConfig(islands=3, total_tokens=200_000, fragments=4, new_lineage=new_lineage)
    committed: Committed = []

    def on_note(at_s: float, who: str, name: str, fields: Mapping[str, Any]) -> None:
        if name == "version.committed":
            committed.append((fields["fragment"], fields["version"]))

    plan = SimulationPlan(seed=3, islands=islands, config=config)
    simulation = Simulation(plan, on_note=on_note, watching=False)
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
    return simulation, simulation.run(60.0), committed


def test_without_an_order_it_waits_and_islands_train_on() -> None:
    simulation, ended, _ = rewound(new_lineage=False)
    assert not ended
    assert simulation.aggregator.core.behind
    assert min(island.step for island in simulation.islands.values()) > 1000


def test_a_new_lineage_ends_the_run_with_books_that_balance() -> None:
    simulation, ended, committed = rewound(new_lineage=True)
    assert ended
    run = simulation.aggregator.core.run
    tokens = run.ledger.books().tokens()
    assert run.ledger.books().balanced()
    assert set(tokens["wasted"]) == {"store_lost"}
    assert 0 < tokens["wasted"]["store_lost"] < tokens["merged"]
    assert len(set(committed)) == len(committed), "a version was made twice"
    assert run.versions == tuple(max(version for q, version in committed if q == p) for p in range(4))


def test_what_a_lineage_gave_up_is_booked_as_that_also_of_an_island_that_dies_before_the_end() -> None:
    calm = rewound(new_lineage=True)[0].aggregator.core.run.ledger.books().tokens()["wasted"]["store_lost"]
    simulation, ended, _ = rewound(new_lineage=True, crashes_at_s=(26.0,))
    assert ended
    books = simulation.aggregator.core.run.ledger.books()
    assert books.balanced()
    wasted = books.tokens()["wasted"]
    assert set(wasted) == {"store_lost", "island_lost"}
    assert wasted["store_lost"] > 0.95 * calm
    assert wasted["island_lost"] < 3000  # what the dead island still had


def test_an_island_that_has_restarted_since_goes_on_as_a_life_above_all_that_brokers_know() -> None:
    """It was welcomed as the life after the one in the store, and fenced by the broker, which knew later ones."""
    simulation, ended, _ = rewound(new_lineage=True, crashes_at_s=(12.0, 14.0, 16.0), record=True)
    assert ended
    assert {island.address: island.core.incarnation for island in simulation.islands.values()} == {
        "island-0/3": 5,  # the process of before, whose fifth life it is
        "island-1/0": 1,
        "island-2/0": 1,
    }
    books = simulation.aggregator.core.run.ledger.books("island-0")
    assert books.balanced()
    assert books.tokens()["merged"] > 0
