"""The documents: their links lead somewhere, and their commands and flags are ours."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from ops import cli

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
A_LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
A_COMMAND = re.compile(r"python3 -m ops ([a-z]+)([^`\n|#&]*)")


of_each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


@of_each_document
def test_links_lead_somewhere_and_files_of_the_source_that_are_named_exist(path):
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:ops|broker|aggregator|islands)/[\w/]+\.py\b", text))
    assert [link for link in A_LINK.findall(text) if not (path.parent / link).exists()] == []
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@of_each_document
def test_commands_and_their_flags_are_ours(path):
    for name, rest in A_COMMAND.findall(path.read_text(encoding="utf-8")):
        assert name in cli.COMMANDS
        parser = cli.parser_of(name)
        importlib.import_module(cli.COMMANDS[name].module).add_arguments(parser)
        known = set(flags_of(parser))
        flags = [word.partition("=")[0] for word in shlex.split(rest) if word.startswith("--")]
        if not cli.COMMANDS[name].passes_on:
            assert [flag for flag in flags if flag not in known] == []


def flags_of(parser):
    """Every flag of a parser and of its subcommands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from flags_of(each)


def test_the_readme_can_be_read_in_one_sitting():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert len(prose.split()) <= 1000
    cells = [cell for line in prose.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
    assert [cell for cell in cells if len(cell.split()) > 12] == []


def test_each_hop_of_a_pseudo_gradient_is_where_the_reference_says():
    text = (ROOT / "docs" / "reference.md").read_text().partition("## 15.")[2]
    hops = re.findall(r"\| `(\w+)\.(\w+)` \| `([\w/]+\.py)` \|$", text, re.MULTILINE)
    assert len(hops) == 11
    for owner, function, path in hops:
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert callable(getattr(getattr(module, owner), function)), (owner, function, path)
