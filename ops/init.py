"""``atoll init``: writes commented settings files for a fleet, one for the hub and one per region.

What must be decided stands there as a setting; what may be is a comment with its help and default, both taken from
where the setting is declared. Nothing is ever overwritten.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from aggregator.interface.config import AggregatorConfig
from broker.base import sources
from broker.base.errors import ConfigError, Unavailable, cure_of
from broker.base.settings import settings_of
from broker.base.sources import table_of, to_toml
from broker.gateway.config import DEFAULT_PORT, DEFAULT_REDIS_URL, BrokerConfig
from broker.wire.addresses import check_address, is_local
from broker.wire.identity import Identity, KeyRole
from broker.wire.messages import Recipe
from broker.wire.names import check_name
from islands.interface.config import IslandConfig
from ops import launcher
from ops.run.settings import HubConfig, UpConfig

HUB_FILE = "atoll.toml"
KEYS = "keys"
LOOPBACK, EVERY_ADDRESS = "127.0.0.1", "0.0.0.0"

#: Settings that stand there as comments, in the order in which they are wanted; those without a flag come after them.
_OPEN: dict[str, tuple[type[Any], Sequence[str]]] = {
    "run": (BrokerConfig, ()),
    "recipe": (
        Recipe,
        ("profile", "outer_learning_rate", "outer_momentum", "sync_interval", "fragments", "quorum", "codec"),
    ),
    "broker": (BrokerConfig, ("name",)),
    "aggregator": (AggregatorConfig, ("total_tokens", "tape", "failover", "standby", "shards")),
    "island": (IslandConfig, ("island_id", "state_dir", "health", "pace")),
    "hub": (HubConfig, ("standbys", "run_dir")),
    "up": (UpConfig, ("brokers", "standbys", "evaluate_every", "platform")),
}
_DATA = ('data = ["corpus.txt"]',)
#: What a comment shows where the default says nothing.
_EXAMPLES: dict[str, Any] = {
    "outer_learning_rate": 0.7,
    "outer_momentum": 0.9,
    "name": "hub",
    "tape": "events.jsonl",
    "health": "health",
    "total_tokens": 1_000_000_000,
    "island_id": "paris",
    "run_dir": "runs/demo",
    "state_dir": "state",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``atoll init``."""
    parser.add_argument(
        "dir", metavar="DIR", nargs="?", type=sources.as_path, default=Path(), help="where to write (default: here)"
    )
    hub_help = f"name or address by which the regions reach the hub (default: {LOOPBACK}, for all on one machine)"
    parser.add_argument("--hub", metavar="HOST", default=LOOPBACK, help=hub_help)
    parser.add_argument(
        "--port", metavar="N", type=int, default=DEFAULT_PORT, help=f"of the broker (default: {DEFAULT_PORT})"
    )
    regions_help = "names of the regions, each with an island (default: one two)"
    parser.add_argument("--regions", metavar="NAME", nargs="+", default=["one", "two"], help=regions_help)
    parser.add_argument("--run", metavar="TEXT", default="", help="name of the run (default: that of DIR)")
    keys_help = "whether everybody has a key (default: unless the hub is this machine alone)"
    parser.add_argument("--keys", action=argparse.BooleanOptionalAction, default=None, help=keys_help)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A hub, the regions that train, and whether they have keys.

    Raises:
        ConfigError: A name or an address cannot be one.
    """

    run_id: str
    hub: str
    port: int
    regions: tuple[str, ...]
    keys: bool

    def __post_init__(self) -> None:
        check_name("run", self.run_id)
        check_address(self.broker, field="hub")
        for each in self.regions:
            check_name("regions", each)
            Identity(role=KeyRole.ISLAND, name=each)  # some names are of others
            if self.regions.count(each) > 1 or f"{each}.toml" == HUB_FILE:
                raise ConfigError("regions", each, "is taken: each region needs a name, and a file, of its own")

    @property
    def broker(self) -> str:
        """The broker's address, as the regions say it."""
        host = f"[{self.hub}]" if ":" in self.hub and not self.hub.startswith("[") else self.hub
        return f"tcp://{host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether all of it is on one machine."""
        return is_local(self.broker)


def run(args: argparse.Namespace) -> int:
    """Writes the files, and says what to do next; returns 0.

    Raises:
        ConfigError: A name or an address cannot be one, or one of the files exists.
        Unavailable: The directory cannot be written.
    """
    name = args.run or _as_name(args.dir.absolute().name)
    local = is_local(f"tcp://{args.hub}:{args.port}")
    keys = not local if args.keys is None else args.keys
    fleet = Fleet(run_id=name, hub=args.hub, port=args.port, regions=tuple(args.regions), keys=keys)
    written = files(fleet)
    for each in written:
        if (args.dir / each).exists():
            cure = "is there already, and is not overwritten: name another DIR, or remove it"
            raise ConfigError("DIR", str(args.dir / each), cure)
    try:
        args.dir.mkdir(parents=True, exist_ok=True)
        for each, text in written.items():
            with open(args.dir / each, "x", encoding="utf-8") as file:
                file.write(text)
    except FileExistsError as err:
        raise ConfigError("DIR", str(err.filename), "is a file: name a directory, in which there is none yet") from err
    except OSError as err:
        raise Unavailable(f"cannot write {args.dir} ({err.strerror}): {cure_of(err)}", definite=True) from err
    print(f"wrote {', '.join(written)} in {args.dir}; next:\n")
    for line in next_commands(fleet, args.dir, launcher.program(args.dir)):
        print(f"  {line}")
    return 0


