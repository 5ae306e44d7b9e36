"""The plan of a fleet: forecasts of one mode and the others, memory, settings for given links. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from broker.wire.errors import ConfigError
from broker.wire.fragments import shard_of
from broker.wire.messages import Codec
from ops.planning.fleet import (
    GIVE_ACCELERATORS,
    Fleet,
    limits_to_raise,
    load_of,
    lower_median,
    merging_per_cycle_s,
    share_gbps,
    wire_bytes,
)
from ops.planning.footprint import (
    FragmentBytes,
    Memory,
    aggregator_memory,
    broker_memory,
    island_host_memory,
    trainer_memory,
)
from ops.planning.forecast import Forecast, forecast
from ops.planning.links import Assume, Mode, journeys_s, other_than_waiting, required

#: Intervals, fragments and codecs that :func:`choose` tries, the least harmful first: 4 bits with error feedback cost
#: less than syncing half as often. Versions are differences with error feedback, too, so both ways are rounded alike.
INTERVALS = (24, 48, 100, 200, 500, 1000)
FRAGMENTS = (8, 24, 48, 96, 192, 384, 768)
CODECS = tuple((codec, codec) for codec in (Codec.BF16, Codec.INT8, Codec.INT4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Settings with which a mode runs on links of ``link_gbps``, and what they then need of each site."""

    link_gbps: float
    codec: Codec
    version_codec: Codec
    sync_interval_steps: int
    fragments: int
    up_gbps: float
    down_gbps: float


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
    found = forecast(fleet, mode)
    return found, None if found.link_gbps is None or mode is Mode.DP else _choice(fleet, mode)


# --- memory -------------------------------------------------------------------------------------------------------


def memory_of(fleet: Fleet, chosen: Forecast) -> dict[str, Memory]:
    """Returns process -> memory in bytes; for data-parallel training, not our program, the trainer alone.

    Raises:
        ConfigError: It does not fit into the memory that there is, with what would.
    """
    islands, wire, shares = len(fleet.sites), wire_bytes(fleet, chosen.mode), chosen.open_shares
    hosts: dict[str, Memory] = {}
    if chosen.mode is not Mode.DP:
        hosts = {
            "aggregator": _fullest_shard(fleet, wire, shares),
            "broker": broker_memory(wire, islands=islands, open_shares=shares, differences=fleet.differences),
            "island_host": island_host_memory(wire, open_shares=shares, differences=fleet.differences),
        }
    trainer = trainer_memory(sum(wire.elements))
    if fleet.host_gb is not None:
        expected = {name: each.expected for name, each in hosts.items()}
        if fleet.shards == 1 and hosts:  # one aggregator runs beside the broker, shards do not
            both = expected.pop("aggregator") + expected.pop("broker")
            expected = {"aggregator beside the broker": both, **expected}
        for name, nbytes in expected.items():
            if nbytes > fleet.host_gb * 1e9:
                cure = f"is too little for the {name}: it takes {at_least(nbytes / 1e9)} GB"
                raise ConfigError("host_memory_gb", fleet.host_gb, f"{cure}; find that, or a smaller model")
    if fleet.accelerator_gb is not None:
        if fleet.accelerators is None:
            cure = f"is that of one accelerator: {GIVE_ACCELERATORS}"
            raise ConfigError("memory_gb", fleet.accelerator_gb, cure)
        needed = trainer.expected / 1e9
        fewest = min(site.accelerators for site in fleet.sites if site.accelerators is not None)
        if needed > fewest * fleet.accelerator_gb:
            least = math.ceil(needed / fleet.accelerator_gb)
            cure = f"training takes {needed:.4g} GB before activations (16 bytes a parameter): at least {least} a site"
            raise ConfigError("accelerators", fewest, cure)
    return hosts | {"island_accelerators": trainer}


def _fullest_shard(fleet: Fleet, wire: FragmentBytes, open_shares: Sequence[float]) -> Memory:
    """Returns the memory of the aggregator, of several of the one that needs most: fragments are unequal."""
    memories = []
    for shard in range(min(fleet.shards, wire.rounds)):
        own = [p for p in range(wire.rounds) if shard_of(p, fleet.shards) == shard]
        shares = [open_shares[p] for p in own]
        islands, differences = len(fleet.sites), fleet.differences
        memory = aggregator_memory(wire.of(own), islands=islands, open_shares=shares, differences=differences)
        memories.append(memory)
    return max(memories, key=lambda each: each.expected)


# --- settings for given links -------------------------------------------------------------------------------------


