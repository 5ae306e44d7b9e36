"""What one mode needs of a fleet, and does with it: bandwidth, utilisation, time, staleness, tokens and cost. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean

from broker.wire.errors import ConfigError
from ops.planning.arrival import Arrival, arrival
from ops.planning.fleet import (
    GIVE_ACCELERATORS,
    Fleet,
    apart,
    check_overlap,
    load_of,
    lower_median,
    merging_steps,
    share_gbps,
)
from ops.planning.links import Assume, Load, Mode, achieved, carried_bytes, journey_s, journeys_s, made_s, required

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
        broker_up_gbps: Needed by the broker, out of it: what all sites receive, and with shards what all send, which
            goes on to other hosts. 0 for a ring.
        broker_down_gbps: Needed by the broker, into it: what all sites send, and with shards every version once.
        exact_gbps: The larger one of a site before it was moved to a grid.
        beyond: Why no bandwidth is enough for what was asked for, in a sentence, or empty; what is needed is for what
            the links can give then.
        fits: Whether the links are wide enough; None where some are not known and the others are.
        link_gbps: Of the narrowest one, a share of the broker's if that is less; None where ``fits`` is.
        utilisation: Share of the time that accelerators compute: on the links if they are known, else as asked for;
            less where islands wait for slower ones.
        round_s: From the opening of a round of the largest fragment until its version has arrived.
        rounds_apart_s: Between two rounds.
        sync_interval_steps: H as it comes out: longer than asked for where the aggregator is too slow for it, or the
            median site's link.
        arrivals: What of each site's work arrives, and how old.
        open_shares: For each fragment, the share of the time in which its round is open.
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
    open_shares: tuple[float, ...]
    staleness: float
    round_up_bytes: float
    round_down_bytes: float
    traffic_gb_per_day: float
    tokens_per_day: float
    goodput: float | None
    cost: Cost | None

    @property
    def rounds_open(self) -> float:
        """On average."""
        return sum(self.open_shares)


def forecast(fleet: Fleet, mode: Mode) -> Forecast:
    """Returns what one mode needs and does.

    Raises:
        ConfigError: No bandwidth is enough, and what there is, is not known; or tau is too long for streaming.
    """
    if mode is Mode.STREAMING:
        check_overlap(fleet)
    load, islands = load_of(fleet, mode), len(fleet.sites)
    share = share_gbps(fleet, load)
    gbps = fleet.narrowest_gbps(share=share)
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
        median = lower_median(fleet.site_gbps(share=share))
        paced = median if math.isfinite(median) else None
    up_gbps, down_gbps = (need.up_gbps, need.down_gbps) if paced is None else (paced, paced)
    round_s, journeys = journey_s(load, up_gbps, down_gbps), journeys_s(load, up_gbps, down_gbps)
    interval, staleness = float(load.sync_interval_steps), 0.0
    open_shares: tuple[float, ...] = (0.0 if mode is Mode.DP else 1.0,)
    arrivals = (Arrival(1.0, 1.0, 0.0, 1.0),) * islands
    if mode is Mode.DECOUPLED:
        least_steps = max(load.sync_interval_steps, merging_steps(fleet))
        enough_gbps = required(replace(load, sync_interval_steps=least_steps), fleet.utilisation).exact_gbps
        if paced is not None and paced >= enough_gbps * (1 - 1e-9):
            paced = None
        round_made_s = made_s(load, up_gbps, down_gbps)
        interval, staleness = _stretched(load, paced, fmean(journeys), round_made_s, least_steps)
        arrivals = tuple(
            _arrival(load, interval, gbps, 2 * site.latency_s)
            for site, gbps in zip(fleet.sites, fleet.site_gbps(share=share), strict=True)
        )
        # Where what goes up stretches H, the way down is no part of a round: a fragment has one at a time.
        open_shares = tuple(min(1.0, each / (interval * load.step_s)) for each in journeys)
    elif mode is Mode.STREAMING:
        staleness = load.overlap_steps / load.sync_interval_steps
        open_shares = tuple(min(1.0, each / load.interval_s) for each in journeys)
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
    broker_up, broker_down = (islands * need.down_gbps, islands * need.up_gbps) if hub else (0.0, 0.0)
    if apart(fleet, mode):
        broker_up, broker_down = broker_up + broker_down, broker_down + need.down_gbps
    return Forecast(
        mode=mode,
        up_gbps=need.up_gbps,
        down_gbps=need.down_gbps,
        broker_up_gbps=broker_up,
        broker_down_gbps=broker_down,
        exact_gbps=need.exact_gbps,
        beyond=beyond,
        fits=fits,
        link_gbps=gbps,
        utilisation=utilisation * _computing_together(fleet, mode),
        round_s=round_s,
        rounds_apart_s=interval * load.step_s / load.wire.rounds / waiting,
        sync_interval_steps=interval,
        arrivals=arrivals,
        open_shares=open_shares,
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
    load: Load, narrow_gbps: float | None, mean_journey_s: float, round_made_s: float, least_steps: int
) -> tuple[float, float]:
    """Returns H as it comes out on links and aggregator, and the staleness expected with it, in versions.

    A step is trained on the newest version but for the time between the capture and the adoption of the one it went
    into: journey / H of all steps are one version behind, boundaries of steps included (design, section 4.4). A median
    link that is too narrow stretches H by what goes up; of what comes down versions are skipped instead.

    ``least_steps`` is the H that merging makes of the one asked for.
    """
    asked, interval = float(load.sync_interval_steps), float(least_steps)
    behind_steps = mean_journey_s / load.step_s + BOUNDARY_STEPS
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
    return arrival(up, down, load.wire.rounds, max_staleness=load.max_staleness, later=later)


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
