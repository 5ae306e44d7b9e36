"""Whole runs in virtual time; the invariants (reference.md, section 10) hold after every event.

Random troubles of all kinds are in :mod:`tests.sim.test_packed`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from broker.wire import messages as m
from ops.faults.kinds import Fault, FaultKind
from ops.virtual.invariants import InvariantViolation
from ops.virtual.plan import LinkModel
from ops.virtual.simulation import Simulation
from tests.run_reading import Reading
from tests.sim.counting import LIMIT_S, finish, participation, run, simulation_of, tokens, told, with_one
from tests.sim.faults import absences_plan, kills
from tests.sim.fleets import steady


def test_a_calm_fleet_merges_every_token_in_rounds_that_keep_their_interval_and_have_everybody() -> None:
    """Pacing, not the link, sets H: 200 steps at H = 24 are 8 or 9 rounds per fragment, and one flush."""
    simulation = run(steady())
    books = tokens(simulation)
    assert (books["merged"], books["wasted"]) == (books["trained"], {})
    versions = Reading(simulation.aggregator.core).versions
    assert all(7 <= version <= 11 for version in versions), versions
    closed = [fields for _, _, name, fields in simulation.trace if name == "round.closed"]
    assert sum("complete: 4 of 4" in fields for fields in closed) >= 0.95 * len(closed)


@pytest.mark.full("seconds; the fast profile has an island four times slower")
def test_the_tokens_of_a_slow_island_are_merged_too() -> None:
    simulation = run(with_one(steady(3), 2, step_time_s=0.8))
    account = tokens(simulation, "island-2")
    assert account["merged"] == account["trained"] > 0
    assert participation(simulation) >= 0.9


@pytest.mark.full("seconds; the fast profile has a narrow site")
def test_an_uplink_that_is_too_slow_for_a_model_in_each_interval_is_used_and_nothing_piles_up() -> None:
    """It had three models under way, old and new beside each other, and half of its steps were stale on arrival."""
    plan = steady(2, total_tokens=60_000, fragments=4)
    model_bytes = 4 * sum(64 * (1 + i % 3) * 32 for i in range(8))
    interval_s = plan.config.sync_interval * plan.islands[0].step_time_s
    plan = with_one(plan, 0, link=LinkModel(bytes_per_s=model_bytes / interval_s / 1.5))
    most = 0
    with simulation_of(plan) as simulation:
        while not simulation.run(simulation.now_s + 0.5):
            assert simulation.now_s < LIMIT_S
            core = simulation.islands["island-0"].core
            if not getattr(core, "done", True):
                most = max(most, sum(len(fragment.outstanding) for fragment in core.fragments.values()))
        finish(simulation)
    assert most <= 2 * plan.config.fragments  # on their way, and waiting where they have arrived
    assert tokens(simulation, "island-0")["merged"] > 0.9 * tokens(simulation, "island-0")["trained"]


@pytest.mark.rotating(4)
@pytest.mark.parametrize(("deaf", "brokers"), [("island-0", 1), ("aggregator", 2)])
def test_whoever_has_a_bulk_connection_that_became_deaf_makes_another(deaf: str, brokers: int) -> None:
    plan = steady(2, total_tokens=80_000)
    simulation = run(replace(plan, brokers=brokers, deaf=((4.0, deaf),)))  # it would never end
    assert tokens(simulation)["trained"] - tokens(simulation)["merged"] <= 8_000


@pytest.mark.rotating(2)
@pytest.mark.parametrize(("process", "epoch"), [("aggregator", 3), ("broker-0", 1)])
def test_a_fleet_whose_aggregator_or_broker_dies_goes_on_where_it_was_and_loses_nothing(
    process: str, epoch: int
) -> None:
    simulation = run(replace(steady(3, total_tokens=90_000), faults=kills(process, 4.0, 9.0)))
    assert Reading(simulation.aggregator.core).epoch == epoch
    assert tokens(simulation)["merged"] == tokens(simulation)["trained"]


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("kind", "within_s"),
    [
        (FaultKind.KILL, 0.35),  # LOST_S
        (FaultKind.STOP, 2.55),  # broker_silent_s, and a heartbeat
        (FaultKind.PARTITION, 7.5),  # LEADERLESS_S, from the second heartbeat: they are patient, and miss rounds
    ],
)
def test_islands_leave_a_broker_that_fails_them_in_time_and_lose_nothing(kind: FaultKind, within_s: float) -> None:
    faults = tuple(Fault(kind=kind, targets=(f"broker-{k}",), at_s=4.0 + 10 * k, for_s=9.0) for k in (0, 1))
    simulation = run(replace(steady(2, total_tokens=80_000), brokers=2, faults=faults))
    left = told(simulation, "broker.left")
    assert {fields["broker"] for _, fields in left} == {0, 1}  # islands were spread over both, and all moved
    for at_s, fields in left:
        assert 0 < at_s - faults[fields["broker"]].at_s <= within_s
    assert tokens(simulation)["merged"] == tokens(simulation)["trained"]


def test_a_killed_island_comes_back_and_only_its_own_last_steps_are_lost() -> None:
    plan = with_one(steady(3, total_tokens=90_000), 2, crashes_at_s=(6.0,), restart_s=1.0)
    wasted = tokens(run(plan))["wasted"]
    assert set(wasted) == {"island_lost"}
    # At most one interval of H = 24 steps, and what was on its way.
    assert wasted["island_lost"] <= 30 * 100


@pytest.mark.full("some seconds for each")
@pytest.mark.parametrize("seeds", [(0, 1, 2), (3, 4, 5)])
def test_most_absences_lead_to_takeovers_and_no_batch_is_merged_twice_or_skipped(seeds: tuple[int, ...]) -> None:
    """The observer checks it: batches are trained without a gap, and merged at most once into a fragment."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        for _, _, name, fields in run(absences_plan(seed)).trace:
            seen["taken over"] += name == "block.ended" and "is away" in fields
    assert seen["taken over"] >= 1, seen


def optimizers(simulation: Simulation) -> dict[str, m.StateSource]:
    """What the inner optimizer of each island's last life started from."""
    return {island_id: island.core.optimizer for island_id, island in sorted(simulation.islands.items())}


def test_everybody_starts_fresh_and_those_that_restart_all_at_once_get_the_state_of_the_one_that_is_left() -> None:
    plan = replace(steady(4, total_tokens=120_000), donor_wait_s=20.0, checkpoints=False)
    crashing = tuple(replace(island, crashes_at_s=(6.0,)) for island in plan.islands[1:])
    with simulation_of(replace(plan, islands=(plan.islands[0], *crashing))) as simulation:
        simulation.run(4.0)
        assert list(optimizers(simulation).values()) == [m.StateSource.FRESH] * 4
        finish(simulation)
    assert list(optimizers(simulation).values()) == [m.StateSource.FRESH, *[m.StateSource.DONOR] * 3]


def test_a_violation_names_its_invariant() -> None:
    with simulation_of(steady(2)) as simulation:
        simulation.run(5.0)
        simulation.aggregator.core.run.books.ledger.life("island-0", 1).last_tokens = 0
        with pytest.raises((InvariantViolation, AssertionError), match="island-0"):
            simulation.run(10.0)
