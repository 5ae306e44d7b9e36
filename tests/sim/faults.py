"""Random troubles from a seed, for the plans that simulated runs have."""

from __future__ import annotations

import random
from dataclasses import replace

from aggregator.interface.config import AggregatorConfig
from ops.faults.kinds import Fault, FaultKind
from ops.virtual.plan import (
    IslandPlan,
    LinkModel,
    SimulationPlan,
)
from tests.sim.counting import TOKENS


def data_ahead_s(seed: int) -> float:
    """Returns for how many seconds islands of the plan with that seed have data."""
    return random.Random(f"data {seed}").choice([10.0, 0.3, 1.0, 4.0])


def max_staleness_s(seed: int) -> float:
    """Returns for how long the plan with that seed takes contributions in, however many versions behind they are."""
    return random.Random(f"staleness {seed}").choice([0.0, 0.0, 2.0, 120.0])


def kills(target: str, *moments_s: float, for_s: float = 0.5) -> tuple[Fault, ...]:
    """Returns the killing of a process at some moments; another one starts a while later."""
    return tuple(Fault(kind=FaultKind.KILL, targets=(target,), at_s=at_s, for_s=for_s) for at_s in moments_s)


def absences_plan(seed: int) -> SimulationPlan:
    """Returns a small fleet whose islands die, are cut off, freeze and leave for longer than their data waits for them.

    So every run has takeovers, of islands that noticed nothing among them. The aggregator and the broker
    die too, and messages get lost.
    """
    rng = random.Random(f"absences {seed}")
    num_islands, seconds, takeover_s = rng.randint(2, 5), 40.0, 3.0
    islands = []
    for i in range(num_islands):
        island = IslandPlan(island_id=f"island-{i}", step_time_s=rng.choice([0.05, 0.1, 0.2]))
        away = rng.uniform(2.0, 15.0), rng.uniform(1.0, 12.0)
        match rng.choice(["stays", "dies", "dies", "cut off", "cut off", "frozen", "leaves", "late"]):
            case "dies":
                island = replace(island, crashes_at_s=(away[0],), restart_s=away[1])
            case "cut off":
                island = replace(island, outages=(away,))
            case "frozen":
                island = replace(island, pauses=(away,))
            case "leaves" if i:
                island = replace(island, leaves_at_s=away[0])
            case "late" if i:
                island = replace(island, joins_at_s=away[0])
            case _:
                pass
        islands.append(island)
    config = AggregatorConfig(
        islands=max(1, num_islands + rng.choice([-1, 0, 0, 1])),
        total_tokens=int(sum(TOKENS / i.step_time_s for i in islands) * seconds / 2),
        fragments=rng.choice([1, 3]),
        sync_interval=6,
        share_takeover_s=takeover_s,
        suspect_after_s=1.5,
        dead_after_s=2.0,
        round_timeout_s=5.0,
        keep=rng.choice([1.0, 1.0, 0.0]),
        data_ahead_s=data_ahead_s(seed),
        max_staleness_s=max_staleness_s(seed),
    )
    return SimulationPlan(
        seed=seed,
        islands=tuple(islands),
        config=config,
        link=LinkModel(delay_s=(0.001, 0.05)),
        faults=(*kills("aggregator", *_moments(rng, 0.4, 20.0)), *kills("broker-0", *_moments(rng, 0.2, 20.0))),
        calm_after_s=28.0,
    )


def _moments(rng: random.Random, chance: float, end_s: float) -> tuple[float, ...]:
    if rng.random() >= chance:
        return ()
    return tuple(sorted(rng.uniform(0.0, end_s) for _ in range(rng.randint(1, 3))))
