"""Everything real, in virtual time: brokers, aggregators, islands, under the troubles of small packed runs.

A failing seed N reproduces with ``python3 -m tests.sim.whole_run N``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.whole_run import check


@pytest.mark.rotating(12)
@pytest.mark.parametrize("seed", range(48))
def test_whatever_is_packed_into_a_few_seconds_every_invariant_holds(seed):
    check(seed)


@pytest.mark.full("two processes that run a seed each")
def test_a_seed_gives_the_same_story_in_any_process():
    def told(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "tests.sim.whole_run", "--story", "8"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    first = told("1")
    assert len(first.splitlines()) > 1000
    assert told("2") == first
