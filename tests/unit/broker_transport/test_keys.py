"""Whose a key is and what its holder may say; key files, and where a process must have one."""

import re
import stat

import pytest
import zmq
from zmq.utils import z85

from broker.base.errors import ConfigError, Unavailable
from broker.gateway.gate import zap_answer
from broker.gateway.turns import said_of
from broker.transport.keys import (
    ALLOW_LIST,
    client_keys,
    new_pair,
    others_may_read,
    own_name,
    read_allow_list,
    read_secret,
    write_pair,
)
from broker.wire.addresses import check_exposure, is_local
from broker.wire.identity import ANY, Identity, KeyRole, format_line, parse_allow_list, parse_line
from broker.wire.messages import AGGREGATOR, BROKER
from islands.interface.config import IslandConfig
from ops import cli
from ops.keys import make_missing

PARIS = Identity(role=KeyRole.ISLAND, name="paris")
ANYONE = Identity(role=KeyRole.ISLAND, name=ANY)
LEADER = Identity(role=KeyRole.AGGREGATOR, name="a")
WATCHER = Identity(role=KeyRole.OBSERVER, name="o")
HUB = Identity(role=KeyRole.BROKER, name="broker")
# Fixed, since they stand in the names of tests: parallel workers must agree on these.
KEY, OTHER_KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID", "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


@pytest.mark.parametrize(
    ("identity", "may", "may_not"),
    [
        (PARIS, ["paris", "join:n"], ["rome", AGGREGATOR, BROKER, "standby:paris"]),
        (ANYONE, ["paris", "rome", "join:n"], [AGGREGATOR, BROKER, "standby:a"]),
        (LEADER, [AGGREGATOR, "standby:a"], ["a", "paris", "join:n", BROKER]),
        (WATCHER, [], ["o", "paris", AGGREGATOR, BROKER, "join:n"]),
        (HUB, [], [BROKER, AGGREGATOR, "paris", "join:n"]),
    ],
    ids=str,
)
def test_a_key_speaks_for_its_holder_alone(identity, may, may_not):
    assert [sender for sender in may + may_not if identity.may_speak_as(sender)] == may


def test_an_island_joins_under_the_name_of_its_key_and_none_has_an_address_of_others():
    asked = ("paris", "rome", "", AGGREGATOR, "join:n")
    assert [name for name in asked if PARIS.may_be(name)] == ["paris"]
    assert [name for name in asked if ANYONE.may_be(name)] == ["paris", "rome", ""]
    assert not LEADER.may_be("a")
    with pytest.raises(ConfigError):
        Identity(role=KeyRole.AGGREGATOR, name=ANY)
    with pytest.raises(ConfigError, match="an address of others"):
        Identity(role=KeyRole.ISLAND, name=AGGREGATOR)


