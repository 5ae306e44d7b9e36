"""Runs of two or three aggregator shards, each with leaders that crash and freeze, under all other troubles.

A failing seed N reproduces with ``python3 -m ops test tests/sim/test_shards.py --seeds N:N+1``.
"""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace

import pytest

from broker.wire.fragments import shard_of
from ops.faults import Fault, FaultKind
from ops.virtual.plan import SimulationPlan
from ops.virtual.simulation import Simulation
from tests.sim.faults import absences_plan, random_plan, several_brokers, sharded, standing_by
from tests.sim.test_simulation import run, steady

#: What comes together; one after the other, with the seed.
COMBINATIONS = (
    (random_plan, (standing_by,)),
    (absences_plan, ()),
    (absences_plan, (standing_by, several_brokers)),
    (random_plan, (several_brokers,)),
    (absences_plan, (several_brokers,)),
    (random_plan, ()),
    (absences_plan, (standing_by,)),
    (random_plan, (standing_by, several_brokers)),
)


def sharded_plan(seed: int) -> SimulationPlan:
    """Returns the plan of a seed; links have delays and losses, and no limit to their rate."""
    make, additions = COMBINATIONS[seed % len(COMBINATIONS)]
    plan = make(seed)
    for add in additions:
        plan = add(plan)
    return replace(sharded(plan), link=replace(plan.link, bytes_per_s=0.0))


def versions_made(simulation: Simulation, shard: int, from_s: float, to_s: float) -> int:
    """Returns how many versions of a shard's fragments became durable in that time."""
    found = 0
    for at_s, _, name, fields in simulation.trace:
        if name == "version.committed" and from_s <= at_s < to_s:
            found += shard_of(literal_eval(fields)["fragment"], simulation.plan.config.shards) == shard
    return found


def test_whatever_happens_to_shards_every_invariant_holds(sim_seed: int) -> None:
    simulation = run(sharded_plan(sim_seed))
    shards = simulation.plan.config.shards
    cores = [simulation.leaders[n].core for n in range(shards)]
    lives = [{m.island_id: (m.incarnation, m.start, m.begun) for m in core.run.members} for core in cores]
    assert all(each == lives[0] for each in lives), "every shard has the same lives, from the same step on"
    tenures = [core.run.shares.tenures() for core in cores]
    assert all(each == tenures[0] for each in tenures)
    for n, core in enumerate(cores):
        assert {shard_of(p, shards) for p in core.run.fragments} == {n}


@pytest.mark.parametrize("shards", [2, 3])
def test_a_calm_fleet_merges_every_token_in_every_shard_as_often_as_in_one(shards: int) -> None:
    simulation = run(steady(shards=shards))
    for leader in simulation.leaders.values():
        core_run = leader.core.run
        books = core_run.ledger.books().tokens()
        assert books["merged"] == books["trained"]
        assert all(15 <= core_run.versions[p] <= 19 for p in core_run.fragments), core_run.versions


def test_while_a_shard_is_frozen_islands_step_on_and_the_other_fragments_are_merged() -> None:
    frozen = Fault(kind=FaultKind.STOP, targets=("aggregator-1",), at_s=6.0, for_s=5.0)
    simulation = run(replace(steady(shards=2), faults=(frozen,)))
    assert versions_made(simulation, 1, 6.1, 11.0) == 0
    assert versions_made(simulation, 0, 6.1, 11.0) >= 6
    calm = run(steady(shards=2))
    assert simulation.queue.now_s < calm.queue.now_s + 2.0, "nobody waited for it"
    for leader in simulation.leaders.values():
        books = leader.core.run.ledger.books().tokens()
        assert books["merged"] > 0.9 * books["trained"]


def test_an_island_that_joins_while_a_shard_is_away_is_let_in_when_that_is_back() -> None:
    frozen = Fault(kind=FaultKind.STOP, targets=("aggregator-1",), at_s=4.0, for_s=5.0)
    plan = steady(shards=2)
    late = replace(plan.islands[3], joins_at_s=5.0)
    simulation = run(replace(plan, islands=(*plan.islands[:3], late), faults=(frozen,)))
    joined = [at_s for at_s, _, name, fields in simulation.trace if name == "island.joined" and "island-3" in fields]
    assert len(joined) == 1
    assert 9.0 < joined[0] < 11.0
    for leader in simulation.leaders.values():
        assert leader.core.run.ledger.books("island-3").tokens()["merged"] > 0


def test_a_shard_whose_leader_dies_goes_on_with_its_standby_and_the_others_with_their_leaders() -> None:
    plan = steady(shards=2, failover=True, lease_s=1.0)
    dead = Fault(kind=FaultKind.KILL, targets=("aggregator-1",), at_s=6.0, for_s=30.0)
    simulation = run(replace(plan, standbys=1, faults=(dead,)))
    assert [simulation.leaders[n].station.name for n in (0, 1)] == ["aggregator", "aggregator-1-standby-1"]
    assert [simulation.leaders[n].core.run.epoch for n in (0, 1)] == [1, 2]
    assert versions_made(simulation, 1, 6.0, 10.0) >= 1
    for leader in simulation.leaders.values():
        books = leader.core.run.ledger.books().tokens()
        assert books["merged"] > 0.9 * books["trained"]
