"""Which sources make a record: a digest of ours, and one of each module of a task of one's own.

Shell: it reads files, and imports none of them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from islands.options import find_module, module_and_function
from ops import cli
from ops.lab.experiment import Experiment

_PACKAGES = [Path(__file__).resolve().parents[2] / name for name in ("broker", "islands", "aggregator", "ops")]
_STANDARD_LIBRARY = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
_INSTALLED = {"site-packages", "dist-packages"}


def code() -> str:
    """Returns the version with a digest of our sources: what a checkout was when it made a record."""
    return f"{cli.version()} {_digest(path for package in _PACKAGES for path in sorted(package.rglob('*.py')))}"


def of_modules(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Returns module -> digest, of those that are neither ours nor installed: the user's own."""
    paths = {name: Path(getattr(module, "__file__", None) or "") for name, module in list(modules.items())}
    return {name: _digest([path]) for name, path in sorted(paths.items()) if _is_own(path)}


def as_they_are(experiment: Experiment) -> Experiment:
    """Returns the experiment with the digests that its tasks have now: records of an older form of them are done with.

    Of the modules that tasks are named by; what those import is known once a run has seen it.
    """
    names = {module_and_function(experiment.settings_of(cell).task)[0] for cell in experiment.cells()}
    found = {name: find_module(name, [os.getcwd(), *sys.path]) for name in names}  # where runs look, too
    paths = {name: Path(spec.origin) for name, spec in found.items() if spec is not None and spec.origin is not None}
    return replace(experiment, sources={name: _digest([path]) for name, path in paths.items() if _is_own(path)})


def _is_own(path: Path) -> bool:
    return path.suffix == ".py" and path.is_file() and not _is_installed(path) and not _is_installed(path.resolve())


def _is_installed(path: Path) -> bool:
    inside = (*_PACKAGES, *_STANDARD_LIBRARY)
    return not _INSTALLED.isdisjoint(path.parts) or any(map(path.is_relative_to, inside))


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
