"""Judges this machine's probes: Python, JAX, clock, open files and disk. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from broker.clients.connections import files_for_connections
from ops.findings.finding import Finding, failure, ok, warning
from ops.text import size

#: Oldest Python that the package runs on.
OLDEST_PYTHON = (3, 11)
#: Clocks that differ by more make logs of several hosts hard to read, and certificates of TLS expire early or late.
CLOCK_APART_S = 1.0
#: Each version of a fragment is on disk before anybody gets it: a slower fsync is waited for in every round.
SLOW_FSYNC_S = 0.05
SLOW_DISK_BYTES_PER_S = 50e6
#: An island has two connections to its broker; beside these a broker has about this many open files.
ISLAND_FILES, BROKER_FILES = 2, 32
#: A broker that has room for fewer islands is warned of.
FEW_ISLANDS = 100
LOW_DISK_BYTES, LITTLE_DISK_BYTES = 200 << 20, 2 << 30


def python(
    *,
    version: tuple[int, int, int],
    system: str,
    machine: str,
    processors: int,
    missing: Sequence[str],
    curve: bool,
    release: str,
    fault: tuple[str, str] | None,
) -> Finding:
    """Judges the interpreter, and the packages that every daemon needs.

    Args:
        version: Such as (3, 11, 2).
        system: Such as ``Linux``.
        machine: Such as ``x86_64``.
        processors: Those that this process may use.
        missing: Names of packages that cannot be imported.
        curve: Whether ZeroMQ was built with CurveZMQ.
        release: The release of this package; empty: a checkout.
        fault: A fault of the installed packages, with the cure; None: no fault.
    """
    text = ".".join(map(str, version))
    where = f"{text} on {system} {machine}, {processors} processors, atoll {release or '(checkout)'}"
    if version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return failure("Python", where, f"use Python {oldest} or newer")
    if system != "Linux":
        return failure("Python", where, "run it on Linux: daemons use what other systems do not have")
    if fault:
        return failure("Python", f"{where}; {fault[0]}", fault[1])
    if missing:
        cure = "install Atoll there (docs/quickstart.md), or start `python3 -m ops` in a checkout, which builds .venv"
        return failure("Python", f"{where}; missing: {', '.join(missing)}", cure)
    if not curve:
        return failure(
            "Python", f"{where}; ZeroMQ without CURVE", "pip install --force-reinstall pyzmq: no keys without"
        )
    return ok("Python", where)


def silent_jax(why: str, *, late: bool = False) -> Finding:
    """Judges a JAX process that gave no answer, or (``late``) none in time."""
    if late:
        return warning("JAX", why, "try python -c 'import jax; print(jax.devices())', and see what it waits for")
    cure = "pip install jax ('jax[cuda12]' for NVIDIA, 'jax[tpu]' for TPUs), or ask python -c 'import jax' itself"
    return failure("JAX", why, cure)


def jax(version: str, platform: str, devices: Sequence[str], *, hardware: str = "", chosen: str = "") -> Finding:
    """Judges the answer of the JAX process.

    Args:
        version: Its version.
        platform: Such as ``cpu`` or ``gpu``.
        devices: The kind of each local device.
        hardware: Accelerators that the machine has by its device files, such as ``NVIDIA GPU``; empty: none.
        chosen: JAX_PLATFORMS of the user; empty: JAX chooses.
    """
    kinds = [f"{devices.count(kind)} x {kind}" for kind in dict.fromkeys(devices)]
    text = f"{version} on {platform}: {', '.join(kinds) or 'no devices'}"
    if hardware and platform == "cpu" and chosen != "cpu":
        extra = "tpu" if "TPU" in hardware else "cuda12"
        plugin = f"pip install 'jax[{extra}]=={version}', and check the driver"
        cure = f"{plugin}; or JAX_PLATFORMS=cpu where islands shall use the CPU"
        return warning("JAX", f"{text}, though the machine has a {hardware}", cure)
    return ok("JAX", text)


def clock_apart(who: str, offset_s: float, within_s: float) -> Finding:
    """Judges the difference between this clock and another one.

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


def open_files(limit: int, most_peers: int) -> Finding:
    """Judges the hard limit of open files, up to which a broker raises its own.

    Args:
        limit: The hard limit of a process.
        most_peers: ``max_peers`` of a broker, if nothing else is set.
    """
    islands = files_for_connections(limit, BROKER_FILES, unix=False) // ISLAND_FILES
    text = f"{limit:,} for a process: a broker here has room for about {min(islands, most_peers):,} islands"
    if islands < FEW_ISLANDS:
        cure = "raise it (`ulimit -Hn`; LimitNOFILE= of a systemd unit) where a broker is to run for more"
        return warning("open files", text, cure)
    by = "max_peers" if most_peers <= islands else f"max_peers ({most_peers:,}) is beyond that"
    return ok("open files", f"{text} ({by})")


def disk(directory: str, *, free_bytes: int, bytes_per_s: float, fsync_s: float) -> Finding:
    """Judges the disk for a store and checkpoints.

    Args:
        directory: Where.
        free_bytes: Left for this user.
        bytes_per_s: Rate of writing, with one fsync at the end.
        fsync_s: Time of a small write with its fsync.
    """
    text = f"{size(round(bytes_per_s))}/s, fsync {1000 * fsync_s:.1f} ms, {size(free_bytes)} free in {directory}"
    if free_bytes < LOW_DISK_BYTES:
        return failure("disk", text, "make room, or name another --dir: with a full disk nothing is published")
    if free_bytes < LITTLE_DISK_BYTES:
        return warning("disk", text, "make room: a store keeps several versions of the model, checkpoints one more")
    if fsync_s > SLOW_FSYNC_S or bytes_per_s < SLOW_DISK_BYTES_PER_S:
        cure = "put the store on a local SSD: each version is on disk before an island gets it"
        return warning("disk", text, cure)
    return ok("disk", text)


def median(values: Sequence[float]) -> float:
    """Returns the upper median; 0 of none."""
    return sorted(values)[len(values) // 2] if values else 0.0
