"""``up`` and ``status`` as a stranger meets them: a run to its end, its repetition, what is refused."""

import json
import os
import signal
import socket
import tomllib

import numpy as np
import pytest
from safetensors.numpy import load_file

from broker.wire.messages import RECIPE
from ops import cli
from ops.processes.cluster import free_ports
from tests.local_run import ROOT, Up, check_invariants, check_report, ops
from tests.recorded.plain import TOKENS
from tests.recorded.recording import said, status_of

pytestmark = pytest.mark.timeout(180)

ISLANDS = {"island-0", "island-1"}


def check_run(up):
    """What holds of every run that ended by itself."""
    report = up.report()
    check_report(report)
    check_invariants(up.run_dir)
    assert (report["exit"], report["phase"], report["refusals"]) == (0, "ended", {})
    assert tuple(report["recipe"]) == RECIPE


def test_the_report_has_everything_that_was_promised(plain):
    assert plain.seen["exit"] == 0, plain.err
    check_run(plain)
    report = plain.report()
    assert report["loss"]["after"] <= 0.6 * report["loss"]["before"]
    assert report["tokens"].keys() == {"trained", "merged", "in_flight", "wasted"}
    assert report["tokens"]["trained"] >= TOKENS
    assert report["tokens"]["wasted"] == {}
    assert set(report["versions"]) == {"0", "1", "2", "3"}
    assert all(1 <= int(contributors) <= 2 for contributors in report["rounds"])
    assert 0 < report["participation"] <= 1
    assert report["islands"].keys() == ISLANDS
    for island in report["islands"].values():
        assert island["tokens"] == 64 * island["inner_steps"] > 0
        assert 0 <= island["sync_share"] < 1
        assert min(island["bytes_up"], island["bytes_down"]) > 0
        assert island["restarts"] == 0
    assert report["wall_s"] > report["first_step_s"] > 0


def test_json_is_the_last_line_of_standard_output_and_progress_is_elsewhere(plain):
    assert json.loads(plain.out) == plain.report()
    assert plain.out.count("\n") == 1
    assert "merged" in plain.err  # a line every few seconds: a short run may have just the first one


def test_the_run_directory_holds_what_was_promised(plain):
    for name in ("config.toml", "events.jsonl", "report.json", "store", "model.safetensors", "logs"):
        assert (plain.run_dir / name).exists(), name
    model = load_file(plain.run_dir / "model.safetensors")
    assert {name: tensor.shape for name, tensor in model.items()} == {
        "hidden/bias": (64,),
        "hidden/weight": (32, 64),
        "output/bias": (16,),
        "output/weight": (64, 16),
    }
    assert all(np.isfinite(tensor).all() for tensor in model.values())


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_tells_of_a_live_run_from_other_processes(plain):
    seen, text = plain.seen["statuses"], plain.seen["status"]
    assert len(seen) >= 3
    status = seen[-1]
    assert status.keys() == {"islands", "fragments", "totals", "brokers", "shards", "evaluation"}
    assert status["islands"].keys() == ISLANDS
    for island in status["islands"].values():
        assert island["state"] in ("alive", "suspect")
        assert {"inner_step", "tokens", "loss", "step_time_s", "last_seen_s"} <= island.keys()
    assert any(island["inner_step"] > 0 for island in status["islands"].values())
    assert set(status["fragments"]) == {"0", "1", "2", "3"}
    for fragment in status["fragments"].values():
        assert fragment["age_s"] >= 0
        assert ISLANDS >= set(fragment["contributors"]) > set()
    assert status["totals"]["phase"] == "running"
    trained = [status["totals"]["trained_tokens"] for status in seen]
    assert trained == sorted(trained)
    assert "run run: " in text
    assert "; running " in text
    assert "contributors" in text


def test_status_of_a_finished_run_is_how_it_ended(plain):
    after, report = status_of(plain.run_dir), plain.report()
    assert {island["state"] for island in after["islands"].values()} == {"left"}
    assert {name: each["inner_step"] for name, each in after["islands"].items()} == {
        name: each["inner_steps"] for name, each in report["islands"].items()
    }
    assert {p: each["version"] for p, each in after["fragments"].items()} == report["versions"]
    assert after["totals"]["trained_tokens"] == report["tokens"]["trained"]
    assert after["totals"]["merged_tokens"] == report["tokens"]["merged"]
    assert after["totals"]["phase"] == "ended"
    assert "run run: 2 left; ended" in said("status", plain.run_dir)


def test_status_of_a_run_that_was_interrupted_says_so(watched):
    assert status_of(watched.run_dir)["totals"]["phase"] == "stopped"
    assert watched.seen["report"]["islands"].keys() == ISLANDS
    assert watched.seen["report"]["resume"].endswith(f" up --resume {watched.run_dir}")
    assert json.loads((watched.run_dir / "metrics.json").read_text()) == []  # nobody is to look for what has ended


# --- once more --------------------------------------------------------------------------------------------------------


def settings(up):
    """The configuration of a run without the places that are its own."""
    tables = tomllib.loads((up.run_dir / "config.toml").read_text())
    places = {
        "run": ("run_id", "broker", "redis_url"),
        "up": ("dashboard", "metrics"),
        "broker": ("port",),
        "aggregator": ("store", "tape", "report"),
    }
    return {name: {k: v for k, v in table.items() if k not in places.get(name, ())} for name, table in tables.items()}


def test_a_run_is_repeated_by_its_configuration_in_a_redis_of_others_and_its_aggregator_comes_back(
    plain, tmp_path, server
):
    """It has its collector of traces no more, and somebody ends its aggregator: neither costs anything."""
    views = ("--dashboard", free_ports(1), "--metrics", free_ports(4))
    config = ("--config", plain.run_dir / "config.toml", *views, "--json")
    path = f"{plain.folder}{os.pathsep}{ROOT}"
    with Up(tmp_path / "again", *config, task=None, REDIS_URL=server.url, PYTHONPATH=path) as again:
        again.wait_for_progress()
        again.restarted("aggregator", again.kill("aggregator", signal.SIGTERM))
        assert again.wait() == 0, again.err
        status = status_of(again.run_dir)
    assert "aggregator ended with status 143" in again.err
    check_run(again)
    report = again.report()
    assert settings(again) == settings(plain)
    assert report["loss"]["before"] == plain.report()["loss"]["before"]
    assert report["tokens"]["merged"] >= TOKENS
    assert {p: each["version"] for p, each in status["fragments"].items()} == report["versions"]
    assert status["totals"]["trained_tokens"] == report["tokens"]["trained"]
    assert not (again.run_dir / "logs" / "redis.log").exists()


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
