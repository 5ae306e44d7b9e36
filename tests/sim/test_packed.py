"""Many small runs with many troubles each: crashes, cut links, clocks that are wrong, memory that fails.

A failing seed N reproduces with ``python3 -m tests.sim.packed N``, and ``--story N`` tells all that happens in it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.packed import check


@pytest.mark.rotating(30)
def test_whatever_is_packed_into_a_few_seconds_every_invariant_holds(packed_seeds: range) -> None:
    for seed in packed_seeds:
        check(seed)


@pytest.mark.full("two processes that run a seed each")
@pytest.mark.parametrize("seed", [8, 31])
def test_a_seed_gives_the_same_story_in_any_process(seed: int) -> None:
    def told(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "tests.sim.packed", "--story", str(seed)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    first = told("1")
    assert len(first.splitlines()) > 1000
    assert told("2") == first
