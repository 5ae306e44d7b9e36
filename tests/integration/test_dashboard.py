"""The page of a run, as it was served beside it: who is killed is seen, a version explained, a report one file."""

import socket
import subprocess
import sys

import pytest

from aggregator.store.segments import closed_of
from tests.live_views import dashboard
from tests.local_run import Up, wait_for

pytestmark = pytest.mark.timeout(240)


def test_the_page_of_a_live_run_shows_a_killed_island_within_seconds_and_its_return(watched):
    assert watched.seen["lost_after_s"] < 10  # 2 s of silence, and a look; more beside other load
    frame = watched.seen["frame"]
    assert frame["islands"]["island-1"]["lives"] == 2
    assert frame["present"]["leaders"]["0"]["epoch"] == 1
    for explained in watched.seen["pages"]:  # from the run's directory, and through its broker
        assert {each["island"] for each in explained["contributors"]} <= {"island-0", "island-1"}
    assert watched.seen["missing"] == 404


def test_the_page_of_a_run_that_was_stopped_has_its_history_and_its_report_is_one_file(watched, tmp_path):
    before = watched.seen["frame"]
    run_dir = watched.copy(tmp_path).run_dir
    assert len(closed_of(run_dir / "events.jsonl")) > 2, "its history is read from segments"
    with dashboard(run_dir) as page:
        wait_for(lambda: page.data("frame")["phase"] == "stopped", "the end of its history", 20)
        frame = page.data("frame")
        assert frame["run"] == before["run"]
        assert frame["changes"] >= before["changes"]
        assert {each["state"] for each in frame["islands"].values()} <= {"stopped", "left"}
        assert b"page/dashboard.js" in page.ask("")
        assert b"uPlot" in page.ask("page/vendor/uplot.js")
    done = subprocess.run(
        [sys.executable, "-m", "ops", "plot", str(run_dir)], capture_output=True, text=True, check=True
    )
    report = (run_dir / "report.html").read_text(encoding="utf-8")
    assert done.stdout.strip() == str(run_dir / "report.html")
    assert "src=" not in report
    assert frame["run"] in report


def test_up_serves_the_page_with_the_run_and_leaves_it_as_one_file(plain):
    assert plain.seen["frame"]["islands"].keys() == {"island-0", "island-1"}
    assert plain.seen["page_after"] is None
    assert "island-0" in (plain.run_dir / "report.html").read_text(encoding="utf-8")


def test_a_port_that_is_taken_is_said_before_anything_is_started(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Up(tmp_path / "run", "--dashboard", port) as up:
            assert up.wait() == 1
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in up.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "RUN_DIR"),
        (["{tmp}"], "must be the directory of a run"),
        (["--redis", "redis://127.0.0.1:1", "--port", "99999"], "between 0 and 65535"),
    ],
)
def test_what_cannot_be_shown_is_said_with_the_cure(tmp_path, arguments, said):
    command = [sys.executable, "-m", "ops", "dashboard", *(each.format(tmp=tmp_path) for each in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
