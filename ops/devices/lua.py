"""Runs the scripts that we give to Redis: as much of Lua as they use, as Python.

One statement stands on a line: ``local``, assignments, ``if``, ``for .. in ipairs()``, ``for`` with numbers, ``return``
and calls. What Lua takes for true and Python does not, ``0`` and ``''``, must not be asked for its truth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

#: Runs one command of Redis and returns its answer as a script sees it: False where there is nothing.
Call = Callable[..., Any]

_TOKEN = re.compile(r"""'[^']*'|~=|\.\.|#\w+|[{}]|\bnil\b|\btrue\b|\bfalse\b|\bunpack\(|.""", re.DOTALL)
_PYTHON = {"~=": "!=", "..": "+", "{": "table(", "}": ")", "unpack(": "*unpack("}
_PYTHON |= {"nil": "None", "true": "True", "false": "False"}
_STATEMENTS = (
    (re.compile(r"if (.*) then"), "if {}:", 1, 0),
    (re.compile(r"elseif (.*) then"), "elif {}:", 1, -1),
    (re.compile(r"(else)"), "else:", 1, -1),
    (re.compile(r"for (\w+), (\w+) in ipairs\((.*)\) do"), "for {}, {} in ipairs({}):", 1, 0),
    (re.compile(r"for (\w+) = (.*), (.*), (.*) do"), "for {} in range({}, {} + 1, {}):", 1, 0),
    (re.compile(r"(?:local )?(\w+(?:, \w+)*) = (.*)"), "{} = {}", 0, 0),
    (re.compile(r"(return .*|[\w.]+\(.*\))"), "{}", 0, 0),
)


class Table:
    """A table: its items are counted from 1, and None where there are none; names are its attributes."""

    def __init__(self, items: Sequence[Any] | Mapping[str, Any]) -> None:
        named = isinstance(items, Mapping)
        self.items: dict[Any, Any] = dict(items) if named else dict(enumerate(items, start=1))

    def __getitem__(self, index: int) -> Any:
        return self.items.get(index)

    def __getattr__(self, name: str) -> Any:
        return self.items.get(name)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items.values())

    def __bool__(self) -> bool:
        return True


@cache
def _compiled(script: str) -> Callable[..., Any]:
    lines, depth = ["def run(redis, KEYS, ARGV, cjson, string, table, tonumber, ipairs, unpack):"], 1
    for line in filter(None, map(str.strip, script.splitlines())):
        if line == "end":
            depth -= 1
            continue
        for pattern, python, deeper, before in _STATEMENTS:
            if found := pattern.fullmatch(line):
                depth += before
                lines.append("  " * depth + python.format(*map(_expression, found.groups())))
                depth += deeper
                break
        else:
            raise ValueError(f"a line of Lua that is not known here: {line}")
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    made: Callable[..., Any] = names["run"]
    return made


def _expression(lua: str) -> str:
    tokens = _TOKEN.findall(lua)
    return "".join(f"len({each[1:]})" if each[0] == "#" else _PYTHON.get(each, each) for each in tokens)


class _Redis:
    def __init__(self, call: Call) -> None:
        self.call = call


class _Json:
    @staticmethod
    def encode(value: Any) -> str:
        return json.dumps(list(value) if isinstance(value, Table) else value, separators=(",", ":"))

    @staticmethod
    def decode(text: str) -> Any:
        value = json.loads(text)
        return Table(value) if isinstance(value, list | dict) else value


class _String:
    @staticmethod
    def format(pattern: str, *values: Any) -> str:
        return pattern % values


def _number(text: Any) -> Any:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return int(value) if value.is_integer() else value


def run(script: str, call: Call, keys: Sequence[str], arguments: Sequence[str]) -> Any:
    """Runs a script and returns what it returns: text, a number, a list of them, or None.

    Args:
        script: In Lua.
        call: ``redis.call``.
        keys: ``KEYS``.
        arguments: ``ARGV``.

    Raises:
        ValueError: It has a line that is not known here.
    """
    given = _Redis(lambda *command: _seen(call(*command))), Table(keys), Table(arguments), _Json, _String
    result = _compiled(script)(*given, lambda *items: Table(items), _number, lambda t: t.items.items(), tuple)
    if isinstance(result, Table):
        return list(result)
    return int(result) if isinstance(result, bool) and result else None if result is False else result


def _seen(answer: Any) -> Any:
    """Returns an answer of a command as a script sees it."""
    if isinstance(answer, list):
        return Table([_seen(each) for each in answer])
    return False if answer is None else answer
