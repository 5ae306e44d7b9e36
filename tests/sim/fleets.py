"""Plans of calm fleets."""

from __future__ import annotations

from aggregator.interface.config import AggregatorConfig
from ops.virtual.plan import IslandPlan, SimulationPlan


def steady(num_islands: int = 4, **config: object) -> SimulationPlan:
    """A calm fleet of equal islands."""
    islands = tuple(IslandPlan(island_id=f"island-{i}", step_time_s=0.05) for i in range(num_islands))
    settings = {"islands": num_islands, "total_tokens": 20_000 * num_islands, **config}
    return SimulationPlan(seed=1, islands=islands, config=AggregatorConfig(**settings))  # type: ignore[arg-type]
