"""Tasks of PyTorch, and the examples: a loop stays a loop, a trainer a trainer, and the task runs with ``up``."""

import json
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from broker.base.errors import ConfigError
from islands.tasks.evaluate import place
from islands.tasks.task import DataShare, Schedule, held_out_loss, load_task
from tests.hub import WAIT_S, Hub
from tests.local_run import ops

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.timeout(600)


def trained(task, steps):
    params, state = task.init(0)
    for number, batch in enumerate(islice(task.data(DataShare(index=0, count=1)), steps)):
        params, state, loss = task.train(params, state, batch, Schedule(number, steps))
    return params, state, loss


def test_the_example_task_learns_and_its_exported_model_is_evaluated_in_the_tasks_own_module():
    task, again = (load_task("examples.torch_task:task", {}) for _ in range(2))
    before = held_out_loss(task, task.init(0)[0])
    params, state, loss = trained(task, 300)
    assert held_out_loss(task, params) < 0.7 * before
    assert isinstance(loss, float)
    arrays = {name: leaf.to_host().copy() for name, leaf in params.items() if name.endswith(("weight", "bias"))}
    placed = place(again, arrays, source="a run")
    assert np.array_equal(placed["3.weight"].to_host(), arrays["3.weight"])
    assert held_out_loss(again, placed) < 2 * before
    assert state.optimizers[0].state
    assert task.fresh_optimizer(params) is state
    assert not state.optimizers[0].state, "it has seen no step"


def test_the_same_seed_begins_alike_and_leaves_the_random_numbers_of_training_alone():
    task = load_task("examples.torch_task:task", {})
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = (task.init(seed)[0]["0.weight"].to_host().copy() for seed in (3, 3, 4))
    assert torch.equal(torch.rand(3), expected)
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)


def test_options_of_the_example_are_checked():
    with pytest.raises(ConfigError, match=r"task.hidden = 0"):
        load_task("examples.torch_task:task", {"hidden": 0})


def test_the_loop_trains_in_a_process_without_jax_and_its_loss_falls(tmp_path):
    code = (
        "import sys, runpy\n"
        "sys.argv = ['torch_loop', sys.argv[1], '--run', 'demo']\n"
        "runpy.run_module('examples.torch_loop', run_name='__main__')\n"
        "assert 'jax' not in sys.modules\n"
    )
    with Hub(tmp_path / "store", total_tokens=256 * 60, fragments=1, sync_interval=10) as hub:
        done = subprocess.run(
            [sys.executable, "-c", code, hub.address],
            cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=4 * WAIT_S,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"done: loss ([\d.]+) nats per byte", done.stdout).group(1)) < 4.5, "5.5 at random"


def test_two_processes_of_fsdp_train_as_one_island_by_one_command_and_leave_nothing_behind(tmp_path):
    done = of_its_own("torch_fsdp", tmp_path)
    hosts = re.findall(r'island\.joined island=(\S+) .*?(?:host="(.*)")?$', done.stderr, re.MULTILINE)
    assert sorted(hosts) == [("island-0", ""), ("island-0", "1 of 2")]


def test_a_trainer_of_hugging_face_is_an_island_by_a_callback(tmp_path):
    done = of_its_own("hf_trainer", tmp_path, HF_HUB_OFFLINE="1")
    steps, tokens = map(int, re.search(r"has ended\" step=(\d+) tokens=(\d+)", done.stderr).groups())
    assert steps >= 100, "the run has ended training, not the trainer or its data"
    assert tokens == steps * 16 * 17


def of_its_own(name, folder, **variables):
    """Returns what an example did that is given no address; its loss has fallen, and its island left in order."""
    variables |= {"ATOLL_NO_VENV": "1", "TMPDIR": str(folder)}
    command = [sys.executable, "-m", f"examples.{name}"]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.search(r"([0-9.]+) before, ([0-9.]+) after", done.stdout).groups())
    assert after < 0.7 * before
    assert 'island.left reason="the run has ended"' in done.stderr
    assert list(folder.glob("atoll-hub-*")) == []
    return done


def test_up_runs_two_islands_of_the_example_task_and_the_loss_falls(tmp_path):
    options = ["--islands", 2, "--tokens", 40_000, "--run-dir", tmp_path / "run", "--json"]
    done = ops("up", "--task", "examples.torch_task:task", *options, within_s=500, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["loss"]["after"] < 0.6 * report["loss"]["before"], report
