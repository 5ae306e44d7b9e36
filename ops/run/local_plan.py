"""The plan of a local run or a hub: every setting resolved, with names and paths. Starts nothing.

One file, ``config.toml`` in the run directory, then says everything: each daemon is started with ``--config`` on it,
and whoever wants to repeat the run uses it with another ``--run-dir``. Only the address of a Redis that ``up`` starts
is not in it, since that server ends with the run, and no password of another one: daemons get it as REDIS_URL.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from aggregator.interface.config import AggregatorConfig
from aggregator.rules.recipes import PROFILES
from broker.base import settings, sources
from broker.base.errors import ConfigError
from broker.base.settings import expanded, typed
from broker.base.sources import to_toml
from broker.gateway.config import BrokerConfig
from broker.registry import redis_address
from broker.wire.addresses import is_local
from broker.wire.identity import Identity, KeyRole
from broker.wire.messages import RECIPE, Profile
from islands.interface.config import IslandConfig
from islands.tasks.corpus import PYTHON
from islands.tasks.options import check_options, signature_in_source
from islands.weights.files import open_weights
from ops.evaluation import harness
from ops.link_proxy.placing import Links
from ops.plans.devices import Placement
from ops.run.settings import HubConfig, SupervisorConfig, UpConfig, up_config
from ops.sinks.target import check_installed, target_of

#: What trains visibly in under five minutes on two cores.
DEFAULT_TOKENS = 2_000_000

LOOPBACK = "127.0.0.1"

#: Processes of islands that one machine may be asked for; a number beyond this is a slip of the finger.
MAX_LOCAL_ISLANDS = 1000

#: Where an aggregator says at the end what it has counted.
REPORT = "aggregator-report.json"

#: Settings that follow from the run directory, or that each process gets for itself.
_DECIDED_HERE = frozenset(
    {
        "broker",
        "port",
        "ipc",
        "name",
        "store",
        "tape",
        "report",
        "island_id",
        "pace",
        "pulse",
        "health",
        "log_to",
        "key",
        "insecure",
        "failover",
        "shard",
        "standby",
        "new_lineage",
        "metrics_port",
        "metrics_host",
    }
)
#: Addresses on which a broker listens to other machines: those of this one reach it on loopback.
_EVERY_ADDRESS = frozenset({"0.0.0.0", "::", "*"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """A resolved run.

    Attributes:
        run_dir: Absolute; holds everything that the run writes.
        redis_url: Where Redis listens, or will.
        redis_port: Of the Redis to be started; None: it runs already.
        hub: The settings of ``hub``, which starts no islands; None: those of ``up``, which does.
        task: Options of the task.
        links: What lies between clients and broker; None: nothing.
        devices: Those of each island; empty: not decided, which is the CPU.
        devices_note: What the user should know of how they were found.
    """

    run_dir: Path
    up: UpConfig
    broker: BrokerConfig
    aggregator: AggregatorConfig
    island: IslandConfig
    task: Mapping[str, Any]
    redis_url: str = field(repr=False)  # it may hold a password
    redis_port: int | None
    hub: HubConfig | None = None
    links: Links | None = None
    devices: tuple[Placement, ...] = ()
    devices_note: str = ""

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.aggregator.run_id

    def named(self, run_id: str) -> LocalPlan:
        """Returns the plan under another name of the run."""
        return replace(
            self,
            broker=replace(self.broker, run_id=run_id),
            aggregator=replace(self.aggregator, run_id=run_id),
            island=replace(self.island, run_id=run_id),
        )

    @property
    def island_ids(self) -> tuple[str, ...]:
        """Names of the islands that are started here."""
        if self.hub is not None:
            return ()
        width = len(str(self.aggregator.islands - 1))
        return tuple(f"island-{i:0{width}}" for i in range(self.aggregator.islands))

    @property
    def shards(self) -> dict[str, int]:
        """Name of each aggregator -> its shard; of a shard the one that begins, then those that stand by."""
        names: dict[str, int] = {}
        for shard in range(self.aggregator.shards):
            first = f"aggregator-{shard}" if shard else "aggregator"
            standby = f"{first}-standby" if shard else "standby"
            names |= dict.fromkeys((first, *(f"{standby}-{i + 1}" for i in range(self.up.standbys))), shard)
        return names

    @property
    def aggregator_ids(self) -> tuple[str, ...]:
        """Names of the aggregators."""
        return tuple(self.shards)

    def store_of(self, aggregator_id: str) -> Path:
        """Returns the folder of an aggregator's versions."""
        return self.aggregator.store if aggregator_id == "aggregator" else self.run_dir / aggregator_id / "store"

    @property
    def reports(self) -> tuple[Path, ...]:
        """The reports that the aggregators of all shards write when they end."""
        own = (self.run_dir / f"aggregator-{shard}" / REPORT for shard in range(1, self.aggregator.shards))
        return (self.run_dir / REPORT, *own)

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the processes that connect to the broker."""
        return (*self.aggregator_ids, *self.island_ids)

    @property
    def broker_ports(self) -> dict[str, int]:
        """Name of each broker's process -> its control port."""
        first = self.broker.port
        if self.up.brokers == 1:
            return {"broker": first}
        return {f"broker-{k}": first + 2 * k for k in range(self.up.brokers)}

    @property
    def metrics_ports(self) -> dict[str, int]:
        """Name of each process that serves metrics -> its port; empty if none does."""
        names = (*self.broker_ports, *self.clients) if self.up.metrics else ()
        return {name: self.up.metrics + k for k, name in enumerate(names)}

    @property
    def keys_dir(self) -> Path:
        """The folder of the keys of all processes, if they have any."""
        return _keys_dir(self.run_dir, self.hub)

    @property
    def address(self) -> str:
        """Returns the addresses of the brokers for islands on other machines."""
        assert self.hub is not None
        host = self.broker.host
        if host in _EVERY_ADDRESS:
            host = socket.gethostname() if is_local(socket.getfqdn()) else socket.getfqdn()
        return self.hub.address or _addresses(host, self.broker_ports.values())

    @property
    def identities(self) -> list[Identity]:
        """The identities of the broker and of those it lets in, if keys are in use."""
        hub = [Identity(role=role, name=str(role)) for role in (KeyRole.BROKER, KeyRole.AGGREGATOR)]
        return [*hub, *(Identity(role=KeyRole.ISLAND, name=island_id) for island_id in self.island_ids)]

    @property
    def config_file(self) -> Path:
        """The resolved configuration, as every process reads it."""
        return self.run_dir / "config.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``up``: its own, and those of the aggregator, the broker and the islands."""
    sources.add_config_flag(parser)
    taken = sources.add_flags(parser, UpConfig) | {"host"}
    for cls in (AggregatorConfig, IslandConfig, BrokerConfig):
        taken |= sources.add_flags(parser, cls, skip=taken | _DECIDED_HERE, defaults={"total_tokens": DEFAULT_TOKENS})


