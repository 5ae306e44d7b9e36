"""The plan of a fleet: bandwidth, utilisation, time, staleness, memory, tokens and cost. Pure.

:func:`plan` answers for one mode and sets the others beside it; :mod:`ops.planning.choosing` goes the other way, from
links to settings. :func:`utilisation_curve` gives arrays for plots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from broker.errors import ConfigError
from broker.fragments import shard_of
from ops.planning.arrival import Arrival, arrival
from ops.planning.choosing import Choice, at_least, choose
from ops.planning.fleet import (
    GIVE_ACCELERATORS,
    Fleet,
    check_overlap,
    fragments_of,
    load_of,
    lower_median,
    merging_steps,
    payload_of,
)
from ops.planning.footprint import (
    Memory,
    Payload,
    aggregator_memory,
    broker_memory,
    island_host_memory,
    trainer_memory,
    wire_of,
)
from ops.planning.links import Assume, Load, Mode, achieved, carried_bytes, journey_s, made_s, required
from ops.planning.utilisation import Float64Array

DAY_S = 86_400.0

#: Of all steps, as a share of the oldest one's age: measured as the rest of :mod:`ops.planning.arrival` was.
MEAN_AGE = 0.7

#: Boundaries a contribution and a version wait for, half a step each on average.
BOUNDARY_STEPS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """In the currency of the prices; ``per_billion_tokens`` is None where failures leave no tokens."""

    accelerators_per_day: float | None
    traffic_per_day: float | None
    per_day: float
    per_billion_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What one mode needs and does.

    Attributes:
        up_gbps: Needed by each site, out of it.
        down_gbps: Needed by each site, into it.
        broker_up_gbps: Needed by the broker, out of it: what all sites receive. 0 for a ring.
        broker_down_gbps: Needed by the broker, into it.
        exact_gbps: The larger one of a site before it was moved to a grid.
        beyond: Why no bandwidth is enough for what was asked for, in a sentence, or empty; what is needed is for what
            the links can give then.
        fits: Whether the links are wide enough; None where some are not known and the others are.
        link_gbps: Of the narrowest one, a share of the broker's if that is less; None where ``fits`` is.
        utilisation: Share of the time that accelerators compute: on the links if they are known, else as asked for;
            less where islands wait for slower ones.
        round_s: From the opening of a round until its version has arrived.
        rounds_apart_s: Between two rounds.
        sync_interval_steps: H as it comes out: longer than asked for where the aggregator is too slow for it, or the
            median site's link.
        arrivals: What of each site's work arrives, and how old.
        rounds_open: On average.
        staleness: Expected, in versions.
        round_up_bytes: One site's whose link is wide enough, mean of a round (for dp of a step).
        round_down_bytes: The same, into it.
        traffic_gb_per_day: Bytes that leave a site, all sites and the broker together.
        tokens_per_day: Merged ones, failures included where goodput is known.
        goodput: 0 to 1, None where it is not known.
    """

    mode: Mode
    up_gbps: float
    down_gbps: float
    broker_up_gbps: float
    broker_down_gbps: float
    exact_gbps: float
    beyond: str
    fits: bool | None
    link_gbps: float | None
    utilisation: float
    round_s: float
    rounds_apart_s: float
    sync_interval_steps: float
    arrivals: tuple[Arrival, ...]
    rounds_open: float
    staleness: float
    round_up_bytes: float
    round_down_bytes: float
    traffic_gb_per_day: float
    tokens_per_day: float
    goodput: float | None
    cost: Cost | None


