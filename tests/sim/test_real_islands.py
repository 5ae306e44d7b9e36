"""Real islands in simulated runs: the session, the training thread and its loop, in virtual time under faults.

A failing seed N reproduces with ``python3 -m tests.real_islands N``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.real_islands import check, story

#: Seeds of one test.
BATCH = 4


@pytest.mark.rotating(8)
@pytest.mark.parametrize("first", range(0, 96, BATCH))
def test_whatever_befalls_real_islands_the_books_are_exact_and_they_end_with_the_last_versions(tmp_path, first):
    for seed in range(first, first + BATCH):
        check(seed, tmp_path)


def test_a_seed_gives_the_same_story_in_any_process(tmp_path):
    def told(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "tests.real_islands", "--story", "3"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    first = told("1")
    assert len(first.splitlines()) > 200
    assert told("2") == first
    assert story(3, tmp_path) == first.rstrip("\n")
