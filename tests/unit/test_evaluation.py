"""The curve of a run: when a model is evaluated, what is kept of it, and that a restart evaluates none twice."""

import json
import sys
import types
from dataclasses import replace

import numpy as np
import pytest

from broker.wire.errors import ConfigError, Unavailable
from examples import numpy_task
from islands.tasks.benchmarks import Judgement, judged, load_benchmarks
from ops import curve
from ops.curve import Point
from ops.evaluation.curve_file import CurveFile, read_points
from ops.evaluation.follower import Follower
from ops.inspect.global_model import Which

POINT = Point(
    tokens=100,
    versions=(1, 2),
    model="m1",
    at=5.0,
    seconds=0.1,
    metrics={"accuracy": 0.5, "loss": 2.0},
    better={"accuracy": "max", "loss": "min"},
)


# --- the curve --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "before", "due"),
    [(0, None, True), (99, 0, False), (100, 99, True), (199, 100, False), (350, 100, True), (50, 350, True)],
)
def test_models_are_due_on_a_grid_of_tokens(tokens, before, due):
    assert curve.is_due(tokens, before, 100) is due


def test_a_point_comes_back_from_its_line_and_other_lines_are_passed_over():
    lines = [json.loads(json.dumps(POINT.to_json())), {"note": "x"}, {**POINT.to_json(), "metrics": [1]}]
    assert curve.points_of(lines) == [POINT]
    assert curve.sentence(POINT) == "evaluated at 100 tokens: loss 2.000, accuracy 0.500"


def test_a_report_has_first_last_and_best_of_a_long_curve():
    points = [
        replace(POINT, tokens=k, metrics={"loss": abs(k - 30) + 1.0, "accuracy": 1 - abs(k - 10) / 100, "other": 1.0})
        for k in range(50)
    ]
    summed = curve.summary(points)
    assert summed["count"] == 50
    assert len(summed["points"]) == curve.REPORTED_POINTS
    assert [summed["points"][k]["tokens"] for k in (0, -1)] == [0, 49]
    assert summed["best"] == {"loss": {"value": 1.0, "tokens": 30}, "accuracy": {"value": 1.0, "tokens": 10}}
    assert [line.partition(" ")[0] for line in curve.shown(summed)] == ["loss", "accuracy", "other"]
    assert curve.summary([]) == {}


def test_the_file_has_one_writer_and_survives_a_line_that_was_cut_short(tmp_path):
    file = CurveFile(tmp_path)
    with pytest.raises(ConfigError, match="another process follows this run"):
        CurveFile(tmp_path)
    file.append(POINT)
    file.close()
    with (tmp_path / curve.FILE).open("a") as torn:
        torn.write('{"tokens": 2')
    again = CurveFile(tmp_path)
    again.append(replace(POINT, tokens=200))
    again.close()
    assert [point.tokens for point in read_points(tmp_path)] == [100, 200]


# --- following --------------------------------------------------------------------------------------------------------


class Model:
    def __init__(self, tokens, digest):
        self.tokens, self.digest, self.run_id, self.versions, self.tensors = tokens, digest, "demo", (tokens,), {}


class Run:
    """A run that trains so many tokens each time that somebody looks, and ends."""

    def __init__(self, tokens, *, end=1000):
        self.trained, self.step, self.end, self.seen = 0, tokens, end, []

    def tokens(self):
        return self.trained

    def model(self, which=Which.NEWEST):
        tokens = 0 if which is Which.SEED else self.trained
        return Model(tokens, f"m{tokens}")

    def has_ended(self):
        return self.trained >= self.end

    def is_abandoned(self):
        return False

    def go_on(self, _seconds):
        self.trained = min(self.end, self.trained + self.step)


def followed(tmp_path, run, every, judge=None):
    file, said, published = CurveFile(tmp_path), [], []
    follower = Follower(
        run,
        file,
        every=every,
        judge=judge or (lambda tensors, source: Judgement(metrics={"loss": 1.0})),
        publish=lambda point: published.append(point.model),
        say=said.append,
        sleep=run.go_on,
    )
    follower.follow()
    file.close()
    return file, said, published


def test_version_0_the_grid_and_the_last_model_are_evaluated_each_once(tmp_path):
    file, said, published = followed(tmp_path, Run(70), every=300)
    assert [point.tokens for point in file.points] == [0, 350, 630, 910, 1000]
    assert len(said) == len(file.points)
    assert set(published) == {point.model for point in file.points}
    again, said, _ = followed(tmp_path, Run(1000), every=300)
    assert [point.tokens for point in again.points] == [0, 350, 630, 910, 1000]
    assert said == []


def test_a_disk_that_takes_nothing_is_told_once_and_the_run_is_followed(tmp_path, monkeypatch):
    def full(self, point):
        self.points.append(point)
        raise Unavailable("cannot write: no space left on device", definite=True)

    monkeypatch.setattr(CurveFile, "append", full)
    file, said, _ = followed(tmp_path, Run(100), every=500)
    assert [point.tokens for point in file.points] == [0, 500, 1000]
    assert sum("no space left" in line for line in said) == 1


# --- benchmarks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(monkeypatch):
    module = types.ModuleType("mine")
    module.size = len
    module.several = lambda params: {"a": 1, "b": np.float32(2)}
    module.broken = lambda params: 1 / 0
    module.text = lambda params: "good"
    module.pair = lambda params, more: 0
    monkeypatch.setitem(sys.modules, "mine", module)


def test_functions_of_ones_own_stand_beside_the_task_and_a_broken_one_costs_its_numbers_alone(mine):
    task = numpy_task.task()
    params, _ = task.init(0)
    found = judged(task, params, load_benchmarks(["mine:size", "mine:several", "mine:broken", "mine:text"]))
    assert found.metrics["size"] == len(params)
    assert (found.metrics["a"], found.metrics["b"]) == (1.0, 2.0)
    assert "loss" in found.metrics
    assert found.failed.keys() == {"mine:broken", "mine:text"}
    assert "ZeroDivisionError" in found.failed["mine:broken"]


@pytest.mark.parametrize(
    ("path", "cure"), [("mine:none", "no function none"), ("mine:pair", "must take the parameters alone"), ("x", ":")]
)
def test_a_benchmark_that_cannot_be_one_is_refused_at_once(mine, path, cure):
    with pytest.raises(ConfigError) as refused:
        load_benchmarks([path])
    assert refused.value.field == "benchmark"
    assert cure in str(refused.value)
