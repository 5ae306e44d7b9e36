"""Small runs with many troubles in a few seconds.

Steps are slow and waits are short here, so that a dozen rounds, several failures and their repair fit into about two
thousand events. What only shows after minutes, or in a larger fleet, is left to the long plans.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from aggregator.interface.config import AggregatorConfig
from broker.wire.fragments import shard_of
from ops.faults.kinds import MISBEHAVIORS, Fault
from ops.virtual.plan import (
    AGGREGATOR_FAULTS,
    BROKER,
    BROKER_FAULTS,
    REDIS,
    REDIS_FAULTS,
    CrashPoint,
    Cut,
    IslandPlan,
    Link,
    LinkModel,
    Point,
    SimulationPlan,
    Way,
    station_names,
)
from ops.virtual.queue import ClockTrouble
from ops.virtual.simulation import Simulation
from tests.sim.counting import LIMIT_S, TOKENS, check_the_honest, run, simulation_of
from tests.sim.faults import data_ahead_s, max_staleness_s

#: Most that a process says or writes in one small run: numbers of crash points are drawn up to these, small ones first.
MOST_SENDS, MOST_WRITES = 200, 40


@dataclass(frozen=True, slots=True)
class _Draw:
    """A plan on its way, and the random numbers for what is added to it."""

    rng: random.Random
    plan: SimulationPlan

    def moment_s(self) -> float:
        """Any time at which troubles may begin."""
        return self.rng.uniform(0.0, self.plan.calm_after_s)

    @property
    def stations(self) -> tuple[str, ...]:
        """Names of the aggregators."""
        return station_names(self.plan.config.shards, self.plan.standbys)

    @property
    def islands(self) -> tuple[str, ...]:
        """Names of the islands."""
        return tuple(island.island_id for island in self.plan.islands)

    @property
    def processes(self) -> tuple[str, ...]:
        """Names of everything that may crash."""
        return (*self.stations, *self.islands, *(f"{BROKER}{i}" for i in range(self.plan.brokers)))

    def with_island(self, **changes: object) -> SimulationPlan:
        """Changes one of the islands."""
        at = self.rng.randrange(len(self.plan.islands))
        islands = list(self.plan.islands)
        islands[at] = replace(islands[at], **changes)  # type: ignore[arg-type]
        return replace(self.plan, islands=tuple(islands))


def packed_plan(seed: int) -> SimulationPlan:
    """Returns a fleet of one to three islands with two to five troubles of any kind; the same seed, the same plan."""
    rng = random.Random(f"packed {seed}")
    plan = _calm(rng, seed)
    if seed % 4 == 3:
        plan = _in_two_shards(plan)
    for trouble in rng.choices(TROUBLES, k=rng.randint(2, 5)):
        plan = trouble(_Draw(rng, plan))
    return _beside_the_honest(plan) if any(island.manner for island in plan.islands) else plan


def _in_two_shards(plan: SimulationPlan) -> SimulationPlan:
    config = plan.config
    fragments = max(2, config.fragments)
    config = replace(config, shards=2, fragments=fragments, sync_interval=max(fragments, config.sync_interval))
    return replace(plan, config=config)


def _beside_the_honest(plan: SimulationPlan) -> SimulationPlan:
    """Lets a rogue come last, and the honest stay: where it alone is heard it is the fleet, and nothing can tell."""
    honest = {island.island_id for island in plan.islands if island.manner is None}
    islands = tuple(
        IslandPlan(island_id=island.island_id, step_time_s=island.step_time_s, jitter=island.jitter)
        if island.island_id in honest
        else replace(island, joins_at_s=max(3.0, island.joins_at_s), joins_last=True)
        for island in plan.islands
    )
    return replace(
        plan,
        islands=islands,
        config=replace(plan.config, suspect_after_s=2.0, dead_after_s=6.0),
        cuts=tuple(cut for cut in plan.cuts if cut.link.process not in honest),
        clocks=(),
        crash_points=tuple(crash for crash in plan.crash_points if crash.process not in honest),
    )


def short_plan(seed: int = 0, steps: int = 14) -> SimulationPlan:
    """Returns a run so short that it can be repeated with a crash at everything that any process says or writes.

    Args:
        seed: Of the delays.
        steps: After which it ends, of both islands together; they take 0.4 s each.
    """
    config = AggregatorConfig(
        islands=2,
        total_tokens=steps * TOKENS,
        fragments=1,
        sync_interval=2,
        round_timeout_s=2.0,
        suspect_after_s=1.0,
        dead_after_s=1.5,
        share_takeover_s=2.0,
        data_ahead_s=2.0,
        failover=True,
        lease_s=1.0,
    )
    return SimulationPlan(
        seed=seed,
        islands=tuple(IslandPlan(island_id=f"island-{i}", step_time_s=0.4) for i in range(2)),
        config=config,
        link=LinkModel(delay_s=(0.001, 0.02)),
        standbys=1,
        brokers=1,
        calm_after_s=6.0,
    )


def _calm(rng: random.Random, seed: int) -> SimulationPlan:
    """A fleet before its troubles: its size, its pace, its waits."""
    count = rng.choice([1, 2, 2, 3])
    islands = tuple(
        IslandPlan(island_id=f"island-{i}", step_time_s=rng.choice([0.1, 0.2, 0.2, 0.4]), jitter=rng.choice([0.0, 0.3]))
        for i in range(count)
    )
    seconds = rng.uniform(5.0, 10.0)
    fragments = rng.choice([1, 1, 2, 3])
    standbys = rng.choice([0, 1, 1, 2])
    config = AggregatorConfig(
        islands=count,
        total_tokens=int(sum(TOKENS / i.step_time_s for i in islands) * seconds),
        fragments=fragments,
        sync_interval=fragments * rng.choice([2, 3, 4]),
        quorum=rng.randint(1, count),
        overlap=rng.choice([1, 2]),
        round_timeout_s=rng.choice([2.0, 5.0]),
        max_staleness=rng.choice([1, 2, 8]),
        keep=rng.choice([1.0, 1.0, 0.0, 0.5]),
        held_bytes=rng.choice([1 << 30, 1 << 30, 200_000]),
        suspect_after_s=1.0,
        dead_after_s=1.5,
        share_takeover_s=rng.choice([2.0, 120.0]),
        data_ahead_s=data_ahead_s(seed),
        max_staleness_s=max_staleness_s(seed),
        failover=standbys > 0,
        lease_s=rng.choice([1.0, 2.0]),
    )
    return SimulationPlan(
        seed=seed,
        islands=islands,
        config=config,
        link=LinkModel(delay_s=(0.001, rng.choice([0.005, 0.05, 0.2]))),
        standbys=standbys,
        brokers=rng.choice([1, 1, 2]),
        donor_wait_s=rng.choice([0.0, 2.0]),
        restart_s=rng.choice([0.1, 0.5, 2.0]),
        calm_after_s=0.8 * seconds,
    )


def links(processes: Iterable[str], stations: Iterable[str], brokers: int) -> tuple[Link, ...]:
    """Returns every link of a run: of each process to each broker, and of each of its ``stations`` to Redis."""
    every = [Link(process=process, broker=broker) for process in processes for broker in range(brokers)]
    return (*every, *(Link(process=station, broker=REDIS) for station in stations))


def swizzled(
    rng: random.Random, chosen: Sequence[Link], begin_s: float, end_s: float, ways: Sequence[Way] = tuple(Way)
) -> tuple[Cut, ...]:
    """Cuts links in a random order in the first half of a period, and restores them in another in the second half."""
    middle_s = (begin_s + end_s) / 2
    cuts = (
        (link, rng.uniform(begin_s, middle_s), rng.uniform(middle_s, end_s), rng.choice(ways))
        for link in rng.sample(chosen, len(chosen))
    )
    return tuple(
        Cut(link=link, at_s=from_s, for_s=to_s - from_s, way=Way.BOTH if link.broker == REDIS else way)
        for link, from_s, to_s, way in cuts
    )


# --- troubles: each adds one to a plan ----------------------------------------------------------------------------


def _bad_links(draw: _Draw) -> SimulationPlan:
    """Connections end, and what was on its way is lost: to islands now and then, or to everybody often."""
    names, times = ((*draw.islands, *draw.stations), 12) if draw.rng.random() < 0.5 else (draw.islands, 2)
    breaks = ((draw.moment_s(), draw.rng.choice(names), draw.rng.randrange(draw.plan.brokers)) for _ in range(times))
    return replace(draw.plan, breaks=(*draw.plan.breaks, *breaks))


def _slow_threads(draw: _Draw) -> SimulationPlan:
    return replace(draw.plan, job_s=draw.rng.choice([(1e-3, 0.1), (1e-3, 0.5)]))


def _memory_fails(draw: _Draw) -> SimulationPlan:
    at_s = (draw.rng.uniform(0.5, 4.0),)
    return draw.with_island(corrupt_at_s=at_s) if draw.rng.random() < 0.5 else draw.with_island(spoilt_at_s=at_s)


def _island_dies(draw: _Draw) -> SimulationPlan:
    return draw.with_island(crashes_at_s=(draw.moment_s(),), restart_s=draw.rng.choice([0.1, 1.0, 3.0]))


def _island_has_a_twin(draw: _Draw) -> SimulationPlan:
    return draw.with_island(twins_at_s=(draw.moment_s(),), restart_s=draw.rng.choice([0.1, 1.0]))


def _island_is_away(draw: _Draw) -> SimulationPlan:
    away = ((draw.moment_s() / 2, draw.rng.choice([0.5, 2.0, 3.0])),)  # back before the run ends
    return draw.with_island(outages=away) if draw.rng.random() < 0.5 else draw.with_island(pauses=away)


def _island_comes_or_goes(draw: _Draw) -> SimulationPlan:
    if len(draw.plan.islands) == 1:
        return draw.with_island(joins_at_s=draw.moment_s())
    at_s, last = draw.moment_s(), draw.plan.islands[-1]
    last = replace(last, joins_at_s=at_s) if draw.rng.random() < 0.5 else replace(last, leaves_at_s=at_s)
    return replace(draw.plan, islands=(*draw.plan.islands[:-1], last))


def _rogue(draw: _Draw) -> SimulationPlan:
    """Only beside two honest islands: one alone cannot tell."""
    honest = [island for island in draw.plan.islands if island.manner is None]
    if len(honest) < 3:
        return _point_blank(draw)
    rogue = replace(
        draw.plan.islands[-1],
        island_id="rogue-0",
        manner=draw.rng.choice(MISBEHAVIORS),
        misbehaves=draw.rng.choice([0.3, 1.0]),
    )
    config = replace(draw.plan.config, quarantine_s=draw.rng.choice([0.0, 0.5, 2.0]))
    return replace(draw.plan, islands=(*draw.plan.islands[:-1], rogue), config=config)


def _station_fails(draw: _Draw) -> SimulationPlan:
    fault = Fault(
        kind=draw.rng.choice(AGGREGATOR_FAULTS),
        targets=(draw.stations[draw.rng.randrange(len(draw.stations))],),
        at_s=draw.moment_s(),
        for_s=draw.rng.choice([0.2, 1.0, 2.5]),
    )
    return replace(draw.plan, faults=(*draw.plan.faults, fault))


def _redis_fails(draw: _Draw) -> SimulationPlan:
    fault = Fault(
        kind=draw.rng.choice(REDIS_FAULTS),
        targets=("redis",),
        at_s=draw.moment_s(),
        for_s=draw.rng.choice([0.2, 1.0]),
    )
    return replace(draw.plan, faults=(*draw.plan.faults, fault))


def _broker_fails(draw: _Draw) -> SimulationPlan:
    fault = Fault(
        kind=draw.rng.choice(BROKER_FAULTS),
        targets=(f"{BROKER}{draw.rng.randrange(draw.plan.brokers)}",),
        at_s=draw.moment_s(),
        for_s=draw.rng.choice([0.2, 1.0, 3.0]),
    )
    return replace(draw.plan, faults=(*draw.plan.faults, fault))


def _full_disk(draw: _Draw) -> SimulationPlan:
    return replace(draw.plan, persist_failure=draw.rng.choice([0.1, 0.4]))


def _point_blank(draw: _Draw) -> SimulationPlan:
    """A crash at something that a process says or writes."""
    process = draw.rng.choice(draw.processes)
    writes = process in draw.stations and draw.rng.random() < 0.6
    crash = CrashPoint(
        process=process,
        point=draw.rng.choice([Point.PERSIST, Point.PERSISTED]) if writes else Point.SEND,
        number=1 + int((MOST_WRITES if writes else MOST_SENDS) * draw.rng.random() ** 2),
        restart_s=draw.rng.choice([0.05, 0.5, 2.0]),
    )
    return replace(draw.plan, crash_points=(*draw.plan.crash_points, crash))


def _swizzle(draw: _Draw) -> SimulationPlan:
    every = links((*draw.stations, *draw.islands), draw.stations if draw.plan.standbys else (), draw.plan.brokers)
    chosen = [link for link in every if draw.rng.random() < 0.5]
    begin_s = draw.moment_s() / 2
    end_s = begin_s + draw.rng.choice([1.0, 3.0, draw.plan.calm_after_s / 2])
    return replace(draw.plan, cuts=(*draw.plan.cuts, *swizzled(draw.rng, chosen, begin_s, end_s)))


def _wrong_clock(draw: _Draw) -> SimulationPlan:
    rng = draw.rng
    process, at_s = rng.choice((*draw.processes, "redis")), draw.moment_s()
    match rng.choice(["jumps", "drifts", "stops"]):
        case "jumps":
            trouble = ClockTrouble(process=process, at_s=at_s, jump_s=rng.choice([-3.0, -0.5, 0.5, 3.0, 3600.0]))
        case "drifts":
            trouble = ClockTrouble(process=process, at_s=at_s, for_s=6.0, rate=rng.choice([0.5, 0.9, 1.1, 2.0]))
        case _:
            trouble = ClockTrouble(process=process, at_s=at_s, for_s=rng.choice([0.5, 3.0]), rate=0.0)
    return replace(draw.plan, clocks=(*draw.plan.clocks, trouble))


TROUBLES: tuple[Callable[[_Draw], SimulationPlan], ...] = (
    _bad_links,
    _memory_fails,
    _slow_threads,
    _island_dies,
    _island_has_a_twin,
    _island_is_away,
    _island_comes_or_goes,
    _rogue,
    _station_fails,
    _station_fails,
    _redis_fails,
    _broker_fails,
    _full_disk,
    _point_blank,
    _point_blank,
    _point_blank,
    _swizzle,
    _swizzle,
    _wrong_clock,
    _wrong_clock,
)


# --- seeds --------------------------------------------------------------------------------------------------------


def check(seed: int) -> Simulation:
    """Runs a seed to its end; what fails names it."""
    try:
        simulation = run(packed_plan(seed))
        check_the_honest(simulation)
        check_that_shards_agree(simulation)
    except AssertionError as err:
        raise AssertionError(f"seed {seed}: {err}") from err
    return simulation


def check_that_shards_agree(simulation: Simulation) -> None:
    """Every shard has the same lives, from the same step on, and the same data; and its own fragments alone."""
    cores = [simulation.leaders[n].core.run for n in range(simulation.plan.config.shards)]
    lives = [{m.island_id: (m.incarnation, m.start, m.begun) for m in core.fleet.members} for core in cores]
    assert all(each == lives[0] for each in lives), lives
    assert all(core.books.data.tenures() == cores[0].books.data.tenures() for core in cores)
    assert all({shard_of(p, len(cores)) for p in core.model.fragments} == {n} for n, core in enumerate(cores))


def story(seed: int) -> str:
    """Returns every turn of every process, and every decision, of a seed."""
    turns: list[str] = []
    with simulation_of(packed_plan(seed)) as simulation:
        simulation.virtual.on_turn = lambda *turn: turns.append(str(turn))
        simulation.run(LIMIT_S)
        return "\n".join([*turns, *map(str, simulation.trace)])


if __name__ == "__main__":
    logging.disable()
    if sys.argv[1] == "--story":
        print(story(int(sys.argv[2])))
    else:
        for number in range(int(sys.argv[1]), int(sys.argv[-1]) + 1):
            check(number)
