"""A fleet of sites that train one model: its settings, and the limits of its run. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from aggregator.interface.config import AggregatorConfig
from aggregator.state.model_limits import least_held_bytes, least_message_bytes
from broker.base.errors import ConfigError
from broker.base.settings import setting
from broker.routing.directory import MAX_SHARDS
from broker.wire.fragments import TensorSpec
from broker.wire.headers import room_bytes
from broker.wire.messages import Codec
from ops.forecast.footprint import FragmentBytes, cut, wire_of

#: The most of numbers in a fleet's file: more is a slip of the pen, and overflows sums.
MOST = 1e18
#: The least utilisation to ask for: below it a bandwidth is no number.
LEAST_UTILISATION = 1e-6

#: The limits of a run that nobody has changed.
_USUAL: Final = AggregatorConfig()

#: Cure for questions that need the links.
GIVE_BANDWIDTH: Final = "give --bandwidth, or with --fleet gbps in each [[island]],"


class Mode(StrEnum):
    """Ways of training one model on several sites."""

    DECOUPLED = "decoupled"  # islands that never wait for each other
    STREAMING = "streaming"  # islands that wait, fragment by fragment, for versions that are due
    DILOCO = "diloco"  # islands that all meet at a barrier every sync interval
    DP = "dp"  # one synchronous job; where chips fail, one that stops until it is whole again
    ELASTIC_DP = "elastic-dp"  # data-parallel, continues with the remaining chips; on links like the other


#: The modes that differ on links, decoupled first.
PLANNED = (Mode.DECOUPLED, Mode.STREAMING, Mode.DILOCO, Mode.DP)


class Assume(StrEnum):
    """The assumptions: those of our programs, or those of published figures."""

    ATOLL = "atoll"
    PAPER = "paper"


def check(name: str, value: float | None, least: float, most: float, why: str = "") -> None:
    """Raises ConfigError, with the flag's name, for a value outside its range; None is not checked."""
    if value is not None and not least <= value <= most:
        raise ConfigError(name, value, f"must lie between {least:g} and {most:g}{why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One site, which is one island: flags of ``plan``, or a table ``[[island]]`` of its file."""

    name: str = "site"  # for people
    step_time: float = field(metadata={"help": "seconds of computing per inner step", "subject": "fleet"})
    accelerators: int | None = setting(None, "accelerators of each site")
    tokens_per_step: int = setting(1 << 18, "of each site")
    bandwidth: float | None = setting(None, "Gbit/s of each site, each way; no more than its share of the broker's")
    latency_ms: float = setting(0.0, "from a site to the hub, one way")

    def __post_init__(self) -> None:
        """Raises ConfigError for an impossible site."""
        check("step_time", self.step_time, 1e-6, 1e6)
        check("bandwidth", self.bandwidth, 1e-9, 1e9)
        check("latency_ms", self.latency_ms, 0, 3_600_000)
        check("accelerators", self.accelerators, 1, 10**8)
        check("tokens_per_step", self.tokens_per_step, 1, 10**15)

    @property
    def journey_s(self) -> float:
        """Latency of a journey to the hub and back."""
        return 2 * self.latency_ms / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How sites train together, and the targets: flags of ``plan``."""

    codec: Codec = setting(Codec.BF16, "of contributions", subject="how to train")
    version_codec: Codec | None = setting(None, "of versions: as codec if not given")
    sync_interval: int = setting(24, "inner steps between two merges")
    fragments: int = setting(8, "fragments of the model, at most; with --assume paper 24 if not given")
    overlap: int = setting(2, "inner steps until streaming waits for a version")
    shards: int = setting(1, "aggregators that share the fragments, each on a host of its own; or auto: by the model")
    utilisation: float = setting(0.95, "share of time to compute; decoupled islands always compute")
    assume: Assume = setting(Assume.ATOLL, "what our programs send, or what published figures rest on")

    host_memory_gb: float | None = setting(None, "of one host: checked", subject="memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet(Training):
    """A fleet: its sites, its model and its way of training."""

    parameters: int  # elements that are synchronised
    tensors: tuple[TensorSpec, ...] = ()  # of the model; empty if only their number is known
    base_bytes: int = 0  # of tensors that each island holds, and that never travel
    sites: tuple[Site, ...]
    max_message_bytes: int = _USUAL.max_message_bytes  # limit of the run, as are the next three; 0: it follows
    held_bytes: int = _USUAL.held_bytes
    max_tokens_per_step: int = _USUAL.max_tokens_per_step
    max_staleness: int = _USUAL.max_staleness
    max_staleness_s: float = _USUAL.max_staleness_s

    def __post_init__(self) -> None:
        """Raises ConfigError for an impossible setting, with the possible values."""
        check("params", self.parameters, 1, 10**15, ", such as 125M, 5B or 5e9")
        if not self.sites:
            raise ConfigError("sites", 0, "must be at least 1")
        if not LEAST_UTILISATION <= self.utilisation < 1:
            least = f"must be at least {LEAST_UTILISATION:g} and below 1, such as 0.95"
            cure = f"{least}: all of the time would take an endless bandwidth"
            raise ConfigError("utilisation", self.utilisation, cure)
        check("sync_interval", self.sync_interval, 1, 10_000)
        most = min(self.sync_interval, self.parameters)
        check("fragments", self.fragments, 1, most, ": at most one falls due per inner step (sync_interval)")
        check("shards", self.shards, 1, min(MAX_SHARDS, self.fragments), ": each has at least one of the fragments")
        check("overlap", self.overlap, 0, 10_000, " inner steps, 2 is usual")
        check("host_memory_gb", self.host_memory_gb, 1e-9, 1e12)

    @property
    def codec_of_versions(self) -> Codec:
        """The codec in which versions travel."""
        return self.version_codec or self.codec

    @property
    def differences(self) -> bool:
        """Returns whether versions travel as differences to the ones before."""
        return self.codec_of_versions is not Codec.F32

    @property
    def slowest_step_s(self) -> float:
        """Seconds of a step at the slowest site, for which synchronous modes wait."""
        return max(site.step_time for site in self.sites)

    @property
    def accelerators(self) -> int | None:
        """Accelerators of all sites; None if some are not known."""
        known = [site.accelerators for site in self.sites if site.accelerators is not None]
        return sum(known) if len(known) == len(self.sites) else None

    @property
    def links_gbps(self) -> tuple[float, ...]:
        """Each site's bandwidth; infinite: not known."""
        return tuple(math.inf if site.bandwidth is None else site.bandwidth for site in self.sites)

    def wire(self, mode: Mode = Mode.DECOUPLED) -> FragmentBytes:
        """Returns the bytes of each fragment; DiLoCo and data-parallel training move the model as one."""
        as_one = mode in (Mode.DILOCO, Mode.DP)
        payload = cut(self.parameters, self.tensors, 1 if as_one else self.fragments)
        return wire_of(payload, codec=self.codec, version_codec=self.codec_of_versions)


def check_overlap(fleet: Fleet) -> None:
    """Raises ConfigError if tau is not below H: each version would be late."""
    interval = fleet.sync_interval
    if fleet.overlap >= interval:
        cure = f"must be below sync_interval = {interval}: a fragment is adopted before it is due again"
        raise ConfigError("overlap", fleet.overlap, cure)


def lower_median(values: Sequence[float]) -> float:
    """Returns the lower median, the pace of decoupled rounds (reference.md, section 4.1)."""
    return sorted(values)[(len(values) - 1) // 2]


def limits_to_raise(fleet: Fleet) -> dict[str, tuple[int, int]]:
    """Returns setting -> (limit, least value that lets islands join), for each limit that is too low.

    No codec helps: islands supply version 0 in float32. A limit that is not given follows from the model,
    or from the memory of hosts, and is told where that is known to be too little.
    """
    largest = max(fleet.wire().elements)
    least = {
        "max_message_bytes": least_message_bytes(largest),
        "held_bytes": least_held_bytes(largest, len(fleet.sites)),
        "max_tokens_per_step": max(site.tokens_per_step for site in fleet.sites),
    }
    limits = {name: int(getattr(fleet, name)) for name in least}
    if not limits["max_message_bytes"] and fleet.host_memory_gb is not None:
        limits["max_message_bytes"] = room_bytes(round(fleet.host_memory_gb * 1e9))
    return {name: (limits[name], value) for name, value in least.items() if 0 < limits[name] < value}
