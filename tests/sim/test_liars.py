"""Liars within the bounds of plausibility, with real training: what each may cost, and nobody honest is accused."""

from __future__ import annotations

import math

import pytest

from tests.sim.trust import HONEST_FLEETS, LIARS, Result, run

pytestmark = [pytest.mark.full("trains for some seconds")]

#: Of each island: fewer than the bench has, so that a lie costs less.
STEPS = 400
#: Of what is not bounded yet.
NOT_YET = math.inf

#: Liar -> what it may add to the held-out loss, and by how much it may end the run early, in percent.
BOUNDS: dict[str, tuple[float, float]] = {
    "sign-flip": (NOT_YET, 2.0),
    "sign-flip-3": (NOT_YET, 2.0),
    "scale-8": (2.0, 2.0),
    "constant": (NOT_YET, 2.0),
    "constant-3": (NOT_YET, 2.0),
    "constant-noise": (NOT_YET, 2.0),
    "drift": (2.0, 2.0),
    "claims": (NOT_YET, NOT_YET),
    "sign-flip-8-claims": (NOT_YET, NOT_YET),
    "constant-3-claims": (NOT_YET, NOT_YET),
    "turncoat": (NOT_YET, 2.0),
    "two-sign-flip": (NOT_YET, 2.0),
    "two-constant": (NOT_YET, 2.0),
    "two-constant-3": (NOT_YET, 2.0),
    "two-constant-noise": (NOT_YET, 2.0),
}


@pytest.fixture(scope="module")
def alone() -> Result:
    """The honest islands alone."""
    return run("four", 0, STEPS)


@pytest.mark.parametrize("name", LIARS)
def test_a_liar_costs_at_most(name: str, alone: Result) -> None:
    ours = run(name, 0, STEPS)
    more, early = 100 * (ours.loss / alone.loss - 1), 100 * (1 - ours.honest_tokens / alone.honest_tokens)
    assert not ours.accused
    most_more, most_early = BOUNDS[name]
    assert more <= most_more, f"{ours}, alone {alone}"
    assert early <= most_early, f"{ours}, alone {alone}"


@pytest.mark.parametrize("name", HONEST_FLEETS)
def test_no_honest_island_is_accused_and_one_with_other_data_keeps_its_weight(name: str) -> None:
    found = run(name, 0, STEPS)
    assert not found.accused
    assert found.weight > 0.9