def test_lines_and_lists_come_back_as_they_were_written():
    for identity in (PARIS, ANYONE, LEADER, HUB):
        assert parse_line(format_line(identity, KEY), field="x") == (identity, KEY)
    text = f"# who\n\n  {format_line(PARIS, KEY)}\n{format_line(LEADER, OTHER_KEY)}\n"
    assert parse_allow_list(text) == {KEY: PARIS, OTHER_KEY: LEADER}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("island paris", "line 2 .*2 words"),
        (f"captain paris {KEY}", "line 2 .*must begin with a role"),
        (f"island pa/ris {KEY}", "line 2 .*'pa/ris'.*must be 1 to 64"),
        (f"island broker {KEY}", "line 2 .*an address of others"),
        ("island paris short", "line 2 .*must be 40 characters of z85"),
        (f"island paris {KEY[:-1]}~", "line 2 .*must be 40 characters of z85"),
        (f"island rome {OTHER_KEY}", "line 2 .*one key, one identity"),
    ],
)
def test_a_line_that_is_none_or_of_a_key_that_is_another_s_is_refused_by_number_and_without_the_key(line, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_allow_list(f"{format_line(LEADER, OTHER_KEY)}\n{line}\n")
    assert KEY[:-1] not in str(caught.value)
    assert OTHER_KEY not in str(caught.value)


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_pair_is_two_files_and_the_secret_one_is_its_holder_s(tmp_path):
    pair, folder = new_pair(PARIS), tmp_path / "deep" / "keys"
    secret, public = write_pair(folder, pair)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert read_secret(secret) == pair
    assert public.read_text() == f"island paris {pair.public}\n"
    assert pair.secret not in public.read_text() + repr(pair)
    with pytest.raises(ConfigError, match="is there already"):
        write_pair(folder, new_pair(PARIS))
    assert read_secret(secret) == pair
    with pytest.raises(ConfigError, match=r"dir = '.*public'"):
        write_pair(public, pair)


def test_a_secret_that_others_may_read_is_refused_with_the_cure(tmp_path):
    secret, public = write_pair(tmp_path, new_pair(PARIS))
    public.chmod(0o600)
    with pytest.raises(ConfigError, match=r"name the \.secret file"):
        read_secret(public)
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(secret)


def test_a_group_may_read_a_secret_of_root_s_and_no_other():
    """As of a Secret of Kubernetes, mounted for a group."""
    for mode, owner, reader in ((0o600, 1000, 1000), (0o400, 1000, 1000), (0o440, 0, 10001), (0o640, 0, 10001)):
        assert not others_may_read(mode, owner, reader)
    for mode, owner, reader in ((0o640, 1000, 1000), (0o660, 0, 10001), (0o444, 0, 10001), (0o440, 0, 0)):
        assert others_may_read(mode, owner, reader)
    assert others_may_read(0o440, owner=1001, reader=10001)


def test_half_a_pair_stands_in_nobodys_way(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("broker.transport.keys.format_line", full)
        with pytest.raises(Unavailable, match="No space left"):
            write_pair(tmp_path, new_pair(PARIS))
    assert list(tmp_path.iterdir()) == []
    write_pair(tmp_path, new_pair(PARIS))


def test_a_client_has_the_name_of_its_key_and_needs_one_of_its_role_and_the_broker_s_public_one(tmp_path):
    make_missing(tmp_path, [HUB, PARIS, ANYONE, LEADER])
    paris = tmp_path / "island-paris.secret"
    assert client_keys(paris, KeyRole.ISLAND).broker_public == read_secret(tmp_path / "broker.secret").public
    assert client_keys(None, KeyRole.ISLAND) is None
    assert [own_name(each) for each in (paris, tmp_path / "islands.secret", None)] == ["paris", "", ""]
    with pytest.raises(ConfigError, match="is the key of aggregator a"):
        client_keys(tmp_path / "aggregator-a.secret", KeyRole.ISLAND)
    (tmp_path / "broker.public").unlink()
    with pytest.raises(ConfigError, match=r"broker\.public.*cannot be read.*copy it from where"):
        client_keys(paris, KeyRole.ISLAND)


def test_this_machine_is_known_by_the_form_of_the_address():
    here = ("tcp://127.0.0.1:7001", "tcp://127.8.9.1:1", "tcp://[::1]:7001", "tcp://localhost:7001", "ipc:///run/x")
    assert all(map(is_local, (*here, "127.0.0.1", "::1", "localhost")))
    elsewhere = ("tcp://hub:7001", "tcp://10.0.0.1:7001", "tcp://[fe80::1%eth0]:7001", "tcp://localhost.evil.org:7001")
    assert not any(map(is_local, (*elsewhere, "0.0.0.0", "::", "hub", "")))


def test_outside_this_machine_keys_are_the_rule(tmp_path):
    with pytest.raises(ConfigError, match=r"broker = 'tcp://hub:7001'"):
        IslandConfig(broker="tcp://hub:7001")
    assert IslandConfig(broker="tcp://hub:7001", insecure=True)
    assert IslandConfig(broker="tcp://hub:7001", key=tmp_path / "x.secret")
    with pytest.raises(ConfigError, match="contradicts"):
        check_exposure("tcp://hub:1", setting="broker", key=tmp_path, insecure=True, role=KeyRole.ISLAND)


OURS = z85.decode(KEY.encode())


def question(*credentials, mechanism=b"CURVE"):
    return [b"route", b"", b"1.0", b"7", b"atoll", b"10.0.0.9", b"", mechanism, *credentials]


def test_zap_says_yes_to_keys_on_the_list_and_names_them_and_without_keys_to_whoever_speaks_without():
    yes = [b"route", b"", b"1.0", b"7", b"200", b"OK"]
    assert zap_answer(question(OURS), {KEY: PARIS}) == [*yes, KEY.encode(), b""]
    assert zap_answer(question(mechanism=b"NULL"), None) == [*yes, b"", b""]
    assert zap_answer([b"route", b"noise"], {}) is None


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        (question(z85.decode(OTHER_KEY.encode())), PARIS),
        (question(), PARIS),
        (question(b"short"), PARIS),
        (question(OURS, b"more"), PARIS),
        (question(mechanism=b"NULL"), PARIS),
        (question(b"user", b"password", mechanism=b"PLAIN"), PARIS),
        (question(OURS, mechanism=b"NULL"), PARIS),
        (question(OURS), HUB),
        (question(b"user", b"password", mechanism=b"PLAIN"), None),
    ],
)
def test_zap_says_no_to_everything_else(asked, allowed):
    assert zap_answer(asked, allowed and {KEY: allowed})[4] == b"400"


