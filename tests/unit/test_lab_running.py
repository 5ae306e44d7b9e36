"""When a run of the laboratory has gone wrong, and what a record says of the code that made it."""

import importlib
import math
import sys
from dataclasses import replace

from ops.lab import running
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


def test_the_code_of_a_task_is_what_it_imports_that_is_neither_ours_nor_installed(tmp_path, monkeypatch):
    imported = {"math": math, "ops.lab.running": running, "importlib": importlib}
    monkeypatch.setattr(sys, "modules", dict(imported))
    assert running._task_code() == ""
    (tmp_path / "own_task_of_a_test.py").write_text("import own_model_of_a_test")
    (tmp_path / "own_model_of_a_test.py").write_text("LAYERS = 2")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_task_of_a_test")
    first = running._task_code()
    assert first
    (tmp_path / "own_model_of_a_test.py").write_text("LAYERS = 3")
    assert running._task_code() not in ("", first), "what it imports is a part of it"
