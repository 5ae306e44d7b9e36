"""``hub`` with a standby and two islands: each process is killed, then the hub itself, and it goes on to its end."""

import json
import os
import signal
import subprocess
import sys

import pytest

from ops.processes.cluster import free_ports
from tests.local_run import (
    NUMPY_TASK,
    PATIENCE_S,
    ROOT,
    Process,
    RunFiles,
    check_invariants,
    check_report,
    descendants,
    environment,
    is_alive,
    json_lines,
    ops,
    wait_for,
)
from tests.recorded.recording import said, status_of

pytestmark = [pytest.mark.timeout(400), pytest.mark.full("starts a hub three times, and kills each of its processes")]

#: Tokens to train after the last start.
MORE = 20_000
#: What a process is found by among those below the hub.
MARKS = {"redis": "-server 127.0.0.1:", "broker": " ops broker ", "aggregator": " ops aggregator "}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Kills Redis, broker and aggregators, then the hub; ends it by SIGTERM; and has it train its tokens."""
    folder = tmp_path_factory.mktemp("hub")
    run = RunFiles(folder / "run")
    words = ["hub", "--run", "demo", "--run-dir", run.run_dir, "--port", 0, "--islands", 2, "--standbys", 1, "--json"]
    words += ["--fragments", 2, "--sync-interval", 8]
    seen = {"run": run}
    with Process(folder / "first", *words) as first:
        address = wait_for(lambda: _text(run, "hub.address"), "address", evidence=lambda: first.err).strip()
        keys = _keys(run)
        again = ops(*words)
        seen["second"] = [again.returncode, again.stderr]
        with _island(folder, run, address, "one") as one, _island(folder, run, address, "two") as two:
            islands = {"one": one, "two": two}
            _progress(run, first)
            for name in MARKS:
                for pid in _below(first, name):
                    os.kill(pid, signal.SIGKILL)
                wait_for(lambda name=name: _below(first, name), f"new {name}", evidence=lambda: first.err)
                _progress(run, first)
            below = descendants(first.pid)
            first.signal(signal.SIGKILL)
            assert first.wait() == -signal.SIGKILL
            with Process(folder / "second", *words) as second:
                _progress(run, second)
                seen["left"] = [line for pid, line in below.items() if is_alive(pid)]
                seen["same"] = [_text(run, "hub.address").strip() == address, _keys(run) == keys]
                below = descendants(second.pid)
                second.signal(signal.SIGTERM)
                seen["terminated"] = second.wait()
                seen["left"] += [line for pid, line in below.items() if is_alive(pid)]
            ended = {name: (run.run_dir / "logs" / f"{name}.log").stat().st_mtime for name in MARKS}
            seen["order"] = sorted(MARKS, key=ended.get)
            trained = run.report()["tokens"]["trained"]
            with Process(folder / "third", *words, "--tokens", trained + MORE) as third:
                seen["exit"] = third.wait()
                seen["islands"] = {name: [each.wait(), each.err] for name, each in islands.items()}
            seen |= {"err": first.err, "resumed": second.err, "last": third.err, "out": third.out}
    return seen


def _island(folder, run, address, name):
    key = run.run_dir / "keys" / "islands.secret"
    words = ["--run", "demo", "--broker", address, "--key", key, "--island-id", name, "--state-dir", folder / name]
    return Process(folder / f"{name}-output", "island", *words, "--task", NUMPY_TASK, "--pace", 0.02)


def _text(run, name):
    path = run.run_dir / name
    return path.read_text() if path.exists() else ""


def _keys(run):
    return {path.name: path.read_text() for path in (run.run_dir / "keys").iterdir()}


def _below(process, name):
    """Returns the ids of what the hub has started under a name, once it has become that."""
    return [
        pid for pid, line in descendants(process.pid).items() if "child.py" not in line and MARKS[name] in f"{line} "
    ]


def _rows(run):
    """Returns the ledgers of both stores."""
    return [row for store in ("store", "standby-1/store") for row in json_lines(run.run_dir / store / "ledger.jsonl")]


def _progress(run, process):
    """Returns when both fragments have got two versions more, in whichever store."""

    def versions():
        rows = _rows(run)
        return {p: max((row["fragment_version"] for row in rows if row["fragment_id"] == p), default=0) for p in (0, 1)}

    before = versions()

    def reached():
        assert process.is_running(), process.err
        return all(version >= before[p] + 2 for p, version in versions().items())

    wait_for(reached, f"versions after {before}", evidence=lambda: process.err)


def test_it_trains_its_tokens_whichever_process_is_killed(hub):
    assert hub["exit"] == 0, hub["last"]
    report = json.loads(hub["out"])
    assert report == hub["run"].report()
    check_report(report)
    assert report["tokens"]["merged"] >= 0.95 * report["tokens"]["trained"]
    assert report["islands"].keys() == {"one", "two"}
    assert {name: status for name, (status, _) in hub["islands"].items()} == {"one": 0, "two": 0}, hub["islands"]
    for name in ("redis", "broker", "aggregator", "standby-1"):
        assert f"{name} was killed by signal 9" in hub["err"]
    check_invariants(hub["run"].run_dir)


def test_nothing_outlives_a_hub_that_is_killed_and_it_goes_on_with_run_address_and_keys(hub):
    assert hub["left"] == []
    assert hub["same"] == [True, True]
    assert "run demo goes on in" in hub["resumed"]


def test_it_ends_in_order_when_it_is_told(hub):
    assert hub["terminated"] == 128 + signal.SIGTERM
    assert hub["order"] == ["aggregator", "broker", "redis"]


def test_a_second_hub_of_a_directory_is_refused(hub):
    status, err = hub["second"]
    assert status == 2
    assert f"run_dir = '{hub['run'].run_dir}': is in use by process " in err


def test_what_looks_at_a_run_looks_at_that_of_a_hub(hub):
    run_dir = hub["run"].run_dir
    assert status_of(run_dir)["totals"]["phase"] == "ended"
    assert "run demo" in said("export", run_dir)
    assert "version 1 of fragment 0" in said("explain", "0:1", run_dir)
    assert "the replay agrees with the tape" in said("replay", run_dir)
    assert said("plot", run_dir)


def test_the_job_of_slurm_ends_its_hub_and_is_queued_again_when_it_is_told_to_end(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, script in (("squeue", "echo RUNNING"), ("scontrol", f'echo "$@" >> {tmp_path}/asked')):
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    home = tmp_path / "home"
    variables = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "ATOLL_CHECKOUT": str(ROOT),
        "ATOLL_HOME": str(home),
        "ATOLL_PORT": str(free_ports(2)),
        "ATOLL_PYTHON": sys.executable,
        "ATOLL_FLAGS": "--quorum 2",
    }
    script = ROOT / "deploy" / "slurm" / "hub.sbatch"
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(["bash", script], env=environment(**variables), stdout=log, stderr=log) as job,
    ):
        try:
            wait_for((home / "events.jsonl").exists, "aggregator", evidence=(tmp_path / "log").read_text)
            below = descendants(job.pid)
            job.send_signal(signal.SIGTERM)
            assert job.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            for pid in descendants(job.pid):
                os.kill(pid, signal.SIGKILL)
            job.kill()
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert [line for pid, line in below.items() if is_alive(pid)] == []
    assert (home / "keys" / "islands.secret").exists()
    assert (home / "hub.address").read_text().endswith(f":{variables['ATOLL_PORT']}\n")
