"""The examples are tasks like any other: each learns, and the numpy one stays clear of JAX."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

from islands.arrays.partition import tensor_specs
from islands.tasks.task import DataShare, Schedule, load_task

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("path", "steps", "falls_to"), [("examples.numpy_task:task", 400, 0.7), ("examples.equinox_task:task", 150, 0.85)]
)
def test_an_example_task_learns_and_its_data_follow_the_cursor(path, steps, falls_to):
    task = load_task(path, {})
    params, state = task.init(0)
    before = task.evaluate(params)
    share = DataShare(index=1, count=2)
    for step, batch in enumerate(islice(task.data(share), steps)):
        params, state, _ = task.train(params, state, batch, Schedule(step, steps))
    assert task.evaluate(params) < falls_to * before
    resumed = next(task.data(DataShare(index=1, count=2, cursor=steps - 1)))
    other = next(task.data(DataShare(index=0, count=2, cursor=steps - 1)))
    assert all(np.array_equal(a, b) for a, b in zip(resumed, batch, strict=True))
    assert not np.array_equal(other[0], batch[0])
    assert {str(spec.kind) for spec in tensor_specs(params, task.kinds, task.unit_axes)} == {"rda", "mean"}


def test_the_numpy_task_trains_without_importing_jax():
    code = (
        "import sys\n"
        "from islands.arrays.partition import tensor_specs\n"
        "from islands.tasks.task import DataShare, Schedule, load_task\n"
        "task = load_task('examples.numpy_task:task', {})\n"
        "params, state = task.init(0)\n"
        "batch = next(task.data(DataShare(index=0, count=1)))\n"
        "params, state, loss = task.train(params, state, batch, Schedule(0, 0))\n"
        "tensor_specs(params, task.kinds)\n"
        "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
