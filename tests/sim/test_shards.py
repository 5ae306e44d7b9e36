"""Runs of two or three aggregator shards whose leaders die, freeze and stay away.

Shards under troubles of all kinds are every fourth run of :mod:`tests.sim.test_packed`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.wire.fragments import shard_of
from ops.faults.kinds import Fault, FaultKind
from ops.virtual.simulation import Simulation
from tests.run_reading import Reading
from tests.sim.counting import run, told, with_one
from tests.sim.fleets import steady


def versions_made(simulation: Simulation, shard: int, from_s: float, to_s: float) -> int:
    """Returns how many versions of a shard's fragments became durable in that time."""
    made = [said["fragment"] for at_s, said in told(simulation, "version.committed") if from_s <= at_s < to_s]
    return sum(shard_of(fragment, simulation.plan.config.shards) == shard for fragment in made)


def least_merged(simulation: Simulation) -> float:
    """The share of the trained tokens that are merged, in the shard that has the least."""
    books = [Reading(leader.core).tokens() for leader in simulation.leaders.values()]
    return min(each["merged"] / each["trained"] for each in books)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("shards", [2, 3])
def test_a_calm_fleet_merges_every_token_in_every_shard_as_often_as_in_one(shards: int) -> None:
    simulation = run(steady(shards=shards))
    assert least_merged(simulation) == 1.0
    cores = [leader.core.run for leader in simulation.leaders.values()]
    assert all(7 <= core.versions[p] <= 11 for core in cores for p in core.model.fragments)


def test_while_a_shard_is_frozen_islands_step_on_and_the_other_fragments_are_merged() -> None:
    frozen = Fault(kind=FaultKind.STOP, targets=("aggregator-1",), at_s=6.0, for_s=5.0)
    simulation = run(replace(steady(3, shards=2, total_tokens=90_000), faults=(frozen,)))
    assert versions_made(simulation, 1, 6.1, 11.0) == 0
    assert versions_made(simulation, 0, 6.1, 11.0) >= 6
    assert simulation.now_s < 18.0, "nobody waited for it: it takes 16 s in a calm fleet"
    assert least_merged(simulation) > 0.9


@pytest.mark.full("seconds; packed seeds have shards that fail")
def test_an_island_that_joins_while_a_shard_is_away_is_let_in_when_that_is_back() -> None:
    frozen = Fault(kind=FaultKind.STOP, targets=("aggregator-1",), at_s=4.0, for_s=5.0)
    simulation = run(replace(with_one(steady(shards=2, total_tokens=120_000), 3, joins_at_s=5.0), faults=(frozen,)))
    (joined_s,) = (at_s for at_s, said in told(simulation, "island.joined") if said["island"] == "island-3")
    assert 9.0 < joined_s < 11.0
    for leader in simulation.leaders.values():
        assert Reading(leader.core).tokens("island-3")["merged"] > 0


@pytest.mark.full("seconds; packed seeds have shards that fail")
def test_a_shard_whose_leader_dies_goes_on_with_its_standby_and_the_others_with_their_leaders() -> None:
    dead = Fault(kind=FaultKind.KILL, targets=("aggregator-1",), at_s=6.0, for_s=30.0)
    simulation = run(
        replace(steady(2, shards=2, total_tokens=60_000, failover=True, lease_s=1.0), standbys=1, faults=(dead,))
    )
    assert [simulation.leaders[n].name for n in (0, 1)] == ["aggregator", "aggregator-1-standby-1"]
    assert [Reading(simulation.leaders[n].core).epoch for n in (0, 1)] == [1, 2]
    assert versions_made(simulation, 1, 6.0, 10.0) >= 1
    assert least_merged(simulation) > 0.9
