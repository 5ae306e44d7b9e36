"""Forecasts one mode without failures: bandwidth, time, staleness and tokens. Pure.

A decoupled site on a link that is narrower than the pace of the others takes keeps it full. Up, each of P fragments
waits for the others and is handed over again when it has arrived: a contribution covers as many times more steps as the
link is too narrow, and its journey takes as long. Down, versions that were not begun are skipped, and the one at hand
grows as old. Nothing of this loses a step by itself; but what was trained on a version that is more than
``max_staleness`` behind is refused.

Measured with the cores in virtual time (H = 24 and 48, P = 3 to 16, f32, one link of four 1.1 to 6 times too narrow;
``tests/sim/test_narrow_links.py`` keeps some of it): sites take part as often as said here, and all of their tokens are
merged up to an age of one version below the limit. From there on the share falls as :data:`FADES` says, give or take
ten percentage points in the mean, thirty at most; with limits of 2 to 4 as with 8. A link that is wide enough in both
directions keeps ages even, and nothing is lost up to the limit itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean

from aggregator.rules.interval import JOURNEYS
from broker.base.errors import ConfigError
from ops.forecast.failures import DAY_S
from ops.forecast.fleet import Assume, Fleet, Mode, check_overlap, lower_median
from ops.forecast.links import Load, achieved, carried_bytes, journeys_s, load_of, merging_steps, required

#: So many versions more, beyond one below the limit, and 1 / e of the tokens are merged: ages scatter widely there.
FADES = 2.4

#: The age of all steps, as a share of the oldest one's: measured as the rest was.
MEAN_AGE = 0.7

#: Boundaries a contribution and a version wait for, half a step each on average.
BOUNDARY_STEPS = 1.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """The share of one site's work that arrives in time, and its age."""

    participation: float  # share of the versions that it is in, at most: less where it is late
    received: float  # share of the versions that it gets
    age: float  # of its oldest steps when they are merged, in versions
    in_time: float  # share of its training that arrives before it is too stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The needs and the pace of one mode."""

    mode: Mode
    up_gbps: float  # needed by each site, out of it
    down_gbps: float  # needed by each site, into it
    broker_up_gbps: float  # needed by the broker: what all sites receive, with shards what all send too; 0 for a ring
    broker_down_gbps: float  # into the broker: the traffic of all sites, and with shards every version once
    exact_gbps: float  # the larger one of a site before it was moved to a grid
    beyond: str  # why no bandwidth is enough for what was asked for, or empty; needs are for what links can give then
    fits: bool | None  # whether the links are wide enough; None where some are not known and the others are
    link_gbps: float | None  # of the narrowest one; None where fits is
    utilisation: float  # share of the time that accelerators compute: on known links, else as asked for
    round_s: float  # from the opening of a round of the largest fragment until its version has arrived
    rounds_apart_s: float  # between two rounds
    sync_interval_steps: float  # H as it comes out: longer where the aggregator or the median site's link is too slow
    arrivals: tuple[Arrival, ...]  # what of each site's work arrives, and how old
    open_shares: tuple[float, ...]  # for each fragment, the share of the time in which its round is open
    staleness: float  # expected, in versions
    round_up_bytes: float  # one site's whose link is wide enough, mean of a round (for dp of a step)
    round_down_bytes: float  # the same, into it
    traffic_gb_per_day: float  # bytes that leave a site, all sites and the broker together
    tokens_per_day: float  # merged ones


