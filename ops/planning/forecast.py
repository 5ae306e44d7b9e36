"""The forecast of one mode: bandwidth, utilisation, time, staleness, tokens, goodput and cost. Pure.

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
import operator
from dataclasses import dataclass, replace
from statistics import fmean

from broker.wire.errors import ConfigError
from ops.goodput import fleet as chips
from ops.goodput import simulation
from ops.goodput.caveats import bounds
from ops.goodput.fleet import DAY_S, FailureModel
from ops.goodput.simulation import expected_goodput
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
from ops.planning.links import Assume, Load, Mode, achieved, carried_bytes, journeys_s, required

#: So many versions more, beyond one below the limit, and 1 / e of the tokens are merged: ages scatter widely there.
FADES = 2.4

#: The age of all steps, as a share of the oldest one's: measured as the rest was.
MEAN_AGE = 0.7

#: Boundaries a contribution and a version wait for, half a step each on average.
BOUNDARY_STEPS = 1.0

#: So many sizes of sites are simulated for as long as one would be, more for a shorter time, down to so many failures.
SIZES, LEAST_EVENTS = 4, 5_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """The part of one site's work that arrives, and its age."""

    participation: float  # share of the versions that it is in, at most: less where it is late
    received: float  # share of the versions that it gets
    age: float  # of its oldest steps when they are merged, in versions
    in_time: float  # share of what it trains that is not too stale by then


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost in the currency of the prices; ``per_billion_tokens`` is None where failures leave no tokens."""

    accelerators_per_day: float | None
    traffic_per_day: float | None
    per_day: float
    per_billion_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The needs of one mode, and what it does."""

    mode: Mode
    up_gbps: float  # needed by each site, out of it
    down_gbps: float  # needed by each site, into it
    broker_up_gbps: float  # needed by the broker: what all sites receive, with shards what all send too; 0 for a ring
    broker_down_gbps: float  # likewise into it: what all sites send, and with shards every version once
    exact_gbps: float  # the larger one of a site before it was moved to a grid
    beyond: str  # why no bandwidth is enough for what was asked for, or empty; needs are for what links can give then
    fits: bool | None  # whether the links are wide enough; None where some are not known and the others are
    link_gbps: float | None  # of the narrowest one, a share of the broker's if that is less; None where fits is
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
    tokens_per_day: float  # merged ones, failures included where goodput is known
    goodput: float | None  # 0 to 1, None where it is not known
    cost: Cost | None


def forecast(fleet: Fleet, mode: Mode) -> Forecast:
    """Returns what one mode needs and does.

    Raises:
        ConfigError: No bandwidth is enough, and what there is, is not known; or tau is too long for streaming.
    """
    if mode is Mode.STREAMING:
        check_overlap(fleet)
    load, islands, decoupled = load_of(fleet, mode), len(fleet.sites), mode is Mode.DECOUPLED
    links = fleet.site_gbps(share=share_gbps(fleet, load))
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
    if fits and not fleet.links_known:
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
            _arrival(load, interval, link, 2 * site.latency_s) for site, link in zip(fleet.sites, links, strict=True)
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
    goodput = fleet.goodput.get(mode)
    paces = [site.tokens_per_step / (site.step_s if decoupled else load.step_s) for site in fleet.sites]
    counting = sum(pace * each.in_time for pace, each in zip(paces, arrivals, strict=True))
    tokens = counting * DAY_S * waiting * (1.0 if goodput is None else goodput)
    per_round = load.sync_interval_steps / load.wire.rounds
    own_up, own_down = carried_bytes(load)
    broker_up, broker_down = (0.0, 0.0) if load.ring else (islands * need.down_gbps, islands * need.up_gbps)
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
        round_s=max(journeys),
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
    fleet: Fleet, load: Load, paced: float | None, journeys: tuple[float, ...], down_gbps: float
) -> tuple[float, float]:
    """Returns H as it comes out on links and aggregator, and the staleness expected with it, in versions.

    A step is trained on the newest version but for the time between the capture and the adoption of the one it went
    into: journey / H of all steps are one version behind, boundaries of steps included (design, section 4.4). A median
    link that is too narrow stretches H by what goes up; of what comes down versions are skipped instead.
    """
    least_steps = max(load.sync_interval_steps, merging_steps(fleet))
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
    return interval, max(MEAN_AGE * _arrival(load, interval, paced).age, behind_steps / interval)


def _arrival(load: Load, interval_steps: float, gbps: float, latency_s: float = 0.0) -> Arrival:
    """Returns what of the work of a site arrives over its link, where rounds come as often as they do.

    ``latency_s`` is its own, there and back; what it has more than the median site makes its steps older.
    """
    farther_s = 0.0 if load.assume is Assume.PAPER else max(0.0, latency_s - load.latency_s)
    later = farther_s / (interval_steps * load.step_s)
    gbps *= load.step_s * interval_steps / load.sync_interval_steps * (1 + 1e-9)
    up, down = (each * 8e-9 / gbps for each in carried_bytes(load))
    return arrival(up, down, load.wire.rounds, max_staleness=load.max_staleness, later=later)


