"""The profiles of the suite: ``test`` runs the fast one, ``--full`` all of it, ``--full --rest`` the difference.

A test is left out of the fast profile by a mark with its reason, ``full("..")``, or turn by turn by ``rotating(4)``:
of its parameters every fourth is tried, others with each commit.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.mutants.every_guard import MUTANTS

ROOT = Path(__file__).resolve().parents[1]
#: Examples of each property in the fast profile.
FAST_EXAMPLES = 25
#: Ids of the tests that notice when the guard of an invariant is gone.
GUARDS = frozenset(test for mutant in MUTANTS for test in mutant.tests)
#: Folders of tests that start processes.
WITH_PROCESSES = {"integration", "releases", "compose"}
#: Tells the workers of one run what its first process has read from git.
_COMMIT = "ATOLL_TEST_COMMIT"


class Profile(StrEnum):
    """Which tests run."""

    FAST = "fast"
    FULL = "full"
    REST = "rest"  # what is in full and not in fast


def begin(profile: Profile) -> None:
    """Sets up Hypothesis for a profile, before any module of tests is imported."""
    fast = profile is Profile.FAST
    settings.register_profile(
        "atoll",
        deadline=None,  # a deadline turns a busy machine into a failing test; every test has a hard limit of its own
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=fast,
        max_examples=FAST_EXAMPLES if fast else 100,
    )
    settings.load_profile("atoll")
    os.environ.setdefault(_COMMIT, _commit())


def examples(most: int, **more: object) -> settings:
    """Returns settings for a property that needs another number of examples than the usual 100 in the full profile."""
    fast = settings().derandomize
    return settings(max_examples=min(most, FAST_EXAMPLES) if fast else most, **more)  # type: ignore[arg-type]


def commit() -> str:
    """Returns the hash of the commit that is tested; zeros where git knows of none."""
    return os.environ[_COMMIT]


def split(items: Iterable[pytest.Item], profile: Profile) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the tests that a profile runs, and the others.

    Raises:
        pytest.UsageError: A test is in the full profile alone, without a reason or though it is a guard.
    """
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    seen: dict[str, int] = defaultdict(int)
    for item in items:
        fast = _is_fast(item, seen)
        wanted = profile is Profile.FULL or fast == (profile is Profile.FAST)
        (chosen if wanted else others).append(item)
    return chosen, others


def interleave(items: list[pytest.Item]) -> None:
    """Spreads the files whose tests start processes among those that compute: the former mostly wait.

    The last fifth only computes, so that no worker is left with a long file at the end.
    """
    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    waiting = [path for path in files if path.relative_to(ROOT).parts[1] in WITH_PROCESSES]
    places = {path: float(number) for number, path in enumerate(path for path in files if path not in waiting)}
    for number, path in enumerate(waiting):
        places[path] = 0.8 * number / len(waiting) * (len(files) - len(waiting))
    items[:] = [item for path in sorted(files, key=places.__getitem__) for item in files[path]]


def _is_fast(item: pytest.Item, seen: dict[str, int]) -> bool:
    """Says whether a test is in the fast profile; counts the parameters of the rotating ones."""
    marks = list(item.iter_markers("full"))
    for mark in marks:
        if not (len(mark.args) == 1 and isinstance(mark.args[0], str) and mark.args[0]):
            raise pytest.UsageError(f"{item.nodeid}: full(reason) must say why it is not in the fast profile")
    if marks and {item.nodeid, item.nodeid.partition("[")[0]} & GUARDS:
        raise pytest.UsageError(f"{item.nodeid}: guards an invariant (tests/mutants), so it stays in the fast profile")
    rotating = item.get_closest_marker("rotating")
    if rotating is None:
        return not marks
    function = item.nodeid.partition("[")[0]
    number, (of,) = seen[function], rotating.args
    seen[function] += 1
    return not marks and number % of == int(commit(), 16) % of


def _commit() -> str:
    asked = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "0" * 40
