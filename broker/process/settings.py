"""Settings as frozen dataclasses: one definition gives the TOML table, the flags and the help.

A process declares one frozen dataclass, with fields of :mod:`broker.process.declaring`. :mod:`broker.process.flags`
turns it into command-line flags, :func:`load` fills it from (highest first) flags, the environment (addresses and
secrets only, see ``ENVIRONMENT``), its own table of ``config.toml``, the table ``[run]`` and the defaults. Whatever is
wrong (an unknown table or key, a value of the wrong type, a relation between two settings) is a :class:`ConfigError`
that names the setting, the value and the cure.

A field may itself be such a dataclass (``liveness: LivenessConfig``): its settings then stand in the same table and
among the same flags as the others, under their own names. Where the class inherits another one, the settings of that
may also stand in a table of its name: ``[recipe]``.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from broker.process import toml
from broker.process.declaring import Scope
from broker.process.values import describe, expanded, from_flag, typed, without_none
from broker.wire.errors import ConfigError

T = TypeVar("T")
Table = Mapping[str, Any]

#: Tables that ``config.toml`` may hold. A process reads [run], its own, and those of the settings that it inherits.
TABLES = ("run", "recipe", "broker", "aggregator", "island", "task", "up")

#: Keys of [run]: what several processes must agree on. Each process takes those that it has.
RUN_KEYS = (
    "run_id",
    "broker",
    "redis_url",
    "heartbeat_interval_s",
    "suspect_after_s",
    "dead_after_s",
    "max_message_bytes",
)

#: Settings that the environment may supply: addresses and secrets, nothing else.
ENVIRONMENT = {"redis_url": "REDIS_URL", "broker": "ATOLL_BROKER", "key": "ATOLL_KEY"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One leaf of a settings class, as :func:`settings_of` lists them."""

    name: str
    type: Any
    default: Any
    help: str
    flag: str
    scope: Scope | None
    subject: str | None


#: Evaluating annotations takes a millisecond, and the laboratory builds tens of thousands of settings of one class.
_KNOWN: dict[type[Any], tuple[Setting, ...]] = {}
_HINTS: dict[type[Any], dict[str, Any]] = {}


def settings_of(cls: type[Any]) -> tuple[Setting, ...]:
    """Returns every setting of a dataclass in order, those of nested dataclasses in place of the field."""
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
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            for inner in settings_of(annotation):
                yield inner if inner.subject else dataclasses.replace(inner, subject=subject)
            continue
        default = each.default
        if default is dataclasses.MISSING and each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        yield Setting(
            name=each.name,
            type=annotation,
            default=default,
            help=each.metadata.get("help") or "",
            flag=each.metadata.get("flag") or "--" + each.name.replace("_", "-"),
            scope=each.metadata.get("scope"),
            subject=subject,
        )


# --- reading ----------------------------------------------------------------------------------------------------


def load(
    cls: type[T],
    args: argparse.Namespace | None,
    table: str,
    *,
    environment: Mapping[str, str] | None = None,
) -> T:
    """Returns a process's settings, from its flags, the environment and the file ``args.config``.

    Args:
        cls: The settings class.
        args: Parsed flags of :func:`broker.process.flags.add_flags`; without ``config`` only flags and defaults count.
        table: The process's own table; its keys win over those of [run].
        environment: ``os.environ`` if not given.

    Raises:
        ConfigError: Anything wrong, with the field, the value and the cure.
    """
    values = given(cls, args, table, environment=environment)
    return build(cls, values, where="" if args is not None else table)


