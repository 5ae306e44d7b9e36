"""``atoll keys``: makes key pairs, and edits the broker's list of allowed keys.

The secret half of a pair stays where it was made. Where the broker's own pair lies, ``new`` also puts the public half
on the allow list; a pair that was made elsewhere is let in by bringing its ``.public`` file there (``allow``). What
``revoke`` takes off the list is shut out within a second, connections that stand included.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from broker.base import sources
from broker.base.errors import ConfigError
from broker.gateway.config import DEFAULT_PORT
from broker.transport.keys import (
    ALLOW_LIST,
    BROKER_PUBLIC,
    JOIN,
    ClientKeys,
    JoinFile,
    new_pair,
    read_allow_list,
    read_public,
    write_allow_list,
    write_pair,
)
from broker.wire.addresses import broker_addresses
from broker.wire.identity import ANY, Identity, KeyRole

_EPILOG = """
A run over two machines:
  atoll keys init                        on the hub: pairs of broker and aggregator in keys/, and keys/allowed.keys
  atoll keys new island paris            a pair for an island, and its line there; or make it in Paris, and here:
  atoll keys allow island-paris.public
  atoll broker --run demo --host 0.0.0.0 --key keys/broker.secret
  atoll aggregator --run demo --key keys/aggregator.secret
  atoll island --run demo --broker tcp://hub:7001 --key keys/island-paris.secret    with broker.public beside it
  atoll keys new island paris --run demo --join hub.example.com    all that in one file, beside a hub's run: paris.join
  atoll keys new observer desk           for 'atoll status --broker tcp://hub:7001 --key keys/observer-desk.secret'

NAME is the island's id: its key is good for no other. 'atoll keys new island "*"' makes one for a group of islands
whose ids the run assigns; they can pass for each other."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll keys``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = commands.add_parser("new", help="make a pair, and allow it where the broker's pair is")
    new.add_argument("role", metavar="ROLE", help=f"one of {', '.join(KeyRole)}")
    new.add_argument("name", nargs="?", default=None, metavar="NAME", help="its id; an island needs one")
    new.add_argument(
        "--join",
        metavar="HOST",
        help="write NAME.join, with all that an island needs; HOST is where islands reach the broker: a name, or tcp://..",
    )
    init = commands.add_parser("init", help="make missing pairs of a broker and of others, and allow them")
    init.add_argument("who", nargs="*", default=["aggregator"], metavar="ROLE[:NAME]", help="default: aggregator")
    allow = commands.add_parser("allow", help="allow public keys")
    allow.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".public files")
    revoke = commands.add_parser("revoke", help="remove all keys of somebody from the allow list")
    revoke.add_argument("role", metavar="ROLE")
    revoke.add_argument("name", nargs="?", default=None, metavar="NAME")
    listing = commands.add_parser("list", help="show the allow list")
    for each in (new, init, allow, revoke, listing):
        each.add_argument(
            "--dir", type=sources.as_path, metavar="DIR", help="directory of the keys (default: keys, or that of --run)"
        )
        each.add_argument("--run", metavar="NAME", help="a run of `hub` here: its keys, its name and its ports")
        each.add_argument("--json", action="store_true", help="print what is on the list as one JSON object")
    parser.epilog = f"{parser.epilog}\n{_EPILOG}"


def run(args: argparse.Namespace) -> int:
    """Does one of new, init, allow, revoke, list; returns the exit code.

    Raises:
        ConfigError: A role or name cannot be, a pair is there already, or a key file is wrong.
        Unavailable: The directory cannot be written.
    """
    run_dir = None if args.run is None else Path("runs") / args.run
    directory: Path = args.dir or (Path("keys") if run_dir is None else run_dir / "keys")
    if run_dir is not None and not directory.is_dir():
        raise ConfigError("run", args.run, f"has no keys in {directory}: start its hub first, or name them by --dir")
    match args.action:
        case "new" if args.join is not None:
            said = _new_join(directory, _identity(args.role, args.name), args.join, args.run, run_dir)
        case "new":
            said = _new(directory, _identity(args.role, args.name))
        case "init":
            names = [str(KeyRole.BROKER), *args.who]
            identities = [_identity(role, name or None) for role, _, name in (each.partition(":") for each in names)]
            said = make_missing(directory, identities) or ["all of them are there already"]
            said += _not_allowed(directory, identities)
        case "allow":
            said = _allow(directory, [read_public(path, setting="file") for path in args.files])
        case "revoke":
            said = _revoke(directory, _identity(args.role, args.name))
        case _:
            said = []
    allowed = _allowed(directory)
    if args.json:
        rows = [{"role": str(each.role), "name": each.name, "key": key} for key, each in allowed.items()]
        print(json.dumps({"directory": str(directory), "allowed": rows}))
    elif args.action == "list":
        print("\n".join(f"{each!s:40} {key}" for key, each in allowed.items()) or f"{directory}: nobody is allowed")
    else:
        print(args.as_called("\n".join(said)))
    return 0


def make_missing(directory: Path, identities: list[Identity]) -> list[str]:
    """Makes the pairs that are not there yet, and allows them; returns a line for each file.

    Raises:
        ConfigError: The allow list is damaged.
        Unavailable: The directory cannot be written.
    """
    missing = [each for each in identities if not (directory / f"{each.stem}.secret").exists()]
    return [line for each in missing for line in _new(directory, each)]