def forecast(fleet: Fleet, mode: Mode) -> Forecast:
    """Returns the needs and the pace of one mode.

    Raises:
        ConfigError: No bandwidth is enough, and what there is, is not known; or tau is too long for streaming.
    """
    if mode is Mode.STREAMING:
        check_overlap(fleet)
    load, islands, decoupled = load_of(fleet, mode), len(fleet.sites), mode is Mode.DECOUPLED
    links = fleet.links_gbps
    gbps = min(links) if math.isfinite(min(links)) else None
    beyond = ""
    try:
        need = required(load, fleet.utilisation)
    except ConfigError as err:
        if gbps is None or decoupled:
            raise
        beyond = err.cure
        need = required(load, achieved(load, gbps) * (1 - 1e-9))
    fits = None if gbps is None else not beyond and gbps >= need.exact_gbps * (1 - 1e-9)
    if fits and math.inf in links:
        gbps = fits = None
    utilisation = fleet.utilisation if gbps is None else achieved(load, gbps)
    if decoupled or load.alone:
        utilisation = 1.0
    paced = gbps  # the link that rounds wait for
    if decoupled and gbps is not None:
        paced = lower_median(links) if math.isfinite(lower_median(links)) else None
    up_gbps, down_gbps = (need.up_gbps, need.down_gbps) if paced is None else (paced, paced)
    journeys = journeys_s(load, up_gbps, down_gbps)
    interval, staleness = float(load.sync_interval_steps), 0.0
    open_shares: tuple[float, ...] = (0.0 if mode is Mode.DP else 1.0,)
    arrivals = (Arrival(1.0, 1.0, 0.0, 1.0),) * islands
    if decoupled:
        interval, staleness = _stretched(fleet, load, paced, journeys, down_gbps)
        arrivals = tuple(
            _arrival(fleet, load, interval, link, site.journey_s) for site, link in zip(fleet.sites, links, strict=True)
        )
        # Where what goes up stretches H, the way down is no part of a round: a fragment has one at a time.
        open_shares = tuple(min(1.0, each / (interval * load.step_s)) for each in journeys)
    elif mode is Mode.STREAMING:
        staleness = load.overlap_steps / load.sync_interval_steps
        open_shares = tuple(min(1.0, each / load.interval_s) for each in journeys)
    waiting = 1.0 if decoupled else utilisation
    up, down = (each * load.sync_interval_steps / interval for each in carried_bytes(load))
    up *= sum(each.participation for each in arrivals)
    down *= 0.0 if load.ring else sum(each.received for each in arrivals)
    traffic = (up + down) * DAY_S * waiting / load.step_s / 1e9
    paces = [site.tokens_per_step / (site.step_time if decoupled else load.step_s) for site in fleet.sites]
    counting = sum(pace * each.in_time for pace, each in zip(paces, arrivals, strict=True))
    per_round = load.sync_interval_steps / load.wire.rounds
    own_up, own_down = carried_bytes(load)
    broker_up, broker_down = (0.0, 0.0) if load.ring else (islands * need.down_gbps, islands * need.up_gbps)
    if decoupled and fleet.shards > 1 and fleet.assume is Assume.ATOLL:
        # Aggregators have hosts of their own: contributions go there, and versions come back.
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
        round_s=max(journeys),
        rounds_apart_s=interval * load.step_s / load.wire.rounds / waiting,
        sync_interval_steps=interval,
        arrivals=arrivals,
        open_shares=open_shares,
        staleness=staleness,
        round_up_bytes=own_up * per_round,
        round_down_bytes=own_down * per_round,
        traffic_gb_per_day=traffic,
        tokens_per_day=counting * DAY_S * waiting,
    )


def _computing_together(fleet: Fleet, mode: Mode) -> float:
    """Returns the share of time in which accelerators compute while the slowest site sets the pace."""
    if mode is Mode.DECOUPLED:
        return 1.0
    counts = [site.accelerators if fleet.accelerators else 1 for site in fleet.sites]
    busy = sum(count * site.step_time for count, site in zip(counts, fleet.sites, strict=True) if count)
    return min(1.0, busy / fleet.slowest_step_s / sum(filter(None, counts)))


def journey_steps(fleet: Fleet, load: Load) -> int:
    """Returns the inner steps that journeys make an interval, at least; 0 for the paper's fleet."""
    return 0 if fleet.assume is Assume.PAPER else JOURNEYS * math.ceil(load.latency_s / load.step_s)


