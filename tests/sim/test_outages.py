"""A link that is cut for seconds at a fast pace: what its island trained meanwhile is merged, by its staleness."""

from __future__ import annotations

from collections import Counter

import pytest

from aggregator.interface.config import AggregatorConfig
from broker.wire.messages import Merged
from ops.virtual.plan import IslandPlan, LinkModel, SimulationPlan
from ops.virtual.simulation import Simulation
from tests.sim.counting import TOKENS, run, tokens

STEP_S, CUT_AT_S = 0.04, 4.0


def cut(for_s: float, *, islands: int = 2, **settings: float) -> tuple[Simulation, Counter[str], list[Merged]]:
    """Returns a run in which one of the islands is cut off, what it wasted, and what was merged.

    A version of a fragment comes every half second.
    """
    plans = [IslandPlan(island_id="cut-off", step_time_s=STEP_S, outages=((CUT_AT_S, for_s),))]
    plans += [IslandPlan(island_id=f"island-{i}", step_time_s=STEP_S) for i in range(1, islands)]
    config = AggregatorConfig(
        islands=islands,
        total_tokens=int((for_s + 12.0) / STEP_S * TOKENS * islands),
        fragments=2,
        sync_interval=12,
        max_staleness_s=settings.get("max_staleness_s", AggregatorConfig().max_staleness_s),
    )
    simulation = run(SimulationPlan(seed=0, islands=tuple(plans), config=config, link=LinkModel(delay_s=(0.001, 0.01))))
    wasted = Counter({str(cause): count for cause, count in tokens(simulation)["wasted"].items() if count})
    commits = sorted((c for p in range(2) for c in simulation.invariants.commits(p)), key=lambda c: c.fragment_version)
    return simulation, wasted, [each for commit in commits for each in commit.contributions]


def test_what_comes_late_weighs_by_its_staleness_and_nothing_is_lost() -> None:
    _, wasted, merged = cut(12.0, islands=3)
    assert not wasted
    late = [each for each in merged if each.steps.steps > 150]
    assert {each.island_id for each in late} == {"cut-off"}
    assert len(late) == 2  # one for each fragment
    for each in late:
        assert each.staleness > 15
        assert each.staleness_weight == pytest.approx((1 + each.staleness) ** -0.5)
        assert each.merge_weight < 0.15  # no more than half of the tokens' weight, and a fourth of that
    assert max(each.staleness for each in merged[-12:]) < 2  # by the end it takes part as before


@pytest.mark.rotating(2)
@pytest.mark.parametrize("most_s", [0.0, 8.0])
def test_what_is_older_than_the_limit_is_refused_and_the_island_goes_on(most_s: float) -> None:
    """With a limit of 0 s the number of versions alone counts."""
    simulation, wasted, _ = cut(12.0, max_staleness_s=most_s)
    assert wasted.total() > 12.0 / STEP_S * TOKENS * 0.9
    assert tokens(simulation, "cut-off")["merged"] > 8.0 / STEP_S * TOKENS
