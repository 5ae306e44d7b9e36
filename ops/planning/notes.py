"""What of a plan deserves attention: links and an aggregator that are too slow, limits that are too small. Pure."""

from __future__ import annotations

from dataclasses import replace

from broker.routing.directory import MAX_SHARDS
from ops.planning.fleet import (
    Fleet,
    interval_s,
    limits_to_raise,
    load_of,
    merging_per_cycle_s,
    merging_steps,
)
from ops.planning.forecast import Forecast
from ops.planning.links import Assume, Mode, required
from ops.planning.planner import FleetPlan, memory_of_hosts
from ops.text import size

#: Of the accelerators' memory; with less than this to spare there is something to say.
ROOM_FOR_ACTIVATIONS = 0.2


def notes(fleet: Fleet, planned: FleetPlan) -> list[str]:
    """Returns what deserves attention: sentences, none if all is well."""
    chosen, found = planned.chosen, []
    if chosen.fits is False:
        found.append(_narrow_links(fleet, chosen))
    if chosen.mode is Mode.DECOUPLED:
        found += _slow_merging(fleet, chosen)
        found += _far_sites(fleet, chosen)
    unknown = [site.name for site in fleet.sites if site.accelerators is None]
    if 0 < len(unknown) < len(fleet.sites):
        whose = ", ".join(dict.fromkeys(unknown))
        found.append(f"Without the accelerators of {whose} there is no goodput, nor what accelerators cost.")
    found += _little_memory(fleet, planned)
    if fleet.assume is Assume.ATOLL and chosen.mode is not Mode.DP:
        found += _refused_joins(fleet, chosen.mode)
    return found


def _refused_joins(fleet: Fleet, mode: Mode) -> list[str]:
    """Limits of the run for which its aggregator would refuse the islands."""
    least, found = limits_to_raise(fleet, mode), []
    if "max_message_bytes" in least:
        smaller = "" if mode is Mode.DILOCO else _smaller_messages(fleet)
        found.append(
            f"max_message_bytes is {fleet.max_message_bytes}, and the largest fragment needs "
            f"{least['max_message_bytes']}: raise it everywhere{smaller}."
        )
    if "held_bytes" in least:
        found.append(
            f"held_bytes is {fleet.held_bytes}, and a round of the largest fragment needs {least['held_bytes']}: raise "
            "it at the aggregator (--held-bytes)."
        )
    if "max_tokens_per_step" in least:
        found.append(
            f"max_tokens_per_step is {fleet.max_tokens_per_step}, and an island has {least['max_tokens_per_step']}: "
            "raise it at the aggregator (--max-tokens-per-step)."
        )
    return found


def _little_memory(fleet: Fleet, planned: FleetPlan) -> list[str]:
    """What fits into the memory that there is, but not with room to spare."""
    found = []
    if fleet.host_gb is not None:
        for name, each in memory_of_hosts(fleet, planned.memory).items():
            if each.bound is not None and each.bound > fleet.host_gb * 1e9:
                found.append(
                    f"The {name} is expected to take {size(round(each.expected))}, and {size(round(each.bound))} at "
                    f"most: more than the {fleet.host_gb:g} GB of a host, if islands send all that they may at once."
                )
    counts = [site.accelerators for site in fleet.sites if site.accelerators is not None]
    if fleet.accelerator_gb is not None and counts:
        has = min(counts) * fleet.accelerator_gb * 1e9
        left = 1 - planned.memory["island_accelerators"].expected / has
        if left < ROOM_FOR_ACTIVATIONS:
            found.append(
                f"Of a site's {size(round(has))} of accelerators training leaves {max(left, 0):.0%} for activations, "
                "which are not counted."
            )
    return found


def _narrow_links(fleet: Fleet, chosen: Forecast) -> str:
    if chosen.beyond:
        return f"{chosen.beyond[0].upper()}{chosen.beyond[1:]}. Here accelerators compute {chosen.utilisation:.1%}."
    wide = f"{chosen.exact_gbps:.3g} Gbit/s needed"
    effect = f"accelerators compute {chosen.utilisation:.1%} of the time"
    if chosen.mode is Mode.DECOUPLED:
        wide += f" for H = {fleet.sync_interval_steps}"
        stretched = chosen.sync_interval_steps > fleet.sync_interval_steps * (1 + 1e-9)
        if stretched and chosen.sync_interval_steps > merging_steps(fleet) * (1 + 1e-9):
            effect = f"H grows to {chosen.sync_interval_steps:.0f}"
        elif min(min(each.participation, each.received) for each in chosen.arrivals) == 1:
            effect = "it is wide enough for the H that merging makes of it"
        elif stretched:
            effect = f"H stays at the {chosen.sync_interval_steps:.0f} that merging makes of it"
        else:
            effect = "H stays"
        effect += _late(fleet, chosen)
    own_gbps = fleet.narrowest_gbps()
    who = "The narrowest link has" if chosen.link_gbps == own_gbps else "A site's share of the broker's link is"
    return f"{who} {chosen.link_gbps:.3g} of {wide}: {effect}."


