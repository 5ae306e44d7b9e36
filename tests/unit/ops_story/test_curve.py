"""The curve of a run: when an evaluation is due, what a line holds, what a report and people are told."""

import json
import math
from dataclasses import replace

import pytest

from ops.story import curve
from ops.story.curve import Point


def point(tokens, loss=1.0, **more):
    values = {
        "tokens": tokens,
        "versions": (tokens // 100, tokens // 100),
        "model": f"digest {tokens}",
        "at": 1_800_000_000.5,
        "seconds": 0.25,
        "metrics": {"loss": loss},
        "better": {"loss": "min"},
    }
    return Point(**(values | more))


@pytest.mark.parametrize(
    ("tokens", "before", "due"),
    [
        (0, None, True),  # nothing was evaluated yet
        (99, 0, False),
        (100, 0, True),
        (150, 100, False),
        (199, 120, False),
        (200, 199, True),  # the grid holds, however late the one before was
        (730, 250, True),  # those that an evaluation took too long for are left out
        (250, 730, True),  # a new lineage
        (730, 750, False),
    ],
)
def test_an_evaluation_is_due_at_each_multiple(tokens, before, due):
    assert curve.is_due(tokens, before, every=100) is due


def test_a_line_holds_tokens_versions_time_and_metrics():
    line = json.loads(json.dumps(point(400, failed={"my:probe": "no"}).to_json(), allow_nan=False))
    assert line == {
        "tokens": 400,
        "versions": [4, 4],
        "model": "digest 400",
        "at": 1_800_000_000.5,
        "seconds": 0.25,
        "metrics": {"loss": 1.0},
        "better": {"loss": "min"},
        "failed": {"my:probe": "no"},
    }
    assert Point.of(line) == point(400, failed={"my:probe": "no"})


def test_a_standard_error_stands_beside_its_metric():
    found = replace(point(400), metrics={"mc/acc": 0.65, "loss": 1.0, "x/tokens": 1080.0}, stderr={"mc/acc": 0.0764})
    assert Point.of(json.loads(json.dumps(found.to_json()))) == found
    assert curve.table(found) == [("loss", "1.000"), ("mc/acc", "0.650 ± 0.076"), ("x/tokens", "1,080")]
    assert curve.sentence(found) == "evaluated at 400 tokens: loss 1.000, mc/acc 0.650 ± 0.076, x/tokens 1,080"


def test_what_is_not_finite_is_no_number():
    line = json.loads(json.dumps(point(400, math.nan).to_json(), allow_nan=False))
    assert line["metrics"] == {"loss": None}
    read = Point.of(line)
    assert curve.sentence(read) == "evaluated at 400 tokens: loss no number"
    assert curve.summary([read])["best"] == {}


@pytest.mark.parametrize("line", [{}, {"tokens": 4}, {**point(4).to_json(), "metrics": [1]}, {"tokens": None}])
def test_a_line_of_somebody_else_is_passed_over(line):
    assert curve.points_of([line, point(8).to_json()]) == [point(8)]


def test_the_loss_is_told_first_and_failures_last():
    found = point(1200, metrics={"accuracy": 0.5, "loss": 2.0}, failed={"my:probe": "ValueError: odd"})
    told = "evaluated at 1,200 tokens: loss 2.000, accuracy 0.500; my:probe failed: ValueError: odd"
    assert curve.sentence(found) == told


def test_a_report_has_the_first_the_last_and_the_best_of_a_long_curve():
    losses = [5.0 - 0.04 * k for k in range(101)]
    losses[70] = 0.5
    found = curve.summary([point(100 * k, loss) for k, loss in enumerate(losses)])
    assert found["count"] == 101
    assert len(found["points"]) == curve.REPORTED_POINTS
    assert (found["points"][0]["tokens"], found["points"][-1]["tokens"]) == (0, 10_000)
    assert found["best"] == {"loss": {"value": 0.5, "tokens": 7000}}
    assert curve.summary([]) == {}


def test_more_is_better_where_the_task_says_so_and_nothing_is_best_where_nobody_does():
    def at(tokens, accuracy):
        metrics = {"accuracy": accuracy, "norm": 3.0}
        return point(tokens, metrics=metrics, better={"accuracy": "max"})

    found = curve.summary([at(0, 0.1), at(100, 0.9), at(200, 0.8)])
    assert found["best"] == {"accuracy": {"value": 0.9, "tokens": 100}}
    assert curve.shown(found) == [
        "accuracy 0.100 at 0 -> 0.900 at 100 -> 0.800 at 200 tokens; best 0.900 at 100",
        "norm 3.000 at 0 -> 3.000 at 100 -> 3.000 at 200 tokens",
    ]


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9, 1000])
def test_few_of_many_are_spread_from_the_first_to_the_last(count):
    chosen = curve.some(range(count), 4)
    assert len(chosen) == min(count, 4)
    assert (chosen[0], chosen[-1]) == (0, count - 1)
    assert chosen == sorted(set(chosen))


def test_a_version_is_first_in_the_model_that_has_it_or_a_later_one():
    points = [point(0), point(300), point(700)]
    assert curve.first_with(points, 1, 0) == points[0]
    assert curve.first_with(points, 1, 3) == points[1]
    assert curve.first_with(points, 1, 4) == points[2]
    assert curve.first_with(points, 1, 8) is None
    assert curve.first_with(points, 2, 0) is None
