"""A link that is cut for seconds at a fast pace: what its island trained meanwhile is merged, by its staleness."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Commit
from broker.wire.messages import Merged
from ops.virtual import failover
from ops.virtual.aggregator import SimAggregator
from ops.virtual.plan import IslandPlan, SimulationPlan
from ops.virtual.queue import LinkModel
from ops.virtual.simulation import Simulation
from tests.run_reading import Reading

STEP_S, CUT_AT_S, TOKENS = 0.02, 6.0, 100


class Keeping(SimAggregator):
    """Keeps what was merged."""

    merged: ClassVar[list[Merged]] = []

    def persist(self, commit: Commit) -> None:
        self.merged += commit.contributions
        super().persist(commit)


@pytest.fixture(autouse=True)
def merged(monkeypatch: pytest.MonkeyPatch) -> list[Merged]:
    """What the island that is cut off has in the versions of a run."""
    monkeypatch.setattr(failover, "SimAggregator", Keeping)
    monkeypatch.setattr(Keeping, "merged", [])
    return Keeping.merged


def cut(for_s: float, *, islands: int = 2, seed: int = 0, **settings: float) -> tuple[Simulation, Counter[str]]:
    """Returns a run in which one of the islands is cut off, and what it wasted; a version comes every half second."""
    plans = [IslandPlan(island_id="cut-off", step_time_s=STEP_S, outages=((CUT_AT_S, for_s),))]
    plans += [IslandPlan(island_id=f"island-{i}", step_time_s=STEP_S) for i in range(1, islands)]
    config = AggregatorConfig(
        islands=islands,
        total_tokens=int((for_s + 14.0) / STEP_S * TOKENS * islands),
        fragments=2,
        sync_interval=24,
        max_staleness_s=settings.get("max_staleness_s", AggregatorConfig().max_staleness_s),
    )
    link = LinkModel(delay_s=(0.001, 0.01))
    simulation = Simulation(SimulationPlan(seed=seed, islands=tuple(plans), config=config, link=link))
    assert simulation.run(2000.0)
    tokens = Reading(simulation.aggregator.core).tokens()
    return simulation, Counter({str(cause): count for cause, count in tokens["wasted"].items() if count})


@pytest.mark.parametrize(("for_s", "islands"), [(5.0, 3), (15.0, 2)])
def test_an_island_that_was_cut_off_loses_nothing(for_s: float, islands: int, merged: list[Merged]) -> None:
    _, wasted = cut(for_s, islands=islands)
    assert not wasted
    assert max(each.staleness for each in merged) > 8
    assert max(each.staleness for each in merged[-4 * islands :]) < 2  # by the end it takes part as before


def test_by_versions_alone_all_that_it_trained_meanwhile_is_refused() -> None:
    _, wasted = cut(15.0, max_staleness_s=0.0)
    assert wasted.total() > 15.0 / STEP_S * TOKENS * 0.95


def test_what_is_older_than_the_limit_in_seconds_is_refused_and_the_island_goes_on() -> None:
    simulation, wasted = cut(15.0, max_staleness_s=10.0)
    assert wasted.total() > 15.0 / STEP_S * TOKENS * 0.95
    books = Reading(simulation.aggregator.core).tokens("cut-off")
    assert books["merged"] > 10.0 / STEP_S * TOKENS


def test_what_comes_so_late_weighs_by_its_staleness(merged: list[Merged]) -> None:
    cut(15.0, islands=3)
    late = [each for each in merged if each.steps.steps > 200]
    assert {each.island_id for each in late} == {"cut-off"}
    assert len(late) == 2  # one for each fragment
    for each in late:
        assert each.staleness > 20
        assert each.staleness_weight == pytest.approx((1 + each.staleness) ** -0.5)
        assert each.merge_weight < 0.12  # no more than half of the tokens' weight, and a fifth of that
