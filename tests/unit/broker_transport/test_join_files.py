"""A join file has all that an island needs; whoever else may read it, or changes it, is told."""

import pytest

from broker.base.errors import ConfigError
from broker.transport.keys import JoinFile, client_keys, new_pair, own_name, read_allow_list
from broker.wire.identity import Identity, KeyRole
from ops.cli import main


def made(tmp_path, monkeypatch, *words):
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "init"]) == 0
    return main(["keys", "new", "island", "paris", *words])


def test_it_is_a_key_and_a_place_and_its_holder_is_let_in(tmp_path, monkeypatch):
    assert made(tmp_path, monkeypatch, "--run", "demo", "--dir", "keys", "--join", "hub.example.com") == 0
    path = tmp_path / "paris.join"
    assert path.stat().st_mode & 0o777 == 0o600
    file = JoinFile.read(path)
    assert (file.run_id, file.broker) == ("demo", "tcp://hub.example.com:7001")
    assert own_name(path) == "paris"
    assert client_keys(path, KeyRole.ISLAND) == file.keys
    assert read_allow_list(tmp_path / "keys" / "allowed.keys")[file.keys.own.public].name == "paris"
    with pytest.raises(ConfigError, match="needs one of the role observer"):
        client_keys(path, KeyRole.OBSERVER)


@pytest.mark.parametrize(
    ("host", "broker"),
    [
        ("hub:9000", "tcp://hub:9000"),
        ("tcp://a:7001,tcp://b:7003", "tcp://a:7001,tcp://b:7003"),
        ("127.0.0.1", "tcp://127.0.0.1:7011,tcp://127.0.0.1:7013"),  # the ports of the hub's run
    ],
)
def test_its_address_is_the_host_with_the_ports_of_the_hub(tmp_path, monkeypatch, host, broker):
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "hub.address").write_text("tcp://x:7011,tcp://x:7013")
    assert made(tmp_path, monkeypatch, "--run", "demo", "--dir", "keys", "--join", host) == 0
    assert JoinFile.read(tmp_path / "paris.join").broker == broker


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--join", "hub", "--dir", "keys"), "run = None: is needed with --join"),
        (("--join", "hub", "--run", "none"), "run = 'none': has no keys in runs/none/keys: start its hub first"),
        (("--join", "tcp://hub", "--run", "d", "--dir", "keys"), "join = 'tcp://hub'"),
        (("--join", "hub", "--run", "d", "--dir", "other"), "cannot be read"),
    ],
)
def test_what_is_missing_is_said_before_a_key_is_made(tmp_path, monkeypatch, capsys, words, said):
    (tmp_path / "other").mkdir()
    assert made(tmp_path, monkeypatch, *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "paris.join").exists()


def test_an_open_file_a_foreign_one_and_one_that_is_there_are_refused(tmp_path):
    path, other = tmp_path / "paris.join", tmp_path / "x.join"
    pair = new_pair(Identity(role=KeyRole.ISLAND, name="paris"))
    keys = client_keys_of(pair)
    JoinFile(run_id="demo", broker="tcp://hub:7001", keys=keys).write(path)
    with pytest.raises(ConfigError, match="is there already"):
        JoinFile(run_id="demo", broker="tcp://hub:7001", keys=keys).write(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"may be read by others: chmod 600 .*paris.join"):
        JoinFile.read(path)
    with pytest.raises(ConfigError, match=r"make it on the hub, with `atoll keys new island NAME"):
        JoinFile.read(other)
    other.write_text("run demo\n")
    other.chmod(0o600)
    with pytest.raises(ConfigError, match="is no join file: make one on the hub"):
        JoinFile.read(other)


def client_keys_of(pair):
    from broker.transport.keys import ClientKeys

    return ClientKeys(own=pair, broker_public=new_pair(Identity(role=KeyRole.BROKER, name="broker")).public)