def add_hub_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hub``: its own, and those of the aggregator and the broker."""
    sources.add_config_flag(parser)
    taken = sources.add_flags(parser, HubConfig)
    for cls in (AggregatorConfig, BrokerConfig):
        taken |= sources.add_flags(parser, cls, skip=taken | _DECIDED_HERE, defaults={"run_id": None})


def resolve(
    args: argparse.Namespace,
    *,
    run_dir: Path,
    port: int,
    redis_url: str,
    redis_port: int | None,
    hub: HubConfig | None = None,
) -> LocalPlan:
    """Returns the plan of a run; flags win over the file, the file over defaults.

    Args:
        args: Flags as :func:`add_arguments` declares them.
        run_dir: Absolute; need not exist.
        port: The first broker's control port; it and the next one are free, and two for each further broker.
        redis_url: Where Redis listens, or will.
        redis_port: Of the Redis to be started; None: it runs already.
        hub: The settings of ``hub``, for a plan without islands; None: those of ``up`` are read, too.

    Raises:
        ConfigError: A setting cannot work, in the words of whichever part it belongs to.
    """
    tables = _tables(args)
    if hub is None:
        up = up_config(args)
    else:
        up = UpConfig(**{each.name: getattr(hub, each.name) for each in fields(SupervisorConfig)})
    run = {"run_id": names_of(run_dir)[0]} | tables.get("run", {})
    before = None if args.config is None else args.config.absolute().parent
    if hub is None and before is not None and before != run_dir and run["run_id"] in names_of(before):
        # The file is that of an earlier run, named after its directory. Its repetition is a run of its own: in a Redis
        # that both use, older versions under one name would never replace the earlier run's.
        run["run_id"] = names_of(run_dir)[0]
    host = LOOPBACK if hub is None else getattr(args, "host", None) or tables.get("broker", {}).get("host", LOOPBACK)
    reached = LOOPBACK if host in _EVERY_ADDRESS else host
    run["broker"] = _addresses(reached, [port + 2 * k for k in range(up.brokers)])
    run["redis_url"] = redis_url
    decided: dict[str, dict[str, Any]] = {
        "broker": {"host": host, "port": port},
        "aggregator": {
            "store": run_dir / "store",
            "tape": run_dir / "events.jsonl",
            "report": run_dir / REPORT,
            "failover": up.standbys > 0,
        },
        "island": {},
    }
    if hub is not None and hub.init is not None:
        decided["aggregator"]["init_digest"] = open_weights(hub.init).digest
    for name in decided if hub is not None else ("broker", "aggregator"):
        if up.keys:
            key = "islands" if name == "island" else name
            decided[name]["key"] = _keys_dir(run_dir, hub) / f"{key}.secret"
        elif hub is not None and not is_local(host):  # asked for by --no-keys
            decided[name]["insecure"] = True
    usual: dict[str, dict[str, Any]] = {"aggregator": {"total_tokens": DEFAULT_TOKENS} if hub is None else {}}
    # The address of Redis is settled: neither the flag nor the environment may change it any more.
    from_line = argparse.Namespace(**{**vars(args), "redis_url": redis_url})

    def part(cls: Any, name: str) -> Any:
        known = {each.name for each in settings.settings_of(cls)}
        shared = {key: value for key, value in run.items() if key in known}
        table = usual.get(name, {}) | shared | sources.own_table(cls, tables, name) | decided[name]
        if not up.keys:
            table.pop("key", None)  # those of a run whose file this was: islands would have none
        mine = argparse.Namespace(**{key: value for key, value in vars(from_line).items() if key not in _DECIDED_HERE})
        return sources.from_sources(cls, table, mine, where=name)

    island = part(IslandConfig, "island")
    if island.init is not None:
        island = replace(island, init=open_weights(island.init).path.absolute())
    task = _task_options(tables.get("task", {}), up)
    profile = getattr(args, "profile", None) or tables.get("recipe", {}).get("profile", Profile.DECOUPLED)
    usual["aggregator"] |= PROFILES[typed("profile", profile, Profile)]
    plan = LocalPlan(
        run_dir=run_dir,
        up=up,
        broker=part(BrokerConfig, "broker"),
        aggregator=part(AggregatorConfig, "aggregator"),
        island=island,
        task=task,
        redis_url=redis_url,
        redis_port=redis_port,
        hub=hub,
    )
    if hub is None:
        _check_islands(plan)
    for target in up.log_to:
        check_installed(target_of(target))
    return plan


def _check_islands(plan: LocalPlan) -> None:
    """Checks what islands of this machine will do, before anything is started.

    Raises:
        ConfigError: They are too many, or a setting of theirs cannot work.
    """
    up = plan.up
    if plan.aggregator.islands > MAX_LOCAL_ISLANDS:
        limit = f"must be at most {MAX_LOCAL_ISLANDS} here, as each is a process of this machine"
        raise ConfigError("islands", plan.aggregator.islands, f"{limit}; simulate plays larger fleets")
    if len(up.pace) not in (0, 1, plan.aggregator.islands):
        cure = f"must be one number, or one for each of the {plan.aggregator.islands} islands"
        raise ConfigError("pace", ",".join(f"{each:g}" for each in up.pace), cure)
    _check_task(plan.island.task, plan.task)
    for benchmark in up.benchmark:
        if harness.check(benchmark):
            cure = f"is for evaluate, beside the run: evaluate --follow {plan.run_dir} --benchmark {benchmark}"
            raise ConfigError("benchmark", benchmark, cure)
        signature_in_source(benchmark, search=[*sys.path, os.getcwd()], field="benchmark")


def _check_task(path: str, options: Mapping[str, Any]) -> None:
    """Checks the task by its source, else an island would report a slip only after everything started.

    Raises:
        ConfigError: There is no such module or function, or it does not have these options.
    """
    signature = signature_in_source(path, search=[*sys.path, os.getcwd()])  # where islands look
    if signature is not None:
        check_options(path, signature, options)


def _keys_dir(run_dir: Path, hub: HubConfig | None) -> Path:
    return run_dir / "keys" if hub is None or hub.key_dir is None else hub.key_dir


def _addresses(host: str, ports: Iterable[int]) -> str:
    return ",".join(f"tcp://{f'[{host}]' if ':' in host else host}:{port}" for port in ports)


def given_redis_url(args: argparse.Namespace) -> str | None:
    """Returns the address of a Redis that runs already, if a flag, REDIS_URL or the file names one."""
    tables = _tables(args)
    named = [tables.get(name, {}).get("redis_url") for name in ("run", "aggregator", "broker")]
    return args.redis_url or os.environ.get("REDIS_URL") or next(filter(None, named), None)


def _tables(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    return sources.read_file(args.config) if args.config is not None else {}


def names_of(run_dir: Path) -> list[str]:
    """Returns the names of a run in this directory, best first: that of the directory, then numbered ones."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", run_dir.name)[:64] or "atoll"
    return [name, *(f"{name[:60]}-{n}" for n in range(2, 1000))]


