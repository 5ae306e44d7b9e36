"""The plan of a fleet: what one mode comes to (:mod:`ops.planning.forecast`), the others beside it, and memory. Pure.

:mod:`ops.planning.choosing` goes the other way, from links to settings. :func:`utilisation_curve` gives arrays for
plots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from broker.wire.errors import ConfigError
from broker.wire.fragments import shard_of
from ops.planning.choosing import Choice, at_least, choose
from ops.planning.fleet import (
    GIVE_ACCELERATORS,
    Fleet,
    fragments_of,
    load_of,
    lower_median,
    payload_of,
    share_gbps,
)
from ops.planning.footprint import (
    Memory,
    MessageBytes,
    Payload,
    aggregator_memory,
    broker_memory,
    island_host_memory,
    trainer_memory,
    wire_of,
)
from ops.planning.forecast import Forecast, forecast
from ops.planning.links import Mode, required
from ops.planning.utilisation import Float64Array


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
    return found, None if found.link_gbps is None or mode is Mode.DP else _choice(fleet, mode)


def _choice(fleet: Fleet, mode: Mode) -> Choice | None:
    """Chooses for the narrowest link, unless decoupled islands would all sync less often for the sake of one.

    Rounds do not wait for it: what of its work arrives is told beside the plan.
    """
    narrowest_gbps, median_gbps = min(fleet.site_gbps()), lower_median(fleet.site_gbps())
    if mode is not Mode.DECOUPLED:
        return choose(fleet, mode, narrowest_gbps)
    share = share_gbps(fleet, load_of(fleet, mode))
    if min(median_gbps, share) <= narrowest_gbps * (1 + 1e-9):
        return choose(fleet, mode, narrowest_gbps)
    try:
        of_all = choose(fleet, mode, narrowest_gbps)
    except ConfigError:
        of_all = None
    if math.isinf(min(median_gbps, share)) or (
        of_all is not None and of_all.sync_interval_steps == fleet.sync_interval_steps
    ):
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
            "aggregator": _fullest_shard(fleet, payload, wire, chosen.open_shares),
            "broker": broker_memory(payload, wire, islands=islands, open_shares=chosen.open_shares),
            "island_host": island_host_memory(payload, wire, open_shares=chosen.open_shares),
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


def _fullest_shard(fleet: Fleet, payload: Payload, wire: MessageBytes, open_shares: Sequence[float]) -> Memory:
    """Returns the memory of the aggregator, of several of the one that needs most: fragments are unequal."""
    of_shards: dict[int, list[int]] = {}
    for p in range(len(payload)):
        of_shards.setdefault(shard_of(p, fleet.shards), []).append(p)
    memories = (
        aggregator_memory(
            payload.of(own), wire.of(own), islands=len(fleet.sites), open_shares=[open_shares[p] for p in own]
        )
        for own in of_shards.values()
    )
    return max(memories, key=lambda each: each.expected)


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
