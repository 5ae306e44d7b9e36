"""Islands that misbehave, in virtual time: nothing of it gets in, nobody honest pays for it, and the books balance."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from broker.wire.messages import Reason
from ops.faults import FaultKind
from ops.virtual.simulation import Simulation
from tests.sim.faults import rogue_plan
from tests.sim.test_simulation import run, steady

#: What tells a sound island from a rogue.
ACCUSATIONS = (
    Reason.NOT_FINITE,
    Reason.OUTLIER,
    Reason.QUARANTINED,
    Reason.IMPLAUSIBLE,
    Reason.WRONG_SHAPE,
    Reason.UNKNOWN_FRAGMENT,
)


def with_rogue(manner: FaultKind, rate: float = 1.0, **config: object) -> Simulation:
    """Three honest islands and a rogue."""
    plan = steady(quarantine_s=4.0, total_tokens=100_000, **config)
    rogue = replace(plan.islands[3], manner=manner, misbehaves=rate)
    return run(replace(plan, islands=(*plan.islands[:3], rogue)))


def check_the_honest(simulation: Simulation) -> None:
    """No honest island was ever accused of anything."""
    for member in simulation.aggregator.core.run.members:
        if simulation.islands[member.island_id].plan.manner is None:
            accused = {reason: n for reason, n in member.refusals.items() if reason in ACCUSATIONS}
            assert not accused, f"{member.island_id}: {accused}"
    told = [fields for _, _, name, fields in simulation.trace if name == "island.quarantined"]
    assert not [fields for fields in told if "'island': 'island-" in fields]


@pytest.mark.parametrize("seed", range(4, 7))
def test_rogues_in_a_random_run_break_no_invariant_and_nobody_honest_is_accused(seed: int) -> None:
    check_the_honest(run(rogue_plan(seed)))


@pytest.mark.parametrize(
    ("manner", "reason"),
    [
        (FaultKind.NAN, Reason.NOT_FINITE),
        (FaultKind.SCALE, Reason.OUTLIER),
        (FaultKind.REPLAY, Reason.OVERLAP),
        (FaultKind.GARBAGE, Reason.IMPLAUSIBLE),
    ],
)
def test_a_rogue_is_refused_by_reason_and_quarantined_and_the_others_lose_nothing(
    manner: FaultKind, reason: Reason
) -> None:
    simulation = with_rogue(manner)
    core = simulation.aggregator.core
    assert core.run.members["island-3"].refusals[reason] >= 3
    assert set(core.run.refusals.elements()) == set(core.run.members["island-3"].refusals)
    for honest in ("island-0", "island-1", "island-2"):
        books = core.run.ledger.books(honest).tokens()
        assert books["merged"] == books["trained"], books
    names = Counter(name for _, _, name, _ in simulation.trace)
    assert names["island.quarantined"] >= 2
    assert names["round.cancelled"] == 0
    assert (core.run.ledger.participation().participation or 0) >= 0.9  # of the islands that may take part


def test_a_quarantined_rogue_holds_nobody_up() -> None:
    """It is slow, too: without quarantine every round would wait for it."""
    plan = steady(quarantine_s=60.0, quorum=4, total_tokens=100_000)
    slow = replace(plan.islands[3], manner=FaultKind.SCALE, step_time_s=0.4)
    simulation = run(replace(plan, islands=(*plan.islands[:3], slow)))
    kept_out_at_s = next(at_s for at_s, _, name, _ in simulation.trace if name == "island.quarantined")
    commits = [
        (at_s, fields)
        for at_s, _, name, fields in simulation.trace
        if name == "version.committed" and at_s > kept_out_at_s and "flush" not in fields
    ]
    took_s = sorted(float(fields.partition("'took_s': ")[2].partition(",")[0]) for _, fields in commits)
    assert took_s[len(took_s) // 2] < 0.2, took_s


def test_an_island_that_errs_now_and_then_comes_back_and_is_merged_again() -> None:
    simulation = with_rogue(FaultKind.NAN, 0.05)
    books = simulation.aggregator.core.run.ledger.books("island-3").tokens()
    assert books["merged"] > 0.3 * books["trained"], books
