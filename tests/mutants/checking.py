"""Trying mutants: each is put into a copy of the tree, and the tests that it names are run there."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
#: A test that hangs with a mutant has noticed it: its own limit, in seconds.
LIMIT_S = 30

_COPIED = ("broker", "islands", "aggregator", "ops", "tests", "examples", "benchmarks", "pyproject.toml")
_COMPILED = Path("aggregator/merge/__pycache__")

_OPTIONS = (
    *("-q", "-rfE", "-p", "no:cacheprovider", "--no-header", "--tb=no", "--durations=0", f"--timeout={LIMIT_S}"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of what was imported before
)
_ENDED = "\0 ended "
_SERVER = f"""
import json, os, sys
import hypothesis, msgpack, numpy, pytest, redis.asyncio, xxhash, zmq.asyncio
for line in sys.stdin:
    child = os.fork()
    if not child:
        code = 3  # of pytest, for its own errors
        try:
            code = pytest.main(json.loads(line))
        finally:
            sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print({_ENDED!r}, code, sep="", flush=True)
"""


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
        self._pytest = _Pytest(directory)
        ignore = shutil.ignore_patterns("__pycache__", ".*")
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, directory / name, ignore=ignore)
            else:
                shutil.copy(source, directory / name)
        compiled = directory / _COMPILED
        compiled.mkdir()
        for each in (ROOT / _COMPILED).glob("*.nb[ci]"):  # else each run of a merge compiles its kernels anew
            shutil.copy2(each, compiled)

    def try_one(self, mutant: Mutant) -> Verdict:
        """Applies a mutant, runs its tests, and takes it back; every one of them must fail.

        Raises:
            Outdated: The mutant does not fit the source.
        """
        path = self._root / mutant.file
        before = path.read_text()
        path.write_text(mutant.edited(before))
        _forget_compiled(path)
        try:
            return self._run(mutant.tests)
        finally:
            path.write_text(before)
            _forget_compiled(path)

    def failing(self, tests: Iterable[str]) -> str:
        """Runs tests without any mutant; returns what is wrong with them, and nothing if all of them pass."""
        code, said = self._pytest.run([*_OPTIONS, *sorted(set(tests))])
        return "" if code == 0 else "\n".join(said.splitlines()[-15:])

    def _run(self, tests: Sequence[str]) -> Verdict:
        code, said = self._pytest.run([*_OPTIONS, *tests])
        if code not in (0, 1):
            return Verdict(outcome=Outcome.UNTRIED, said="\n".join(said.splitlines()[-15:]))
        failed = [line.split()[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        passed = [test for test in tests if not any(each.startswith(test) for each in failed)]
        if passed:
            return Verdict(outcome=Outcome.SURVIVED, said=f"did not fail: {' '.join(passed)}")
        return Verdict(outcome=Outcome.NOTICED, said=" ".join(failed))

    def close(self) -> None:
        """Ends the process behind it."""
        self._pytest.close()


class _Pytest:
    """A process that has imported what takes long, and forks for each run of pytest."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(directory)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Returns the exit code of pytest, and what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(list(arguments)) + "\n")
        self._process.stdin.flush()
        said = []
        for line in self._process.stdout:
            if line.startswith(_ENDED):
                return int(line.removeprefix(_ENDED)), "".join(said)
            said.append(line)
        return -1, "".join(said)

    def close(self) -> None:
        """Ends it."""
        self._process.communicate(timeout=10.0)


def _forget_compiled(path: Path) -> None:
    """Two edits within a second, of one length, look alike to the interpreter."""
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
