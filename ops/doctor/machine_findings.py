"""Judges what was seen of this machine: Python, JAX, clock, ports, open files and disk. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from broker.gateway.connections import files_for_connections
from ops.doctor.finding import Finding, failure, ok, warning
from ops.text import size

#: Oldest Python that the package runs on.
OLDEST_PYTHON = (3, 11)
#: Clocks that differ by more make logs of several hosts hard to read, and certificates of TLS expire early or late.
CLOCK_APART_S = 1.0
#: Each version of a fragment is on disk before anybody gets it: a slower fsync is waited for in every round.
SLOW_FSYNC_S = 0.05
SLOW_DISK_BYTES_PER_S = 50e6
#: An island has two connections to its broker; a broker has about so many files besides.
ISLAND_FILES, BROKER_FILES = 2, 32
#: A broker that has room for fewer islands is warned of.
FEW_ISLANDS = 100
LOW_DISK_BYTES, LITTLE_DISK_BYTES = 200 << 20, 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonSeen:
    """The interpreter, and the packages that a daemon cannot do without.

    Attributes:
        version: Such as (3, 11, 2).
        system: Such as ``Linux``.
        processors: Those that this process may use.
        missing: Names of packages that cannot be imported.
        curve: Whether ZeroMQ was built with CurveZMQ.
        release: Of this package; empty: a checkout.
        fault: What is wrong with the packages that were installed, and the cure; None: nothing.
    """

    version: tuple[int, int, int]
    system: str
    machine: str
    processors: int
    missing: tuple[str, ...]
    curve: bool
    release: str
    fault: tuple[str, str] | None


def python(seen: PythonSeen) -> Finding:
    """Judges the interpreter and its packages."""
    text = ".".join(map(str, seen.version))
    where = (
        f"{text} on {seen.system} {seen.machine}, {seen.processors} processors, atoll {seen.release or '(checkout)'}"
    )
    if seen.version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return failure("Python", where, f"use Python {oldest} or newer")
    if seen.system != "Linux":
        return failure("Python", where, "run it on Linux: daemons use what other systems do not have")
    if seen.fault:
        return failure("Python", f"{where}; {seen.fault[0]}", seen.fault[1])
    if seen.missing:
        cure = "install Atoll there (docs/quickstart.md), or start `python3 -m ops` in a checkout, which builds .venv"
        return failure("Python", f"{where}; missing: {', '.join(seen.missing)}", cure)
    if not seen.curve:
        return failure(
            "Python", f"{where}; ZeroMQ without CURVE", "pip install --force-reinstall pyzmq: no keys without"
        )
    return ok("Python", where)


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxSeen:
    """What JAX said in a process of its own.

    Attributes:
        version: Empty where it could not be started.
        platform: Such as ``cpu`` or ``gpu``.
        devices: The kind of each local device.
        error: Why it said nothing.
        late: It had not said anything when its time was over.
        hardware: Accelerators that the machine has by its device files, such as ``NVIDIA GPU``; empty: none.
        chosen: JAX_PLATFORMS of the user; empty: JAX chooses.
    """

    version: str = ""
    platform: str = ""
    devices: tuple[str, ...] = ()
    error: str = ""
    late: bool = False
    hardware: str = ""
    chosen: str = ""


def jax(seen: JaxSeen) -> Finding:
    """Judges JAX and the devices that it finds."""
    if seen.late:
        return warning("JAX", seen.error, "try python -c 'import jax; print(jax.devices())', and see what it waits for")
    if not seen.version:
        cure = "pip install jax ('jax[cuda12]' for NVIDIA, 'jax[tpu]' for TPUs), or ask python -c 'import jax' itself"
        return failure("JAX", seen.error or "it cannot be started", cure)
    kinds = [f"{seen.devices.count(kind)} x {kind}" for kind in dict.fromkeys(seen.devices)]
    text = f"{seen.version} on {seen.platform}: {', '.join(kinds) or 'no devices'}"
    if seen.hardware and seen.platform == "cpu" and seen.chosen != "cpu":
        extra = "tpu" if "TPU" in seen.hardware else "cuda12"
        plugin = f"pip install 'jax[{extra}]=={seen.version}', and check the driver"
        cure = f"{plugin}; or JAX_PLATFORMS=cpu where islands shall use the CPU"
        return warning("JAX", f"{text}, though the machine has a {seen.hardware}", cure)
    return ok("JAX", text)


def kernel_clock(synchronised: bool | None) -> Finding:
    """Judges what the kernel says of this machine's clock; None: it says nothing."""
    if synchronised is None:
        return ok("clock", "the kernel does not say whether it is synchronised")
    if synchronised:
        return ok("clock", "synchronised, by the kernel")
    cure = "start a time service (systemd-timesyncd, chrony), or leave it to the host of this container"
    return warning("clock", "not synchronised, by the kernel", cure)