def _choice(fleet: Fleet, mode: Mode) -> Choice | None:
    """Chooses for the narrowest link, unless for its sake all decoupled islands would sync less often.

    Rounds do not wait for it: what of its work arrives is told beside the plan.
    """
    narrowest_gbps, median_gbps = min(fleet.site_gbps()), lower_median(fleet.site_gbps())
    if mode is not Mode.DECOUPLED:
        return choose(fleet, mode, narrowest_gbps)
    paced_gbps = min(median_gbps, share_gbps(fleet, load_of(fleet, mode)))
    if paced_gbps <= narrowest_gbps * (1 + 1e-9):
        return choose(fleet, mode, narrowest_gbps)
    try:
        of_all = choose(fleet, mode, narrowest_gbps)
    except ConfigError:
        of_all = None
    unchanged = of_all is not None and of_all.sync_interval_steps == fleet.sync_interval_steps
    return of_all if unchanged or math.isinf(paced_gbps) else choose(fleet, mode, median_gbps)


def choose(fleet: Fleet, mode: Mode, gbps: float) -> Choice | None:
    """Returns the least harmful settings for links of ``gbps``, the fleet's own if these are enough.

    What a site has of the broker's link as well is a matter of the settings, so ``gbps`` is of the sites' links alone.
    None if with every setting the aggregator is too slow, or a fragment is too large for a message.

    Raises:
        ConfigError: No setting is enough, with the bandwidth that would be.
    """
    least, refused = math.inf, False
    had_gbps = min(gbps, share_gbps(fleet, load_of(fleet, mode)))
    for candidate in _candidates(fleet):
        load = load_of(candidate, mode)
        if mode is Mode.DECOUPLED and not _works(candidate, load.interval_s):
            continue
        try:
            need, link_gbps = required(load, candidate.utilisation), min(gbps, share_gbps(candidate, load))
        except ConfigError:
            refused = True
            continue
        if need.exact_gbps > link_gbps * (1 + 1e-9):
            least, had_gbps = min((least, had_gbps), (need.exact_gbps, link_gbps))
            continue
        if mode is Mode.DECOUPLED and max(journeys_s(load, link_gbps, link_gbps)) > load.interval_s * (1 + 1e-9):
            continue  # the links would do, but with merging between up and down work is more than a version old
        return Choice(
            link_gbps=link_gbps,
            codec=candidate.codec,
            version_codec=candidate.version_codec,
            sync_interval_steps=candidate.sync_interval_steps,
            fragments=candidate.fragments,
            # Without the way to the next point of a grid.
            up_gbps=min(need.up_gbps, need.exact_gbps),
            down_gbps=min(need.down_gbps, need.exact_gbps),
        )
    if math.isinf(least) and not refused:
        return None
    if math.isinf(least):
        instead = other_than_waiting(load_of(fleet, mode))
        cure = f"{mode} reaches {fleet.utilisation:.0%} on no link with this latency; {instead}"
    else:
        longest = max(INTERVALS[-1], fleet.sync_interval_steps)
        enough = f"{mode} needs at least {at_least(least)} Gbit/s a site"
        cure = f"no codec, H up to {longest} or P is enough; {enough}"
    raise ConfigError("bandwidth", had_gbps, cure)


def _works(fleet: Fleet, interval_s: float) -> bool:
    """Whether the aggregator merges every fragment within H steps, and messages take the largest of them.

    Other limits of the run are raised at the aggregator alone, and nobody has to sync less often for them.
    """
    if fleet.assume is Assume.PAPER:
        return True
    return merging_per_cycle_s(fleet) <= interval_s and "max_message_bytes" not in limits_to_raise(fleet)


def at_least(value: float) -> str:
    """Returns three digits of it, rounded up: who gives that much is not refused."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit * (1 - 1e-9)) * unit:.3g}"


def as_chosen(fleet: Fleet, choice: Choice) -> Fleet:
    """Returns the fleet with the settings that were chosen for it."""
    return replace(
        fleet,
        codec=choice.codec,
        version_codec=choice.version_codec,
        sync_interval_steps=choice.sync_interval_steps,
        fragments=choice.fragments,
    )


def _candidates(fleet: Fleet) -> Sequence[Fleet]:
    intervals = [fleet.sync_interval_steps] + [each for each in INTERVALS if each > fleet.sync_interval_steps]
    fragments = [fleet.fragments] + [each for each in FRAGMENTS if each > fleet.fragments]
    own = (fleet.codec, fleet.version_codec)
    return [
        replace(fleet, sync_interval_steps=h, fragments=p, codec=up, version_codec=down)
        for h in intervals
        for up, down in (own, *(pair for pair in CODECS if pair != own))
        for p in fragments
        if p <= min(h, fleet.parameters)
    ]
