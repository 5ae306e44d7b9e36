"""Plans a fleet: forecasts of all modes, memory, settings for given links, warnings. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from aggregator.rules.interval import JOURNEYS, WORTH_TELLING, journey_cost
from broker.base.errors import ConfigError
from broker.wire.fragments import shard_of
from broker.wire.messages import Codec
from ops.forecast.fleet import PLANNED, Assume, Fleet, Mode, limits_to_raise, lower_median
from ops.forecast.footprint import (
    TRAINER_BYTES_PER_PARAMETER,
    FragmentBytes,
    Memory,
    hub_memory,
    island_host_memory,
)
from ops.forecast.links import journeys_s, load_of, merging_steps, required
from ops.forecast.pace import Forecast, forecast, journey_steps

#: Intervals, fragments and codecs that :func:`choose` tries, the least harmful first: 4 bits with error feedback cost
#: less than syncing half as often. Versions are differences with error feedback, too, so both ways are rounded alike.
INTERVALS = (24, 48, 100, 200, 500, 1000)
FRAGMENTS = (8, 24, 48, 96, 192, 384, 768)
CODECS = tuple((codec, codec) for codec in (Codec.BF16, Codec.INT8, Codec.INT4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The fleet with settings chosen for links of ``link_gbps``, and its needs with them."""

    fleet: Fleet
    link_gbps: float
    up_gbps: float
    down_gbps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Forecasts of decoupled training and other modes (or why one is impossible), and memory by process."""

    chosen: Forecast
    alternatives: Mapping[Mode, Forecast | str]
    memory: Mapping[str, Memory]
    choice: Choice | None


def plan(fleet: Fleet) -> FleetPlan:
    """Returns the plan of a fleet; with a ``choice`` if links are known and settings for them exist.

    Raises:
        ConfigError: It cannot work, with what would be possible.
    """
    chosen = forecast(fleet, Mode.DECOUPLED)
    choice = None if chosen.link_gbps is None else _choice(fleet)
    memory = memory_of(fleet, chosen)
    others: dict[Mode, Forecast | str] = {}
    for other in PLANNED[1:]:
        try:
            others[other] = forecast(fleet, other)
        except ConfigError as err:
            others[other] = err.cure
    return FleetPlan(chosen=chosen, alternatives=others, memory=memory, choice=choice)


# --- memory -------------------------------------------------------------------------------------------------------


def memory_of(fleet: Fleet, chosen: Forecast) -> dict[str, Memory]:
    """Returns process -> memory in bytes.

    The trainer's is of an island's accelerators together, before activations: parameters, gradients and Adam's moments
    in float32, of which 16-bit parameters and gradients save a quarter; and the base of adapters as it is held.
    Activations have no bound here.

    Raises:
        ConfigError: It does not fit into the memory that there is, with what would.
    """
    islands, wire, shares = len(fleet.sites), fleet.wire(), chosen.open_shares
    hosts = {
        "aggregator": _fullest_shard(fleet, wire, shares),
        "broker": hub_memory(wire, islands, shares, fleet.differences)[1],
        "island_host": island_host_memory(wire, shares, fleet.differences),
    }
    if fleet.host_memory_gb is not None:
        expected = {name: each.expected for name, each in hosts.items()}
        if fleet.shards == 1:  # one aggregator runs beside the broker, shards do not
            both = expected.pop("aggregator") + expected.pop("broker")
            expected = {"aggregator beside the broker": both, **expected}
        for name, nbytes in expected.items():
            if nbytes > fleet.host_memory_gb * 1e9:
                cure = f"is too little for the {name}: it takes {at_least(nbytes / 1e9)} GB"
                raise ConfigError("host_memory_gb", fleet.host_memory_gb, f"{cure}; find that, or a smaller model")
    trainer = float(TRAINER_BYTES_PER_PARAMETER * sum(wire.elements) + fleet.base_bytes)
    return hosts | {"island_accelerators": Memory(expected=trainer, bound=None)}


def _fullest_shard(fleet: Fleet, wire: FragmentBytes, open_shares: Sequence[float]) -> Memory:
    """Returns the memory of the aggregator; of several the largest, since fragments are unequal."""
    memories = []
    for shard in range(min(fleet.shards, wire.rounds)):
        own = [p for p in range(wire.rounds) if shard_of(p, fleet.shards) == shard]
        shares = [open_shares[p] for p in own]
        memories.append(hub_memory(wire.of(own), len(fleet.sites), shares, fleet.differences)[0])
    return max(memories, key=lambda each: each.expected)


# --- settings for given links -------------------------------------------------------------------------------------


def _choice(fleet: Fleet) -> Choice | None:
    """Chooses settings for the narrowest link, unless all islands would sync less often for its sake.

    Rounds do not wait for it: what of its work arrives is told beside the plan.
    """
    narrowest_gbps, median_gbps = min(fleet.links_gbps), lower_median(fleet.links_gbps)
    if median_gbps <= narrowest_gbps * (1 + 1e-9):
        return choose(fleet, narrowest_gbps)
    try:
        of_all = choose(fleet, narrowest_gbps)
    except ConfigError:
        of_all = None
    unchanged = of_all is not None and of_all.fleet.sync_interval == fleet.sync_interval
    return of_all if unchanged or math.isinf(median_gbps) else choose(fleet, median_gbps)


def choose(fleet: Fleet, gbps: float) -> Choice | None:
    """Returns the settings for links of ``gbps`` that harm learning least; the fleet's own if they fit.

    None if with every setting the aggregator is too slow, or a fragment is too large for a message. Other limits of the
    run are raised at the aggregator alone, and nobody has to sync less often for them.

    Raises:
        ConfigError: No setting is enough, with the bandwidth that would be.
    """
    least = math.inf
    for candidate in _candidates(fleet):
        load = load_of(candidate, Mode.DECOUPLED)
        if merging_steps(candidate) > candidate.sync_interval:
            continue
        if fleet.assume is Assume.ATOLL and "max_message_bytes" in limits_to_raise(candidate):
            continue
        need = required(load, candidate.utilisation)
        if need.exact_gbps > gbps * (1 + 1e-9):
            least = min(least, need.exact_gbps)
        elif max(journeys_s(load, gbps, gbps)) <= load.interval_s * (1 + 1e-9):
            # Else the links would do, but with merging between up and down work is more than a version old.
            # Without the way to the next point of a grid.
            up_gbps, down_gbps = min(need.up_gbps, need.exact_gbps), min(need.down_gbps, need.exact_gbps)
            return Choice(fleet=candidate, link_gbps=gbps, up_gbps=up_gbps, down_gbps=down_gbps)
    if math.isinf(least):
        return None
    longest = max(INTERVALS[-1], fleet.sync_interval)
    enough = f"decoupled needs at least {at_least(least)} Gbit/s a site"
    raise ConfigError("bandwidth", gbps, f"no codec, H up to {longest} or P is enough; {enough}")


def at_least(value: float) -> str:
    """Returns a value rounded up to three digits, so that giving it is enough."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit * (1 - 1e-9)) * unit:.3g}"


