"""Data in blocks, in virtual time: twice as fast is twice the data, whoever comes or goes; no batch twice, none lost.

The observer (:mod:`ops.virtual.dealing`) checks invariant 2 after every event of each of these runs.
"""

from __future__ import annotations

import random
from ast import literal_eval
from collections import Counter
from dataclasses import replace

import pytest

from aggregator.config import AggregatorConfig
from ops.virtual.plan import IslandPlan, SimulationPlan
from ops.virtual.queue import LinkModel
from ops.virtual.simulation import Simulation
from tests.sim.faults import kills
from tests.sim.test_simulation import run

TOKENS = 100  # in a batch


def fleet(*step_times_s: float, batches: int = 1600, **settings: object) -> SimulationPlan:
    """Islands of these speeds, which end when so many batches are trained."""
    islands = tuple(
        IslandPlan(island_id=f"island-{i}", step_time_s=step_s, jitter=0.0) for i, step_s in enumerate(step_times_s)
    )
    common = {"islands": len(islands), "total_tokens": batches * TOKENS, "data_ahead_s": 1.0, "share_takeover_s": 3.0}
    config = AggregatorConfig(**{**common, "dead_after_s": 2.0, "suspect_after_s": 1.0, **settings})  # type: ignore[arg-type]
    link = LinkModel(delay_s=(0.001, 0.02))
    return SimulationPlan(seed=1, islands=islands, config=config, link=link, tokens_per_step=TOKENS)


def merged(simulation: Simulation) -> dict[str, list[tuple[int, int]]]:
    """Returns, by island, the batches that were merged into fragment 0, in order of merging."""
    found: dict[str, list[tuple[int, int]]] = {}
    for commit in sorted(simulation.invariants.commits(0), key=lambda commit: commit.fragment_version):
        for each in commit.contributions:
            found.setdefault(each.island_id, []).extend((d.from_batch, d.to_batch) for d in each.data)
    return found


def given(simulation: Simulation) -> list[tuple[float, str, int, int]]:
    """Returns when a block was given to whom, and its batches."""
    notes = [(at_s, literal_eval(fields)) for at_s, _, name, fields in simulation.trace if name == "block.given"]
    return [(at_s, each["owner"], each["from_batch"], each["to_batch"]) for at_s, each in notes]


def test_an_island_that_is_four_times_slower_is_given_a_quarter_of_the_data() -> None:
    simulation = run(fleet(0.05, 0.05, 0.05, 0.2))
    batches = {name: sum(b - a for a, b in ranges) for name, ranges in merged(simulation).items()}
    fast, slow = batches["island-0"], batches["island-3"]
    assert fast / slow == pytest.approx(4.0, rel=0.05)
    whole = sorted(each for ranges in merged(simulation).values() for each in ranges)
    assert sum(b - a for a, b in whole) == sum(batches.values()) >= 1600
    # What was not trained when the run ended is what islands had in their hands then: a second's worth each.
    assert whole[-1][1] - sum(batches.values()) <= 4 * 20
    assert simulation.invariants.dealing.own == 0


def test_an_island_that_is_added_in_mid_run_is_given_what_nobody_had() -> None:
    plan = fleet(0.05, 0.05, 0.1, batches=1200)
    late = replace(plan.islands[2], joins_at_s=10.0)
    simulation = run(replace(plan, islands=(*plan.islands[:2], late)))
    before = max(b for at_s, _, _, b in given(simulation) if at_s < 10.0)
    first = min(a for a, _ in merged(simulation)["island-2"])
    assert first >= before


@pytest.mark.parametrize("shards", [1, 2])
def test_what_an_island_that_dies_has_not_trained_goes_out_again_at_once(shards: int) -> None:
    plan = fleet(0.05, 0.05, 0.4, shards=shards, fragments=2)
    dying = replace(plan.islands[2], crashes_at_s=(6.0,), restart_s=1e6)
    simulation = run(replace(plan, islands=(*plan.islands[:2], dying)))
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


def test_islands_that_are_cut_off_train_on_and_what_they_train_is_counted() -> None:
    plan = fleet(0.05, 0.05, 0.05)
    cut = replace(plan.islands[2], outages=((8.0, 2.5),))
    simulation = run(replace(plan, islands=(*plan.islands[:2], cut)))
    assert simulation.invariants.dealing.own > 0
    books = simulation.aggregator.core.run.ledger.books().tokens()
    assert books["merged"] == books["trained"], "it was not away for so long that its blocks went to others"


def test_however_long_a_run_is_the_books_hold_a_few_blocks_of_each_island() -> None:
    short, long = (run(fleet(0.05, 0.05, 0.2, batches=n)) for n in (400, 2400))
    assert len(long.invariants.dealing.blocks) > 4 * len(short.invariants.dealing.blocks)
    assert long.invariants.dealing.most_given <= 8 * 3
    record = long.disk.record
    assert record is not None
    assert len(record["shares"]["given"]) <= 8 * 3
    assert all(len(commit.ledger["data"]) <= 8 * 3 for commit in long.disk.commits.values())


def restless(seed: int) -> SimulationPlan:
    """Unequal speeds, deaths, newcomers, islands that are cut off or leave; an aggregator that dies; several shards."""
    rng = random.Random(f"blocks {seed}")
    count = rng.randint(2, 5)
    plan = fleet(
        *(rng.choice([0.03, 0.05, 0.1, 0.3]) for _ in range(count)),
        batches=1000,
        data_ahead_s=rng.choice([0.2, 0.5, 2.0]),
        fragments=2,
        sync_interval=rng.choice([4, 12, 24]),
        keep=rng.choice([1.0, 1.0, 0.0]),
        shards=1 + seed % 2,
    )
    islands = []
    for k, island in enumerate(plan.islands):
        at_s, for_s = rng.uniform(1.0, 10.0), rng.choice([0.5, 2.0, 5.0])
        match rng.choice(["stays", "dies", "dies for good", "cut off", "frozen", "late", "leaves"]):
            case "dies":
                island = replace(island, crashes_at_s=(at_s,), restart_s=for_s)
            case "dies for good" if k:
                island = replace(island, crashes_at_s=(at_s,), restart_s=1e6)
            case "cut off":
                island = replace(island, outages=((at_s, for_s),))
            case "frozen":
                island = replace(island, pauses=((at_s, for_s),))
            case "late" if k:
                island = replace(island, joins_at_s=at_s)
            case "leaves" if k:
                island = replace(island, leaves_at_s=at_s)
            case _:
                pass
        islands.append(island)
    faults = kills("aggregator", rng.uniform(1.0, 12.0)) if rng.random() < 0.5 else ()
    link = LinkModel(delay_s=(0.001, 0.03), loss=rng.choice([0.0, 0.1]), duplication=rng.choice([0.0, 0.1]))
    return replace(plan, seed=seed, islands=tuple(islands), faults=faults, link=link, calm_after_s=15.0)


@pytest.mark.parametrize("seed", range(12))
def test_whoever_comes_and_goes_no_batch_is_merged_twice_and_none_is_passed_over(seed: int) -> None:
    run(restless(seed))


def test_the_same_seed_deals_the_same_blocks() -> None:
    first, second = (given(run(restless(5))) for _ in range(2))
    assert first == second
    assert Counter(name for _, name, *_ in first)