def forecast(fleet: Fleet, mode: Mode) -> Forecast:
    """Returns what one mode needs and does.

    Raises:
        ConfigError: No bandwidth is enough, and what there is, is not known; or tau is too long for streaming.
    """
    if mode is Mode.STREAMING:
        check_overlap(fleet)
    load, islands = load_of(fleet, mode), len(fleet.sites)
    gbps = fleet.narrowest_gbps(hub=not load.ring)
    beyond = ""
    try:
        need = required(load, fleet.utilisation)
    except ConfigError as err:
        if gbps is None or mode is Mode.DECOUPLED:
            raise
        beyond = err.cure
        need = required(load, achieved(load, gbps) * (1 - 1e-9))
    fits = None if gbps is None else not beyond and gbps >= need.exact_gbps * (1 - 1e-9)
    if fits and not fleet.links_known:
        gbps = fits = None
    utilisation = fleet.utilisation if gbps is None else achieved(load, gbps)
    if mode is Mode.DECOUPLED or load.alone:
        utilisation = 1.0
    paced = gbps  # the link that rounds wait for
    if mode is Mode.DECOUPLED and gbps is not None:
        median = lower_median(fleet.site_gbps(hub=True))
        paced = median if math.isfinite(median) else None
    up_gbps, down_gbps = (need.up_gbps, need.down_gbps) if paced is None else (paced, paced)
    round_s = journey_s(load, up_gbps, down_gbps)
    interval, open_rounds, staleness = float(load.sync_interval_steps), 0.0, 0.0
    arrivals = (Arrival(1.0, 1.0, 0.0, 1.0),) * islands
    if mode is Mode.DECOUPLED:
        least_steps = max(load.sync_interval_steps, merging_steps(fleet))
        enough_gbps = required(replace(load, sync_interval_steps=least_steps), fleet.utilisation).exact_gbps
        if paced is not None and paced >= enough_gbps * (1 - 1e-9):
            paced = None
        round_made_s = made_s(load, up_gbps, down_gbps)
        interval, staleness = _stretched(load, paced, round_s, round_made_s, least_steps)
        arrivals = tuple(
            _arrival(load, interval, gbps, 2 * site.latency_s)
            for site, gbps in zip(fleet.sites, fleet.site_gbps(hub=True), strict=True)
        )
        # Where what goes up stretches H, the way down is no part of a round: a fragment has one at a time.
        open_rounds = load.wire.rounds * min(1.0, round_s / (interval * load.step_s))
    elif mode is Mode.STREAMING:
        staleness = load.overlap_steps / load.sync_interval_steps
        open_rounds = min(load.wire.rounds, load.wire.rounds * round_s / load.interval_s)
    elif mode is Mode.DILOCO:
        open_rounds = 1.0
    waiting = 1.0 if mode is Mode.DECOUPLED else utilisation
    up, down = (each * load.sync_interval_steps / interval for each in carried_bytes(load))
    steps_per_day = DAY_S * waiting / load.step_s
    hub = not load.ring
    up *= sum(each.participation for each in arrivals)
    down *= sum(each.received for each in arrivals) if hub else 0.0
    traffic = (up + down) * steps_per_day / 1e9
    goodput = fleet.goodput.get(mode)
    paces = [site.tokens_per_step / (site.step_s if mode is Mode.DECOUPLED else load.step_s) for site in fleet.sites]
    counting = sum(pace * each.in_time for pace, each in zip(paces, arrivals, strict=True))
    tokens = counting * DAY_S * waiting * (1.0 if goodput is None else goodput)
    per_round = load.sync_interval_steps / load.wire.rounds
    own_up, own_down = carried_bytes(load)
    return Forecast(
        mode=mode,
        up_gbps=need.up_gbps,
        down_gbps=need.down_gbps,
        broker_up_gbps=islands * need.down_gbps if hub else 0.0,
        broker_down_gbps=islands * need.up_gbps if hub else 0.0,
        exact_gbps=need.exact_gbps,
        beyond=beyond,
        fits=fits,
        link_gbps=gbps,
        utilisation=utilisation * _computing_together(fleet, mode),
        round_s=round_s,
        rounds_apart_s=interval * load.step_s / load.wire.rounds / waiting,
        sync_interval_steps=interval,
        arrivals=arrivals,
        rounds_open=open_rounds,
        staleness=staleness,
        round_up_bytes=own_up * per_round,
        round_down_bytes=own_down * per_round,
        traffic_gb_per_day=traffic,
        tokens_per_day=tokens,
        goodput=goodput,
        cost=_cost(fleet, traffic, tokens),
    )


def _computing_together(fleet: Fleet, mode: Mode) -> float:
    """Share of the time that accelerators compute while the slowest site sets the pace."""
    if mode is Mode.DECOUPLED:
        return 1.0
    slowest_s = max(site.step_s for site in fleet.sites)
    counts = [site.accelerators if fleet.accelerators else 1 for site in fleet.sites]
    busy = sum(count * site.step_s for count, site in zip(counts, fleet.sites, strict=True) if count)
    return min(1.0, busy / slowest_s / sum(filter(None, counts)))


