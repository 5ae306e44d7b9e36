"""What all tests share: the profile of the run, the order of files, and the range of simulated seeds."""

from __future__ import annotations

import os
import signal

import pytest

from tests import profiles
from tests.profiles import Profile

# A shell without job control starts its background jobs with SIGINT ignored, and so would they what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The suite tests the same on a machine with GPUs, also in the processes that it starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

#: Of the small runs with many troubles, and how many of them are one test.
PACKED_SEEDS, SEEDS_AT_ONCE = range(300), 5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--profile",
        type=Profile,
        choices=list(Profile),
        default=Profile.FULL,
        help="fast: without the tests that are marked full, and a quarter of those that are marked rotating; "
        "rest: what fast leaves out; full (default): all",
    )
    parser.addoption(
        "--seeds",
        help="range of seeds of tests/sim/test_packed.py, FIRST:LAST; one seed N is N:N+1 "
        f"(default: {PACKED_SEEDS.start}:{PACKED_SEEDS.stop})",
    )


def pytest_configure(config: pytest.Config) -> None:
    profiles.begin(config.getoption("--profile"))


def pytest_report_header(config: pytest.Config) -> str:
    profile, commit = config.getoption("--profile"), profiles.commit()
    if profile is Profile.FULL:
        return "profile: full"
    turn = f"of crash points and seeds quarter {int(commit, 16) % 4} of 0 to 3, by commit {commit[:10]}"
    return f"profile: {profile}; {turn}" + (" is left out" if profile is Profile.REST else "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], others = profiles.split(items, config.getoption("--profile"))
    config.hook.pytest_deselected(items=others)
    profiles.interleave(items)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--seeds")
    if "packed_seeds" in metafunc.fixturenames:
        seeds = _range(given) if given else PACKED_SEEDS
        batches = [seeds[i : i + SEEDS_AT_ONCE] for i in range(0, len(seeds), SEEDS_AT_ONCE)]
        metafunc.parametrize("packed_seeds", batches, ids=[f"{batch.start}:{batch.stop}" for batch in batches])


def _range(text: str) -> range:
    first, last = text.split(":")
    return range(int(first), int(last))
