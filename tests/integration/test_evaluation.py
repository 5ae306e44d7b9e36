"""Evaluation beside training, in real runs: started by ``up``, killed, and by hand."""

import json
import os
import signal

import pytest

from ops import curve
from tests.local_run import ROOT, Process, Up, check_report, descendants, json_lines, ops, wait_for

pytestmark = pytest.mark.timeout(180)

BENCHMARKS = """
import numpy as np


def norm(params):
    return np.sqrt(sum(float((x**2).sum()) for layer in params.values() for x in layer.values()))


def broken(params):
    raise RuntimeError("this benchmark never works")
"""


def points_in(run_dir):
    return curve.points_of(json_lines(run_dir / curve.FILE))


def follower_of(up):
    """The process that evaluates, if it runs: it has become its command."""
    found = [pid for pid, line in descendants(up.pid).items() if "child.py" not in line and " ops evaluate " in line]
    return next(iter(found), None)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run that is evaluated while it trains, and whose follower is killed once; and what status said then."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "mine.py").write_text(BENCHMARKS)
    flags = ["--islands", 2, "--tokens", 60_000, "--pace", 0.02]
    flags += ["--evaluate-every", 5000, "--benchmark", "mine:norm", "mine:broken", "--json"]
    with Up(folder / "run", *flags, PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)])) as up:
        wait_for(lambda: len(points_in(up.run_dir)) >= 2, "second evaluation", evidence=lambda: up.err)
        os.kill(wait_for(lambda: follower_of(up), "follower"), signal.SIGKILL)
        status = json.loads(ops("status", up.run_dir, "--json").stdout)["evaluation"]
        assert up.wait() == 0
    return up, status


def test_the_curve_goes_from_version_0_to_the_last_model_and_has_no_model_twice(evaluated):
    up, _ = evaluated
    check_report(up.report())
    points = points_in(up.run_dir)
    assert points[0].tokens == 0
    assert not any(points[0].versions)
    assert [each.tokens for each in points] == sorted(each.tokens for each in points)
    assert len({each.model for each in points}) == len(points) >= 4
    assert dict(enumerate(points[-1].versions)) == {int(p): v for p, v in up.report()["versions"].items()}
    assert points[-1].metrics["loss"] < 0.7 * points[0].metrics["loss"]
    assert up.report()["restarts"]["evaluation"] == 1


def test_a_function_of_ones_own_is_on_the_curve_and_a_broken_one_costs_itself_alone(evaluated):
    up, _ = evaluated
    for point in points_in(up.run_dir):
        assert point.metrics.keys() == {"loss", "norm"}
        assert point.better == {"loss": "min"}
        assert point.failed.keys() == {"mine:broken"}
        assert point.failed["mine:broken"].startswith("RuntimeError: this benchmark never works (")


def test_report_and_status_have_the_curve(evaluated):
    up, status = evaluated
    points, report = points_in(up.run_dir), up.report()
    assert status["model"] in {each.model for each in points}
    assert status["metrics"].keys() == {"loss", "norm"}
    assert report["evaluations"]["count"] == len(points)
    assert report["evaluations"]["points"][-1] == {"tokens": points[-1].tokens, "metrics": points[-1].metrics}
    assert report["evaluations"]["best"]["loss"]["value"] == min(each.metrics["loss"] for each in points)
    assert report["loss"]["after"] == pytest.approx(points[-1].metrics["loss"])
    after = ops("status", up.run_dir).stdout
    assert f"evaluated at {points[-1].tokens:,} tokens: loss " in after


def test_the_tape_beside_it_is_replayed_as_ever_and_a_version_is_explained_with_its_evaluation(evaluated):
    up, _ = evaluated
    assert ops("replay", up.run_dir).returncode == 0
    points = points_in(up.run_dir)
    version = points[0].versions[1] + 1
    first = next(each for each in points if each.versions[1] >= version)
    assert ops("explain", f"1:{version}", up.run_dir).stdout.endswith(f"\nfirst {curve.sentence(first)}\n")


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
