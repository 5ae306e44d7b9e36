"""Reads TOML files with one-line errors, and writes ours.

The standard library reads it and does not write it. Writing is by hand, because what settings can hold (text, numbers,
truth values, paths, enums, lists and small tables of these) takes fewer lines than a dependency takes to justify.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from broker.wire.errors import ConfigError, cure_of


def read(path: str | os.PathLike[str], *, field: str, cure: str = "give the path of a TOML file") -> dict[str, Any]:
    """Returns the tables of a file: :func:`text`, then :func:`parse`, which tell of arguments and errors."""
    return parse(text(path, field=field, cure=cure), field=field, source=os.fspath(path))


def text(path: str | os.PathLike[str], *, field: str, cure: str = "give the path of a TOML file") -> str:
    """Returns the text of a file.

    Args:
        path: The file's.
        field: What it was given as, for errors.
        cure: What to do where it cannot be read.

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


def parse(written: str, *, field: str, source: str) -> dict[str, Any]:
    """Returns the tables of a text.

    Args:
        written: The text.
        field: What its file was given as, for errors.
        source: The file's name, for errors.

    Raises:
        ConfigError: It is no TOML.
    """
    try:
        return tomllib.loads(written)
    except (tomllib.TOMLDecodeError, RecursionError) as err:
        raise ConfigError(field, source, f"is not TOML: {err}") from err


def dump(tables: Mapping[str, Mapping[str, Any]], *, heading: str = "") -> str:
    """Returns tables as TOML that :func:`broker.process.settings.read_file` reads back unchanged.

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
