"""Converts values from TOML tables and flags to the type of their setting.

Strictly: nothing is guessed, and whatever does not fit is a :class:`ConfigError` that says what would.
"""

from __future__ import annotations

import math
import os
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from broker.wire.errors import ConfigError

_WORDS: dict[Any, str] = {
    str: "text in quotes",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path in quotes",
}

SEQUENCES = (tuple, list)
MAPPINGS = (dict, Mapping)
COLLECTIONS = (*SEQUENCES, *MAPPINGS)

#: What messages and records hold.
_INT_MAX = 2**63 - 1

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Splits ``X | None`` into X and whether None is allowed."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation, False
    rest = [each for each in typing.get_args(annotation) if each is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"a setting may be X or X | None, not {annotation}")
    return rest[0], True


def typed(name: str, value: Any, annotation: Any) -> Any:
    """Returns a TOML value as the annotated type; nothing is guessed, but a whole number is also a float."""
    base, optional = without_none(annotation)
    origin = typing.get_origin(base)
    if value is None and optional:
        return None
    if origin in SEQUENCES and isinstance(value, list | tuple):
        item = typing.get_args(base)[0]
        return origin(typed(name, each, item) for each in value)
    if origin in MAPPINGS and isinstance(value, Mapping):
        item = typing.get_args(base)[1]
        return {str(key): typed(f"{name}.{key}", each, item) for key, each in value.items()}
    if origin is None and base is Any:
        return value
    if isinstance(base, type) and issubclass(base, Enum):
        try:
            return base(value)
        except ValueError:
            raise ConfigError(name, value, f"must be {describe(base)}") from None
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if base is Path and isinstance(value, str | Path):
        return Path(value)
    if origin is None and isinstance(base, type) and type(value) is base:
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(name, value, f"must be {describe(base)}")
        if isinstance(value, int) and abs(value) > _INT_MAX:
            raise ConfigError(name, value, "must be at most 2**63 - 1: no message and no record holds more")
        return value
    raise ConfigError(name, value, f"must be {describe(base)}")


def from_flag(name: str, given: Any, annotation: Any) -> Any:
    """Reads the text of a flag as the annotated type, strictly."""
    base, _ = without_none(annotation)
    origin = typing.get_origin(base)
    if origin in SEQUENCES:
        item = typing.get_args(base)[0]
        texts = [given] if isinstance(given, str) else list(given)
        if item in (int, float):  # paths and texts may contain commas
            texts = [part for text in texts for part in str(text).split(",") if part]
        return origin(from_flag(name, text, item) for text in texts)
    if origin in MAPPINGS:
        item = typing.get_args(base)[1]
        pairs = {}
        for text in given:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(name, text, "must be KEY=VALUE")
            pairs[key] = from_flag(f"{name}.{key}", value, str if item is Any else item)
        return pairs
    if base in (int, float) and isinstance(given, str):
        try:
            given = whole_number(given) if base is int else float(given)
        except ValueError:
            example = ", such as 5000 or 5K" if base is int else ""
            raise ConfigError(name, given, f"must be {describe(base)}{example}") from None
    return typed(name, given, base)


def whole_number(text: str) -> int:
    """Reads a whole number, also as 1.2e6 or 1.2M: K, M, B or G, and T are powers of a thousand.

    Raises:
        ValueError: It is none.
    """
    digits, unit = text.strip(), _UNITS.get(text.strip()[-1:].upper(), 1)
    if unit > 1:
        digits = digits[:-1]
    try:
        return int(digits) * unit
    except ValueError:
        number = float(digits) * unit
        if not math.isfinite(number) or abs(number - round(number)) > 1e-12 * abs(number):  # 1.15M is a hair less
            raise
        return round(number)


def describe(base: Any) -> str:
    """Returns the words for what a setting of this type takes."""
    origin = typing.get_origin(base)
    if origin in SEQUENCES:
        return f"a list, each item {describe(typing.get_args(base)[0])}"
    if origin in MAPPINGS:
        return "a table of names and values"
    if isinstance(base, type) and issubclass(base, Enum):
        return f"one of {', '.join(str(member.value) for member in base)}"
    return "text, a number, or true or false" if base is Any else _WORDS.get(base, str(base))


def expanded(field: str, path: str | os.PathLike[str]) -> Path:
    """Returns a path with the home directory in place of ``~``; a folder of that name is never meant.

    Raises:
        ConfigError: There is no home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as err:
        cure = "begins in a home directory that is not known: set HOME, or write the path in full"
        raise ConfigError(field, os.fspath(path), cure) from err
