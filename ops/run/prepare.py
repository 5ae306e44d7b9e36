"""Prepares a local run or a hub: settles settings, takes ports and a directory. Starts nothing.

``up``, ``chaos`` and ``hub`` begin here, with flags; what they run is the :class:`ops.run.local_plan.LocalPlan` that
comes out.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from aggregator.store.layout import mapped
from broker.base.errors import ConfigError, Unavailable, shown
from broker.process.release import install
from broker.registry import redis_address
from broker.registry.registry import Registry
from ops import run_directory
from ops.keys import make_hub_keys, make_missing
from ops.link_proxy import placing
from ops.link_proxy.placing import Links
from ops.plans import devices
from ops.plans.devices import Found, Platform
from ops.processes.child_process import tied
from ops.processes.cluster import are_free, free_ports
from ops.processes.redis_server import find_server
from ops.run import local_plan, resume
from ops.run.local_plan import LocalPlan
from ops.run.settings import HubConfig, SupervisorConfig, hub_config, up_config

#: What the processes of a killed hub have to give its ports back.
PORTS_WITHIN_S = 5.0


def prepare(args: argparse.Namespace) -> LocalPlan:
    """Settles every setting, then makes the run directory with its ``config.toml``, or takes an old one.

    Raises:
        ConfigError: A setting cannot work, a port is in use, or the directory is; nothing was written.
        Unavailable: There is no Redis server, or the directory cannot be written.
    """
    if args.resume is not None:
        return _prepare_again(args)
    up = up_config(args)
    run_dir = run_directory.unused(up.run_dir)
    plan = _settled(args, run_dir, up)
    if plan.redis_port is None:
        chosen = getattr(args, "run_id", None) is not None or plan.run_id != local_plan.names_of(run_dir)[0]
        plan = plan.named(_claimed_name(plan.redis_url, [plan.run_id] if chosen else local_plan.names_of(run_dir)))
    _make(run_dir)
    if plan.up.keys:
        make_missing(plan.keys_dir, plan.identities)
    run_directory.claim(run_dir)
    _write_config(plan)
    return plan


def _prepare_again(args: argparse.Namespace) -> LocalPlan:
    """Prepares a run that goes on: takes its directory, and holds its settings against the flags."""
    run_dir = resume.directory_of(args)
    lock = run_directory.claim(run_dir)
    try:
        args = resume.with_stored_settings(args, run_dir)
        plan = _settled(args, run_dir, up_config(args), last_port=resume.stored_port(run_dir))
        resume.refuse_contradictions(resume.stored_plan(plan), plan)
        (run_dir / "logs").mkdir(exist_ok=True)  # which no copy has that a run was restored from
        if not resume.has_ended(plan):
            resume.put_away_reports(plan)
        _write_config(plan)
    except BaseException:
        os.close(lock)
        raise
    return plan


def prepare_hub(args: argparse.Namespace) -> tuple[LocalPlan, bool, list[str]]:
    """Settles every setting of a hub in its directory, and makes the keys that are missing.

    Returns:
        The plan; whether the hub goes on with a run that it had before; a line for each key that was made.

    Raises:
        ConfigError: A setting cannot work or contradicts those of the run, a port is in use, or the directory is.
        Unavailable: A directory cannot be written.
    """
    run_dir, goes_on = resume.directory_of_hub(args, hub_config(args).run_dir)
    plan = None if goes_on else _settled_hub(args, run_dir)  # which is refused before anything is written
    _make(run_dir)
    lock = run_directory.claim(run_dir)
    try:
        if plan is None:
            args = args if args.config is not None else resume.with_stored_settings(args, run_dir)
            plan = _settled_hub(args, run_dir, last_port=resume.stored_port(run_dir))
            resume.refuse_contradictions(resume.stored_plan(plan), plan)
            resume.put_away_reports(plan)
        made = make_hub_keys(plan.keys_dir, first=not goes_on) if plan.up.keys else []
        _write_config(plan)
        if plan.redis_port is None and not goes_on:
            _claim_of_hub(plan)
    except BaseException:
        os.close(lock)
        raise
    return plan, goes_on, made


def _settled_hub(args: argparse.Namespace, run_dir: Path, *, last_port: int = 0) -> LocalPlan:
    hub = hub_config(args)
    plan = _settled(args, run_dir, hub, last_port=last_port)
    if plan.redis_port is not None and hub.standbys and find_server() is None:
        cure = "needs Redis, and no server was found on this machine: install one, or name one with --redis-url"
        raise ConfigError("standbys", hub.standbys, cure)
    return plan


def _claim_of_hub(plan: LocalPlan) -> None:
    """Takes the run's name in a shared Redis; a hub that is killed meanwhile goes on as one that has it."""
    try:
        _claimed_name(plan.redis_url, [plan.run_id])
    except ConfigError:
        plan.config_file.unlink()
        raise


