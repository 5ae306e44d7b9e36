"""Settings as flags of a command line: one for each, with its help and its default (:mod:`broker.process.settings`)."""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Any

from broker.process.settings import Setting, settings_of
from broker.process.values import COLLECTIONS, MAPPINGS, SEQUENCES, expanded, without_none


def path(text: str) -> Path:
    """Reads an argument that names what is to be written: ``~`` is the home directory, also behind ``=``."""
    return expanded("argument", text)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config FILE``."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with [run] and a table per process")


def add_flags(parser: argparse.ArgumentParser, cls: type[Any], *, skip: Collection[str] = ()) -> set[str]:
    """Adds one flag per setting of ``cls``, but for those named in ``skip``; returns the names of those added.

    Values stay text until :func:`broker.process.settings.from_sources` reads them, so that a wrong flag and a wrong
    line of the file get the same one-line error. An absent flag is None. Lists take several values (numbers also one
    comma-separated value).
    """
    group = parser.add_argument_group(f"settings ({_title(cls)})")
    added = set()
    for each in settings_of(cls):
        if each.name in skip:
            continue
        added.add(each.name)
        base, _ = without_none(each.type)
        options: dict[str, Any] = {"dest": each.name, "default": None, "help": _flag_help(each, base)}
        if base is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(base)
            if typing.get_origin(base) in COLLECTIONS:
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
    if origin in MAPPINGS:
        return "KEY=VALUE"
    if origin in SEQUENCES:
        return _metavar(typing.get_args(base)[0])
    if isinstance(base, type) and issubclass(base, Enum):
        return "NAME"
    return {int: "N", float: "X", Path: "PATH"}.get(base, "TEXT")


def _plain(value: Any) -> str:
    """A default as help shows it."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list | tuple):
        return ",".join(_plain(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
