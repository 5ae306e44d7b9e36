"""Evaluation beside training, in a run that ``up`` evaluates, and whose follower was killed once."""

import signal

import pytest

from ops import curve
from tests.local_run import Process, Up, check_report, ops, wait_for
from tests.recorded.recording import points_in

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
    after = ops("status", plain.run_dir).stdout
    assert f"evaluated at {points[-1].tokens:,} tokens: loss " in after


def test_the_tape_beside_it_is_replayed_as_ever_and_a_version_is_explained_with_its_evaluation(plain):
    assert ops("replay", plain.run_dir).returncode == 0
    points = points_in(plain.run_dir)
    version = points[0].versions[1] + 1
    first = next(each for each in points if each.versions[1] >= version)
    assert ops("explain", f"1:{version}", plain.run_dir).stdout.endswith(f"\nfirst {curve.sentence(first)}\n")


@pytest.mark.full("a whole run of its own")
def test_a_run_is_followed_by_hand_left_and_followed_to_its_end(tmp_path):
    with Up(tmp_path / "run", "--islands", 2, "--tokens", 80_000, "--pace", 0.02, "--json") as up:
        up.wait_for_progress()
        follow = ["evaluate", "--follow", up.run_dir, "--every", "4K"]
        with Process(tmp_path / "first", *follow) as first:
            wait_for(lambda: len(points_in(up.run_dir)) >= 2, "evaluation", evidence=lambda: first.err)
            second = ops(*follow)
            assert second.returncode == 2
            assert "another process follows this run already" in second.stderr
            first.signal(signal.SIGINT)
            assert first.wait() == 130
            assert first.err.endswith(f" evaluations are in {up.run_dir / curve.FILE}\n")
        with Process(tmp_path / "again", *follow) as again:
            assert up.wait() == 0
            assert again.wait() == 0, again.err
            assert again.err == "" or "evaluation goes on" in again.err  # Redis may have ended first
    points = points_in(up.run_dir)
    assert len({each.model for each in points}) == len(points) >= 3
    assert dict(enumerate(points[-1].versions)) == {int(p): v for p, v in up.report()["versions"].items()}
    assert points[-1].metrics["loss"] == pytest.approx(up.report()["loss"]["after"])
    assert first.out.splitlines() + again.out.splitlines() == list(map(curve.sentence, points))
    once_more = ops(*follow)
    assert (once_more.returncode, once_more.stdout) == (0, "")
