"""Settings as frozen dataclasses: one definition gives the TOML table, the flags and the help.

A process declares one frozen dataclass with :func:`setting` fields. :func:`add_flags` turns it into command-line
flags, :func:`load` fills it from (highest first) flags, the environment (addresses and secrets only, see
``ENVIRONMENT``), its own table of ``config.toml``, the table ``[run]`` and the defaults. Whatever is wrong (an
unknown table or key, a value of the wrong type, a relation between two settings) is a :class:`ConfigError` that names
the setting, the value and the cure.

A field may itself be such a dataclass (``liveness: LivenessConfig``): its settings then stand in the same table and
among the same flags as the others, under their own names.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from broker.errors import ConfigError

T = TypeVar("T")
Table = Mapping[str, Any]

#: Tables that ``config.toml`` may hold. A process reads [run] and its own.
TABLES = ("run", "broker", "aggregator", "island", "task", "up")

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

_WORDS: dict[Any, str] = {
    str: "text in quotes",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path in quotes",
}


def setting(default: T, help: str, *, flag: str | None = None) -> T:
    """Declares one dataclass field: its default, its one-line help and, where it differs from the name, its flag."""
    metadata: dict[str, Any] = {"help": help, "flag": flag}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One leaf of a settings class, as :func:`settings_of` lists them."""

    name: str
    type: Any
    default: Any
    help: str
    flag: str


def settings_of(cls: type[Any]) -> Iterator[Setting]:
    """Yields every setting of a dataclass in order, those of nested dataclasses in place of the field."""
    hints = typing.get_type_hints(cls)
    for each in dataclasses.fields(cls):
        annotation = hints[each.name]
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            yield from settings_of(annotation)
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
        )


# --- the command line -------------------------------------------------------------------------------------------


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config FILE``."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with [run] and a table per process")


def add_flags(parser: argparse.ArgumentParser, cls: type[Any], *, skip: Collection[str] = ()) -> set[str]:
    """Adds one flag per setting of ``cls``, but for those named in ``skip``; returns the names of those added.

    Values stay text until :func:`from_sources` reads them, so that a wrong flag and a wrong line of the file get the
    same one-line error. An absent flag is None. Lists take several values (numbers also one comma-separated value).
    """
    group = parser.add_argument_group(f"settings ({_title(cls)})")
    added = set()
    for each in settings_of(cls):
        if each.name in skip:
            continue
        added.add(each.name)
        base, _ = _without_none(each.type)
        options: dict[str, Any] = {"dest": each.name, "default": None, "help": _flag_help(each, base)}
        if base is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(base)
            if typing.get_origin(base) in _COLLECTIONS:
                options |= {"nargs": "+", "action": "extend"}  # --data A B, or --data A --data B
        group.add_argument(each.flag, **options)
    return added


