"""Declares one setting as a dataclass field: default, help, flag, and how long its value holds."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Scope(StrEnum):
    """The scope of a setting's value: the whole run, or one process of it."""

    FIXED = "for the whole run: a restart with another value is refused"
    CHANGEABLE = "until a restart gives another: the change is logged"
    PROCESS = "for one process: addresses, keys, paths and what is kept for study"


def setting(
    default: T,
    help: str,
    *,
    flag: str | None = None,
    scope: Scope | None = None,
    secret: bool = False,
    subject: str | None = None,
) -> T:
    """Declares one dataclass field.

    Args:
        default: Its default.
        help: Its help, in one line.
        flag: Its flag, where that differs from the name.
        scope: How long its value holds; only the settings of processes that go on with a run have one.
        secret: It may hold a password: no representation of the object shows it.
        subject: Heading in the help for this setting and those after it, up to the next one that names a subject.
    """
    metadata: dict[str, Any] = {"help": help, "flag": flag, "scope": scope, "subject": subject}
    return field(default=default, metadata=metadata, repr=not secret)


#: The same with a scope, for the settings of a process that goes on with a run.
fixed = partial(setting, scope=Scope.FIXED)
changeable = partial(setting, scope=Scope.CHANGEABLE)
process = partial(setting, scope=Scope.PROCESS)
