"""Warnings beside a plan: slow links, a slow aggregator, limits that refuse the islands. Pure."""

from __future__ import annotations

import math

from ops.planning.fleet import Fleet, limits_of, limits_to_raise, load_of, merging_steps
from ops.planning.forecast import Forecast
from ops.planning.links import Assume, Mode
from ops.planning.planner import FleetPlan

#: The least share of the accelerators' memory that should be left.
ROOM_FOR_ACTIVATIONS = 0.2

#: An interval should have room for so many journeys.
JOURNEYS = 3


def notes(fleet: Fleet, planned: FleetPlan) -> list[str]:
    """Returns what deserves attention: sentences, none if all is well."""
    chosen = planned.chosen
    found = []
    if chosen.fits is False:
        found.append(_narrow_links(fleet, chosen))
    if chosen.mode is Mode.DECOUPLED:
        steps, asked = merging_steps(fleet), fleet.sync_interval_steps
        if steps > asked:
            found.append(
                f"Merging every fragment once takes {steps} steps at the speed measured on two shared cores: H grows "
                f"to {steps} at least, unless the aggregator's host is {steps / asked:.3g} times as fast, or several "
                "aggregators share the work (--shards)."
            )
        elif chosen.fits is not False and chosen.sync_interval_steps > asked * (1 + 1e-6):
            found.append(
                f"A fragment's way up and its merging take longer than H steps: H grows to "
                f"{chosen.sync_interval_steps:.0f}. More fragments are smaller."
            )
        found += _stale_sites(fleet, chosen) + _long_journeys(fleet, chosen)
    counts = [site.accelerators for site in fleet.sites if site.accelerators is not None]
    if fleet.accelerator_gb is not None and counts:
        left = 1 - planned.memory["island_accelerators"].expected / (min(counts) * fleet.accelerator_gb * 1e9)
        if left < ROOM_FOR_ACTIVATIONS:
            found.append(f"Training leaves {max(left, 0):.0%} of a site's accelerator memory for activations.")
    if fleet.assume is Assume.ATOLL and chosen.mode is not Mode.DP:
        for name, value in limits_to_raise(fleet, chosen.mode).items():
            everywhere = name == "max_message_bytes"
            cure = "everywhere, or take more fragments" if everywhere else f"(--{name.replace('_', '-')})"
            found.append(f"{name} is {limits_of(fleet)[name]}, and the islands need {value}: raise it {cure}.")
    return found


def _narrow_links(fleet: Fleet, chosen: Forecast) -> str:
    if chosen.beyond:
        return f"{chosen.beyond[0].upper()}{chosen.beyond[1:]}. Here accelerators compute {chosen.utilisation:.1%}."
    wide = f"{chosen.exact_gbps:.3g} Gbit/s needed"
    effect = f"accelerators compute {chosen.utilisation:.1%} of the time"
    if chosen.mode is Mode.DECOUPLED:
        wide += f" for H = {fleet.sync_interval_steps}"
        effect = f"H is {chosen.sync_interval_steps:.0f}"
    who = "The narrowest link has" if chosen.link_gbps == min(fleet.site_gbps()) else "A site's share of the broker has"
    return f"{who} {chosen.link_gbps:.3g} of {wide}: {effect}."


def _long_journeys(fleet: Fleet, chosen: Forecast) -> list[str]:
    """Whether latency alone takes much of H: measured in the laboratory (docs/results.md, Journeys)."""
    load, interval = load_of(fleet, Mode.DECOUPLED), chosen.sync_interval_steps
    steps = math.ceil(load.latency_s / load.step_s)
    if fleet.assume is Assume.PAPER or JOURNEYS * steps <= interval * (1 + 1e-6):
        return []
    return [
        f"The way there and back takes {steps} steps of {interval:.0f}. What islands train meanwhile moves the model "
        f"little: the loss is lower with H of {JOURNEYS * steps} (--sync-interval)."
    ]


def _stale_sites(fleet: Fleet, chosen: Forecast) -> list[str]:
    """The site whose work arrives the latest, and what of it counts."""
    site, worst = max(zip(fleet.sites, chosen.arrivals, strict=True), key=lambda each: each[1].age)
    if min(worst.participation, worst.in_time) == 1:
        return []
    late = sum(min(each.participation, each.in_time) < 1 for each in chosen.arrivals)
    who = f"{site.name} and {late - 1} more" if late > 1 else site.name
    return [
        f"{who}: in {worst.participation:.0%} of the versions at most, with steps up to {worst.age:.1f} versions old "
        f"of {fleet.max_staleness} allowed (max_staleness): about {worst.in_time:.0%} of what is trained there counts."
    ]
