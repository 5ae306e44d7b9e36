"""The page of a run, served beside it: who was killed is seen, a version is explained, a report is one file."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from ops.processes.cluster import free_ports
from tests.local_run import Up, wait_for

pytestmark = pytest.mark.timeout(240)


class Page:
    """What the server at an address answers."""

    def __init__(self, address):
        self.address = address

    def ask(self, path):
        with urlopen(f"{self.address}/{path}", timeout=10) as answer:
            return answer.read()

    def data(self, path):
        return json.loads(self.ask(path))


@contextmanager
def dashboard(*arguments):
    """Starts one, yields its page, and ends it as a person does."""
    command = [sys.executable, "-m", "ops", "dashboard", *map(str, arguments), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Page(re.search(r"http://[^/\s]+", process.stderr.readline()).group())
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_the_page_of_a_live_run_shows_a_killed_island_within_seconds_and_its_return(tmp_path):
    run_dir = tmp_path / "run"
    with Up(run_dir, "--islands", 2, "--tokens", 0, "--pace", 0.02) as up:
        wait_for(lambda: (run_dir / "events.jsonl").exists() and (run_dir / "redis-url").exists(), "a run", 60)
        with dashboard(run_dir) as page:
            wait_for(lambda: min(page.data("frame")["fragments"], default=0) > 1, "versions", 60)
            assert {each["state"] for each in page.data("frame")["islands"].values()} == {"alive"}
            with up.nobody_restarts():
                up.kill("island-1")
                killed_at_s = time.monotonic()
                wait_for(lambda: page.data("frame")["islands"]["island-1"]["state"] != "alive", "the loss is seen", 20)
                assert time.monotonic() - killed_at_s < 10  # 2 s of silence, and a look; more beside other load
            wait_for(lambda: page.data("frame")["islands"]["island-1"]["lives"] == 2, "it is back", 60)
            frame = page.data("frame")
            row = next(row for row in reversed(frame["rounds"]) if row[5] is not None)
            explained = page.data(f"version/{row[1]}/{row[5]}")
            assert {each["island"] for each in explained["contributors"]} <= {"island-0", "island-1"}
            assert frame["present"]["leaders"]["0"]["epoch"] == 1
            with pytest.raises(HTTPError, match="404"):
                page.data("version/0/99999")
        up.signal(signal.SIGINT)
        up.wait()
    with dashboard(run_dir) as page:  # the run was stopped
        wait_for(lambda: page.data("frame")["changes"] >= frame["changes"], "its history", 20)
        assert page.data("frame")["run"] == frame["run"]
        assert page.data("frame")["phase"] == "stopped"
        assert {each["state"] for each in page.data("frame")["islands"].values()} <= {"stopped", "left"}
        assert b"page/dashboard.js" in page.ask("")
        assert b"uPlot" in page.ask("page/vendor/uplot.js")
    done = subprocess.run(
        [sys.executable, "-m", "ops", "plot", str(run_dir)], capture_output=True, text=True, check=True
    )
    report = (run_dir / "report.html").read_text(encoding="utf-8")
    assert done.stdout.strip() == str(run_dir / "report.html")
    assert "src=" not in report
    assert frame["run"] in report


def test_up_serves_the_page_with_the_run_and_leaves_it_as_one_file(tmp_path):
    port = free_ports(1)
    with Up(tmp_path / "run", "--islands", 1, "--tokens", 6000, "--pace", 0.05, "--dashboard", port) as up:

        def page():
            try:
                with urlopen(f"http://127.0.0.1:{port}/frame", timeout=5) as answer:
                    return json.loads(answer.read())
            except OSError:
                return None

        wait_for(lambda: (frame := page()) and frame["run"], "the page", 60)
        assert up.wait() == 0, up.err
    assert page() is None
    assert "island-0" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


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
