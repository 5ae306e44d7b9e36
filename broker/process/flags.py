"""Command-line flags: one per setting (:mod:`.settings`), and a parser with a short and a long help.

A daemon has some forty settings, of which a newcomer needs ten. So ``--help`` shows the everyday flags of a command,
which the command names in groups; ``--help-all`` shows every flag under its subject.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from broker.process.settings import Setting, settings_of
from broker.process.values import COLLECTIONS, MAPPINGS, SEQUENCES, expanded, without_none
from broker.wire.masking import masked


class CommandParser(argparse.ArgumentParser):
    """A parser with a short ``--help`` and a full ``--help-all``, whose errors repeat no password.

    Args:
        everyday: Heading -> flags (such as ``--islands``) that ``--help`` shows. Without it ``--help`` shows all.
        **settings: Those of :class:`argparse.ArgumentParser`.
    """

    def __init__(self, *, everyday: Mapping[str, Sequence[str]] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._everyday = everyday or {}
        if self._everyday:
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every flag, by subject, and exit")

    def reword(self, change: Callable[[str], str]) -> None:
        """Has ``change`` rewrite every help, those of subcommands included, and what is said below."""
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
        """Returns the line that an error begins with."""
        return self._short_usage() if self._everyday else super().format_usage()

    def format_help(self) -> str:
        """Returns what ``--help`` shows."""
        if not self._everyday:
            return super().format_help()
        by_flag = {flag: action for action in self._actions for flag in action.option_strings}
        groups = {title: [by_flag[flag] for flag in flags] for title, flags in self._everyday.items()}
        return self._format(groups | {"help": [by_flag["--help"], by_flag["--help-all"]]})

    def format_help_all(self) -> str:
        """Returns what ``--help-all`` shows: every flag."""
        if not self._everyday:
            return super().format_help()
        groups: dict[str, list[argparse.Action]] = {}
        for group in self._action_groups:  # several classes of settings may have the same subject
            flags = [action for action in group._group_actions if action.option_strings]
            groups.setdefault(group.title or "", []).extend(flags)
        return self._format({title: actions for title, actions in groups.items() if actions})

    def flags(self) -> list[str]:
        """Returns every flag that the parser knows."""
        return [flag for action in self._actions for flag in action.option_strings]

    def _short_usage(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(None, self._get_positional_actions(), [])
        return formatter.format_help().rstrip() + " [FLAGS]\n"

    def _format(self, groups: Mapping[str, Sequence[argparse.Action]]) -> str:
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for title, actions in {"arguments": self._get_positional_actions(), **groups}.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return f"{self._short_usage()}\n{formatter.format_help()}"


class _HelpAll(argparse.Action):
    """``--help-all``: prints the full help and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, CommandParser)
        print(parser.format_help_all(), end="")
        parser.exit()


def path(text: str) -> Path:
    """Reads an argument that names what is to be written: ``~`` is the home directory, also behind ``=``."""
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
    """Adds one flag per setting of ``cls``, except those in ``skip``; returns the names that it added.

    Each stands under the subject that its setting names, or else under the name of the class.

    Values stay text until :func:`broker.process.settings.from_sources` reads them, so that a wrong flag and a wrong
    line of the file get the same one-line error. An absent flag is None. Lists take several values (numbers also one
    comma-separated value). ``defaults`` are those that the help names where the command has others than ``cls``.
    """
    groups: dict[str, Any] = {}
    added = set()
    for each in settings_of(cls):
        if each.name in skip:
            continue
        if each.name in (defaults or {}):
            each = replace(each, default=(defaults or {})[each.name])
        added.add(each.name)
        base, _ = without_none(each.type)
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