def _late(fleet: Fleet, chosen: Forecast) -> str:
    """What becomes of the site whose work arrives the latest, and how many others are like it."""
    arrivals = list(zip(fleet.sites, chosen.arrivals, strict=True))
    site, worst = max(arrivals, key=lambda each: each[1].age)
    if min(worst.participation, worst.received) == 1:
        return ""
    like = sum(each.in_time < 1 if worst.in_time < 1 else each.age == worst.age for _, each in arrivals)
    who = f"{site.name} and {like - 1} more" if like > 1 else site.name
    sentence = (
        f"; {who}: in {worst.participation:.0%} of the versions at most, given {worst.received:.0%} of them, with "
        f"steps up to {worst.age:.1f} versions old"
    )
    if worst.in_time < 1:
        allowed = f"{fleet.max_staleness} are allowed"
        sentence += f", of which {allowed}: about {worst.in_time:.0%} of what is trained there counts"
    return sentence


def _far_sites(fleet: Fleet, chosen: Forecast) -> list[str]:
    """Sites whose steps are more than a version older when they are merged, since the rounds of others go on."""
    if fleet.assume is Assume.PAPER:
        return []
    load = load_of(fleet, Mode.DECOUPLED)
    interval_s = chosen.sync_interval_steps * load.step_s
    far = [each for each in zip(fleet.sites, chosen.arrivals, strict=True) if 2 * each[0].latency_s > interval_s]
    if not far:
        return []
    site, worst = max(far, key=lambda each: each[0].latency_s)
    who = f"{site.name} and {len(far) - 1} more" if len(far) > 1 else site.name
    sentence = (
        f"{who}: {site.latency_s:.3g} s each way, in which the others go on; its steps are up to {worst.age:.1f} "
        "versions old when they are merged, or more"
    )
    if worst.in_time < 1:
        allowed = f"{fleet.max_staleness} are allowed"
        sentence += f", and {allowed}: about {worst.in_time:.0%} of what is trained there counts"
    return [f"{sentence}."]


def _smaller_messages(fleet: Fleet) -> str:
    """What else makes the largest message of a round small enough, if anything does."""
    fragments = _least_fragments(fleet)
    if fragments is not None:
        return f", or cut the model into {fragments} fragments or more"
    most = min(fleet.sync_interval_steps, fleet.parameters)
    return f": with H = {fleet.sync_interval_steps} there are {most} fragments at most, whose largest is larger still"


def _least_fragments(fleet: Fleet) -> int | None:
    """Returns the fewest fragments whose messages are small enough, more than now; None if H allows none."""

    def fits(fragments: int) -> bool:
        return "max_message_bytes" not in limits_to_raise(replace(fleet, fragments=fragments))

    few, many = fleet.fragments, min(fleet.sync_interval_steps, fleet.parameters)
    if not fits(many):
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if fits(middle) else (middle, many)
    return many


def _more_shards(fleet: Fleet) -> str:
    """How many shards would merge every fragment within H steps, if so many may be."""
    for shards in range(fleet.shards + 1, min(MAX_SHARDS, fleet.fragments) + 1):
        if merging_per_cycle_s(replace(fleet, shards=shards)) <= interval_s(fleet):
            return f", or {shards} aggregators share the work (--shards)"
    return ""


def _slow_merging(fleet: Fleet, chosen: Forecast) -> list[str]:
    """What the aggregator makes of H, whatever the links."""
    steps, asked, between_s = merging_steps(fleet), fleet.sync_interval_steps, interval_s(fleet)
    if steps > asked:
        load = replace(load_of(fleet, Mode.DECOUPLED), sync_interval_steps=steps)
        then = required(load, fleet.utilisation)
        return [
            f"H steps take {between_s:.3g} s, and merging every fragment once {merging_per_cycle_s(fleet):.3g} s at "
            f"the speed measured on two shared cores: H grows to {steps} at least, for which a site needs "
            f"{then.up_gbps:.3g} up and {then.down_gbps:.3g} down, unless the aggregator's host is "
            f"{merging_per_cycle_s(fleet) / between_s:.3g} times as fast{_more_shards(fleet)}."
        ]
    if chosen.fits is not False and chosen.sync_interval_steps > asked * (1 + 1e-6):
        return [
            f"H steps take {between_s:.3g} s, and a fragment's way up and merging one after the other "
            f"{between_s * chosen.sync_interval_steps / asked:.3g} s: H grows to {chosen.sync_interval_steps:.0f}. "
            "More fragments are smaller."
        ]
    return []
