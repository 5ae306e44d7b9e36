"""``up`` and ``status`` as a stranger meets them: two runs side by side, each of real processes, to their ends."""

import contextlib
import json
import signal
import socket
import subprocess
import tomllib

import numpy as np
import pytest
from safetensors.numpy import load_file

from broker.wire.messages import RECIPE
from ops import cli
from ops.processes.cluster import free_ports, wait_until_listening
from ops.processes.redis_server import server
from tests.local_run import (
    Process,
    Up,
    check_ranges,
    check_report,
    check_versions,
    end_by_signal,
    ops,
    wait_for,
)

pytestmark = pytest.mark.timeout(180)

TOKENS = 20_000
ISLANDS = {f"island-{i}" for i in range(4)}


class Runs:
    """A run with JSON, and one that repeats it by its configuration; at the same time.

    None says which ports to take. The first starts a Redis of its own, the other takes one that is there already.
    """

    def __init__(self, folder):
        steady = ("--islands", 4, "--tokens", TOKENS, "--pace", 0.02)
        with Up(folder / "first", *steady, "--json") as first:
            wait_for((folder / "first" / "config.toml").exists, "configuration")
            config = ("--config", folder / "first" / "config.toml")
            with (
                a_redis(folder) as url,
                Up(folder / "again", *config, task=None, REDIS_URL=url) as again,
            ):
                self.exits = [up.wait() for up in (first, again)]
                self.shared = ops("status", again.run_dir, "--json")
        self.first, self.again = first, again
        self.after = ops("status", folder / "first", "--json")
        self.after_text = ops("status", folder / "first").stdout