def _task_options(table: Mapping[str, Any], up: UpConfig) -> dict[str, Any]:
    """Returns the options of [task], short forms over them, ``--task-option`` over all, absolute paths."""
    options = dict(table)
    if up.model is not None:
        options["model"] = up.model
    if up.data:
        options["data"] = list(up.data)
    options |= {key: _as_toml(value) for key, value in up.task_options.items()}
    if isinstance(options.get("data"), list):
        options["data"] = [_absolute(path) for path in options["data"]]
    return options


def _absolute(path: str) -> str:
    return path if path.startswith(PYTHON) else os.path.abspath(expanded("data", path))


def _as_toml(value: Any) -> Any:
    """Reads the text of a flag as TOML would: 3 is a number, true a truth value, anything else text."""
    if not isinstance(value, str):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def config_toml(plan: LocalPlan) -> str:
    """Returns the resolved configuration; what the parts share stands in [run] alone."""
    parts = {
        "broker": settings.to_table(plan.broker),
        "aggregator": settings.to_table(plan.aggregator),
        "island": settings.to_table(plan.island),
    }
    shared: dict[str, Any] = {}
    for key in sources.RUN_KEYS:
        values = [table[key] for table in parts.values() if key in table]
        if values and all(value == values[0] for value in values):
            shared[key] = values[0]
    own = {name: {k: v for k, v in table.items() if k not in shared} for name, table in parts.items()}
    recipe = {name: own["aggregator"].pop(name) for name in RECIPE if name in own["aggregator"]}
    supervisor = settings.to_table(plan.hub or plan.up)
    for name in ("run_dir", "model", "data", "task_options"):  # the place of this file, and what stands in [task]
        supervisor.pop(name, None)
    if plan.redis_port is not None:
        shared.pop("redis_url", None)
    elif "redis_url" in shared:
        shared["redis_url"] = redis_address.without_password(shared["redis_url"])
    name = "up" if plan.hub is None else "hub"
    heading = f"The resolved configuration of this run: every process reads it.\nTo repeat it: {name} --config THIS"
    return to_toml({"run": shared, "recipe": recipe, **own, "task": plan.task, name: supervisor}, heading=heading)