def _stretched(
    fleet: Fleet, load: Load, paced: float | None, journeys: tuple[float, ...], down_gbps: float
) -> tuple[float, float]:
    """Returns the effective H on these links and aggregator, and the expected staleness in versions.

    A step is trained on the newest version but for the time between the capture and the adoption of the one it went
    into: journey / H of all steps are one version behind, boundaries of steps included (reference.md, section 4.4). A
    median link that is too narrow stretches H by what goes up; of what comes down versions are skipped instead.
    """
    least_steps = max(load.sync_interval_steps, merging_steps(fleet), journey_steps(fleet, load))
    behind_steps = fmean(journeys) / load.step_s + BOUNDARY_STEPS
    enough = required(replace(load, sync_interval_steps=least_steps), fleet.utilisation).exact_gbps
    largest_s = max(load.wire.ups) * 8e-9, max(load.wire.downs) * 8e-9
    if paced is None or paced >= enough * (1 - 1e-9):
        # One round of a fragment at a time: the next one waits until its version is made, and not for the way down.
        made_s = max(journeys) - (0.0 if load.assume is Assume.PAPER else largest_s[1] / down_gbps)
        interval = max(float(least_steps), made_s / load.step_s)
        return interval, behind_steps / interval
    one_s = load.latency_s + max(load.mergings_s) + largest_s[0] / paced
    flow_steps = carried_bytes(load)[0] * 8e-9 / paced / load.step_s * load.sync_interval_steps
    interval = max(float(least_steps), one_s / load.step_s, flow_steps)
    # What is known of narrow links has no aggregator that takes its time; journeys have.
    return interval, max(MEAN_AGE * _arrival(fleet, load, interval, paced).age, behind_steps / interval)


def _arrival(fleet: Fleet, load: Load, interval_steps: float, gbps: float, latency_s: float = 0.0) -> Arrival:
    """Returns the share of a site's work that arrives over its link, at the given rate of rounds.

    ``latency_s`` is its own, there and back; what it has more than the median site makes its steps older.
    """
    farther_s = 0.0 if load.assume is Assume.PAPER else max(0.0, latency_s - load.latency_s)
    interval_s = interval_steps * load.step_s
    later = farther_s / interval_s
    allowed = max(fleet.max_staleness, fleet.max_staleness_s / interval_s)
    gbps *= load.step_s * interval_steps / load.sync_interval_steps * (1 + 1e-9)
    up, down = (each * 8e-9 / gbps for each in carried_bytes(load))
    return arrival(up, down, load.wire.rounds, max_staleness=allowed, later=later)


def arrival(up_full: float, down_full: float, fragments: int, *, max_staleness: float, later: float = 0.0) -> Arrival:
    """Returns the share of a site's work that arrives in time, and its age.

    Args:
        up_full: The share of the site's link that contributions at the fleet's pace take: above 1 it is too narrow.
        down_full: Likewise of versions.
        fragments: P.
        max_staleness: Versions that a step may be behind, by the aggregator's settings.
        later: Versions that are made in the time by which its way there and back is longer than the median site's.
    """
    # Steps since the last hand-over, and the way up: of a free link an interval and one fragment's time.
    age = 2 * up_full if up_full > 1 else 1 + up_full / fragments
    # A version is a fragment's time old when it comes; over a narrow link it is in use until the next one has come, for
    # half of that time in the mean.
    age += down_full / 2 if down_full > 1 else down_full / fragments
    age += later
    scattered = 1.0 if max(up_full, down_full) > 1 else min(1.0, later)
    fresh = math.exp(min(0.0, (max_staleness - scattered - age) / FADES))
    return Arrival(
        participation=1 / max(1.0, up_full),
        received=1 / max(1.0, down_full),
        age=age,
        in_time=fresh,
    )
