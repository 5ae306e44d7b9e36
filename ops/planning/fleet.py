"""A fleet as the planner sees it: its sites, what they train and how, and what of it has to travel. Pure."""

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
from broker.wire.messages import Codec
from ops.planning.footprint import Payload, cut, wire_of
from ops.planning.links import Assume, Load, Mode, required

#: The aggregator's time for a round, measured (benchmarks/README.md, "Outer round latency") on two shared cores.
ROUND_S, ROUND_PER_ISLAND_S = 6e-3, 3e-3
MERGE_AND_PERSIST_S, MERGE_PER_ISLAND_S = 13e-9, 1.3e-9  # per parameter of the fragment

#: Of prices, and of numbers in a fleet's file: more is a slip of the pen, and overflows sums.
MOST = 1e18
#: Of what is asked for: below it a bandwidth is no number.
LEAST_UTILISATION = 1e-6

#: Whose limits a run has that nobody has changed.
_USUAL: Final = AggregatorConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One site, which is one island.

    Attributes:
        name: For people.
        step_s: Seconds per inner step, computing only.
        accelerators: None if not known.
        gbps: Of its link, in each direction; None if not known.
        latency_s: One way, to the hub.
        tokens_per_step: Of its batch.
    """

    name: str
    step_s: float
    accelerators: int | None = None
    gbps: float | None = None
    latency_s: float = 0.0
    tokens_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A fleet, what it trains, and how.

    Attributes:
        parameters: Elements that are synchronised.
        tensors: Of the model; empty if only their number is known.
        fragments: P, at most: a model of fewer tensors has fewer.
        shards: Aggregators that share the fragments, each on a host of its own.
        utilisation: Share of the time that accelerators should compute.
        broker_gbps: Of the broker's link, in each direction; None: wide enough.
        max_message_bytes: Limit of the run, as are the next three; :class:`AggregatorConfig` says of what.
        price_per_hour: Of one accelerator.
        price_per_gb: Of bytes that leave a site.
        accelerator_gb: Memory of one accelerator; None: not checked.
        host_gb: Memory of one host; None: not checked.
        goodput: Of each mode, 0 to 1; None where it is not known.
        goodput_caveats: What to know before it is believed: sentences.
    """

    parameters: int
    sites: tuple[Site, ...]
    tensors: tuple[TensorSpec, ...] = ()
    codec: Codec = Codec.BF16
    version_codec: Codec = Codec.F32
    sync_interval_steps: int = 24
    fragments: int = 8
    overlap_steps: int = 2
    shards: int = 1
    utilisation: float = 0.95
    assume: Assume = Assume.ATOLL
    broker_gbps: float | None = None
    max_message_bytes: int = _USUAL.max_message_bytes
    held_bytes: int = _USUAL.held_bytes
    max_tokens_per_step: int = _USUAL.max_tokens_per_step
    max_staleness: int = _USUAL.max_staleness
    price_per_hour: float | None = None
    price_per_gb: float | None = None
    accelerator_gb: float | None = None
    host_gb: float | None = None
    goodput: Mapping[Mode, float | None] = field(default_factory=dict)
    goodput_caveats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks what can be checked without planning.

        Raises:
            ConfigError: A setting that no fleet can have, with what would be possible.
        """
        if not 1 <= self.parameters <= 10**15:
            raise ConfigError("params", self.parameters, "must lie between 1 and 1e15, such as 125M, 5B or 5e9")
        if not self.sites:
            raise ConfigError("sites", 0, "must be at least 1")
        for site in self.sites:
            check_site(site)
        if not LEAST_UTILISATION <= self.utilisation < 1:
            least = f"must be at least {LEAST_UTILISATION:g} and below 1, such as 0.95"
            cure = f"{least}: all of the time would take an endless bandwidth"
            raise ConfigError("utilisation", self.utilisation, cure)
        for name, value in (("sync_interval", self.sync_interval_steps), ("fragments", self.fragments)):
            if not 1 <= value <= 10_000:
                raise ConfigError(name, value, "must lie between 1 and 10000")
        if self.fragments > self.sync_interval_steps:
            cure = f"must not exceed sync_interval = {self.sync_interval_steps}: at most one falls due per inner step"
            raise ConfigError("fragments", self.fragments, cure)
        if self.fragments > self.parameters:
            raise ConfigError("fragments", self.fragments, f"must not exceed the {self.parameters} parameters")
        if not 1 <= self.shards <= min(MAX_SHARDS, self.fragments):
            cure = f"must lie between 1 and {min(MAX_SHARDS, self.fragments)}: each has at least one of the fragments"
            raise ConfigError("shards", self.shards, cure)
        if not 0 <= self.overlap_steps <= 10_000:
            raise ConfigError("overlap", self.overlap_steps, "must lie between 0 and 10000 inner steps, 2 is usual")
        if self.version_codec.blockwise and self.assume is Assume.ATOLL:
            cure = "versions travel as f32 or bf16; int8 and int4 are for contributions (codec)"
            raise ConfigError("version_codec", str(self.version_codec), cure)
        # By the names of their flags: those are what can be changed.
        gigabytes = {"memory_gb": self.accelerator_gb, "host_memory_gb": self.host_gb}
        for name, size in {"broker_bandwidth": self.broker_gbps, **gigabytes}.items():
            if size is not None and not 1e-9 <= size <= 1e12:
                raise ConfigError(name, size, "must be above 0")
        for name, price in {"price": self.price_per_hour, "price_per_gb": self.price_per_gb}.items():
            if price is not None and not 0 <= price <= MOST:
                raise ConfigError(name, price, f"must lie between 0 and {MOST:g}")

    @property
    def links_known(self) -> bool:
        """Whether the bandwidth of every site is known; the broker's is wide enough if nothing is said of it."""
        return all(site.gbps is not None for site in self.sites)

    def site_gbps(self, *, share: float = math.inf) -> tuple[float, ...]:
        """Returns the bandwidth of each site, through a hub at most its share of the broker's; infinite: not known."""
        return tuple(min(share, math.inf if site.gbps is None else site.gbps) for site in self.sites)

    def narrowest_gbps(self, *, share: float = math.inf) -> float | None:
        """Returns the least bandwidth of a site that is known, through a hub its share of the broker's too, or None."""
        least = min(self.site_gbps(share=share))
        return least if math.isfinite(least) else None

    @property
    def accelerators(self) -> int | None:
        """Of all sites; None if some are not known."""
        known = [site.accelerators for site in self.sites if site.accelerators is not None]
        return sum(known) if len(known) == len(self.sites) else None


