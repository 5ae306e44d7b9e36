"""Trying mutants: each is put into a copy of the tree, and the tests that it names are run there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.mutants import books, durability, fencing, intake, rounds
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
MUTANTS: tuple[Mutant, ...] = (
    *durability.MUTANTS,
    *fencing.MUTANTS,
    *books.MUTANTS,
    *rounds.MUTANTS,
    *intake.MUTANTS,
)
#: Of the tests of one mutant, in seconds.
LIMIT_S = 120.0

_COPIED = ("broker", "islands", "aggregator", "ops", "tests", "examples", "pyproject.toml")


class Outcome(StrEnum):
    """What became of a mutant."""

    NOTICED = "noticed"
    SURVIVED = "SURVIVED"
    UNTRIED = "UNTRIED"  # its tests did not run: the mutant breaks more than a guard, or a test is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a mutant, and what the tests said."""

    outcome: Outcome
    said: str = ""


class Copy:
    """A copy of the tree, in which one mutant at a time lives.

    Args:
        directory: An empty directory for it.
    """

    def __init__(self, directory: Path) -> None:
        self._root = directory
        ignore = shutil.ignore_patterns("__pycache__", ".*")
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, directory / name, ignore=ignore)
            else:
                shutil.copy(source, directory / name)

    def try_one(self, mutant: Mutant) -> Verdict:
        """Applies a mutant, runs its tests, and takes it back; every one of them must fail.

        Raises:
            Outdated: The mutant does not fit the source.
        """
        path = self._root / mutant.file
        before = mutant.apply(self._root)
        _forget_compiled(path)
        try:
            return self._run(mutant.tests)
        finally:
            path.write_text(before)
            _forget_compiled(path)

    def passes(self, tests: Iterable[str]) -> Verdict:
        """Runs tests without any mutant; SURVIVED is as it must be."""
        return self._run(sorted(set(tests)))

    def _run(self, tests: Sequence[str]) -> Verdict:
        options = ["-q", "-rfE", "-p", "no:cacheprovider", "--no-header", "--tb=no", "--durations=0"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        environment = {**os.environ, "PYTHONPATH": str(self._root)}
        try:
            run = subprocess.run(
                command, cwd=self._root, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Verdict(outcome=Outcome.NOTICED, said=f"no end within {LIMIT_S:g} s")
        said = run.stdout + run.stderr
        if run.returncode not in (0, 1):
            return Verdict(outcome=Outcome.UNTRIED, said="\n".join(said.splitlines()[-15:]))
        failed = [line.split()[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        passed = [test for test in tests if not any(each.startswith(test) for each in failed)]
        if passed:
            return Verdict(outcome=Outcome.SURVIVED, said=f"did not fail: {' '.join(passed)}")
        return Verdict(outcome=Outcome.NOTICED, said=" ".join(failed))


def _forget_compiled(path: Path) -> None:
    """Two edits within a second, of one length, look alike to the interpreter."""
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