def given(
    cls: type[Any],
    args: argparse.Namespace | None,
    table: str,
    *,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns setting name -> value, of those in flags, environment or file; otherwise as :func:`load`."""
    path = getattr(args, "config", None)
    tables = read_file(path) if path is not None else {}
    known = {each.name for each in settings_of(cls)}
    merged = {key: value for key, value in tables.get("run", {}).items() if key in known}
    merged |= own_table(cls, tables, table)
    variables = os.environ if environment is None else environment
    merged.update({name: variables[key] for name, key in ENVIRONMENT.items() if name in known and variables.get(key)})
    return _values(cls, merged, args, where=table)


def of_a_run(
    cls: type[Any],
    args: argparse.Namespace,
    table: str,
    *,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns what :func:`given` does for a daemon, which must be told its run.

    A name that all have by default would let two hubs of one Redis, or a command tried without flags, meet in one run.

    Raises:
        ConfigError: Neither flag nor file names the run; or as :func:`load`.
    """
    values = given(cls, args, table, environment=environment)
    if "run_id" not in values:
        cure = "is needed: give --run NAME, or --config with run_id in [run]; to see it all work here: atoll up"
        raise ConfigError("run_id", None, cure)
    return values


def own_table(cls: type[Any], tables: Mapping[str, Table], table: str) -> dict[str, Any]:
    """Returns a process's own table, joined with those of inherited settings classes: [recipe].

    Raises:
        ConfigError: Such a table has an unknown key, or a value that the own table has otherwise.
    """
    own = dict(tables.get(table, {}))
    for base in cls.__mro__[1:]:
        name = base.__name__.lower()
        inherited = tables.get(name, {}) if dataclasses.is_dataclass(base) else {}
        if inherited:
            refuse_unknown(inherited, {each.name for each in settings_of(base)}, where=name)
        for key, value in inherited.items():
            if own.setdefault(key, value) != value:
                raise ConfigError(key, own[key], f"stands in [{table}], and {value} in [{name}]: give it once")
    return own


def read_file(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Returns the tables of a ``config.toml``; tables and keys of [run] that do not exist are refused.

    Raises:
        ConfigError: The file is missing, unreadable, no TOML, or has an unknown table or an unknown key in [run].
    """
    tables = toml.read(path, field="config")
    for name, content in tables.items():
        if not isinstance(content, dict):
            cure = f"must stand in a table: write [run], or another of {', '.join(TABLES[1:])}, above it"
            raise ConfigError(name, content, cure)
        if name not in TABLES:
            raise ConfigError(f"[{name}]", os.fspath(path), f"is no table of this file; {nearest(name, TABLES)}")
    refuse_unknown(tables.get("run", {}), RUN_KEYS, where="run")
    return tables


def from_sources(cls: type[T], table: Table, args: argparse.Namespace | None = None, *, where: str = "") -> T:
    """Builds ``cls`` from a table of values (such as one of TOML) and flags, which win.

    Args:
        cls: A settings class; its ``__post_init__`` may check relations and raise ConfigError itself.
        table: Setting name -> value of the type that TOML has for it.
        args: Flags as :func:`broker.process.flags.add_flags` declares them; missing and None ones do not count.
        where: The table's name, for messages.

    Raises:
        ConfigError: An unknown key, a value of the wrong type, or a required setting without a value.
    """
    return build(cls, _values(cls, table, args, where=where), where="" if args is not None else where)


def _values(cls: type[Any], table: Table, args: argparse.Namespace | None, *, where: str) -> dict[str, Any]:
    known = {each.name: each for each in settings_of(cls)}
    refuse_unknown(table, known, where=where)
    values = {name: typed(name, value, known[name].type) for name, value in table.items()}
    for name, each in known.items():
        flag = getattr(args, name, None)
        if flag is not None:
            values[name] = from_flag(name, flag, each.type)
    return values | {name: expanded(name, value) for name, value in values.items() if isinstance(value, Path)}


def build(cls: type[T], values: Mapping[str, Any], *, where: str = "") -> T:
    """Returns the settings object with these values, and defaults for the rest.

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
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            arguments[each.name] = build(annotation, values, where=where)
        elif each.name in values:
            arguments[each.name] = values[each.name]
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            flag = each.metadata.get("flag") or "--" + each.name.replace("_", "-")
            how = (
                f" in [{where}]: {describe(without_none(annotation)[0])}"
                if where
                else f"; give {flag} or set it in the file"
            )
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
    """Says what was probably meant by ``name``, or which names there are."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


# --- back to a table --------------------------------------------------------------------------------------------


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
