"""Finds the devices that JAX has on this machine, in a short child process.

``up`` itself never loads JAX: it would hold a GPU, or a TPU, for as long as the run lasts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

from broker.process.release import install
from broker.wire.errors import ConfigError
from ops.processes.child_process import tied
from ops.run.devices import Found, Platform

#: Drivers take their time: eight GPUs some 10 s.
WITHIN_S = 120.0

#: Prints the platform and the number of devices; of a TPU its chips, some of which are two devices.
_SCRIPT = """
import json, jax
found = jax.local_devices()
print(json.dumps([found[0].platform, len({tuple(getattr(each, "coords", (each.id,))) for each in found})]))
"""

_CURES = {
    Platform.GPU: ("JAX finds no GPU here: it takes an NVIDIA driver", "cuda12"),
    Platform.TPU: ("JAX finds no TPU here: it takes a TPU host", "tpu"),
}


def find(wanted: Platform) -> Found:
    """Returns the devices that islands are to train on.

    Raises:
        ConfigError: JAX finds none of the wanted platform.
    """
    if wanted is Platform.CPU or (os.environ.get("JAX_PLATFORMS") == "cpu" and wanted is Platform.AUTO):
        return Found(platform=Platform.CPU)
    if not has_plugin():
        return _none_of(wanted, "")
    environment = dict(os.environ)
    if wanted is not Platform.AUTO:
        environment["JAX_PLATFORMS"] = "cuda" if wanted is Platform.GPU else "tpu"
    try:
        done = subprocess.run(
            tied([sys.executable, "-P", "-c", _SCRIPT]),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        platform, count = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return _none_of(wanted, f"JAX did not find its devices within {WITHIN_S:g} s")
    except (OSError, ValueError, IndexError):
        return _none_of(wanted, "JAX could not look for devices")
    if platform not in (Platform.GPU, Platform.TPU):
        return _none_of(wanted, "JAX has a plugin for accelerators, and finds none")
    return Found(platform=Platform(platform), devices=_names(Platform(platform), count))


def has_plugin() -> bool:
    """Returns whether a plugin for GPUs or TPUs is installed; takes milliseconds, for JAX is not started."""
    known = any(importlib.util.find_spec(name) is not None for name in ("jax_plugins", "libtpu"))
    return known or bool(importlib.metadata.entry_points(group="jax_plugins"))


def _none_of(wanted: Platform, why: str) -> Found:
    if wanted is Platform.AUTO:
        return Found(platform=Platform.CPU, note=f"{why}: islands train on the CPU" if why else "")
    cure, extra = _CURES[wanted]
    jax = f"jax[{extra}]=={importlib.metadata.version('jax')}"  # the plugin of the JAX that is there
    cure = f"{cure} and {install(jax)}; or leave it out{f' ({why})' if why else ''}"
    raise ConfigError("platform", str(wanted), cure)


def _names(platform: Platform, count: int) -> tuple[str, ...]:
    """Names the devices; those that the user has left visible, by the user's names."""
    variable = "CUDA_VISIBLE_DEVICES" if platform is Platform.GPU else "TPU_VISIBLE_CHIPS"
    given = [each.strip() for each in os.environ.get(variable, "").split(",") if each.strip()]
    return tuple(given[:count]) if len(given) >= count else tuple(map(str, range(count)))