def _make(run_dir: Path) -> None:
    with mapped(f"cannot make {run_dir}", definite=True):
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)


def _write_config(plan: LocalPlan) -> None:
    """Writes ``config.toml``, for nobody else to read: options of the task may be secret."""
    run_directory.write(plan.config_file, local_plan.config_toml(plan), mode=0o600)


def _settled(args: argparse.Namespace, run_dir: Path, up: SupervisorConfig, *, last_port: int = 0) -> LocalPlan:
    """Resolves the settings, with addresses that are free now: ``last_port`` if it is one of them."""
    hub = up if isinstance(up, HubConfig) else None
    redis_url, redis_port = local_plan.given_redis_url(args), None
    if redis_url is not None:
        redis_address.check(redis_url)  # before anything is started
    else:
        redis_port = _redis_port(up.redis_port)
        redis_url = f"redis://127.0.0.1:{redis_port}"
    ports = 2 * up.brokers
    if up.port + ports > 65_536:
        raise ConfigError("port", up.port, f"must be at most {65_536 - ports}: {ports} ports from it on are needed")
    if hub is not None and last_port:
        _wait_for_ports(range(last_port, last_port + ports))
    if up.port and not are_free(range(up.port, up.port + ports)):
        which = f"it or {up.port + 1}" if ports == 2 else f"one of it to {up.port + ports - 1}"
        raise ConfigError("port", up.port, f"{which} is in use; choose another, or 0 for free ones")
    again = last_port if last_port and are_free(range(last_port, last_port + ports)) else 0
    port = up.port or again or free_ports(ports)
    plan = local_plan.resolve(args, run_dir=run_dir, port=port, redis_url=redis_url, redis_port=redis_port, hub=hub)
    _check_metrics_ports(plan)
    if hub is not None:
        return plan
    plan = _with_devices(plan)
    return plan if plan.up.link is None else replace(plan, links=_links(plan, plan.up.link))


def _wait_for_ports(ports: range) -> None:
    """Returns when nobody listens there, or after a while: processes of a killed hub are about to end."""
    ends_s = time.monotonic() + PORTS_WITHIN_S
    while not are_free(ports) and time.monotonic() < ends_s:
        time.sleep(0.1)


def _check_metrics_ports(plan: LocalPlan) -> None:
    ports = list(plan.metrics_ports.values())
    if not ports:
        return
    try:
        import prometheus_client  # noqa: F401
    except ImportError as err:
        raise ConfigError("metrics", plan.up.metrics, f"needs a package: {install('prometheus-client')}") from err
    first, last = min(ports), max(ports)
    if last > 65_535:
        raise ConfigError("metrics", first, f"must be at most {65_536 - len(ports)}: {len(ports)} processes serve them")
    ours = {plan.redis_port} | {port + k for port in plan.broker_ports.values() for k in (0, 1)}
    if ours & set(ports) or not are_free(ports):
        raise ConfigError("metrics", first, f"it or another one up to {last} is in use; choose another")


def _with_devices(plan: LocalPlan) -> LocalPlan:
    """Looks for devices, and divides them among the islands."""
    found = find_devices(plan.up.platform)
    each = plan.up.devices_per_island
    places = devices.placements(found, islands=plan.aggregator.islands, devices_per_island=each)
    return replace(plan, devices=places, devices_note=found.note)


def _links(plan: LocalPlan, file: Path) -> Links:
    """Reads the region file and finds ports for the doors of its links."""
    described, brokers = placing.read(file), plan.aggregator.broker.split(",")
    own = range(plan.broker.port, plan.broker.port + placing.DOORS_PER_BROKER * len(brokers))
    taken = {*own, plan.redis_port}  # by processes that are not started yet
    redis_clients = [*plan.aggregator_ids, *plan.broker_ports]
    ways = placing.ways(plan.clients, brokers, redis_clients=redis_clients, redis_url=plan.redis_url)

    def find_ports(count: int) -> int:
        first = free_ports(count)
        return first if taken.isdisjoint(range(first, first + count)) else find_ports(count)

    return placing.place(described, ways, find_ports=find_ports, run_dir=plan.run_dir)


