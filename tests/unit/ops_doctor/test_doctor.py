"""The doctor's judgements: verdicts, and that each but an "ok" has a cure."""

import argparse
import json
from pathlib import Path

import pytest

from broker.base.errors import ConfigError
from broker.wire.messages import PROTOCOL_VERSION
from ops.doctor import command, machine_probe, redis_probe
from ops.findings import broker_findings, machine_findings
from ops.findings.broker_findings import BrokerSeen, LinkSeen, PortState
from ops.findings.finding import Verdict, exit_status, failure, ok, summary, to_json, warning

OK, WARNING, FAILURE = Verdict.OK, Verdict.WARNING, Verdict.FAILURE


def python(**changes):
    usual = {"version": (3, 12, 1), "system": "Linux", "machine": "x86_64", "processors": 4, "missing": ()}
    return machine_findings.python(**(usual | {"curve": True, "release": "1.0", "fault": None} | changes))


def disk(**changes):
    return machine_findings.disk("runs", **({"free_bytes": 1 << 40, "bytes_per_s": 6e8, "fsync_s": 0.001} | changes))


JUDGED = [
    (python(), OK),
    (python(version=(3, 10, 9)), FAILURE),
    (python(fault=("ops has ops", "pip uninstall ops")), FAILURE),
    (python(system="Darwin"), FAILURE),
    (python(missing=("zmq",)), FAILURE),
    (python(curve=False), FAILURE),
    (machine_findings.jax("0.10", "gpu", ("H100", "H100")), OK),
    (machine_findings.jax("0.10", "cpu", ("cpu",)), OK),
    (machine_findings.jax("0.10", "cpu", ("cpu",), hardware="NVIDIA GPU"), WARNING),
    (machine_findings.jax("0.10", "cpu", ("cpu",), hardware="NVIDIA GPU", chosen="cpu"), OK),
    (machine_findings.silent_jax("ModuleNotFoundError: No module named 'jax'"), FAILURE),
    (machine_findings.silent_jax("it did not find its devices within 11 s", late=True), WARNING),
    (machine_findings.clock_apart("Redis", 0.9, 0.0), OK),
    (machine_findings.clock_apart("Redis", -1.2, 0.3), OK),
    (machine_findings.clock_apart("Redis", -1.2, 0.1), WARNING),
    (machine_findings.open_files(1 << 20, 10_000), OK),
    (machine_findings.open_files(1024, 10_000), OK),
    (machine_findings.open_files(256, 10_000), WARNING),
    (disk(), OK),
    (machine_probe.look_at_disk(Path("/proc")), FAILURE),
    (disk(free_bytes=1 << 20), FAILURE),
    (disk(free_bytes=1 << 30), WARNING),
    (disk(fsync_s=0.2), WARNING),
    (disk(bytes_per_s=6e6), WARNING),
]


@pytest.mark.parametrize(("finding", "verdict"), JUDGED)
def test_what_was_seen_of_a_machine_is_judged(finding, verdict):
    assert finding.verdict is verdict
    assert finding.seen
    assert finding.cure or finding.verdict is OK


GOOD = LinkSeen(round_trips_s=(0.02, 0.03, 0.5), up_bits_per_s=1e9, down_bits_per_s=8e8, clock_offset_s=0.01)


def broker(link=GOOD, **changes):
    usual = {
        "address": "tcp://hub:7001",
        "control": PortState.OPEN,
        "bulk": PortState.OPEN,
        "protocol": PROTOCOL_VERSION,
    }
    usual |= {"release": "1.0", "run": "demo", "link": link}
    return broker_findings.judge(BrokerSeen(**(usual | changes)), own_release="1.0")


def the(subject, findings):
    (found,) = [each for each in findings if each.subject == subject]
    return found


def test_a_good_broker_is_told_of_with_its_way_version_and_clock():
    found = broker(asked_run="demo")
    assert [each.subject for each in found] == ["broker", "version", "round trip", "bandwidth", "clock"]
    assert {each.verdict for each in found} == {OK}
    bandwidth = "1.0 Gbit/s up, 800 Mbit/s down; 100 M parameters as bf16 take 1.6 s and 2.0 s"
    assert the("bandwidth", found).seen == bandwidth


@pytest.mark.parametrize(("round_trip_s", "said"), [(0.02, False), (0.08, True)])
def test_a_connection_that_its_buffers_hold_back_is_told_of(round_trip_s, said):
    link = LinkSeen(round_trips_s=(round_trip_s,), up_bits_per_s=2e8, down_bits_per_s=3e8, buffer_bytes=4 << 20)
    bandwidth = the("bandwidth", broker(link))
    assert bandwidth.verdict is OK
    assert ("at most 419 Mbit/s at this round trip: `island --connections 4`" in bandwidth.seen) is said


