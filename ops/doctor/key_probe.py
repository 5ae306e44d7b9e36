"""Looks at the key files of a process, and at the allow list where that is at hand. Shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from broker.transport.keys import (
    ALLOW_LIST,
    BROKER_PUBLIC,
    ClientKeys,
    KeyPair,
    read_allow_list,
    read_public,
    read_secret,
)
from broker.wire.errors import ConfigError
from broker.wire.identity import KeyRole
from ops.doctor.finding import Finding, failure, ok, warning

SUBJECT = "keys"


def look_at_keys(path: Path | None) -> tuple[list[Finding], ClientKeys | None]:
    """Returns what there is to say of a secret key file, and what it is good for as a client's.

    The key of a broker is no client's; where it lies, the allow list is looked at.
    """
    if path is None:
        return [], None
    try:
        own = read_secret(path)
    except ConfigError as err:
        return [failure(SUBJECT, f"{path} cannot be used", err.cure)], None
    found = [*_listed(own, path.parent / ALLOW_LIST)]
    if own.identity.role is KeyRole.BROKER:
        said = f"{path} is the key of the broker, with mode 600"
        if found:
            return [ok(SUBJECT, said), *found], None
        cure = f"atoll keys new island NAME --dir {shlex.quote(str(path.parent))}: without a list nobody may connect"
        return [failure(SUBJECT, f"{said}, and there is no {ALLOW_LIST} beside it", cure)], None
    try:
        of_whom, public = read_public(path.parent / BROKER_PUBLIC, setting=SUBJECT)
    except ConfigError as err:
        return [*found, failure(SUBJECT, f"there is no usable {BROKER_PUBLIC} beside {path}", err.cure)], None
    if of_whom.role is not KeyRole.BROKER:
        cure = "copy it anew from where the broker's keys were made"
        return [*found, failure(SUBJECT, f"{path.parent / BROKER_PUBLIC} is the key of {of_whom}", cure)], None
    said = f"{path} is the key of {own.identity}, with mode 600, and {BROKER_PUBLIC} lies beside it"
    return [ok(SUBJECT, said), *found], ClientKeys(own=own, broker_public=public)


def _listed(own: KeyPair, path: Path) -> list[Finding]:
    """Judges the allow list beside a key, if there is one: that is so where the broker's keys were made."""
    if not path.exists():
        return []
    try:
        allowed = read_allow_list(path)
    except ConfigError as err:
        return [
            failure(
                SUBJECT, f"{path} cannot be used", f"{err.cure}; the broker goes on with the one that it read before"
            )
        ]
    if own.identity.role is KeyRole.BROKER:
        said = f"{path} allows {len(allowed)} keys"
        return [ok(SUBJECT, said)] if allowed else [warning(SUBJECT, said, "atoll keys new island NAME, on this host")]
    listed = allowed.get(own.public)
    if listed == own.identity:
        return [ok(SUBJECT, f"{path} allows it")]
    if listed is not None:
        return [failure(SUBJECT, f"{path} has this key as that of {listed}", "atoll keys revoke it, and allow it anew")]
    command = f"atoll keys allow {own.identity.stem}.public --dir {shlex.quote(str(path.parent))}"
    cure = f"{command}, unless another host has the broker"
    return [failure(SUBJECT, f"{path} does not have this key", cure)]
