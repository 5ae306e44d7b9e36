"""One guard broken on purpose: an edit of one function, and the tests that must fail with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


class Outdated(Exception):
    """A mutant does not fit the source any more: its place, its text or its tests are gone."""


@dataclass(frozen=True, slots=True, init=False)
class Mutant:
    """A guard of an invariant, and the same place without it.

    Attributes:
        invariant: The number of the invariant in reference.md, section 10, that the guard is for.
        what: What the code does then, as a sentence without an end.
        file: Path from the root of the repository.
        name: Qualified name of the function, method or assigned value that holds the guard.
        old: Text that stands in there exactly once.
        new: What takes its place.
        tests: Ids of tests, fast ones, each of which must fail.
    """

    invariant: int
    what: str
    file: str
    name: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __init__(self, invariant: int, what: str, at: str, old: str, new: str, *tests: str) -> None:
        """Takes ``at`` as ``FILE::NAME`` and ids of tests from below tests/."""
        file, _, name = at.partition("::")
        values = (invariant, what, file, name, old, new, tuple(f"tests/{test}" for test in tests))
        for field, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, field, value)

    def edited(self, text: str) -> str:
        """Returns the text of the file with the guard broken.

        Raises:
            Outdated: The place or the old text is not there, or not just once, or what comes out is no Python.
        """
        places = [place for name, place in _places(ast.parse(text).body) if name == self.name]
        if len(places) != 1:
            raise Outdated(f"{self.file} has {len(places)} of {self.name} (of the mutant: {self.what})")
        lines = text.splitlines(keepends=True)
        body = "".join(lines[places[0]])
        if body.count(self.old) != 1:
            count = body.count(self.old)
            raise Outdated(f"{self.file}: {self.name} has {self.old!r} {count} times (of the mutant: {self.what})")
        lines[places[0]] = [body.replace(self.old, self.new)]
        after = "".join(lines)
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
            path = root / file
            known = {each for each, _ in _places(ast.parse(path.read_text()).body)} if path.exists() else set()
            if name.partition("[")[0] not in known:
                raise Outdated(f"there is no test {test}, which must notice: {self.what}")


def _places(nodes: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, slice]]:
    """Yields the qualified name and the lines of each function, method and assigned value."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield from _places(node.body, f"{prefix}{node.name}.")
            continue
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        for name in names:
            yield prefix + name, slice(node.lineno - 1, node.end_lineno)
