"""Assigns devices to local islands, by environment variables. Pure.

Broker, aggregator and the evaluation beside training stay on the CPU: they would take memory from an island.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from broker.base.errors import ConfigError

#: Chips of an island on a TPU host -> how they lie there, as its runtime is told.
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}

#: Share of a GPU's memory that the islands on it divide; the rest is for CUDA itself.
SHARED_MEMORY = 0.9

#: More islands than these are not listed one by one.
LISTED = 8


class Platform(StrEnum):
    """The platform of islands; ``auto`` takes the best that JAX finds."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The devices of this machine.

    Attributes:
        platform: Never ``auto``.
        devices: Their names, as CUDA_VISIBLE_DEVICES or TPU_VISIBLE_CHIPS has them; empty for the CPU.
        note: A remark on the search for the user.
    """

    platform: Platform
    devices: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The devices of one island.

    Attributes:
        platform: Never ``auto``.
        devices: Their names; empty for the CPU.
        count: How many they are.
        sharers: Islands that train on each of them.
        environment: The variables that give the island these devices, and no others.
    """

    platform: Platform = Platform.CPU
    devices: tuple[str, ...] = ()
    count: int = 1
    sharers: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


def placements(found: Found, *, islands: int, devices_per_island: int) -> tuple[Placement, ...]:
    """Returns the devices of each island.

    Args:
        found: The devices of this machine.
        islands: How many islands train here.
        devices_per_island: Devices of each island; 0: one, which islands share if they outnumber the GPUs.

    Raises:
        ConfigError: There are not enough devices, or they cannot be divided like this.
    """
    each = devices_per_island or 1
    if found.platform is Platform.CPU:
        return (_on_cpu(each),) * islands
    total, name = len(found.devices), found.platform.upper()
    if devices_per_island and total % each:
        fitting = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        cure = f"must divide the devices here, of which there are {total}: {fitting}"
        raise ConfigError("devices_per_island", devices_per_island, cure)
    if found.platform is Platform.TPU and each not in TPU_BOUNDS and each != total:
        cure = f"must be {', '.join(map(str, TPU_BOUNDS))}, or all {total}: chips that lie side by side"
        raise ConfigError("devices_per_island", devices_per_island, cure)
    if islands * each <= total:
        return tuple(_alone(found, found.devices[i * each : (i + 1) * each]) for i in range(islands))
    if devices_per_island or found.platform is Platform.TPU:
        most = total // each
        cure = f"need {islands * each} {name} devices, and here are {total}: at most {most} islands of {each}"
        if found.platform is Platform.GPU:
            cure += ", or leave --devices-per-island out: then islands share GPUs"
        raise ConfigError("islands", islands, cure)
    sharers = -(-islands // total)
    return tuple(_sharing(found.devices[i % total], sharers) for i in range(islands))


def _on_cpu(count: int) -> Placement:
    environment = {"JAX_PLATFORMS": "cpu"}
    if count > 1:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    return Placement(count=count, environment=environment)


def _alone(found: Found, devices: tuple[str, ...]) -> Placement:
    if found.platform is Platform.GPU:
        environment = {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    else:
        environment = {"JAX_PLATFORMS": "tpu,cpu"}
        if devices != found.devices:  # else the runtime itself knows best how they lie
            environment |= {
                "TPU_VISIBLE_CHIPS": ",".join(devices),
                "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS[len(devices)],
                "TPU_PROCESS_BOUNDS": "1,1,1",  # a run of its own, not a part of one over the whole host
            }
    return Placement(platform=found.platform, devices=devices, count=len(devices), environment=environment)


def _sharing(device: str, sharers: int) -> Placement:
    environment = {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": device} | _memory(sharers)
    return Placement(platform=Platform.GPU, devices=(device,), sharers=sharers, environment=environment)


def _memory(sharers: int) -> dict[str, str]:
    """Returns variables that limit a process to its share of a GPU's memory, taken as needed."""
    return {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{SHARED_MEMORY / sharers:.3f}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def merged(environment: Mapping[str, str], placement: Placement) -> dict[str, str]:
    """Returns an island's variables: those of every numeric process, overridden by its devices'."""
    both = {**environment, **placement.environment}
    # XLA reads no further than the first word without a dash, and one of the others is such a word.
    flags = [each["XLA_FLAGS"] for each in (placement.environment, environment) if each.get("XLA_FLAGS")]
    return both | ({"XLA_FLAGS": " ".join(flags)} if flags else {})


def for_evaluation(places: tuple[Placement, ...], processes: int) -> dict[str, str]:
    """Returns the variables of evaluation processes, which share the first GPU."""
    if not places or places[0].platform is not Platform.GPU:
        return {"JAX_PLATFORMS": "cpu"}  # a TPU has one process at a time
    device = places[0].devices[0]
    return {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": device} | _memory(processes)


def sentence(names: tuple[str, ...], places: tuple[Placement, ...]) -> str:
    """Returns the devices of each island in one line."""
    first = places[0]
    if first.platform is Platform.CPU:
        devices = "one device" if first.count == 1 else f"{first.count} devices"
        return f"{_islands(len(names))} on the CPU, {devices} each"
    kind = first.platform.upper()
    listed = [f"{name} {','.join(place.devices)}" for name, place in zip(names, places, strict=True)][:LISTED]
    more = ", ..." if len(names) > LISTED else ""
    shared = f", each shared by up to {first.sharers}" if first.sharers > 1 else ""
    return f"{_islands(len(names))} on {kind}{shared}: {', '.join(listed)}{more}"


def _islands(count: int) -> str:
    return "1 island trains" if count == 1 else f"{count} islands train"
