"""Islands that misbehave, in virtual time: nothing of it gets in, nobody honest pays for it, and the books balance.

They are among the troubles of :mod:`tests.sim.test_packed`, too.
"""

from __future__ import annotations

from collections import Counter
from statistics import median

import pytest

from broker.wire.messages import Reason
from ops.faults.kinds import LIES, FaultKind
from ops.virtual.simulation import Simulation
from tests.run_reading import Reading
from tests.sim.counting import check_the_honest, participation, run, tokens, told, with_one
from tests.sim.fleets import steady


def with_rogue(manner: FaultKind, rate: float = 1.0) -> Simulation:
    """Three honest islands and a rogue."""
    return run(with_one(steady(quarantine_s=2.0, total_tokens=64_000), 3, manner=manner, misbehaves=rate))


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
    core = Reading(simulation.aggregator.core)
    assert core.members["island-3"].refusals[reason] >= 3
    assert set(core.refusals.elements()) == set(core.members["island-3"].refusals)
    for honest in ("island-0", "island-1", "island-2"):
        books = tokens(simulation, honest)
        assert books["merged"] == books["trained"], books
    names = Counter(name for _, _, name, _ in simulation.trace)
    assert names["island.quarantined"] >= 2
    assert names["round.cancelled"] == 0
    assert participation(simulation) >= 0.9  # of the islands that may take part


def test_a_quarantined_rogue_holds_nobody_up() -> None:
    """It is slow, too: without quarantine every round would wait for it."""
    plan = steady(quarantine_s=60.0, quorum=4, total_tokens=60_000)
    simulation = run(with_one(plan, 3, manner=FaultKind.SCALE, step_time_s=0.4))
    kept_out_at_s = next(at_s for at_s, _, name, _ in simulation.trace if name == "island.quarantined")
    later = [said for at_s, said in told(simulation, "version.committed") if at_s > kept_out_at_s]
    took_s = [said["took_s"] for said in later if "flush" not in str(said)]
    assert median(took_s) < 0.2, took_s


def test_an_island_that_errs_now_and_then_comes_back_and_is_merged_again() -> None:
    books = tokens(with_rogue(FaultKind.NAN, 0.05), "island-3")
    assert books["merged"] > 0.3 * books["trained"], books


@pytest.mark.rotating(5)
@pytest.mark.parametrize("manner", LIES)
def test_a_lie_within_the_bounds_of_plausibility_breaks_no_invariant_and_accuses_nobody(manner: FaultKind) -> None:
    simulation = with_rogue(manner)
    check_the_honest(simulation)
    trained, honest = (tokens(simulation, name)["trained"] for name in ("island-3", "island-0"))
    assert trained / honest == pytest.approx(LIES[manner].tokens, rel=0.1)
