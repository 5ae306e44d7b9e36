"""Benchmarks: the user's own functions that judge a model, and what becomes of those that fail."""

import numpy as np
import pytest

from broker.base.errors import ConfigError
from islands import Task
from islands.tasks.benchmarks import Benchmark, judged, load_benchmarks


def task(evaluate, **more):
    functions = dict.fromkeys(("init", "train", "data", "fresh_optimizer"), lambda *_: None)
    return Task(evaluate=evaluate, tokens_per_step=1, **functions, **more)


def benchmark(function, path="mine:probe"):
    return Benchmark(path=path, function=function)


def test_a_number_goes_by_the_name_of_the_function_and_a_mapping_by_its_own():
    numbers = benchmark(lambda params: {"worst": np.float32(0.25), "best": params})
    found = judged(task(lambda params: 2.0), 7, [benchmark(lambda params: np.array([3]), "mine:score"), numbers])
    assert found.metrics == {"loss": 2.0, "score": 3.0, "worst": 0.25, "best": 7.0}
    assert found.better == {"loss": "min"}
    assert found.failed == {}


def test_a_task_may_say_which_values_of_a_benchmark_are_better():
    found = judged(task(lambda _: {"loss": 1.0}, metrics={"score": "max"}), 7, [benchmark(lambda _: 1, "mine:score")])
    assert found.better == {"loss": "min", "score": "max"}


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ("much", "returned 'much': must return a number, or a mapping of names to numbers"),
        ({}, "returned {}: must map names of metrics to numbers"),
        ({3: 1.0}, "returned {3: 1.0}: must map names of metrics to numbers"),
        ([1, 2], "returned [1, 2]: must return a number, or a mapping of names to numbers"),
        ({"loss": 1.0}, "returned the metric loss, which there is already: give it another name"),
    ],
)
def test_what_is_no_number_costs_that_benchmark_alone(returned, why):
    good = benchmark(lambda _: 5, "mine:good")
    found = judged(task(lambda _: 2.0), 7, [benchmark(lambda _: returned), good])
    assert found.metrics == {"loss": 2.0, "good": 5.0}
    assert found.failed == {"mine:probe": why}


def test_one_that_raises_is_told_with_the_line_where():
    def raises(params):
        raise RuntimeError("no connection")

    found = judged(task(raises), 7, [benchmark(lambda _: 1), benchmark(raises, "mine:raises")])
    assert found.metrics == {"probe": 1.0}
    assert set(found.failed) == {"task.evaluate", "mine:raises"}
    assert found.failed["mine:raises"].startswith("RuntimeError: no connection (")
    assert "test_benchmarks.py, line " in found.failed["mine:raises"]


def test_where_nothing_can_be_measured_the_first_failure_is_the_error():
    with pytest.raises(ConfigError, match=r"task.evaluate = .*returned this: it must"):
        judged(task(lambda _: "good"), 7, [benchmark(lambda _: None)])


def test_a_benchmark_is_named_once():
    assert [each.name for each in load_benchmarks(["json:dumps", "math:sqrt"])] == ["dumps", "sqrt"]
    with pytest.raises(ConfigError, match="is named twice"):
        load_benchmarks(["math:sqrt", "math:sqrt"])
