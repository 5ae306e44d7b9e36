"""Identities: the role and the id of a key's owner. Pure.

A key pair of CurveZMQ names one identity: a role and a name in it. The allow list of a broker says which public key is
whose, a line each::

    # role  name   public key (z85, 40 characters)
    island  paris  T(^#gDwFdxY)vw=7q5nVihgBclAJ(j4PwxEwOmcL
    island  *      V&)!JdQR6Qu<+[fHs<:<*af-<+lhd+q56vX1c3O2

:mod:`broker.routing.rights` asks :meth:`Identity.may_speak_as` about every message, so a key that is taken off the
list is worth nothing from that moment on, whatever connections it has opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from broker.base.errors import ConfigError
from broker.wire.messages.values import AGGREGATOR, BROKER, joining, observing, standing_by
from broker.wire.names import check_name

#: In place of an island's name: any island. Its holders can pass for each other, and for nobody else.
ANY = "*"

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}", re.ASCII)


class KeyRole(StrEnum):
    """The role of the holder of a key."""

    BROKER = "broker"
    AGGREGATOR = "aggregator"  # leading or standing by
    ISLAND = "island"
    OBSERVER = "observer"  # asks about the run, measures the way, and takes no part


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The owner of a key: a role and a name; :data:`ANY` for islands without own names."""

    role: KeyRole
    name: str

    def __post_init__(self) -> None:
        if self.name == ANY and self.role is KeyRole.ISLAND:
            return
        check_name("name", self.name)
        if self.role is KeyRole.ISLAND and self.name in (AGGREGATOR, BROKER):
            raise ConfigError("name", self.name, "is an address of others: no island may have it")

    def __str__(self) -> str:
        """Returns ``island paris``, as in the allow list."""
        return f"{self.role} {self.name}"

    @property
    def stem(self) -> str:
        """The name of the key's files: ``island-paris``, ``broker``, and ``islands`` for any island."""
        if self.name == ANY:
            return f"{self.role}s"
        return str(self.role) if self.name == self.role else f"{self.role}-{self.name}"

    def may_speak_as(self, sender: str) -> bool:
        """Returns whether this owner may use ``sender`` in a header; a joining island has no id yet.

        An island's key is not good for questions: what other islands do is nothing that it need know.
        """
        match self.role:
            case KeyRole.AGGREGATOR:
                return sender == AGGREGATOR or sender.startswith(standing_by(""))
            case KeyRole.ISLAND:
                return sender.startswith(joining("")) or self.may_be(sender)
            case KeyRole.OBSERVER:
                return sender.startswith(observing(""))
            case _:
                return False

    def may_be(self, island_id: str) -> bool:
        """Returns True if this owner may be that island; an empty id, which the run fills in, fits any."""
        if self.role is not KeyRole.ISLAND:
            return False
        if self.name == ANY:
            return island_id not in (AGGREGATOR, BROKER) and ":" not in island_id
        return island_id == self.name


#: Public key -> whose it is.
AllowList = Mapping[str, Identity]


def check_key(text: str, *, field: str = "key") -> str:
    """Returns ``text`` if it is a key in z85: 40 characters of its alphabet.

    Raises:
        ConfigError: It cannot; the text is not repeated, for it may be most of a secret.
    """
    if not _KEY.fullmatch(text):
        raise ConfigError(field, f"{len(text)} characters", "must be 40 characters of z85, as `atoll keys` writes them")
    return text


def parse_line(line: str, *, field: str) -> tuple[Identity, str]:
    """Returns identity and key of a line ``ROLE NAME KEY``; raises ConfigError for any other line."""
    words = line.split()
    if len(words) != 3:
        raise ConfigError(field, f"{len(words)} words", "must be a line ROLE NAME KEY, such as: island paris T(^#...")
    role, name, key = words
    if role not in set(KeyRole):
        raise ConfigError(field, role, "must begin with a role: " + ", ".join(KeyRole))
    try:
        identity = Identity(role=KeyRole(role), name=name)
    except ConfigError as err:  # which knows nothing of the line
        raise ConfigError(field, name, err.cure) from err
    return identity, check_key(key, field=field)


def parse_allow_list(text: str, *, field: str = "allow") -> dict[str, Identity]:
    """Returns public key -> identity; empty lines and comments (``#``) are skipped.

    Raises:
        ConfigError: A line is malformed, or a key is listed for two identities.
    """
    allowed: dict[str, Identity] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        identity, key = parse_line(line, field=f"{field}, line {number}")
        if allowed.setdefault(key, identity) != identity:
            cure = f"has a key that {allowed[key]} has already: one key, one identity"
            raise ConfigError(f"{field}, line {number}", str(identity), cure)
    return allowed


def format_line(identity: Identity, key: str) -> str:
    """Returns the line that :func:`parse_line` reads."""
    return f"{identity.role} {identity.name} {key}"