#: What links are told with.
GIVE_BANDWIDTH: Final = "give --bandwidth, or with --fleet gbps in each [[island]],"

#: The cure of whoever asks for what only accelerators have.
GIVE_ACCELERATORS: Final = "give --accelerators as well, or with --fleet accelerators in each [[island]]"


def check_site(site: Site) -> None:
    """Raises ConfigError where a site cannot be, by the name of the flag."""
    if not 1e-6 <= site.step_s <= 1e6:
        raise ConfigError("step_time", site.step_s, "must lie between 1e-6 and 1e6 seconds")
    if site.gbps is not None and not 1e-9 <= site.gbps <= 1e9:
        raise ConfigError("bandwidth", site.gbps, "must lie between 1e-9 and 1e9 Gbit/s")
    if not 0 <= site.latency_s <= 3600:
        raise ConfigError("latency_ms", site.latency_s * 1e3, "must lie between 0 and an hour")
    if site.accelerators is not None and not 1 <= site.accelerators <= 10**8:
        raise ConfigError("accelerators", site.accelerators, "must lie between 1 and 10**8 for each site")
    if not 1 <= site.tokens_per_step <= 10**15:
        raise ConfigError("tokens_per_step", site.tokens_per_step, "must lie between 1 and 10**15")


def check_overlap(fleet: Fleet) -> None:
    """Raises ConfigError where tau leaves no step of H: each version would be late."""
    interval = fleet.sync_interval_steps
    if fleet.overlap_steps >= interval:
        cure = f"must be below sync_interval = {interval}: a fragment is adopted before it is due again"
        raise ConfigError("overlap", fleet.overlap_steps, cure)


