"""Reads settings from TOML files, the environment and flags.

:func:`load` fills a process's settings class from (highest first) flags, the environment (addresses and secrets only,
see ``ENVIRONMENT``), its own table of ``config.toml``, the table ``[run]`` and the defaults.

A daemon has some forty settings, of which a newcomer needs ten. So ``--help`` shows the everyday flags of a command,
which the command names in groups; ``--help-all`` shows every flag under its subject.

The standard library reads TOML and does not write it. Writing is by hand, because what settings can hold (text,
numbers, truth values, paths, enums, lists and small tables of these) takes fewer lines than a dependency takes to
justify.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import tomllib
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from broker.base.errors import ConfigError, cure_of, masked
from broker.base.settings import (
    COLLECTIONS,
    MAPPINGS,
    SEQUENCES,
    Setting,
    Table,
    build,
    expanded,
    flag_of,
    from_flag,
    nearest,
    refuse_unknown,
    settings_of,
    typed,
    without_none,
)

T = TypeVar("T")

_TOML_CURE = "give the path of a TOML file"

#: Tables that ``config.toml`` may hold. A process reads [run], its own, and those of the settings that it inherits.
TABLES = ("run", "recipe", "broker", "aggregator", "island", "task", "up", "hub")

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


def load(
    cls: type[T], args: argparse.Namespace | None, table: str, *, environment: Mapping[str, str] | None = None
) -> T:
    """Returns a process's settings, from its flags, the environment and the file ``args.config``.

    Args:
        cls: The settings class.
        args: Parsed flags of :func:`add_flags`; without ``config`` only flags and defaults count.
        table: The process's own table; its keys win over those of [run].
        environment: ``os.environ`` if not given.

    Raises:
        ConfigError: Anything wrong, with the field, the value and the cure.
    """
    values = given(cls, args, table, environment=environment)
    return build(cls, values, where="" if args is not None else table)


def given(
    cls: type[Any], args: argparse.Namespace | None, table: str, *, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns setting name -> value for the settings that are given, in flags, environment or file."""
    path = getattr(args, "config", None)
    tables = read_file(path) if path is not None else {}
    known = {each.name for each in settings_of(cls)}
    merged = {key: value for key, value in tables.get("run", {}).items() if key in known}
    merged |= own_table(cls, tables, table)
    variables = os.environ if environment is None else environment
    merged.update({name: variables[key] for name, key in ENVIRONMENT.items() if name in known and variables.get(key)})
    return _values(cls, merged, args, where=table)