def _title(cls: type[Any]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", cls.__name__.removesuffix("Config")).lower()


def _flag_help(each: Setting, base: Any) -> str:
    text = each.help.replace("%", "%%")
    if isinstance(base, type) and issubclass(base, Enum):
        text += f" ({' | '.join(str(member.value) for member in base)})"
    if each.default is dataclasses.MISSING or each.default in (None, (), "", {}):
        return text
    return f"{text} (default {_plain(each.default)})".replace("%%", "%").replace("%", "%%")


def _metavar(base: Any) -> str:
    origin = typing.get_origin(base)
    if origin in _MAPPINGS:
        return "KEY=VALUE"
    if origin in _SEQUENCES:
        return _metavar(typing.get_args(base)[0])
    if isinstance(base, type) and issubclass(base, Enum):
        return "NAME"
    return {int: "N", float: "X", Path: "PATH"}.get(base, "TEXT")


# --- reading ----------------------------------------------------------------------------------------------------


def load(
    cls: type[T],
    args: argparse.Namespace | None,
    table: str,
    *,
    environment: Mapping[str, str] | None = None,
) -> T:
    """Returns the settings of one process, from its flags, the environment and the file that ``args.config`` names.

    Args:
        cls: The settings class.
        args: Parsed flags of :func:`add_flags`; without ``config`` only flags and defaults count.
        table: The process's own table; its keys win over those of [run].
        environment: ``os.environ`` if not given.

    Raises:
        ConfigError: Anything wrong, with the field, the value and the cure.
    """
    path = getattr(args, "config", None)
    tables = read_file(path) if path is not None else {}
    known = {each.name for each in settings_of(cls)}
    merged = {key: value for key, value in tables.get("run", {}).items() if key in known}
    merged.update(tables.get(table, {}))
    variables = os.environ if environment is None else environment
    merged.update({name: variables[key] for name, key in ENVIRONMENT.items() if name in known and variables.get(key)})
    return from_sources(cls, merged, args, where=table)


def read_file(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Returns the tables of a ``config.toml``; tables and keys of [run] that do not exist are refused.

    Raises:
        ConfigError: The file is missing, unreadable, no TOML, or has an unknown table or an unknown key in [run].
    """
    shown = os.fspath(path)
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except OSError as err:
        raise ConfigError("config", shown, f"cannot be read ({err.strerror}); give the path of a TOML file") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError("config", shown, f"is not TOML: {err}") from err
    for name, content in tables.items():
        if name not in TABLES:
            raise ConfigError(f"[{name}]", shown, f"is no table of this file; {nearest(name, TABLES)}")
        if not isinstance(content, dict):
            raise ConfigError(name, content, f"must stand in a table; write [{name}] and the settings below it")
    refuse_unknown(tables.get("run", {}), RUN_KEYS, where="run")
    return tables


def from_sources(cls: type[T], table: Table, args: argparse.Namespace | None = None, *, where: str = "") -> T:
    """Builds ``cls`` from a table of values (such as one of TOML) and flags, which win.

    Args:
        cls: A settings class; its ``__post_init__`` may check relations and raise ConfigError itself.
        table: Setting name -> value of the type that TOML has for it.
        args: Flags as :func:`add_flags` declares them; missing and None ones do not count.
        where: The table's name, for messages.

    Raises:
        ConfigError: An unknown key, a value of the wrong type, or a required setting without a value.
    """
    known = {each.name: each for each in settings_of(cls)}
    refuse_unknown(table, known, where=where)
    values = {name: _typed(name, value, known[name].type) for name, value in table.items()}
    for name, each in known.items():
        given = getattr(args, name, None)
        if given is not None:
            values[name] = _from_flag(name, given, each.type)
    return _build(cls, values, where="" if args is not None else where)


def _build(cls: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """Returns the object; ``where`` is the table in which a missing value may be set, empty if a flag may be given."""
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for each in dataclasses.fields(cls):  # type: ignore[arg-type]
        annotation = hints[each.name]
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            arguments[each.name] = _build(annotation, values, where=where)
        elif each.name in values:
            arguments[each.name] = values[each.name]
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            flag = each.metadata.get("flag") or "--" + each.name.replace("_", "-")
            how = (
                f" in [{where}]: {_describe(_without_none(annotation)[0])}"
                if where
                else f"; give {flag} or set it in the file"
            )
            raise ConfigError(each.name, None, f"is needed{how}")
    return cls(**arguments)


def check_finite(config: Any) -> None:
    """Refuses numbers that are infinite, where all of a dataclass are durations, rates and shares.

    Raises:
        ConfigError: One of them is.
    """
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if isinstance(value, float) and math.isinf(value):
            raise ConfigError(each.name, value, "must be a number that is not infinite")


def refuse_unknown(table: Table, known: Collection[str], *, where: str) -> None:
    """Raises ConfigError for the first key of ``table`` that is not in ``known``, with the nearest that is."""
    for name, value in table.items():
        if name not in known:
            place = f"[{where}] " if where else ""
            raise ConfigError(f"{place}{name}", value, f"is no setting; {nearest(name, known)}")


def nearest(name: str, known: Collection[str]) -> str:
    """Says what was probably meant by ``name``, or which names there are."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


# --- types ------------------------------------------------------------------------------------------------------

_SEQUENCES = (tuple, list)
_MAPPINGS = (dict, Mapping)
_COLLECTIONS = (*_SEQUENCES, *_MAPPINGS)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Splits ``X | None`` into X and whether None is allowed."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation, False
    rest = [each for each in typing.get_args(annotation) if each is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"a setting may be X or X | None, not {annotation}")
    return rest[0], True


def _typed(name: str, value: Any, annotation: Any) -> Any:
    """Returns a TOML value as the annotated type; nothing is guessed, but a whole number is also a float."""
    base, optional = _without_none(annotation)
    origin = typing.get_origin(base)
    if value is None and optional:
        return None
    if origin in _SEQUENCES and isinstance(value, list | tuple):
        item = typing.get_args(base)[0]
        return origin(_typed(name, each, item) for each in value)
    if origin in _MAPPINGS and isinstance(value, Mapping):
        item = typing.get_args(base)[1]
        return {str(key): _typed(f"{name}.{key}", each, item) for key, each in value.items()}
    if origin is None and base is Any:
        return value
    if isinstance(base, type) and issubclass(base, Enum):
        try:
            return base(value)
        except ValueError:
            raise ConfigError(name, value, f"must be {_describe(base)}") from None
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if base is Path and isinstance(value, str | Path):
        return Path(value)
    if origin is None and isinstance(base, type) and type(value) is base:
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(name, value, f"must be {_describe(base)}")
        if isinstance(value, int) and abs(value) > _INT_MAX:
            raise ConfigError(name, value, "must be at most 2**63 - 1: no message and no record holds more")
        return value
    raise ConfigError(name, value, f"must be {_describe(base)}")


def _from_flag(name: str, given: Any, annotation: Any) -> Any:
    """Reads the text of a flag as the annotated type, strictly."""
    base, _ = _without_none(annotation)
    origin = typing.get_origin(base)
    if origin in _SEQUENCES:
        item = typing.get_args(base)[0]
        texts = [given] if isinstance(given, str) else list(given)
        if item in (int, float):  # paths and texts may contain commas
            texts = [part for text in texts for part in str(text).split(",") if part]
        return origin(_from_flag(name, text, item) for text in texts)
    if origin in _MAPPINGS:
        item = typing.get_args(base)[1]
        pairs = {}
        for text in given:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(name, text, "must be KEY=VALUE")
            pairs[key] = _from_flag(f"{name}.{key}", value, str if item is Any else item)
        return pairs
    if base in (int, float) and isinstance(given, str):
        try:
            given = whole_number(given) if base is int else float(given)
        except ValueError:
            raise ConfigError(name, given, f"must be {_describe(base)}") from None
    return _typed(name, given, base)


#: What messages and records hold.
_INT_MAX = 2**63 - 1

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def whole_number(text: str) -> int:
    """Reads a whole number, also one that is written 1.2e6, or 1.2M: K, M, B or G, and T are powers of a thousand.

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


def _describe(base: Any) -> str:
    origin = typing.get_origin(base)
    if origin in _SEQUENCES:
        return f"a list, each item {_describe(typing.get_args(base)[0])}"
    if origin in _MAPPINGS:
        return "a table of names and values"
    if isinstance(base, type) and issubclass(base, Enum):
        return f"one of {', '.join(str(member.value) for member in base)}"
    return "text, a number, or true or false" if base is Any else _WORDS.get(base, str(base))


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


def _plain(value: Any) -> str:
    """A default as help shows it."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list | tuple):
        return ",".join(_plain(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
