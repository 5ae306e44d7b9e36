"""``init`` writes files that every command takes as they are, and a fleet trains by them."""

import contextlib
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from aggregator.interface.config import AggregatorConfig
from broker.base import sources
from broker.base.settings import settings_of
from broker.gateway.config import BrokerConfig
from islands.interface.config import IslandConfig
from ops import cli
from ops.init import HUB_FILE
from ops.processes.cluster import free_ports
from tests.local_run import NUMPY_TASK, ROOT, Process, environment

pytestmark = pytest.mark.timeout(180)
WAIT_S = 120.0


def init(capsys, *words):
    status = cli.main(["init", *map(str, words)])
    return status, *capsys.readouterr()


def test_a_fleet_trains_by_the_files_as_they_are(tmp_path, capsys):
    fleet = tmp_path / "fleet"
    port = free_ports(2)
    words = [fleet, "--port", port, "--keys", "--regions", "paris", "rome"]
    status, out, _ = init(capsys, *words)
    assert status == 0
    said = [
        re.split(r" -m ops |/ops |^ *atoll ", line)[1].partition("#")[0].split()
        for line in out.splitlines()
        if " --config " in line or "keys init" in line
    ]
    nowhere = f"redis://127.0.0.1:{free_ports(1)}"
    with contextlib.ExitStack() as stack:

        def start(number, *words):
            folder = tmp_path / f"{words[0]}-{number}"
            return stack.enter_context(Process(folder, *words, cwd=fleet, REDIS_URL=nowhere))

        keys, hub, *regions = said
        assert [each[0] for each in said] == ["keys", "hub", "island", "island"]
        assert start(0, *keys).wait() == 0
        hub = start(0, *hub, "--tokens", "400000")
        islands = [start(number, *island, "--task", NUMPY_TASK) for number, island in enumerate(regions)]
        for each in (*islands, hub):
            assert each.wait(WAIT_S) == 0, each.err
    assert (fleet / "runs" / "fleet" / "store").is_dir()
    assert {each.name for each in fleet.iterdir()} >= {"state-paris", "state-rome"}


#: Where each daemon's arguments are added, and its settings.
DAEMONS = {
    "broker": ("broker.server", BrokerConfig),
    "aggregator": ("aggregator.daemon", AggregatorConfig),
    "island": ("islands.daemon", IslandConfig),
}


def loads(name, file):
    """The settings of a daemon, as its command reads them."""
    parser = cli.parser_of(name)
    module, cls = DAEMONS[name]
    importlib.import_module(module).add_arguments(parser)
    return sources.load(cls, parser.parse_args(["--config", str(file)]), name, environment={})


@pytest.mark.parametrize("hub", ["127.0.0.1", "hub.example.com"])
@pytest.mark.parametrize("keys", ["--keys", "--no-keys"])
def test_each_command_takes_the_hubs_file(tmp_path, capsys, hub, keys):
    assert init(capsys, tmp_path, "--hub", hub, keys, "--run", "demo")[0] == 0
    assert cli.main(["up", "--config", str(tmp_path / HUB_FILE), "--explain-settings"]) == 0
    for name in ("broker", "aggregator"):
        loaded = loads(name, tmp_path / HUB_FILE)
        assert loaded.run_id == "demo"
        assert (loaded.key is not None) == (keys == "--keys")
    for each in (HUB_FILE, "one.toml", "two.toml"):
        assert loads("island", tmp_path / each).run_id == "demo"
    capsys.readouterr()


def test_every_commented_setting_can_be_taken_in(tmp_path, capsys):
    assert init(capsys, tmp_path, "--hub", "hub.example.com", "--regions", "paris")[0] == 0
    for name in (HUB_FILE, "paris.toml"):
        text = (tmp_path / name).read_text()
        opened = re.sub(r"^# (?=[a-z_]+ = )", "", text, flags=re.MULTILINE)
        assert opened.count("\n# ") < text.count("\n# ")
        (tmp_path / name).write_text(
            opened.replace("standby = false", "standby = true").replace("failover = false", "failover = true")
        )
        assert set(tomllib.loads(opened)) == set(sources.read_file(tmp_path / name))
        loads("island", tmp_path / name)
    for daemon in ("broker", "aggregator"):
        loads(daemon, tmp_path / HUB_FILE)
    known = [each for _, cls in DAEMONS.values() for each in settings_of(cls) if each.flag is None]
    written = {table: set(values) for table, values in sources.read_file(tmp_path / HUB_FILE).items()}
    assert {each.name for each in known} <= set().union(*written.values())
    assert {"heartbeat_interval_s", "max_message_bytes"} <= written["run"]
    assert ("hold" in written["recipe"], "tape_segments" in written["aggregator"]) == (True, True)


def test_the_commands_that_it_says_work_where_it_says(tmp_path, capsys):
    status, out, _ = init(capsys, tmp_path / "a fleet", "--hub", "hub.example.com", "--regions", "paris", "rome")
    assert status == 0
    cd, keys, *_, paris, _ = (line.strip() for line in out.splitlines() if line.startswith("  "))
    script = f"{cd} && {keys} && {paris.partition('#')[0]} --check"
    ours = environment(PYTHONPATH="", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(["sh", "-c", script], env=ours, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert paris.endswith("# in paris, in a folder with paris.toml, keys/island-paris.secret, keys/broker.public")


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "two.toml").write_text("mine")
    status, _, err = init(capsys, tmp_path)
    assert status == 2
    assert "two.toml" in err
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"two.toml": "mine"}


@pytest.mark.parametrize(
    "words",
    [
        ("--regions", "a", "a"),
        ("--regions", "atoll"),
        ("--regions", "aggregator"),
        ("--regions", "a b"),
        ("--hub", "a hub"),
        ("--port", "65535"),
        ("--run", "a b"),
    ],
)
def test_what_no_fleet_can_be_is_refused_before_a_file_is_written(tmp_path, capsys, words):
    status, _, err = init(capsys, tmp_path, *words)
    assert status == 2
    assert err.startswith("atoll: ")
    assert list(tmp_path.iterdir()) == []


def test_the_example_of_the_help_is_refused_nowhere(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert init(capsys, *cli.COMMANDS["init"].example.split())[0] == 0
    assert set(os.listdir(tmp_path / "fleet")) == {HUB_FILE, "paris.toml", "rome.toml"}
    assert str(ROOT) not in (tmp_path / "fleet" / HUB_FILE).read_text()