def next_commands(fleet: Fleet, directory: Path, program: str) -> list[str]:
    """Returns the commands to start the fleet with; pure."""
    lines = [f"cd {shlex.quote(os.fspath(directory))}"] if os.fspath(directory) != "." else []
    if fleet.keys:
        lines.append(f"{program} keys init aggregator {' '.join(f'island:{each}' for each in fleet.regions)}")
    lines.append(f"{program} hub --config {HUB_FILE}")
    for region in fleet.regions:
        brings = f"{region}.toml" + (f", {KEYS}/island-{region}.secret, {KEYS}/broker.public" if fleet.keys else "")
        where = "" if fleet.local else f"    # in {region}, in a folder with {brings}"
        lines.append(f"{program} island --config {region}.toml{where}")
    return lines


# --- the files --------------------------------------------------------------------------------------------------------


def files(fleet: Fleet) -> dict[str, str]:
    """Returns name -> content of each file; pure."""
    return {HUB_FILE: _hub_file(fleet)} | {f"{each}.toml": _region_file(fleet, each) for each in fleet.regions}


def _hub_file(fleet: Fleet) -> str:
    heading = f"""\
The settings of run {fleet.run_id}, for its hub: `hub --config {HUB_FILE}` reads this file, as broker and aggregator
do by themselves, and `up --config {HUB_FILE}` tries the same settings on one machine. A flag wins over the
environment, and that over this file. Lines with a # in front are defaults or examples. What has a flag as well,
`hub --help-all` tells of.
Paths are seen from the directory in which a command is started."""
    blocks = [
        _commented(heading),
        _table(
            "run",
            {"run_id": fleet.run_id, "broker": fleet.broker},
            "What all processes must agree on.",
            open_in="run",
            notes=[
                "Address of Redis, for status and standbys, unless REDIS_URL has it. TLS, users, passwords in a file,",
                "Sentinel: docs/operate.md.",
                f'redis_url = "{DEFAULT_REDIS_URL}"',
            ],
        ),
        _table("recipe", {}, "What decides learning. It is the aggregator's; islands follow it.", open_in="recipe"),
        _table(
            "broker",
            {"host": LOOPBACK if fleet.local else EVERY_ADDRESS, "port": fleet.port, **_door(fleet, "broker")},
            f"Islands connect to this port and, for tensors, to {fleet.port + 1}: let both through the firewall.",
            open_in="broker",
        ),
        _table(
            "aggregator",
            {"islands": len(fleet.regions), "store": "store", **_door(fleet, "aggregator")},
            "It keeps every version in its store: a local SSD is best.",
            open_in="aggregator",
        ),
        _table(
            "island",
            {"task": "islands.language:task", **_door(fleet, f"island-{fleet.regions[0]}")},
            "For `up`, and for an island on this host. The regions have files of their own.",
            open_in="island",
        ),
        _table("task", {}, "Options of the task.", notes=_DATA),
        _table("hub", {"key_dir": KEYS} if fleet.keys else {"keys": False}, "For `hub` alone.", open_in="hub"),
        _table("up", {}, "For `up` alone.", open_in="up"),
    ]
    return "\n".join(blocks)


def _region_file(fleet: Fleet, region: str) -> str:
    heading = f"""\
The settings of an island of run {fleet.run_id} in the region {region}: `island --config {region}.toml`. It needs
no Redis, and nobody has to reach it: it dials out to the broker.
Paths are seen from the directory in which the command is started."""
    if fleet.keys:
        heading += (
            f"\nBring {KEYS}/island-{region}.secret and {KEYS}/broker.public from the hub, or make the pair here."
        )
    blocks = [
        _commented(heading),
        _table("run", {"run_id": fleet.run_id, "broker": fleet.broker}, "As on the hub."),
        _table(
            "island",
            {
                "task": "islands.language:task",
                "island_id": region,
                "state_dir": f"state-{region}",
                **_door(fleet, f"island-{region}"),
            },
            "A second island here needs a file, an id and a key of its own.",
            open_in="island",
        ),
        _table("task", {}, "Options of the task: the same everywhere, but for the data.", notes=_DATA),
    ]
    return "\n".join(blocks)


def _door(fleet: Fleet, stem: str) -> dict[str, Any]:
    """How a process goes through the broker's door: with a key, or without one where others can reach it."""
    if fleet.keys:
        return {"key": f"{KEYS}/{stem}.secret"}
    return {} if fleet.local else {"insecure": True}


def _table(name: str, given: Mapping[str, Any], about: str, *, open_in: str = "", notes: Iterable[str] = ()) -> str:
    """Returns a TOML table: given settings, then all others as comments."""
    lines = [_commented(about), to_toml({name: given}).rstrip("\n")]
    if open_in:
        cls, names = _OPEN[open_in]
        known = {each.name: each for each in settings_of(cls)}
        without_flag = [
            each.name for each in known.values() if each.flag is None and table_of(cls, each.name) == open_in
        ]
        for setting in (known[each] for each in (*names, *without_flag) if each not in given):
            default = setting.default
            value = _EXAMPLES.get(setting.name, default.value if isinstance(default, Enum) else default)
            lines += [f"# {setting.help}", "# " + to_toml({"x": {setting.name: value}}).splitlines()[1]]
    lines += [f"# {each}" for each in notes]
    return "\n".join(lines) + "\n"


def _commented(text: str) -> str:
    return "\n".join(f"# {line}" for line in text.splitlines()) + "\n" * (text.count("\n") > 0)


def _as_name(text: str) -> str:
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in text)
    return kept[:64] or "atoll"
