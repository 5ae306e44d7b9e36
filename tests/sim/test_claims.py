"""Islands that claim tokens or steps that they have not trained: no run ends early by it, and they weigh no more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

import pytest

from ops.virtual.plan import IslandPlan, SimulationPlan
from ops.virtual.simulation import Simulation
from ops.virtual.work import Counting, CountingIsland
from tests.sim.test_simulation import LIMIT_S, finish, steady, told, with_one

LIAR = "island-3"
TOKENS = 100


@dataclass(slots=True)
class Boasting(CountingIsland):
    """An island that declares ``tokens_per_step``, and claims ``grows`` times more with each step."""

    grows: float = 1.0

    def train(self, own_tokens: int) -> None:
        """Claims more from step to step."""
        CountingIsland.train(self, own_tokens)
        if self.grows > 1.0:
            self.tokens_per_step = int(TOKENS * min(1000.0, self.grows**self.optimizer_steps))


@dataclass(frozen=True, slots=True)
class Boasts(Counting):
    """The work of a fleet with one island that claims other tokens per step."""

    declares: int
    grows: float

    def island(self, island_id: str, life: int) -> CountingIsland:
        """Returns the work of an island."""
        if island_id != LIAR:
            return CountingIsland(f"{island_id}/{life}", self.tensors, self.tokens_per_step)
        return Boasting(f"{island_id}/{life}", self.tensors, self.declares, grows=self.grows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurried(IslandPlan):
    """An island that claims ``times`` the steps, ``grows`` times more with each second, at the same step time."""

    times: float
    grows: float = 1.0

    def stepped_at_s(self, now_s: float, step_s: float) -> float:
        """Returns when it claims to have run a step."""
        return now_s + step_s / min(100.0, self.times * self.grows**now_s)


def run(
    plan: SimulationPlan, *, declares: int = TOKENS, grows: float = 1.0, trusted: dict[str, int] | None = None
) -> Simulation:
    plan = replace(plan, config=replace(plan.config, trusted_tokens=trusted))
    simulation = Simulation(plan, Boasts(plan.model(), TOKENS, declares, grows))
    if declares > TOKENS:  # the data are cut by the tokens of a batch, and the invariants know one size of batch
        batches = simulation.invariants._merged_data
        batches.merge = lambda *_: ""
        assert simulation.run(LIMIT_S)
        return simulation
    return finish(simulation)


def hurried(plan: SimulationPlan, times: float, grows: float = 1.0) -> SimulationPlan:
    last = plan.islands[-1]
    liar = Hurried(island_id=last.island_id, step_time_s=last.step_time_s, times=times, grows=grows)
    return replace(plan, islands=(*plan.islands[:-1], liar))


def honest_tokens(simulation: Simulation) -> int:
    return sum(island.tokens for name, island in simulation.islands.items() if name != LIAR)


def liars_share(simulation: Simulation) -> float:
    """The mean part of the token weights that the liar had in the second half of the run's versions."""
    shares = []
    for _, said in told(simulation, "version.committed"):
        weights = {each["island"]: each["token_weight"] for each in said["contributions"]}
        if len(weights) == 4:
            shares.append(weights[LIAR] / sum(weights.values()))
    assert len(shares) > 20
    return fmean(shares[len(shares) // 2 :])


PLAN = steady(total_tokens=400_000)


@pytest.fixture(scope="module")
def truth() -> int:
    """The tokens of the honest islands where the fourth is one of them."""
    simulation = run(PLAN)
    assert not told(simulation, "island.doubted")
    run_ = simulation.aggregator.core.run
    assert run_.ledger.counted_tokens() == run_.ledger.trained_tokens()
    return honest_tokens(simulation)


CLAIMS = {
    "four times the tokens": lambda: run(PLAN, declares=4 * TOKENS),
    "a thousand times the tokens": lambda: run(PLAN, declares=1000 * TOKENS),
    "more and more tokens": lambda: run(PLAN, declares=0, grows=1.05),
    "four times the steps": lambda: run(hurried(PLAN, 4.0)),
    "more and more steps": lambda: run(hurried(PLAN, 1.0, 1.05)),
    "four times the steps, and their time": lambda: run(
        with_one(steady(total_tokens=400_000, pace_spread=2.0), 3, step_time_s=0.05 / 4)
    ),
}


@pytest.mark.rotating(4)
@pytest.mark.parametrize("claim", CLAIMS)
def test_no_claim_ends_a_run_early(claim: str, truth: int) -> None:
    simulation = CLAIMS[claim]()
    doubted = told(simulation, "island.doubted")
    assert {said["island"] for _, said in doubted} == {LIAR}
    honest = honest_tokens(simulation)
    assert honest >= 0.98 * truth
    assert honest <= 1.01 * truth
    for island in simulation.islands.values():  # the schedule of an honest one is where the run is, and no further
        if island.plan.island_id != LIAR:
            assert island.core.schedule.at(island.tokens) <= 1.02 * PLAN.config.total_tokens
    assert liars_share(simulation) <= 0.5 + 1e-9