@pytest.mark.parametrize("state", [each for each in PortState if each is not PortState.OPEN])
@pytest.mark.parametrize("port", ["control", "bulk"])
def test_a_port_that_does_not_open_is_the_only_failure_and_has_a_cure(port, state):
    (found,) = broker(**{port: state})
    assert found.verdict is FAILURE
    assert "hub:7001" in found.seen
    assert found.cure


@pytest.mark.parametrize(
    ("protocol", "where"), [(PROTOCOL_VERSION - 1, "broker's host"), (PROTOCOL_VERSION + 1, "this machine")]
)
def test_the_older_side_is_named_where_the_protocols_differ(protocol, where):
    _, found = broker(protocol=protocol, link=None)
    assert (found.subject, found.verdict) == ("version", FAILURE)
    assert where in found.cure


def test_a_release_that_speaks_the_same_protocol_may_be_another_one():
    found = the("version", broker(release="0.9.10"))
    assert found.verdict is OK
    assert "release 1.0 here, 0.9.10 there" in found.seen


@pytest.mark.parametrize(
    ("link", "subject"),
    [
        (LinkSeen(round_trips_s=(2.0,), up_bits_per_s=1e9, down_bits_per_s=1e9), "round trip"),
        (LinkSeen(round_trips_s=(0.1,), up_bits_per_s=1e6, down_bits_per_s=1e9), "bandwidth"),
        (LinkSeen(round_trips_s=(0.1,)), "bandwidth"),
        (LinkSeen(round_trips_s=(0.1,), up_bits_per_s=1e9, down_bits_per_s=1e9, clock_offset_s=-60.0), "clock"),
    ],
)
def test_a_poor_link_is_a_warning(link, subject):
    found = broker(link)
    assert [each.subject for each in found if each.verdict is not OK] == [subject]
    assert exit_status(found) == 0


def test_a_broker_that_says_nothing_and_one_of_another_run_are_failures():
    assert exit_status(broker(None, refused="wrong_key: no")) == 1
    assert exit_status(broker(asked_run="other")) == 1


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, OK),
        ({"denied": ("XADD",)}, FAILURE),
        ({"round_trip_s": 0.5}, WARNING),
        ({"evicts": "allkeys-lru"}, WARNING),
    ],
)
def test_a_redis_is_judged_by_rights_time_and_policy(changes, verdict):
    usual = {"server": "Redis 7", "denied": (), "round_trip_s": 0.001, "offset_s": 0.0, "runs": 2}
    found, clock = redis_probe.judge("redis://hub", **(usual | changes))
    assert (found.verdict, clock.verdict) == (verdict, OK)
    assert found.cure or verdict is OK


def test_the_exit_status_counts_failures_alone_and_the_last_line_says_how_many():
    fine, poor, bad = ok("a", "x"), warning("b", "y", "do"), failure("c", "z", "do")
    assert exit_status([fine, poor]) == 0
    assert exit_status([fine, poor, bad]) == 1
    assert summary([fine], 1.0) == "all is well: 1 findings in 1.0 s"
    assert summary([fine, poor, poor], 1.0) == "no failure, 2 warnings in 3 findings, after 1.0 s"
    assert summary([bad], 1.0) == "1 failure, no warnings in 1 findings, after 1.0 s"
    table = json.loads(json.dumps(to_json([fine, bad], 1.23456)))
    assert table["ok"] is False
    assert table["findings"][1] == {"subject": "c", "verdict": "failure", "seen": "z", "cure": "do"}


def asked(*words, **environment):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.resolve(parser.parse_args(words), environment)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path):
    file = tmp_path / "atoll.toml"
    file.write_text(
        '[run]\nrun_id = "demo"\nbroker = "tcp://file:7001"\nredis_url = "redis://file"\n[island]\nkey = "k.secret"\n'
    )
    of_file = asked("--config", str(file))
    assert (of_file.brokers, of_file.run, of_file.redis_url) == (("tcp://file:7001",), "demo", "redis://file")
    assert (of_file.key.name, of_file.redis_given) == ("k.secret", True)
    variables = {"ATOLL_BROKER": "tcp://env:7001", "REDIS_URL": "redis://env"}
    of_both = asked("--config", str(file), "--broker", "tcp://a:7001,tcp://b:7001", **variables)
    assert (of_both.brokers, of_both.redis_url) == (("tcp://a:7001", "tcp://b:7001"), "redis://env")
    assert asked().brokers == ()
    assert not asked().redis_given


@pytest.mark.parametrize(
    "words", ["--broker hub", "--skip disc", "--redis http://hub", "--config /nowhere.toml", "--run ~"]
)
def test_a_wrong_flag_is_refused_before_anything_is_looked_at(words):
    with pytest.raises(ConfigError):
        asked(*words.split())
