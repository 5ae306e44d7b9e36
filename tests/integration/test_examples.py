"""The examples: tasks learn, and the numpy one stays clear of JAX; loops learn too, by one command and few lines."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

from islands.arrays.partition import tensor_specs
from islands.tasks.task import DataShare, Schedule, load_task
from tests.local_run import ROOT, Process

LOOPS = ("own_loop", "equinox_loop", "flax_nnx", "maxtext_shaped", "callback_trainer")
#: Lines that a user adds; another one of the loop's own is changed, where it takes its data.
ADDED = {"own_loop": 4, "equinox_loop": 4, "torch_loop": 3, "torch_fsdp": 3}
ADDED_FOR_A_HOOK = 5
#: Whatever speaks of a run: the interface, an island, a hook.
OURS = re.compile(r"\b(islands|island|hook|atoll)\b(?!\.\w*\.py)")

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("path", "steps", "falls_to"),
    [
        ("examples.numpy_task:task", 400, 0.7),
        pytest.param("examples.equinox_task:task", 150, 0.85, marks=pytest.mark.full("trains for seconds")),
    ],
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
        "import islands.tasks.data, islands.tasks.corpus\n"
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


@pytest.mark.parametrize("name", [*LOOPS, "torch_loop", "torch_fsdp"])
def test_a_loop_joins_by_few_lines_and_they_are_marked(name):
    lines = (ROOT / "examples" / f"{name}.py").read_text().partition("from __future__")[2].splitlines()
    marked = [line for line in lines if "# atoll" in line]
    changed = [line for line in marked if "in place of" in line]
    assert len(marked) - len(changed) == ADDED.get(name, ADDED_FOR_A_HOOK), marked
    assert len(changed) == 1
    code = [re.sub(r'""".*?"""|"[^"]*"', "", line) for line in lines if "# atoll" not in line]
    unmarked = [line for line in code if OURS.search(line)]
    assert unmarked == []


WHOLE = pytest.mark.full("a whole run of each; one of them is in every profile")


@pytest.mark.parametrize("name", [LOOPS[0], *(pytest.param(each, marks=WHOLE) for each in LOOPS[1:])])
def test_a_loop_learns_by_one_command_and_leaves_nothing_behind(name, tmp_path):
    variables = {"TMPDIR": str(tmp_path), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    with Process(tmp_path / "said", module=f"examples.{name}", **variables) as loop:
        assert loop.wait(250) == 0, loop.err
    before, after = map(float, re.search(r"([0-9.]+) before, ([0-9.]+) after", loop.out).groups())
    assert after < 0.7 * before
    if name == "maxtext_shaped":
        assert re.search(r"on 2 devices: NamedSharding\(.*spec=P(artitionSpec)?\(None, 'fsdp'\)", loop.out), loop.out
    assert 'island.left reason="the run has ended"' in loop.err
    assert list(tmp_path.glob("atoll-hub-*")) == []