def _redis_port(wanted: int) -> int:
    """The port asked for, or a free one.

    Never Redis' own by itself: whoever names no address looks there, and would share the Redis of this run and lose it.
    """
    if wanted and not are_free([wanted]):
        raise ConfigError("redis_port", wanted, "is in use; choose another, or 0, or name that Redis with --redis-url")
    return wanted or free_ports(1)


def _claimed_name(redis_url: str, names: Sequence[str]) -> str:
    """Takes the first of these names that is free in a shared Redis: runs of one name would share keys.

    Raises:
        ConfigError: None of them is free.
    """

    async def claim() -> str | None:
        for name in names:
            registry = Registry(redis_url, name)
            try:
                if await registry.claim():
                    return name
            except Unavailable:  # a run goes on without it, and takes the name that it would have had alone
                return names[0]
            finally:
                await registry.aclose()
        return None

    found = asyncio.run(claim())
    if found is None:
        cure = f"is the name of another run in Redis at {shown(redis_url)}: choose another with --run, or go on with"
        raise ConfigError("run_id", names[0], f"{cure} that run in its own directory")
    return found


# --- devices --------------------------------------------------------------------------------------------------------

#: Drivers take their time: eight GPUs some 10 s.
DEVICES_WITHIN_S = 120.0

#: Prints the platform and the number of devices; of a TPU its chips, some of which are two devices.
_FIND_DEVICES = """
import json, jax
found = jax.local_devices()
print(json.dumps([found[0].platform, len({tuple(getattr(each, "coords", (each.id,))) for each in found})]))
"""

_DEVICE_CURES = {
    Platform.GPU: ("JAX finds no GPU here: it takes an NVIDIA driver", "cuda12"),
    Platform.TPU: ("JAX finds no TPU here: it takes a TPU host", "tpu"),
}


def find_devices(wanted: Platform) -> Found:
    """Returns the devices that islands are to train on, which JAX finds in a short child process.

    ``up`` itself never loads JAX: it would hold a GPU, or a TPU, for as long as the run lasts.

    Raises:
        ConfigError: JAX finds none of the wanted platform.
    """
    if wanted is Platform.CPU or (os.environ.get("JAX_PLATFORMS") == "cpu" and wanted is Platform.AUTO):
        return Found(platform=Platform.CPU)
    if not _has_plugin():
        return _no_devices(wanted, "")
    environment = dict(os.environ)
    if wanted is not Platform.AUTO:
        environment["JAX_PLATFORMS"] = "cuda" if wanted is Platform.GPU else "tpu"
    try:
        done = subprocess.run(
            tied([sys.executable, "-P", "-c", _FIND_DEVICES]),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEVICES_WITHIN_S,
        )
        platform, count = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return _no_devices(wanted, f"JAX did not find its devices within {DEVICES_WITHIN_S:g} s")
    except (OSError, ValueError, IndexError):
        return _no_devices(wanted, "JAX could not look for devices")
    if platform not in (Platform.GPU, Platform.TPU):
        return _no_devices(wanted, "JAX has a plugin for accelerators, and finds none")
    return Found(platform=Platform(platform), devices=_devices(Platform(platform), count))


def _has_plugin() -> bool:
    """Returns whether a plugin for GPUs or TPUs is installed; takes milliseconds, for JAX is not started."""
    known = any(importlib.util.find_spec(name) is not None for name in ("jax_plugins", "libtpu"))
    return known or bool(importlib.metadata.entry_points(group="jax_plugins"))


def _no_devices(wanted: Platform, why: str) -> Found:
    if wanted is Platform.AUTO:
        return Found(platform=Platform.CPU, note=f"{why}: islands train on the CPU" if why else "")
    cure, extra = _DEVICE_CURES[wanted]
    jax = f"jax[{extra}]=={importlib.metadata.version('jax')}"  # the plugin of the JAX that is there
    cure = f"{cure} and {install(jax)}; or leave it out{f' ({why})' if why else ''}"
    raise ConfigError("platform", str(wanted), cure)


def _devices(platform: Platform, count: int) -> tuple[str, ...]:
    """Names the devices; those that the user has left visible, by the user's names."""
    variable = "CUDA_VISIBLE_DEVICES" if platform is Platform.GPU else "TPU_VISIBLE_CHIPS"
    given = [each.strip() for each in os.environ.get(variable, "").split(",") if each.strip()]
    return tuple(given[:count]) if len(given) >= count else tuple(map(str, range(count)))