@contextlib.contextmanager
def a_redis(folder):
    """Yields the address of a Redis that belongs to nobody's run."""
    port = free_ports(1)
    found = server(port=port, directory=folder)
    with subprocess.Popen(found.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as redis:
        try:
            assert wait_until_listening(port)
            yield found.url
        finally:
            redis.kill()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


def test_runs_side_by_side_end_by_themselves(runs):
    assert runs.exits == [0, 0], (runs.first.err, runs.again.err)
    for up in (runs.first, runs.again):
        report = up.report()
        check_report(report)
        check_versions(up.ledger())
        check_ranges(up.ledger())
        assert report["exit"] == 0
        assert report["phase"] == "ended"
        assert report["refusals"] == {}
        assert tuple(report["recipe"]) == RECIPE


def test_the_report_has_everything_that_was_promised(runs):
    report = runs.first.report()
    assert report["loss"]["after"] <= 0.6 * report["loss"]["before"]
    assert report["tokens"].keys() == {"trained", "merged", "in_flight", "wasted"}
    assert report["tokens"]["trained"] >= TOKENS
    assert report["tokens"]["wasted"] == {}
    assert set(report["versions"]) == {"0", "1", "2", "3"}
    assert all(1 <= int(contributors) <= 4 for contributors in report["rounds"])
    assert 0 < report["participation"] <= 1
    assert report["islands"].keys() == ISLANDS
    for island in report["islands"].values():
        assert island["tokens"] == 64 * island["inner_steps"] > 0
        assert 0 <= island["sync_share"] < 1
        assert island["bytes_up"] > 0
        assert island["bytes_down"] > 0
        assert island["restarts"] == 0
    assert report["wall_s"] > report["first_step_s"] > 0


def test_json_is_the_last_line_of_standard_output_and_progress_is_elsewhere(runs):
    assert json.loads(runs.first.out) == runs.first.report()
    assert runs.first.out.count("\n") == 1
    assert "merged" in runs.first.err  # a line every few seconds: a short run may have just the first one


def test_the_run_directory_holds_what_was_promised(runs):
    run_dir = runs.first.run_dir
    for name in ("config.toml", "events.jsonl", "report.json", "store", "model.safetensors", "logs"):
        assert (run_dir / name).exists(), name
    model = load_file(run_dir / "model.safetensors")
    assert {name: tensor.shape for name, tensor in model.items()} == {
        "hidden/bias": (64,),
        "hidden/weight": (32, 64),
        "output/bias": (16,),
        "output/weight": (64, 16),
    }
    assert all(np.isfinite(tensor).all() for tensor in model.values())


def test_the_tape_agrees_with_the_ledger(runs):
    ledger = {(row["fragment_id"], row["fragment_version"]): row["digest"] for row in runs.first.ledger()}
    committed = {(note["fragment"], note["version"]): note["digest"] for note in runs.first.notes("version.committed")}
    assert {key: digest for key, digest in ledger.items() if key[1] > 0} == committed


def test_a_run_is_repeated_from_its_configuration(runs):
    def settings(up):
        tables = tomllib.loads((up.run_dir / "config.toml").read_text())
        places = {
            "run": ("run_id", "broker", "redis_url"),
            "broker": ("port",),
            "aggregator": ("store", "tape", "report"),
        }
        return {
            name: {k: v for k, v in table.items() if k not in places.get(name, ())} for name, table in tables.items()
        }

    assert settings(runs.again) == settings(runs.first)
    assert runs.again.report()["loss"]["before"] == runs.first.report()["loss"]["before"]


def tells_all(text):
    """Whether the third status has come, and the last one has steps of two islands and a version of each fragment."""
    if text.count("\n") < 3:
        return False
    last = json.loads(text[: text.rindex("\n")].splitlines()[-1])
    steps = [each["inner_step"] for each in last["islands"].values()]
    merged = [each["version"] for each in last["fragments"].values()]
    return len(steps) == 2 and any(steps) and len(merged) == 4 and all(merged) and "phase" in last["totals"]


def test_a_setting_that_islands_alone_can_judge_ends_up_as_any_wrong_setting(tmp_path):
    # A module that any task may be in, for all that its source tells.
    asked = ops("up", "--run-dir", tmp_path / "run", "--task", "os.path:tusk", "--islands", 1)
    assert asked.returncode == 2
    told = "island-0 ended with status 2: its settings are wrong: atoll: task = 'os.path:tusk': module "
    log = tmp_path / "run" / "logs" / "island-0.log"
    assert told in asked.stderr
    assert f"(all of it in {log}); the end of {log}:" in asked.stderr
    assert told in asked.stdout, "and in the report"
    assert json.loads((tmp_path / "run" / "report.json").read_text())["exit"] == 2


# --- status ---------------------------------------------------------------------------------------------------------


def test_status_tells_of_a_live_run_from_other_processes_until_sigterm_ends_it(tmp_path):
    with Up(tmp_path / "run", "--islands", 2, "--tokens", 10_000_000, "--pace", 0.02, "--json") as up:
        up.wait_for_progress()
        with Process(tmp_path / "watch", "status", up.run_dir, "--json", "--watch", "0.1") as watch:
            # Redis hears of a version a little after the disk, and of the islands from somebody else.
            wait_for(
                lambda: tells_all(watch.out), "status with everything in it", evidence=lambda: watch.err + watch.out
            )
            seen = [json.loads(line) for line in watch.out.splitlines(keepends=True) if line.endswith("\n")]
        text = ops("status", up.run_dir).stdout
        end_by_signal(up, signal.SIGTERM, up.signal)
    assert json.loads(ops("status", up.run_dir, "--json").stdout)["totals"]["phase"] == "stopped"
    assert len(seen) >= 3
    status = seen[-1]
    assert status.keys() == {"islands", "fragments", "totals", "brokers", "shards", "evaluation"}
    assert status["islands"].keys() == {"island-0", "island-1"}
    for island in status["islands"].values():
        assert island["state"] in ("alive", "suspect")
        assert {"inner_step", "tokens", "loss", "step_time_s", "last_seen_s"} <= island.keys()
    assert any(island["inner_step"] > 0 for island in status["islands"].values())
    assert set(status["fragments"]) == {"0", "1", "2", "3"}
    for fragment in status["fragments"].values():
        assert fragment["age_s"] >= 0
        assert {"island-0", "island-1"} >= set(fragment["contributors"]) > set()
    assert status["totals"]["phase"] == "running"
    trained = [status["totals"]["trained_tokens"] for status in seen]
    assert trained == sorted(trained)
    assert "run run: " in text
    assert "; running " in text
    assert "contributors" in text


def test_status_of_a_finished_run_is_how_it_ended(runs):
    assert runs.after.returncode == 0, runs.after.stderr
    after, report = json.loads(runs.after.stdout), runs.first.report()
    assert {island["state"] for island in after["islands"].values()} == {"left"}
    assert {name: each["inner_step"] for name, each in after["islands"].items()} == {
        name: each["inner_steps"] for name, each in report["islands"].items()
    }
    assert {p: each["version"] for p, each in after["fragments"].items()} == report["versions"]
    assert after["totals"]["trained_tokens"] == report["tokens"]["trained"]
    assert after["totals"]["merged_tokens"] == report["tokens"]["merged"]
    assert after["totals"]["phase"] == "ended"
    assert "run first: 4 left; ended" in runs.after_text


def test_status_of_a_run_in_a_redis_of_others_is_its_own(runs):
    assert runs.shared.returncode == 0, runs.shared.stderr
    status, report = json.loads(runs.shared.stdout), runs.again.report()
    assert {p: each["version"] for p, each in status["fragments"].items()} == report["versions"]
    assert status["totals"]["trained_tokens"] == report["tokens"]["trained"]
    assert not (runs.again.run_dir / "logs" / "redis.log").exists()


# --- what cannot work -----------------------------------------------------------------------------------------------


@pytest.fixture
def refused(capsys, monkeypatch):
    """Calls a command that must be refused with status 2 before anything starts; returns its one line."""
    monkeypatch.delenv("REDIS_URL", raising=False)

    def call(*arguments):
        assert cli.main([str(word) for word in arguments]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1, said.err
        return said.err

    return call


def test_a_port_in_use_is_refused_before_anything_starts(refused, tmp_path):
    with socket.create_server(("127.0.0.1", free_ports(2))) as taken:
        port = taken.getsockname()[1]
        for wanted in (port, port - 1):  # the bulk port is the next one
            line = refused("up", "--port", wanted, "--run-dir", tmp_path / "run")
            assert f"port = {wanted}" in line
            assert "or 0 for free ones" in line
    assert not (tmp_path / "run").exists()
