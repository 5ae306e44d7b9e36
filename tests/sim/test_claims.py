"""Islands that claim tokens or steps that they have not trained: no run ends early by it, and they weigh no more."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from ops.virtual.plan import SimulationPlan
from ops.virtual.simulation import Simulation
from tests.sim.counting import LIMIT_S, TOKENS, finish, told, with_one
from tests.sim.counting import task as counting
from tests.sim.fleets import steady

LIAR = "island-3"
TOTAL = 160_000


def run(plan: SimulationPlan, *, declares: int = TOKENS) -> Simulation:
    """Runs a plan whose last island declares that a batch has so many tokens."""
    task = counting(4)
    with Simulation(plan, lambda each: replace(task, tokens_per_step=declares) if each.name == LIAR else task) as made:
        if declares == TOKENS:
            return finish(made)
        # The data are cut by the tokens of a batch, and the invariants know one size of batch.
        made.invariants._merged_data.merge = lambda *_: ""  # type: ignore[method-assign]
        assert made.run(LIMIT_S)
    return made


def honest_tokens(simulation: Simulation) -> int:
    return sum(island.tokens for name, island in simulation.islands.items() if name != LIAR)


def liars_share(simulation: Simulation) -> float:
    """The mean part of the token weights that the liar had in the second half of the run's versions."""
    shares = []
    for _, said in told(simulation, "version.committed"):
        weights = {each["island"]: each["token_weight"] for each in said["contributions"]}
        if len(weights) == 4:
            shares.append(weights[LIAR] / sum(weights.values()))
    assert len(shares) > 10
    return fmean(shares[len(shares) // 2 :])


PLAN = steady(total_tokens=TOTAL, fragments=2, sync_interval=12)


@pytest.fixture(scope="module")
def truth() -> int:
    """The tokens of the honest islands where the fourth is one of them."""
    simulation = run(PLAN)
    assert not told(simulation, "island.doubted")
    run_ = simulation.aggregator.core.run
    assert run_.books.ledger.counted_tokens() == run_.books.ledger.trained_tokens()
    return honest_tokens(simulation)


CLAIMS = {
    "four times the tokens": lambda: run(PLAN, declares=4 * TOKENS),
    "a thousand times the tokens": lambda: run(PLAN, declares=1000 * TOKENS),
    "four times the steps": lambda: run(
        with_one(replace(PLAN, config=replace(PLAN.config, pace_spread=2.0)), 3, step_time_s=0.05 / 4)
    ),
}


@pytest.mark.rotating(4)
@pytest.mark.parametrize("claim", CLAIMS)
def test_no_claim_ends_a_run_early(claim: str, truth: int) -> None:
    simulation = CLAIMS[claim]()
    doubted = told(simulation, "island.doubted")
    assert {said["island"] for _, said in doubted} == {LIAR}
    honest = honest_tokens(simulation)
    assert honest >= 0.96 * truth
    assert honest <= 1.03 * truth
    for island in simulation.islands.values():  # the schedule of an honest one is where the run is, and no further
        if island.name != LIAR:
            assert island.core.schedule.at(island.tokens) <= 1.05 * TOTAL
    assert liars_share(simulation) <= 0.5 + 1e-9
