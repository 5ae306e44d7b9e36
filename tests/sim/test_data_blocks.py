"""Data in blocks, in virtual time: twice as fast is twice the data, whoever comes or goes; no batch twice, none lost.

The observer (:mod:`ops.virtual.dealing`) checks invariant 2 after every event of each of these runs, and of those with
random troubles (:mod:`tests.sim.packed`, :mod:`tests.sim.faults`), three in four of which have blocks.
"""

from __future__ import annotations

import pytest

from aggregator.interface.config import AggregatorConfig
from ops.virtual.plan import IslandPlan, LinkModel, SimulationPlan
from ops.virtual.simulation import Simulation
from tests.sim.counting import run, tokens, told, with_one

TOKENS = 100  # in a batch


def fleet(*step_times_s: float, batches: int, **settings: object) -> SimulationPlan:
    """Islands of these speeds, which end when so many batches are trained."""
    islands = tuple(
        IslandPlan(island_id=f"island-{i}", step_time_s=step_s, jitter=0.0) for i, step_s in enumerate(step_times_s)
    )
    common = {"islands": len(islands), "total_tokens": batches * TOKENS, "data_ahead_s": 1.0, "share_takeover_s": 3.0}
    config = AggregatorConfig(**common, dead_after_s=2.0, suspect_after_s=1.0, **settings)  # type: ignore[arg-type]
    link = LinkModel(delay_s=(0.001, 0.02))
    return SimulationPlan(seed=1, islands=islands, config=config, link=link)


def merged(simulation: Simulation) -> dict[str, list[tuple[int, int]]]:
    """Returns, by island, the batches that were merged into fragment 0, in order of merging."""
    found: dict[str, list[tuple[int, int]]] = {}
    for commit in sorted(simulation.invariants.commits(0), key=lambda commit: commit.fragment_version):
        for each in commit.contributions:
            found.setdefault(each.island_id, []).extend((d.from_batch, d.to_batch) for d in each.data)
    return found


def given(simulation: Simulation) -> list[tuple[float, str, int, int]]:
    """Returns when a block was given to whom, and its batches."""
    return [(at_s, x["owner"], x["from_batch"], x["to_batch"]) for at_s, x in told(simulation, "block.given")]


def test_an_island_that_is_four_times_slower_is_given_a_quarter_of_the_data_and_books_hold_few_blocks_of_each() -> None:
    simulation = run(fleet(0.05, 0.05, 0.05, 0.2, batches=1200))
    batches = {name: sum(b - a for a, b in ranges) for name, ranges in merged(simulation).items()}
    assert batches["island-0"] / batches["island-3"] == pytest.approx(4.0, rel=0.05)
    # What was not trained when the run ended is what islands had in their hands then: a second's worth each.
    reach = max(b for ranges in merged(simulation).values() for _, b in ranges)
    assert 1200 <= sum(batches.values()) <= reach <= sum(batches.values()) + 4 * 20
    assert simulation.invariants.dealing.own == 0
    most = 8 * 4
    assert len(simulation.invariants.dealing.blocks) > 3 * most
    assert simulation.invariants.dealing.most_given <= most
    assert len(simulation.aggregator.record()["shares"]["given"]) <= most
    assert all(len(commit.ledger["data"]) <= most for commit in simulation.aggregator.commits().values())


@pytest.mark.full("seconds; packed seeds have islands that come late")
def test_an_island_that_is_added_in_mid_run_is_given_what_nobody_had() -> None:
    simulation = run(with_one(fleet(0.05, 0.05, 0.1, batches=800), 2, joins_at_s=10.0))
    before = max(b for at_s, _, _, b in given(simulation) if at_s < 10.0)
    first = min(a for a, _ in merged(simulation)["island-2"])
    assert first >= before


@pytest.mark.rotating(2)
@pytest.mark.parametrize("shards", [1, 2])
def test_what_an_island_that_dies_has_not_trained_goes_out_again_at_once(shards: int) -> None:
    plan = fleet(0.05, 0.05, 0.4, batches=1000, shards=shards, fragments=2)
    simulation = run(with_one(plan, 2, crashes_at_s=(6.0,), restart_s=1e6))
    deals = given(simulation)
    again = [each for k, each in enumerate(deals) if any(each[2] < b for *_, b in deals[:k])]
    assert again
    assert {name for _, name, *_ in again} <= {"island-0", "island-1"}
    assert all(8.5 <= at_s <= 11.0 for at_s, *_ in again)
    every = sorted(each for ranges in merged(simulation).values() for each in ranges)
    reach = 0
    for a, b in every[: len(every) // 2]:  # the end of the run leaves what is in hands then
        assert a - reach <= 24, "at most what the dead island had trained, and not handed over, is missing"
        reach = b


@pytest.mark.full("seconds; packed seeds have islands that are cut off")
def test_islands_that_are_cut_off_train_on_and_what_they_train_is_counted() -> None:
    simulation = run(with_one(fleet(0.05, 0.05, 0.05, batches=800), 2, outages=((8.0, 2.5),)))
    assert simulation.invariants.dealing.own > 0
    books = tokens(simulation)
    assert books["merged"] == books["trained"], "it was not away for so long that its blocks went to others"
