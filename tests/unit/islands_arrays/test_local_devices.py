"""One island on several devices learns what it learns on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from islands.arrays.tree import devices_of

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(600)  # it compiles: the limit is for a hang

#: Trains a few steps of the reference task, and says how it went.
SCRIPT = """
import json, sys
import jax, numpy as np
from islands.arrays.tree import devices_of
from islands.tasks.task import DataShare, Schedule, endless_batches, load_task

options = {"model": "tiny", "data": [sys.argv[1]], "batch": 8}
task = load_task("islands.language:task", options)
params, state = task.init(3)
batches = endless_batches(task, DataShare(index=0, count=1, seed=5))
losses = []
for step in range(12):
    params, state, loss = task.train(params, state, next(batches), Schedule(step, 100))
    losses.append(float(loss))
whole = all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves((params, state)))
fresh = task.fresh_optimizer(params)
print(json.dumps({
    "losses": losses, "devices": devices_of(params), "fresh": devices_of(fresh), "whole": whole,
    "evaluated": float(np.asarray(task.evaluate(params))),
}))
"""


def trained(tmp_path, devices):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 4000)
    flags = f"--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(text)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.full("compiles in processes of their own")
def test_four_devices_have_the_losses_of_one(tmp_path):
    one, four = (json.loads(trained(tmp_path, devices).stdout.splitlines()[-1]) for devices in (1, 4))
    assert one["devices"] == "cpu:0"
    assert four["devices"] == four["fresh"] == "cpu:0, cpu:1, cpu:2, cpu:3"
    assert four["whole"]  # each of them has all parameters
    assert four["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert four["losses"][-1] < four["losses"][0]
    assert four["evaluated"] == pytest.approx(one["evaluated"], rel=1e-3)


def test_a_batch_that_cannot_be_split_is_refused_with_its_cure(tmp_path):
    done = trained(tmp_path, 3)
    assert done.returncode != 0
    assert "must divide among the 3 devices of this island" in done.stderr


def test_arrays_of_numpy_are_in_the_memory_of_the_host():
    assert devices_of({"w": np.ones(2), "layers": [np.zeros(1)]}) == "host"
