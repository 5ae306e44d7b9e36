"""Liars within the bounds of plausibility, with real training: what each may cost, and nobody honest is accused."""

from __future__ import annotations

import pytest

from tests.sim.trust import Result, run

pytestmark = [pytest.mark.full("trains for some seconds")]

#: One for each way of lying, and fleets that are not all alike; the bench has the others.
TRIED = ("sign-flip", "constant", "drift", "claims", "two-constant")
FLEETS = ("journeys", "faults", "one-other-language")
#: Of each island: fewer than the bench has, so that a lie costs less.
STEPS = 400
#: Percent that a liar may add to the held-out loss, and by which it may end the run early. The bench has intervals.
MOST = 2.0


@pytest.fixture(scope="module")
def alone() -> Result:
    """The honest islands alone."""
    return run("four", 0, STEPS)


@pytest.mark.parametrize("name", TRIED)
def test_a_liar_costs_at_most(name: str, alone: Result) -> None:
    ours = run(name, 0, STEPS)
    more, early = 100 * (ours.loss / alone.loss - 1), 100 * (1 - ours.honest_tokens / alone.honest_tokens)
    assert not ours.accused
    assert more <= MOST, f"{ours}, alone {alone}"
    assert early <= MOST, f"{ours}, alone {alone}"


@pytest.mark.parametrize("name", FLEETS)
def test_no_honest_island_is_accused_and_those_that_agree_keep_their_weight(name: str) -> None:
    found = run(name, 0, STEPS)
    assert not found.accused
    # This other language has the same inputs and other answers: of four islands it cannot be told from a liar.
    assert (found.weight > 0.9) is (name != "one-other-language"), found
