"""Checks this machine: Python, JAX in a process of its own, and a disk. Shell."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq

from broker.process.release import release
from islands.interface import installation
from ops.findings import machine_findings
from ops.findings.finding import Finding, failure
from ops.findings.machine_findings import median
from ops.processes.child_process import error_in, tied

#: Packages that every daemon loads.
PACKAGES = ("zmq", "numpy", "msgpack", "xxhash", "redis", "rich")
#: Written to the disk: at most so much, for at most so long.
WRITE_BYTES, WRITE_S = 64 << 20, 1.5
_CHUNK = os.urandom(1 << 20)  # that no file system can compress
FSYNCS, FSYNC_S = 9, 1.5

#: As :mod:`ops.run.prepare`, whose caller wants to know how many there are.
_JAX = """
import json, jax
found = jax.local_devices()
print(json.dumps([jax.__version__, found[0].platform, [each.device_kind for each in found]]))
"""
_ACCELERATORS = {"/dev/nvidia0": "NVIDIA GPU", "/dev/accel0": "TPU"}


def look_at_python() -> Finding:
    """Returns the findings on this interpreter."""
    return machine_findings.python(
        version=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        system=platform.system(),
        machine=platform.machine(),
        processors=len(os.sched_getaffinity(0)),
        missing=[name for name in PACKAGES if importlib.util.find_spec(name) is None],
        curve=bool(zmq.has("curve")),
        release=release(),
        fault=installation.fault(),
    )


def look_at_jax(within_s: float) -> Finding:
    """Returns the findings on JAX's devices, from a child process with a time limit."""
    try:
        done = subprocess.run(
            tied([sys.executable, "-P", "-c", _JAX]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
        )
    except subprocess.TimeoutExpired:
        return machine_findings.silent_jax(f"it did not find its devices within {within_s:g} s", late=True)
    except OSError as err:
        return machine_findings.silent_jax(f"no process for it can be started ({err.strerror})")
    try:
        version, found, devices = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        why = error_in(done.stderr.splitlines()) or f"it ended with status {done.returncode}"
        return machine_findings.silent_jax(why)
    hardware = next((name for path, name in _ACCELERATORS.items() if os.path.exists(path)), "")
    chosen = os.environ.get("JAX_PLATFORMS", "")
    return machine_findings.jax(version, found, devices, hardware=hardware, chosen=chosen)


def look_at_disk(directory: Path) -> Finding:
    """Measures the disk of a directory, which need not exist, by writing at most 64 MiB; leaves no file."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent  # where the directory would be made
    try:
        with tempfile.TemporaryFile(dir=place, prefix=".atoll-doctor-") as file:
            began_s = time.monotonic()
            written = 0
            while written < WRITE_BYTES and time.monotonic() - began_s < WRITE_S:
                written += file.write(_CHUNK)
            file.flush()
            os.fsync(file.fileno())
            write_s = time.monotonic() - began_s
            fsyncs: list[float] = []
            while len(fsyncs) < FSYNCS and sum(fsyncs) < FSYNC_S:
                began_s = time.monotonic()
                file.write(_CHUNK[:4096])
                file.flush()
                os.fsync(file.fileno())
                fsyncs.append(time.monotonic() - began_s)
            stat = os.statvfs(place)
    except OSError as err:
        cure = "name a directory that this user can write, with --dir"
        return failure("disk", f"{directory} cannot be written ({err.strerror or err})", cure)
    return machine_findings.disk(
        str(directory),
        free_bytes=stat.f_bavail * stat.f_frsize,
        bytes_per_s=written / max(write_s, 1e-9),
        fsync_s=median(fsyncs),
    )