def test_of_a_frame_whose_peer_zeromq_knows_nothing_of_nothing_is_said():
    frame = zmq.Frame(b"from ZMTP 1.0")
    assert [said_of(frame, name) for name in (zmq.SRCFD, "User-Id", "Peer-Address")] == [None, None, None]


# --- the command ----------------------------------------------------------------------------------------------------


def test_keys_are_made_listed_allowed_and_revoked(tmp_path, capsys):
    hub, away = tmp_path / "hub", tmp_path / "far away"

    def keys(*words, folder=hub):
        assert cli.main(["keys", *words, "--dir", str(folder)]) == 0
        return capsys.readouterr().out

    for words in (["broker"], ["aggregator"], ["island", "paris"]):
        keys("new", *words)
    assert "atoll keys allow island-rome.public" in keys("new", "island", "rome", folder=away)
    (away / "island-rome.secret").chmod(0o644)
    with pytest.raises(ConfigError, match=re.escape(f"chmod 600 '{away / 'island-rome.secret'}'")):
        read_secret(away / "island-rome.secret")
    assert not (away / ALLOW_LIST).exists()
    keys("allow", str(away / "island-rome.public"))
    allowed = sorted(map(str, read_allow_list(hub / ALLOW_LIST).values()))
    assert allowed == ["aggregator aggregator", "island paris", "island rome"]
    keys("revoke", "island", "paris")
    listed = [line.split()[:2] for line in keys("list").splitlines()]
    assert listed == [["aggregator", "aggregator"], ["island", "rome"]]
    secrets = [path.read_text().split()[2] for path in (*hub.glob("*.secret"), *away.glob("*.secret"))]
    assert not any(secret in (hub / ALLOW_LIST).read_text() for secret in secrets)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["new", "captain"], "must be one of broker, aggregator, island, observer"),
        (["new", "island"], "must be its id"),
        (["new", "island", "a b"], "must be 1 to 64"),
        (["new", "broker", "hub"], "all brokers of a run have one pair"),
        (["revoke", "island", "rome"], "is not in"),
        (["allow", "missing.public"], "cannot be read"),
        (["allow", "{dir}/broker.public"], "told to clients, not allowed"),
        (["allow", "{dir}/copy.public"], "one key, one identity"),
    ],
)
def test_what_cannot_be_done_with_keys_is_said(tmp_path, capsys, words, complaint):
    make_missing(tmp_path, [HUB, PARIS])
    (tmp_path / "copy.public").write_text((tmp_path / "island-paris.public").read_text().replace("paris", "rome"))
    assert cli.main(["keys", *(word.format(dir=tmp_path) for word in words), "--dir", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err


def test_what_a_whole_run_needs_is_made_once_and_who_was_revoked_does_not_come_back_unasked(tmp_path, capsys):
    def keys(*words):
        assert cli.main(["keys", *words, "--dir", str(tmp_path)]) == 0
        return capsys.readouterr().out

    def files():
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    init = ("init", "aggregator", "island:*")
    keys(*init)
    made = files()
    stems = ("broker", "aggregator", "islands")
    assert made.keys() == {ALLOW_LIST} | {f"{stem}.{half}" for stem in stems for half in ("secret", "public")}
    assert "there already" in keys(*init)
    assert files() == made
    keys("revoke", "aggregator")
    public = tmp_path / "aggregator.public"
    assert f"aggregator: not allowed; to change that, atoll keys allow {public}" in keys(*init)
    assert LEADER.role not in {each.role for each in read_allow_list(tmp_path / ALLOW_LIST).values()}
    keys("allow", str(public))
    assert "not allowed" not in keys(*init)
