"""Our files are UTF-8, whatever the locale: every place that opens one as text says so."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for name in ("broker", "islands", "aggregator", "ops") for path in (ROOT / name).rglob("*.py")]


def opens_text(call):
    """Whether a call opens a file as text: ``open(.., "r")``, ``path.open("w")``, ``read_text()``, ``write_text()``."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in ("read_text", "write_text"):
        return True
    if name != "open" or (isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "os"):
        return False
    texts = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return bool(texts) and set(texts[-1]) <= set("rwax+t")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_text_is_opened_with_its_encoding(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    silent = [call.lineno for call in calls if opens_text(call) and "encoding" not in {k.arg for k in call.keywords}]
    assert silent == []
