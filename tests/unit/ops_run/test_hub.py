"""What ``hub`` settles before it starts anything: its directory, keys, address and processes, and what it refuses."""

import argparse
import os
import re
from pathlib import Path

import pytest

from broker.base.errors import ConfigError
from broker.transport.keys import ALLOW_LIST, read_allow_list
from broker.wire.identity import Identity, KeyRole
from ops import keys
from ops.run import daemons, hub, prepare, resume, up
from ops.run.local_run import LocalRun
from tests.unit.ops_run.test_resume import in_a_process


class Notes:
    """Stands for the display."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """A folder of one's own, and no other Redis."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REDIS_URL", raising=False)


def prepared(*words):
    """Prepares a hub on free ports, and lets its directory go."""
    parser = argparse.ArgumentParser(epilog="")
    hub.add_arguments(parser)
    words = [str(word) for word in words]
    plan, goes_on, _ = prepare.prepare_hub(parser.parse_args(words if "--port" in words else [*words, "--port", "0"]))
    for descriptor in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{descriptor}") == str(plan.run_dir / "lock"):
            os.close(int(descriptor))
            break
    return plan, goes_on


def stems(directory):
    return {path.name for path in directory.glob("*.secret")}


def test_a_hub_is_a_broker_an_aggregator_and_standbys_with_keys_and_no_island():
    plan, goes_on = prepared("--run", "demo", "--standbys", 1, "--brokers", 2, "--host", "0.0.0.0", "--islands", 3)
    assert not goes_on
    assert plan.run_dir == Path("runs/demo").absolute()
    specs = daemons.processes(plan, environment={}, island_environment={})
    assert [each.name for each in specs] == ["broker-0", "broker-1", "aggregator", "standby-1"]
    assert plan.aggregator.failover
    assert (plan.broker.host, plan.aggregator.islands, plan.aggregator.total_tokens) == ("0.0.0.0", 3, 0)
    assert all(each.startswith("tcp://127.0.0.1:") for each in plan.aggregator.brokers)
    ports = [each.rpartition(":")[2] for each in plan.aggregator.brokers]
    assert [each.rpartition(":")[2] for each in plan.address.split(",")] == ports
    assert "127.0.0.1" not in plan.address
    assert stems(plan.keys_dir) == {"broker.secret", "aggregator.secret", "islands.secret"}


def test_it_goes_on_with_settings_name_port_and_keys_of_before():
    before, _ = prepared("--run", "demo", "--islands", 3, "--address", "tcp://hub.example.com:7001", "--tokens", 9)
    secrets = {path: path.read_text() for path in before.keys_dir.iterdir()}
    for words in (("--run-dir", "runs/demo"), ("--run", "demo", "--tokens", 10, "--host", "0.0.0.0")):
        again, goes_on = prepared(*words)
        assert goes_on
        assert (again.run_id, again.aggregator.islands, again.broker.port) == ("demo", 3, before.broker.port)
        assert again.address == "tcp://hub.example.com:7001"
        assert {path: path.read_text() for path in before.keys_dir.iterdir()} == secrets
    assert (again.aggregator.total_tokens, again.broker.host) == (10, "0.0.0.0")


def test_a_start_that_was_cut_off_before_a_key_was_allowed_is_made_up_for():
    directory = Path("runs/demo/keys")
    keys.make_missing(directory, [Identity(role=KeyRole.AGGREGATOR, name="aggregator")])  # no broker yet: not allowed
    plan, _ = prepared("--run", "demo")
    assert len(read_allow_list(plan.keys_dir / ALLOW_LIST)) == 2


def test_keys_that_were_brought_are_used_and_revoked_ones_stay_out():
    own = [Identity(role=KeyRole.BROKER, name="broker"), Identity(role=KeyRole.ISLAND, name="paris")]
    keys.make_missing(Path("mine"), own)
    plan, _ = prepared("--run", "demo", "--key-dir", "mine")
    assert stems(plan.keys_dir) == {"broker.secret", "aggregator.secret", "island-paris.secret"}  # none for a group
    assert plan.broker.key == Path("mine/broker.secret").absolute()
    (Path("mine") / ALLOW_LIST).write_text("")
    Path("mine/islands.secret").touch()
    prepared("--run", "demo")
    assert read_allow_list(Path("mine") / ALLOW_LIST) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "run_id = None: is needed: give --run NAME"),
        (("--run", "a b"), "run_id = 'a b'"),
        (("--run-dir", "strange"), "has notes.txt in it, and no run of a hub"),
        (("--run-dir", "strange/notes.txt"), "is a file"),
        (("--run", "x", "--shards", "auto"), "shards = 'auto'"),
        (("--run", "x", "--key-dir", "k", "--no-keys"), "contradicts --no-keys"),
        (("--run", "x", "--address", "hub"), "address = 'hub': must be tcp://HOST:PORT"),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_written(words, said):
    Path("strange").mkdir()
    Path("strange/notes.txt").touch()
    with pytest.raises(ConfigError, match=re.escape(said)):
        prepared(*words)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--run", "other", "--run-dir", "runs/demo"), "is not the run in .*, which is demo"),
        (("--run", "demo", "--islands", 5), "islands = '5': the run in .* has 4: leave it out, or start another run"),
        (("--run", "demo", "--standbys", 1), "standbys = '1'"),
    ],
)
def test_what_contradicts_the_run_in_the_directory_is_refused(words, said):
    plan, _ = prepared("--run", "demo")
    before = plan.config_file.read_bytes()
    with pytest.raises(ConfigError, match=said):
        prepared(*words)
    assert plan.config_file.read_bytes() == before


def test_up_and_hub_refuse_the_directories_of_each_other(monkeypatch, tmp_path):
    prepared("--run", "demo")
    parser = argparse.ArgumentParser(epilog="")
    up.add_arguments(parser)
    with pytest.raises(ConfigError, match="is the directory of a hub: go on with `atoll hub --run-dir` there"):
        resume.directory_of(parser.parse_args(["--resume", "runs/demo"]))
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    with in_a_process(tmp_path / "mine"):
        pass
    with pytest.raises(ConfigError, match="is the directory of a run of `up`: go on with `atoll up --resume"):
        prepared("--run-dir", "mine")


def test_without_a_redis_server_a_hub_goes_on_and_one_with_standbys_is_refused(monkeypatch):
    monkeypatch.setattr("ops.run.prepare.find_server", lambda: None)
    monkeypatch.setattr("ops.run.local_run.find_server", lambda: None)
    with pytest.raises(ConfigError, match="standbys = 1: needs Redis, and no server was found"):
        prepared("--run", "demo", "--standbys", 1)
    plan, _ = prepared("--run", "demo")
    run, notes = LocalRun(plan=plan, started_s=0.0), Notes()
    run._start_redis(None, notes)
    assert not run.has_status
    assert "the run goes on without status" in notes.lines[0]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), ["--key", "{dir}/keys/islands.secret"]),
        (("--no-keys", "--host", "0.0.0.0"), ["--insecure"]),
        (("--no-keys",), []),
    ],
)
def test_it_says_what_islands_dial_and_the_command_that_starts_one(words, shown):
    plan, _ = prepared("--run", "demo", *words)
    notes = Notes()
    LocalRun(plan=plan, started_s=0.0)._tell_islands(plan, notes)
    assert (plan.run_dir / "hub.address").read_text() == f"{plan.address}\n"
    command = ["atoll island --run demo --broker", plan.address, *(each.format(dir=plan.run_dir) for each in shown)]
    assert notes.lines[1] == " ".join(command)
