"""What all tests share: Hypothesis without deadlines, and the range of simulated seeds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# A deadline turns a busy machine into a failing test; every test has a hard limit of its own (pyproject.toml).
settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds", default="0:44", help="range of simulated seeds, FIRST:LAST; one seed N is N:N+1 (default: 0:44)"
    )
    parser.addoption(
        "--regenerate-transcripts",
        action="store_true",
        help="write what happened into tests/transcripts instead of comparing; review the diff",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sim_seed" in metafunc.fixturenames:
        first, last = metafunc.config.getoption("--seeds").split(":")
        metafunc.parametrize("sim_seed", range(int(first), int(last)))
