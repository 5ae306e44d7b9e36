"""A run in a process of its own: its record, its progress, when it has diverged, and which sources made it."""

import importlib
import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from broker.wire.errors import ConfigError
from islands.tasks.task import load_task
from ops.lab import worker
from ops.lab.records import Outcome, Point
from ops.lab.settings import cell_settings
from ops.lab.worker import FAR_ABOVE, Progress, digests_of_modules, digests_of_texts, diverged, latest, note, run_cell

SOUND = Outcome(
    params={},
    curve=[Point(0, 0.0, 5.0), Point(100, 1.0, 4.0)],
    tokens=200,
    merged_tokens=190,
    virtual_s=2.0,
    train_s=1.0,
)


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


@pytest.mark.parametrize("mode", ["decoupled", "diloco", "streaming", "data-parallel"])
def test_the_same_seed_gives_the_same_record(mode):
    first, again = (run_cell(numpy_cell(mode=mode, jitter=0.2), 3) for _ in range(2))
    for name in ("key", "loss", "curve", "tokens", "merged_tokens", "virtual_s", "rounds", "staleness", "wasted"):
        assert getattr(first, name) == getattr(again, name), name


@pytest.mark.parametrize("mode", ["decoupled", "data-parallel"])
def test_a_run_tells_every_point_of_its_curve_but_the_last(mode):
    told = []
    record = run_cell(numpy_cell(mode=mode), 0, watch=told.append)
    assert [(each.points, each.of) for each in told] == [(n, 6) for n in range(1, 6)]
    assert [each.loss for each in told] == [loss for _, _, loss in record.curve[:-1]]


def test_of_the_progress_of_a_run_the_last_whole_line_counts(tmp_path):
    path = tmp_path / "run.progress"
    assert latest(path) is None
    for points in (1, 2):
        note(path, Progress(points=points, of=6, loss=1.5))
    with path.open("a") as file:
        file.write('{"points": 3, "of"')
    assert latest(path) == Progress(points=2, of=6, loss=1.5)
    note(tmp_path / "gone" / "run.progress", Progress(points=1, of=6, loss=1.5))  # a full disk costs the line alone


def test_losses_of_a_wrong_shape_are_found_before_anything_is_trained(monkeypatch):
    def trained(*_):
        raise AssertionError("a step was run")

    task = load_task("examples.numpy_task:task", {})
    task = replace(task, losses=lambda params: np.ones((4, 4)), data=trained, train=trained)
    monkeypatch.setattr(worker, "load_task", lambda *_: task)
    with pytest.raises(ConfigError, match="one loss for each sequence"):
        run_cell(numpy_cell(mode="data-parallel"), 0)


# --- sources --------------------------------------------------------------------------------------------------------


def test_the_code_of_a_task_is_what_it_imports_that_is_neither_ours_nor_installed(tmp_path, monkeypatch):
    installed = {name: sys.modules[name] for name in ("math", "json", "numpy", "pytest", "ops.lab.worker")}
    assert digests_of_modules(installed) == {}
    for name in ("own_task_of_a_test", "own_model_of_a_test", "installed_by_a_test"):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is gone after the test
        del sys.modules[name]
    (tmp_path / "own_task_of_a_test.py").write_text("import own_model_of_a_test")
    (tmp_path / "own_model_of_a_test.py").write_text("LAYERS = 2")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_task_of_a_test")
    imported = {name: sys.modules[name] for name in ("own_model_of_a_test", "own_task_of_a_test")}
    first = digests_of_modules(installed | imported)
    (tmp_path / "own_model_of_a_test.py").write_text("LAYERS = 3")
    second = digests_of_modules(installed | imported)
    assert {name for name in first if first[name] != second[name]} == {"own_model_of_a_test"}
    elsewhere = tmp_path / "lib" / "python3" / "dist-packages"
    elsewhere.mkdir(parents=True)
    (elsewhere / "installed_by_a_test.py").write_text("")
    monkeypatch.syspath_prepend(elsewhere)
    assert digests_of_modules({"installed_by_a_test": importlib.import_module("installed_by_a_test")}) == {}


def test_text_of_the_users_own_has_a_digest_of_what_is_trained_on(tmp_path):
    def digest():
        (found,) = digests_of_texts(cell_settings({"task.data": [str(tmp_path), "python:stdlib"]})).values()
        return found

    (tmp_path / "a.txt").write_text("text")
    before = digest()
    (tmp_path / "image").write_bytes(b"\x89\0\0")  # no text: nobody trains on it
    assert digest() == before
    (tmp_path / "a.txt").write_text("another")
    assert digest() != before


@pytest.mark.parametrize("data", ["/", ["gone.txt"], [3]])
def test_data_that_the_run_refuses_are_not_looked_at_before(data):
    assert digests_of_texts(cell_settings({"task.data": data})) == {}


def test_a_large_array_counts_by_its_size_and_its_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "WHOLE_BYTES", 16)
    array, digests = tmp_path / "tokens.bin", []
    for content in (b"a" * 100, b"a" * 101, b"b" + b"a" * 99, b"a" * 99 + b"b", b"a" * 50 + b"b" + b"a" * 49):
        array.write_bytes(content)
        digests += digests_of_texts(cell_settings({"task.data": [str(array)]})).values()
    assert len(set(digests)) == 4
    assert digests[0] == digests[4], "the middle is not looked at"
