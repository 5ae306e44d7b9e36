"""What ``up --resume`` takes from a run directory, and what it refuses to change, without starting anything."""

import argparse
import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from broker.base.errors import ConfigError, Unavailable
from ops.run import local_plan, resume, up
from ops.run import prepare as preparing
from ops.run.prepare import prepare

ROOT = Path(__file__).parents[3]


def parsed(*words):
    parser = argparse.ArgumentParser(epilog="")
    up.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


@pytest.fixture(autouse=True)
def no_redis(monkeypatch):
    """A Redis that does not answer: none is looked for on this machine, and none has a run of the same name."""
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The directory of a run that was started and stopped at once, for copies."""
    run_dir = tmp_path_factory.mktemp("prepared") / "demo"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("REDIS_URL", "redis://127.0.0.1:1")
        with in_a_process(run_dir, "--islands", "3", "--tokens", "1000", "--task-option", "batch=8"):
            pass
    return run_dir


@pytest.fixture
def a_run(prepared, tmp_path):
    """A directory of such a run of one's own."""
    run_dir = tmp_path / "demo"
    shutil.copytree(prepared, run_dir)
    config = run_dir / "config.toml"
    config.write_text(config.read_text().replace(str(prepared), str(run_dir)))
    return run_dir


#: Run with the flags of ``up``: prepares a run and holds its directory until its standard input ends.
PREPARE = """
import argparse, sys
from ops.run import up
from ops.run.prepare import prepare
parser = argparse.ArgumentParser()
up.add_arguments(parser)
prepare(parser.parse_args(sys.argv[1:]))
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def in_a_process(run_dir, *words):
    """Another process that prepared a run and holds its directory."""
    command = [sys.executable, "-c", PREPARE, "--run-dir", str(run_dir), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


@pytest.mark.parametrize(("asked", "port"), [(0, 12_345), (6379, 6379)])
def test_a_redis_of_the_run_takes_no_well_known_port_unless_it_is_asked_for(monkeypatch, asked, port):
    monkeypatch.setattr(preparing, "are_free", lambda ports: True)
    monkeypatch.setattr(preparing, "free_ports", lambda count: 12_345)
    assert preparing._redis_port(asked) == port


def test_a_resumed_run_has_the_settings_the_name_and_the_port_of_before(a_run):
    assert (a_run / "config.toml").stat().st_mode & 0o777 == 0o600  # options of the task may be secret
    plan = prepare(parsed("--resume", a_run))
    assert (plan.run_id, plan.aggregator.islands, plan.aggregator.total_tokens) == ("demo", 3, 1000)
    assert plan.task == {"batch": 8}
    assert plan.aggregator.store == a_run / "store"
    assert plan.broker.port == resume.stored_port(a_run)


def test_what_may_change_changes_and_stands_in_the_file_afterwards(a_run):
    devices = ("--platform", "cpu", "--devices-per-island", 2)
    evaluation = ("--evaluate-every", "2K", "--benchmark", "math:sqrt")
    changes = ("--tokens", 5000, "--pace", "0.1", "--record-payloads", *evaluation, *devices)
    plan = prepare(parsed("--resume", a_run, *changes))
    assert (plan.aggregator.total_tokens, plan.up.pace) == (5000, (0.1,))
    asked = argparse.Namespace(config=plan.config_file)
    again = local_plan.resolve(asked, run_dir=a_run, port=7001, redis_url="", redis_port=None)
    assert again.aggregator.total_tokens == 5000
    assert again.aggregator.record_payloads
    assert (again.up.platform, again.up.devices_per_island) == ("cpu", 2)
    assert (again.up.evaluate_every, again.up.benchmark) == (2000, ("math:sqrt",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--islands", 4), "islands = '4'"),
        (("--outer-momentum", 0.5), "outer_momentum = '0.5'"),
        (("--task-option", "batch=9"), "task.batch = '9'"),
        (("--task-option", "context=2"), "task.context = '2'"),
        (("--config", "other.toml"), "config = 'other.toml': does not go with --resume"),
        (("--run-dir", "other"), "run_dir = 'other'"),
    ],
)
def test_flags_that_contradict_the_run_are_refused_and_nothing_is_written(a_run, words, said):
    before = (a_run / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=said):
        prepare(parsed("--resume", a_run, *words))
    assert (a_run / "config.toml").read_bytes() == before


@pytest.mark.parametrize("left", ["", '[run]\nrun_id = "demo"\n', None])
def test_a_run_that_lost_its_settings_does_not_go_on_as_another_one(a_run, left):
    config = a_run / "config.toml"
    text = config.read_text().replace('run_id = "demo"', "") if left is None else left
    config.write_text(text)
    with pytest.raises(ConfigError, match=r"has lost its settings.*restore its config\.toml"):
        prepare(parsed("--resume", a_run))
    assert config.read_text() == text


def test_an_address_that_is_none_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("REDIS_URL", "localhost:6379")
    with pytest.raises(ConfigError, match=r"redis_url = .*write redis://HOST:PORT"):
        prepare(parsed("--run-dir", tmp_path / "demo"))
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (("--run-dir", "new", "--brokers", 2, "--port", 65534), ConfigError, "port = 65534"),
        (("--run-dir", "\udcff"), Unavailable, "choose paths that are UTF-8"),
        (("--run-dir", "file"), ConfigError, "run_dir = '.*file'"),
        (("--resume", "empty"), ConfigError, "must be the directory of a run that `up` started"),
    ],
)
def test_a_directory_or_port_that_cannot_be_is_refused(tmp_path, words, error, said):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    flag, folder, *others = words
    with pytest.raises(error, match=said):
        prepare(parsed(flag, f"{tmp_path}/{folder}", *others))


def test_a_directory_in_use_is_refused_and_free_as_soon_as_its_process_is_gone(tmp_path):
    run_dir = tmp_path / "demo"
    with in_a_process(run_dir) as other, pytest.raises(ConfigError, match=f"in use by process {other.pid}"):
        prepare(parsed("--resume", run_dir))
    prepare(parsed("--resume", run_dir))


def test_a_run_that_has_ended_asks_for_more_tokens(a_run):
    (a_run / "aggregator-report.json").write_text('{"phase": "ended", "tokens": {"trained": 1064}}')
    (a_run / "report.json").write_text('{"exit": 0}')
    with pytest.raises(ConfigError, match=r"trained 1064 and ended: to go on, give more, such as --tokens 2128"):
        prepare(parsed("--resume", a_run))
    plan = prepare(parsed("--resume", a_run, "--tokens", 2000))
    assert not resume.has_ended(plan)
    assert (a_run / "report-1.json").read_text() == '{"exit": 0}'
    assert not (a_run / "report.json").exists()
