"""Random troubles from a seed: the plans that the simulation tests run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from aggregator.interface.config import AggregatorConfig
from ops.faults.kinds import MISBEHAVIORS, Fault, FaultKind
from ops.virtual.plan import (
    AGGREGATOR_FAULTS,
    BROKER,
    BROKER_FAULTS,
    REDIS_FAULTS,
    IslandPlan,
    LinkModel,
    SimulationPlan,
    station_names,
)
from tests.sim.counting import TOKENS


def random_plan(seed: int) -> SimulationPlan:
    """Returns a small fleet with random speeds, links, settings and faults; the same seed gives the same plan.

    Troubles (loss, duplication, disk errors, crashes) end two thirds through the run, so that what the design promises
    "in the end" can be checked at the end.
    """
    rng = random.Random(f"plan {seed}")
    num_islands = rng.randint(1, 6)
    seconds = rng.uniform(15.0, 30.0)
    calm_after_s = seconds * 2 / 3
    islands = tuple(_random_island(rng, f"island-{i}", calm_after_s) for i in range(num_islands))
    rate = sum(TOKENS / i.step_time_s for i in islands)
    fragments = rng.choice([1, 2, 4, 8])
    config = AggregatorConfig(
        islands=num_islands,
        total_tokens=int(rate * seconds),
        fragments=fragments,
        sync_interval=fragments * rng.choice([1, 2, 4]),
        quorum=rng.randint(1, num_islands),
        overlap=rng.choice([1, 2, 4]),
        round_timeout_s=rng.choice([3.0, 10.0]),
        max_staleness=rng.choice([1, 2, 8]),
        keep=rng.choice([1.0, 1.0, 1.0, 0.0, 0.5]),
        held_bytes=rng.choice([1 << 30, 1 << 30, 200_000]),
        data_ahead_s=data_ahead_s(seed),
        max_staleness_s=max_staleness_s(seed),
    )
    slowest_s = rng.choice([0.005, 0.05, 0.5])
    link = LinkModel(
        delay_s=(0.001, slowest_s),
        bytes_per_s=rng.choice([0.0, 0.0, 1e6]),
    )
    names = ("aggregator", *(island.island_id for island in islands))
    breaks = tuple((rng.uniform(0.0, calm_after_s), rng.choice(names), 0) for _ in range(rng.choice([0, 3, 20])))
    return SimulationPlan(
        seed=seed,
        islands=islands,
        config=config,
        link=link,
        persist_failure=rng.choice([0.0, 0.0, 0.1]),
        faults=(
            *kills("aggregator", *_moments(rng, 0.3, calm_after_s)),
            *kills("broker-0", *_moments(rng, 0.3, calm_after_s)),
        ),
        # Of its own seed, so that the other draws are what they were before there were donors.
        donor_wait_s=random.Random(f"donors {seed}").choice([0.0, 2.0, 20.0]),
        breaks=breaks,
        calm_after_s=calm_after_s,
    )


def data_ahead_s(seed: int) -> float:
    """Returns for how many seconds islands of the plan with that seed have data."""
    return random.Random(f"data {seed}").choice([10.0, 0.3, 1.0, 4.0])


def max_staleness_s(seed: int) -> float:
    """Returns for how long the plan with that seed takes contributions in, however many versions behind they are."""
    return random.Random(f"staleness {seed}").choice([0.0, 0.0, 2.0, 120.0])


def kills(target: str, *moments_s: float, for_s: float = 0.5) -> tuple[Fault, ...]:
    """Returns the killing of a process at some moments; another one starts a while later."""
    return tuple(Fault(kind=FaultKind.KILL, targets=(target,), at_s=at_s, for_s=for_s) for at_s in moments_s)


def several_brokers(plan: SimulationPlan) -> SimulationPlan:
    """Returns the plan with two or three brokers, and troubles of each; everything else stays as it is."""
    rng = random.Random(f"brokers {plan.seed}")
    brokers = rng.randint(2, 3)
    faults = tuple(
        Fault(
            kind=rng.choice(BROKER_FAULTS),
            targets=(f"{BROKER}{rng.randrange(brokers)}",),
            at_s=rng.uniform(0.0, plan.calm_after_s),
            for_s=min(rng.choice([0.3, 1.0, 3.0, 10.0]), plan.calm_after_s / 2),
        )
        for _ in range(rng.randint(0, 4))
    )
    return replace(plan, brokers=brokers, faults=(*plan.faults, *faults))


def standing_by(plan: SimulationPlan) -> SimulationPlan:
    """Returns the plan with one or two standby aggregators, and troubles of them and of Redis."""
    rng = random.Random(f"standbys {plan.seed}")
    standbys = rng.randint(1, 2)
    names = station_names(plan.config.shards, standbys)
    kinds: list[tuple[FaultKind, str]] = [(kind, "") for kind in (*AGGREGATOR_FAULTS, *AGGREGATOR_FAULTS)]
    kinds += [(kind, "redis") for kind in REDIS_FAULTS if kind is not FaultKind.OUTAGE]
    faults = []
    for _ in range(rng.randint(0, 6)):
        kind, target = rng.choice(kinds)
        station = names[rng.randrange(1 + standbys)]
        at_s = rng.uniform(0.0, 0.8 * plan.calm_after_s)
        for_s = min(rng.choice([0.2, 1.0, 2.5, 6.0]), 0.2 * plan.calm_after_s)
        faults.append(Fault(kind=kind, targets=(target or station,), at_s=at_s, for_s=for_s))
    config = replace(plan.config, failover=True, lease_s=rng.choice([0.5, 1.0, 2.0]))
    return replace(plan, config=config, standbys=standbys, faults=(*plan.faults, *faults))


def power_cut(plan: SimulationPlan) -> SimulationPlan:
    """Returns the plan with one or two standbys, and a moment at which all aggregators, brokers and Redis lose power.

    One of the aggregators was away for long before that, so that its store is old; all start again at the same time.
    A good store that comes later than that finds another one leading: what is promised then is another matter
    (``tests/unit/aggregator_standby/test_failover_machine.py``).
    """
    rng = random.Random(f"power {plan.seed}")
    standbys = rng.randint(1, 2)
    power = Fault(
        kind=FaultKind.OUTAGE,
        targets=("redis",),
        at_s=rng.uniform(0.6, 0.9) * plan.calm_after_s,
        for_s=rng.uniform(0.2, 2.0),
    )
    away_at_s = rng.uniform(0.1, 0.8) * power.at_s
    away = Fault(
        kind=FaultKind.KILL,
        targets=(station_names(plan.config.shards, standbys)[rng.randrange(1 + standbys)],),
        at_s=away_at_s,
        for_s=power.at_s + power.for_s - away_at_s,
    )
    return replace(
        plan,
        config=replace(plan.config, failover=True, lease_s=rng.choice([0.5, 1.0, 2.0])),
        standbys=standbys,
        faults=(away, power),
    )


def rogue_plan(seed: int) -> SimulationPlan:
    """Returns the random plan of that seed with rogues among its islands, which are fewer than the honest ones.

    An honest fleet of fewer than three islands is joined by others: two cannot tell which of them is right.
    """
    plan, rng = random_plan(seed), random.Random(f"rogues {seed}")
    honest = plan.islands
    for i in range(len(honest), 3):
        honest += (_random_island(rng, f"island-{i}", plan.calm_after_s),)
    rogues = tuple(
        replace(
            _random_island(rng, f"rogue-{i}", plan.calm_after_s),
            manner=rng.choice(MISBEHAVIORS),
            misbehaves=rng.choice([0.1, 0.5, 1.0]),
        )
        for i in range(rng.randint(1, (len(honest) - 1) // 2))
    )
    config = replace(
        plan.config,
        islands=len(honest) + len(rogues),
        held_bytes=max(300_000, plan.config.held_bytes),  # one round of them all, or nobody is let in
        total_tokens=_target(plan, (*honest, *rogues)),
        quarantine_s=rng.choice([0.0, 0.5, 2.0, 5.0]),
    )
    return replace(plan, islands=(*honest, *rogues), config=config)


def combined_plan(seed: int) -> SimulationPlan:
    """Returns a plan with one combination of all these troubles; :data:`COMBINATIONS` seeds in a row have them all."""
    make, additions = _COMBINATIONS[seed % COMBINATIONS]
    plan = make(seed)
    for add in additions:
        plan = add(plan)
    return plan


def _target(plan: SimulationPlan, islands: tuple[IslandPlan, ...]) -> int:
    """Returns the tokens that a fleet trains in the time that a random plan gives itself."""
    return int(1.5 * plan.calm_after_s * sum(TOKENS / i.step_time_s for i in islands))


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


def _random_island(rng: random.Random, island_id: str, calm_after_s: float) -> IslandPlan:
    return IslandPlan(
        island_id=island_id,
        step_time_s=rng.choice([0.02, 0.05, 0.05, 0.1, 0.8]),
        jitter=rng.choice([0.0, 0.1, 0.5]),
        joins_at_s=rng.choice([0.0, 0.0, 0.0, rng.uniform(0.0, calm_after_s)]),
        crashes_at_s=_moments(rng, 0.3, calm_after_s),
        restart_s=rng.choice([0.2, 1.0, 8.0]),
        leaves_at_s=rng.uniform(0.0, calm_after_s) if rng.random() < 0.1 and island_id != "island-0" else None,
    )


def _moments(rng: random.Random, chance: float, end_s: float) -> tuple[float, ...]:
    if rng.random() >= chance:
        return ()
    return tuple(sorted(rng.uniform(0.0, end_s) for _ in range(rng.randint(1, 3))))


_COMBINATIONS: tuple[
    tuple[Callable[[int], SimulationPlan], tuple[Callable[[SimulationPlan], SimulationPlan], ...]], ...
]
_COMBINATIONS = (
    (random_plan, (standing_by, several_brokers)),
    (random_plan, ()),
    (random_plan, (several_brokers,)),
    (random_plan, (standing_by,)),
    (rogue_plan, ()),
    (rogue_plan, (several_brokers,)),
    (rogue_plan, (standing_by,)),
    (absences_plan, (standing_by,)),
    (absences_plan, (several_brokers,)),
    (rogue_plan, (standing_by, several_brokers)),
    (absences_plan, (standing_by, several_brokers)),
)
#: How many combinations :func:`combined_plan` makes.
COMBINATIONS = len(_COMBINATIONS)
