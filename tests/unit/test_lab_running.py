"""When a run of the laboratory has gone wrong."""

import math
from dataclasses import replace

from ops.lab.outcome import Outcome, Point
from ops.lab.running import FAR_ABOVE, diverged

SOUND = Outcome(
    params={},
    curve=[Point(0, 0.0, 5.0), Point(100, 1.0, 4.0)],
    tokens=200,
    merged_tokens=190,
    virtual_s=2.0,
    train_s=1.0,
)


def test_a_run_has_diverged_by_its_loss():
    assert not diverged(SOUND, 3.0)
    assert not diverged(SOUND, 0.99 * FAR_ABOVE * 5.0)
    assert diverged(SOUND, 1.01 * FAR_ABOVE * 5.0)
    assert diverged(SOUND, math.nan)
    assert diverged(SOUND, math.inf)


def test_a_run_whose_islands_trained_what_is_not_finite_has_diverged_though_its_model_is_sound():
    assert not diverged(replace(SOUND, wasted={"stale": 10}), 3.0)
    assert diverged(replace(SOUND, wasted={"stale": 10, "not_finite": 1}), 3.0)