def make_hub_keys(directory: Path, *, first: bool) -> list[str]:
    """Makes and allows the keys that a hub lacks; returns a line for each file and key.

    Where islands have keys of their own already, a group of them gets none.

    Args:
        directory: Of the keys, which may be there already.
        first: The hub has never started: a start that was cut off may have left a pair that is not allowed yet.

    Raises:
        ConfigError: The allow list is damaged.
        Unavailable: The directory cannot be written.
    """
    hub = [Identity(role=role, name=str(role)) for role in (KeyRole.BROKER, KeyRole.AGGREGATOR)]
    group = Identity(role=KeyRole.ISLAND, name=ANY)
    named = any(each.role is KeyRole.ISLAND for each in _allowed(directory).values())
    said = make_missing(directory, hub if named else [*hub, group])
    for each in (hub[1], group) if first else ():
        public = directory / f"{each.stem}.public"
        if each not in _allowed(directory).values() and public.exists():
            said += _allow(directory, [read_public(public, setting="key_dir")])
    return said


def _identity(role: str, name: str | None) -> Identity:
    if role not in set(KeyRole):
        raise ConfigError("role", role, "must be one of " + ", ".join(KeyRole))
    if name is None and role in (KeyRole.ISLAND, KeyRole.OBSERVER):
        cure = f'must be its id, such as paris; "{ANY}" for a group of islands without ids of their own'
        raise ConfigError("name", None, cure)
    if role == KeyRole.BROKER and name not in (None, role):
        raise ConfigError(
            "name", name, "cannot be: all brokers of a run have one pair, broker.secret and broker.public"
        )
    return Identity(role=KeyRole(role), name=name or role)


def _new(directory: Path, identity: Identity) -> list[str]:
    pair = new_pair(identity)
    secret, public = write_pair(directory, pair)
    said = [f"{identity}: {secret} (keep it there), {public}"]
    if identity.role is KeyRole.BROKER:
        write_allow_list(directory / ALLOW_LIST, _allowed(directory))
        return [*said, f"clients need {directory / BROKER_PUBLIC} beside their own secret file"]
    if (directory / "broker.secret").exists():
        return said + _allow(directory, [(identity, pair.public)])
    return [*said, f"where the broker's keys are: atoll keys allow {shlex.quote(public.name)}"]


def _new_join(directory: Path, identity: Identity, host: str, run: str | None, run_dir: Path | None) -> list[str]:
    """Makes a pair, allows it, and writes it into one file with all else that an island needs.

    Raises:
        ConfigError: The role is no island's, or the broker's keys or the run are not known here.
    """
    if identity.role is not KeyRole.ISLAND or identity.name == ANY:
        raise ConfigError(
            "join", str(identity), "is for one island by its name: atoll keys new island paris --join HOST"
        )
    if run is None:
        raise ConfigError("run", None, "is needed with --join: the file has the run's name in it")
    _, broker_public = read_public(directory / BROKER_PUBLIC, setting="dir")
    pair = new_pair(identity)
    made = JoinFile(
        run_id=run,
        broker=_addresses(host, run_dir),
        keys=ClientKeys(own=pair, broker_public=broker_public),
    )
    path = Path(f"{identity.name}{JOIN}")
    made.write(path)
    said = [f"{identity}: {path} (secret: send it by a way that others cannot read)"]
    return said + _allow(directory, [(identity, pair.public)])


def _addresses(host: str, run_dir: Path | None) -> str:
    """Returns the addresses of the brokers at a host, with the ports of the run's hub.

    Raises:
        ConfigError: It is no address.
    """
    if "://" in host:
        return ",".join(broker_addresses(host, field="join"))
    name, _, port = host.rpartition(":") if host.rpartition(":")[2].isdecimal() else (host, "", "")
    ports = [port]
    if not port:
        ports = [str(DEFAULT_PORT)]
        known = None if run_dir is None else run_dir / "hub.address"
        if known is not None and known.is_file():
            ports = [each.rpartition(":")[2] for each in known.read_text("utf-8").split(",")]
    return ",".join(broker_addresses(",".join(f"tcp://{name}:{each.strip()}" for each in ports), field="join"))


def _not_allowed(directory: Path, identities: list[Identity]) -> list[str]:
    """Returns a line for each old pair that is not allowed: nobody revoked comes back unasked."""
    allowed = set(_allowed(directory).values())
    outside = [each for each in identities if each.role is not KeyRole.BROKER and each not in allowed]
    files = [shlex.quote(str(directory / f"{each.stem}.public")) for each in outside]
    return [
        f"{each}: not allowed; to change that, atoll keys allow {file}"
        for each, file in zip(outside, files, strict=True)
    ]


def _allow(directory: Path, keys: list[tuple[Identity, str]]) -> list[str]:
    allowed: dict[str, Identity] = _allowed(directory)
    said: list[str] = []
    for identity, key in keys:
        if identity.role is KeyRole.BROKER:
            raise ConfigError("file", str(identity), "is a broker's key: it is told to clients, not allowed")
        if allowed.setdefault(key, identity) != identity:
            raise ConfigError("file", str(identity), f"has the key of {allowed[key]}: one key, one identity")
        said.append(f"{identity}: allowed by {directory / ALLOW_LIST}")
    write_allow_list(directory / ALLOW_LIST, allowed)
    return said


def _revoke(directory: Path, identity: Identity) -> list[str]:
    allowed = _allowed(directory)
    kept = {key: each for key, each in allowed.items() if each != identity}
    if len(kept) == len(allowed):
        raise ConfigError("name", str(identity), f"is not in {directory / ALLOW_LIST}; see `atoll keys list`")
    write_allow_list(directory / ALLOW_LIST, kept)
    return [f"{identity}: off the list; a broker that runs shuts it out within a second"]


def _allowed(directory: Path) -> dict[str, Any]:
    path = directory / ALLOW_LIST
    return read_allow_list(path) if path.exists() else {}
