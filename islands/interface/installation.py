"""The installed command ``atoll``; detects other packages with a name of ours. Shell.

``ops`` and ``broker`` are names of other distributions on package indexes, too. Installed beside ours they share its
folders, and whichever came last has overwritten files of the other without a word. Nothing here needs them: only the
standard library is imported, before something has failed nothing is looked at, and ``ops`` is named by text alone.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

NAMES = ("broker", "islands", "aggregator", "ops")
_CLAIMS = re.compile(rf"^({'|'.join(NAMES)})(?:/|\.py,)", re.MULTILINE)
_AGAIN = "install Atoll again with --force-reinstall --no-deps, into an environment of its own"


def main() -> int:
    """Runs :func:`ops.cli.main` as ``atoll``; if it cannot be imported, explains why."""
    try:
        cli = importlib.import_module("ops.cli")
    except Exception:
        say_fault()
        raise
    return int(cli.main())


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Replaces an error in the block by an ImportError with the cure, if the installation has a fault.

    Raises:
        ImportError: A package of another distribution, or a file of the user, has a name of ours.
    """
    try:
        yield
    except Exception as err:
        if found := fault():
            raise ImportError(": ".join(found)) from err
        raise


def say_fault() -> None:
    """Prints the fault of the installation, if it has one, on standard error."""
    if found := fault():
        print(f"atoll: {': '.join(found)}", file=sys.stderr)


def fault() -> tuple[str, str] | None:
    """Returns the fault of our four installed packages and its cure; None if there is none.

    Distributions are compared by the files that they say they have installed. A checkout that comes first on the path
    shares no folder with any of them.
    """
    from importlib import metadata  # loads more than all of a core

    root = Path(__file__).resolve().parents[2]
    found = {name: _found(name) for name in NAMES}
    others: dict[str, list[str]] = {}
    missing: list[str] = []
    for each in metadata.distributions():
        record = each.read_text("RECORD") or ""
        claimed = set(_CLAIMS.findall(record))
        folder = Path(str(each.locate_file(""))).resolve() if claimed else root
        if "islands/interface/installation.py," in record:
            ours = [line.partition(",")[0] for line in record.splitlines() if _CLAIMS.match(line)]
            missing += [name for name in ours if folder == root and not (root / name).exists()]
        elif shared := [name for name in NAMES if name in claimed and found[name].parent == folder]:
            others[each.name] = shared
    if others:
        names = ", ".join(f"{owner} has {' and '.join(shared)}" for owner, shared in sorted(others.items()))
        what = f"other distributions have packages of Atoll's names, in their place or mixed with them ({names})"
        return what, f"pip uninstall {' '.join(sorted(others))}, and {_AGAIN}"
    if missing:
        return f"files of Atoll are missing ({len(missing)}, such as {missing[0]})", _AGAIN
    for path in found.values():
        if path.parent != root:
            return f"{path} has the name of a package of Atoll and hides it", "rename yours"
    return None


def _found(name: str) -> Path:
    """Returns the folder or file in which a top-level package is found, without importing it."""
    spec = find_spec(name)
    if spec is None:
        return Path(__file__).resolve().parents[2] / name  # nobody has it, and nothing hides it
    return Path([*(spec.submodule_search_locations or ()), spec.origin][0] or "").resolve()
