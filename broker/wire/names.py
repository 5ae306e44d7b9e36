"""Checks names of runs, islands and keys, which are used in addresses, Redis keys and files. Pure."""

from __future__ import annotations

import re
from typing import TypeGuard

from broker.base.errors import ConfigError

#: One name, as a regular expression and in words.
NAME, RULE = r"[A-Za-z0-9._-]{1,64}", "1 to 64 of the characters A-Z a-z 0-9 . _ -"
_NAME = re.compile(NAME, re.ASCII)


def is_name(value: object) -> TypeGuard[str]:
    """Returns whether a value is a valid name."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def check_name(field: str, value: str) -> None:
    """Raises ConfigError if the value of the setting ``field`` is no valid name."""
    if not is_name(value):
        raise ConfigError(field, value, f"must be {RULE}")