def of_a_run(
    cls: type[Any], args: argparse.Namespace, table: str, *, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns the given settings of a daemon, which must include its run; see :func:`given`.

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
    """Returns a process's own table, with the tables of inherited settings classes such as [recipe].

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
                raise ConfigError(key, own[key], f"is in [{table}], and {value} in [{name}]: give it once")
    return own


def read_file(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Returns the tables of a ``config.toml``; refuses unknown tables, and unknown keys of [run].

    Raises:
        ConfigError: The file is missing, unreadable, no TOML, or has an unknown table or an unknown key in [run].
    """
    tables = read_toml(path, field="config")
    for name, content in tables.items():
        if not isinstance(content, dict):
            cure = f"must be in a table: write [run], or another of {', '.join(TABLES[1:])}, above it"
            raise ConfigError(name, content, cure)
        if name not in TABLES:
            raise ConfigError(f"[{name}]", os.fspath(path), f"is no table of this file; {nearest(name, TABLES)}")
    refuse_unknown(tables.get("run", {}), RUN_KEYS, where="run")
    return tables


def from_sources(cls: type[T], table: Table, args: argparse.Namespace | None = None, *, where: str = "") -> T:
    """Returns a ``cls`` from a table of values, such as one of TOML, and flags, which win.

    Args:
        cls: A settings class; its ``__post_init__`` may check relations and raise ConfigError itself.
        table: Setting name -> value of the type that TOML has for it.
        args: Flags as :func:`add_flags` declares them; missing and None ones do not count.
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


# --- TOML -------------------------------------------------------------------------------------------------------------


def read_toml(path: str | os.PathLike[str], *, field: str, cure: str = _TOML_CURE) -> dict[str, Any]:
    """Returns the tables of a TOML file."""
    return parse_toml(toml_text(path, field=field, cure=cure), field=field, source=os.fspath(path))


def toml_text(path: str | os.PathLike[str], *, field: str, cure: str = _TOML_CURE) -> str:
    """Returns the text of a file.

    Args:
        path: The file's.
        field: The flag or setting that named the file, for errors.
        cure: What to do if it cannot be read.

    Raises:
        ConfigError: The file cannot be read, or is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # some editors put a mark before the text
    except (FileNotFoundError, UnicodeDecodeError) as err:
        why = err.strerror if isinstance(err, OSError) else "it is no text in UTF-8"
        raise ConfigError(field, os.fspath(path), f"cannot be read ({why}); {cure}") from err
    except OSError as err:
        raise ConfigError(field, os.fspath(path), f"cannot be read ({err.strerror}); {cure_of(err, cure)}") from err


def parse_toml(written: str, *, field: str, source: str) -> dict[str, Any]:
    """Returns the tables of a text.

    Args:
        written: The text.
        field: The flag or setting that named its file, for errors.
        source: The file's name, for errors.

    Raises:
        ConfigError: It is no TOML.
    """
    try:
        return tomllib.loads(written)
    except (tomllib.TOMLDecodeError, RecursionError) as err:
        raise ConfigError(field, source, f"is not TOML: {err}") from err


def to_toml(tables: Mapping[str, Mapping[str, Any]], *, heading: str = "") -> str:
    """Returns tables as TOML that :func:`read_file` reads back unchanged.

    Args:
        tables: Table name -> key -> value; keys whose value is None are left out.
        heading: Lines of comment above it.

    Raises:
        TypeError: A value is of a type that no setting has.
    """
    lines = [f"# {line}" for line in heading.splitlines()]
    for name, table in tables.items():
        lines += ([""] if lines else []) + [f"[{name}]"]
        lines += [f"{_key(key)} = {_toml(value)}" for key, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else _toml(name)


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case Enum():
            return _toml(value.value)
        case int():
            return str(value)
        case float():
            return repr(value)  # inf, -inf, nan and 1e-05 are TOML too
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case os.PathLike():
            return _toml(os.fspath(value))
        case Mapping():
            return "{ " + ", ".join(f"{_key(str(key))} = {_toml(each)}" for key, each in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(_toml(each) for each in value) + "]"
    raise TypeError(f"a setting cannot hold {type(value).__name__}")


# --- flags ------------------------------------------------------------------------------------------------------------


class CommandParser(argparse.ArgumentParser):
    """A parser with a short ``--help`` and a full ``--help-all``, whose errors repeat no password.

    Args:
        everyday: Heading -> flags (such as ``--islands``) that ``--help`` shows. Without it ``--help`` shows all.
        **settings: Those of :class:`argparse.ArgumentParser`.
    """

    def __init__(self, *, everyday: Mapping[str, Sequence[str]] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._everyday = everyday or {}
        #: Flag that a setting of the file alone would have -> what to write there in its place.
        self.file_only: dict[str, str] = {}
        if self._everyday:
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every flag, by subject, and exit")

    def reword(self, change: Callable[[str], str]) -> None:
        """Rewrites every help text by ``change``, also those of subcommands and epilogs."""
        self.epilog = change(self.epilog) if self.epilog else self.epilog
        for action in self._actions:
            if action.help and action.help is not argparse.SUPPRESS:
                action.help = change(action.help)
            if isinstance(action, argparse._SubParsersAction):
                for each in action.choices.values():
                    each.reword(change)

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2, usage and message."""
        super().error(masked(message))

    def format_usage(self) -> str:
        """Returns the usage line of an error."""
        return self._short_usage() if self._everyday else super().format_usage()

    def format_help(self) -> str:
        """Returns the text of ``--help``."""
        if not self._everyday:
            return super().format_help()
        by_flag = {flag: action for action in self._actions for flag in action.option_strings}
        groups = {title: [by_flag[flag] for flag in flags] for title, flags in self._everyday.items()}
        return self._format(groups | {"help": [by_flag["--help"], by_flag["--help-all"]]})

    def format_help_all(self) -> str:
        """Returns the text of ``--help-all``, with every flag."""
        if not self._everyday:
            return super().format_help()
        groups: dict[str, list[argparse.Action]] = {}
        for group in self._action_groups:  # several classes of settings may have the same subject
            flags = [action for action in group._group_actions if action.option_strings]
            groups.setdefault(group.title or "", []).extend(flags)
        tables = ", ".join(dict.fromkeys(place.partition(" ")[0] for place in self.file_only.values()))
        last = f"more settings, of a file for --config alone: {tables}; `init` writes them all" if tables else None
        return self._format({title: actions for title, actions in groups.items() if actions}, last)

    def flags(self) -> list[str]:
        """Returns all flags of the parser."""
        return [flag for action in self._actions for flag in action.option_strings]

    def _short_usage(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(None, self._get_positional_actions(), [])
        return formatter.format_help().rstrip() + " [FLAGS]\n"

    def _format(self, groups: Mapping[str, Sequence[argparse.Action]], last: str | None = None) -> str:
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for title, actions in {"arguments": self._get_positional_actions(), **groups}.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        formatter.add_text(last)
        return f"{self._short_usage()}\n{formatter.format_help()}"


class _HelpAll(argparse.Action):
    """``--help-all``: prints the full help and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, CommandParser)
        print(parser.format_help_all(), end="")
        parser.exit()


def as_path(text: str) -> Path:
    """Reads an argument that names an output path: ``~`` is the home directory, also behind ``=``."""
    return expanded("argument", text)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config FILE``."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings; flags win over it")


def add_flags(
    parser: argparse.ArgumentParser,
    cls: type[Any],
    *,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> set[str]:
    """Adds one flag per setting of ``cls``, except those in ``skip``; returns the names of the settings.

    Settings of the file alone get none. Flags are grouped by the subject of the setting, or else of the class.

    Values stay text until :func:`from_sources` reads them, so that a wrong flag and a wrong line of the file get the
    same one-line error. An absent flag is None. Lists take several values (numbers also one comma-separated value).
    ``defaults`` are those that the help names where the command has others than ``cls``.
    """
    groups: dict[str, Any] = {}
    added = set()
    for each in settings_of(cls):
        if each.name in skip:
            continue
        if each.name in (defaults or {}):
            each = dataclasses.replace(each, default=(defaults or {})[each.name])
        added.add(each.name)
        base, _ = without_none(each.type)
        if each.flag is None:
            parser.set_defaults(**{each.name: None})
            if isinstance(parser, CommandParser):
                parser.file_only |= _lines(flag_of(each.name), f"[{table_of(cls, each.name)}] {each.name}", base)
            continue
        options: dict[str, Any] = {"dest": each.name, "default": None, "help": _flag_help(each, base)}
        if base is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(base)
            if typing.get_origin(base) in COLLECTIONS:
                options |= {"nargs": "+", "action": "extend"}  # --data A B, or --data A --data B
        subject = each.subject or f"settings ({_title(cls)})"
        if subject not in groups:
            groups[subject] = parser.add_argument_group(subject)
        groups[subject].add_argument(each.flag, **options)
    return added


def table_of(cls: type[Any], name: str) -> str:
    """Returns the TOML table of a setting: [run], or the table of the class that declares it."""
    if name in RUN_KEYS:
        return "run"
    owner = next((base for base in cls.__mro__[::-1] if name in getattr(base, "__annotations__", {})), cls)
    return owner.__name__.removesuffix("Config").lower()


def _lines(flag: str, key: str, base: Any) -> dict[str, str]:
    if base is bool:
        return {flag: f"{key} = true", f"--no-{flag[2:]}": f"{key} = false"}
    return {flag: f"{key} = {_metavar(base)}"}


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
    if origin in MAPPINGS:
        return "KEY=VALUE"
    if origin in SEQUENCES:
        return _metavar(typing.get_args(base)[0])
    if isinstance(base, type) and issubclass(base, Enum):
        return "NAME"
    return {int: "N", float: "X", Path: "PATH"}.get(base, "TEXT")


def _plain(value: Any) -> str:
    """Returns a default as text for help."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list | tuple):
        return ",".join(_plain(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
