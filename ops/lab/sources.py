"""Which sources make a record: a digest of ours, and one of each module of a task of one's own.

Shell: it reads files, and imports none of them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from broker.wire.errors import ConfigError
from islands.config import LANGUAGE
from islands.tasks.corpus import MAX_TEXT_BYTES, PYTHON, files_of, holds_text, is_array
from islands.tasks.options import find_module, module_and_function
from ops import cli
from ops.lab.experiment import Experiment
from ops.lab.settings import CellSettings

_PACKAGES = [Path(__file__).resolve().parents[2] / name for name in ("broker", "islands", "aggregator", "ops")]
_STANDARD_LIBRARY = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
#: Of a file as large as this all bytes count; text is never larger.
WHOLE_BYTES = MAX_TEXT_BYTES
_INSTALLED = {"site-packages", "dist-packages"}


def code() -> str:
    """Returns the version with a digest of our sources: what a checkout was when it made a record."""
    return f"{cli.version()} {_digest(path for package in _PACKAGES for path in sorted(package.rglob('*.py')))}"


def of_modules(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Returns module -> digest, of those that are neither ours nor installed: the user's own."""
    paths = {name: Path(getattr(module, "__file__", None) or "") for name, module in list(modules.items())}
    return {name: _digest([path]) for name, path in sorted(paths.items()) if _is_own(path)}


def of_texts(cell: CellSettings) -> dict[str, str]:
    """Returns ``data PATH`` -> digest, of the files and folders that our own task is to train on.

    None of what Python brings, which a record's corpus tells of. What is not there, or no list, is for the run to
    refuse. Of files beyond :data:`WHOLE_BYTES`, which are arrays, both ends count and the size.
    """
    given = cell.options.get("data", ()) if cell.task == LANGUAGE else ()
    listed = [str(path) for path in given] if isinstance(given, list | tuple) else []
    own = sorted({path for path in listed if not path.startswith(PYTHON) and os.path.exists(path)})
    return {f"data {path}": _digest_of_text(Path(path)) for path in own}


def as_they_are(experiment: Experiment) -> Experiment:
    """Returns the experiment with the digests that its tasks have now: records of an older form of them are done with.

    Of the modules that tasks are named by, and of the text that ours is given; what modules import is known once a run
    has seen it.
    """
    cells = [experiment.settings_of(cell) for cell in experiment.cells()]
    names = {module_and_function(cell.task)[0] for cell in cells}
    found = {name: find_module(name, [os.getcwd(), *sys.path]) for name in names}  # where runs look, too
    paths = {name: Path(spec.origin) for name, spec in found.items() if spec is not None and spec.origin is not None}
    modules = {name: _digest([path]) for name, path in paths.items() if _is_own(path)}
    given = {(cell.task, str(cell.options.get("data"))): cell for cell in cells}  # of hundreds most have the same
    texts = {name: digest for cell in given.values() for name, digest in of_texts(cell).items()}
    return replace(experiment, sources=modules | texts)


def _is_own(path: Path) -> bool:
    return path.suffix == ".py" and path.is_file() and not _is_installed(path) and not _is_installed(path.resolve())


def _is_installed(path: Path) -> bool:
    inside = (*_PACKAGES, *_STANDARD_LIBRARY)
    return not _INSTALLED.isdisjoint(path.parts) or any(map(path.is_relative_to, inside))


def _digest_of_text(path: Path) -> str:
    digest = hashlib.sha256()
    with suppress(OSError, ConfigError):  # the run says what cannot be read
        for file in files_of(path):
            with file.open("rb") as opened:
                content, size = opened.read(WHOLE_BYTES), os.fstat(opened.fileno()).st_size
                if size > WHOLE_BYTES:
                    opened.seek(max(WHOLE_BYTES, size - WHOLE_BYTES))
                    content += opened.read(WHOLE_BYTES)
            if is_array(file) or holds_text(content):  # what else is in a folder is nobody's
                digest.update(f"{file.relative_to(path)} {size} ".encode(errors="surrogateescape") + content)
    return digest.hexdigest()[:12]


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
