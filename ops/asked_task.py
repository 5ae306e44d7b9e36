"""The task that a command line asks for, by its words and its source. Standard library only.

The launcher must know before there is an environment whether the task needs PyTorch, which is gigabytes, and whether an
option of it is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: A line by which a task asks for PyTorch.
_TORCH = re.compile(r"^\s*(import|from) (torch|islands\.torch|islands\.hf)\b", re.MULTILINE)
#: Commands that load no task, also where a file of theirs names one.
_WITHOUT_TASK = ("hub", "broker", "aggregator", "status", "dashboard")
#: Commands that train one.
_WITH_TASK = ("up", "chaos", "island")


def needs_torch(words: Sequence[str]) -> bool:
    """Returns True if the task of a command line, or of a file that it names, imports PyTorch."""
    if words and words[0] in _WITHOUT_TASK:
        return False
    for word in words:
        path = Path(word)
        with contextlib.suppress(OSError, ValueError):  # a word that is no path
            file = path / "config.toml" if path.is_dir() else path
            named = re.findall(r'(?m)^task = "([\w.]+):', file.read_text("utf-8")) if file.suffix == ".toml" else []
            named += [word.rpartition("=")[2].partition(":")[0]] if ":" in word and "/" not in word else []
            if any(map(_imports_torch, named)):
                return True
    return not {"--dcp", "--hf"}.isdisjoint(words)


def wrong_option(words: Sequence[str]) -> str:
    """Returns the fault of the task options on a command line, from the task's source; empty if none.

    The command itself says the same, but needs an environment first, which takes minutes. A task that is not found here
    may be in that.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--task", "--config", "--resume", "--model"):
        parser.add_argument(flag)
    for flag in ("--task-option", "--data"):
        parser.add_argument(flag, nargs="+", action="extend", default=[])
    try:
        args = parser.parse_known_args(words)[0]
        tables = tomllib.loads(Path(args.config).read_text("utf-8")) if args.config else {}
        path = args.task or tables.get("island", {}).get("task")
        options = dict(tables.get("task", {})) | dict(each.partition("=")[::2] for each in args.task_option)
    except (argparse.ArgumentError, OSError, ValueError, AttributeError):  # the command says why
        return ""
    if not path or args.resume or words[0] not in _WITH_TASK or {"-h", "--help", "--help-all"} & {*words}:
        return ""
    options |= {name: given for name in ("model", "data") if (given := getattr(args, name))}
    from broker.base.errors import ConfigError  # both need the standard library alone
    from islands.tasks.options import check_options, signature_in_source

    signature = None
    with contextlib.suppress(ConfigError):
        signature = signature_in_source(path)
    try:
        if signature is not None:
            check_options(path, signature, options)
    except ConfigError as err:
        return str(err)
    return ""


def _imports_torch(module: str) -> bool:
    """Says so of a module by its own lines, of the checkout or of the folder where the command is started."""
    if module.startswith(("islands.hf", "islands.torch")):
        return True
    name = module.replace(".", "/")
    for folder in (ROOT, Path()):
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if file.is_file() and _TORCH.search(file.read_text("utf-8", "replace")):
                return True
    return False
