"""Writing TOML: the standard library reads it and does not write it.

By hand, because what settings can hold (text, numbers, truth values, paths, enums, lists and small tables of these)
takes fewer lines than a dependency takes to justify.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any


def dump(tables: Mapping[str, Mapping[str, Any]], *, heading: str = "") -> str:
    """Returns the tables as TOML that :func:`broker.settings.read_file` reads back to the same values.

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
