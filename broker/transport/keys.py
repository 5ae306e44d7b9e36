"""Key files: their form on disk, and the ones a process needs.

A pair is two files of one line each, ``STEM.secret`` (mode 0600, for its holder alone) and ``STEM.public``; a line is
``ROLE NAME KEY``, the same as in the allow list ``allowed.keys`` beside the broker's own pair. A client needs its own
secret and, beside it, ``broker.public``: public keys follow from secret ones.

A join file, ``NAME.join``, has all that one island needs: run, addresses of the brokers, its secret key and the
broker's public one, a line each. It stands wherever a secret key file does.

Outside loopback keys are the rule: :func:`check_exposure` refuses an address that others can reach without them,
unless the operator says ``insecure``.
"""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from broker.base.errors import ConfigError, Unavailable, cure_of
from broker.wire.identity import ANY, Identity, KeyRole, format_line, parse_allow_list, parse_line

ALLOW_LIST = "allowed.keys"
#: Ending of a file that has all an island needs to join a run.
JOIN = ".join"
BROKER_PUBLIC = "broker.public"
_HEADING = """\
# Who may connect to the broker whose secret key lies here: ROLE NAME PUBLIC-KEY, a line each.
# `atoll keys` writes it; it is read again within a second of every change.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A pair of CurveZMQ and whose it is; the secret half is not shown by repr."""

    identity: Identity
    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    """The keys of a client: its own pair, and the public key of the broker that it expects."""

    own: KeyPair
    broker_public: str

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Makes a socket a client of CurveZMQ; to be called before it is connected."""
        socket.curve_serverkey = self.broker_public.encode()
        socket.curve_publickey = self.own.public.encode()
        socket.curve_secretkey = self.own.secret.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinFile:
    """The contents of a join file; ``broker`` are addresses, with commas between."""

    run_id: str
    broker: str
    keys: ClientKeys

    @classmethod
    def read(cls, path: Path) -> JoinFile:
        """Returns what a file holds.

        Raises:
            ConfigError: It is missing, open to others, or no join file.
        """
        text = _read(path, "join")
        _refuse_open(path, "join")
        rows = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
        found = {name: value for name, _, value in rows}
        if found.keys() != {"run", "broker", "broker-public", "secret"}:
            cure = "is no join file: make one on the hub, with `atoll keys new island NAME --join HOST`"
            raise ConfigError("join", str(path), cure)
        own, secret = parse_line(found["secret"], field=str(path))
        _, public = parse_line(found["broker-public"], field=str(path))
        pair = KeyPair(identity=own, secret=secret, public=zmq.curve_public(secret.encode()).decode())
        return cls(run_id=found["run"], broker=found["broker"], keys=ClientKeys(own=pair, broker_public=public))

    def write(self, path: Path) -> None:
        """Writes it for its owner alone, overwriting nothing.

        Raises:
            ConfigError: There is a file of that name.
            Unavailable: It cannot be written.
        """
        own, broker = self.keys.own, Identity(role=KeyRole.BROKER, name=str(KeyRole.BROKER))
        text = f"""\
# Joins the run {self.run_id} as {own.identity}: atoll island --join {path.name}
# It holds a secret key, so whoever has it is this island. Keep it as you keep a password: send it by a way that others
# cannot read, leave its mode at 0600, and remove copies. On the hub, `atoll keys revoke` ends what it is good for.
run {self.run_id}
broker {self.broker}
broker-public {format_line(broker, self.keys.broker_public)}
secret {format_line(own.identity, own.secret)}
"""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(text)
        except FileExistsError as err:
            raise ConfigError("join", str(path), "is there already: remove it first, or use it") from err
        except OSError as err:
            raise Unavailable(f"cannot write {path} ({err.strerror}); {cure_of(err)}", definite=True) from err


def new_pair(identity: Identity) -> KeyPair:
    """Returns a new random pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(identity=identity, public=public.decode(), secret=secret.decode())