def lower_median(values: Sequence[float]) -> float:
    """Returns the value that rounds of decoupled islands follow (design, section 4.1): larger ones are faster."""
    return sorted(values)[(len(values) - 1) // 2]


def load_of(fleet: Fleet, mode: Mode) -> Load:
    """Returns what has to travel when ``fleet`` trains in this mode."""
    whole = mode in (Mode.DILOCO, Mode.DP)
    payload = payload_of(fleet, fragments_of(fleet, mode))
    islands = len(fleet.sites)
    wire = wire_of(payload, codec=fleet.codec, version_codec=fleet.version_codec, islands=islands)
    steps_s = [site.step_s for site in fleet.sites]
    return Load(
        mode=mode,
        assume=fleet.assume,
        parameters=payload.parameters,
        sites=islands,
        # Synchronous ways follow the slowest site.
        step_s=-lower_median([-each for each in steps_s]) if mode is Mode.DECOUPLED else max(steps_s),
        wire=wire,
        codec=fleet.codec,
        sync_interval_steps=1 if mode is Mode.DP else fleet.sync_interval_steps,
        overlap_steps=fleet.overlap_steps if not whole else 0,
        max_staleness=fleet.max_staleness,
        latency_s=_latency_s(fleet, mode),
        # The baselines are granted an aggregator that takes no time.
        mergings_s=tuple(_merging_s(fleet, sum(f)) if mode is Mode.DECOUPLED else 0.0 for f in payload.fragments),
    )


def fragments_of(fleet: Fleet, mode: Mode) -> int:
    """Returns P as a mode has it: DiLoCo and data-parallel training move the model as one."""
    return 1 if mode in (Mode.DILOCO, Mode.DP) else fleet.fragments


def payload_of(fleet: Fleet, fragments: int) -> Payload:
    """Returns the fleet's model in so many fragments."""
    return cut(fleet.parameters, fleet.tensors, fragments)


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


def apart(fleet: Fleet, mode: Mode) -> bool:
    """Whether aggregators run on hosts of their own: the broker sends them what islands hand over, and gets versions.

    The baselines are granted one beside the broker.
    """
    return mode is Mode.DECOUPLED and fleet.shards > 1 and fleet.assume is Assume.ATOLL


def share_gbps(fleet: Fleet, load: Load) -> float:
    """Returns a site's share of the broker's link, for its wider direction; infinite: not known, or nothing goes there.

    With shards all contributions leave the broker's host again, beside the versions for all sites: its way out is the
    wider one.

    Raises:
        ConfigError: No bandwidth of the sites is enough.
    """
    if fleet.broker_gbps is None or load.ring:
        return math.inf
    share = fleet.broker_gbps / load.sites
    if not apart(fleet, load.mode):
        return share
    need = required(load, fleet.utilisation)
    return share * need.exact_gbps / (need.up_gbps + need.down_gbps)


def interval_s(fleet: Fleet) -> float:
    """Returns the seconds of H inner steps at the pace that rounds follow."""
    return load_of(fleet, Mode.DECOUPLED).interval_s


def limits_to_raise(fleet: Fleet, mode: Mode = Mode.DECOUPLED) -> dict[str, int]:
    """Returns setting -> what lets the islands of a mode of ours join, for each limit of the run that does not.

    No codec helps: what an island supplies of version 0 is float32.
    """
    largest = max(map(sum, payload_of(fleet, fragments_of(fleet, mode)).fragments))
    least = {
        "max_message_bytes": least_message_bytes(largest),
        "held_bytes": least_held_bytes(largest, len(fleet.sites)),
        "max_tokens_per_step": max(site.tokens_per_step for site in fleet.sites),
    }
    return {name: value for name, value in least.items() if value > getattr(fleet, name)}


def merging_steps(fleet: Fleet) -> int:
    """Returns the inner steps, at the pace that rounds follow, in which every fragment is merged once: H at least."""
    return math.ceil(merging_per_cycle_s(fleet) / load_of(fleet, Mode.DECOUPLED).step_s * (1 - 1e-9))


def merging_per_cycle_s(fleet: Fleet) -> float:
    """Seconds in which every fragment is merged once: by one aggregator one after the other, by shards side by side."""
    fragments = payload_of(fleet, fleet.fragments).fragments
    of_shards = [0.0] * fleet.shards
    for p, fragment in enumerate(fragments):
        of_shards[shard_of(p, fleet.shards)] += _merging_s(fleet, sum(fragment))
    return max(of_shards)
