"""A fleet as the planner sees it: its sites, their training, and the part of it that travels. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from aggregator.config import AggregatorConfig
from aggregator.state.model_limits import least_held_bytes, least_message_bytes
from broker.routing.directory import MAX_SHARDS
from broker.wire.errors import ConfigError
from broker.wire.fragments import TensorSpec, shard_of
from broker.wire.headers import room_bytes
from broker.wire.messages import Codec
from ops.planning.footprint import FragmentBytes, cut, wire_of
from ops.planning.links import Assume, Load, Mode, required

#: The aggregator's time for a round, measured (benchmarks/README.md, "Outer round latency") on two shared cores.
ROUND_S, ROUND_PER_ISLAND_S = 6e-3, 3e-3
MERGE_AND_PERSIST_S, MERGE_PER_ISLAND_S = 13e-9, 1.3e-9  # per parameter of the fragment

#: The most of prices, and of numbers in a fleet's file: more is a slip of the pen, and overflows sums.
MOST = 1e18
#: The least utilisation to ask for: below it a bandwidth is no number.
LEAST_UTILISATION = 1e-6

#: The limits of a run that nobody has changed.
_USUAL: Final = AggregatorConfig()

#: Cures for questions that need the links, or the accelerators.
GIVE_BANDWIDTH: Final = "give --bandwidth, or with --fleet gbps in each [[island]],"
GIVE_ACCELERATORS: Final = "give --accelerators as well, or with --fleet accelerators in each [[island]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One site, which is one island."""

    name: str  # for people
    step_s: float  # seconds per inner step, computing only
    accelerators: int | None = None  # None: not known
    gbps: float | None = None  # of its link, in each direction; None: not known
    latency_s: float = 0.0  # one way, to the hub
    tokens_per_step: int  # of its batch

    def __post_init__(self) -> None:
        """Raises ConfigError where a site cannot be, by the name of the flag."""
        _check("step_time", self.step_s, 1e-6, 1e6)
        _check("bandwidth", self.gbps, 1e-9, 1e9)
        _check("latency_ms", self.latency_s * 1e3, 0, 3_600_000)
        _check("accelerators", self.accelerators, 1, 10**8)
        _check("tokens_per_step", self.tokens_per_step, 1, 10**15)