def clock_apart(who: str, offset_s: float, within_s: float) -> Finding:
    """Judges this clock against another one.

    Args:
        who: Whose the other one is.
        offset_s: The other one minus ours.
        within_s: How wrong that may be: half of the round trip.
    """
    ahead = "behind" if offset_s > 0 else "ahead of"
    text = f"{abs(offset_s):.3f} s {ahead} the clock of {who} (± {within_s:.3f} s)"
    if abs(offset_s) - within_s <= CLOCK_APART_S:
        return ok("clock", text)
    cure = "synchronise both hosts (systemd-timesyncd, chrony): training does not mind; logs and certificates do"
    return warning("clock", text, cure)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortsSeen:
    """The TCP ports of this machine that a run takes.

    Attributes:
        error: Why no two adjacent free ports were found on loopback, with the cure; empty if they were.
        broker: The ports of a broker here, with whether each is free.
        own_broker: The broker that was asked about is one of this machine, on these ports.
    """

    error: str = ""
    broker: tuple[tuple[int, bool], ...] = ()
    own_broker: bool = False


def ports(seen: PortsSeen) -> Finding:
    """Judges whether ``up`` and a broker find their ports."""
    if seen.error:
        return failure("ports", "`up` and a broker find none", seen.error)
    taken = [port for port, free in seen.broker if not free]
    names = " and ".join(str(port) for port, _ in seen.broker)
    if not taken or seen.own_broker:
        state = "in use by the broker that was asked" if taken else "free"
        return ok("ports", f"those of a broker, {names}, are {state}; `up` finds free ones")
    cure = f"if that is your broker, all is well; else start yours with another --port (`ss -ltnp sport = :{taken[0]}`)"
    return ok("ports", f"{' and '.join(map(str, taken))} in use, where a broker listens by default", cure)


def open_files(limit: int, most_peers: int) -> Finding:
    """Judges the limit of open files, to which a broker here would raise its own.

    Args:
        limit: Of a process.
        most_peers: ``max_peers`` of a broker, if nothing else is set.
    """
    islands = files_for_connections(limit, BROKER_FILES, unix=False) // ISLAND_FILES
    text = f"{limit:,} for a process: a broker here has room for about {min(islands, most_peers):,} islands"
    if islands < FEW_ISLANDS:
        cure = "raise it (`ulimit -Hn`; LimitNOFILE= of a systemd unit) where a broker is to run for more"
        return warning("open files", text, cure)
    by = "max_peers" if most_peers <= islands else f"max_peers ({most_peers:,}) is beyond that"
    return ok("open files", f"{text} ({by})")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSeen:
    """What writing to a directory was like.

    Attributes:
        directory: Where.
        error: Why it could not be written; empty if it could.
        free_bytes: Left for this user.
        written_bytes: In ``write_s``, with one fsync at the end.
        fsyncs_s: Seconds of each small write with its fsync.
    """

    directory: str
    error: str = ""
    free_bytes: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    fsyncs_s: tuple[float, ...] = ()


def disk(seen: DiskSeen) -> Finding:
    """Judges the disk that a store and checkpoints would be on."""
    if seen.error:
        cure = "name a directory that this user can write, with --dir"
        return failure("disk", f"{seen.directory} cannot be written ({seen.error})", cure)
    rate, fsync_s = seen.written_bytes / max(seen.write_s, 1e-9), median(seen.fsyncs_s)
    text = f"{size(round(rate))}/s, fsync {1000 * fsync_s:.1f} ms, {size(seen.free_bytes)} free in {seen.directory}"
    if seen.free_bytes < LOW_DISK_BYTES:
        return failure("disk", text, "make room, or name another --dir: with a full disk nothing is published")
    if seen.free_bytes < LITTLE_DISK_BYTES:
        return warning("disk", text, "make room: a store keeps several versions of the model, checkpoints one more")
    if fsync_s > SLOW_FSYNC_S or rate < SLOW_DISK_BYTES_PER_S:
        cure = "put the store on a local SSD: each version is on disk before an island gets it"
        return warning("disk", text, cure)
    return ok("disk", text)


def median(values: Sequence[float]) -> float:
    """Returns the upper median; 0 of none."""
    return sorted(values)[len(values) // 2] if values else 0.0