def arrival(up_full: float, down_full: float, fragments: int, *, max_staleness: int, later: float = 0.0) -> Arrival:
    """Returns the part of a site's work that arrives.

    Args:
        up_full: What contributions at the fleet's pace would take of the site's link: above 1 it is too narrow.
        down_full: Likewise of versions.
        fragments: P.
        max_staleness: Versions that a step may be behind, by the aggregator's setting.
        later: Versions that are made in the time by which its way there and back is longer than the median site's.
    """
    # Steps since the last hand-over, and the way up: of a free link an interval and one fragment's time.
    age = 2 * up_full if up_full > 1 else 1 + up_full / fragments
    # A version is a fragment's time old when it comes; over a narrow link it is in use until the next one has come, for
    # half of that time in the mean.
    age += down_full / 2 if down_full > 1 else down_full / fragments
    age += later
    scattered = 1.0 if max(up_full, down_full) > 1 else min(1.0, later)
    fresh = math.exp((max_staleness - scattered - age) / FADES)
    return Arrival(
        participation=1 / max(1.0, up_full),
        received=1 / max(1.0, down_full),
        age=age,
        in_time=min(1.0, fresh),
    )


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


# --- goodput ------------------------------------------------------------------------------------------------------


def with_goodput(fleet: Fleet, mtbi_years: float | None) -> Fleet:
    """Returns the fleet with each mode's expected goodput; unchanged without a number of accelerators.

    Data-parallel is the elastic kind, the fairer comparison. ``mtbi_years`` is the mean time between interruptions of
    an accelerator; None for the usual.

    Raises:
        ConfigError: The time is not above 0, or given without accelerators.
    """
    if fleet.accelerators is None:
        if mtbi_years is not None:
            raise ConfigError("mtbi_years", mtbi_years, f"says how often an accelerator fails: {GIVE_ACCELERATORS}")
        return fleet
    years = FailureModel().mtbi_years if mtbi_years is None else mtbi_years
    if not 0 < years <= chips.MOST:
        raise ConfigError("mtbi_years", years, f"must be above 0, and at most {chips.MOST:g}")
    model = FailureModel(
        mtbi_years=years,
        step_s=max(site.step_s for site in fleet.sites),
        sync_interval=fleet.sync_interval_steps,
        overlap=min(FailureModel().overlap, fleet.sync_interval_steps - 1),
    )
    # What is not handed over is lost with an island, and a slow aggregator, or a narrow link, makes that more.
    alone = replace(model, sync_interval=_interval_as_it_comes_out(fleet))
    # Islands of Streaming DiLoCo wait for each other at every fragment, H / P steps apart, for a version that they need
    # tau steps later: nobody is further ahead than both. Barriers as far apart as that cost a little more.
    ahead = fleet.sync_interval_steps / fleet.fragments + fleet.overlap_steps
    often = replace(model, sync_interval=max(1, min(round(ahead), fleet.sync_interval_steps)), overlap=0)
    islands = len(fleet.sites)
    asked = {
        Mode.DECOUPLED: (chips.Mode.DECOUPLED, alone),
        Mode.DILOCO: (chips.Mode.DILOCO, model),
        Mode.DP: (chips.Mode.ELASTIC_DP, model),
        Mode.STREAMING: (chips.Mode.DILOCO, often),
    }
    found = {mode: _expected(kind, fleet.accelerators, islands, each) for mode, (kind, each) in asked.items()}
    sizes = {site.accelerators for site in fleet.sites if site.accelerators}
    if len(sizes) > 1:
        # Decoupled islands fail by themselves: each counts as one of a fleet of its like, by the tokens it brings.
        # Of many sizes each is simulated for a shorter time: what one is off by hardly shows in all of them.
        most = simulation.ESTIMATE_EVENTS
        events = max(LEAST_EVENTS, min(most, SIZES * most // len(sizes)))
        own = {size: _expected(chips.Mode.DECOUPLED, size * islands, islands, alone, events) for size in sizes}
        paces = [site.tokens_per_step / site.step_s for site in fleet.sites]
        goodputs = [own[site.accelerators] for site in fleet.sites if site.accelerators]
        found[Mode.DECOUPLED] = sum(map(operator.mul, paces, goodputs)) / sum(paces)
    sentences = [
        f"An accelerator fails every {years:g} years and takes a slice of {model.slice_chips} with it, or its site "
        f"where that is smaller, for {model.repair_s / 60:g} min."
    ]
    for mode in (Mode.DECOUPLED, Mode.DILOCO, Mode.DP):
        kind, each = asked[mode]
        # Decoupled islands are told of by the largest, which fails most often.
        most = islands * max(sizes) if mode is Mode.DECOUPLED else fleet.accelerators
        told = bounds(chips.Fleet(mode=kind, chips=most, islands=islands), each)
        sentences += [f"Goodput of {kind}: {sentence}." for sentence in told]
    return replace(fleet, goodput=found, goodput_caveats=tuple(sentences))


def _interval_as_it_comes_out(fleet: Fleet) -> int:
    """Returns H of decoupled islands in steps of the slowest site, as planned; else as asked for."""
    try:
        found = forecast(fleet, Mode.DECOUPLED)
    except ConfigError:
        return fleet.sync_interval_steps
    step_s = load_of(fleet, Mode.DECOUPLED).step_s / max(site.step_s for site in fleet.sites)
    return max(1, round(found.sync_interval_steps * step_s), fleet.sync_interval_steps)


def _expected(
    mode: chips.Mode, accelerators: int, islands: int, model: FailureModel, events: int | None = None
) -> float:
    try:
        return expected_goodput(mode=mode, chips=accelerators, islands=islands, model=model, events=events)
    except ConfigError as err:
        if err.field != "mtbi_years":
            raise
        fails_s = model.chip_mtbi_s / accelerators
        cure = f"has an accelerator fail every {fails_s:.2g} s, which is too often to be simulated: give a longer time"
        raise ConfigError("mtbi_years", model.mtbi_years, cure) from err
