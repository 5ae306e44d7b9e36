"""What all tests share: Hypothesis without deadlines, and the range of simulated seeds."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# A deadline turns a busy machine into a failing test; every test has a hard limit of its own (pyproject.toml).
settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")

# A shell without job control starts its background jobs with SIGINT ignored, and so would they what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The suite tests the same on a machine with GPUs, also in the processes that it starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

#: Of the long runs with every combination of troubles, each for itself.
LONG_SEEDS = range(4)
#: Of the small ones, and how many of them are one test.
PACKED_SEEDS, SEEDS_AT_ONCE = range(120), 10


def pytest_addoption(parser: pytest.Parser) -> None:
    long, packed = (f"{seeds.start}:{seeds.stop}" for seeds in (LONG_SEEDS, PACKED_SEEDS))
    parser.addoption(
        "--seeds",
        help="range of simulated seeds, FIRST:LAST; one seed N is N:N+1 "
        f"(default: {packed} in test_packed.py, {long} in test_combinations.py)",
    )
    parser.addoption(
        "--regenerate-transcripts",
        action="store_true",
        help="write what happened into tests/transcripts instead of comparing; review the diff",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--seeds")
    if "sim_seed" in metafunc.fixturenames:
        metafunc.parametrize("sim_seed", _range(given) if given else LONG_SEEDS)
    if "packed_seeds" in metafunc.fixturenames:
        seeds = _range(given) if given else PACKED_SEEDS
        batches = [seeds[i : i + SEEDS_AT_ONCE] for i in range(0, len(seeds), SEEDS_AT_ONCE)]
        metafunc.parametrize("packed_seeds", batches, ids=[f"{batch.start}:{batch.stop}" for batch in batches])


def _range(text: str) -> range:
    first, last = text.split(":")
    return range(int(first), int(last))
