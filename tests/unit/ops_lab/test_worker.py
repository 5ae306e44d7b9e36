"""A run in a process of its own: its record, and when it has diverged."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from broker.base.errors import ConfigError
from islands.tasks.task import load_task
from ops.lab import lockstep
from ops.lab.records import Outcome, Point
from ops.lab.worker import FAR_ABOVE, diverged, run_cell
from ops.plans.cell import cell_settings

CURVE = [Point(0, 0.0, 5.0), Point(100, 1.0, 4.0)]
SOUND = Outcome(params={}, curve=CURVE, tokens=200, merged_tokens=190, virtual_s=2.0)


def numpy_cell(**values):
    defaults = {"task": "examples.numpy_task:task", "steps": 24, "fragments": 2, "sync_interval": 4}
    return cell_settings(defaults | values)


@pytest.mark.parametrize(
    ("loss", "begins_at", "change", "expected"),
    [
        (3.0, 5.5, {}, False),
        (0.99 * FAR_ABOVE * 5.0, 5.5, {}, False),
        (1.01 * FAR_ABOVE * 5.0, 5.5, {}, True),
        (math.nan, 5.5, {}, True),
        (20.8, 5.5, {"curve": [Point(100, 1.0, 135.9)]}, True),  # it blew up before the first point
        (5.2, 5.5, {"curve": [Point(100, 1.0, 135.9)]}, False),  # and has come back
        (370.7, 5.5, {"curve": []}, True),
        (3.0, 5.5, {"wasted": {"stale": 10}}, False),
        (3.0, 5.5, {"wasted": {"not_finite": 1}}, True),  # the model is sound, but the training was not
        (-4.9, -3.0, {"curve": [Point(0, 0.0, -5.0)]}, False),  # a loss below 0 says nothing
    ],
)
def test_a_run_has_diverged_by_its_loss_or_by_what_its_islands_trained(loss, begins_at, change, expected):
    assert diverged(replace(SOUND, **change), loss, begins_at) is expected


@pytest.mark.full("trains in every mode, three times")
@pytest.mark.parametrize("mode", ["decoupled", "diloco", "streaming", "data-parallel"])
def test_the_same_seed_gives_the_same_record_and_another_seed_another(mode):
    first, again, other = (
        run_cell(numpy_cell(mode=mode, jitter=0.2 if mode == "decoupled" else 0.0), seed) for seed in (3, 3, 4)
    )
    for name in ("key", "loss", "curve", "tokens", "virtual_s"):
        assert getattr(first, name) == getattr(again, name), name
    assert first.loss != other.loss


@pytest.mark.parametrize("odd", [np.float32(3), 3.0, jax.random.key(0)], ids=["scalar", "number", "key"])
def test_batches_that_cannot_be_joined_are_refused_by_name(odd):
    task = replace(load_task("examples.numpy_task:task", {}), data=lambda share: iter([{"x": np.ones(8), "odd": odd}]))
    with pytest.raises(ConfigError, match=r"batch\['odd'\] = .*: has no axis of examples"):
        lockstep.run(task, numpy_cell(mode="data-parallel", islands=2), 0, task.evaluate)
