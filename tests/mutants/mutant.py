"""One guard broken on purpose: an exact edit of one file, and the tests that must fail with it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


class Outdated(Exception):
    """A mutant does not fit the source any more: its text or its tests are gone, and the list is to be mended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A guard of an invariant, and the same place without it.

    Attributes:
        what: What the code does then, as a sentence without an end.
        invariant: The number of the invariant in docs/design.md, section 10, that the guard is for.
        file: Path from the root of the repository.
        old: Text that stands in the file exactly once.
        new: What takes its place.
        tests: Ids of tests, fast ones, each of which must fail.
    """

    what: str
    invariant: int
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Edits the file below ``root``; returns the text that it had.

        Raises:
            Outdated: The old text is not there, or not just once, or what comes out is no Python.
        """
        path = root / self.file
        before = path.read_text()
        path.write_text(self.edited(before))
        return before

    def edited(self, text: str) -> str:
        """Returns the text of the file with the guard broken; raises as :meth:`apply`."""
        found = text.count(self.old)
        if found != 1:
            raise Outdated(
                f"{self.file} has {found} times, must have once: {self.old!r}\n  (of the mutant: {self.what})"
            )
        after = text.replace(self.old, self.new)
        try:
            ast.parse(after)
        except SyntaxError as err:
            raise Outdated(f"{self.file} is no Python with {self.new!r}: {err}") from err
        return after

    def check_tests(self, root: Path) -> None:
        """Raises :class:`Outdated` unless each named test is defined where it is said to be."""
        if not self.tests:
            raise Outdated(f"no test is named that must notice: {self.what}")
        for test in self.tests:
            file, _, name = test.partition("::")
            name = name.partition("[")[0]
            path = root / file
            if not path.exists() or (name and f"{name}" not in _names(path.read_text())):
                raise Outdated(f"there is no test {test}, which must notice: {self.what}")


def _names(text: str) -> frozenset[str]:
    """Names of functions, and of what is assigned, at the top of a module."""
    names: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)