def _stretched(
    load: Load, narrow_gbps: float | None, round_s: float, round_made_s: float, least_steps: int
) -> tuple[float, float]:
    """Returns H as it comes out on links and aggregator, and the staleness expected with it, in versions.

    A step is trained on the newest version but for the time between the capture and the adoption of the one it went
    into: journey / H of all steps are one version behind, boundaries of steps included (design, section 4.4). A median
    link that is too narrow stretches H by what goes up; of what comes down versions are skipped instead.

    ``least_steps`` is the H that merging makes of the one asked for.
    """
    asked, interval = float(load.sync_interval_steps), float(least_steps)
    behind_steps = round_s / load.step_s + BOUNDARY_STEPS
    if narrow_gbps is None:
        interval = max(interval, round_made_s / load.step_s)  # one round of a fragment at a time
        return interval, behind_steps / interval
    one_s = load.fixed_s + load.wire.largest_up_bytes * 8e-9 / narrow_gbps
    interval = max(interval, one_s / load.step_s, carried_bytes(load)[0] * 8e-9 / narrow_gbps / load.step_s * asked)
    # What is known of narrow links has no aggregator that takes its time; journeys have.
    return interval, max(MEAN_AGE * _arrival(load, interval, narrow_gbps).age, behind_steps / interval)


def _arrival(load: Load, interval_steps: float, gbps: float, latency_s: float = 0.0) -> Arrival:
    """Returns what of the work of a site arrives over its link, where rounds come as often as they do.

    ``latency_s`` is its own, there and back; what it has more than the median site makes its steps older.
    """
    farther_s = 0.0 if load.assume is Assume.PAPER else max(0.0, latency_s - load.latency_s)
    later = farther_s / (interval_steps * load.step_s)
    gbps *= load.step_s * interval_steps / load.sync_interval_steps * (1 + 1e-9)
    up, down = (each * 8e-9 / gbps for each in carried_bytes(load))
    return arrival(up, down, load.wire.rounds, later)


def _cost(fleet: Fleet, traffic_gb: float, tokens: float) -> Cost | None:
    if fleet.price_per_hour is None and fleet.price_per_gb is None:
        return None
    accelerators = traffic = None
    if fleet.price_per_hour is not None:
        if fleet.accelerators is None:
            raise ConfigError("price", fleet.price_per_hour, f"is for an accelerator-hour: {GIVE_ACCELERATORS}")
        accelerators = fleet.accelerators * fleet.price_per_hour * 24
    if fleet.price_per_gb is not None:
        traffic = traffic_gb * fleet.price_per_gb
    per_day = (accelerators or 0.0) + (traffic or 0.0)
    return Cost(
        accelerators_per_day=accelerators,
        traffic_per_day=traffic,
        per_day=per_day,
        per_billion_tokens=per_day / tokens * 1e9 if tokens > 0 else None,
    )


# --- the plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A mode, the others beside it (a reason where no bandwidth is enough), and memory by process."""

    chosen: Forecast
    alternatives: Mapping[Mode, Forecast | str]
    memory: Mapping[str, Memory]
    choice: Choice | None


def plan(fleet: Fleet, mode: Mode) -> FleetPlan:
    """Returns the plan of a fleet; ``choice`` where its links are known and there is one.

    Raises:
        ConfigError: It cannot work, with what would be possible.
    """
    chosen, choice = _planned(fleet, mode)
    memory = memory_of(fleet, chosen)
    others: dict[Mode, Forecast | str] = {}
    for other in Mode:
        if other is not mode:
            try:
                # Baselines on a link that is too narrow wait, and are told how long; decoupled islands would be told
                # to do without anything that anybody hears.
                others[other] = _planned(fleet, other)[0] if other is Mode.DECOUPLED else forecast(fleet, other)
            except ConfigError as err:
                others[other] = err.cure
    return FleetPlan(chosen=chosen, alternatives=others, memory=memory, choice=choice)


def _planned(fleet: Fleet, mode: Mode) -> tuple[Forecast, Choice | None]:
    """Returns what a mode comes to, and what to choose for it where links are known and it has something to choose.

    Raises:
        ConfigError: No settings fit the links, whether the mode is asked about or stands beside it.
    """
    found = forecast(fleet, mode)
    gbps = found.link_gbps
    return found, None if gbps is None or mode is Mode.DP else _choice(fleet, mode, gbps)


