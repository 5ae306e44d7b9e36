"""Settings as frozen dataclasses: one declaration gives TOML key, flag, help and check.

A process declares one frozen dataclass, with a :func:`setting` for each field. :mod:`broker.base.sources` fills it
from files, the environment and flags. Whatever is wrong (an unknown key, a value of the wrong type, a relation between
two settings) is a :class:`ConfigError` that names the setting, the value and the cure.

A field may itself be such a dataclass (``liveness: LivenessConfig``): its settings are then in the same table and
among the same flags as the others, under their own names. Settings of an inherited class may also be in a table of
its name: ``[recipe]``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from broker.base.errors import ConfigError

T = TypeVar("T")
Table = Mapping[str, Any]

SEQUENCES = (tuple, list)
MAPPINGS = (dict, Mapping)
COLLECTIONS = (*SEQUENCES, *MAPPINGS)

#: The type of values in messages and records.
_INT_MAX = 2**63 - 1
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_WORDS: dict[Any, str] = {
    str: "text in quotes",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path in quotes",
}


# --- declaring --------------------------------------------------------------------------------------------------------


class Scope(StrEnum):
    """The scope of a setting's value: the whole run, or one process of it."""

    FIXED = "for the whole run: a restart with another value is refused"
    CHANGEABLE = "until a restart gives another: the change is logged"
    PROCESS = "for one process: addresses, keys, paths and recordings"


def setting(
    default: T,
    help: str,
    *,
    flag: str | None = "",
    scope: Scope | None = None,
    secret: bool = False,
    subject: str | None = None,
) -> T:
    """Declares one dataclass field.

    Args:
        default: Its default.
        help: Its help, in one line.
        flag: Its flag, where that differs from the name; None: it is a key of the file alone.
        scope: How long its value holds; only for processes that can continue a run.
        secret: It may hold a password: no representation of the object shows it.
        subject: Heading in the help for this setting and those after it, up to the next one that names a subject.
    """
    metadata: dict[str, Any] = {"help": help, "flag": flag, "scope": scope, "subject": subject}
    return field(default=default, metadata=metadata, repr=not secret)


#: :func:`setting` with a scope, for processes that can continue a run.
fixed = partial(setting, scope=Scope.FIXED)
changeable = partial(setting, scope=Scope.CHANGEABLE)
process = partial(setting, scope=Scope.PROCESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a settings class, from :func:`settings_of`."""

    name: str
    type: Any
    default: Any
    help: str
    flag: str | None
    scope: Scope | None
    subject: str | None


#: Evaluating annotations takes a millisecond, and the laboratory builds tens of thousands of settings of one class.
_KNOWN: dict[type[Any], tuple[Setting, ...]] = {}
_HINTS: dict[type[Any], dict[str, Any]] = {}


def settings_of(cls: type[Any]) -> tuple[Setting, ...]:
    """Returns all settings of a dataclass in order, with nested dataclasses expanded in place."""
    if cls not in _KNOWN:
        _KNOWN[cls] = tuple(_settings_of(cls))
    return _KNOWN[cls]


def _hints_of(cls: type[Any]) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _settings_of(cls: type[Any]) -> Iterator[Setting]:
    hints = _hints_of(cls)
    subject: str | None = None
    for each in dataclasses.fields(cls):
        annotation = hints[each.name]
        subject = each.metadata.get("subject") or subject
        if _is_nested(annotation):
            for inner in settings_of(annotation):
                yield inner if inner.subject else dataclasses.replace(inner, subject=subject)
            continue
        default, flag = each.default, each.metadata.get("flag", "")
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        yield Setting(
            name=each.name,
            type=annotation,
            default=default,
            help=each.metadata.get("help") or "",
            flag=None if flag is None else flag or flag_of(each.name),
            scope=each.metadata.get("scope"),
            subject=subject,
        )


def flag_of(name: str) -> str:
    """Returns the flag of a setting, from its name."""
    return "--" + name.replace("_", "-")


def _is_nested(annotation: Any) -> bool:
    return dataclasses.is_dataclass(annotation) and isinstance(annotation, type)


# --- values -----------------------------------------------------------------------------------------------------------


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Splits ``X | None`` into X and whether None is allowed."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation, False
    rest = [each for each in typing.get_args(annotation) if each is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"a setting may be X or X | None, not {annotation}")
    return rest[0], True


def typed(name: str, value: Any, annotation: Any) -> Any:
    """Returns a TOML value as the annotated type, strictly; only a whole number may become a float."""
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
    """Reads a whole number, also as 1.2e6 or 1.2M; K, M, B or G, and T are powers of a thousand.

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
    """Returns a description of the values of a type."""
    origin = typing.get_origin(base)
    if origin in SEQUENCES:
        return f"a list, each item {describe(typing.get_args(base)[0])}"
    if origin in MAPPINGS:
        return "a table of names and values"
    if isinstance(base, type) and issubclass(base, Enum):
        return f"one of {', '.join(str(member.value) for member in base)}"
    return "text, a number, or true or false" if base is Any else _WORDS.get(base, str(base))


def expanded(field: str, path: str | os.PathLike[str]) -> Path:
    """Returns a path with ``~`` replaced by the home directory; a folder named ``~`` is never meant.

    Raises:
        ConfigError: There is no home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as err:
        cure = "begins in a home directory that is not known: set HOME, or write the path in full"
        raise ConfigError(field, os.fspath(path), cure) from err


# --- objects ----------------------------------------------------------------------------------------------------------


def build(cls: type[T], values: Mapping[str, Any], *, where: str = "") -> T:
    """Returns a settings object with these values, and defaults for the rest.

    Args:
        cls: The settings class.
        values: Setting name -> value of its type.
        where: The table in which a missing value may be set; empty if a flag may be given.

    Raises:
        ConfigError: A value is missing, or two do not go together.
    """
    hints = _hints_of(cls)
    arguments: dict[str, Any] = {}
    for each in dataclasses.fields(cls):  # type: ignore[arg-type]
        annotation = hints[each.name]
        if _is_nested(annotation):
            arguments[each.name] = build(annotation, values, where=where)
        elif each.name in values:
            arguments[each.name] = values[each.name]
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            (flag,) = [one.flag for one in settings_of(cls) if one.name == each.name]
            words = describe(without_none(annotation)[0])
            how = f" in [{where}]: {words}" if where else f"; give {flag} or set it in the file"
            raise ConfigError(each.name, None, f"is needed{how}")
    return cls(**arguments)


def check_finite(config: Any) -> None:
    """Refuses numbers that are infinite or NaN, for a dataclass of durations, rates and shares.

    Raises:
        ConfigError: One of them is.
    """
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if isinstance(value, float) and not math.isfinite(value):
            cure = "must be a number that is not infinite" if math.isinf(value) else "must be a number"
            raise ConfigError(each.name, value, cure)


def refuse_unknown(table: Table, known: Collection[str], *, where: str) -> None:
    """Raises ConfigError for the first key of ``table`` not in ``known``, with the nearest known one."""
    for name, value in table.items():
        if name not in known:
            place = f"[{where}] " if where else ""
            raise ConfigError(f"{place}{name}", value, f"is no setting; {nearest(name, known)}")


def nearest(name: str, known: Collection[str]) -> str:
    """Returns the cure for an unknown name: the nearest known one, or all known ones."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def to_table(config: Any) -> dict[str, Any]:
    """Returns setting name -> value of a settings object, nested dataclasses in place; None is left out."""
    table: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            table.update(to_table(value))
        elif value is not None:
            table[each.name] = value
    return table
