"""All troubles at once: brokers and aggregators that fail, islands that are away or misbehave, in every combination.

A failing seed N reproduces with ``python3 -m ops test tests/sim/test_combinations.py --seeds N:N+1``.
"""

from __future__ import annotations

import pytest

from tests.sim.faults import combined_plan
from tests.sim.test_rogues import check_the_honest
from tests.sim.test_simulation import run

#: Seeds beyond the default range that once found a bug.
KEPT_SEEDS = (
    11,  # a life that no commit had was forgotten by the next leader
    52,  # islands that were cut off for longer than dead_after_s in the flush were taken for gone, and the run ended
    140,  # an island joined a run that was over; that was a mistake of the observer
)


@pytest.mark.rotating(4)
def test_whatever_comes_together_every_invariant_holds_and_nobody_honest_is_accused(sim_seed: int) -> None:
    check_the_honest(run(combined_plan(sim_seed)))


@pytest.mark.parametrize("seed", KEPT_SEEDS)
def test_a_seed_that_found_a_bug_stays_mended(seed: int) -> None:
    check_the_honest(run(combined_plan(seed)))
