"""When a run of the laboratory has gone wrong, and what a record says of the code that made it."""

import importlib
import math
import sys
import tempfile
from dataclasses import replace

import numpy as np
import pytest

from broker.wire.errors import ConfigError
from islands.tasks.task import load_task
from ops.lab import processors, runner, running, sources
from ops.lab.outcome import Outcome, Point
from ops.lab.running import FAR_ABOVE, diverged
from ops.lab.settings import cell_settings

SOUND = Outcome(
    params={},
    curve=[Point(0, 0.0, 5.0), Point(100, 1.0, 4.0)],
    tokens=200,
    merged_tokens=190,
    virtual_s=2.0,
    train_s=1.0,
)


def test_a_run_has_diverged_by_its_loss():
    assert not diverged(SOUND, 3.0, 5.5)
    assert not diverged(SOUND, 0.99 * FAR_ABOVE * 5.0, 5.5)
    assert diverged(SOUND, 1.01 * FAR_ABOVE * 5.0, 5.5)
    assert diverged(SOUND, math.nan, 5.5)
    assert diverged(SOUND, math.inf, 5.5)


def test_a_run_that_blew_up_before_anybody_looked_has_diverged():
    exploded = replace(SOUND, curve=[Point(100, 1.0, 135.9), Point(200, 2.0, 81.1)])
    assert diverged(exploded, 20.8, 5.5)
    assert not diverged(exploded, 5.2, 5.5), "it has come back"
    assert diverged(replace(SOUND, curve=[]), 370.7, 5.5), "with one point, the last, there is no curve to begin"


def test_a_run_whose_islands_trained_what_is_not_finite_has_diverged_though_its_model_is_sound():
    assert not diverged(replace(SOUND, wasted={"stale": 10}), 3.0, 5.5)
    assert diverged(replace(SOUND, wasted={"stale": 10, "not_finite": 1}), 3.0, 5.5)


def test_the_code_of_a_task_is_what_it_imports_that_is_neither_ours_nor_installed(tmp_path, monkeypatch):
    installed = {name: sys.modules[name] for name in ("math", "json", "numpy", "pytest", "ops.lab.running")}
    assert sources.of_modules(installed) == {}
    for name in ("own_task_of_a_test", "own_model_of_a_test", "installed_by_a_test"):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is gone after the test
        del sys.modules[name]
    (tmp_path / "own_task_of_a_test.py").write_text("import own_model_of_a_test")
    (tmp_path / "own_model_of_a_test.py").write_text("LAYERS = 2")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_task_of_a_test")
    imported = {name: sys.modules[name] for name in ("own_model_of_a_test", "own_task_of_a_test")}
    first = sources.of_modules(installed | imported)
    assert list(first) == ["own_model_of_a_test", "own_task_of_a_test"]
    (tmp_path / "own_model_of_a_test.py").write_text("LAYERS = 3")
    second = sources.of_modules(installed | imported)
    assert {name for name in first if first[name] != second[name]} == {"own_model_of_a_test"}
    elsewhere = tmp_path / "lib" / "python3" / "dist-packages"
    elsewhere.mkdir(parents=True)
    (elsewhere / "installed_by_a_test.py").write_text("")
    monkeypatch.syspath_prepend(elsewhere)
    assert sources.of_modules({"installed_by_a_test": importlib.import_module("installed_by_a_test")}) == {}


def test_a_loss_that_begins_at_or_below_0_says_nothing_of_divergence():
    below = replace(SOUND, curve=[Point(0, 0.0, -5.0)])
    assert not diverged(below, -4.9, -3.0)
    assert not diverged(below, -6.0, -3.0)


@pytest.mark.parametrize("shape", [(0,), (4, 4), ()])
def test_losses_are_one_for_each_sequence(shape):
    task = load_task("examples.numpy_task:task", {})
    with pytest.raises(ConfigError, match="one loss for each sequence"):
        running._judged(replace(task, losses=lambda params: np.ones(shape)), {})


def test_losses_of_a_wrong_shape_are_found_before_anything_is_trained(monkeypatch):
    def trained(*_):
        raise AssertionError("a step was run")

    task = load_task("examples.numpy_task:task", {})
    task = replace(task, losses=lambda params: np.ones((4, 4)), data=trained, train=trained)
    monkeypatch.setattr(running, "load_task", lambda *_: task)
    cell = cell_settings({"task": "examples.numpy_task:task", "mode": "data-parallel", "steps": 4})
    with pytest.raises(ConfigError, match="one loss for each sequence"):
        running.run_cell(cell, 0)


def test_two_runs_have_two_processors_while_there_are_some(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda _: {5, 3})
    first, second = processors.take(0), processors.take(0)
    assert (first.cpus, second.cpus) == ((3,), (5,))
    assert [processors.take(turn).cpus for turn in range(3)] == [(3,), (5,), (3,)], "by turns where none is free"
    first.free()
    third = processors.take(1)
    assert third.cpus == (3,)
    second.free(), third.free()
    assert processors.Processor(None).cpus == (), "of an accelerator's run"


TRACEBACK = """noise
Traceback (most recent call last):
  File "/lab/worker.py", line 3, in <module>
    run()
  File "/mine/task.py", line 26, in train
    raise RuntimeError("no data")
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
RuntimeError: no data
"""


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (TRACEBACK, 'File "/mine/task.py", line 26, in train / raise RuntimeError("no data") / RuntimeError: no data'),
        ("a\nb\nc\nd\n", "b / c / d"),
        ("", "it said nothing"),
        (None, "it said nothing"),
    ],
)
def test_a_run_that_failed_is_told_by_where_and_what(tmp_path, log, told):
    if log is not None:
        (tmp_path / "run.log").write_text(log)
    assert runner._why(1, tmp_path / "run.log") == f"failed with status 1: {told}"
    assert runner._why(-9, tmp_path / "run.log").startswith("killed by SIGKILL")
