"""The settings of the commands that supervise a run's processes: ``up`` and ``hub``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from broker.base import settings, sources
from broker.base.errors import ConfigError
from broker.base.settings import setting
from broker.gateway.config import DEFAULT_PORT
from broker.wire.addresses import MAX_BROKERS, broker_addresses
from ops.plans.devices import Platform
from ops.sinks.target import target_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """The settings that ``up`` and ``hub`` share."""

    run_dir: Path | None = setting(
        None, "directory of the run, new or empty (default: a new one in runs/)", subject="this machine"
    )
    port: int = setting(0, "port of the broker; it uses the next one, too; 0 picks free ones")
    brokers: int = setting(1, "brokers to start; islands leave a silent one for the next")
    redis_port: int = setting(0, "port of the Redis that is started; 0 picks a free one")
    keys: bool = setting(False, "make a key for every process, in the run directory, and use them")
    metrics: int = setting(
        0, "serve metrics for Prometheus, each process at a port of its own from this one on; 0: none"
    )
    standbys: int = setting(0, "standby aggregators, which take over when the leading one fails; of each shard")
    log_to: tuple[str, ...] = setting(
        (),
        "where its figures go: tensorboard:DIR, wandb:PROJECT, mlflow:URI; one or several",
        subject="evaluation",
    )

    def __post_init__(self) -> None:
        for name in ("port", "redis_port"):
            if not 0 <= getattr(self, name) <= 65_534:
                raise ConfigError(name, getattr(self, name), "must be from 1 to 65534, or 0 to pick a free one")
        if not 0 <= self.metrics <= 65_535:
            raise ConfigError("metrics", self.metrics, "must be a port from 1 to 65535, such as 9401, or 0 for none")
        if not 0 <= self.standbys <= 9:
            raise ConfigError("standbys", self.standbys, "must be from 0 to 9; one survives any single failure")
        if not 1 <= self.brokers <= MAX_BROKERS:
            raise ConfigError("brokers", self.brokers, f"must be from 1 to {MAX_BROKERS}; 2 or 3 are plenty")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig(SupervisorConfig):
    """The settings of ``hub`` alone; every field is a flag of it and a key of the table ``[hub]``."""

    run_dir: Path | None = setting(
        None, "directory of the run: a new one, or the hub's (default: that of its name in runs/)", subject="the hub"
    )
    port: int = setting(DEFAULT_PORT, "port of the broker; tensors use the next one; 0 picks free ones")
    keys: bool = setting(True, "make missing keys at the first start; without keys anybody who connects can take part")
    address: str = setting(
        "",
        "address that islands dial, such as tcp://hub.example.com:7001 (default: by this host's name)",
    )
    key_dir: Path | None = setting(
        None, "directory of the keys, made here or brought along (default: keys in the run directory)"
    )
    init: Path | None = setting(
        None, "trained model that version 0 comes from; the first island must have the same (island --init)"
    )

    def __post_init__(self) -> None:
        SupervisorConfig.__post_init__(self)
        if self.address:
            broker_addresses(self.address, field="address")
        if self.key_dir is not None and not self.keys:
            raise ConfigError("key_dir", str(self.key_dir), "contradicts --no-keys: leave one of them out")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig(SupervisorConfig):
    """The settings of ``up`` alone; every field is a flag of it and a key of the table ``[up]``."""

    pace: tuple[float, ...] = setting(
        (), "least seconds for an inner step: one number for all islands, or one for each", subject="this machine"
    )
    evaluate_every: int = setting(
        0,
        "tokens between two evaluations of the global model while it trains; 0: only before and after",
        subject="evaluation",
    )
    benchmark: tuple[str, ...] = setting(
        (), "functions to evaluate it by besides: package.module:function, which takes the parameters"
    )
    model: str | None = setting(
        None, "built-in model: tiny, small, medium, large, or such as 384x5 (default: small)", subject="training"
    )
    data: tuple[str, ...] = setting(
        (), "text to train on: files, folders, .npy or .bin token arrays, python:PACKAGE (default: Python's sources)"
    )
    platform: Platform = setting(Platform.AUTO, "what islands train on; auto: what JAX finds", subject="this machine")
    devices_per_island: int = setting(
        0, "devices of each island, over which it splits its batch; 0: one, shared where islands outnumber GPUs"
    )
    link: Path | None = setting(
        None, "TOML file of delays, rates and faults between the processes: a wide-area network", subject="this machine"
    )
    task_options: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "option of the task; also in [task] of --config",
            "flag": "--task-option",
            "subject": "training",
        },
    )

    def __post_init__(self) -> None:
        SupervisorConfig.__post_init__(self)
        if self.evaluate_every < 0:
            raise ConfigError("evaluate_every", self.evaluate_every, "must be a number of tokens, such as 200K, or 0")
        if self.devices_per_island < 0:
            raise ConfigError("devices_per_island", self.devices_per_island, "must be at least 1, or 0: one, or shared")
        for seconds in self.pace:
            if seconds < 0:
                raise ConfigError("pace", seconds, "must be a finite number of seconds, 0 or more")


Supervisor = TypeVar("Supervisor", bound=SupervisorConfig)


def up_config(args: argparse.Namespace) -> UpConfig:
    """Returns the settings of ``up`` itself, by flags and file; raises ConfigError for a wrong one."""
    up = _with_whole_targets(sources.load(UpConfig, args, "up", environment={}))
    return replace(up, link=None if up.link is None else up.link.absolute())


def hub_config(args: argparse.Namespace) -> HubConfig:
    """Returns the settings of ``hub`` itself, by flags and file; raises ConfigError for a wrong one."""
    given = sources.given(HubConfig, args, "hub", environment={})
    tables = sources.read_file(args.config) if args.config is not None else {}
    # A file for single daemons has these elsewhere.
    for name, table, key in (("port", "broker", "port"), ("address", "run", "broker")):
        if key in tables.get(table, {}):
            given.setdefault(name, tables[table][key])
    hub = _with_whole_targets(settings.build(HubConfig, given))
    return replace(hub, key_dir=None if hub.key_dir is None else hub.key_dir.absolute())


def _with_whole_targets(config: Supervisor) -> Supervisor:
    """Makes paths absolute: config.toml may be used elsewhere."""
    return replace(config, log_to=tuple(str(target_of(each)) for each in config.log_to))