def _candidates(fleet: Fleet) -> Iterator[Fleet]:
    own = (fleet.codec, fleet.codec_of_versions)
    for h in (fleet.sync_interval, *(each for each in INTERVALS if each > fleet.sync_interval)):
        for up, down in (own, *(pair for pair in CODECS if pair != own)):
            for p in (fleet.fragments, *(each for each in FRAGMENTS if each > fleet.fragments)):
                if p <= min(h, fleet.parameters):
                    yield replace(fleet, sync_interval=h, fragments=p, codec=up, version_codec=down)


# --- warnings -----------------------------------------------------------------------------------------------------


def notes(fleet: Fleet, planned: FleetPlan) -> list[str]:
    """Returns warnings as sentences; empty if all is well."""
    chosen = planned.chosen
    found = []
    if chosen.fits is False:
        found.append(
            f"The narrowest link has {chosen.link_gbps:.3g} of {chosen.exact_gbps:.3g} Gbit/s needed for H = "
            f"{fleet.sync_interval}: H is {chosen.sync_interval_steps:.0f}."
        )
    steps, asked = merging_steps(fleet), fleet.sync_interval
    if steps > asked:
        found.append(
            f"Merging every fragment once takes {steps} steps at the speed measured on two shared cores: H grows "
            f"to {steps} at least, unless the aggregator's host is {steps / asked:.3g} times as fast, or several "
            "aggregators share the work (--shards)."
        )
    elif chosen.fits is not False and chosen.sync_interval_steps > max(asked, _far(fleet)) * (1 + 1e-6):
        found.append(
            f"A fragment's way up and its merging take longer than H steps: H grows to "
            f"{chosen.sync_interval_steps:.0f}. More fragments are smaller."
        )
    found += _stale_sites(fleet, chosen) + _long_journeys(fleet)
    for name, (limit, least) in limits_to_raise(fleet).items() if fleet.assume is Assume.ATOLL else ():
        where = " everywhere, or take more fragments" if name == "max_message_bytes" else ""
        found.append(f"{name} is {limit}, and the islands need {least}: raise it{where}.")
    return found


def _stale_sites(fleet: Fleet, chosen: Forecast) -> list[str]:
    """Returns the warning about the site whose work arrives latest, with the share that counts."""
    site, worst = max(zip(fleet.sites, chosen.arrivals, strict=True), key=lambda each: each[1].age)
    if min(worst.participation, worst.in_time) == 1:
        return []
    late = sum(min(each.participation, each.in_time) < 1 for each in chosen.arrivals)
    who = f"{site.name} and {late - 1} more" if late > 1 else site.name
    return [
        f"{who}: in {worst.participation:.0%} of the versions at most, with steps up to {worst.age:.1f} versions old "
        f"of {fleet.max_staleness} or {fleet.max_staleness_s:g} s allowed (max_staleness): about {worst.in_time:.0%} "
        "of what is trained there counts."
    ]


def _long_journeys(fleet: Fleet) -> list[str]:
    """Returns what latency does to H, as measured in docs/results.md (Journeys)."""
    far, asked = _far(fleet), fleet.sync_interval
    cost = journey_cost(len(fleet.sites), far / JOURNEYS, max(far, asked))
    if cost < WORTH_TELLING:
        return []
    found = f"The way there and back takes {far // JOURNEYS} steps of {asked}"
    if far > asked:
        found += f": H grows to {far}, which then costs no more and sends less"
    return [f"{found}. It costs about {cost:.0%} of the loss of a small model."]


def _far(fleet: Fleet) -> int:
    """Returns the inner steps that journeys make an interval, at least."""
    return journey_steps(fleet, load_of(fleet, Mode.DECOUPLED))