def write_pair(directory: Path, pair: KeyPair) -> tuple[Path, Path]:
    """Writes both files of a key pair, overwriting nothing; returns their paths, the secret one first.

    Raises:
        ConfigError: There is a pair of that name already.
        Unavailable: The directory cannot be written.
    """
    secret, public = (directory / f"{pair.identity.stem}.{half}" for half in ("secret", "public"))
    made: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, key, mode in ((secret, pair.secret, 0o600), (public, pair.public, 0o644)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            made.append(path)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(format_line(pair.identity, key) + "\n")
    except OSError as err:
        for path in made:  # half a pair is none, and would stand in the way of the next attempt
            path.unlink(missing_ok=True)
        if isinstance(err, FileExistsError) and not directory.is_dir():
            raise ConfigError("dir", str(directory), "is a file: name a directory") from err
        if isinstance(err, FileExistsError):
            cure = "is there already; take another --dir, or revoke the key and remove both of its files first"
            raise ConfigError("name", err.filename, cure) from err
        what = f"cannot write keys into {directory} ({err.strerror}); {cure_of(err)}"
        raise Unavailable(what, definite=True) from err
    return secret, public


def read_secret(path: Path) -> KeyPair:
    """Returns the pair whose secret file, or whose join file, this is.

    Raises:
        ConfigError: It is missing, no secret key file, or open to others.
    """
    if path.suffix == JOIN:
        return JoinFile.read(path).keys.own
    text = _read(path, "key")
    if path.suffix == ".public":
        raise ConfigError("key", str(path), "is the public half; name the .secret file of the pair")
    _refuse_open(path, "key")
    identity, secret = parse_line(text, field=str(path))
    return KeyPair(identity=identity, secret=secret, public=zmq.curve_public(secret.encode()).decode())


def _refuse_open(path: Path, setting: str) -> None:
    found = path.stat()
    if others_may_read(stat.S_IMODE(found.st_mode), found.st_uid, os.geteuid()):
        raise ConfigError(setting, str(path), f"may be read by others: chmod 600 {shlex.quote(str(path))}")


def others_may_read(mode: int, owner: int, reader: int) -> bool:
    """Says whether a secret file is open to others than its reader.

    A group may read what root owns and the reader does not: so Kubernetes and others hand out secrets to a process that
    is not root, through a group of its own (``fsGroup``), and cannot do it otherwise. ``mode`` are permission bits, the
    others user ids.
    """
    by_group = owner == 0 and reader != 0
    return bool(mode & (0o037 if by_group else 0o077))


def read_public(path: Path, *, setting: str) -> tuple[Identity, str]:
    """Returns whose public key a file holds, and the key; raises ConfigError if it is no key file."""
    if path.suffix == ".secret":
        raise ConfigError(setting, str(path), "is the secret half; name the .public file of the pair")
    return parse_line(_read(path, setting), field=str(path))


def read_allow_list(path: Path) -> dict[str, Identity]:
    """Returns public key -> identity; raises ConfigError if the file is missing or a line is wrong."""
    return parse_allow_list(_read(path, "allow"), field=str(path))


def write_allow_list(path: Path, allowed: dict[str, Identity]) -> None:
    """Replaces the allow list in one move: no broker reads half of it; raises Unavailable."""
    text = _HEADING + "".join(f"{format_line(identity, key)}\n" for key, identity in allowed.items())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(text.encode())
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as err:
        raise Unavailable(f"cannot write {path} ({err.strerror}); {cure_of(err)}", definite=True) from err


def _read(path: Path, setting: str) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")  # some editors put a mark before the text
    except FileNotFoundError as err:
        cure = "make it with `atoll keys new`"
        if setting == "join":
            cure = "make it on the hub, with `atoll keys new island NAME --run RUN --join HOST`, and bring it here"
        if not path.is_absolute():
            cure += "; the path is seen from the folder where the command is started: is that the right one?"
        if path.name == BROKER_PUBLIC:
            cure = "copy it from where the broker's keys were made: any other one is of another broker"
        raise ConfigError(setting, str(path), f"cannot be read ({err.strerror}); {cure}") from err
    except OSError as err:
        raise ConfigError(setting, str(path), f"cannot be read ({err.strerror}); {cure_of(err)}") from err
    if not text.isascii():
        raise ConfigError(setting, str(path), "is no key file: not ASCII")
    return text


def client_keys(key: Path | None, role: KeyRole) -> ClientKeys | None:
    """Returns a client's keys, from a secret key file and ``broker.public`` beside it; None for no file.

    Raises:
        ConfigError: A file is missing or wrong, or the key is another role's.
    """
    if key is None:
        return None
    own = read_secret(key)
    if own.identity.role is not role:
        raise ConfigError("key", str(key), f"is the key of {own.identity}; this process needs one of the role {role}")
    if key.suffix == JOIN:
        return JoinFile.read(key).keys
    identity, broker_public = read_public(key.parent / BROKER_PUBLIC, setting="key")
    if identity.role is not KeyRole.BROKER:
        raise ConfigError("key", str(key.parent / BROKER_PUBLIC), f"is the key of {identity}, not of a broker")
    return ClientKeys(own=own, broker_public=broker_public)


def own_name(key: Path | None) -> str:
    """Returns the island id that a key is bound to; empty without a key, or if it fits any island.

    Raises:
        ConfigError: The file is missing or wrong.
    """
    identity = None if key is None else read_secret(key).identity
    return "" if identity is None or identity.name == ANY else identity.name