def _check(name: str, value: float | None, least: float, most: float, why: str = "") -> None:
    """Raises ConfigError by the name of the flag: that is what can be changed."""
    if value is not None and not least <= value <= most:
        raise ConfigError(name, value, f"must lie between {least:g} and {most:g}{why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A fleet, what it trains, and how."""

    parameters: int  # elements that are synchronised
    sites: tuple[Site, ...]
    tensors: tuple[TensorSpec, ...] = ()  # of the model; empty if only their number is known
    codec: Codec = Codec.BF16
    version_codec: Codec = Codec.BF16
    sync_interval_steps: int = 24
    fragments: int = 8  # P, at most: a model of fewer tensors has fewer
    overlap_steps: int = 2
    shards: int = 1  # aggregators that share the fragments, each on a host of its own
    utilisation: float = 0.95  # share of the time that accelerators should compute
    assume: Assume = Assume.ATOLL
    broker_gbps: float | None = None  # of the broker's link, in each direction; None: wide enough
    max_message_bytes: int = _USUAL.max_message_bytes  # limit of the run, as are the next three; 0: it follows
    held_bytes: int = _USUAL.held_bytes
    max_tokens_per_step: int = _USUAL.max_tokens_per_step
    max_staleness: int = _USUAL.max_staleness
    price_per_hour: float | None = None  # of one accelerator
    price_per_gb: float | None = None  # of bytes that leave a site
    accelerator_gb: float | None = None  # memory of one accelerator; None: not checked
    host_gb: float | None = None  # memory of one host; None: not checked
    goodput: Mapping[Mode, float | None] = field(default_factory=dict)  # 0 to 1; None: not known
    goodput_caveats: tuple[str, ...] = ()  # what to know before it is believed: sentences

    def __post_init__(self) -> None:
        """Raises ConfigError for a setting that no fleet can have, with what would be possible."""
        _check("params", self.parameters, 1, 10**15, ", such as 125M, 5B or 5e9")
        if not self.sites:
            raise ConfigError("sites", 0, "must be at least 1")
        if not LEAST_UTILISATION <= self.utilisation < 1:
            least = f"must be at least {LEAST_UTILISATION:g} and below 1, such as 0.95"
            cure = f"{least}: all of the time would take an endless bandwidth"
            raise ConfigError("utilisation", self.utilisation, cure)
        _check("sync_interval", self.sync_interval_steps, 1, 10_000)
        most = min(self.sync_interval_steps, self.parameters)
        _check("fragments", self.fragments, 1, most, ": at most one falls due per inner step (sync_interval)")
        _check("shards", self.shards, 1, min(MAX_SHARDS, self.fragments), ": each has at least one of the fragments")
        _check("overlap", self.overlap_steps, 0, 10_000, " inner steps, 2 is usual")
        _check("broker_bandwidth", self.broker_gbps, 1e-9, 1e12)
        _check("memory_gb", self.accelerator_gb, 1e-9, 1e12)
        _check("host_memory_gb", self.host_gb, 1e-9, 1e12)
        _check("price", self.price_per_hour, 0, MOST)
        _check("price_per_gb", self.price_per_gb, 0, MOST)

    @property
    def differences(self) -> bool:
        """Whether versions travel as differences to the ones before."""
        return self.version_codec is not Codec.F32

    @property
    def links_known(self) -> bool:
        """Whether the bandwidth of every site is known; the broker's is wide enough if nothing is said of it."""
        return all(site.gbps is not None for site in self.sites)

    def site_gbps(self, *, share: float = math.inf) -> tuple[float, ...]:
        """Returns each site's bandwidth, at most its share of the broker's through a hub; infinite: not known."""
        return tuple(min(share, math.inf if site.gbps is None else site.gbps) for site in self.sites)

    @property
    def accelerators(self) -> int | None:
        """Accelerators of all sites; None if some are not known."""
        known = [site.accelerators for site in self.sites if site.accelerators is not None]
        return sum(known) if len(known) == len(self.sites) else None


def check_overlap(fleet: Fleet) -> None:
    """Raises ConfigError where tau leaves no step of H: each version would be late."""
    interval = fleet.sync_interval_steps
    if fleet.overlap_steps >= interval:
        cure = f"must be below sync_interval = {interval}: a fragment is adopted before it is due again"
        raise ConfigError("overlap", fleet.overlap_steps, cure)


def lower_median(values: Sequence[float]) -> float:
    """Returns the lower median, the pace of decoupled rounds (design, section 4.1); larger is faster."""
    return sorted(values)[(len(values) - 1) // 2]


def wire_bytes(fleet: Fleet, mode: Mode) -> FragmentBytes:
    """Returns the bytes of each fragment; DiLoCo and data-parallel training move the model as one."""
    payload = cut(fleet.parameters, fleet.tensors, 1 if mode in (Mode.DILOCO, Mode.DP) else fleet.fragments)
    return wire_of(payload, codec=fleet.codec, version_codec=fleet.version_codec)


def load_of(fleet: Fleet, mode: Mode) -> Load:
    """Returns what has to travel when ``fleet`` trains in this mode."""
    wire = wire_bytes(fleet, mode)
    steps_s = [site.step_s for site in fleet.sites]
    decoupled = mode is Mode.DECOUPLED
    return Load(
        mode=mode,
        assume=fleet.assume,
        sites=len(fleet.sites),
        # Synchronous ways follow the slowest site.
        step_s=-lower_median([-each for each in steps_s]) if decoupled else max(steps_s),
        wire=wire,
        codec=fleet.codec,
        sync_interval_steps=1 if mode is Mode.DP else fleet.sync_interval_steps,
        overlap_steps=0 if mode in (Mode.DILOCO, Mode.DP) else fleet.overlap_steps,
        max_staleness=fleet.max_staleness,
        latency_s=_latency_s(fleet, mode),
        # The baselines are granted an aggregator that takes no time.
        mergings_s=tuple(_merging_s(fleet, elements) if decoupled else 0.0 for elements in wire.elements),
    )


def _latency_s(fleet: Fleet, mode: Mode) -> float:
    if fleet.assume is Assume.PAPER:
        return 0.0
    latencies_s = [site.latency_s for site in fleet.sites]
    if mode is Mode.DECOUPLED:  # rounds wait for the median site; who is farther away is merged later
        return -2 * lower_median([-each for each in latencies_s])
    there_and_back_s = 2 * max(latencies_s)
    return there_and_back_s * (len(fleet.sites) - 1) if mode is Mode.DP else there_and_back_s


def _merging_s(fleet: Fleet, elements: int) -> float:
    """Seconds that the aggregator takes for a round of a fragment of so many parameters."""
    if fleet.assume is Assume.PAPER:
        return 0.0
    islands = len(fleet.sites)
    per_element_s = MERGE_AND_PERSIST_S + islands * MERGE_PER_ISLAND_S
    return ROUND_S + islands * ROUND_PER_ISLAND_S + elements * per_element_s


def merging_per_cycle_s(fleet: Fleet) -> float:
    """Returns the seconds to merge every fragment once: one after the other, shards side by side."""
    of_shards = [0.0] * fleet.shards
    for p, elements in enumerate(wire_bytes(fleet, Mode.DECOUPLED).elements):
        of_shards[shard_of(p, fleet.shards)] += _merging_s(fleet, elements)
    return max(of_shards)


def merging_steps(fleet: Fleet) -> int:
    """Returns the least H: inner steps, at the pace of rounds, in which every fragment is merged once."""
    return math.ceil(merging_per_cycle_s(fleet) / load_of(fleet, Mode.DECOUPLED).step_s * (1 - 1e-9))


def apart(fleet: Fleet, mode: Mode) -> bool:
    """Says whether aggregators have hosts of their own: contributions go there, and versions come back.

    The baselines are granted an aggregator beside the broker.
    """
    return mode is Mode.DECOUPLED and fleet.shards > 1 and fleet.assume is Assume.ATOLL


def share_gbps(fleet: Fleet, load: Load) -> float:
    """Returns a site's share of the broker's link, in its wider direction; infinite: unknown or unused.

    With shards all contributions leave the broker's host again, beside the versions for all sites: its way out is the
    wider one. Raises ConfigError where no bandwidth of the sites is enough.
    """
    if fleet.broker_gbps is None or load.ring:
        return math.inf
    share = fleet.broker_gbps / load.sites
    if not apart(fleet, load.mode):
        return share
    need = required(load, fleet.utilisation)
    return share * need.exact_gbps / (need.up_gbps + need.down_gbps)


def limits_to_raise(fleet: Fleet, mode: Mode = Mode.DECOUPLED) -> dict[str, int]:
    """Returns setting -> the least value that lets a mode's islands join, for each limit below it.

    No codec helps: what an island supplies of version 0 is float32. A limit that is not given follows from the model,
    or from the memory of hosts, and is told where that is known to be too little.
    """
    largest = max(wire_bytes(fleet, mode).elements)
    least = {
        "max_message_bytes": least_message_bytes(largest),
        "held_bytes": least_held_bytes(largest, len(fleet.sites)),
        "max_tokens_per_step": max(site.tokens_per_step for site in fleet.sites),
    }
    limits = limits_of(fleet)
    return {name: value for name, value in least.items() if name in limits and value > limits[name]}


def limits_of(fleet: Fleet) -> dict[str, int]:
    """Returns the limits of the run that are given, or follow from a known memory of a host."""
    given = {name: getattr(fleet, name) for name in ("max_message_bytes", "held_bytes", "max_tokens_per_step")}
    if not given["max_message_bytes"] and fleet.host_gb is not None:
        given["max_message_bytes"] = room_bytes(round(fleet.host_gb * 1e9))
    return {name: value for name, value in given.items() if value}
