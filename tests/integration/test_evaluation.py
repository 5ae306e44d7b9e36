"""Evaluation beside training, in a run that ``up`` evaluates, and whose follower was killed once."""

import pytest

from ops.story import curve
from tests.local_run import check_report
from tests.recorded.recording import points_in, said

pytestmark = pytest.mark.timeout(180)


def test_the_curve_goes_from_version_0_to_the_last_model_and_has_no_model_twice(plain):
    check_report(plain.report())
    points = points_in(plain.run_dir)
    assert points[0].tokens == 0
    assert not any(points[0].versions)
    assert [each.tokens for each in points] == sorted(each.tokens for each in points)
    assert len({each.model for each in points}) == len(points) >= 4
    assert dict(enumerate(points[-1].versions)) == {int(p): v for p, v in plain.report()["versions"].items()}
    assert points[-1].metrics["loss"] < 0.7 * points[0].metrics["loss"]
    assert plain.report()["restarts"]["evaluation"] == 1


def test_a_function_of_ones_own_is_on_the_curve_and_a_broken_one_costs_itself_alone(plain):
    for point in points_in(plain.run_dir):
        assert point.metrics.keys() == {"loss", "norm"}
        assert point.better == {"loss": "min"}
        assert point.failed.keys() == {"mine:broken"}
        assert point.failed["mine:broken"].startswith("RuntimeError: this benchmark never works (")


def test_report_and_status_have_the_curve(plain):
    points, report = points_in(plain.run_dir), plain.report()
    status = plain.seen["evaluation"]
    assert status["model"] in {each.model for each in points}
    assert status["metrics"].keys() == {"loss", "norm"}
    assert report["evaluations"]["count"] == len(points)
    assert report["evaluations"]["points"][-1] == {"tokens": points[-1].tokens, "metrics": points[-1].metrics}
    assert report["evaluations"]["best"]["loss"]["value"] == min(each.metrics["loss"] for each in points)
    assert report["loss"]["after"] == pytest.approx(points[-1].metrics["loss"])
    after = said("status", plain.run_dir)
    assert f"evaluated at {points[-1].tokens:,} tokens: loss " in after


def test_the_tape_beside_it_is_replayed_as_ever_and_a_version_is_explained_with_its_evaluation(plain):
    assert said("replay", plain.run_dir)
    points = points_in(plain.run_dir)
    version = points[0].versions[1] + 1
    first = next(each for each in points if each.versions[1] >= version)
    assert said("explain", f"1:{version}", plain.run_dir).endswith(f"\nfirst {curve.sentence(first)}\n")