def _choice(fleet: Fleet, mode: Mode, narrowest_gbps: float) -> Choice | None:
    """Chooses for the narrowest link, unless decoupled islands would all sync less often for the sake of one.

    Rounds do not wait for it: what of its work arrives is told beside the plan.
    """
    if mode is not Mode.DECOUPLED:
        return choose(fleet, mode, narrowest_gbps)
    median_gbps = lower_median(fleet.site_gbps(hub=True))
    if median_gbps <= narrowest_gbps * (1 + 1e-9):
        return choose(fleet, mode, narrowest_gbps)
    try:
        of_all = choose(fleet, mode, narrowest_gbps)
    except ConfigError:
        of_all = None
    if math.isinf(median_gbps) or (of_all is not None and of_all.sync_interval_steps == fleet.sync_interval_steps):
        return of_all
    return choose(fleet, mode, median_gbps)


def memory_of(fleet: Fleet, chosen: Forecast) -> dict[str, Memory]:
    """Returns process -> memory in bytes; data-parallel training is none of our programs, so it has the trainer alone.

    Raises:
        ConfigError: It does not fit into the memory that there is, with what would.
    """
    islands = len(fleet.sites)
    payload = payload_of(fleet, fragments_of(fleet, chosen.mode))
    wire = wire_of(payload, codec=fleet.codec, version_codec=fleet.version_codec, islands=islands)
    hosts: dict[str, Memory] = {}
    if chosen.mode is not Mode.DP:
        hosts = {
            "aggregator": aggregator_memory(
                Payload(tuple(f for p, f in enumerate(payload.fragments) if shard_of(p, fleet.shards) == 0)),
                wire,
                islands=islands,
                rounds_open=chosen.rounds_open / fleet.shards,
            ),
            "broker": broker_memory(payload, wire, islands=islands, rounds_open=chosen.rounds_open),
            "island_host": island_host_memory(payload, wire, rounds_open=chosen.rounds_open),
        }
    trainer = trainer_memory(payload.parameters)
    if fleet.host_gb is not None:
        for name, each in memory_of_hosts(fleet, hosts).items():
            if each.expected > fleet.host_gb * 1e9:
                enough = at_least(each.expected / 1e9)
                cure = f"is too little for the {name}: it takes {enough} GB; find that, or a smaller model"
                raise ConfigError("host_memory_gb", fleet.host_gb, cure)
    if fleet.accelerator_gb is not None:
        if fleet.accelerators is None:
            cure = f"is that of one accelerator: {GIVE_ACCELERATORS}"
            raise ConfigError("memory_gb", fleet.accelerator_gb, cure)
        needed = trainer.expected / 1e9
        for site in fleet.sites:
            if site.accelerators is not None and needed > site.accelerators * fleet.accelerator_gb:
                least = math.ceil(needed / fleet.accelerator_gb)
                cure = (
                    f"training takes {needed:.4g} GB before activations (16 bytes a parameter): at least {least} a site"
                )
                raise ConfigError("accelerators", site.accelerators, cure)
    return hosts | {"island_accelerators": trainer}


def memory_of_hosts(fleet: Fleet, memory: Mapping[str, Memory]) -> dict[str, Memory]:
    """Returns who runs on one host -> the memory of that host: one aggregator runs beside the broker, shards do not."""
    hosts = {name: each for name, each in memory.items() if name != "island_accelerators"}
    if fleet.shards > 1 or "aggregator" not in hosts:
        return hosts
    both = hosts.pop("aggregator"), hosts.pop("broker")
    bounds = [each.bound for each in both if each.bound is not None]
    bound = sum(bounds) if len(bounds) == len(both) else None
    together = Memory(expected=sum(each.expected for each in both), bound=bound)
    return {"aggregator beside the broker": together, **hosts}


def utilisation_curve(
    fleet: Fleet, utilisations: Sequence[float] = tuple(np.linspace(0.05, 0.99, 95))
) -> dict[str, Float64Array]:
    """Returns ``utilisation`` and, for each mode by name, the Gbit/s that one site needs for it in its wider direction.

    Where no bandwidth is enough the value is NaN. Decoupled islands never wait: theirs is the same everywhere.
    """
    curves: dict[str, Float64Array] = {"utilisation": np.asarray(utilisations, np.float64)}
    for mode in Mode:
        load = load_of(fleet, mode)
        needed = []
        for each in utilisations:
            try:
                needed.append(required(load, each).exact_gbps)
            except ConfigError:
                needed.append(math.nan)
        curves[str(mode)] = np.asarray(needed, np.float64)
    return curves
